"""Log-probabilities of realised tokens from hidden states, with gradient, in row blocks.

For losses that are not a sum over rows (a preference depends on a whole response, a clipped ratio on both policies).
The forward pass keeps one number per token; the backward pass computes each block's logits again. A head that is split
over the vocabulary stays so: ranks exchange a few numbers per row, and the gradient of the hidden states once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from limbeck.data.layout import TokenLayout
from limbeck.losses.signals import Head, compute_dtype
from limbeck.utils.errors import LossError


def _block(head: Head, inputs: Tensor, ids: Tensor) -> Tensor:
    return head.axis.gather(head.axis.log_softmax(head.logits(inputs)), ids[:, None]).squeeze(1)


class _TokenLogProbs(torch.autograd.Function):
    """``[N]`` log-probabilities as a function of hidden ``[R, h]`` and the head's parameters."""

    @staticmethod
    def forward(ctx: Any, head: Head, rows: Tensor, ids: Tensor, size: int, hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.head, ctx.size = head, size
        ctx.save_for_backward(rows, ids, hidden, *params)
        parts = [
            _block(head, hidden.detach().index_select(0, r), i)
            for r, i in zip(rows.split(size), ids.split(size), strict=True)
        ]
        return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=compute_dtype(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        rows, ids, hidden, *params = ctx.saved_tensors
        needs: Sequence[bool] = ctx.needs_input_grad[4:]
        dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        into = torch.zeros_like(hidden, dtype=dtype)
        sums = [torch.zeros_like(p, dtype=compute_dtype(p.dtype)) for p in params]
        blocks = zip(rows.split(ctx.size), ids.split(ctx.size), outer[0].split(ctx.size), strict=True)
        for row, token, grad in blocks if len(rows) else ():
            with torch.enable_grad():
                inputs = hidden.detach().index_select(0, row).requires_grad_()
                values = _block(ctx.head, inputs, token)
            found = torch.autograd.grad(values, [inputs, *params], grad.to(values.dtype), allow_unused=True)
            into.index_add_(0, row, found[0].to(dtype))
            for total, part in zip(sums, found[1:], strict=True):
                if part is not None:
                    total.add_(part)
        into = ctx.head.axis.total(into)
        grads = [into.to(hidden.dtype), *(s.to(p.dtype) for s, p in zip(sums, params, strict=True))]
        return None, None, None, None, *(g if need else None for g, need in zip(grads, needs, strict=True))


def token_log_probs(hidden: Tensor, head: Head, tokens: TokenLayout, *, block_rows: int = 512) -> Tensor:
    """Log-probability ``[N]`` of each token of a layout, in float32 (float64 for float64 inputs).

    Args:
        hidden: ``[R, h]`` flat rows of a forward pass.
        tokens: predicting rows and ids; its weights are not used.
    """
    if tokens.max_row >= hidden.shape[0]:
        raise LossError(f"the layout needs row {tokens.max_row} but there are {hidden.shape[0]} hidden rows")
    if tokens.max_id >= head.vocab_size:
        raise LossError(
            f"token id {tokens.max_id} is out of range for a head of {head.vocab_size} tokens; the batch was "
            "tokenized with another tokenizer"
        )
    rows, ids = tokens.rows.to(hidden.device), tokens.ids.to(hidden.device)
    out: Tensor = _TokenLogProbs.apply(head, rows, ids, block_rows, hidden, *head.parameters())
    return out
