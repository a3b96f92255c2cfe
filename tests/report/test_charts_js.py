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

from limbeck.report import page
from limbeck.report.series import WIDTH, Series, chart, format_number

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


def plots(**settings: Any) -> list[dict[str, Any]]:
    source = random.Random(2)
    found = []
    for count in (1, 2, 3, 30, 80):
        for spread in (0.0, 1e-3, 1.0, 1e9):
            points = [(float(i), 5.0 + source.random() * spread) for i in range(count)]
            one = chart("t", [Series("a", points, smooth=True)], height=200, **settings)
            assert one is not None
            found.append(one["plot"])
    return found


@pytest.mark.parametrize("settings", [{}, {"zero": True}, {"log": True}])
def test_everything_is_drawn_inside_the_box(settings: dict[str, bool]) -> None:
    for drawn in javascript("Charts.layout(it)", plots(**settings)):
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
