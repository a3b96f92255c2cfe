"""Several runs on one page: their figures in a table, their curves over each other, the settings that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from limbeck.report.page import Page
from limbeck.report.run_charts import run_axis, short
from limbeck.report.run_data import RunData
from limbeck.report.series import NARROW, WIDE, Series, chart, format_number, wants_log
from limbeck.utils.files import short_names
from limbeck.utils.paired import paired

_COLOURS = 8
_SMALL_CHARTS = (
    ("Gradient norm", "train/grad_norm", True),
    ("Learning rate", "train/lr", False),
    ("Tokens per second", "train/tokens_per_s", True),
    ("Seconds of a step", "train/seconds", True),
)
"""Title, metric, and whether it is noisy."""
# Where a run writes says nothing about what it computes.
_PLACES = ("logger.", "checkpointing.checkpoint_dir")
_MOST_ROWS = 8
"""Differing settings of a section that are shown before it is folded away."""
_TOLD_BY = {
    "policy": "model_name",
    "teacher": "model_name",
    "teachers": "model_name",
    "traces": "train",
    "data": "train",
}
"""Which of its settings tells a section that some run does not have."""


def comparison_page(runs: Sequence[RunData]) -> Page:
    """Several runs as one page."""
    names = list(short_names([str(run.folder.resolve()) for run in runs]).values())
    # a folder that is given twice has one entry
    if len(names) < len(runs):
        names = [str(run.folder) for run in runs]
    data = {
        "names": names,
        "facts": _common(runs),
        "notes": [f"{name}: {p}" for name, run in zip(names, runs, strict=True) for p in run.problems],
        "figures": _figures(runs, names),
        "tasks": _tasks(runs, names),
        "axes": [run_axis(run) for run in runs],
        "charts": _curves(runs, names),
        "small_charts": _small_curves(runs, names),
        "settings": _differences(runs),
    }
    return Page("comparison", f"{len(runs)} runs compared", data)


def _common(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """Facts that all runs share."""
    facts = [("student", {short(run.student) for run in runs})]
    facts.append(("teacher", {", ".join(map(short, run.teachers)) for run in runs if run.teachers}))
    return [(label, next(iter(values))) for label, values in facts if len(values) == 1 and values != {"unknown"}]


def _figures(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, Any]:
    """A row for every run; columns in which no run has a value are left out."""
    bits = [run.points("val/bpb") for run in runs]
    ends = [points[-1][1] for points in bits if points]
    first = bits[0][-1][1] if bits[0] else None
    titles = ["run", "loss", "steps", "bpb at start", "bpb at end", "to the first", "over its baseline"]
    titles += ["teacher's bpb", "not covered"]
    rows: list[list[Any]] = []
    for i, (run, name, points) in enumerate(zip(runs, names, bits, strict=True)):
        teacher, speed = run.last("val/teacher_bpb"), run.points("train/tokens_per_s")
        share = run.last("val/teacher_0/uncovered_mass")
        last = format_number(points[-1][1]) if points else ""
        best = bool(points) and len(ends) > 1 and points[-1][1] == min(ends)
        rows.append(
            [
                {"run": name, "colour": i % _COLOURS},
                run.objective,
                f"{run.last_step:,}",
                format_number(points[0][1]) if points else "",
                {"best": last} if best else last,
                f"{points[-1][1] - first:+.4f}" if i and points and first is not None else "",
                "" if run.gain is None else run.shown_gain(run.gain[0]),
                "" if teacher is None else format_number(teacher),
                "" if share is None else f"{share:.1%}",
                format_number(run.last("train/loss") or 0.0) if not ends and run.points("train/loss") else "",
                format_number(statistics.median(v for _, v in speed)) if speed else "",
            ]
        )
    columns = [*titles, "last training loss", "tokens/s"]
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return {"columns": [columns[i] for i in kept], "rows": [[row[i] for i in kept] for row in rows]}


def _tasks(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, Any]:
    """Each run against the first on the problems that both were asked; none where no task is shared."""
    columns = ["task", "run", "solved", "the first", "difference", "alone solved", "p (McNemar)", "problems"]
    rows: list[list[str]] = []
    known = dict.fromkeys(str(row.get("task")) for run in runs for row in run.tasks)
    for task in known:
        first = runs[0].solved(task)
        for run, name in zip(runs[1:], names[1:], strict=True):
            second = run.solved(task)
            pair = paired(first, second)
            if pair is None:
                continue
            # paired: both runs' means are over the problems that both were asked
            common = sorted(first.keys() & second.keys())
            means = [sum(scores[i] for i in common) / len(common) for scores in (second, first)]
            error = "" if math.isnan(pair["standard_error"]) else f" ± {pair['standard_error']:.1%}"
            rows.append(
                [
                    task,
                    name,
                    *(f"{mean:.1%}" for mean in means),
                    f"{pair['difference']:+.1%}{error}",
                    f"{pair['gained']:.0f} against {pair['lost']:.0f}",
                    f"{pair['p']:.2g}",
                    f"{pair['problems']:.0f}",
                ]
            )
    return {"columns": columns, "rows": rows}


def _curves(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    everyone = range(len(runs))
    bits = _overlay(runs, names, everyone, "val/bpb", smooth=False)
    levels = {round(level, 6) for run in runs if (level := run.last("val/teacher_bpb")) is not None}
    if len(levels) == 1 and any(s.points for s in bits):
        longest = max(run.last_step for run in runs)
        bits.append(Series("teacher", [(0, level := levels.pop()), (longest, level)], 7, dashed=True))
    charts = [chart("Bits per byte", bits, width=WIDE, height=320, note="on the validation set; less is better")]
    for where, title in (("val", "validation"), ("train", "training")):
        for divergence, members in _alike(runs, [run.divergence for run in runs]):
            series = _overlay(runs, names, members, f"{where}/kl_loss", smooth=where == "train")
            charts.append(chart(f"Distillation loss, {title}", series, note=divergence))
        series = _overlay(runs, names, everyone, f"{where}/ce_loss", smooth=where == "train")
        charts.append(chart(f"Cross-entropy, {title}", series, note="nats per token"))
    for objective, members in _alike(runs, [_sums(run) for run in runs]):
        series = _overlay(runs, names, members, "train/loss", smooth=True)
        charts.append(chart("Training loss", series, note=objective.partition("\n")[0]))
    for name in dict.fromkeys(str(row.get("task")) for run in runs for row in run.tasks):
        series = _overlay(runs, names, everyone, f"val/task/{name}", smooth=False)
        charts.append(chart(f"Task {name}", series, note="share of problems solved; more is better"))
    charts.append(chart("Accuracy, validation", _overlay(runs, names, everyone, "val/accuracy", smooth=False)))
    return [drawn for drawn in charts if drawn]


def _sums(run: RunData) -> str | None:
    """Terms of a run's loss; None where another chart shows the same."""
    if run.objective == "cross-entropy alone" and run.points("train/ce_loss"):
        return None
    return f"{run.objective}\n{sorted(_flat(run.setting('loss_fn', run.setting('loss', {}))).items(), key=str)}"


