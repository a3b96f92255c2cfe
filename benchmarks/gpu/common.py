"""What the GPU benchmarks share: the problem's sizes, aligned random batches, timing, memory and the results file."""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import origin

V_S, H_S = 128_256, 2048  # Llama-3.2-1B
V_T, H_T = 151_936, 2560  # Qwen3-4B
RESULTS = Path(__file__).with_name("results.json")
GIB = float(1 << 30)


@dataclass
class RandomProjection:
    """Stands in for a stored projection: the shares of exact, multi-piece and empty rows of Llama-3.2 -> Qwen3, with
    targets drawn at random. No neighbour maps to a neighbour, which is the worst case for a gather."""

    indices: np.ndarray
    weights: np.ndarray
    teacher_size: int
    teacher_fingerprint: str = "random"

    def exact_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of one entry; of several on one column the first."""
        student = np.flatnonzero(self.weights[:, 0] == 1)
        teacher, first = np.unique(self.indices[student, 0], return_index=True)
        return student[first].astype(np.int64), teacher.astype(np.int64)


def random_weights_on_the_device() -> None:
    """Have limbeck draw the weights of models there: billions of random numbers take seconds, on the host minutes."""
    from limbeck.models import loading

    load = loading.load_model

    def load_there(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return load(*args, **kwargs)

    loading.load_model = load_there


def make_projection(student: int = V_S, teacher: int = V_T, seed: int = 0) -> RandomProjection:
    """Rows as `limbeck project` finds them for Llama-3.2 -> Qwen3: 85.5% of one entry, 14.3% of several, others empty;
    multi-piece rows prefer few columns, the longest column has some 560 entries."""
    rng = np.random.default_rng(seed)
    indices, weights = np.full((student, 4), -1, np.int32), np.zeros((student, 4), np.float32)
    kind = rng.random(student)
    exact = np.flatnonzero(kind < 0.855)[:teacher]
    indices[exact, 0], weights[exact, 0] = rng.permutation(teacher)[: exact.size], 1
    several = np.flatnonzero((kind >= 0.855) & (kind < 0.998))
    pieces = rng.choice([2, 3, 4], several.size, p=[0.68, 0.25, 0.07])
    # a Zipf-like choice: a few hundred columns (digits, common stems) take many entries
    popular = (teacher * rng.random((several.size, 4)) ** 3).astype(np.int32) * 7919 % teacher
    raw = 0.9 * 0.1 ** np.arange(4)
    for count in (2, 3, 4):
        rows = several[pieces == count]
        chosen = popular[pieces == count][:, :count]
        chosen = (chosen + np.arange(count)) % teacher
        indices[rows, :count], weights[rows, :count] = chosen, raw[:count] / raw[:count].sum()
    return RandomProjection(indices, weights, teacher)


class RealPair(NamedTuple):
    """What `prepare.py` has written: a projection with its trees, and the batch of a text."""

    projection: Any
    batch: dict[str, Any]


def load_pair(folder: Path) -> RealPair:
    """Read a folder of `prepare.py`."""
    from safetensors.torch import load_file

    from limbeck.projection import Projection

    with tempfile.TemporaryDirectory() as scratch:
        stored = Path(scratch) / "projection.safetensors"
        stored.write_bytes(gzip.decompress((folder / "projection.safetensors.gz").read_bytes()))
        projection = Projection.load(stored)
    batch: dict[str, Any] = load_file(folder / "batch.safetensors")
    batch["idx"] = list(range(batch["input_ids"].shape[0]))
    return RealPair(projection, batch)


def load_projection(path: str | None) -> Any:
    """A stored projection (`limbeck project -o FILE`), its teacher widened to the head's rows; or a random one."""
    if path is None or not Path(path).exists():
        return make_projection()
    from limbeck.projection import Projection

    found = Projection.load(path)
    indices, weights = np.asarray(found.indices), np.asarray(found.weights)
    return RandomProjection(indices, weights, V_T, Path(path).stem)


