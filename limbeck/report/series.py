"""Curves as data: thinned honestly and put together to charts, which ``static/charts.js`` draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

NARROW, WIDTH, WIDE = 430, 640, 1280
"""Widths of a chart in a third, a half and the whole of the page."""
MOST_POINTS = 1000
"""Points of a curve; a longer one is thinned."""

Points = Sequence[tuple[float, float]]


@dataclass
class Series:
    """One curve.

    Attributes:
        points: (step, y), ascending in steps.
        colour: index of the page's palette.
        dashed: a level or a limit, drawn over the whole width, rather than a curve of its own.
        markers: a dot at every point (few points, such as validations).
        smooth: noisy: the page draws a moving average over the points.
        bare: of a noisy curve only the average is drawn, where several would hide each other.
        run: whose tokens and seconds its steps stand for, see ``Axes``.
    """

    name: str
    points: Points
    colour: int = 0
    dashed: bool = False
    markers: bool = False
    smooth: bool = False
    bare: bool = False
    run: int = 0


def format_number(value: float) -> str:
    """A value for people: four digits, thousands parted, powers of ten where it is tiny or huge."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        mantissa, power = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:.{digits}f}"


def _stretches(points: Points, count: int) -> Iterator[Points]:
    for i in range(count):
        yield points[i * len(points) // count : (i + 1) * len(points) // count]


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points that keep the outline: the lowest and the highest of every stretch, in order."""
    if len(points) <= most:
        return list(points)
    out: list[tuple[float, float]] = []
    for part in _stretches(points, most // 2):
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        out.extend(sorted(ends))
    return out


def means(points: Points, most: int = MOST_POINTS // 2) -> list[tuple[float, float]]:
    """At most ``most`` points, each the mean of a stretch: averages are taken of these, in which the lowest and the
    highest points of a stretch would count too much."""
    if len(points) <= most:
        return list(points)
    return [(part[len(part) // 2][0], math.fsum(y for _, y in part) / len(part)) for part in _stretches(points, most)]


def wants_log(points: Points) -> bool:
    """Whether positive values spread so widely that only a logarithmic axis shows them."""
    values = sorted(y for _, y in points)
    return len(values) > 3 and values[0] > 0 and values[-1] > 30 * values[len(values) // 2]


def chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    width: int = WIDTH,
    height: int = 230,
    log: bool = False,
    zero: bool = False,
    stack: bool = False,
) -> dict[str, Any] | None:
    """A chart with its title and legend as plain values; None where no series has a point.

    ``width``: the share of the page that it takes. ``log``: the y axis is logarithmic at first. ``zero``: the y axis
    begins at 0. ``stack``: the series are parts of a whole, at the same steps, and lie one upon another.
    """
    drawn = [cut for s in series if (cut := replace(s, points=[p for p in s.points if _drawable(p)])).points]
    if not drawn:
        return None
    return {
        "title": title,
        "note": note,
        "wide": width == WIDE,
        "described": f"{title}: " + "; ".join(f"{s.name} {format_number(s.points[-1][1])} at the end" for s in drawn),
        "plot": {
            "width": width,
            "height": height,
            "log": log,
            "zero": zero or stack,
            "stack": stack,
            "series": [_curve(s, stack) for s in drawn],
        },
    }


def _drawable(point: tuple[float, float]) -> bool:
    """Whether a browser can compute with both values, and with sums and differences of such."""
    return abs(point[0]) < 2**53 and abs(point[1]) < 1e100


def _curve(s: Series, stack: bool) -> dict[str, Any]:
    long = len(s.points) > MOST_POINTS
    return {
        "name": s.name,
        "colour": s.colour,
        "dashed": s.dashed,
        "markers": s.markers,
        "smooth": s.smooth,
        "bare": s.bare,
        "run": s.run,
        # parts are stacked point by point, and `thinned` picks other steps for each of them
        "points": _short(means(s.points) if stack else thinned(s.points)),
        "means": _short(means(s.points)) if s.smooth and long and not stack else None,
    }


def _short(points: Points) -> list[tuple[float, float]]:
    """Six digits are more than a drawing shows."""
    return [(x, float(f"{y:.6g}")) for x, y in points]


# -- what a step stands for --------------------------------------------------------------------------------------------


def axis(speed: Points, seconds: Points, most: int = 1000) -> dict[str, list[float]]:
    """Tokens and seconds up to some steps, so that a page can go from one to the other: ``steps``, ``tokens`` and
    ``seconds``, the last two only where a run says them. ``seconds`` add up steps, without validations and pauses.

    ``speed``: tokens per second by step; ``seconds``: of every step.
    """
    rates = dict(speed)
    steps, tokens, passed = [0.0], [0.0], [0.0]
    for step, took in seconds:
        if not (_drawable((step, took)) and took >= 0 and step >= steps[-1]):
            continue
        rate = rates.get(step, 0.0)
        steps.append(step)
        passed.append(passed[-1] + took)
        tokens.append(tokens[-1] + took * (rate if 0 <= rate < 1e100 else 0.0))
    if passed[-1] == 0:
        return {"steps": []}
    keep = [*range(0, len(steps) - 1, -(-len(steps) // most)), len(steps) - 1]
    totals = {"steps": [steps[i] for i in keep], "seconds": [round(passed[i], 3) for i in keep]}
    if tokens[-1] > 0:
        totals["tokens"] = [round(tokens[i]) for i in keep]
    return totals
