"""Environments of the package ``verifiers``."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from pydantic import Field, model_validator

from limbeck.environments.settings import EnvironmentSettings
from limbeck.errors import ConfigError

PLAYER = "limbeck.environments.verifiers_process:Verifiers"


class VerifiersEnvironment(EnvironmentSettings):
    """An environment of the package ``verifiers`` (0.4 or newer, Python 3.11), with its tools, turns and rewards.

    Each of its processes plays one episode at a time. The student takes the one seat that has no ``client`` of its own,
    and answers each request for a model's turn; the environment's own program runs the tools.
    """

    kind: Literal["verifiers"] = "verifiers"
    """Where it comes from."""
    taskset: str | dict[str, Any] | None = None
    """Id of an installed taskset, or its settings with their ``id``. A record plays the task that its key ``task``
    numbers, or, with an object there, one of these data; without the key the task with the record's own number."""
    source: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """``module:function`` that is called with ``settings`` and returns an environment, in place of ``taskset``."""
    settings: dict[str, Any] = Field(default={})
    """Further settings of the environment as the package has them: ``id`` of an environment that is paired with the
    taskset, and of each seat such as ``agent`` the ``harness``, ``runtime`` and limits. Without a ``harness`` a seat is
    a loop of the model and the tools; without a ``runtime`` it runs on this machine."""

    @model_validator(mode="after")
    def _one_source(self) -> VerifiersEnvironment:
        if (self.taskset is None) == (self.source is None):
            raise ValueError("on_policy.environment of kind verifiers needs taskset or source, and not both")
        return self

    def order(self) -> dict[str, Any]:
        given = {"taskset": self.taskset, "source": self.source, "settings": self.settings}
        return {"kind": "class", "source": PLAYER, "settings": {**given, "max_turns": self.max_turns}}

    def ready(self) -> None:
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                "on_policy.environment.kind is 'verifiers', whose package is not installed; install "
                "limbeck[environments] (Python 3.11 or newer)"
            )
        super().ready()
