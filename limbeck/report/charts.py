"""Line charts as inline SVG: round axes, smoothed curves, level lines, and values under the pointer."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

NARROW, WIDTH, WIDE = 430, 640, 1280
"""Widths of a drawing in a third, a half and the whole of the page."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 30
_MOST_POINTS = 500

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
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        mantissa, power = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:.{digits}f}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2, 5 times a power of ten) within ``low`` to ``high``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((power * m for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


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


class _Scale:
    """Values to pixels, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.log = log
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        v = math.log10(value) if self.log else value
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((v - self.low) / span if span else 0.5)

    def ticks(self, count: int) -> list[float]:
        if not self.log:
            return nice_ticks(self.low, self.high, count)
        factors = (1,) if self.high - self.low > 2 else (1, 2, 5)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        ticks = [f * 10.0**p for p in powers for f in factors]
        return [t for t in ticks if self.low - 1e-9 <= math.log10(t) <= self.high + 1e-9]


def _value_range(series: Sequence[Series], log: bool, zero: bool) -> tuple[float, float]:
    values = [y for s in series for _, y in s.points]
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if log:
        pad = (high / low) ** 0.06 if high > low else 2.0
        return low / pad, high * pad
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - pad), high + pad


def wants_log(points: Points) -> bool:
    """Whether positive values spread so widely that only a logarithmic axis shows them."""
    values = sorted(y for _, y in points)
    return len(values) > 3 and values[0] > 0 and values[-1] > 30 * values[len(values) // 2]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    width: int = WIDTH,
    height: int = 230,
    log: bool = False,
    zero: bool = False,
) -> str:
    """A chart with its title, legend and hover values as an HTML figure; empty where no series has a point.

    ``width`` and ``height`` are those of the drawing; the page scales it, so wide places want wide drawings. ``log``:
    logarithmic y axis. ``zero``: the y axis begins at 0.
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    xs = [x for s in series for x, _ in s.points]
    low, high = _value_range(series, log, zero)
    x_scale = _Scale(min(xs), max(xs), _LEFT, width - _RIGHT)
    y_scale = _Scale(low, high, height - _BOTTOM, _TOP, log)
    parts = [_axes(x_scale, y_scale), *(_curve(s, x_scale, y_scale) for s in series)]
    described = f"{title}: " + "; ".join(f"{s.name} {format_number(s.points[-1][1])} at the end" for s in series)
    return (
        f'<figure class="chart"><figcaption><b>{html.escape(title)}</b>{_legend(series)}'
        f"{f'<small>{html.escape(note)}</small>' if note else ''}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(described)}">'
        f'{"".join(parts)}<line class="cross" y1="{_TOP}" y2="{height - _BOTTOM}" x1="0" x2="0"/></svg>'
        f'<div class="tip" hidden></div></div>{_data(series, x_scale, width)}</figure>'
    )


def _legend(series: Sequence[Series]) -> str:
    keys = (
        f'<span class="key{" dashed" if s.dashed else ""}"><i class="c{s.colour}"></i>{html.escape(s.name)}</span>'
        for s in series
    )
    return f'<span class="keys">{"".join(keys)}</span>'


def _axes(x_scale: _Scale, y_scale: _Scale) -> str:
    out = []
    left, right, base = x_scale.start, x_scale.end, y_scale.start
    for tick in y_scale.ticks(5):
        y = y_scale(tick)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    out.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>')
    for tick in x_scale.ticks(max(4, round((right - left) / 100))):
        if tick == int(tick):
            x = x_scale(tick)
            out.append(f'<text class="tick" x="{x:.1f}" y="{base + 17}" text-anchor="middle">{int(tick):,}</text>')
    return "".join(out)


def _tick(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        mantissa, power = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")


def _curve(s: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    kind = f"c{s.colour}{' dashed' if s.dashed else ''}"
    if s.smooth and len(s.points) > 20:
        faint = _path(thinned(s.points), f"line faint {kind}", x_scale, y_scale)
        return faint + _path(thinned(moving_average(s.points, log=y_scale.log)), f"line {kind}", x_scale, y_scale)
    drawn = _path(thinned(s.points), f"line {kind}", x_scale, y_scale)
    if (s.markers and len(s.points) <= 60) or len(s.points) == 1:
        dots = (f'<circle cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3"/>' for x, y in s.points)
        drawn += f'<g class="dots {kind}">{"".join(dots)}</g>'
    return drawn


def _path(points: Points, kind: str, x_scale: _Scale, y_scale: _Scale) -> str:
    steps = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{steps}"/>'


def _data(series: Sequence[Series], x_scale: _Scale, width: int) -> str:
    """Values for the pointer; the page's script looks up the nearest point of every series."""
    body = {
        "x": [x_scale.low, x_scale.high, x_scale.start, x_scale.end, width],
        "series": [
            {
                "name": s.name,
                "colour": s.colour,
                "level": s.dashed,
                "points": [[x, format_number(y)] for x, y in thinned(s.points)],
            }
            for s in series
        ],
    }
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
