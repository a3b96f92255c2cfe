"""How long work tells whoever watches: bars and lines. The command line brings its own display; see ``showing``."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol


class Stage:
    """A part of a command's work that is shown as one line with its time; ``note`` is added to that line."""

    def __init__(self, what: str) -> None:
        self.what, self.note = what, ""
        self._begun = time.monotonic()

    def took(self) -> str:
        """The note and the time since the stage began."""
        parts = (self.note, duration(time.monotonic() - self._begun))
        return ", ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Seconds as people say them: ``0.4 s``, ``37 s``, ``3 min 20 s``, ``5 h 12 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, per in (("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // per} {smaller}"
    return f"{whole} s"


class Pace:
    """How fast a task goes forward, from where it stood when it was begun."""

    def __init__(self, done: float) -> None:
        self._first, self._begun = done, time.monotonic()

    def eta(self, done: float, total: float) -> str:
        """Time that is left, once there is something to tell it from."""
        if done <= self._first:
            return "ETA -"
        left = (time.monotonic() - self._begun) / (done - self._first) * (total - done)
        return f"ETA {duration(left)}" if left >= 10 else f"ETA {left:.0f} s"


def counted(done: float, total: float | None) -> str:
    """``7/10``, or ``7`` where nobody knows how much there is."""
    return f"{done:,.0f}" + ("" if total is None else f"/{total:,.0f}")


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

    def stage(self, what: str) -> AbstractContextManager[Stage]:
        """Show what the block does while it does it, and how long it took."""


class Silent:
    """Shows nothing; its own bar."""

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Silent:
        return self

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        yield Stage(what)

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        pass

    def advance(self, amount: float = 1) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """Plain lines on standard error, one every ``seconds`` and one at the end of a task: what a log file wants."""

    # of the process's standard error: whether its last line is a stage that waits for its time
    _waiting: ClassVar[bool] = False

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        return _LineBar(self, what, total, done)

    def say(self, line: str) -> None:
        self._end_line()
        print(line, file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        self._end_line()
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
        Lines._waiting, stage = True, Stage(what)
        try:
            yield stage
        except BaseException:
            self._end_line()
            raise
        # other lines may have come between
        if Lines._waiting:
            Lines._waiting = False
            print(f" {stage.took()}", file=sys.stderr, flush=True)
        else:
            self.say(f"{what}: {stage.took()}")

    @staticmethod
    def _end_line() -> None:
        if Lines._waiting:
            Lines._waiting = False
            print(file=sys.stderr, flush=True)


class Quiet(Lines):
    """Results and warnings as plain lines, without progress."""

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        return Silent()

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        yield Stage(what)


class _LineBar:
    def __init__(self, lines: Lines, what: str, total: float | None, done: float) -> None:
        self._lines, self._what, self._total, self._done = lines, what, total, done
        self._pace, self._printed = Pace(done), -math.inf

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._done, self._total = done, self._total if total is None else total
        now = time.monotonic()
        if now - self._printed < self._lines.seconds and done != self._total:
            return
        self._printed = now
        parts = [f"{self._what} {counted(done, self._total)}", note]
        if self._total is not None:
            parts.append(self._pace.eta(done, self._total))
        self._lines.say("  ".join(part for part in parts if part))

    def advance(self, amount: float = 1) -> None:
        self.update(self._done + amount)

    def close(self) -> None:
        pass


class Bars:
    """tqdm's bars: widgets in a notebook, text on a terminal."""

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        return _TqdmBar(what, total, done)

    def say(self, line: str) -> None:
        from tqdm.auto import tqdm

        tqdm.write(line)

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        stage = Stage(what)
        yield stage
        self.say(f"{what}: {stage.took()}")


class _TqdmBar:
    def __init__(self, what: str, total: float | None, done: float) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(desc=what, total=total, initial=done)

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        if total is not None:
            self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def advance(self, amount: float = 1) -> None:
        self._bar.update(amount)

    def close(self) -> None:
        self._bar.close()


_shown: ContextVar[Progress | None] = ContextVar("_shown", default=None)


def current() -> Progress | None:
    """The display of this process, where somebody has set one up."""
    return _shown.get()


class Watched:
    """Items whose passing by is shown on a live display, where there is one; may be gone through again."""

    def __init__(self, items: Any, what: str) -> None:
        self._items, self._what = items, what

    def __iter__(self) -> Iterator[Any]:
        bar = (current() or Silent()).begin(self._what, len(self._items))
        try:
            for item in self._items:
                yield item
                bar.advance()
        finally:
            bar.close()


def say(line: str) -> None:
    """A line on the display of this process, or a plain one; rank 0 speaks for all."""
    _speaker().say(line)


def stage(what: str) -> AbstractContextManager[Stage]:
    """A stage on the display of this process, or as a plain line; rank 0 speaks for all."""
    return _speaker().stage(what)


def _speaker() -> Progress:
    return current() or Lines() if os.environ.get("RANK", "0") == "0" else Silent()


@contextmanager
def showing(progress: Progress) -> Iterator[Progress]:
    """Let everything that runs inside the block show itself on ``progress``."""
    token = _shown.set(progress)
    try:
        yield progress
    finally:
        _shown.reset(token)