def aligned_batch(samples: int, rows: int, v_s: int = V_S, v_t: int = V_T, seed: int = 0) -> dict[str, Any]:
    """A batch with `rows` predicting rows per sample and side. Of the chunks, 94% are one to one, the others two
    student tokens to one teacher token or the reverse, in equal numbers."""
    rng = np.random.default_rng(seed)
    odd = max(rows // 34, 1) if rows > 3 else 0
    single = rows - 3 * odd
    batch: dict[str, Any] = {}
    shape = (samples, rows + 1)
    batch["input_ids"] = torch.from_numpy(rng.integers(0, v_s, shape))
    batch["teacher_input_ids"] = torch.from_numpy(rng.integers(0, v_t, shape))
    for key in ("input_lengths", "teacher_input_lengths"):
        batch[key] = torch.full((samples,), rows + 1)
    for key in ("token_mask", "teacher_token_mask"):
        batch[key] = torch.ones(shape, dtype=torch.int64)
    batch["sample_mask"], batch["idx"] = torch.ones(samples), list(range(samples))
    student, teacher = np.full(shape, -1), np.full(shape, -1)
    for b in range(samples):
        kinds = rng.permutation(np.repeat([0, 1, 2], [single, odd, odd]))
        chunk = np.arange(kinds.size)
        student[b, 1:] = np.repeat(chunk, np.where(kinds == 1, 2, 1))
        teacher[b, 1:] = np.repeat(chunk, np.where(kinds == 2, 2, 1))
    batch["alignment_student_chunk_id"] = torch.from_numpy(student)
    batch["alignment_teacher_chunk_id"] = torch.from_numpy(teacher)
    valid = torch.ones(samples, single + 2 * odd, dtype=torch.bool)
    batch["alignment_pair_valid"], batch["alignment_pair_is_correct"] = valid, valid.clone()
    return batch


def microbatch(batch: dict[str, Any]) -> SimpleNamespace:
    """A padded micro-batch as the loss reads it."""
    ids = batch["input_ids"]
    start = torch.arange(ids.shape[0]) * ids.shape[1]
    return SimpleNamespace(data_dict=batch, processed_inputs=SimpleNamespace(row_start=start))


def random_heads(
    batch: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    spread: float = 2.0,
    *,
    sizes: tuple[int, int] = (V_S, V_T),
    widths: tuple[int, int] = (H_S, H_T),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(student hidden, student weight, teacher hidden, teacher weight); logits have the standard deviation `spread`.
    sizes, widths: vocabulary and hidden size of both sides."""
    gen = torch.Generator(device).manual_seed(0)

    def rand(rows: int, width: int, std: float) -> Tensor:
        return torch.randn(rows, width, generator=gen, device=device, dtype=torch.float32).mul_(std).to(dtype)

    hidden = rand(batch["input_ids"].numel(), widths[0], 1.0).requires_grad_()
    weight = rand(sizes[0], widths[0], spread / widths[0] ** 0.5).requires_grad_()
    teacher = rand(batch["teacher_input_ids"].numel(), widths[1], 1.0)
    return hidden, weight, teacher, rand(sizes[1], widths[1], spread / widths[1] ** 0.5)


class Measured(NamedTuple):
    """Median, fastest and slowest run in ms; extra: peak memory in GiB beyond what was allocated before."""

    ms: float
    low: float
    high: float
    extra: float

    def __str__(self) -> str:
        return f"{self.ms:8.2f} ms ({self.low:.2f} to {self.high:.2f}), {self.extra:5.2f} GiB"


def measure(run: Callable[[], Any], *, repeat: int = 10, warmup: int = 3) -> Measured:
    """Time a function on the GPU with events, after warm-up."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    extra = (torch.cuda.max_memory_allocated() - before) / GIB
    return Measured(statistics.median(times), min(times), max(times), extra)


def save_row(name: str, row: dict[str, Any], path: Path = RESULTS) -> None:
    """Put one row into the results file at once, with the machine and versions it came from."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= origin()
    found[name] = row
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
