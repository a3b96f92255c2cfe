"""Attention over packed documents with torch's variable-length flash kernel, as a transformers attention function.

A dense mask over a packed sequence costs the square of its whole length; this costs the sum of the documents' squares.
Needs a CUDA device, a narrow type and a torch with `torch.nn.attention.varlen`. Models that can use it do so by
themselves; `policy.attn_implementation: limbeck_varlen` demands it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.distributed.attention import varlen_kernel
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
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query `[B, H, T, D]` to key, value `[B, H_kv, T, D]` -> (`[B, T, H, D]`, None).

    With `cu_seq_lens_q` (packed inputs, B = 1) every document sees itself alone; without, every row is a document.
    """
    rows, length = query.shape[0], query.shape[2]
    window = None if sliding_window is None or sliding_window >= length else sliding_window
    if cu_seq_lens_q is None or max_length_q is None:
        if window is None:
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
            )
            return out.transpose(1, 2).contiguous(), None
        cu_seq_lens_q = torch.arange(rows + 1, device=query.device, dtype=torch.int32) * length
        max_length_q = length
    kernel = varlen_kernel()
    assert kernel is not None
    if window is not None and not kernel.takes_windows:
        raise ConfigError(
            f"the variable-length attention of torch {torch.__version__} knows no sliding window of {window} tokens; "
            "leave attn_implementation at its default"
        )
    # rounded up, so that a longer document seldom means another graph
    longest = -(-max_length_q // 512) * 512
    # rotary embeddings leave queries and keys wide under autocast; the kernel takes none but narrow types
    flat = [x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value)]
    borders = (cu_seq_lens_q, cu_seq_lens_q)
    out = kernel(flat[0], flat[1], flat[2], borders, (longest, longest), scale=scaling, window=window)
    return out.unflatten(0, (rows, length)), None


def choose_attention(model: Any, wanted: str | None, precision: torch.dtype, device: torch.device) -> None:
    """Let a model attend by this function where it can and nothing else is `wanted`: packed documents cost what they
    are, and rows are not searched for documents, which makes the host wait for the device in every forward pass.

    Only models that would use torch's scaled_dot_product_attention change: others may need more than it gives.
    """
    kernel, config = varlen_kernel(), model.config
    if wanted is not None or kernel is None or device.type != "cuda" or precision == torch.float32:
        return
    known = set(getattr(config, "layer_types", None) or []) <= {"full_attention", "sliding_attention"}
    windows = getattr(config, "sliding_window", None) is not None
    if known and getattr(config, "_attn_implementation", None) == "sdpa" and (kernel.takes_windows or not windows):
        model.set_attn_implementation(register_varlen_attention())


def register_varlen_attention() -> str:
    """Make the function known to transformers and return its name for `attn_implementation`."""
    if varlen_kernel() is None:
        raise ConfigError(
            f"torch {torch.__version__} has no variable-length attention; leave attn_implementation at its default"
        )
    from transformers import AttentionInterface

    # no mask function beside it: transformers then makes no mask, and does not wait for the device to see if it must
    AttentionInterface.register(NAME, varlen_attention)
    return NAME
