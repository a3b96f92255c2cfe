"""Base of the published gold and H-KL, kept for comparison; their flaws are theirs.

Known: averaged teacher log-probabilities are no distribution; the common-set KL pushes every uncommon token down by
p_S[j] times the teacher's mass on the common set.
"""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, ProjectedObjective, Settings
from limbeck.losses.objectives.config import PublishedConfig
from limbeck.losses.objectives.uld import sorted_l1
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.projection import CommonPairs, ProjectionLike


class CommonConfig(PublishedConfig):
    """Settings of gold and H-KL."""

    uncommon_topk: int = Field(default=8192, ge=1)
    """Probabilities outside the common set that are sorted."""


class CommonKL(ProjectedObjective):
    """KL over the common pairs, not renormalised, plus the L1 distance of the sorted uncommon rest.

    Distributions of a chunk are means of log-probabilities. Which pairs are common is all that tells gold and H-KL
    apart.
    """

    measures = ("common_kl", "uncommon_l1", "proj_accuracy")
    needs_logits = True
    kernel = "limbeck.losses.fast.common_kl:common_kl"
    lane_kinds = ("mean", "mean")

    cfg: CommonConfig

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        self.pairs = CommonPairs(*self.common(projection))
        if not self.pairs.student.numel():
            raise LossError(f"mode {self.mode!r} found no common token in the projection; use boundary_kl")

    @staticmethod
    @abstractmethod
    def common(projection: ProjectionLike) -> tuple[Tensor, Tensor]:
        """Paired student and teacher ids."""

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        most = self.cfg.uncommon_topk
        log_s = chunks.student_mean(student.log_probs(self.temperature))
        log_t = chunks.teacher_mean(teacher.log_probs(self.temperature))
        (common_s, common_t, axis), rest = self.pairs.columns(log_s, log_t, (student.axis, teacher.axis))
        if self.spec.kind == "reverse":
            kl_C = axis.sum(common_s.exp() * (common_s - common_t))
        else:
            kl_C = axis.sum(common_t.exp() * (common_t - common_s))
        tops = [rest_axis.topk(values.exp(), most)[0] for values, rest_axis in rest]
        l1_C = sorted_l1(tops[0], tops[1], most)
        right = (axis.argmax(common_s) == axis.argmax(common_t)).sum()
        count = chunks.count(log_s)
        return self.out(
            kl_C + l1_C,
            chunks,
            common_kl=(chunks.weighted(kl_C).sum(), count),
            uncommon_l1=(chunks.weighted(l1_C).sum(), count),
            proj_accuracy=(right.to(kl_C), count),
        )
