"""Losses whose targets are distributions: boundary KL, normalised P-KL, chunk likelihoods, ULD, and the
direct divergence for a teacher that shares the student's vocabulary.

Both sides are put on the same buckets: teacher columns and one rest bucket. Student mass without a mapping, or on
columns that are not listed, is in the student's rest. Teacher mass on a column that no student token reaches cannot
be learnt through W: such columns leave the target, which is normalised over the others and weighted by the mass that
stayed. The gradient is that of the KL over the whole vocabulary, without its constant, and the value stays >= 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limbeck.losses.divergences import (
    DivergenceSpec,
    binary_divergence,
    divergence_entries,
    divergence_rows,
    tail_log_prob,
)
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    Objective,
    ProjectedObjective,
    chunk_log_probs,
)
from limbeck.losses.objectives.published import sorted_l1
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE, VocabAxis

TINY = 1e-12
"""Added to a bucket's probability before its logarithm."""

ABSENT = -100.0
"""Log-probability of an unused place of a top-k list: nothing, on both sides, with gradients that stay finite."""


def rest_floor(dtype: torch.dtype) -> float:
    """The same for a rest bucket computed as 1 - sum, whose rounding error it must exceed."""
    return TINY if dtype == torch.float64 else 1e-6


def target_divergence(
    target: Tensor,
    member: Tensor,
    q: Tensor,
    rest_t: Tensor | None,
    rest_s: Tensor,
    floor: float,
    spec: DivergenceSpec,
    axis: VocabAxis = WHOLE,
) -> Tensor:
    """Divergence `[n]` between a teacher and a projected student on columns `[n, K]` plus a rest bucket.

    target: teacher probabilities; member: columns that some student token reaches (the others leave the target);
    q: student mass on the columns; rest_t (None: no mass), rest_s `[n]`: mass in the rest bucket; axis: on which the
    columns lie.
    """
    kept = target * member
    kept_sum = axis.sum(kept)
    mass = (kept_sum if rest_t is None else kept_sum + rest_t).clamp(min=TINY)
    normaliser = math.log1p(axis.width(q) * TINY + floor)
    log_s = (q + TINY).log() - normaliser
    if spec.kind == "forward" and spec.entry_clip is None:
        # The same sum with the teacher's part, which has no gradient, taken in one pass.
        negative_entropy = -axis.sum(torch.special.entr(kept))
        rows = (negative_entropy - axis.sum(kept * log_s) - kept_sum * mass.log()) / mass
    else:
        absent = -torch.inf if spec.kind == "forward" else math.log(TINY)
        log_t = (target / mass[:, None]).clamp(min=TINY**2).log().masked_fill(~member, absent)
        rows = axis.sum(divergence_entries(log_s, log_t, spec))
    if rest_t is not None or spec.kind != "forward" or spec.entry_clip is not None:
        share = torch.zeros_like(mass) if rest_t is None else rest_t / mass
        log_rest_t = (share + floor).log()
        log_rest_s = (rest_s.clamp(min=0) + floor).log() - normaliser
        rows = rows + divergence_entries(log_rest_s, log_rest_t, spec)
    return rows * mass


class DistributionObjective(ProjectedObjective):
    """Compares a teacher's distribution with the projected student's."""

    def projected(
        self,
        probs_CV: Tensor,
        target: Tensor,
        ids_CK: Tensor | None,
        tail_C: Tensor | None,
        student: BlockLogits,
        teacher: TeacherScores,
        learned: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss `[C]`, right guesses, unreached teacher mass) of student probabilities against `target`.

        ids_CK None: target `[C, U]` is the whole distribution. Otherwise target `[C, K]` belongs to these columns (a
        target of 0 marks an unused place) and tail_C is the teacher's mass elsewhere.
        """
        vocab, axis = self.map_between(student, teacher), WHOLE
        weight_M = learned[0] if learned else None
        if ids_CK is None:
            q = vocab.project_all(probs_CV, weight_M)
            member = vocab.reachable[None].expand_as(target)
            rest_C, floor, axis = student.axis.sum(probs_CV * (~vocab.mapped)), TINY, teacher.axis
        else:
            member = vocab.reaches(ids_CK) & (target > 0)
            q = vocab.project_at(probs_CV, ids_CK, weight_M) * member
            rest_C, floor = 1 - q.sum(-1), rest_floor(q.dtype)
        rows_C = target_divergence(target, member, q, tail_C, rest_C, floor, self.spec, axis)
        with torch.no_grad():
            right = (axis.argmax(q) == axis.argmax(target)).sum().to(q)
            unreached = axis.sum(target.masked_fill(member, 0)).sum()
        return rows_C, right, unreached


class BoundaryKL(DistributionObjective):
    """KL of the teacher's next-token distribution to the projected student at each chunk's start, where both have
    read the same text; plus, for chunks of several tokens on a side, the binary KL of the chunk's probability."""

    mode = "boundary_kl"
    lanes = ("first", "first")

    def has_kernels(self, *, topk: bool) -> bool:
        return topk or super().has_kernels(topk=topk)

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        tau = self.temperature
        probs_CV = chunks.student_boundary(student.log_probs(tau)).exp()
        if teacher.is_topk:
            ids_CK, log_CK = (x.index_select(0, chunks.teacher_first_C) for x in teacher.topk())
            target = log_CK.to(probs_CV.dtype).exp()
            tail_C = (1 - target.sum(-1)).clamp(min=0)
            rows_C, right, unreached = self.projected(probs_CV, target, ids_CK, tail_C, student, teacher, learned)
        else:
            target = teacher.log_probs(tau).index_select(0, chunks.teacher_first_C).exp()
            rows_C, right, unreached = self.projected(probs_CV, target, None, None, student, teacher, learned)
        log_s, log_t = chunk_log_probs(student, chunks, teacher, tau)
        multi_C = chunks.multi_C.to(rows_C.dtype)
        chunk_C = binary_divergence(log_s, log_t, self.spec) * multi_C
        count = chunks.count(rows_C)
        return self.out(
            rows_C + self.options.chunk_weight * chunk_C,
            chunks,
            {"boundary": rows_C, "chunk": chunk_C},
            boundary_kl=(chunks.weighted(rows_C).sum(), count),
            chunk_kl=(chunks.weighted(chunk_C).sum(), multi_C.sum()),
            proj_accuracy=(right, count),
            unreached_mass=(unreached, count),
        )


