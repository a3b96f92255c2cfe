"""Nested training state on disk, that of all random number generators included.

Tensors go through torch's distributed checkpoint in safetensors form, the rest is JSON.

Distributed checkpoint's own metadata file is a pickle, and it reads stored non-tensor objects by unpickling. Limbeck
reads no pickle, so it uses distributed checkpoint's safetensors storage, which carries all it needs in the safetensors
headers, and keeps everything that is no tensor in ``state.json``. Sharded tensors (DTensor) are stored as the shards
they are; loading into another layout re-shards them.
"""

from __future__ import annotations

import base64
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from limbeck.distributed.comm import Comm
from limbeck.errors import CheckpointError, one_line
from limbeck.utils.files import write_atomic

JSON_NAME = "state.json"
FORMAT = 1


class _Packer:
    """Walks a tree once; tensors get a name that depends only on their place in the tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def name(self, path: tuple[str, ...]) -> str:
        base = "/".join(path) or "root"
        name, n = base, 1
        # a key may hold a slash: a/b is also b inside of a
        while name in self.tensors:
            n += 1
            name = f"{base}#{n}"
        return name

    def pack(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            name = self.name(path)
            self.tensors[name] = value.detach()
            return {"$tensor": name}
        if isinstance(value, np.ndarray):
            name = self.name(path)
            # from_numpy refuses negative strides
            self.tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
            return {"$array": name}
        if isinstance(value, np.generic):
            return self.pack(value.item(), path)
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return {"$float": repr(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, tuple):
            return {"$tuple": [self.pack(v, (*path, str(i))) for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [self.pack(v, (*path, str(i))) for i, v in enumerate(value)]
        if isinstance(value, dict):
            return self._pack_dict(value, path)
        raise CheckpointError(
            f"state {'.'.join(path) or 'root'!r} is a {type(value).__name__}, which a checkpoint cannot hold; "
            "turn it into numbers, strings, lists, dicts or tensors"
        )

    def _pack_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        # a key that begins with $ would be read as one of our tags
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: self.pack(v, (*path, k)) for k, v in value.items()}
        return {"$dict": [[self.pack(k, path), self.pack(v, (*path, str(k)))] for k, v in value.items()]}


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$tensor":
            return tensors[content]
        if tag == "$array":
            return tensors[content].numpy()
        if tag == "$float":
            return float(content)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag == "$tuple":
            return tuple(_unpack(v, tensors) for v in content)
        if tag == "$dict":
            return {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
    return {k: _unpack(v, tensors) for k, v in value.items()}


def _own_storage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors that share no memory, as safetensors demands; sharded ones are left to their own writer."""
    out: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        # not isinstance: a DTensor is a Tensor as well
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            value = value.contiguous()
            pointer = value.untyped_storage().data_ptr()
            # empty tensors all have the pointer 0
            if pointer in seen and value.numel():
                value = value.clone()
            seen.add(pointer)
        out[name] = value
    return out


def _alone(local: bool) -> bool:
    return local or not (dist.is_available() and dist.is_initialized())


def _raise_inner(error: CheckpointException, what: str) -> None:
    """Distributed checkpoint wraps each rank's error; the first one is what the user needs to see."""
    first = next(iter(error.failures.values()), (error, None))[0] if error.failures else error
    if isinstance(first, OSError):
        raise first
    raise CheckpointError(f"{what} failed: {type(first).__name__}: {first}") from error


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Around the use of stored values, whose names, types and shapes may be anything: what does not fit is one
    sentence. ``where`` names them."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
        raise CheckpointError(
            f"{where} is damaged, or of another run ({type(e).__name__}: {one_line(e)}); take another checkpoint"
        ) from e


