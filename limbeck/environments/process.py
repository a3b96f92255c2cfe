"""A program that answers JSON lines, in whatever language."""

from __future__ import annotations

import shutil
from typing import Any, Literal

from pydantic import Field

from limbeck.environments.settings import EnvironmentSettings
from limbeck.errors import ConfigError


class ProgramEnvironment(EnvironmentSettings):
    """A program that reads requests from its standard input and writes replies to its standard output, each a JSON
    object in a line.

    ``{"method": "start", "record": {...}}`` begins an episode and is answered by
    ``{"messages": [...], "tools": [...]}``;
    ``{"method": "answer", "calls": [{"id", "name", "arguments"}], "message": {...}}`` by ``{"messages": [...]}``;
    ``{"method": "judge", "conversation": [...]}`` by ``{"reward": 1.0, "done": false}``. Anything may be answered by
    ``{"error": "..."}``. It ends when its input does.
    """

    kind: Literal["process"] = "process"
    """Where it comes from."""
    command: list[str] = Field(min_length=1)
    """The program with its arguments; it works in the folder of the run."""

    @property
    def greets(self) -> bool:
        return False

    @property
    def folder(self) -> str | None:
        return "."

    def order(self) -> dict[str, Any]:
        return {"kind": "process", "command": self.command}

    def ready(self) -> None:
        if shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"on_policy.environment.command begins with {self.command[0]!r}, which is no program here; install "
                "it, or give its place"
            )
