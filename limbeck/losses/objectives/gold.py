"""gold, as it is published."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from limbeck.losses.objectives.common_kl import CommonConfig, CommonKL
from limbeck.losses.vocab.projection import ProjectionLike


class Gold(CommonKL):
    """`CommonKL` on pairs with an exact mapping."""

    class Config(CommonConfig):
        mode: Literal["gold"] = "gold"

    @staticmethod
    def common(projection: ProjectionLike) -> tuple[Tensor, Tensor]:
        student, teacher = projection.exact_pairs()
        return torch.as_tensor(student), torch.as_tensor(teacher)