def save_state(folder: str | Path, tree: Any, *, local: bool = False) -> None:
    """Store a nested state in ``folder``, which must not hold another one.

    ``tree``: dicts, lists, tuples, numbers, strings, bytes, None, numpy arrays and tensors. Under torch.distributed
    this is a collective call and every rank passes its part (DTensors: its shards; plain tensors: the same values);
    with ``local=True`` the calling process alone writes its own state.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    packer = _Packer()
    packed = packer.pack(tree, ())
    alone = _alone(local)
    if packer.tensors:
        tensors = _own_storage(packer.tensors)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
                dcp.save(tensors, storage_writer=writer, no_dist=alone)
        except CheckpointException as e:
            _raise_inner(e, f"writing state to {str(folder)!r}")
    # behind the tensors: a state that a kill cut short has no head and is not read
    if alone or Comm.world().rank == 0:
        head = {"format": FORMAT, "tensors": sorted(packer.tensors), "tree": packed}
        write_atomic(folder / JSON_NAME, json.dumps(head, ensure_ascii=False))


def load_state(folder: str | Path, *, template: Any = None, local: bool = False) -> Any:
    """Read a state that ``save_state`` stored.

    ``template``: a tree like the stored one; its tensors (DTensors above all) are filled in place and returned, so that
    a sharded state arrives sharded. Without it, full tensors are made on the CPU.
    """
    folder = Path(folder)
    try:
        head = json.loads((folder / JSON_NAME).read_bytes())
        names, packed, version = [str(name) for name in head["tensors"]], head["tree"], head["format"]
    except FileNotFoundError as e:
        raise CheckpointError(f"no state in {str(folder)!r} ({JSON_NAME} is missing); take another checkpoint") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CheckpointError(f"{str(folder / JSON_NAME)!r} is damaged ({e}); take another checkpoint") from e
    if version != FORMAT:
        raise CheckpointError(f"{str(folder)!r} has state format {version}, this version reads {FORMAT}")
    alike: dict[str, torch.Tensor] = {}
    if template is not None:
        packer = _Packer()
        packer.pack(template, ())
        alike = packer.tensors
    tensors = _load_tensors(folder, names, alike, _alone(local)) if names else {}
    with fitting(f"the state {str(folder / JSON_NAME)!r}"):
        return _unpack(packed, tensors)


def _load_tensors(
    folder: Path, names: list[str], alike: dict[str, torch.Tensor], alone: bool
) -> dict[str, torch.Tensor]:
    try:
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        missing = [n for n in names if n not in stored]
        if missing:
            raise CheckpointError(f"{str(folder)!r} lacks {len(missing)} tensors, first {missing[0]!r}; it is damaged")
        target: dict[str, Any] = {}
        for name in names:
            meta: Any = stored[name]
            target[name] = alike[name] if name in alike else torch.empty(meta.size, dtype=meta.properties.dtype)
            if tuple(target[name].shape) != tuple(meta.size):
                raise CheckpointError(
                    f"stored tensor {name!r} has shape {tuple(meta.size)}, this run needs {tuple(target[name].shape)}; "
                    "resume with the configuration that wrote the checkpoint"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except CheckpointException as e:
        _raise_inner(e, f"reading state from {str(folder)!r}")
    except SafetensorError as e:
        raise CheckpointError(f"{str(folder)!r} holds a damaged safetensors file ({e}); take another one") from e
    return target


# ---- random number generators ----


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (CPU and every CUDA device)."""
    random.seed(seed)
    # numpy takes 32 bits and nothing below zero
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def capture_rng() -> dict[str, Any]:
    """The state of every generator, as plain values and tensors that `save_state` takes."""
    version, keys, gauss = random.getstate()
    name, np_keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "keys": torch.tensor(keys, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(np_keys).astype(np.int64)),
            "pos": int(pos),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to a captured state; CUDA states are used where there are as many devices as then."""
    try:
        py, nps = state["python"], state["numpy"]
        random.setstate((int(py["version"]), tuple(int(k) for k in py["keys"]), py["gauss"]))
        keys = nps["keys"].numpy().astype(np.uint32)
        np.random.set_state((nps["name"], keys, int(nps["pos"]), int(nps["has_gauss"]), float(nps["cached"])))
        torch.set_rng_state(state["torch"].to(torch.uint8))
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"the stored random state is not usable ({e}); take another checkpoint") from e
    cuda = state.get("cuda")
    if cuda is not None and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.to(torch.uint8) for s in cuda])
