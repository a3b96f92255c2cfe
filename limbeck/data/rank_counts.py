"""Numbers that data-parallel ranks must agree on before a step: micro-batches to take, counts of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def process_group(mesh_or_group: Any) -> Any:
    """The process group of a mesh or group, or None where there is nobody to talk to."""
    if mesh_or_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = mesh_or_group.get_group() if hasattr(mesh_or_group, "get_group") else mesh_or_group
    return group if dist.get_world_size(group) > 1 else None


def _reduce_device(group: Any) -> torch.device:
    # NCCL only reduces tensors on the accelerator, while batches usually live on the CPU.
    return (
        torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    )


def max_over_ranks(value: int, mesh_or_group: Any) -> int:
    """The largest of the ranks' numbers; ``value`` itself on a single rank."""
    group = process_group(mesh_or_group)
    if group is None:
        return value
    count = torch.tensor([value], dtype=torch.long, device=_reduce_device(group))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    return int(count.item())


def sum_over_ranks(values: Sequence[torch.Tensor], mesh_or_group: Any) -> list[torch.Tensor]:
    """Sum each tensor over the ranks in one collective (float64, exact for counts), keeping dtype and device."""
    group = process_group(mesh_or_group)
    if group is None:
        return list(values)
    flat = torch.cat([value.detach().to(_reduce_device(group), torch.float64).reshape(-1) for value in values])
    dist.all_reduce(flat, group=group)
    parts = flat.split([value.numel() for value in values])
    return [part.reshape(value.shape).to(value) for part, value in zip(parts, values, strict=True)]
