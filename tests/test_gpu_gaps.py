"""`benchmarks/gpu/gaps.py` says where a device has nothing to do, and what the host did meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import step
from benchmarks.gpu.gaps import BETWEEN, STEP, Span, gaps, host_speed, merged, shares, traced
from limbeck.utils.timer import Timer


def event(cat: str, name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}


def steps(count: int) -> list[dict[str, Any]]:
    """Steps of 10 ms: kernels on two streams up to 6 ms, a copy inside one of them, nothing until the next step's."""
    out = []
    for number in range(count):
        at = number * 10_000.0
        out += [
            event("user_annotation", STEP, at, at + 9_500),
            event("gpu_user_annotation", STEP, at, at + 9_500, tid=7),
            event("user_annotation", "layout", at + 100, at + 2_000),
            event("cpu_op", "aten::cat", at + 500, at + 1_500),
            event("user_annotation", "forward", at + 2_000, at + 3_000),
            event("user_annotation", "wait", at + 4_000, at + 9_000),
            event("cuda_runtime", "cudaStreamSynchronize", at + 5_000, at + 8_990),
            event("cpu_op", "of a thread beside it", at, at + 9_000, tid=2),
            event("kernel", "first", at + 2_500, at + 4_500, tid=7),
            event("kernel", "second", at + 4_000, at + 6_000, tid=8),
            event("gpu_memcpy", "Memcpy HtoD", at + 5_000, at + 5_500, tid=7),
        ]
    return out


def test_gaps_are_counted_by_section_and_named_by_what_follows() -> None:
    found = gaps(steps(5), longest=2)
    assert found["step_ms"] == 10
    # 6.5 of 10: 4 at a step's end, 2.5 at its beginning
    assert found["idle_ms"] == pytest.approx(6.5)
    assert found["by_section"] == {"wait": 3.0, "layout": 1.9, BETWEEN: 1.1, "forward": 0.5}
    # the gap over the end of a step is one, and longer than that in front of the first whole step
    assert found["longest"] == [
        {"ms": 6.5, "before": "first", "section": "wait", "host": "Python"},
        {"ms": 6.5, "before": "first", "section": "wait", "host": "Python"},
    ]


def test_the_operation_in_the_middle_is_the_main_threads_innermost() -> None:
    events = steps(4)
    # the device is busy until the next step begins: its gap is that of the layout
    events += [event("kernel", "optimizer", n * 10_000 + 6_000, (n + 1) * 10_000, tid=7) for n in range(4)]
    found = gaps(events, longest=1)
    assert found["idle_ms"] == pytest.approx(2.5)
    assert found["longest"] == [{"ms": 2.5, "before": "first", "section": "layout", "host": "aten::cat"}]


def test_without_a_device_or_steps_there_is_nothing_to_say() -> None:
    assert gaps([e for e in steps(5) if not e["cat"].startswith(("kernel", "gpu"))]) == {}
    assert gaps(steps(2)) == {}


def test_spans() -> None:
    assert merged([Span(3, 4, "c"), Span(0, 2, "a"), Span(1, 3, "b")]) == [Span(0, 4, "a")]
    nested = [Span(0, 10, "outer"), Span(2, 4, "inner")]
    assert shares(nested, 1, 12) == {"outer": 7, "inner": 2, BETWEEN: 2}


def test_a_trace_has_the_steps_and_their_sections() -> None:
    def run(number: int, timer: Timer) -> None:
        with timer.time("layout"):
            torch.ones(3).sum()

    found = [(e["cat"], e["name"]) for e in traced(run, 3)]
    assert found.count(("user_annotation", STEP)) == found.count(("user_annotation", "layout")) == 3
    assert ("cpu_op", "aten::sum") in found
    assert all(value > 0 for value in host_speed().values())


def test_a_row_says_what_the_host_did() -> None:
    args = SimpleNamespace(projection=None, tiny=True, steps=2, gaps=True, profile=False)
    rows: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "report", lambda name, row, goal: rows.update({name: row}))
        step.live_and_cached(args, ["cached"])  # type: ignore[arg-type]
    assert set(rows) == {"step_cached", "step_cached_hidden"}
    for row in rows.values():
        assert row["ms_with_threads"] > 0
        assert {"teacher", "forward", "layout", "loss", "backward", "optimizer", "wait"} <= set(row["host_ms"])
        assert 0 < sum(row["host_ms"].values()) <= 1.01 * row["ms"] + 0.1
