"""The one live display of the command line: bars on a terminal, nothing or plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from limbeck.utils.progress import Bar, Lines, Progress, Silent, showing

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID


@contextmanager
def display(*, lines: bool = False, quiet: bool = False) -> Iterator[Progress]:
    """Bars on standard error while the block runs, where that is a terminal, for everything that runs inside.

    Elsewhere nothing is shown, or, with ``lines``, what a log file wants.
    """
    from rich.console import Console

    terminal = Console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield Lines() if lines and not quiet else Silent()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichBars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with RichBars(*columns, console=terminal, transient=True) as bars, showing(_Terminal(bars)) as shown:
        yield shown


class _Terminal:
    def __init__(self, bars: RichBars) -> None:
        self._bars = bars

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        return _TerminalBar(self._bars, self._bars.add_task(what, total=total, completed=int(done), note=""))

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)


class _TerminalBar:
    def __init__(self, bars: RichBars, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._bars.update(self._task, completed=done, total=total, note=note)

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self._task, amount)

    def close(self) -> None:
        self._bars.remove_task(self._task)
