"""Rewards of what the student wrote: a Python function, or a judge behind a chat endpoint."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from numbers import Real
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from limbeck.config import SECRET
from limbeck.errors import ConfigError, DataError, one_line
from limbeck.traces.endpoint import EndpointConfig
from limbeck.traces.hints import shortened
from limbeck.traces.judge import EndpointJudge
from limbeck.traces.replay import NoAnswer
from limbeck.traces.schema import Message, Trace

Asked = str | Sequence[dict[str, Any]]
"""A prompt: the beginning of a text, or the messages of a conversation."""
Reward = Callable[[Asked, str], float]
"""(prompt, answer) -> reward."""


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

    function: str | None = None
    """``module:function`` of the environment or the working folder, called with the prompt (a text, or a list of
    messages) and the answer; returns a number."""
    judge: JudgeConfig | None = None
    """A model that scores answers."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the reward's loss beside that of the teachers."""

    @model_validator(mode="after")
    def _one(self) -> RewardConfig:
        if (self.function is None) == (self.judge is None):
            raise ValueError("a reward comes from a function or from a judge; give one of them")
        return self


def make_reward(config: RewardConfig) -> Reward:
    """The function of a run file, or the judge; refused at once where it cannot be had."""
    if config.judge is not None:
        return _judged(EndpointJudge(EndpointConfig(**config.judge.model_dump())))
    assert config.function is not None
    module, _, name = config.function.partition(":")
    if not module or not name:
        raise ConfigError(f"on_policy.reward.function is {config.function!r}; expected module:function")
    try:
        found = getattr(_imported(module), name)
    except Exception as error:  # a module of the user's may raise whatever it likes
        raise ConfigError(
            f"on_policy.reward.function {config.function!r} cannot be had: {one_line(error, 200)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"on_policy.reward.function {config.function!r} is a {type(found).__name__}, no function")
    return _checked(found, config.function)


def _imported(module: str) -> Any:
    """A module of the environment or, where that has none of its name, of the working folder."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        return import_module(module)
    finally:
        if added:
            sys.path.remove(here)


def _checked(function: Callable[..., Any], name: str) -> Reward:
    def reward(asked: Asked, answer: str) -> float:
        try:
            value = function(asked, answer)
        # whatever a user's function raises is told in one line
        except Exception as error:
            raise DataError(
                f"the reward function {name!r} raised {type(error).__name__}: {one_line(error, 200)} for the answer "
                f"{shortened(answer, 80)!r}; the step was not taken, and the run goes on from its last checkpoint"
            ) from error
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
        raise DataError(
            f"the reward function {name!r} returned {value!r} for the answer {shortened(answer, 80)!r}; "
            "expected a number"
        )

    return reward


def _judged(judge: EndpointJudge) -> Reward:
    def reward(asked: Asked, answer: str) -> float:
        before = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        messages = [Message.model_validate({"role": m["role"], "content": str(m.get("content") or "")}) for m in before]
        trace = Trace(id="sample", messages=[*messages, Message(role="assistant", content=answer)])
        try:
            return judge.score(trace)
        except NoAnswer as failure:
            raise DataError(
                f"the judge {judge.name!r} gave no score ({one_line(failure, 200)}); the step was not taken, and the "
                "run goes on from its last checkpoint"
            ) from failure

    return reward
