"""Curves as data: thinned, averaged, and put together to charts, which ``static/charts.js`` draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

NARROW, WIDTH, WIDE = 430, 640, 1280
"""Widths of a drawing in a third, a half and the whole of the page."""
_MOST_POINTS = 500
_FEWEST_TO_AVERAGE = 21

Points = Sequence[tuple[float, float]]


@dataclass
class Series:
    """One curve.

    Attributes:
        points: (x, y), ascending in x.
        colour: index of the page's palette.
        dashed: a level or a limit rather than a curve of its own.
        markers: a dot at every point (few points, such as validations).
        smooth: draw the points faintly and their moving average over them.
    """

    name: str
    points: Points
    colour: int = 0
    dashed: bool = False
    markers: bool = False
    smooth: bool = False


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


def moving_average(points: Points, share: float = 0.025, *, log: bool = False) -> list[tuple[float, float]]:
    """Mean of each point and its neighbours, up to this share of all points on either side, so that it does not lag.

    Near the start it looks no further ahead than back, which keeps a steep descent. ``log``: the geometric mean, for a
    logarithmic axis.
    """
    n = len(points)
    reach = round(n * share)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + (math.log(y) if log else y))
    out = []
    for i, (x, _) in enumerate(points):
        back = min(reach, i)
        ahead = min(back, n - 1 - i)
        mean = (sums[i + ahead + 1] - sums[i - back]) / (back + ahead + 1)
        out.append((x, math.exp(mean) if log else mean))
    return out


def thinned(points: Points, most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points that keep the outline: the lowest and the highest of every stretch, in order."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    out: list[tuple[float, float]] = []
    for i in range(stretches):
        part = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        out.extend(sorted(ends))
    return out


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
) -> dict[str, Any] | None:
    """A chart with its title and legend as plain values; None where no series has a point.

    ``width`` and ``height`` are those of the drawing; the page scales it, so wide places want wide drawings. ``log``:
    logarithmic y axis. ``zero``: the y axis begins at 0.
    """
    shown = [cut for s in series if (cut := replace(s, points=[p for p in s.points if _drawable(p)])).points]
    if not shown:
        return None
    return {
        "title": title,
        "note": note,
        "wide": width == WIDE,
        "described": f"{title}: " + "; ".join(f"{s.name} {format_number(s.points[-1][1])} at the end" for s in shown),
        "plot": {
            "width": width,
            "height": height,
            "log": log,
            "zero": zero,
            "series": [_curve(s, log) for s in shown],
        },
    }


def _drawable(point: tuple[float, float]) -> bool:
    """Whether a browser can compute with both values, and with sums and differences of such."""
    return abs(point[0]) < 2**53 and abs(point[1]) < 1e100


def _curve(s: Series, log: bool) -> dict[str, Any]:
    averaged = s.smooth and len(s.points) >= _FEWEST_TO_AVERAGE
    return {
        "name": s.name,
        "colour": s.colour,
        "dashed": s.dashed,
        "markers": s.markers,
        "points": _short(thinned(s.points)),
        "average": _short(thinned(moving_average(s.points, log=log))) if averaged else None,
    }


def _short(points: Points) -> list[tuple[float, float]]:
    """Seven digits are more than a drawing shows."""
    return [(x, float(f"{y:.7g}")) for x, y in points]
