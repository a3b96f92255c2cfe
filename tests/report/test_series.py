"""Curves: outlines that survive thinning, averages that keep means, numbers that people read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.report.series import Series, chart, format_number, moving_average, thinned, wants_log

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


@given(POINTS)
def test_averages_stay_within_the_values(points: list[tuple[float, float]]) -> None:
    smooth = moving_average(points, 0.1)
    assert [x for x, _ in smooth] == [x for x, _ in points]
    low, high = min(y for _, y in points), max(y for _, y in points)
    slack = 1e-6 * max(abs(low), abs(high), 1.0)
    assert all(low - slack <= y <= high + slack for _, y in smooth)
    assert smooth[0][1] == pytest.approx(points[0][1])


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
    assert [y for _, y in curve["points"]] == pytest.approx([y for _, y in points], rel=1e-6)
    assert (curve["average"] is not None) == (len(points) > 20)


def test_a_wide_spread_wants_a_logarithmic_axis() -> None:
    spread = [(i, 10.0**i) for i in range(8)]
    assert wants_log(spread)
    assert not wants_log([(i, 1.0 + i) for i in range(8)])
    assert not wants_log([(0, -1.0), *spread])
