"""Attention over packed documents with torch's variable-length flash kernel, as a transformers attention function.

A dense mask over a packed sequence costs the square of its whole length; this costs the sum of the documents' squares.
Needs a CUDA device and a torch with `torch.nn.attention.varlen`; use it as

    policy:
      attn_implementation: limbeck_varlen
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.utils.errors import ConfigError

NAME = "limbeck_varlen"


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query `[B, H, T, D]` to key, value `[B, H_kv, T, D]` -> (`[B, T, H, D]`, None).

    With `cu_seq_lens_q` (packed inputs, B = 1) every document sees itself alone; without, plain causal attention.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None
    # rounded up, so that a longer document seldom means another graph
    longest = -(-max_length_q // 512) * 512
    # rotary embeddings leave queries and keys wide under autocast; the kernel takes none but narrow types
    flat = [x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value)]
    options = dict(_OPTIONS)
    if "enable_gqa" in options:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    elif query.shape[1] != key.shape[1]:
        flat[1:] = [x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in flat[1:]]
    if "scale" in options:
        options["scale"] = scaling
    assert _KERNEL is not None
    out = _KERNEL(*flat, cu_seq_lens_q, cu_seq_lens_q, longest, longest, **options)
    return out.unsqueeze(0), None


_KERNEL: Any = None
_OPTIONS: dict[str, Any] = {}


def register_varlen_attention() -> str:
    """Make the function known to transformers and return its name for `attn_implementation`."""
    global _KERNEL
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise ConfigError(
            f"torch {torch.__version__} has no variable-length attention; leave attn_implementation at its default"
        ) from error
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    known = inspect.signature(varlen_attn).parameters
    _OPTIONS.clear()
    # the spelling of "causal" changed between versions
    _OPTIONS.update({"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)})
    _OPTIONS.update({name: None for name in ("scale", "enable_gqa") if name in known})
    _KERNEL = varlen_attn
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    return None
