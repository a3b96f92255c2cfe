"""Context-parallel attention by torch's own ring: keys and values travel, so no rank ever holds those of all others.

torch offers its ring as a context manager that replaces `scaled_dot_product_attention` for the whole process, forward
and backward together. A teacher that is not split, or a loss in between, would be caught by it, so the two functions
behind it are called instead. They work on the same pieces as `GatheredAttention`: rank r of n has r and 2n - 1 - r.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from limbeck.distributed.context_parallel import GatheredAttention, SplitSequences
from limbeck.utils.errors import ConfigError


def _load_engine() -> Any:
    try:
        return importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    except ImportError:
        return None


_engine = _load_engine()
_ATEN = torch.ops.aten
_LSE_ROWS = 32
"""The memory-efficient kernel keeps its log-sum-exp in rows of a multiple of this."""


def ring_available() -> bool:
    """Whether this torch has the ring."""
    names = ("_templated_ring_attention", "_templated_ring_attention_backward", "set_rotate_method")
    return _engine is not None and all(hasattr(_engine, name) for name in names)


def split_attention(kind: str, group: Any, device_type: str) -> GatheredAttention:
    """The attention of a context-parallel group.

    Args:
        kind: ``gather``; ``ring``; ``auto``: the ring on accelerators where torch has it, otherwise gather.

    Raises:
        ConfigError: the ring is asked for and this torch has none.
    """
    if kind == "gather" or (kind == "auto" and (device_type != "cuda" or not ring_available())):
        return GatheredAttention(group)
    if not ring_available():
        raise ConfigError(
            f"dtensor_cfg.context_parallel_attention is 'ring', which torch {torch.__version__} does not have; "
            "use 'gather' or 'auto'"
        )
    return RingAttention(group)


class RingAttention(GatheredAttention):
    """torch's ring where it can: full attention over rows that are one document. Other layers gather."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        # one neighbour's keys at a time; torch's default would gather all of them
        _engine.set_rotate_method("alltoall")

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: SplitSequences,
        *,
        window: int | None,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        """See `GatheredAttention`."""
        # the kernels' own condition, which `scaled_dot_product_attention` would meet by padding
        odd_width = query.is_cuda and query.shape[-1] % 8
        if sequences.packed or window is not None or dropout or odd_width:
            return super().attend(query, key, value, sequences, window=window, scaling=scaling, dropout=dropout)
        out: Tensor = _Ring.apply(query, key, value, self.comm._group, scaling)
        return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float | None) -> Tensor:
        out, lse, *more = _engine._templated_ring_attention(
            group, 2, _forward_kernel, query, key, value, is_causal=True, scale=scale
        )
        ctx.group, ctx.scale = group, scale
        ctx.save_for_backward(query, key, value, out, lse, *more)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *more = ctx.saved_tensors
        found = _engine._templated_ring_attention_backward(
            ctx.group,
            2,
            _backward_kernel,
            grads[0].contiguous(),
            "grad_out",
            query,
            key,
            value,
            out,
            lse,
            is_causal=True,
            scale=ctx.scale,
            random=more,
        )
        return (*found[:3], None, None)


def _spread(values: Tensor, heads: int) -> Tensor:
    """Keys or values `[B, H_kv, T, D]` for each of `heads` queries; repeated here, so that they travel once."""
    groups = heads // values.shape[1]
    return values.repeat_interleave(groups, 1) if groups > 1 else values


def _collected(grad: Tensor, heads: int) -> Tensor:
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _forward_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp `[B, H, T]` and what the backward kernel wants of random numbers (none are drawn)."""
    key, value = _spread(key, query.shape[1]), _spread(value, query.shape[1])
    if not query.is_cuda:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, lse
    if query.dtype == torch.float32:
        out, lse, *random = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse[..., : query.shape[2]], *random
    found = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    return found[0], found[1], found[6], found[7]


def _backward_kernel(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
    random: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    heads, length = key.shape[1], query.shape[2]
    key, value = _spread(key, query.shape[1]), _spread(value, query.shape[1])
    saved = (grad_out, query, key, value)
    if not query.is_cuda:
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *saved, out, logsumexp, 0.0, is_causal, scale=scale
        )
    elif query.dtype == torch.float32:
        lse = torch.nn.functional.pad(logsumexp, (0, -length % _LSE_ROWS), value=torch.inf)
        wanted = [True, True, True, False]
        grads = _ATEN._scaled_dot_product_efficient_attention_backward(
            *saved, None, out, lse, *random, 0.0, wanted, is_causal, scale=scale
        )
    else:
        sizes = (None, None, length, key.shape[2])
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            *saved, out, logsumexp, *sizes, 0.0, is_causal, *random, scale=scale
        )
    return grads[0], _collected(grads[1], heads), _collected(grads[2], heads)