def _alike(runs: Sequence[RunData], kinds: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    """Numbers of the runs whose values mean the same; others would not stand on one axis."""
    return [
        (kind, [i for i in range(len(runs)) if kinds[i] == kind]) for kind in dict.fromkeys(kinds) if kind is not None
    ]


def _small_curves(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    charts = []
    for title, key, smooth in _SMALL_CHARTS:
        points = [run.points(key) for run in runs]
        # one axis for all, and it has no place for what is not positive
        log = any(map(wants_log, points)) and all(value > 0 for one in points for _, value in one)
        series = _overlay(runs, names, range(len(runs)), key, smooth=smooth)
        charts.append(chart(title, series, width=NARROW, height=220, log=log, zero=not log))
    return [drawn for drawn in charts if drawn]


def _overlay(
    runs: Sequence[RunData], names: Sequence[str], members: Sequence[int], key: str, *, smooth: bool
) -> list[Series]:
    """One curve per run. Several noisy curves would hide each other, so only their averages are drawn."""
    return [
        Series(
            names[i],
            runs[i].points(key),
            i % _COLOURS,
            markers=key.startswith("val/"),
            smooth=smooth,
            bare=smooth,
            run=i,
        )
        for i in members
    ]


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping) and node:
        inner = ((f"{path}.{key}" if path else str(key), child) for key, child in node.items())
        return {k: v for key, child in inner for k, v in _flat(child, key).items()}
    return {path: node}


def _differences(runs: Sequence[RunData]) -> dict[str, Any]:
    """Settings that differ: ``rows``, and the sections with so many of them that they are ``folded`` away.

    A section that some run does not have is one row: what it is, and how many settings it holds.
    """
    settings = [_flat(run.config) if run.config else {} for run in runs]
    keys = list(dict.fromkeys(key for flat in settings for key in flat if not key.startswith(_PLACES)))
    # repr: lists cannot be in a set, and True equals 1
    differ = [key for key in keys if len({repr(flat.get(key)) for flat in settings}) > 1]
    rows_shown: list[list[str]] = []
    folded = []
    for section in dict.fromkeys(key.partition(".")[0] for key in differ):
        section_keys = [key for key in differ if key.partition(".")[0] == section]
        inside = [sum(key.startswith(f"{section}.") for key in flat) for flat in settings]
        if 0 in inside and len(section_keys) > 1:
            title = f"{section}.{_TOLD_BY.get(section, '')}".rstrip(".")
            rows_shown.append([title, *(_block(*one, section) for one in zip(runs, settings, inside, strict=True))])
            continue
        rows = [[key, *(_value(flat, key) for flat in settings)] for key in section_keys]
        if len(rows) > _MOST_ROWS:
            folded.append({"section": section, "rows": rows})
        else:
            rows_shown += rows
    return {"rows": rows_shown, "folded": folded}


def _block(run: RunData, flat: Mapping[str, Any], size: int, section: str) -> str:
    """A whole section in one cell."""
    if not size:
        return "-" if flat.get(section) is None else str(flat[section])
    name = flat.get(f"{section}.{_TOLD_BY.get(section, '')}")
    names = run.teachers if section.startswith("teacher") else [] if name is None else [str(name)]
    return ", ".join([*names, f"{size} settings"])


def _value(flat: Mapping[str, Any], key: str) -> str:
    return "-" if key not in flat else str(flat[key])
