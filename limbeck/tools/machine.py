"""The device that an estimate is for: this machine's, unless another is described."""

from __future__ import annotations

import time
from typing import Any

import torch

from limbeck.distributed.device import default_device, memory_free
from limbeck.distributed.planner import GIB, Machine

PLAIN_GPU = Machine()
_SIZE, _PRODUCTS = 1024, 4


def assumed_machine(
    memory_gib: float | None, tflops: float | None, *, gpus: int = 1, **more: Any
) -> tuple[Machine, str]:
    """The device of an estimate, and what to call it.

    ``memory_gib``, ``tflops``: of a GPU that is described; without either, and for one device, it is this machine's.
    ``more``: other fields of `Machine`.
    """
    device = default_device()
    if device.type == "cpu" and memory_gib is None and tflops is None and gpus == 1:
        rate, free = _cpu_flops(), memory_free(device)
        cores, speed = torch.get_num_threads(), f"{rate / 1e9:.0f} Gflop/s measured"
        figures = f"torch on {cores} of its cores, {free / GIB:.0f} GiB free, {speed}"
        return Machine(memory=free, flops=rate, **more), f"this machine's CPU ({figures})"
    here = device.type == "cuda" and memory_gib is None
    memory = torch.cuda.get_device_properties(device).total_memory if here else (memory_gib or 80.0) * GIB
    flops = PLAIN_GPU.flops if tflops is None else tflops * 1e12
    name = torch.cuda.get_device_name(device) if here else "a GPU"
    text = f"{name} of {memory / GIB:.0f} GiB and {flops / 1e12:g} Tflop/s"
    return Machine(memory=memory, flops=flops, **more), text if here else f"{text} (--memory, --tflops)"


def _cpu_flops() -> float:
    """Operations per second of matrix products, as all threads of this process do them."""
    a = torch.ones(_SIZE, _SIZE)
    # not timed: the first product also starts torch's threads
    a @ a
    begun = time.perf_counter()
    for _ in range(_PRODUCTS):
        a @ a
    return 2 * _SIZE**3 * _PRODUCTS / (time.perf_counter() - begun)
