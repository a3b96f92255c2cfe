"""The hinted teacher of the hint channel: the student's start, an average of its past, both mixed, or another model.

A live teacher follows the student into whatever it drifts to; the frozen start is the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from limbeck.errors import CheckpointError
from limbeck.losses.contract import Teacher
from limbeck.losses.hint import SelfTeacherKind, ema_update
from limbeck.models.causal import is_lora
from limbeck.models.loading import load_model, tokenizer_size
from limbeck.models.lora import apply_lora
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab


class HintTeacher:
    """Where the hint channel's signals come from, and what of it a checkpoint must keep.

    Attributes:
        sources: one, or two for a trust region: the start and the present.
        trust_region: share of the second source.
    """

    def __init__(
        self,
        sources: Sequence[Teacher],
        *,
        trust_region: float = 0.0,
        student: Policy | None = None,
        average: Policy | None = None,
        decay: float = 0.0,
    ) -> None:
        self.sources, self.trust_region = sources, trust_region
        self._student, self._average, self._decay = student, average, decay

    def after_step(self) -> None:
        """Move the average one step towards the student; nothing for other teachers."""
        if self._average is not None and self._student is not None:
            mine, theirs = _trained(self._student), _trained(self._average, _trained(self._student))
            # both models are laid out alike, so each rank averages its own shards
            ema_update(map(_own, mine.values()), map(_own, theirs.values()), self._decay)

    def state_dict(self) -> dict[str, Any]:
        """Weights of the average, by name, as they lie on the ranks; empty for teachers that can be made again."""
        if self._average is None or self._student is None:
            return {}
        return {"ema": _trained(self._average, _trained(self._student))}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from stored weights, laid out like those of ``state_dict``."""
        if self._average is None or self._student is None:
            return
        stored, own = state.get("ema"), _trained(self._average, _trained(self._student))
        if stored is None or set(stored) != set(own):
            raise CheckpointError(
                "the checkpoint holds no averaged weights of this model; resume with the configuration that wrote it"
            )
        for name, value in own.items():
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
    student: Policy,
    kind: SelfTeacherKind,
    start: PolicyConfig,
    *,
    seed: int,
    ema_decay: float = 0.99,
    trust_region: float = 0.05,
) -> HintTeacher:
    """The student as its own hinted teacher. For a resumed run pass the resumed student: the start is loaded anew.

    Args:
        start: the run file's policy, whose weights the run began with.
        ema_decay: of the average (``ema``).
        trust_region: share of the present student in the mixture with its start (``trust_region``).
    """
    if kind == "live":
        return HintTeacher([LiveTeacher(student)])
    if kind == "ema":
        average = _copy(student, seed)
        return HintTeacher([LiveTeacher(average)], student=student, average=average, decay=ema_decay)
    first = LiveTeacher(_start(student, start, seed))
    if kind == "trust_region":
        return HintTeacher([first, LiveTeacher(student)], trust_region=trust_region)
    return HintTeacher([first])


def _copy(student: Policy, seed: int) -> Policy:
    """A frozen model with the student's present weights, laid out like the student."""
    size = tokenizer_size(student.tokenizer)
    # shards cannot be copied as a module, so the model is made again, adapters included
    model: Any = load_model(student.cfg, dtype=student.model.dtype, vocab_size=size, seed=seed)
    if is_lora(student.model) and student.cfg.lora is not None:
        model = apply_lora(model, student.cfg.lora, seed=seed)
    settings = student.cfg.model_copy(update={"lora": None})
    made = Policy(settings, student.tokenizer, name="average", device=student.device, model=model, init_optimizer=False)
    with torch.no_grad():
        own = dict(made.model.named_parameters())
        for name, value in student.model.named_parameters():
            _own(own[name]).copy_(_own(value))
    return made


def _start(student: Policy, config: PolicyConfig, seed: int) -> Policy:
    """The weights that the run began with, computing exactly as the student does."""
    settings = config.model_copy(update={"lora": None, "param_dtype": config.param_dtype or "float32"})
    return Policy(settings, student.tokenizer, name="start", device=student.device, init_optimizer=False, seed=seed)


def make_other_teacher(config: PolicyConfig, tokenizer: object, student: ByteVocab, *, seed: int) -> HintTeacher:
    """Another model as the hinted teacher, of whatever family."""
    policy = Policy(config, tokenizer, name="teacher", init_optimizer=False, seed=seed)
    return HintTeacher([LiveTeacher(policy, student_fingerprint=student.fingerprint)])
