"""Rewards of what the student wrote: a verifier, a Python function, or a judge behind a chat endpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from limbeck.config import SECRET
from limbeck.errors import ConfigError, DataError, one_line
from limbeck.traces.endpoint import EndpointConfig
from limbeck.traces.hints import shortened
from limbeck.traces.judge import EndpointJudge
from limbeck.traces.replay import NoAnswer
from limbeck.traces.schema import Message, Trace
from limbeck.utils.metrics import Pair
from limbeck.utils.plugins import load_object
from limbeck.verifiers import Answer, AnyVerifier, Reason, Record, Verifier

Asked = str | Sequence[dict[str, Any]]
"""A prompt: the beginning of a text, or the messages of a conversation."""
_NOTHING: Record = MappingProxyType({})


class Reward(ABC):
    """Scores what was written after a prompt."""

    keys: tuple[str, ...] | None = ()
    """Keys of a prompt's record that it reads; None: all."""

    @abstractmethod
    def __call__(self, asked: Asked, answer: str, record: Record = _NOTHING) -> float:
        """The reward of one answer; a DataError ends the run before its step is taken."""

    def check(self, record: Record) -> None:
        """Raise a DataError where a record does not hold what the reward needs."""

    def of_all(
        self, asked: Sequence[Asked], answers: Sequence[str], records: Sequence[Record]
    ) -> tuple[list[float], dict[str, Pair]]:
        """Rewards in order, and figures of them as (sum, count)."""
        return [self(*one) for one in zip(asked, answers, records, strict=True)], {}


class JudgeConfig(BaseModel):
    """A model behind an OpenAI-compatible chat endpoint that scores answers from 0 to 1."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    url: str = Field(json_schema_extra=SECRET)
    """Base address, up to and including ``/v1``."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str = Field(default="OPENAI_API_KEY", json_schema_extra=SECRET)
    """Environment variable with the key."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds for one request."""
    max_retries: int = Field(default=5, ge=0)
    """Further attempts after a failed one."""


class RewardConfig(BaseModel):
    """A reward for each sample, learnt from by policy gradient beside the teachers: a sample counts by its reward less
    the mean of the samples of its prompt."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    verifier: AnyVerifier | None = None
    """Judge of an answer, by its prompt's record: a name such as ``number``, ``module:function``, or
    a section with the name and settings. An answer that is right counts 1, one on which the verifier raises an error
    0."""
    function: str | None = None
    """``module:function`` of the environment or the working folder, called with the prompt (a text, or a list of
    messages) and the answer; returns a number."""
    judge: JudgeConfig | None = None
    """A model that scores answers."""
    environment: bool = False
    """The reward of an episode is what its environment says at its end (``on_policy.environment``); each answer of the
    episode counts by it."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the reward's loss beside that of the teachers."""

    @model_validator(mode="after")
    def _one(self) -> RewardConfig:
        if sum(bool(source) for source in (self.verifier, self.function, self.judge, self.environment)) != 1:
            raise ValueError("a reward comes from a verifier, a function, a judge or an environment; give one of them")
        return self

    @property
    def source(self) -> str:
        """Source of the reward, in a word or two."""
        others = "environment" if self.environment else "judge"
        return self.function or (self.verifier.name if self.verifier is not None else others)


def make_reward(config: RewardConfig) -> Reward:
    """The reward of a run file; refused at once where it cannot be had."""
    if config.verifier is not None:
        config.verifier.ready()
        return _Verified(config.verifier)
    if config.judge is not None:
        return _Judged(EndpointJudge(EndpointConfig(**config.judge.model_dump())))
    assert config.function is not None
    function = load_object(config.function, "on_policy.reward.function")
    if not callable(function):
        raise ConfigError(f"on_policy.reward.function {config.function!r} is a {type(function).__name__}, no function")
    return _Function(function, config.function)


class _Verified(Reward):
    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.keys = verifier, verifier.keys

    def __call__(self, asked: Asked, answer: str, record: Record = _NOTHING) -> float:
        return self.verifier.verify(Answer(answer), record).score

    def check(self, record: Record) -> None:
        self.verifier.check(record)

    def of_all(
        self, asked: Sequence[Asked], answers: Sequence[str], records: Sequence[Record]
    ) -> tuple[list[float], dict[str, Pair]]:
        verdicts = self.verifier.verify_all([Answer(answer) for answer in answers], records)
        reasons, count = [verdict.reason for verdict in verdicts], float(len(verdicts))
        names: tuple[Reason, ...] = ("right", "no_answer", "failed")
        figures: dict[str, Pair] = {f"sample/{name}": (float(reasons.count(name)), count) for name in names}
        return [verdict.score for verdict in verdicts], figures


class _Function(Reward):
    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name

    def __call__(self, asked: Asked, answer: str, record: Record = _NOTHING) -> float:
        try:
            value = self.function(asked, answer)
        # whatever a user's function raises is reported in one line
        except Exception as error:
            raise DataError(
                f"the reward function {self.name!r} raised {type(error).__name__}: {one_line(error, 200)} for the "
                f"answer {shortened(answer, 80)!r}; the step was not taken, and the run goes on from its last "
                "checkpoint"
            ) from error
        # Real, not float: numpy's numbers, too
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
        raise DataError(
            f"the reward function {self.name!r} returned {value!r} for the answer {shortened(answer, 80)!r}; "
            "expected a number"
        )


class _Judged(Reward):
    def __init__(self, judge: EndpointJudge) -> None:
        self.judge = judge

    def __call__(self, asked: Asked, answer: str, record: Record = _NOTHING) -> float:
        before = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        messages = [Message.model_validate({"role": m["role"], "content": str(m.get("content") or "")}) for m in before]
        trace = Trace(id="sample", messages=[*messages, Message(role="assistant", content=answer)])
        try:
            return self.judge.score(trace)
        except NoAnswer as failure:
            raise DataError(
                f"the judge {self.judge.name!r} gave no score ({one_line(failure, 200)}); the step was not taken, and "
                "the run goes on from its last checkpoint"
            ) from failure
