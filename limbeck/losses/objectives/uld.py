"""uld: sorted probabilities."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, ProjectedObjective
from limbeck.losses.objectives.config import ChunkConfig
from limbeck.losses.signals import TeacherScores


class ULD(ProjectedObjective):
    """L1 distance of the sorted probabilities at each chunk's start: the `uncommon_topk` largest, then both tails."""

    measures = ()

    class Config(ChunkConfig):
        mode: Literal["uld"] = "uld"
        uncommon_topk: int = Field(default=8192, ge=1)
        """Probabilities that are sorted."""

    cfg: Config

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        tau, most = self.temperature, self.cfg.uncommon_topk
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


def sorted_l1(p_s: Tensor, p_t: Tensor, k: int) -> Tensor:
    """L1 distance of the k largest values of each side in falling order, the shorter list padded with zeros: `[n]`."""
    top_s = p_s.topk(min(k, p_s.shape[1]), dim=-1).values
    top_t = p_t.topk(min(k, p_t.shape[1]), dim=-1).values
    width = max(top_s.shape[1], top_t.shape[1])
    top_s = F.pad(top_s, (0, width - top_s.shape[1]))
    top_t = F.pad(top_t, (0, width - top_t.shape[1]))
    return (top_s - top_t).abs().sum(-1)
