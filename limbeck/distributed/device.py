"""Which device a process computes on, and copies to it that the host does not wait for."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_Tree = TypeVar("_Tree")
ALIGNED = 16
"""Bytes: kernels know two kinds of addresses, multiples of it and others."""


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def host_threads(device: torch.device) -> Iterator[None]:
    """One thread for torch's work on the host while an accelerator computes, unless OMP_NUM_THREADS says otherwise.

    What is left to the host is small (which rows carry which loss), and threads that wait for each other lose more
    than they gain beside the processes that read the data.
    """
    if device.type == "cpu" or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process holds: on the accelerator the most so far, on the CPU its resident memory now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        # the most so far, in KiB, where there is no such file
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_free(device: torch.device) -> int:
    """Bytes that a process could take now: of the accelerator, or of main memory and its control group's part."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        # not MemFree: pages of files are given up when memory is asked for
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    return min([free, *_group_free(Path("/sys/fs/cgroup"))])


_GROUP_FILES = (
    # version 2 of control groups, then version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def _group_free(root: Path) -> Iterator[int]:
    """Bytes that the control group of a container leaves, pages of files that it would give up included; nothing where
    it sets no limit."""
    for limit, used, pages in _GROUP_FILES:
        try:
            most, now = (root / limit).read_text().strip(), int((root / used).read_text())
            lines = [line.split() for line in (root / limit).with_name("memory.stat").read_text().splitlines()]
        except (OSError, ValueError):
            continue
        # version 2 writes `max` where there is no limit
        if most.isdigit():
            yield max(int(most) - now + sum(int(n) for name, n in lines if name == pages), 0)


def memory_total(device: torch.device) -> int:
    """Bytes of the accelerator, or of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def memory_room(device: torch.device) -> tuple[int, int]:
    """Bytes that this process could hold at most, what others leave of the memory, and those that it holds now."""
    if device.type == "cuda":
        held = int(torch.cuda.memory_allocated(device))
        # what the allocator keeps for later is this process's too
        return memory_free(device) + int(torch.cuda.memory_reserved(device)), held
    held = memory_in_use(device)
    return memory_free(device) + held, held


def memory_peak(device: torch.device) -> int:
    """Bytes that this process has held at most; on CUDA since `forget_peak`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak(device: torch.device) -> None:
    """Begin the peak of a CUDA device anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def to_device(tree: _Tree, device: torch.device | str) -> _Tree:
    """A tensor, or a tree of dataclasses, lists, tuples and dicts, with all tensors on `device`.

    From main memory to CUDA they travel pinned, in one copy per type, behind the work already queued there: an
    ordinary copy makes the host wait until the device has reached it. Tensors that are there already stay as they are;
    whatever is no tensor is shared with the original.
    """
    target = torch.device(device)
    elsewhere = {id(t): t for t in _tensors(tree) if not _is_on(t, target)}
    new: dict[int, Tensor] = {}
    pinned = {key: t for key, t in elsewhere.items() if target.type == "cuda" and t.device.type == "cpu"}
    for dtype in dict.fromkeys(t.dtype for t in pinned.values()):
        same = {key: t for key, t in pinned.items() if t.dtype == dtype}
        if len(same) == 1:
            ((key, only),) = same.items()
            new[key] = _sent(only, target).contiguous()
            continue
        flat, sizes = joined(list(same.values()), pin_memory=True)
        # every second part is a gap
        pieces = _sent(flat, target).split(sizes)[::2]
        new |= {key: piece.view(t.shape) for (key, t), piece in zip(same.items(), pieces, strict=True)}
    new |= {key: t.to(target) for key, t in elsewhere.items() if key not in new}
    return _rebuilt(tree, new) if new else tree


def _is_on(t: Tensor, target: torch.device) -> bool:
    return t.device.type == target.type and target.index in (None, t.device.index)


def joined(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> tuple[Tensor, list[int]]:
    """Tensors of one type behind one another in one row, and its parts' sizes: of a tensor, of the gap behind it, and
    so on. Each begins at a multiple of `ALIGNED` bytes: Triton compiles a kernel anew for addresses that do not.
    """
    unit = max(ALIGNED // tensors[0].element_size(), 1)
    gaps = tensors[0].new_zeros(unit)
    parts: list[Tensor] = []
    for t in tensors:
        parts += (t.reshape(-1), gaps[: -t.numel() % unit])
    sizes = [part.numel() for part in parts]
    out = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=pin_memory)
    return torch.cat(parts, out=out), sizes


def _sent(value: Tensor, target: torch.device) -> Tensor:
    return (value if value.is_pinned() else value.pin_memory()).to(target, non_blocking=True)


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, dict):
        for item in node.values():
            yield from _tensors(item)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _tensors(item)
    elif is_dataclass(node) and not isinstance(node, type):
        for f in fields(node):
            if f.init:
                yield from _tensors(getattr(node, f.name))


def _rebuilt(node: Any, new: dict[int, Tensor]) -> Any:
    if isinstance(node, Tensor):
        return new.get(id(node), node)
    if isinstance(node, dict):
        return {key: _rebuilt(item, new) for key, item in node.items()}
    # before other tuples: a named one takes its items one by one
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_rebuilt(item, new) for item in node))
    if isinstance(node, list | tuple):
        return type(node)(_rebuilt(item, new) for item in node)
    if is_dataclass(node) and not isinstance(node, type):
        # `replace` refuses fields that are no arguments
        values = {f.name: getattr(node, f.name) for f in fields(node) if f.init}
        moved = {k: v for k, v in values.items() if isinstance(v, Tensor | dict | list | tuple) or is_dataclass(v)}
        return replace(node, **{k: _rebuilt(v, new) for k, v in moved.items()})
    return node
