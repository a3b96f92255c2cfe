"""Curves: outlines that survive thinning, averages that keep means, numbers that people read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.report.series import MOST_POINTS, Series, axis, chart, format_number, means, thinned, wants_log

VALUES = st.floats(-1e9, 1e9, allow_nan=False)
POINTS = st.lists(VALUES, min_size=1, max_size=80).map(lambda ys: [(float(i), y) for i, y in enumerate(ys)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.2345678, "1.235"),
        (0.012345, "0.01235"),
        (5358.2, "5,358"),
        (3e-4, "3e-4"),
        (-2.5, "-2.500"),
        (12345678.0, "1.23e7"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@given(POINTS, st.integers(2, 20))
def test_thinning_keeps_order_and_extremes(points: list[tuple[float, float]], most: int) -> None:
    kept = thinned(points, most)
    assert len(kept) <= max(most, 2) or len(points) <= most
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert max(y for _, y in kept) == max(y for _, y in points)


@given(POINTS, st.integers(1, 20))
def test_means_of_stretches_keep_the_mean(points: list[tuple[float, float]], most: int) -> None:
    kept = means(points, most)
    assert len(kept) == min(most, len(points))
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    low, high = min(y for _, y in points), max(y for _, y in points)
    slack = 1e-6 * max(abs(low), abs(high), 1.0)
    assert all(low - slack <= y <= high + slack for _, y in kept)
    if len(points) % most == 0:
        whole = sum(y for _, y in points) / len(points)
        assert sum(y for _, y in kept) / len(kept) == pytest.approx(whole, abs=slack)


def test_no_points_no_chart() -> None:
    assert chart("t", [Series("a", [])]) is None
    one = chart("t", [Series("a", []), Series("b", [(3.0, 1.0)])])
    assert one is not None
    assert [s["name"] for s in one["plot"]["series"]] == ["b"]


@given(POINTS)
def test_a_chart_keeps_the_values(points: list[tuple[float, float]]) -> None:
    one = chart("t", [Series("a", points, smooth=True)])
    assert one is not None
    (curve,) = one["plot"]["series"]
    assert [x for x, _ in curve["points"]] == [x for x, _ in points]
    assert [y for _, y in curve["points"]] == pytest.approx([y for _, y in points], rel=1e-5)
    assert curve["means"] is None


def test_a_long_curve_keeps_its_extremes_and_its_means() -> None:
    points = [(i, 1000.0 if i == 70_001 else -5.0 if i == 3 else i / 1e5) for i in range(100_000)]
    one = chart("t", [Series("a", points, smooth=True)])
    assert one is not None
    (curve,) = one["plot"]["series"]
    assert len(curve["points"]) <= MOST_POINTS
    assert {(70_001, 1000.0), (3, -5.0)} <= set(curve["points"])
    assert len(curve["means"]) == MOST_POINTS // 2
    assert max(y for _, y in curve["means"]) == pytest.approx(1000 / 200 + 0.7, abs=0.1)


def test_what_a_step_stands_for() -> None:
    steps = [(i, 1.0) for i in range(1, 5001)]
    found = axis([(i, 100.0) for i, _ in steps], steps)
    assert len(found["steps"]) <= 1001
    assert (found["steps"][0], found["steps"][-1]) == (0, 5000)
    assert found["tokens"][-1] == 500_000
    assert axis([], []) == {"steps": []}
    assert "tokens" not in axis([], steps)
    assert axis([(1, 5.0)], [(1, -2.0), (2, 1e300)]) == {"steps": []}


def test_a_wide_spread_wants_a_logarithmic_axis() -> None:
    spread = [(i, 10.0**i) for i in range(8)]
    assert wants_log(spread)
    assert not wants_log([(i, 1.0 + i) for i in range(8)])
    assert not wants_log([(0, -1.0), *spread])
