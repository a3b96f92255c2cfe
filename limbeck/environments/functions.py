"""Python functions as tools."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from limbeck.environments.channel import EnvironmentFailure, EnvironmentProcess
from limbeck.environments.settings import EnvironmentSettings
from limbeck.errors import ConfigError

_SCHEMA_SECONDS = 120.0


class FunctionTools(EnvironmentSettings):
    """Python functions: those that ``__all__`` names, or the public ones of a module.

    Their schemas come from type hints and docstrings. A conversation begins with its record's messages. A function
    keeps nothing for the next call: after one that hung or ended its process the episode goes on with a new one.
    """

    restarts: ClassVar[bool] = True

    kind: Literal["functions"] = "functions"
    """Where it comes from."""
    source: str
    """A Python file, or the name of a module."""

    def order(self) -> dict[str, Any]:
        return {"kind": "functions", "source": self._place(), "most": self.max_answer_chars}

    def _place(self) -> str:
        return os.path.abspath(self.source) if self.source.endswith(".py") else self.source

    def tools(self) -> list[dict[str, Any]]:
        return _schemas(self.source, self._place(), tuple(self.pass_env))

    def ready(self) -> None:
        self.tools()
        super().ready()


@lru_cache(maxsize=8)
def _schemas(source: str, path: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(f"on_policy.environment.source is {source!r}, which is no file; give a Python file")
    process = EnvironmentProcess({"kind": "schemas", "source": path}, folder=None, memory_mb=None, more=names)
    try:
        reply = process.reply(time.monotonic() + _SCHEMA_SECONDS)
    except EnvironmentFailure as failure:
        raise ConfigError(
            f"the functions of {source!r} are no tools: {str(failure)[:300]}; give each of them type hints and a "
            "docstring with a line for every argument (Args:)"
        ) from failure
    finally:
        process.close()
    if not reply["tools"]:
        raise ConfigError(f"{source!r} has no public function that could be a tool; define some")
    return list(reply["tools"])
