"""Weights of the parts of a loss: the dynamic ratio of distillation to cross-entropy, and the schedules of the three
trace channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from limbeck.errors import LossError

Decay = Literal["none", "linear", "cosine"]

# ---- cross-entropy against distillation ----


class DynamicScale(nn.Module):
    """Running estimates of both losses, and their ratio; part of the checkpoint through `state_dict`. One detached
    number per step, never per micro-batch.

    Before the first value arrives the ratio is 1. All ranks must feed it the same (reduced) values.
    """

    distillation: Tensor
    cross_entropy: Tensor
    steps: Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("distillation", torch.zeros((), dtype=torch.float64))
        self.register_buffer("cross_entropy", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._ratio: float | None = None

    def ratio(self) -> float:
        """CE / KD as it stands for this step; read from the device once per change."""
        if self._ratio is None:
            kd, ce = float(self.distillation), float(self.cross_entropy)
            self._ratio = ce / kd if int(self.steps) and kd > 1e-12 else 1.0
        return self._ratio

    def update(self, distillation: float, cross_entropy: float) -> None:
        """Take one finished step's global mean losses into the running estimate."""
        # the first value replaces the 0 that the estimates start from
        decay = self.decay if int(self.steps) else 0.0
        for name, value in (("distillation", distillation), ("cross_entropy", cross_entropy)):
            if not torch.isfinite(torch.tensor(float(value))):
                raise LossError(f"the step's {name} loss is {value}; dynamic scaling needs finite losses")
            old = getattr(self, name)
            old.mul_(decay).add_((1 - decay) * float(value))
        self.steps.add_(1)
        self._ratio = None

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # read again: the loaded estimates are others
        self._ratio = None


# ---- the channels of traces: policy + alpha x hint + beta x preference ----


class WeightConfig(BaseModel):
    """A channel's weight over the steps: linear from 0 during `warmup_steps`, then `value`, then down to `final` over
    the `decay_steps` that follow `decay_start`. A plain number stands for `value`.

    >>> weight = WeightConfig(value=1.0, warmup_steps=10)
    >>> weight.at(0), weight.at(5), weight.at(10)
    (0.0, 0.5, 1.0)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    value: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The weight, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which it rises linearly from 0."""
    decay: Decay = "none"
    """How it falls later: not at all, linearly, or along a cosine."""
    decay_start: int = Field(default=0, ge=0)
    """Step at which it begins to fall."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps over which it falls."""
    final: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Value that it falls to."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decay != "none" and self.decay_steps == 0:
            raise ValueError(f"a weight with {self.decay} decay needs decay_steps")
        if self.decay != "none" and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"a weight's decay starts at step {self.decay_start}, inside its warm-up of {self.warmup_steps} steps"
            )
        return self

    def at(self, step: int) -> float:
        """The weight at a step, counted from 0."""
        if step < self.warmup_steps:
            return self.value * step / self.warmup_steps
        if self.decay == "none" or step <= self.decay_start:
            return self.value
        progress = min(1.0, (step - self.decay_start) / self.decay_steps)
        left = 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final + (self.value - self.final) * left


@dataclass(frozen=True)
class ChannelWeights:
    """Factors of the three channels: 1, alpha and beta. `policy` turns the policy channel off for data without
    rewards."""

    alpha: WeightConfig = field(default_factory=WeightConfig)
    beta: WeightConfig = field(default_factory=WeightConfig)
    policy: float = 1.0

    def at(self, step: int) -> dict[str, float]:
        """Factor of each channel at a step; a channel with factor 0 need not be computed."""
        return {"policy": self.policy, "hint": self.alpha.at(step), "preference": self.beta.at(step)}
