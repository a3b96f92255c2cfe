"""Small batches of the three trace channels for the loss tests, and the naive float64 way to the same numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from limbeck.losses import Head

VOCAB, WIDTH, HIDDEN = 17, 9, 5


def microbatch(batch: dict[str, Any], row_start: Tensor | None = None) -> Any:
    """A batch as the losses get it; by default right padded and flat."""
    start = torch.arange(len(batch["input_ids"])) * batch["input_ids"].shape[1] if row_start is None else row_start
    return SimpleNamespace(data_dict=batch, processed_inputs=SimpleNamespace(row_start=start))


def take(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Rows of a batch."""
    return {k: v[rows] if isinstance(v, Tensor) else [v[i] for i in rows] for k, v in batch.items()}


def policy_batch(rows: int = 6, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, WIDTH), generator=g)
    lengths = torch.randint(4, WIDTH + 1, (rows,), generator=g)
    inside = torch.arange(WIDTH) < lengths[:, None]
    mask = (torch.rand((rows, WIDTH), generator=g) < 0.6) & inside
    mask[:, 2] = True
    sample = torch.ones(rows)
    sample[1] = 0
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": sample,
        "rewards": torch.rand(rows, generator=g),
        "group_index": torch.arange(rows) // 3,
        "response_weights": mask * torch.rand((rows, WIDTH), generator=g),
        "behavior_logprobs": -3 * torch.rand((rows, WIDTH), generator=g) - 1,
        "behavior_valid": mask.clone(),
        "idx": list(range(rows)),
    }


def hidden_and_head(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Head]:
    """Hidden rows and a head with padding rows, bias and softcap, all with gradient."""
    g = torch.Generator().manual_seed(100 + seed)
    hidden = torch.randn(rows, HIDDEN, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB + 3, HIDDEN, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB + 3, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, Head(VOCAB, weight=weight, bias=bias, softcap=8.0, scale=0.7)


def naive_logits(hidden: Tensor, head: Head) -> Tensor:
    assert head.weight is not None
    assert head.bias is not None
    raw = (hidden @ head.weight.T + head.bias) * 0.7
    return (8.0 * torch.tanh(raw / 8.0))[:, :VOCAB]


def naive_log_probs(hidden: Tensor, head: Head, batch: dict[str, Any]) -> Tensor:
    """Log-probability of every token given those before it, `[B, T]`; 0 at the first place."""
    logits = naive_logits(hidden, head).reshape(*batch["input_ids"].shape, VOCAB)
    log_p = torch.log_softmax(logits, -1)[:, :-1].gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return torch.cat((torch.zeros_like(log_p[:, :1]), log_p), 1)


def gradients(loss: Tensor, hidden: Tensor, head: Head) -> list[Tensor]:
    assert head.weight is not None
    assert head.bias is not None
    return list(torch.autograd.grad(loss, [hidden, head.weight, head.bias]))
