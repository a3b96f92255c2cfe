"""Reading a teacher cache from the disk, and from memory: top-k lists (k = 128) and hidden states of size 2,560.

    python -m benchmarks.cache_cold [--folder DISK] [--documents 192]

Each cache is written, flushed, and dropped from the system's page cache (`posix_fadvise`, no root needed); `left` is
the share of its pages that stayed in memory all the same (`mincore`). Then a `CachedTeacher` looks up every document
once, eight at a time as a step does: found by their ids, checked, copied into memory that can be sent to a device. In
the order of the file (`cold`), dropped again and shuffled (`cold_shuffled`), and once more from memory (`warm`). What a
drive keeps in memory of its own is out of reach. Writes ``cache_cold.json``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.cache_size import LENGTH, arrays
from benchmarks.common import parser, record
from limbeck.losses.signals import Head
from limbeck.teachers.cache import CacheSpec, CacheWriter
from limbeck.teachers.cache.format import save_head
from limbeck.teachers.cached import CachedTeacher

CASES: dict[str, dict[str, Any]] = {
    "top_128": {"kind": "topk", "vocab_size": 151_669, "k": 128},
    "hidden_2560": {"kind": "hidden", "vocab_size": 151_669, "hidden_size": 2560},
}
TOGETHER = 8


def drop(folder: Path) -> float:
    """Take a folder's files out of the page cache; the share of their pages that stays there."""
    stayed = pages = 0
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        there = resident(path)
        stayed, pages = stayed + sum(there), pages + len(there)
    return stayed / max(pages, 1)


def resident(path: Path) -> list[int]:
    """1 for every page of a file that is in memory, 0 for the others."""
    size = path.stat().st_size
    if not size:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    count = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * count)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as pages:
        start = np.frombuffer(pages, np.uint8)
        if libc.mincore(ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(size), flags):
            raise OSError(ctypes.get_errno(), "mincore")
        del start
    return [flag & 1 for flag in flags]


def read(folder: Path, documents: np.ndarray) -> float:
    """Seconds in which a teacher finds the signals of all documents ``[n, LENGTH]``."""
    begun = time.perf_counter()
    teacher = CachedTeacher(folder)
    for start in range(0, len(documents), TOGETHER):
        ids = torch.from_numpy(documents[start : start + TOGETHER])
        batch = {"teacher_input_ids": ids, "teacher_input_lengths": torch.full((len(ids),), LENGTH)}
        batch["sample_mask"] = torch.ones(len(ids))
        teacher.signal(SimpleNamespace(data_dict=batch), torch.device("cpu"))  # type: ignore[arg-type]
    return time.perf_counter() - begun


def measure(case: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """One kind of cache, of ``number`` documents."""
    spec, rng = CacheSpec(teacher_fingerprint="f" * 64, **case), np.random.default_rng(0)
    documents = np.empty((number, LENGTH), np.int64)
    with CacheWriter(folder, spec) as writer:
        for row in documents:
            found = arrays(spec, rng)
            row[:] = found["ids"]
            writer.add(**found)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if spec.kind == "hidden":
        # read once at the start of a run, and no part of what is measured
        save_head(folder, Head(spec.vocab_size, weight=torch.zeros(spec.vocab_size, 1)))
    out: dict[str, Any] = {
        **case,
        "megabytes": round(size / 1e6, 1),
        "bytes_per_token": round(size / documents.size, 1),
    }
    left = drop(folder)
    for name, order in (("cold", documents), ("cold_shuffled", rng.permutation(documents)), ("warm", documents)):
        if name == "cold_shuffled":
            left = drop(folder)
        seconds = read(folder, order)
        out[name] = {
            "left": round(left, 3) if name != "warm" else 1.0,
            "mb_per_s": round(size / seconds / 1e6),
            "tokens_per_s": round(documents.size / seconds),
        }
    return out


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--folder", type=Path, help="where the caches are written; default: the temporary folder")
    arguments.add_argument("--documents", type=int, default=192, help=f"of {LENGTH} tokens")
    args = arguments.parse_args()
    result: dict[str, Any] = {"documents": args.documents, "load": round(os.getloadavg()[0], 1)}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            result[name] = measure(case, Path(scratch), args.documents)
        print(name, result[name], flush=True)
    record(args.out, result)


if __name__ == "__main__":
    main()
