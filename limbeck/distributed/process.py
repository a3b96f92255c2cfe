"""This process among its peers: joined where a launcher started several, alone otherwise."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def join_peers(backend: str = "auto") -> Any:
    """Join the process group that torchrun (or Ray) has announced in the environment; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if not dist.is_initialized():
        if backend == "auto":
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    return dist.group.WORLD


def rank_and_world() -> tuple[int, int]:
    """Rank and number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
