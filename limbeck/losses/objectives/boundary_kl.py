"""boundary_kl: the teacher's next-token distribution against the projected student at chunk starts."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from limbeck.losses.divergences import binary_divergence
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, ProjectedObjective, chunk_log_probs
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.objectives.distributions import TINY, rest_floor, target_divergence
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE


class BoundaryKL(ProjectedObjective):
    """KL of the teacher's next-token distribution to the projected student at each chunk's start, where both have
    read the same text; plus, for chunks of several tokens on a side, the binary KL of the chunk's probability."""

    measures = ("boundary_kl", "chunk_kl", "proj_accuracy", "uncovered_mass")
    kernel = "limbeck.losses.fast.boundary_kl:boundary_kl"
    lane_kinds = ("first", "first")

    class Config(DivergenceConfig):
        mode: Literal["boundary_kl"] = "boundary_kl"
        chunk_weight: float = Field(default=1.0, ge=0)
        """Factor of the chunk term."""

    cfg: Config

    def has_kernels(self, *, topk: bool) -> bool:
        return topk or super().has_kernels(topk=topk)

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        tau = self.temperature
        probs_CV = chunks.student_boundary(student.log_probs(tau)).exp()
        if teacher.is_topk:
            ids_CK, log_CK = (x.index_select(0, chunks.teacher_first_C) for x in teacher.topk())
            target = log_CK.to(probs_CV.dtype).exp()
            tail_C = (1 - target.sum(-1)).clamp(min=0)
            rows_C, right, uncovered = self._projected(probs_CV, target, ids_CK, tail_C, student, teacher)
        else:
            target = teacher.log_probs(tau).index_select(0, chunks.teacher_first_C).exp()
            rows_C, right, uncovered = self._projected(probs_CV, target, None, None, student, teacher)
        log_s, log_t = chunk_log_probs(student, chunks, teacher, tau)
        multi_C = chunks.multi_C.to(rows_C.dtype)
        chunk_C = binary_divergence(log_s, log_t, self.spec) * multi_C
        count = chunks.count(rows_C)
        return self.out(
            rows_C + self.cfg.chunk_weight * chunk_C,
            chunks,
            boundary_kl=(chunks.weighted(rows_C).sum(), count),
            chunk_kl=(chunks.weighted(chunk_C).sum(), multi_C.sum()),
            proj_accuracy=(right, count),
            uncovered_mass=(uncovered, count),
        )

    def _projected(
        self,
        probs_CV: Tensor,
        target: Tensor,
        ids_CK: Tensor | None,
        tail_C: Tensor | None,
        student: BlockLogits,
        teacher: TeacherScores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss `[C]`, right guesses, uncovered teacher mass) of student probabilities against `target`.

        ids_CK None: target `[C, U]` is the whole distribution. Otherwise target `[C, K]` belongs to these columns (a
        target of 0 marks an unused place) and tail_C is the teacher's mass elsewhere.
        """
        vocab, axis = self.map_between(student, teacher), WHOLE
        if ids_CK is None:
            q = vocab.project_all(probs_CV)
            member = vocab.reachable[None].expand_as(target)
            # a sum over the unmapped tokens and no difference, so a smaller floor will do
            rest_C, floor, axis = student.axis.sum(probs_CV * (~vocab.mapped)), TINY, teacher.axis
        else:
            member = vocab.reaches(ids_CK) & (target > 0)
            q = vocab.project_at(probs_CV, ids_CK) * member
            rest_C, floor = 1 - q.sum(-1), rest_floor(q.dtype)
        rows_C = target_divergence(target, member, q, tail_C, rest_C, floor, self.spec, axis)
        with torch.no_grad():
            right = (axis.argmax(q) == axis.argmax(target)).sum().to(q)
            uncovered = axis.sum(target.masked_fill(member, 0)).sum()
        return rows_C, right, uncovered
