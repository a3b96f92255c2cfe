"""Where the time of steps goes: the loop's own sections over a few steps, and a trace of torch's profiler behind them.

The first step allocates and compiles, so it is left out. The steps that are measured run without torch's profiler,
which costs time itself; it then records two more. On an accelerator every section waits for the device at both of its
ends: work is charged to what queued it, and steps take longer than without a profile.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from limbeck.utils.files import write_atomic
from limbeck.utils.timer import Timer

PROFILE_NAME, TRACE_NAME = "profile.json", "profile_trace.json"
SKIPPED, TRACED = 1, 2
"""Steps before those that are measured, and behind them, under torch's profiler."""
MOST_OPERATIONS = 20

SECTIONS = {
    "data": "waiting for the next batch",
    "sample": "the student writes what it learns from",
    "hand_over": "the prompts of the next step, to what writes ahead",
    "teacher": "forward passes of teachers, or reading their stored signals",
    "forward": "forward pass of the student's body",
    "layout": "which rows carry which loss, micro-batches, copies to the device",
    "loss": "heads and loss, with their gradients",
    "backward": "backward pass of the student's body",
    "optimizer": "clipping and the optimizer's step",
    "wait": "reading loss and metrics: the host waits for the device",
    "logging": "metrics, progress, writing them",
    "validation": "validating, samples of text",
    "checkpoint": "writing checkpoints",
    "other": "everything else",
}
"""Parts of a step's time, in the order of a step."""


class StepProfile:
    """Takes the time of ``steps`` steps apart and writes ``profile.json`` and ``profile_trace.json`` into ``folder``.

    Attributes:
        rows: per measured step its number (``step``), the seconds of every section, and of the whole step (``wall``).
    """

    def __init__(self, folder: str | Path, steps: int, device: torch.device) -> None:
        self.folder, self.steps, self.device = Path(folder), steps, device
        self.rows: list[dict[str, float]] = []
        self._seen, self._sections = 0, defaultdict[str, float](float)
        self._begun = time.perf_counter()
        self._profiler: profile | None = None
        self._operations: list[dict[str, Any]] = []

    @property
    def active(self) -> bool:
        """Whether there is still something to measure."""
        return self.steps > 0 and self._seen < SKIPPED + self.steps + TRACED

    def synchronize(self) -> None:
        """Wait for the device, where there is one that works behind the host."""
        if self.device.type == "cuda" and self.active:
            torch.cuda.synchronize(self.device)

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Names a block in the trace, while one is recorded."""
        return nullcontext() if self._profiler is None else record_function(name)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Charge the block to a section."""
        self.synchronize()
        begun = time.perf_counter()
        try:
            with self.mark(name):
                yield
        finally:
            self.synchronize()
            self._sections[name] += time.perf_counter() - begun

    def take(self, timer: Timer) -> None:
        """Add what a timer has measured since its last reset."""
        for name, seconds in timer.get_timing_metrics("sum").items():
            self._sections[name] += seconds

    def end_step(self, step: int) -> bool:
        """A step has ended, with all that came behind it; True where it was the last one of the profile."""
        if not self.active:
            return False
        self.synchronize()
        now = time.perf_counter()
        if SKIPPED <= self._seen < SKIPPED + self.steps:
            self.rows.append({"step": step, **_complete(self._sections, now - self._begun)})
        self._seen += 1
        self._sections.clear()
        if self._seen == SKIPPED + self.steps:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            # acc_events: without it torch warns that events of earlier cycles are lost, and there is one cycle
            self._profiler = profile(activities=activities, acc_events=True)
            self._profiler.__enter__()
        ended = not self.active
        if ended:
            self._finish()
        # writing the profile is no part of the next step
        self._begun = time.perf_counter()
        return ended

    def close(self) -> bool:
        """The run has ended; True where it did so before its profile, which then holds fewer steps."""
        if not self.active or not self.rows:
            return False
        self._seen = SKIPPED + self.steps + TRACED
        self._finish()
        return True

    def _finish(self) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler.export_chrome_trace(str(self.folder / TRACE_NAME))
            self._operations = operations(self._profiler, on_device=self.device.type == "cuda")
            self._profiler = None
        self.write()

    def write(self) -> None:
        """Store what was measured; the page is made of it."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        profile = {
            "device": name,
            "threads": torch.get_num_threads(),
            "steps": [{name: round(value, 6) for name, value in row.items()} for row in self.rows],
            "operations": self._operations,
            "trace": TRACE_NAME if self._operations else None,
        }
        write_atomic(self.folder / PROFILE_NAME, json.dumps(profile, indent=1) + "\n")

    def table(self) -> str:
        """Milliseconds and shares of every section, as lines."""
        return table(self.rows)


def _complete(sections: Mapping[str, float], wall: float) -> dict[str, float]:
    """All sections of a step in their order; ``other`` is what none of them claims."""
    named = {name: sections.get(name, 0.0) for name in SECTIONS}
    named["other"] += sum(seconds for name, seconds in sections.items() if name not in SECTIONS)
    named["other"] += max(wall - sum(named.values()), 0.0)
    return {**named, "wall": wall}


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean seconds per step of every section that took any, and of ``wall``."""
    names = [*SECTIONS, "wall"]
    seconds_by_name = {name: sum(row.get(name, 0.0) for row in rows) / max(len(rows), 1) for name in names}
    return {name: seconds for name, seconds in seconds_by_name.items() if seconds > 0}


def table(rows: list[dict[str, float]]) -> str:
    """Where the time of steps went: a line for every section, largest first."""
    seconds_by_name = means(rows)
    whole = seconds_by_name.pop("wall", 0.0)
    if not whole:
        return "no step was measured"
    lines = [f"where a step's time goes (mean of {len(rows)}, {whole * 1e3:,.1f} ms each)"]
    for name, seconds in sorted(seconds_by_name.items(), key=lambda pair: -pair[1]):
        lines.append(f"  {name:<11}{seconds * 1e3:>10,.1f} ms {seconds / whole:>6.1%}  {SECTIONS[name]}")
    return "\n".join(lines)


def operations(profiler: profile, *, on_device: bool) -> list[dict[str, Any]]:
    """The operations that took most time themselves: of the device where there is one, else of the host."""
    rows = []
    for event in profiler.key_averages():
        if event.key in SECTIONS or event.key.startswith("ProfilerStep"):
            continue
        micros = event.self_device_time_total if on_device else event.self_cpu_time_total
        rows.append({"name": event.key[:120], "calls": int(event.count), "ms": round(micros / 1e3 / TRACED, 3)})
    return sorted(rows, key=lambda row: -row["ms"])[:MOST_OPERATIONS]
