"""Weights that one process has read, handed to the shards of all: no other process ever holds the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from limbeck.distributed.comm import Comm


@dataclass
class Source:
    """The whole model in main memory of rank 0; None on the others. Every rank makes the same calls.

    `hidden`: its hidden states for the tokens of `probe`, where a check was wanted; on rank 0 too.
    """

    model: Any = None
    hidden: Tensor | None = None

    @torch.no_grad()
    def fill(self, model: nn.Module, device: str, *, offload: bool = False) -> None:
        """Give memory to a model without any, and every shard its part; one tensor at a time is whole on the device.

        Args:
            model: on the meta device, split already; its names are the source's.
            offload: parameters stay in main memory (buffers do not).
        """
        model.to_empty(device="cpu" if offload else device)
        whole = {} if self.model is None else self.model.state_dict(keep_vars=True)
        done: set[int] = set()
        for name, p in model.state_dict(keep_vars=True).items():
            if id(p) not in done and isinstance(p, nn.Parameter):
                done.add(id(p))
                local = p.to_local() if isinstance(p, DTensor) else p
                local.copy_(_piece(self._send(whole.get(name), p, device), p))
        # what no state dict holds: tables of rotary embeddings and the like
        for name, module in model.named_modules():
            own = None if self.model is None else self.model.get_submodule(name)
            for store in ("_buffers", "__dict__"):
                for key, value in list(getattr(module, store).items()):
                    if isinstance(value, Tensor):
                        there = None if own is None else getattr(own, store)[key]
                        getattr(module, store)[key] = _like(self._send(there, value, device), value)

    def expected(self, like: Tensor) -> Tensor:
        """`hidden` on every rank."""
        return self._send(self.hidden, like, like.device.type)

    def _send(self, whole: Tensor | None, like: Tensor, device: str) -> Tensor:
        out = torch.empty(like.shape, dtype=like.dtype, device=device) if whole is None else whole.detach().to(device)
        out = out.to(like.dtype).contiguous()
        # rank 0 to all, one weight at a time: each keeps its part, so a whole model is in one process's memory only
        return Comm.world().broadcast_(out)


def _piece(whole: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a whole tensor, laid out as `p` is: cut over tensor-parallel ranks, then over shards."""
    if not isinstance(p, DTensor):
        return whole
    coordinate: Any = p.device_mesh.get_coordinate()
    for i in reversed(range(p.device_mesh.ndim)):
        dim = getattr(p.placements[i], "dim", None)
        if dim is not None:
            parts = whole.chunk(p.device_mesh.size(i), dim)
            whole = parts[coordinate[i]] if coordinate[i] < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def _like(whole: Tensor, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return DTensor.from_local(whole, value.device_mesh, value.placements, run_check=False)
    return whole
