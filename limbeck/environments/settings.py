"""Settings that environments of every kind have."""

from __future__ import annotations

import tempfile
import time
from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from limbeck.config import FREE
from limbeck.environments.channel import EnvironmentFailure, EnvironmentProcess
from limbeck.errors import ConfigError


class EnvironmentSettings(BaseModel):
    """An environment of a run file: where it comes from, and the limits of an episode."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    restarts: ClassVar[bool] = False
    """Whether an episode can go on with a new process, because nothing that happened before matters to it."""

    kind: str
    """Where it comes from."""
    max_turns: int = Field(default=8, ge=1)
    """Answers of the student in an episode."""
    max_tokens: int = Field(default=4096, ge=1)
    """Tokens that the student writes in an episode; no answer begins behind so many."""
    max_seconds: float = Field(default=120.0, gt=0)
    """Time that the environment may take in an episode; the student's own time does not count."""
    call_seconds: float = Field(default=30.0, gt=0)
    """Time for one reply of the environment; then its process is ended."""
    max_answer_chars: int = Field(default=4000, ge=1)
    """Longest message of the environment; the rest is cut off."""
    memory_mb: int | None = Field(default=4096, ge=64)
    """Address space of a process; null: any, as programs need that reserve more than they use."""
    at_once: int = Field(default=16, ge=1)
    """Episodes that are played at a time on each rank, each with a process of its own."""
    pass_env: list[str] = []
    """Names of environment variables that its processes see, besides ``PATH`` and the like."""
    keep_traces: int = Field(default=4, ge=0, json_schema_extra=FREE)
    """Episodes of each step that are stored as traces in ``episodes.jsonl`` of the run folder; 0: none."""
    redact: bool = Field(default=True, json_schema_extra=FREE)
    """Take keys, tokens and passwords out of these traces."""

    @abstractmethod
    def order(self) -> dict[str, Any]:
        """Work of a process, see ``worker.py``."""

    @property
    def greets(self) -> bool:
        """Whether a process says that it is ready before it is asked."""
        return True

    @property
    def folder(self) -> str | None:
        """Where a process works; None: in an empty folder of its own."""
        return None

    def tools(self) -> list[dict[str, Any]] | None:
        """JSON schemas of tools that are the same for all episodes; None: ``start`` gives them."""
        return None

    def make_process(self, **more: Any) -> EnvironmentProcess:
        """A process that is ready for an episode; an `EnvironmentFailure` where there is none in time."""
        # before the start, which is part of what may take so long
        begin = time.monotonic()
        process = EnvironmentProcess(
            self.order(), folder=self.folder, memory_mb=self.memory_mb, more=tuple(self.pass_env), **more
        )
        if self.greets:
            try:
                process.reply(begin + self.call_seconds)
            except EnvironmentFailure:
                process.close()
                raise
        return process

    def ready(self) -> None:
        """Raise a ConfigError where no process of it can be had."""
        # a file and no pipe: one that nobody reads meanwhile would fill up and hold the process
        with tempfile.TemporaryFile() as errors:
            try:
                process = self.make_process(errors=errors)
            except (EnvironmentFailure, OSError) as failure:
                errors.seek(0)
                said = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()[-1:]
                more = f" ({said[0][:200]})" if said else ""
                raise ConfigError(f"on_policy.environment cannot be started: {str(failure)[:300]}{more}") from failure
            process.close()
