"""Long sequences over several ranks: each holds two pieces of every sequence and attends to gathered keys and values.

Rank r of n holds pieces r and 2n - 1 - r of 2n, so that early and late positions, which attend to little and to much,
are shared evenly. Keys and values are gathered per layer (their gradients are summed back by a reduce-scatter); queries
stay. The last hidden states are gathered too, R x h, after which rows are where a single process would have them: the
next-token shift and chunks that straddle ranks need no care, and each rank takes its share of the loss's blocks.

`SequenceSplit` is the interface: a body and its inputs in, whole hidden states out. This one runs on any backend; an
engine that exchanges keys and values in a ring (torch's own on accelerators) can take its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from limbeck.utils.errors import ConfigError

ATTENTION_NAME = "limbeck_context"


class SequenceSplit(Protocol):
    """Runs a body on sequences that are split over ranks."""

    def run(self, body: Any, kwargs: dict[str, Any]) -> Tensor:
        """Hidden states `[B, T, h]` of the whole sequences, from inputs `[B, T]` that every rank has."""
        ...


class _GatherSequence(torch.autograd.Function):
    """Pieces `[.., T / n, ..]` of all ranks in the order of the sequence; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, split: GatheredAttention, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(split.ranks)]
        dist.all_gather(parts, own.contiguous(), group=split.group)
        halves = [half for part in parts for half in part.chunk(2, dim)]
        # rank r brought pieces r and 2n - 1 - r
        return torch.cat(halves[0::2] + halves[1::2][::-1], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        split, pieces = ctx.split, grads[0].chunk(2 * ctx.split.ranks, ctx.dim)
        sent = [torch.cat((pieces[r], pieces[2 * split.ranks - 1 - r]), ctx.dim) for r in range(split.ranks)]
        out = torch.empty_like(sent[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(out, [s.contiguous() for s in sent], group=split.group)
        return out, None, None


_ACTIVE: ContextVar[GatheredAttention | None] = ContextVar("active split", default=None)


class GatheredAttention:
    """All-gather attention over a context-parallel group."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def pieces(self) -> tuple[int, int]:
        """The two of 2n pieces that this rank holds."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of `[B, T]`."""
        parts = values.chunk(2 * self.ranks, 1)
        return torch.cat([parts[i] for i in self.pieces()], 1)

    def install(self, body: Any) -> None:
        """Make a transformers model attend this way."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, attend)
        body.config._attn_implementation = ATTENTION_NAME

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def run(self, body: Any, kwargs: dict[str, Any]) -> Tensor:
        """See `SequenceSplit`. The length must be a multiple of twice the number of ranks."""
        ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
        if ids.shape[1] % (2 * self.ranks):
            raise ConfigError(f"sequences of {ids.shape[1]} tokens cannot be cut into {2 * self.ranks} equal pieces")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        inputs = {**kwargs, "input_ids": self.own(ids), "position_ids": self.own(positions), "attention_mask": None}
        with self.active():
            hidden = body(**inputs).last_hidden_state
        out: Tensor = _GatherSequence.apply(hidden, self, 1)
        return out


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries `[B, heads, T / n, d]` to the keys and values of the whole sequence.

    Returns `[B, T / n, heads, d]`. Each piece attends to its prefix only, so no mask of T x T is made.
    """
    split = _ACTIVE.get()
    if split is None:
        raise ConfigError("this model attends over context-parallel ranks; run it through its policy")
    key, value = (_GatherSequence.apply(x, split, 2) for x in (key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2] // 2
    outputs = []
    for piece, part in zip(split.pieces(), query.chunk(2, 2), strict=True):
        end = (piece + 1) * length
        bias: Any = causal_lower_right(length, end)
        out = F.scaled_dot_product_attention(
            part, key[:, :, :end], value[:, :, :end], attn_mask=bias, dropout_p=dropout, scale=scaling
        )
        outputs.append(out)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
