"""Named wall-clock sections of a step, reduced to one number each."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

T = TypeVar("T")

REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "sum": sum,
    "min": min,
    "max": max,
    "median": statistics.median,
    "std": statistics.pstdev,
    "count": len,
}


class BusyClock:
    """Seconds in which at least one of several threads was inside of it, as a ``with`` block.

    >>> clock = BusyClock()
    >>> with clock:
    ...     pass
    >>> clock.seconds >= 0
    True
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._inside, self._since, self._before = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = self._clock()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """So far, with those of a block that is not left yet."""
        with self._lock:
            return self._before + (self._clock() - self._since if self._inside else 0.0)


class Timer:
    """Measures named sections in seconds.

    >>> timer = Timer()
    >>> with timer.time("train/forward"):
    ...     pass
    >>> sorted(timer.get_timing_metrics("sum"))
    ['train/forward']

    ``synchronize`` (for example ``torch.cuda.synchronize``) is called at both ends of a section, so that work queued on
    an accelerator is charged to the section that started it. ``around`` makes what else surrounds a section, by its
    name: a profiler's mark.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        around: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.synchronize, self.around = synchronize, around or nullcontext
        self._open: dict[str, float] = {}
        self._times: dict[str, list[float]] = {}

    def _now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.perf_counter()

    def start(self, label: str) -> None:
        """Open a section; a second start of an open one is an error of the caller."""
        if label in self._open:
            raise ValueError(f"timer section {label!r} is already running; stop it first")
        self._open[label] = self._now()

    def stop(self, label: str) -> float:
        """Close a section and return its seconds."""
        if label not in self._open:
            raise ValueError(f"timer section {label!r} is not running; start it first")
        elapsed = self._now() - self._open.pop(label)
        self._times.setdefault(label, []).append(elapsed)
        return elapsed

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measure the body of a ``with`` block, also when it raises."""
        self.start(label)
        try:
            with self.around(label):
                yield
        finally:
            self.stop(label)

    def iterate(self, items: Iterable[T], label: str) -> Iterator[T]:
        """The items, with the time that each of them takes to arrive measured as a section."""
        source = iter(items)
        while True:
            with self.time(label):
                try:
                    item = next(source)
                except StopIteration:
                    return
            # outside of the section: what is done with an item is not the time it took to arrive
            yield item

    def get_elapsed(self, label: str) -> list[float]:
        """All measured durations of a section, in order, in seconds."""
        if label not in self._times:
            raise KeyError(f"timer section {label!r} was never measured; known: {sorted(self._times)}")
        return list(self._times[label])

    def reduce(self, label: str, reduction_op: str = "mean") -> float:
        """One number for a section: mean, sum, min, max, median, std or count."""
        if reduction_op not in REDUCTIONS:
            raise ValueError(f"unknown reduction {reduction_op!r}; use one of {sorted(REDUCTIONS)}")
        return float(REDUCTIONS[reduction_op](self.get_elapsed(label)))

    def get_timing_metrics(self, reduction_op: str = "mean") -> dict[str, float]:
        """All sections, reduced the same way."""
        return {label: self.reduce(label, reduction_op) for label in self._times}

    def reset(self, label: str | None = None) -> None:
        """Forget one section, or all of them (also those still open)."""
        if label is None:
            self._times.clear()
            self._open.clear()
        else:
            self._times.pop(label, None)
            self._open.pop(label, None)
