"""h_kl: gold with a relaxed common set, as it is published."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from limbeck.losses.objectives.common_kl import CommonConfig, CommonKL
from limbeck.losses.vocab.projection import ProjectionLike, common_pairs


class HKL(CommonKL):
    """`CommonKL` on pairs whose largest weight is at least .6."""

    class Config(CommonConfig):
        mode: Literal["h_kl"] = "h_kl"

    @staticmethod
    def common(projection: ProjectionLike) -> tuple[Tensor, Tensor]:
        return common_pairs(projection, 0.6)
