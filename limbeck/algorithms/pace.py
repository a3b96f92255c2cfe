"""Seconds of what goes on side by side within a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from limbeck.losses.contract import Teacher
from limbeck.utils.timer import BusyClock


class Pace:
    """Seconds within each step of what overlaps: samples written, rows scored elsewhere, weights trained.

    Args:
        teachers: those of a step; figures are of those that are asked ahead.
        writing: runs while samples are written.
    """

    def __init__(self, teachers: Sequence[Teacher], writing: BusyClock | None = None) -> None:
        self._teachers, self._writing = [teacher for teacher in teachers if teacher.asks_ahead], writing
        self._before, self._trained = self._so_far(), 0.0

    def _so_far(self) -> dict[str, float]:
        written = {} if self._writing is None else {"sample": self._writing.seconds}
        # side by side: the slowest is the one that is waited for
        asked = [teacher.seconds_asked for teacher in self._teachers]
        return {**written, **{f"score_{number}": seconds for number, seconds in enumerate(asked)}}

    def begin(self) -> None:
        self._before = self._so_far()

    @contextmanager
    def train(self) -> Iterator[None]:
        """Around the training of a step, of which waiting for teachers elsewhere is no part."""
        begun, waited = time.perf_counter(), sum(teacher.seconds_waited for teacher in self._teachers)
        yield
        waited = sum(teacher.seconds_waited for teacher in self._teachers) - waited
        self._trained = time.perf_counter() - begun - waited

    def figures(self) -> dict[str, float]:
        """Of the step that ends; empty where nothing overlaps."""
        if self._writing is None and not self._teachers:
            return {}
        spent = {name: seconds - self._before[name] for name, seconds in self._so_far().items()}
        scored = [spent.pop(name) for name in list(spent) if name.startswith("score_")]
        if scored:
            spent["score"] = max(scored)
        return {f"overlap/{name}": seconds for name, seconds in {**spent, "train": self._trained}.items()}