class NormalisedPKL(DistributionObjective):
    """P-KL with distributions on both sides: mean probabilities over the chunk, the chunk's own top `vocab_topk`
    teacher columns, everything else in the rest bucket. Independent of batch neighbours."""

    mode = "p_kl_norm"

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        tau, size, most = self.temperature, self.vocab.teacher_size, self.options.vocab_topk
        probs_CV = chunks.student_mean(student.log_probs(tau).exp())
        if teacher.is_topk:
            ids, log_t = teacher.topk()
            dense = probs_CV.new_zeros(ids.shape[0], size).scatter_add_(1, ids, log_t.to(probs_CV.dtype).exp())
            target = chunks.teacher_mean(dense)
        else:
            target = chunks.teacher_mean(teacher.log_probs(tau).exp())
        if most < size or teacher.is_topk:
            target, ids_CK = teacher.axis.topk(target, most)
            tail_C = (1 - target.sum(-1)).clamp(min=0)
            rows_C, right, unreached = self.projected(probs_CV, target, ids_CK, tail_C, student, teacher, learned)
        else:
            rows_C, right, unreached = self.projected(probs_CV, target, None, None, student, teacher, learned)
        count = chunks.count(rows_C)
        return self.out(rows_C, chunks, proj_accuracy=(right, count), unreached_mass=(unreached, count))


class ChunkLikelihood(ProjectedObjective):
    """Chunk likelihoods only: binary divergence between both models' probability of each chunk."""

    mode = "alm"
    lanes = ("first", "first")

    def has_kernels(self, *, topk: bool) -> bool:
        return True

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        log_s, log_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        return self.out(binary_divergence(log_s, log_t, self.spec), chunks)


class SortedProbabilities(ProjectedObjective):
    """L1 distance of the sorted probabilities at each chunk's start: the `uncommon_topk` largest, then both tails."""

    mode = "uld"

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        tau, most = self.temperature, self.options.uncommon_topk
        probs_CV = chunks.student_boundary(student.log_probs(tau)).exp()
        if teacher.is_topk:
            target = teacher.topk()[1].index_select(0, chunks.teacher_first_C).to(probs_CV.dtype).exp()
            k = min(most, target.shape[1])
        else:
            target = teacher.log_probs(tau).index_select(0, chunks.teacher_first_C).exp()
            k = min(most, max(teacher.axis.width(target), student.axis.width(probs_CV)))
        top_s, top_t = student.axis.topk(probs_CV, k)[0], teacher.axis.topk(target, k)[0]
        tails = (top_s.sum(-1) - top_t.sum(-1)).abs()
        return self.out(sorted_l1(top_s, top_t, k) + tails, chunks)


class SameVocabulary(Objective):
    """Direct divergence per position for a teacher with the student's own vocabulary; no projection."""

    mode = "same_vocabulary"
    lanes = ("mean", "mean")

    def has_kernels(self, *, topk: bool) -> bool:
        return super().has_kernels(topk=topk) and self.spec.topk is None

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        tau = self.temperature
        axis, log_s = student.axis, chunks.student_boundary(student.log_probs(tau))
        if teacher.is_topk:
            ids_CK, log_t = teacher.topk()
            empty = torch.isneginf(log_t)
            log_t = log_t.to(log_s.dtype).masked_fill(empty, ABSENT)
            guess, best = axis.argmax(log_s), ids_CK.gather(1, log_t.argmax(-1, keepdim=True)).squeeze(1)
            log_s = axis.gather(log_s, ids_CK).masked_fill(empty, ABSENT)
            log_s = torch.cat((log_s, tail_log_prob(log_s)), -1)
            log_t = torch.cat((log_t, tail_log_prob(log_t)), -1)
            rows_C = divergence_entries(log_s, log_t, self.spec).sum(-1)
        else:
            log_t = teacher.log_probs(tau)
            guess, best = axis.argmax(log_s), axis.argmax(log_t)
            rows_C = divergence_rows(log_s, log_t, self.spec, axis)
        right = (guess == best).sum().to(rows_C)
        return self.out(rows_C, chunks, proj_accuracy=(right, chunks.count(rows_C)))
