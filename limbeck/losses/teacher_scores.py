"""Passes over a teacher's rows before the blocks: P-KL's columns, and scores that weigh several teachers.

Scores are taken per sample, so the weights (and with them the loss) do not depend on how a batch is cut into
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from limbeck.losses.blocks import Term
from limbeck.losses.divergences import tail_log_prob
from limbeck.losses.peers import Peers
from limbeck.losses.plan import ChunkSpan
from limbeck.losses.settings import Scoring
from limbeck.losses.signals import TeacherScores


def _teacher_blocks(term: Term, block_rows: int) -> Iterator[tuple[slice, TeacherScores]]:
    total = term.layout.teacher_rows.numel()
    for start in range(0, total, block_rows):
        end = min(start + block_rows, total)
        yield slice(start, end), term.scores(ChunkSpan((0, 0), (0, 0), (start, end)))


@torch.no_grad()
def top_columns(term: Term, k: int, block_rows: int, peers: Peers) -> Tensor:
    """P-KL's K: the k teacher tokens with the greatest raw logit at any aligned row, ascending ids `[K]`.

    Keeps only the column maximum between blocks, and takes it over the ranks that share the micro-batch.
    """
    # the logits of no row tell how many columns are here, also to a rank that has none
    none = term.scores(ChunkSpan((0, 0), (0, 0), (0, 0)))
    assert none.logits is not None
    best = none.logits.new_full((none.logits.shape[1],), -torch.inf)
    for _, scores in _teacher_blocks(term, block_rows):
        assert scores.logits is not None
        best = torch.maximum(best, scores.logits.amax(0))
    return none.axis.topk(peers.maximum(best)[None], k)[1][0].sort().values


def _row_scores(scores: TeacherScores, ids: Tensor, kind: Scoring) -> Tensor:
    """-ce, -entropy or max_prob of each row, `[nt]`."""
    if kind == "ce":
        return scores.log_prob_of(ids)
    axis = scores.axis
    if scores.is_topk:
        log_p = scores.topk()[1]
        log_p = torch.cat((log_p, tail_log_prob(log_p)), -1) if kind == "entropy" else log_p
    else:
        log_p = scores.log_probs()
    if kind == "entropy":
        return axis.sum(torch.special.entr(log_p.exp())).neg()
    return axis.topk(log_p, 1)[0].squeeze(1).exp()


@torch.no_grad()
def sample_scores(term: Term, kind: Scoring, num_samples: int, block_rows: int, peers: Peers) -> Tensor:
    """Mean score of each sample under one teacher, `[B]`; -inf for samples without an aligned chunk.

    Entropy and max_prob are means over teacher tokens; -ce is per *student* token, so that teachers whose tokens
    differ in length are compared on the same text. A sample's rows may lie with several ranks.
    """
    layout = term.layout
    assert layout.sample is not None
    rows = [
        _row_scores(scores, layout.teacher_ids[at], kind).double() for at, scores in _teacher_blocks(term, block_rows)
    ]
    total = torch.zeros(num_samples, dtype=torch.float64, device=layout.teacher_rows.device)
    count = torch.zeros_like(total)
    if rows:
        total.index_add_(0, layout.sample[layout.teacher_chunk], torch.cat(rows))
        owner = layout.student_chunk if kind == "ce" else layout.teacher_chunk
        count.index_add_(0, layout.sample[owner], torch.ones_like(owner, dtype=total.dtype))
    total, count = peers.sum(torch.stack((total, count)))
    return (total / count.clamp(min=1)).masked_fill(count == 0, -torch.inf)


def sample_weights(scores: Tensor, alpha: float, *, select: bool) -> Tensor:
    """Weights of teachers per sample from scores `[teachers, B]`: softmax(alpha * score), or 1 for the best one."""
    if select:
        weights = torch.nn.functional.one_hot(scores.argmax(0), scores.shape[0]).t().to(scores.dtype)
    else:
        weights = torch.softmax((scores * alpha).masked_fill(torch.isneginf(scores), -torch.inf), 0)
    return weights.nan_to_num(0.0)
