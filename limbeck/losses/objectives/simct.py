"""simct (arXiv 2605.07711): every chunk's start, over the shared tokens and the chunk itself as one more unit."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from limbeck.losses.divergences import Direction, DivergenceSpec, divergence_entries
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, chunk_log_probs, refuse_shards
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.objectives.distributions import ABSENT
from limbeck.losses.objectives.shared_vocabulary import SharedVocabulary
from limbeck.losses.signals import TeacherScores


class SimCT(SharedVocabulary):
    """SimCT: at a chunk's start, the shared tokens by their log-probability and, where the chunk has several tokens on
    a side, the chunk as one more unit by the mean log-probability of its tokens; softmax of both sides over these."""

    measures = ("shared_mass_student", "shared_mass_teacher", "proj_accuracy")

    class Config(DivergenceConfig):
        mode: Literal["simct"] = "simct"
        direction: Direction = "reverse"
        """forward: KL(teacher||student); reverse: KL(student||teacher); jsd."""

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
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
