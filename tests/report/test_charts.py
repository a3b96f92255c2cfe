"""Charts: round ticks, outlines that survive thinning, averages that keep means, drawings inside their box."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limbeck.report.charts import (
    WIDTH,
    Series,
    format_number,
    line_chart,
    moving_average,
    nice_ticks,
    thinned,
    wants_log,
)

VALUES = st.floats(-1e9, 1e9, allow_nan=False)
POINTS = st.lists(VALUES, min_size=1, max_size=80).map(lambda ys: [(float(i), y) for i, y in enumerate(ys)])


@given(VALUES, st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    high = low + span
    assume(high - low >= abs(low) * 1e-6)
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    slack = (high - low) * 1e-6
    assert all(low - slack <= t <= high + slack for t in ticks)
    steps = {round((b - a) / (ticks[1] - ticks[0]), 3) for a, b in itertools.pairwise(ticks)}
    assert steps == {1.0}
    mantissa = (ticks[1] - ticks[0]) / 10 ** math.floor(math.log10(ticks[1] - ticks[0]) + 1e-6)
    assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3


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


@given(POINTS, st.booleans())
def test_everything_is_drawn_inside_the_box(points: list[tuple[float, float]], zero: bool) -> None:
    chart = line_chart("t", [Series("a", points, smooth=True)], zero=zero, height=200)
    for drawn in re.findall(r'<polyline class="[^"]*" points="([^"]*)"', chart):
        for pair in drawn.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= 200
    assert "nan" not in chart.lower()


def test_no_points_no_chart() -> None:
    assert line_chart("t", [Series("a", [])]) == ""
    assert "<circle" in line_chart("t", [Series("a", [(3.0, 1.0)])])


def test_a_wide_spread_wants_a_logarithmic_axis() -> None:
    spread = [(i, 10.0**i) for i in range(8)]
    assert wants_log(spread)
    assert not wants_log([(i, 1.0 + i) for i in range(8)])
    assert not wants_log([(0, -1.0), *spread])
    chart = line_chart("t", [Series("a", spread)], log=True)
    heights = [float(p.split(",")[1]) for p in re.findall(r'points="([^"]*)"', chart)[0].split()]
    gaps = [a - b for a, b in itertools.pairwise(heights)]
    assert max(gaps) - min(gaps) < 0.3, "equal ratios are equal distances"
