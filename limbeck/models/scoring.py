"""What a model says about given tokens: top-k and log-probabilities from hidden states, in row blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.losses.signals import Head

if TYPE_CHECKING:
    from limbeck.models.policy import Policy


@dataclass
class RowScores:
    """Scores of N rows. ``topk_ids``, ``topk_logits`` [N, k]; ``logsumexp`` and ``next_logprob`` [N], float32.

    ``topk_logits`` are the raw logits, most likely first; minus ``logsumexp`` they are log-probabilities.
    ``next_logprob`` is 0 where the next token's id lies outside of the head.
    """

    topk_ids: Tensor
    topk_logits: Tensor
    logsumexp: Tensor
    next_logprob: Tensor

    @property
    def topk_logprobs(self) -> Tensor:
        """Log-probabilities [N, k] over the teacher's vocabulary."""
        return self.topk_logits - self.logsumexp[:, None]


@torch.no_grad()
def score_rows(hidden: Tensor, head: Head, next_ids: Tensor, *, k: int = 0, block_rows: int = 512) -> RowScores:
    """Score the rows of ``hidden`` [N, h]; ``next_ids`` [N]: the token that came after each (-1: none).

    Only ``block_rows`` x vocabulary logits exist at a time.
    """
    parts: list[tuple[Tensor, ...]] = []
    k = min(k, head.vocab_size)
    for start in range(0, max(hidden.shape[0], 1), block_rows):
        logits = head.logits(hidden[start : start + block_rows])
        ids = next_ids[start : start + block_rows]
        total = head.axis.logsumexp(logits)
        known = (ids >= 0) & (ids < head.vocab_size)
        came = head.axis.gather(logits, ids.clamp(0, head.vocab_size - 1)[:, None])[:, 0] - total
        top, top_ids = head.axis.topk(logits, k)
        parts.append((top_ids, top, total, came.masked_fill(~known, 0.0)))
    return RowScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def next_tokens(ids: Tensor, lengths: Tensor) -> Tensor:
    """Token after each position of right-padded ``ids`` [B, T]: [B, T], -1 at a row's last token and in padding."""
    out = torch.full_like(ids, -1)
    out[:, :-1] = ids[:, 1:]
    places = torch.arange(ids.shape[1], device=ids.device)
    return out.masked_fill(places >= lengths[:, None] - 1, -1)


def sample_rows(row_start: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Flat rows [N] of all real tokens and their places [N] in a padded [B * width] view."""
    places = torch.arange(width, device=row_start.device)
    real = places < lengths[:, None]
    rows = (row_start[:, None] + places)[real]
    return rows, real.reshape(-1).nonzero().squeeze(1)


def response_sums(policy: Policy, channel: BatchedDataDict, prefix: str = "") -> Tensor:
    """``[rows]`` float64: log-probability of each row's supervised tokens, in nats."""
    logprobs = policy.get_logprobs(channel, prefix=prefix)["logprobs"].cpu().double()
    mask = channel[f"{prefix}token_mask"] > 0
    mask[:, 0] = False
    return (logprobs * mask).sum(1)
