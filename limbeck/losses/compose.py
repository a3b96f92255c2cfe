"""The three-channel objective: policy + alpha x hint + beta x preference, with weights that follow a schedule.

Channels have batches of their own, and gradients add up, so the total is never one graph: a trainer multiplies each
channel's loss by its factor and leaves out the channels whose factor is 0. With alpha = beta = 0 nothing but the policy
channel is computed, and the result is the plain objective's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from limbeck.utils.errors import ConfigError

Decay = Literal["none", "linear", "cosine"]
CHANNELS: tuple[str, str, str] = ("policy", "hint", "preference")


@dataclass(frozen=True)
class WeightSchedule:
    """A weight over training steps: linear from 0 during `warmup_steps`, then `value`, then down to `final` over the
    `decay_steps` that follow `decay_start`.

    >>> schedule = WeightSchedule(1.0, warmup_steps=10)
    >>> schedule.at(0), schedule.at(5), schedule.at(10)
    (0.0, 0.5, 1.0)
    """

    value: float = 0.0
    warmup_steps: int = 0
    decay: Decay = "none"
    decay_start: int = 0
    decay_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and math.isfinite(self.final)) or min(self.value, self.final) < 0:
            raise ConfigError(f"a channel's weight is {self.value} (final {self.final}); it must be 0 or more")
        if self.decay not in get_args(Decay):
            raise ConfigError(f"a weight's decay is {self.decay!r}; expected one of {list(get_args(Decay))}")
        if min(self.warmup_steps, self.decay_start, self.decay_steps) < 0:
            raise ConfigError("warmup_steps, decay_start and decay_steps of a weight must be 0 or more")
        if self.decay != "none" and self.decay_steps == 0:
            raise ConfigError(f"a weight with {self.decay} decay needs decay_steps")
        if self.decay != "none" and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"a weight's decay starts at step {self.decay_start}, inside its warm-up of {self.warmup_steps} steps"
            )

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

    alpha: WeightSchedule = field(default_factory=WeightSchedule)
    beta: WeightSchedule = field(default_factory=WeightSchedule)
    policy: float = 1.0

    def at(self, step: int) -> dict[str, float]:
        """Factor of each channel at a step; a channel with factor 0 need not be computed."""
        return {"policy": self.policy, "hint": self.alpha.at(step), "preference": self.beta.at(step)}


def compose(losses: Mapping[str, Tensor], factors: Mapping[str, float]) -> Tensor:
    """Sum of channel losses times their factors, in the order of `CHANNELS`; channels with factor 0 are not touched.

    losses: channel -> loss that is already divided by its global count.
    """
    unknown = sorted(set(losses) - set(CHANNELS))
    if unknown:
        raise ConfigError(f"there are no channels {unknown}; expected some of {list(CHANNELS)}")
    total: Tensor | None = None
    for name in CHANNELS:
        factor = factors.get(name, 0.0)
        if name not in losses or factor == 0:
            continue
        # A factor of 1 must not cost a multiplication's rounding in a narrow dtype.
        term = losses[name] if factor == 1 else losses[name] * factor
        total = term if total is None else total + term
    if total is None:
        raise ConfigError(f"no channel counts: losses {sorted(losses)}, factors {dict(factors)}")
    return total
