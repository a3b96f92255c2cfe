"""Bytes of a teacher cache: header, record layout, document keys, size estimate.

A shard is ``magic (8 bytes) + length of the header (8 bytes, little endian) + JSON header + records``. A record is one
document, a run of plain little-endian arrays (see ``RecordLayout``) that starts on a multiple of 8 bytes:

    token ids      int32 [n]          the ids that the teacher scored
    next_logprob   float32 [n - 1]    log-probability of the token that came
    logsumexp      float32 [n - 1]    of the teacher's logits over its vocabulary
    then           topk ids [n - 1, k] and topk log-probs float16 [n - 1, k], or hidden states [n - 1, h]

Row t predicts token t + 1, so the last token has no row. A place of a top-k list may be empty (a server's token that
the tokenizer lacks): its id is -1, or 65535 in two bytes. Nothing in it is executable; a reader maps the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from limbeck.errors import CacheError
from limbeck.losses.signals import Head
from limbeck.utils.files import fsync_path

MAGIC = b"LIMBECK\1"
FORMAT = 1
MAX_HEADER = 1 << 20
HEADER_BYTES = 16 + MAX_HEADER
"""No header of a shard ends after this."""
ALIGN = 8
PREFIXES = (16, 64, 256, 1024, 4096, 16384)
KINDS = ("topk", "hidden")
EMPTY = 0xFFFF
HIDDEN_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class CacheSpec:
    """Content of a cache, and the teacher that it came from. All fields are compared when a cache is resumed or
    read."""

    kind: str
    """``topk``, or ``hidden`` (last hidden states; the head is stored beside the shards)."""
    vocab_size: int
    """Ids over which the log-probabilities are normalised."""
    teacher_fingerprint: str
    """Fingerprint of the teacher's tokenizer."""
    model_identity: dict[str, str] = field(default_factory=dict)
    """Hashes of the teacher's configuration and weights, or the name of a served model."""
    k: int = 0
    hidden_size: int = 0
    hidden_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CacheError(f"cache kind {self.kind!r} is unknown; use one of {list(KINDS)}")
        if self.vocab_size < 1:
            raise CacheError(f"a cache for a vocabulary of {self.vocab_size} tokens is not usable; give the real size")
        if self.kind == "topk" and not 1 <= self.k <= self.vocab_size:
            raise CacheError(f"a top-k cache with k = {self.k} is not usable; give 1 <= k <= {self.vocab_size}")
        if self.kind == "hidden" and (self.hidden_size < 1 or self.hidden_dtype not in HIDDEN_DTYPES):
            raise CacheError(
                f"a cache of hidden states of size {self.hidden_size} in {self.hidden_dtype!r} is not usable; "
                f"give a positive size and one of {list(HIDDEN_DTYPES)}"
            )

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Type of the stored top-k ids: two bytes where the vocabulary allows it, else four."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<i4")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any, where: str) -> CacheSpec:
        known = {f.name: f.type for f in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != set(known):
            raise CacheError(f"{where} does not describe a teacher cache (format {FORMAT}); it is damaged or foreign")
        for name, kind in known.items():
            want = {"str": str, "int": int}.get(str(kind), dict)
            if not isinstance(data[name], want) or isinstance(data[name], bool):
                raise CacheError(
                    f"{where}: {name} is {_short(data[name])}, expected {want.__name__}; the file is damaged"
                )
        return cls(**data)

    def check_same(self, other: CacheSpec, where: str) -> None:
        """Raise unless ``other`` (the present teacher and settings) is what the cache was made with."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                raise CacheError(
                    f"{where} was made with {f.name} = {_short(mine)}, this run has {_short(theirs)}; "
                    "make a new cache for the changed teacher or settings"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class RecordLayout:
    """Where the arrays of a document of n tokens lie inside its record."""

    def __init__(self, spec: CacheSpec, n: int) -> None:
        rows, self._spec = n - 1, spec
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
            ("ids", np.dtype("<i4"), (n,)),
            ("next_logprob", np.dtype("<f4"), (rows,)),
            ("logsumexp", np.dtype("<f4"), (rows,)),
        ]
        if spec.kind == "topk":
            parts.append(("topk_ids", spec.id_dtype, (rows, spec.k)))
            parts.append(("topk_logprobs", np.dtype("<f2"), (rows, spec.k)))
        else:
            parts.append(("hidden", np.dtype("<u2"), (rows, spec.hidden_size)))
        self.parts = parts

    @cached_property
    def payload(self) -> int:
        """Bytes of the arrays."""
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the record, with its padding."""
        return -(-self.payload // ALIGN) * ALIGN

    def pack(self, arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
        """The record; every array must have the layout's shape, and is converted to its type."""
        chunks = []
        for name, dtype, shape in self.parts:
            value = np.asarray(arrays[name])
            if value.shape != shape:
                raise CacheError(f"cache array {name} has shape {value.shape}, the document needs {shape}")
            if name == "topk_ids" and dtype.itemsize == 2:
                value = self._two_bytes(value)
            chunks.append(np.ascontiguousarray(value, dtype=dtype).tobytes())
        return b"".join(chunks).ljust(self.size, b"\0")

    def _two_bytes(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        empty = ids < 0
        if not empty.any():
            return ids
        if self._spec.vocab_size > EMPTY:
            raise CacheError(f"an empty place cannot be stored for a vocabulary of {self._spec.vocab_size} tokens")
        return np.where(empty, EMPTY, ids)

    def check_values(self, arrays: Mapping[str, npt.NDArray[Any]]) -> str | None:
        """Fault of the arrays of a record, as the writer would have refused it; None where nothing is."""
        for name, value in arrays.items():
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                return f"{name} holds numbers that are not finite"
        if self._spec.kind == "hidden":
            # infinities and NaN are the numbers with all bits of the exponent set
            exponent = 0x7F80 if self._spec.hidden_dtype == "bfloat16" else 0x7C00
            not_finite = (arrays["hidden"] & exponent == exponent).any()
            return "hidden holds numbers that are not finite" if not_finite else None
        ids = np.sort(arrays["topk_ids"], axis=1)
        empty = ids == (EMPTY if self._spec.id_dtype.itemsize == 2 and self._spec.vocab_size <= EMPTY else -1)
        beyond = ids[~empty & ((ids < 0) | (ids >= self._spec.vocab_size))]
        if beyond.size:
            return f"topk_ids holds {int(beyond[0])}, which is no id of a vocabulary of {self._spec.vocab_size}"
        twice = ids[:, 1:][(ids[:, 1:] == ids[:, :-1]) & ~empty[:, 1:]]
        return f"topk_ids holds {int(twice[0])} twice in a row" if twice.size else None

    def views(self, record: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Arrays of a record (``size`` bytes), without a copy."""
        out, offset = {}, 0
        for name, dtype, shape in self.parts:
            count = dtype.itemsize * math.prod(shape)
            out[name] = record[offset : offset + count].view(dtype).reshape(shape)
            offset += count
        return out


def estimate_bytes(
    tokens: int,
    k: int | None = None,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
) -> int:
    """Bytes that a cache of ``tokens`` positions takes: top-k (``k``) or hidden states (``hidden_size``).

    ``vocab_size``: teacher vocabulary; up to 65,536 ids take two bytes each, otherwise (and by default) four.
    """
    if (k is None) == (hidden_size is None):
        raise CacheError(f"give either k or hidden_size to estimate a cache, got k={k}, hidden_size={hidden_size}")
    if k is not None:
        id_bytes = 2 if vocab_size is not None and vocab_size <= 1 << 16 else 4
        per_token = 12 + k * (id_bytes + 2)
    else:
        per_token = 12 + 2 * int(hidden_size or 0)
    return tokens * per_token


def document_key(ids: npt.ArrayLike) -> str:
    """Key of a document: a hash of the teacher's token ids."""
    # one type for all: the key must not depend on that of the caller's array, nor on the machine
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()[:32]


def prefix_keys(ids: npt.NDArray[Any]) -> list[str]:
    """Short hashes of the document's prefixes of 16, 64, 256, ... tokens, to find it again when it is cut shorter."""
    return [document_key(ids[:n])[:16] for n in PREFIXES if n <= len(ids)]


def pack_header(spec: CacheSpec, version: str) -> bytes:
    """Magic, length and JSON header of a shard, padded to a multiple of 8 bytes."""
    text = json.dumps({"format": FORMAT, "limbeck": version, "spec": spec.to_dict()}, sort_keys=True).encode()
    text = text.ljust(-(-len(text) // ALIGN) * ALIGN)
    return MAGIC + struct.pack("<Q", len(text)) + text


def read_header(data: bytes | memoryview, where: str) -> tuple[CacheSpec, int]:
    """Spec of a shard and the offset of its first record. ``data``: at least the head of the file."""
    head = bytes(data[:16])
    if len(head) < 16 or head[:8] != MAGIC:
        raise CacheError(
            f"{where} is no teacher cache shard (it starts with {head[:8]!r}); point at the cache's folder"
        )
    (length,) = struct.unpack("<Q", head[8:])
    if length > MAX_HEADER or 16 + length > len(data):
        raise CacheError(f"{where} claims a header of {length} bytes in a file of {len(data)}; it is damaged")
    try:
        header = json.loads(bytes(data[16 : 16 + length]))
    except (ValueError, RecursionError) as e:
        raise CacheError(f"{where} has an unreadable header ({e}); it is damaged") from e
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        version = header.get("format") if isinstance(header, dict) else None
        raise CacheError(f"{where} has cache format {version!r}, this version reads {FORMAT}; make the cache again")
    return CacheSpec.from_dict(header.get("spec"), where), 16 + length


# -- journal and index -------------------------------------------------------------------------------------------------


SHARD = re.compile(r"shard_(\d{3})_(\d{5})\.lbk")
INDEX = re.compile(r"index_(\d{3})\.json")


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    shard: int
    offset: int
    n: int
    crc: int
    prefixes: tuple[str, ...]


def parse_journal(path: Path, shard: int) -> tuple[dict[str, Entry], int]:
    """Complete documents of a journal by key, and the bytes that its whole lines take."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}, 0
    except OSError as e:
        raise CacheError(f"the journal {str(path)!r} of a cache cannot be read ({e.strerror})") from e
    # a kill may have left part of a line
    whole = raw[: raw.rfind(b"\n") + 1]
    entries: dict[str, Entry] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            key, prefixes = row["key"], tuple(row["prefixes"])
            entry = Entry(shard, row["offset"], row["n"], row["crc"], prefixes)
            texts, numbers = (key, *prefixes), (entry.offset, entry.n, entry.crc)
            # the very type: true is an int for isinstance
            good = all(isinstance(t, str) for t in texts) and all(type(v) is int and v >= 0 for v in numbers)
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good or entry.n < 2 or entry.offset % ALIGN:
            raise CacheError(f"{path}:{number} is no journal line; the cache is damaged, make it again")
        entries[key] = entry
    return entries, len(whole)


def read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text())
        good = index["format"] == FORMAT and isinstance(index["complete"], bool) and type(index["world_size"]) is int
        good = good and isinstance(index["spec"], dict) and isinstance(index["shards"], list)
        for shard in index["shards"]:
            good = good and bool(SHARD.fullmatch(shard["file"])) and type(shard["bytes"]) is int
            good = good and isinstance(shard["sha256"], str) and isinstance(shard["journal_sha256"], str)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise CacheError(f"cache index {str(path)!r} cannot be read ({e}); it is damaged, make the cache again") from e
    if not good:
        raise CacheError(f"cache index {str(path)!r} is damaged or of another version; make the cache again")
    return dict(index)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# -- head of hidden states ---------------------------------------------------------------------------------------------


HEAD_NAME = "head.safetensors"


def save_head(folder: str | Path, head: Head) -> None:
    """Store a linear head (weight, bias, scale, softcap)."""
    if head.weight is None:
        raise CacheError("hidden states can only be cached for a model with a plain linear head; cache top-k instead")
    # rows behind the vocabulary are padding for an even split
    tensors = {"weight": head.weight.detach()[: head.vocab_size].cpu().contiguous().clone()}
    if head.bias is not None:
        tensors["bias"] = head.bias.detach()[: head.vocab_size].cpu().contiguous().clone()
    numbers = {"vocab_size": head.vocab_size, "scale": head.scale, "softcap": head.softcap}
    meta = json.dumps({**numbers, "crc32": _head_crc(numbers, tensors["weight"], tensors.get("bias"))})
    path = Path(folder) / HEAD_NAME
    tmp = path.with_suffix(".tmp")
    try:
        save_file(tensors, tmp, metadata={"head": meta})
        # before the rename: a loss of power must not leave the name with half of a file
        fsync_path(tmp)
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


def _head_crc(numbers: Mapping[str, Any], *tensors: torch.Tensor | None) -> int:
    crc = zlib.crc32(json.dumps(numbers, sort_keys=True).encode())
    for tensor in tensors:
        if tensor is not None:
            crc = zlib.crc32(tensor.view(torch.uint8).numpy().data, crc)
    return crc


def load_head(folder: str | Path, device: torch.device | str) -> Head:
    """Read a stored head onto ``device``."""
    path = Path(folder) / HEAD_NAME
    try:
        with safe_open(path, framework="pt", device="cpu") as f:
            meta = json.loads((f.metadata() or {})["head"])
            weight = f.get_tensor("weight")
            bias = f.get_tensor("bias") if "bias" in f.keys() else None  # noqa: SIM118
        if meta.pop("crc32") != _head_crc(meta, weight, bias):
            raise CacheError(
                f"the head of the cache {str(folder)!r} is not what was stored (its checksum differs); make the cache "
                "again"
            )
        weight, bias = weight.to(device), None if bias is None else bias.to(device)
        return Head(int(meta["vocab_size"]), weight=weight, bias=bias, softcap=meta["softcap"], scale=meta["scale"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise CacheError(f"the head of the cache {str(folder)!r} cannot be read ({e}); make the cache again") from e
