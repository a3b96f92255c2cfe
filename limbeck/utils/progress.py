"""How long work tells whoever watches: bars and lines. The command line brings its own display; see ``showing``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Bar(Protocol):
    """One task that goes forward."""

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        """Set how much is done; ``note`` is shown beside it."""

    def advance(self, amount: float = 1) -> None:
        """Add to what is done."""

    def close(self) -> None:
        """The task has ended, finished or not."""


class Progress(Protocol):
    """A display of tasks and lines."""

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        """Show a new task; ``total`` None where nobody knows how much there is."""

    def say(self, line: str) -> None:
        """Show a line that stays."""


class Silent:
    """Shows nothing; its own bar."""

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Silent:
        return self

    def say(self, line: str) -> None:
        pass

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        pass

    def advance(self, amount: float = 1) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """Plain lines on standard error, one every ``seconds`` and one at the end of a task: what a log file wants."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        return _LineBar(self, what, total, done)

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _LineBar:
    def __init__(self, lines: Lines, what: str, total: float | None, done: float) -> None:
        self._lines, self._what, self._total = lines, what, total
        self._first = self._done = done
        self._begun, self._printed = time.monotonic(), -math.inf

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._done, self._total = done, self._total if total is None else total
        now = time.monotonic()
        if now - self._printed < self._lines.seconds and done != self._total:
            return
        self._printed = now
        parts = [f"{self._what} {done:,.0f}" + ("" if self._total is None else f"/{self._total:,.0f}")]
        if note:
            parts.append(note)
        if self._total is not None:
            pace = (now - self._begun) / max(done - self._first, 1)
            parts.append(f"ETA {pace * (self._total - done):.0f} s")
        self._lines.say("  ".join(parts))

    def advance(self, amount: float = 1) -> None:
        self.update(self._done + amount)

    def close(self) -> None:
        pass


_shown: ContextVar[Progress | None] = ContextVar("_shown", default=None)


def current() -> Progress | None:
    """The display of this process, where somebody has set one up."""
    return _shown.get()


@contextmanager
def showing(progress: Progress) -> Iterator[Progress]:
    """Let everything that runs inside the block show itself on ``progress``."""
    token = _shown.set(progress)
    try:
        yield progress
    finally:
        _shown.reset(token)
