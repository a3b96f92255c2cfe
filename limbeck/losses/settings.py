"""Settings of the distillation loss as a plain dataclass: every rule is checked here, without pydantic.

`limbeck.losses.config` holds the pydantic model with the same fields for run files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from limbeck.losses.divergences import ChosenBy, Direction, DivergenceSpec
from limbeck.utils.errors import ConfigError

LossMode = Literal["boundary_kl", "p_kl_norm", "alm", "uld", "p_kl", "gold", "h_kl"]
Combination = Literal["sum", "averaged_logits", "select_teacher"]
Scoring = Literal["static", "ce", "entropy", "max_prob"]
ScalingSource = Literal["running", "first_pass"]
FastPath = Literal["auto", "off", "force"]

REFERENCE_MODES: tuple[str, ...] = ("p_kl", "gold", "h_kl")


def mode_from_flags(gold_loss: bool | None, xtoken_loss: bool | None) -> LossMode | None:
    """The mode that the published flags name: P-KL, gold or H-KL; None where neither flag is given."""
    if gold_loss is None and xtoken_loss is None:
        return None
    if xtoken_loss and not gold_loss:
        raise ConfigError("xtoken_loss=true needs gold_loss=true (together they select H-KL); set both or neither")
    if not gold_loss:
        return "p_kl"
    return "h_kl" if xtoken_loss else "gold"


@dataclass
class LossSettings:
    """See `limbeck.losses.config.CrossTokenizerDistillationLossConfig` for the meaning of each field."""

    mode: LossMode = "boundary_kl"
    projection_matrix_path: str | list[str | None] | None = None
    gold_loss: bool | None = None
    xtoken_loss: bool | None = None
    temperature: float = 1.0
    vocab_topk: int = 8192
    uncommon_topk: int = 8192
    reverse_kl: bool = False
    exact_token_match_only: bool = False
    kl_loss_weight: float = 1.0
    ce_loss_scale: float = 1.0
    dynamic_loss_scaling: bool = False
    student_vocab_size: int | None = None
    teacher_vocab_size: int | list[int] | None = None
    allow_inexact: bool = False
    chunk_weight: float = 1.0
    direction: Direction = "forward"
    jsd_beta: float = 0.5
    jsd_rescale: bool = False
    jsd_patience: int = 20
    entry_clip: float | None = None
    topk: int | None = None
    topk_by: ChosenBy = "teacher"
    teacher_combination: Combination = "sum"
    teacher_weights: list[float] | None = None
    teacher_scoring: Scoring = "static"
    scoring_alpha: float = 1.0
    dynamic_scaling_source: ScalingSource = "running"
    dynamic_scaling_decay: float = 0.9
    learnable_projection: bool = False
    block_rows: int | None = None
    fast_path: FastPath = "auto"

    @classmethod
    def from_any(cls, cfg: Any) -> LossSettings:
        """Settings from a mapping, a pydantic model, another object with these attributes, or None (the defaults)."""
        if isinstance(cfg, cls):
            return cfg
        names = [f.name for f in fields(cls)]
        if cfg is None:
            values: dict[str, Any] = {}
        elif isinstance(cfg, Mapping):
            unknown = sorted(set(cfg) - set(names))
            if unknown:
                raise ConfigError(f"unknown loss settings {unknown}; known are {names}")
            values = dict(cfg)
        else:
            values = {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
        given = values.get("mode")
        flagged = mode_from_flags(values.get("gold_loss"), values.get("xtoken_loss"))
        if flagged is not None:
            if given not in (None, "boundary_kl", flagged):
                raise ConfigError(
                    f"mode is {given!r} but gold_loss and xtoken_loss select {flagged!r}; give one of them"
                )
            values["mode"] = flagged
        return cls(**{k: v for k, v in values.items() if k != "mode" or v is not None})

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", LossMode),
            ("teacher_combination", Combination),
            ("teacher_scoring", Scoring),
            ("dynamic_scaling_source", ScalingSource),
            ("fast_path", FastPath),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {list(get_args(allowed))}")
        positive = ("temperature", "vocab_topk", "uncommon_topk", "block_rows", "jsd_patience")
        not_negative = ("kl_loss_weight", "ce_loss_scale", "chunk_weight")
        for name in positive + not_negative:
            value = getattr(self, name)
            if value is None:
                continue
            if value < 0 or (value == 0 and name in positive):
                raise ConfigError(f"{name} is {value}; it must be {'positive' if name in positive else '0 or more'}")
        if not 0 <= self.dynamic_scaling_decay < 1:
            raise ConfigError(f"dynamic_scaling_decay is {self.dynamic_scaling_decay}; it must lie in [0, 1)")
        if self.reverse_kl:
            if self.direction == "jsd":
                raise ConfigError("reverse_kl=true and direction='jsd' contradict each other; give one of them")
            self.direction = "reverse"
        kind = self.spec.kind  # building it checks the divergence's own rules
        if self.is_reference and kind == "jsd":
            raise ConfigError(f"mode {self.mode!r} has no JSD form; use direction forward or reverse")
        if self.teacher_weights is not None:
            if any(w < 0 for w in self.teacher_weights) or not sum(self.teacher_weights) > 0:
                raise ConfigError(f"teacher_weights are {self.teacher_weights}; none may be negative, one must count")
            if self.teacher_scoring != "static" or self.teacher_combination == "select_teacher":
                raise ConfigError("teacher_weights are static; leave them out where teachers are scored or selected")

    @property
    def is_reference(self) -> bool:
        return self.mode in REFERENCE_MODES

    @property
    def keeps_inexact(self) -> bool:
        """Whether chunks whose bytes differ take part: the published flag rules the reference modes."""
        return not self.exact_token_match_only if self.is_reference else self.allow_inexact

    @property
    def spec(self) -> DivergenceSpec:
        return DivergenceSpec(self.direction, self.jsd_beta, self.jsd_rescale, self.entry_clip, self.topk, self.topk_by)
