"""Several teachers: one target from the mean of their logits, or weights for each text by how well a teacher knows it.

Everything here is per sample, so it does not depend on how a batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limbeck.data.layout import ChunkLayout
from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.distillation_config import CrossTokenizerDistillationLossConfig, Scoring
from limbeck.losses.divergences import tail_log_prob
from limbeck.losses.signals import TeacherRows, TeacherScores


def _row_scores(scores: TeacherScores, ids: Tensor, kind: Scoring, ends: Sequence[int]) -> Tensor:
    """-ce, -entropy or max_prob of each row, `[Q]`."""
    if kind == "ce":
        return scores.log_prob_of(ids, ends=ends)
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
def sample_scores(
    teacher: TeacherRows,
    layout: ChunkLayout,
    kind: Scoring,
    num_samples: int,
    block_rows: int,
    comm: Comm,
    ends: Sequence[int] = (),
) -> Tensor:
    """Mean score of each sample under one teacher, `[B]`; -inf for samples without an aligned chunk. Per sample, so
    that the weights do not depend on how a batch is cut into micro-batches.

    Entropy and max_prob are means over teacher tokens; -ce is per *student* token, so that teachers whose tokens
    differ in length are compared on the same text. A sample's rows may lie with several ranks. ends: see `Objective`.
    """
    rows = [
        _row_scores(scores, layout.teacher_ids_Q[rows_at], kind, ends).double()
        for rows_at, scores in teacher.blocks(block_rows)
    ]
    total = torch.zeros(num_samples, dtype=torch.float64, device=layout.teacher_rows_Q.device)
    count = torch.zeros_like(total)
    if rows:
        total.index_add_(0, layout.sample_C[layout.teacher_chunk_Q], torch.cat(rows))
        owner = layout.student_chunk_M if kind == "ce" else layout.teacher_chunk_Q
        count.index_add_(0, layout.sample_C[owner], torch.ones_like(owner, dtype=total.dtype))
    # context-parallel ranks, per micro-batch and teacher: two numbers per sample
    total, count = comm.sum(torch.stack((total, count))).unbind()
    return (total / count.clamp(min=1)).masked_fill(count == 0, -torch.inf)


def sample_weights(scores: Tensor, alpha: float, *, select: bool) -> Tensor:
    """Weights of teachers per sample from scores `[teachers, B]`: softmax(alpha * score), or 1 for the best one."""
    if select:
        weights = torch.nn.functional.one_hot(scores.argmax(0), scores.shape[0]).t().to(scores.dtype)
    else:
        # -inf x 0 is NaN, where alpha is 0
        weights = torch.softmax((scores * alpha).masked_fill(torch.isneginf(scores), -torch.inf), 0)
    # a sample of which no teacher has a chunk: a softmax of nothing but -inf
    return weights.nan_to_num(0.0)


def average_logits(terms: list[TeacherTerm], weights: Sequence[float]) -> list[TeacherTerm]:
    """The first term, whose teacher is the weighted mean of all."""
    first = terms[0]
    for term in terms[1:]:
        if not torch.equal(term.layout.teacher_ids_Q, first.layout.teacher_ids_Q):
            raise LossError(f"{term.name} reads other tokens than {first.name}; their logits cannot be averaged")
    signals = [term.teacher.signals[0] for term in terms]
    total = sum(weights)
    rows = [term.layout.teacher_rows_Q for term in terms]
    first.teacher = TeacherRows(signals, rows, [weight / total for weight in weights])
    first.factor = 1.0
    return [first]


def weigh_by_sample(
    terms: Sequence[TeacherTerm],
    cfg: CrossTokenizerDistillationLossConfig,
    num_samples: int,
    block_rows: int,
    comm: Comm,
) -> None:
    """Give the chunks of every term the weight of its teacher on their sample."""
    select = cfg.teacher_combination == "select_teacher"
    kind: Scoring = "ce" if select or cfg.teacher_scoring in (None, "static") else cfg.teacher_scoring
    scores = [sample_scores(t.teacher, t.layout, kind, num_samples, block_rows, comm, t.objective.ends) for t in terms]
    weights = sample_weights(torch.stack(scores), cfg.scoring_alpha, select=select)
    for term, weight_B in zip(terms, weights, strict=True):
        term.chunk_weight_C, term.factor, term.weighs_samples = weight_B[term.layout.sample_C], 1.0, True


def mean_over_teachers(
    sums: Sequence[Tensor], chunks: Sequence[Tensor], weighted: Sequence[bool], weights: Sequence[float]
) -> Tensor:
    """Mean divergence: each teacher's sum over its chunks, by its weight. weighted: whether the sum holds weights
    already, those of single samples."""
    total = torch.zeros_like(sums[0])
    for value, count, has_weights, weight in zip(sums, chunks, weighted, weights, strict=True):
        total = total + value * (1.0 if has_weights else weight) / count.where(count > 0, torch.ones_like(count))
    return total
