"""Where a device has nothing to do: the gaps between its kernels, and what the host did meanwhile."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from limbeck.utils.timer import Timer

Event = dict[str, Any]
"""Of a trace as torch's profiler exports it: cat, name, ts and dur in microseconds, tid."""
STEP = "benchmark step"
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
BETWEEN = "between sections"


class Span(NamedTuple):
    start: float
    end: float
    name: str


def traced(run: Callable[[int, Timer], Any], steps: int) -> list[Event]:
    """Events of calls `run(number, timer)`, whose sections the timer marks; torch 2.11 and 2.13 export the same."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as found:
        for number in range(steps):
            with record_function(STEP):
                run(number, Timer(around=record_function))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans without overlaps, in order; a joined one has the name of that which began first."""
    out: list[Span] = []
    for span in sorted(spans):
        if out and span.start <= out[-1].end:
            out[-1] = out[-1]._replace(end=max(out[-1].end, span.end))
        else:
            out.append(span)
    return out


def innermost(spans: Sequence[Span], at: float) -> str | None:
    """The name of the span around a moment that began last."""
    around = [span for span in spans if span.start <= at < span.end]
    return max(around).name if around else None


def shares(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """How long each of nested spans was the innermost one between two moments."""
    inside = [span for span in spans if span.start < end and span.end > start]
    edges = sorted({start, end, *(t for s in inside for t in (s.start, s.end) if start < t < end)})
    out: dict[str, float] = {}
    for a, b in pairwise(edges):
        name = innermost(inside, (a + b) / 2) or BETWEEN
        out[name] = out.get(name, 0.0) + b - a
    return out


def gaps(events: Iterable[Event], longest: int = 8) -> dict[str, Any]:
    """Of steps marked `STEP`, from the beginning of the second to that of the last (profiling begins in the first, and
    the last has no other behind it), milliseconds per step: `step_ms`, `idle_ms` without work of the device,
    `by_section` of the host's main thread. `longest`: single gaps: how long they are, the kernel behind each, the
    section that took most of it, and what the main thread ran in its middle. Empty without a device."""
    device: list[Span] = []
    host: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            device.append(_span(event))
        elif event.get("cat") in ON_HOST:
            host.setdefault(event["tid"], []).append(event)
    marks = sorted((e["ts"], tid) for tid, own in host.items() for e in own if e["name"] == STEP)
    if not device or len(marks) < 3:
        return {}
    own = host[marks[0][1]]
    sections = sorted(_span(e) for e in own if e["cat"] == "user_annotation" and e["name"] != STEP)
    ran = sorted(_span(e) for e in own if e["name"] != STEP)
    begin, end, steps = marks[1][0], marks[-1][0], len(marks) - 2
    busy = [span for span in merged(device) if span.end > begin and span.start < end]
    edges = [begin, *(t for span in busy for t in (span.start, span.end)), end]
    names = [span.name for span in busy] + ["the end"]
    found = [(Span(a, b, name)) for a, b, name in zip(edges[::2], edges[1::2], names, strict=True) if b > a]
    total: dict[str, float] = {}
    singles: list[dict[str, Any]] = []
    starts = [section.start for section in sections]
    for gap in found:
        # sections are short beside a step: those that began before the gap ends, back to the last eight before it
        near = sections[max(bisect_right(starts, gap.start) - 8, 0) : bisect_right(starts, gap.end)]
        part = shares(near, gap.start, gap.end)
        for name, time_in in part.items():
            total[name] = total.get(name, 0.0) + time_in
        singles.append({"ms": round((gap.end - gap.start) / 1e3, 2), "before": gap.name[:60], "section": part})
    order = sorted(range(len(found)), key=lambda i: found[i].start - found[i].end)[:longest]
    for number in order:
        one, gap = singles[number], found[number]
        one["section"] = max(one["section"], key=one["section"].__getitem__)
        one["host"] = (innermost(ran, (gap.start + gap.end) / 2) or "Python")[:60]
    by_section = sorted(total.items(), key=lambda item: -item[1])
    return {
        "step_ms": round((end - begin) / 1e3 / steps, 2),
        "idle_ms": round(sum(total.values()) / 1e3 / steps, 2),
        "by_section": {name: round(time_in / 1e3 / steps, 2) for name, time_in in by_section if time_in > 5 * steps},
        "longest": [singles[number] for number in order],
    }


def _span(event: Event) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)), str(event["name"]))


def host_speed() -> dict[str, float]:
    """How fast the host is by itself: a million turns of Python's loop (ms), a small operation of torch on the host,
    one that is queued on the device, a thread that is started and ends (microseconds each)."""

    def microseconds(call: Callable[[], Any], repeat: int) -> float:
        for _ in range(repeat // 10):
            call()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        return round((time.perf_counter() - start) * 1e6 / repeat, 2)

    def turns() -> None:
        for _ in range(1_000_000):
            pass

    def thread() -> None:
        begun = threading.Thread(target=int)
        begun.start()
        begun.join()

    there = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
    here = torch.zeros(8)
    out = {"loop_ms": round(microseconds(turns, 3) / 1e3, 1), "operation_us": microseconds(lambda: here.add_(1), 2000)}
    return out | {"queued_us": microseconds(lambda: there.add_(1), 500), "thread_us": microseconds(thread, 100)}
