"""An objective of your own in one file: cross-entropy towards the teacher's most likely token.

A run file names it by module and class; a module of the working folder is found, too:

    loss_fn: {mode: "objective:Top1CE", min_prob: 0.2}

    cd examples && limbeck train run.yaml
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from limbeck.losses.objectives import ChunkConfig, ProjectedObjective
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock
from limbeck.losses.signals import TeacherScores


class Top1CE(ProjectedObjective):
    """At every chunk's start, cross-entropy of the student towards the teacher's most likely token, where the student
    has a token of the same bytes."""

    class Config(ChunkConfig):
        """Settings of Top1CE."""

        min_prob: float = Field(default=0.0, ge=0, le=1)
        """Teacher probability below which a chunk does not count."""

    cfg: Config
    student_of: Tensor  # [U + 1] the student's token of a teacher token's bytes; -1: none, as for ids that are no token

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        table = torch.full((self.vocab.teacher_size + 1,), -1)
        table[self.equals.teacher] = self.equals.student
        self.register_buffer("student_of", table, persistent=False)

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        likeliest_C, prob_C = self._likeliest(chunks, teacher)
        token_C = self.student_of[likeliest_C.clamp(max=self.student_of.numel() - 1)]
        # written so that what is no number counts; as 0 times the probability it reaches the sum in any case
        counts_C = (token_C >= 0) & ~(prob_C < self.cfg.min_prob)
        log_CV = chunks.student_boundary(student.log_probs(self.temperature))
        loss_C = -student.axis.gather(log_CV, token_C.clamp(min=0)[:, None]).squeeze(1)
        number = chunks.count(loss_C)
        right = (student.axis.argmax(log_CV) == token_C) & counts_C
        return self.out(
            loss_C * counts_C + 0 * prob_C.to(loss_C.dtype),
            chunks,
            counted=(counts_C.sum().to(loss_C), number),
            proj_accuracy=(right.sum().to(loss_C), counts_C.sum().to(loss_C)),
        )

    def _likeliest(self, chunks: ChunkBlock, teacher: TeacherScores) -> tuple[Tensor, Tensor]:
        """The teacher's most likely token at every chunk's start, and its probability `[C]`."""
        if teacher.is_topk:
            ids_CK, log_CK = (values.index_select(0, chunks.teacher_first_C) for values in teacher.topk())
            best = log_CK.argmax(1, keepdim=True)
            return ids_CK.gather(1, best).squeeze(1).long(), log_CK.gather(1, best).squeeze(1).exp()
        log_CU = teacher.log_probs(self.temperature).index_select(0, chunks.teacher_first_C)
        values, ids = teacher.axis.topk(log_CU, 1)
        return ids.squeeze(1), values.squeeze(1).exp()
