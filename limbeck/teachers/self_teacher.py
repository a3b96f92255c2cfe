"""The student as its own teacher: as it began, an average of its past, as it is, or without its adapters.

It teaches where it reads more than the student does, such as a hint, or where it holds the student near its start. A
teacher that follows the student into whatever it drifts to corrects nothing; the frozen start is the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.tensor import DTensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.errors import CheckpointError, ConfigError
from limbeck.losses.contract import State, Teacher
from limbeck.losses.hint import SelfTeacherKind, ema_update
from limbeck.losses.signals import TeacherOutput
from limbeck.models.causal import is_lora
from limbeck.models.loading import ModelConfig, load_model, tokenizer_size
from limbeck.models.lora import apply_lora
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.teachers.kinds import SourceConfig, TeacherSetup
from limbeck.teachers.live import LiveTeacher

Weights = Literal["frozen", "ema", "live", "base"]


class SelfSource(SourceConfig):
    """The student itself: it has the student's model and tokenizer, so that the section names none."""

    kind: Literal["self"] = "self"
    weights: Weights = "frozen"
    """The student's start, a moving average of its weights, or, without a copy in memory, what lies below the adapters
    of a LoRA student (``base``); ``live``: the present weights, which teach only where they read more than the
    student."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """With ``ema``: share of the average that stays at each step."""


class SelfTeacher(LiveTeacher):
    """The student's weights of some time. For a resumed run make it from the resumed student: a frozen start is loaded
    anew, an average is taken from the checkpoint.

    Args:
        policy: the model that is run; the student itself for ``live`` and ``base``.
        student: whose weights an average follows.
        decay: share of the average that stays at each step; None: the weights stand still, or are the student's own.
        base: run the student without its adapters.
    """

    Config = SelfSource
    loads_model = False
    follows_student = True

    def __init__(
        self,
        policy: Policy,
        *,
        student: Policy | None = None,
        decay: float | None = None,
        base: bool = False,
        number: int = 0,
    ) -> None:
        super().__init__(policy, number=number)
        # the weights are the student's: there is nothing to compare before the first step, and no second writer
        self.model = None
        self._average, self._followed, self._decay, self._base = policy, student, decay, base

    @classmethod
    def make(cls, source: Any, setup: TeacherSetup) -> SelfTeacher:
        assert setup.student is not None
        teacher = make_self_teacher(
            setup.student, source.weights, setup.start or setup.student.cfg, seed=setup.seed, ema_decay=source.ema_decay
        )
        teacher.number = setup.number
        return teacher

    @classmethod
    def shown(cls, source: SelfSource, section: ModelConfig) -> str:
        names = {"frozen": "at its start", "ema": "on average", "live": "as it is", "base": "without its adapters"}
        return f"the student {names[source.weights]}"

    @classmethod
    def holds_weights(cls, source: SelfSource) -> bool:
        return source.weights in ("frozen", "ema")

    @classmethod
    def reads_start(cls, source: SelfSource) -> bool:
        return source.weights == "frozen"

    def identity(self) -> dict[str, Any]:
        # the run's own weights, which its checkpoints hold
        return {}

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        # for the pass alone: the student's next one needs its adapters
        with self.policy.model.disable_adapter() if self._base else nullcontext():
            yield

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> TeacherOutput:
        with self._chosen():
            return super().signal(mb, device)

    def log_probs(self, batch: BatchedDataDict) -> Tensor:
        with self._chosen():
            return super().log_probs(batch)

    def step_end(self) -> None:
        """Move the average one step towards the student."""
        if self._decay is not None and self._followed is not None:
            mine, theirs = _trained(self._followed), _trained(self._average, _trained(self._followed))
            # both models are laid out alike, so each rank averages its own shards
            ema_update(map(_own, mine.values()), map(_own, theirs.values()), self._decay)

    def state_dict(self) -> State:
        """Weights of an average, by name, as they lie on the ranks; nothing of weights that can be had again."""
        if self._decay is None or self._followed is None:
            return {}
        return {"ema": _trained(self._average, _trained(self._followed))}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Go on from stored weights, laid out like those of ``state_dict``."""
        if self._decay is None or self._followed is None:
            return
        stored, average = state.get("ema"), _trained(self._average, _trained(self._followed))
        if stored is None or set(stored) != set(average):
            raise CheckpointError(
                "the checkpoint holds no averaged weights of this model; resume with the configuration that wrote it"
            )
        for name, value in average.items():
            _own(value).copy_(_own(stored[name]))


def _own(value: Tensor) -> Tensor:
    """This rank's part of a weight."""
    return value.to_local() if isinstance(value, DTensor) else value


def _trained(policy: Policy, like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Parameters by name: those that are trained, or those that ``like`` names."""
    return {
        name: p.detach()
        for name, p in policy.model.named_parameters()
        if (p.requires_grad if like is None else name in like)
    }


def make_self_teacher(
    student: Policy, weights: Weights, start: PolicyConfig, *, seed: int, ema_decay: float = 0.99
) -> SelfTeacher:
    """The student as its own teacher. ``start``: the run file's policy, whose weights the run began with."""
    if weights == "live":
        return SelfTeacher(student)
    if weights == "ema":
        return SelfTeacher(_copy(student, seed), student=student, decay=ema_decay)
    if weights == "base":
        _check_base(student)
        return SelfTeacher(student, base=True)
    return SelfTeacher(_start(student, start, seed))


def hint_teachers(
    student: Policy, kind: SelfTeacherKind, start: PolicyConfig, *, seed: int, ema_decay: float
) -> list[Teacher]:
    """Who reads the hints where the student does it itself: one teacher, or for a trust region its start and its
    present, which the loss mixes."""
    wanted: tuple[Weights, ...] = ("frozen", "live") if kind == "trust_region" else (kind,)
    return [make_self_teacher(student, weights, start, seed=seed, ema_decay=ema_decay) for weights in wanted]


def _check_base(student: Policy) -> None:
    if not is_lora(student.model):
        raise ConfigError("the student has no adapters to be switched off; set policy.lora, or weights to frozen")
    if student.dims.is_sharded:
        raise ConfigError("adapters are switched off in whole models alone; set weights to frozen, or use one process")
    if student.head().module is not None:
        raise ConfigError("the student's head has adapters, which stay on; leave it out, or set weights to frozen")


def _copy(student: Policy, seed: int) -> Policy:
    """A frozen model with the student's present weights, laid out like the student."""
    size = tokenizer_size(student.tokenizer)
    # shards cannot be copied as a module, so the model is made again, adapters included
    model: Any = load_model(student.cfg, dtype=student.model.dtype, vocab_size=size, seed=seed)
    if is_lora(student.model) and student.cfg.lora is not None:
        model = apply_lora(model, student.cfg.lora, seed=seed)
    # the adapters are there, and a Policy would add its own
    settings = student.cfg.model_copy(update={"lora": None})
    copy = Policy(settings, student.tokenizer, name="average", device=student.device, model=model, init_optimizer=False)
    with torch.no_grad():
        parameters = dict(copy.model.named_parameters())
        for name, value in student.model.named_parameters():
            _own(parameters[name]).copy_(_own(value))
    return copy


def _start(student: Policy, config: PolicyConfig, seed: int) -> Policy:
    """The weights that the run began with, computing exactly as the student does."""
    settings = config.model_copy(update={"lora": None, "param_dtype": config.param_dtype or "float32"})
    return Policy(settings, student.tokenizer, name="start", device=student.device, init_optimizer=False, seed=seed)
