"""Objectives of 2026 that contradict each other, as far as their definitions can be read: which rows are compared, and
over which events. `docs/losses.md` says what of each is published and what differs here.

- **strict** (arXiv 2610.08448): only chunks of one token on both sides, over the tokens that both vocabularies have.
- **simct** (arXiv 2605.07711): every chunk's start, over those tokens and the chunk itself as one more unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, divergence_entries, log1mexp, tail_log_prob
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ObjectiveOptions,
    ProjectedObjective,
    chunk_log_probs,
)
from limbeck.losses.objectives.corrected import ABSENT
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.losses.vocab.projection import ProjectionLike


class SharedVocabulary(ProjectedObjective):
    """An objective that reads both sides at the tokens that both vocabularies have."""

    needs_logits = True

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        if not self.equals.student.numel():
            raise LossError(f"mode {self.mode!r} found no common token in the projection; use boundary_kl or p_kl_norm")


class StrictKL(SharedVocabulary):
    """Divergence over the student's `strict_topk` most likely shared tokens, where a chunk is one token on both sides;
    elsewhere the squared log-ratio of the chunk's probability, times `span_weight`.

    Both sides are normalised over those tokens, or keep what is left in a rest bucket (`strict_rest`).
    """

    mode = "strict"
    default_direction = "reverse"

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        options = self.options
        multi_C = chunks.multi_C
        at = (~multi_C).nonzero().squeeze(1)
        log_s, log_t, axis = self.at_equals(student, chunks, teacher, at, self.temperature)
        with torch.no_grad():
            right = (axis.argmax(log_s) == axis.argmax(log_t)).sum().to(log_s)
            shared_s, shared_t = axis.sum(log_s.exp()).sum(), axis.sum(log_t.exp()).sum()
        k = options.strict_topk
        if k is not None and k < axis.width(log_s):
            chosen = axis.topk(log_s.detach(), k)[1]
            log_s, log_t, axis = axis.gather(log_s, chosen), axis.gather(log_t, chosen), WHOLE
        with torch.no_grad():
            kept_s, kept_t = axis.sum(log_s.exp()).sum(), axis.sum(log_t.exp()).sum()
        if not options.strict_rest:
            rows = axis.sum(divergence_entries(axis.log_softmax(log_s), axis.log_softmax(log_t), self.spec))
        else:
            outside = divergence_entries(_rest(log_s, axis), _rest(log_t, axis), self.spec)
            rows = axis.sum(divergence_entries(log_s, log_t, self.spec)) + outside
        strict_C = torch.zeros_like(multi_C, dtype=rows.dtype).index_put((at,), rows)
        span_s, span_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        span_C = (span_s - span_t).square() * multi_C
        few, rest = rows.new_tensor(float(at.numel())), multi_C.sum().to(rows)
        return self.out(
            strict_C + options.span_weight * span_C,
            chunks,
            {"strict": strict_C, "span": span_C},
            strict_kl=(chunks.weighted(strict_C).sum(), few),
            span_loss=(chunks.weighted(span_C).sum(), rest),
            shared_mass_student=(shared_s, few),
            shared_mass_teacher=(shared_t, few),
            kept_mass_student=(kept_s, few),
            kept_mass_teacher=(kept_t, few),
            proj_accuracy=(right, few),
        )


def _rest(log_probs: Tensor, axis: VocabAxis) -> Tensor:
    """log of the probability outside the columns `[n]`."""
    if axis.sharded:
        return log1mexp(axis.sum(log_probs.exp()).log())
    return tail_log_prob(log_probs).squeeze(-1)


class UnitKL(SharedVocabulary):
    """SimCT: at a chunk's start, the shared tokens by their log-probability and, where the chunk has several tokens on
    a side, the chunk as one more unit by the mean log-probability of its tokens; softmax of both sides over these."""

    mode = "simct"
    default_direction = "reverse"

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        refuse_shards(self.mode, student)
        multi_C = chunks.multi_C
        every = torch.arange(chunks.num_chunks, device=multi_C.device)
        log_s, log_t, _ = self.at_equals(student, chunks, teacher, every, self.temperature)
        span_s, span_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        unit_s = (span_s / chunks.student_count_C).masked_fill(~multi_C, ABSENT)
        unit_t = (span_t / chunks.teacher_count_C).masked_fill(~multi_C, ABSENT)
        rows_C = unit_divergence(
            torch.cat((log_s, unit_s[:, None]), 1), torch.cat((log_t, unit_t[:, None]), 1), self.spec
        )
        count = chunks.count(rows_C)
        with torch.no_grad():
            right = (log_s.argmax(-1) == log_t.argmax(-1)).sum().to(rows_C)
            shared_s, shared_t = log_s.exp().sum(), log_t.exp().sum()
        return self.out(
            rows_C,
            chunks,
            shared_mass_student=(shared_s, count),
            shared_mass_teacher=(shared_t, count),
            proj_accuracy=(right, count),
        )


def unit_divergence(scores_s: Tensor, scores_t: Tensor, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` between the softmaxes of two sides' scores of units `[n, units]`."""
    return divergence_entries(scores_s.log_softmax(-1), scores_t.log_softmax(-1), spec).sum(-1)


def refuse_shards(mode: str, student: BlockLogits) -> None:
    """Raise `LossError` where the columns of a vocabulary lie on several ranks."""
    if student.axis.sharded:
        raise LossError(f"mode {mode!r} needs whole vocabularies; set tensor_parallel_size to 1 or use another mode")
