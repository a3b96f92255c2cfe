"""Several runs on one page: their figures in a table, their curves over each other, the settings that differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limbeck.report.page import Page
from limbeck.report.run_data import Points, RunData
from limbeck.report.series import NARROW, WIDE, Series, chart, format_number, moving_average, wants_log
from limbeck.utils.files import short_names

_COLOURS = 8
_CHARTS = (
    ("Training loss", "train/loss", True),
    ("KL to the teacher, validation", "val/kl_loss", False),
    ("KL to the teacher, training", "train/kl_loss", True),
    ("Cross-entropy, validation", "val/ce_loss", False),
    ("Cross-entropy, training", "train/ce_loss", True),
    ("Accuracy, validation", "val/accuracy", False),
)
_SMALL_CHARTS = (
    ("Gradient norm", "train/grad_norm", True),
    ("Tokens per second", "train/tokens_per_s", True),
    ("Learning rate", "train/lr", False),
)
"""Title, metric, and whether it is noisy."""
_FIGURES = ("run", "loss", "steps", "bpb at start", "bpb at end", "to the first", "teacher's bpb", "tokens/s")
# Where a run writes says nothing about what it computes.
_PLACES = ("logger.", "checkpointing.checkpoint_dir")


def comparison_page(runs: Sequence[RunData]) -> Page:
    """Several runs as one page."""
    names = list(short_names([str(run.folder.resolve()) for run in runs]).values())
    if len(names) < len(runs):
        names = [str(run.folder) for run in runs]
    data = {
        "names": names,
        "facts": _common(runs),
        "notes": [f"{name}: {p}" for name, run in zip(names, runs, strict=True) for p in run.problems],
        "figure_columns": _FIGURES,
        "figures": _figures(runs, names),
        "charts": _curves(runs, names),
        "small_charts": _small_curves(runs, names),
        "settings": _differences(runs),
    }
    return Page("comparison", f"{len(runs)} runs compared", data)


def _common(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """Facts that all runs share."""
    facts = [("student", {Path(run.student).name for run in runs})]
    facts.append(("teacher", {", ".join(Path(t).name for t in run.teachers) for run in runs if run.teachers}))
    return [(label, next(iter(values))) for label, values in facts if len(values) == 1 and values != {"unknown"}]


def _figures(runs: Sequence[RunData], names: Sequence[str]) -> list[list[Any]]:
    bits = [run.points("val/bpb") for run in runs]
    ends = [points[-1][1] for points in bits if points]
    rows = []
    for i, (run, name, points) in enumerate(zip(runs, names, bits, strict=True)):
        teacher, speed = run.points("val/teacher_bpb"), run.points("train/tokens_per_s")
        last = format_number(points[-1][1]) if points else ""
        best = bool(points) and len(ends) > 1 and points[-1][1] == min(ends)
        first = bits[0][-1][1] if bits[0] else None
        rows.append(
            [
                {"run": name, "colour": i % _COLOURS},
                str(run.setting("loss_fn.mode", "") if run.teachers else "cross-entropy alone"),
                f"{run.last_step:,}",
                format_number(points[0][1]) if points else "",
                {"best": last} if best else last,
                f"{points[-1][1] - first:+.4f}" if i and points and first is not None else "",
                format_number(teacher[-1][1]) if teacher else "",
                format_number(statistics.median(v for _, v in speed)) if speed else "",
            ]
        )
    return rows


def _curves(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    bits = _overlay(runs, names, "val/bpb", smooth=False)
    levels = {round(points[-1][1], 6) for run in runs if (points := run.points("val/teacher_bpb"))}
    steps = [run.last_step for run in runs]
    if len(levels) == 1 and any(s.points for s in bits):
        bits.append(Series("teacher", [(0, level := levels.pop()), (max(steps), level)], 7, dashed=True))
    note = "on the validation set; less is better"
    charts = [chart("Bits per byte", bits, width=WIDE, height=320, note=note)]
    charts += [chart(title, _overlay(runs, names, key, smooth=smooth)) for title, key, smooth in _CHARTS]
    return [found for found in charts if found]


def _small_curves(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    charts = []
    for title, key, smooth in _SMALL_CHARTS:
        points = [run.points(key) for run in runs]
        # one axis for all, and it has no place for what is not positive
        log = any(map(wants_log, points)) and all(value > 0 for one in points for _, value in one)
        series = _overlay(runs, names, key, smooth=smooth, log=log)
        charts.append(chart(title, series, width=NARROW, height=220, log=log, zero=not log))
    return [found for found in charts if found]


def _overlay(
    runs: Sequence[RunData], names: Sequence[str], key: str, *, smooth: bool, log: bool = False
) -> list[Series]:
    """One curve per run. Several noisy curves would hide each other, so only their averages are drawn."""

    def prepared(points: Points) -> Any:
        return moving_average(points, log=log) if smooth and len(points) > 20 else points

    return [
        Series(name, prepared(run.points(key)), i % _COLOURS, markers=not smooth)
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
    ]


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping) and node:
        inner = ((f"{path}.{key}" if path else str(key), child) for key, child in node.items())
        return {k: v for key, child in inner for k, v in _flat(child, key).items()}
    return {path: node}


def _differences(runs: Sequence[RunData]) -> list[list[str]]:
    settings = [_flat(run.config) if run.config else {} for run in runs]
    keys = list(dict.fromkeys(key for flat in settings for key in flat if not key.startswith(_PLACES)))
    differ = [key for key in keys if len({repr(flat.get(key)) for flat in settings}) > 1]
    return [[key, *(_value(flat, key) for flat in settings)] for key in differ]


def _value(flat: Mapping[str, Any], key: str) -> str:
    return "-" if key not in flat else str(flat[key])
