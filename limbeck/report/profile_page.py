"""Where a step's time goes, as a page: what ``limbeck train --profile`` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from limbeck.errors import DataError
from limbeck.report.page import Page
from limbeck.utils.profiling import PROFILE_NAME, SECTIONS, means

PAGE_NAME = "profile.html"
_COLOURS = 8


def write_profile(run_dir: str | Path) -> Path | None:
    """Write ``profile.html`` beside a run's ``profile.json`` and return its path; None where there is no profile."""
    folder = Path(run_dir)
    source = folder / PROFILE_NAME
    if not source.is_file():
        return None
    try:
        profile = json.loads(source.read_bytes())
        page = profile_page(profile, folder.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(source)!r} is no profile of a run ({error}); delete it") from error
    return page.write(folder / PAGE_NAME)


def profile_page(profile: dict[str, Any], name: str) -> Page:
    """The page of a stored profile; ``name``: of the run."""
    rows = [{part: float(seconds) for part, seconds in row.items()} for row in profile["steps"]]
    mean = means(rows)
    whole = mean.pop("wall", 0.0)
    by_time = sorted(mean.items(), key=lambda pair: -pair[1])
    most = max([seconds for _, seconds in by_time], default=1.0)
    longest = max([row["wall"] for row in rows], default=1.0)
    order = [section for section in SECTIONS if section in mean]
    looks = {section: f"c{i % _COLOURS}{' faint' if i >= _COLOURS else ''}" for i, section in enumerate(order)}
    operations = profile["operations"]
    top = max([row["ms"] for row in operations], default=1.0) or 1.0
    cards = [{"title": "A step", "value": f"{whole * 1e3:,.0f} ms", "below": f"mean of {len(rows)}"}]
    if by_time:
        section, seconds = by_time[0]
        cards.append({"title": "Most of it", "value": section, "below": f"{seconds / whole:.0%}: {SECTIONS[section]}"})
        around = sum(mean.get(name, 0.0) for name in ("data", "logging", "validation", "checkpoint")) / whole
        below = "data, logs, validation, checkpoints"
        cards.append({"title": "Around the step", "value": f"{around:.0%}", "below": below})
    data = {
        "name": name,
        "facts": [("device", profile["device"]), ("threads", profile["threads"]), ("steps", len(rows))],
        "cards": cards,
        "sections": [
            {
                "name": section,
                "what": SECTIONS[section],
                "ms": f"{seconds * 1e3:,.1f}",
                "share": f"{seconds / whole:.1%}",
                "bar": f"{100 * seconds / most:.1f}",
            }
            for section, seconds in by_time
        ],
        "legend": list(looks.items()),
        "steps": [_step(row, longest, looks) for row in rows],
        "operations": [
            [row["name"], f"{row['calls']:,}", f"{row['ms']:,.2f}", f"{100 * row['ms'] / top:.1f}"]
            for row in operations
        ],
        "trace": profile["trace"],
    }
    return Page("profile", f"{name}: where a step's time goes", data)


def _step(row: dict[str, float], longest: float, looks: dict[str, str]) -> dict[str, Any]:
    """One step as a bar of parts, in per cent of the longest step."""
    parts, titles, start = [], [], 0.0
    for section, look in looks.items():
        width = 100 * row.get(section, 0.0) / longest
        if width > 0:
            title = f"{section} {row[section] * 1e3:,.1f} ms"
            parts.append({"x": f"{start:.2f}", "width": f"{width:.2f}", "look": look, "title": title})
            titles.append(title)
        start += width
    return {
        "number": int(row["step"]),
        "ms": f"{row['wall'] * 1e3:,.1f}",
        "parts": parts,
        "described": f"step {int(row['step'])}: {', '.join(titles)}",
    }
