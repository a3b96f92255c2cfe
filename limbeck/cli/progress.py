"""The one live display of the command line: bars on a terminal, nothing or plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichBars
from rich.table import Column
from rich.text import Text

from limbeck.utils.progress import Bar, Lines, Pace, Progress, Quiet, Silent, Stage, counted, duration, showing


@contextmanager
def display(*, lines: bool = False, quiet: bool = False) -> Iterator[Progress]:
    """Bars on standard error while the block runs, where that is a terminal, for everything that runs inside.

    Elsewhere nothing is shown, or, with ``lines``, what a log file wants. ``quiet``: results and warnings alone.
    """
    terminal = Console(stderr=True)
    if quiet:
        with showing(Quiet() if lines else Silent()) as screen:
            yield screen
        return
    if not terminal.is_terminal:
        yield Lines() if lines else Silent()
        return

    def text(what: str) -> TextColumn:
        return TextColumn(f"{{task.{what}}}", markup=False, table_column=Column(no_wrap=True))

    bar = BarColumn(bar_width=None, table_column=Column(min_width=1, ratio=1))
    columns = (text("description"), bar, text("fields[count]"), text("fields[note]"), _Waiting())
    bars = RichBars(*columns, console=terminal, transient=True, expand=True, refresh_per_second=4)
    with bars, showing(_Terminal(bars)) as screen:
        yield screen


class _Waiting(ProgressColumn):
    """How long a task takes already, where nobody knows how much there is; otherwise its note has an ETA."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is not None else duration(task.elapsed or 0.0))


class _Terminal:
    def __init__(self, bars: RichBars) -> None:
        self._bars = bars

    def begin(self, what: str, total: float | None = None, done: float = 0) -> Bar:
        return _TerminalBar(self._bars, what, total, done)

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        stage, bar = Stage(what), self.begin(what)
        try:
            yield stage
        finally:
            bar.close()
        self.say(f"{what}: {stage.took()}")


class _TerminalBar:
    def __init__(self, bars: RichBars, what: str, total: float | None, done: float) -> None:
        self._bars, self._total, self._done, self._note = bars, total, done, ""
        self._pace = Pace(done)
        self._task: TaskID = bars.add_task(what, total=total, completed=int(done), count="", note="")

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._done, self._note = done, note
        self._total = self._total if total is None else total
        self._show()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._show()

    def _show(self) -> None:
        count, note = counted(self._done, self._total), self._note
        if self._total is not None:
            note = f"{note}  {self._pace.eta(self._done, self._total)}".lstrip()
        self._bars.update(self._task, completed=self._done, total=self._total, count=count, note=note)

    def close(self) -> None:
        self._bars.remove_task(self._task)
