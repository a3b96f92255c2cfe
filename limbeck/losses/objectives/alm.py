"""alm: probabilities of whole chunks."""

from __future__ import annotations

from typing import Literal

from limbeck.losses.divergences import binary_divergence
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, ProjectedObjective, chunk_log_probs
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.signals import TeacherScores


class ALM(ProjectedObjective):
    """Chunk likelihoods only: binary divergence between both models' probability of each chunk."""

    measures = ()
    kernel = "limbeck.losses.fast.alm:alm"
    lane_kinds = ("first", "first")
    reads_text_alone = True

    class Config(DivergenceConfig):
        mode: Literal["alm"] = "alm"

    def has_kernels(self, *, topk: bool) -> bool:
        return True

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        log_s, log_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        return self.out(binary_divergence(log_s, log_t, self.spec), chunks)
