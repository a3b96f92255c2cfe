"""What each part of a loss counts: the dynamic ratio of distillation to cross-entropy, the weights of several teachers,
and the schedules of the three trace channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from limbeck.data.layout import ChunkLayout
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, LossError
from limbeck.losses.divergences import tail_log_prob
from limbeck.losses.signals import TeacherRows, TeacherScores

Scoring = Literal["static", "ce", "entropy", "max_prob"]
Decay = Literal["none", "linear", "cosine"]
CHANNELS: tuple[str, str, str] = ("policy", "hint", "preference")

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
        self._blend(distillation, cross_entropy, self.decay if int(self.steps) else 0.0)

    def set(self, distillation: float, cross_entropy: float) -> None:
        """Fix the ratio from a first pass over this step's batch."""
        self._blend(distillation, cross_entropy, 0.0)

    def _blend(self, distillation: float, cross_entropy: float, decay: float) -> None:
        for name, value in (("distillation", distillation), ("cross_entropy", cross_entropy)):
            if not torch.isfinite(torch.tensor(float(value))):
                raise LossError(f"the step's {name} loss is {value}; dynamic scaling needs finite losses")
            old = getattr(self, name)
            old.mul_(decay).add_((1 - decay) * float(value))
        self.steps.add_(1)
        self._ratio = None

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._ratio = None


# ---- several teachers ----


def _row_scores(scores: TeacherScores, ids: Tensor, kind: Scoring) -> Tensor:
    """-ce, -entropy or max_prob of each row, `[Q]`."""
    if kind == "ce":
        return scores.log_prob_of(ids)
    axis = scores.axis
    if scores.is_topk:
        log_p = scores.topk()[1]
        log_p = torch.cat((log_p, tail_log_prob(log_p)), -1) if kind == "entropy" else log_p
    else:
        log_p = scores.log_probs()
    if kind == "entropy":
        return axis.sum(torch.special.entr(log_p.exp())).neg()
    return axis.topk(log_p, 1)[0].squeeze(1).exp()


@torch.no_grad()
def sample_scores(
    teacher: TeacherRows, layout: ChunkLayout, kind: Scoring, num_samples: int, block_rows: int, comm: Comm
) -> Tensor:
    """Mean score of each sample under one teacher, `[B]`; -inf for samples without an aligned chunk. Per sample, so
    that the weights do not depend on how a batch is cut into micro-batches.

    Entropy and max_prob are means over teacher tokens; -ce is per *student* token, so that teachers whose tokens
    differ in length are compared on the same text. A sample's rows may lie with several ranks.
    """
    rows = [_row_scores(scores, layout.teacher_ids_Q[at], kind).double() for at, scores in teacher.blocks(block_rows)]
    total = torch.zeros(num_samples, dtype=torch.float64, device=layout.teacher_rows_Q.device)
    count = torch.zeros_like(total)
    if rows:
        total.index_add_(0, layout.sample_C[layout.teacher_chunk_Q], torch.cat(rows))
        owner = layout.student_chunk_M if kind == "ce" else layout.teacher_chunk_Q
        count.index_add_(0, layout.sample_C[owner], torch.ones_like(owner, dtype=total.dtype))
    # context-parallel ranks, per micro-batch and teacher: two numbers per sample
    total, count = comm.sum(torch.stack((total, count))).unbind()
    return (total / count.clamp(min=1)).masked_fill(count == 0, -torch.inf)


def sample_weights(scores: Tensor, alpha: float, *, select: bool) -> Tensor:
    """Weights of teachers per sample from scores `[teachers, B]`: softmax(alpha * score), or 1 for the best one."""
    if select:
        weights = torch.nn.functional.one_hot(scores.argmax(0), scores.shape[0]).t().to(scores.dtype)
    else:
        weights = torch.softmax((scores * alpha).masked_fill(torch.isneginf(scores), -torch.inf), 0)
    return weights.nan_to_num(0.0)


# ---- the channels of traces: policy + alpha x hint + beta x preference ----


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


class WeightConfig(BaseModel):
    """A channel's weight over the steps; a plain number stands for `value`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    value: float = Field(default=0.0, ge=0)
    """The weight, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which it rises linearly from 0."""
    decay: Decay = "none"
    """How it falls later: not at all, linearly, or along a cosine."""
    decay_start: int = Field(default=0, ge=0)
    """Step at which it begins to fall."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps over which it falls."""
    final: float = Field(default=0.0, ge=0)
    """What it falls to."""

    def schedule(self) -> WeightSchedule:
        """The weight as the trainer reads it."""
        return WeightSchedule(**self.model_dump())

    @model_validator(mode="after")
    def _consistent(self) -> WeightConfig:
        try:
            self.schedule()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


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

    losses: channel -> loss that is already divided by its global count. For tests and small use: channels have batches
    of their own and gradients add up, so a trainer multiplies each channel's loss and never makes one graph of them.
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
