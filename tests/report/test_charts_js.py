"""The drawing of charts, run by node: round ticks, everything inside its box, numbers as elsewhere on the page."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.report import page
from limbeck.report.series import WIDTH, Series, axis, chart, format_number

SCRIPT = Path(page.__file__).parent / "static" / "charts.js"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def javascript(expression: str, cases: list[Any]) -> list[Any]:
    """``expression`` of each ``it`` of the cases."""
    code = (
        "const vm = require('vm'), fs = require('fs');"
        f"vm.runInThisContext(fs.readFileSync({str(SCRIPT)!r}, 'utf8') + ';globalThis.Charts = Charts');"
        "const cases = JSON.parse(fs.readFileSync(0, 'utf8'));"
        f"console.log(JSON.stringify(cases.map(it => {expression})));"
    )
    done = subprocess.run(["node", "-e", code], input=json.dumps(cases), capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def test_ticks_are_few_round_and_inside() -> None:
    source = random.Random(0)
    ranges = [(source.uniform(-1, 1) * 10 ** source.uniform(-6, 9), 10 ** source.uniform(-6, 9)) for _ in range(500)]
    cases = [(low, low + span) for low, span in ranges if span >= abs(low) * 1e-6]
    for (low, high), ticks in zip(cases, javascript("Charts.niceTicks(it[0], it[1])", cases), strict=True):
        assert 2 <= len(ticks) <= 12
        slack = (high - low) * 1e-6
        assert all(low - slack <= t <= high + slack for t in ticks)
        steps = {round((b - a) / (ticks[1] - ticks[0]), 3) for a, b in itertools.pairwise(ticks)}
        assert steps == {1.0}
        mantissa = (ticks[1] - ticks[0]) / 10 ** math.floor(math.log10(ticks[1] - ticks[0]) + 1e-6)
        assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3


def test_numbers_are_written_as_everywhere_else() -> None:
    source = random.Random(1)
    values = [0.0, 1.2345678, 0.012345, 5358.2, 3e-4, -2.5, 12345678.0, 1e-3, 1e7, 100.0]
    values += [source.uniform(-1, 1) * 10 ** source.uniform(-8, 12) for _ in range(300)]
    assert javascript("Charts.formatNumber(it)", values) == [format_number(value) for value in values]
    ticks = {0: "0", 0.25: "0.25", 1500: "1,500", 2e5: "2e5", 1.5e-4: "1.5e-4", -3: "-3"}
    assert javascript("Charts.formatTick(it)", list(ticks)) == list(ticks.values())


def test_labels_of_neighbouring_ticks_differ() -> None:
    source = random.Random(3)
    cases = [(low, low + 10 ** source.uniform(-7, 3)) for low in (0.0, 0.0229, 4.05e-5, 10.79, -3.0, 1.2e6)]
    chart_of = (
        "Charts.layout({series: [{name: 'a', colour: 0, points: [[0, it[0]], [1, it[1]]]}], width: 600, height: 200})"
    )
    for drawn in javascript(chart_of, cases):
        labels = [row["label"] for row in drawn["rows"]]
        assert len(set(labels)) == len(labels)


def test_steps_become_tokens_and_seconds() -> None:
    known = axis([(s, 10.0) for s in range(1, 11)], [(s, 2.0) for s in range(1, 11)])
    assert known["tokens"][-1] == 200
    assert known["seconds"][-1] == 20
    for x, expected in (("tokens", [0, 50, 110, 200]), ("seconds", [0, 5, 11, 20]), ("steps", [0, 2.5, 5.5, 99])):
        assert javascript(f"Charts.placeOf(it, {json.dumps(known)}, {x!r})", [0, 2.5, 5.5, 99]) == pytest.approx(
            expected
        )
    one = chart("t", [Series("a", [(s, 1.0 + s) for s in range(1, 11)])])
    assert one is not None
    view = f"Charts.layout(it, {{x: 'seconds', axes: [{json.dumps(known)}]}})"
    ((found,),) = ([d["columns"] for d in javascript(view, [one["plot"]])],)
    assert [column["label"] for column in found] == [f"{n} s" for n in range(2, 21, 2)]
    assert javascript("Charts.formatPlace(it[0], it[1])", [("steps", 1500), ("tokens", 2.5e6), ("seconds", 5400)]) == [
        "step 1,500",
        "2.5M tokens",
        "90 min",
    ]


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=80),
    st.sampled_from([0.025, 0.1]),
)
@settings(max_examples=10, deadline=None)
def test_averages_stay_within_the_values(values: list[float], share: float) -> None:
    points = [(float(i), y) for i, y in enumerate(values)]
    (smooth,) = javascript(f"Charts.movingAverage(it, {share})", [points])
    assert [x for x, _ in smooth] == [x for x, _ in points]
    slack = 1e-6 * max(abs(min(values)), abs(max(values)), 1.0)
    assert all(min(values) - slack <= y <= max(values) + slack for _, y in smooth)
    assert smooth[0][1] == pytest.approx(points[0][1])


def test_averages_are_taken_of_means_and_can_be_switched_off() -> None:
    one = chart("t", [Series("a", [(i, 10.0 if i % 100 == 0 else 1.0) for i in range(5000)], smooth=True)])
    assert one is not None
    plot = one["plot"]
    average, off = javascript(
        "Charts.layout({...plot, log: false}, {smooth: it}).curves".replace("plot", json.dumps(plot)), [0.1, 0]
    )
    assert [curve["kind"] for curve in average] == ["faint c0", "c0"]
    assert [curve["kind"] for curve in off] == ["c0"]
    (found,) = javascript("Charts.layout(it, {smooth: 0.1}).found", [plot])
    assert all(y == pytest.approx(1.09, abs=0.1) for _, y in found[0]["average"][50:-50])


def test_hidden_curves_leave_the_axis_to_the_others() -> None:
    one = chart("t", [Series("small", [(i, 1.0 + i) for i in range(5)]), Series("large", [(i, 1e6) for i in range(5)])])
    assert one is not None
    both, small, none = javascript(
        "Charts.layout(it[0], {hidden: new Set(it[1])})", [(one["plot"], hidden) for hidden in ([], [1], [0, 1])]
    )
    assert len(both["curves"]) == 2
    assert [row["label"] for row in small["rows"]] == ["1", "2", "3", "4", "5"]
    assert none["curves"] == none["rows"] == []


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    one = chart("t", [Series("a", [(0, 0.0), (1, -1.0), (2, 1.0), (3, 10.0)])])
    assert one is not None
    (drawn,) = javascript("Charts.layout(it, {log: true})", [one["plot"]])
    assert len(drawn["curves"][0]["points"]) == 2


def test_parts_of_a_whole_lie_one_upon_another() -> None:
    parts = [Series(name, [(i, 1.0) for i in range(4)]) for name in "abc"]
    one = chart("t", parts, stack=True)
    assert one is not None
    (drawn,) = javascript("Charts.layout(it, {smooth: 0})", [one["plot"]])
    assert [{y for _, y in f["top"]} for f in drawn["found"]] == [{1}, {2}, {3}]
    assert all(curve["area"] for curve in drawn["curves"])


def plots(**options: Any) -> list[dict[str, Any]]:
    source = random.Random(2)
    found = []
    for count in (1, 2, 3, 30, 80):
        for spread in (0.0, 1e-3, 1.0, 1e9):
            points = [(float(i), 5.0 + source.random() * spread) for i in range(count)]
            one = chart("t", [Series("a", points, smooth=True)], height=200, **options)
            assert one is not None
            found.append(one["plot"])
    return found


@pytest.mark.parametrize("options", [{}, {"zero": True}, {"log": True}])
def test_everything_is_drawn_inside_the_box(options: dict[str, bool]) -> None:
    for drawn in javascript("Charts.layout(it)", plots(**options)):
        for curve in drawn["curves"]:
            for x, y in curve["points"]:
                assert 0 <= x <= WIDTH
                assert 0 <= y <= 200
        labels = [row["label"] for row in (*drawn["rows"], *drawn["columns"])]
        assert labels
        assert not any("NaN" in label or label == "-0" for label in labels)


def test_a_single_point_is_a_dot() -> None:
    single, several = javascript("Charts.layout(it).curves", [plots()[0], plots()[-1]])
    assert [curve.get("dots") for curve in single] == [True]
    assert [curve["kind"] for curve in several] == ["faint c0", "c0"]


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis() -> None:
    one = chart("t", [Series("a", [(i, 10.0**i) for i in range(8)])], log=True)
    assert one is not None
    ((curve,),) = javascript("Charts.layout(it).curves", [one["plot"]])
    gaps = [a[1] - b[1] for a, b in itertools.pairwise(curve["points"])]
    assert max(gaps) - min(gaps) < 0.3
