"""A run folder as one HTML page: headline figures, curves, validation, what was left out, alignment, configuration."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limbeck.align.view import summary_lines
from limbeck.report.alignment import viewer
from limbeck.report.comparison import comparison_page
from limbeck.report.page import Page
from limbeck.report.reasons import explain
from limbeck.report.run_data import Points, RunData, as_number, find_runs, read_run
from limbeck.report.series import NARROW, WIDE, Series, chart, format_number, wants_log

PAGE_NAME = "report.html"
_MOST_CHUNKS = 400
_SHOWN = {
    "train/loss",
    "train/kl_loss",
    "train/ce_loss",
    "train/grad_norm",
    "train/tokens_per_s",
    "train/lr",
    "val/loss",
    "val/kl_loss",
    "val/ce_loss",
    "val/accuracy",
    "val/coverage",
    "val/bpb",
}
_TEACHER_BITS = r"val/teacher_(\d+_)?bpb"
_LOG_PROBS = {
    "val/erroneous_logprob": "failed messages",
    "val/erroneous_logprob_hinted": "the same behind hints",
    "val/chosen_logprob": "chosen of pairs",
    "val/rejected_logprob": "rejected of pairs",
}
_CHANNELS = {"train/policy/loss": "policy", "train/hint/loss": "hint", "train/preference/loss": "preference"}
_MONITORS = {
    "Entropy": {"train/monitor/policy/entropy": "policy", "train/monitor/hint/entropy": "hint"},
    "Mass on format tokens": {"train/monitor/policy/format_mass": "policy", "train/monitor/hint/format_mass": "hint"},
    "Mass on an early end": {
        "train/monitor/policy/early_end_mass": "policy",
        "train/monitor/hint/early_end_mass": "hint",
    },
    "KL to the hinted teacher by token class": {
        f"train/monitor/hint/kl_{name}": name for name in ("special", "format", "number", "word", "other")
    },
    "JSD to the hinted teacher": {"train/monitor/hint/jsd": "at most ln 2 = 0.693"},
    "Length of answers": {"val/response_length": "tokens"},
    "Bytes compared with the hinted teacher": {"val/hint_compared": "share"},
}
"""Figures of a run on traces: log-probabilities, losses of channels, and what shows a collapse early."""
_OF_TRACES = {*_LOG_PROBS, *_CHANNELS, *(key for keys in _MONITORS.values() for key in keys)}
_VALIDATION = {
    "val/bpb": ("bits per byte", False),
    "val/teacher_bpb": ("teacher's", None),
    "val/ce_loss": ("cross-entropy", False),
    "val/kl_loss": ("KL", False),
    "val/accuracy": ("accuracy", True),
    "val/coverage": ("coverage", None),
    "val/loss": ("loss", False),
    "val/erroneous_logprob": ("log p, failed messages", False),
    "val/erroneous_logprob_hinted": ("behind hints", None),
    "val/chosen_logprob": ("log p, chosen", True),
    "val/rejected_logprob": ("log p, rejected", False),
    "val/preference_accuracy": ("pairs right", True),
}
"""Column title, and whether more is better (None: no matter of better)."""


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run (default: ``report.html`` inside it) and return its path.

    A folder that holds no run but run folders (such as the demo's) gets a page that compares them.
    """
    folder = Path(run_dir)
    runs = find_runs([folder])
    target = Path(out) if out is not None else folder / PAGE_NAME
    if runs == [folder]:
        return run_page(read_run(folder)).write(target)
    return write_comparison(runs, target)


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one page that lays the curves of several runs over each other and return its path."""
    runs = [read_run(folder) for folder in find_runs([Path(d) for d in run_dirs])]
    return comparison_page(runs).write(out)


def run_page(run: RunData) -> Page:
    """All that a run folder says, as a page."""
    known = run.student != "unknown"
    charts = _curves(run)
    data = {
        "name": run.name,
        "student": _short(run.student) if known else None,
        "teachers": [_short(teacher) for teacher in run.teachers],
        "self_teacher": run.self_teacher,
        "facts": _facts(run),
        "notes": _notes(run),
        "cards": _cards(run),
        "charts": charts,
        "small_charts": _machine(run),
        "further_charts": _further(run),
        "validation": _validations(run),
        "dropped": _dropped(run),
        "counted": (run.folder / "dropped.json").is_file(),
        "alignment": _alignment(run),
        "config_text": run.config_text,
        "versions": [(name, _plain(value)) for name, value in sorted(run.versions.items())],
        "footer": " ".join(filter(None, ("limbeck", str(run.versions.get("limbeck", ""))))),
    }
    kind = "run on agent traces" if run.on_traces else "distillation run"
    return Page("run", f"{run.name}: {kind}", data)


# -- head --------------------------------------------------------------------------------------------------------------


def _short(model: str) -> str:
    """The last part of a path, so that heads stay readable; the configuration has the whole."""
    return Path(model).name or model


def _facts(run: RunData) -> list[tuple[str, str]]:
    steps = f"{run.last_step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    facts = [("steps", steps)]
    mode = run.setting("loss_fn.mode") or run.setting("loss.mode")
    if mode:
        facts.insert(0, ("loss", str(mode)))
    seed = run.versions.get("seed", run.setting("distillation.seed"))
    if seed is not None:
        facts.append(("seed", str(seed)))
    if run.versions.get("started"):
        facts.append(("started", str(run.versions["started"]).replace("T", " ")[:16]))
    for name in ("torch", "transformers"):
        if name in run.versions:
            facts.append((name, str(run.versions[name])))
    if run.checkpoints:
        facts.append(("checkpoints", ", ".join(map(str, run.checkpoints[-4:]))))
    return facts


def _notes(run: RunData) -> list[str]:
    notes = list(run.problems)
    notes += [f"Step {step} failed; its batch is kept in failed_batch_step_{step}." for step in run.failed_steps]
    if not run.rows:
        notes.append("There are no metrics yet: the run has not finished its first step.")
    return notes


def _course(title: str, points: Points, *, higher: bool = False) -> dict[str, str]:
    """A card that tells where a metric began, where it stands, and the change; ``higher`` is better, or less is."""
    (start, first), (_, last) = points[0], points[-1]
    if len(points) == 1:
        return {"title": title, "value": format_number(first), "below": ""}
    card = {"title": title, "first": format_number(first), "value": format_number(last), "below": ""}
    if first != 0:
        change = (last - first) / abs(first)
        better = change > 0 if higher else change < 0
        kind = "" if change == 0 else "good" if better else "bad"
        card |= {"change": f"{change:+.1%}", "kind": kind, "below": f"since step {start:,}"}
    return card


def _cards(run: RunData) -> list[dict[str, str]]:
    cards = []
    bpb, teacher = run.points("val/bpb"), run.points("val/teacher_bpb")
    if bpb:
        cards.append(_course("Bits per byte, validation", bpb))
    if teacher:
        level = teacher[-1][1]
        below = ""
        if bpb and bpb[0][1] > level and len(bpb) > 1:
            closed = (bpb[0][1] - bpb[-1][1]) / (bpb[0][1] - level)
            below = f"{closed:.0%} of the student's gap closed"
        cards.append({"title": "Teacher's bits per byte", "value": format_number(level), "below": below})
    kl = run.points("val/kl_loss") or run.points("train/kl_loss")
    if kl:
        where = "validation" if run.points("val/kl_loss") else "training"
        cards.append(_course(f"KL to the teacher, {where}", kl))
    if failed := run.points("val/erroneous_logprob"):
        cards.append(_course("log p of failed messages, nats", failed))
    if chosen := run.points("val/chosen_logprob"):
        cards.append(_course("log p of chosen messages, nats", chosen, higher=True))
    if not bpb and (loss := run.points("train/loss")):
        cards.append(_course("Training loss", loss))
    speed = run.points("train/tokens_per_s")
    if speed:
        # the first step compiles and fills caches
        usual = statistics.median(v for _, v in (speed[1:] or speed))
        cards.append({"title": "Tokens per second", "value": format_number(usual), "below": _effort(run)})
    return cards


def _effort(run: RunData) -> str:
    """Tokens and time of all logged steps."""
    both = [(as_number(row.get("train/tokens_per_s")), as_number(row.get("train/seconds"))) for row in run.rows]
    known = [(speed, seconds) for speed, seconds in both if speed is not None and seconds is not None]
    if not known:
        return "median over all steps"
    seconds = sum(t for _, t in known)
    return f"{_compact(sum(s * t for s, t in known))} tokens in {_duration(seconds)} of steps"


def _compact(value: float) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# -- curves ------------------------------------------------------------------------------------------------------------


def teacher_levels(run: RunData) -> list[tuple[str, Points]]:
    """Name and values of each teacher's bits per byte."""
    numbered = [f"val/teacher_{i}_bpb" for i in range(len(run.teachers))]
    keys = [k for k in numbered if run.points(k)] or ["val/teacher_bpb"]
    if len(keys) == 1:
        return [("teacher", run.points(keys[0]))]
    names = [_short(t) for t in run.teachers]
    return [(f"teacher {i}: {names[i]}", run.points(k)) for i, k in enumerate(keys)]


def _level(points: Points, run: RunData) -> Points:
    """A teacher does not change, so its level is drawn over the whole run."""
    return [(run.rows[0]["step"], points[-1][1]), (run.last_step, points[-1][1])] if points else []


def _curves(run: RunData) -> list[dict[str, Any]]:
    """What the run reached."""
    if not run.rows:
        return []
    bits = [Series("student", run.points("val/bpb"), 0, markers=True)]
    bits += [Series(n, _level(p, run), 1 + i, dashed=True) for i, (n, p) in enumerate(teacher_levels(run))]
    note = "on the validation set; less is better"
    charts = [chart("Bits per byte", bits, width=WIDE, height=300, note=note)] if bits[0].points else []
    if run.on_traces:
        charts += _trace_curves(run)
    for title, train, val in (
        ("Loss", "train/loss", "val/loss"),
        ("KL to the teacher", "train/kl_loss", "val/kl_loss"),
        ("Cross-entropy", "train/ce_loss", "val/ce_loss"),
    ):
        pair = [
            Series("train", run.points(train), 0, smooth=True),
            Series("validation", run.points(val), 2, markers=True),
        ]
        charts.append(chart(title, pair))
    shares = [
        Series("accuracy", run.points("val/accuracy"), 2, markers=True),
        Series("alignment coverage", run.points("val/coverage"), 3, markers=True),
    ]
    charts.append(chart("Accuracy and coverage", shares, note="validation"))
    return [found for found in charts if found]


def _trace_curves(run: RunData) -> list[dict[str, Any] | None]:
    """What a run on traces is judged by, and what shows early when it collapses."""
    four = [Series(name, run.points(key), i, markers=True) for i, (key, name) in enumerate(_LOG_PROBS.items())]
    note = "nats per message, validation; failed and rejected should fall, chosen should rise"
    losses = [Series(name, run.points(key), i, smooth=True) for i, (key, name) in enumerate(_CHANNELS.items())]
    charts = [chart("Log-probability of messages", four, width=WIDE, height=300, note=note)]
    charts.append(chart("Losses of the channels", losses, note="training"))
    for title, keys in _MONITORS.items():
        watched = [Series(name, run.points(key), i, markers=True) for i, (key, name) in enumerate(keys.items())]
        charts.append(chart(title, watched))
    return charts


def _machine(run: RunData) -> list[dict[str, Any]]:
    """How the run went rather than what it reached."""
    norm, speed, rate = (run.points(f"train/{key}") for key in ("grad_norm", "tokens_per_s", "lr"))

    def small(title: str, one: Series, *, log: bool = False, zero: bool = False) -> dict[str, Any] | None:
        return chart(title, [one], width=NARROW, height=210, log=log, zero=zero)

    charts = [
        small("Gradient norm", Series("before clipping", norm, 4, smooth=True), log=wants_log(norm)),
        small("Tokens per second", Series("student", speed, 5, smooth=True), zero=True),
        small("Learning rate", Series("lr", rate, 6), zero=True),
    ]
    return [found for found in charts if found]


def _further(run: RunData) -> list[dict[str, Any]]:
    """All other metrics, small and folded away."""
    shown = _SHOWN | _OF_TRACES if run.on_traces else _SHOWN
    rest = [key for key in run.metric_names() if key not in shown and not re.fullmatch(_TEACHER_BITS, key)]
    charts = []
    for key in rest:
        points = run.points(key)
        colour = 2 if key.startswith("val/") else 7
        one = Series(key.partition("/")[0], points, colour, smooth=len(points) > 60, markers=True)
        charts.append(chart(key.partition("/")[2] or key, [one], width=NARROW, height=200, log=wants_log(points)))
    return [found for found in charts if found]


# -- tables ------------------------------------------------------------------------------------------------------------


def _validations(run: RunData) -> dict[str, Any] | None:
    rows = [row for row in run.rows if any(key in row for key in _VALIDATION)]
    columns = [key for key in _VALIDATION if run.points(key)]
    if not rows or not columns:
        return None
    best: dict[str, float] = {}
    for key in columns:
        higher = _VALIDATION[key][1]
        if higher is not None and len(rows) > 1:
            values = [v for _, v in run.points(key)]
            best[key] = max(values) if higher else min(values)
    cells = []
    for row in rows:
        line: list[dict[str, Any]] = [{"text": f"{row['step']:,}", "best": False}]
        for key in columns:
            value = as_number(row.get(key))
            text = "" if value is None else f"{value:.4f}"
            line.append({"text": text, "best": bool(text) and value == best.get(key)})
        cells.append(line)
    return {"columns": ["step", *(_VALIDATION[key][0] for key in columns)], "rows": cells}


def _dropped(run: RunData) -> list[tuple[str, dict[str, str], str]]:
    """Reason, what it means, and how often."""
    counts = sorted(_counts(run.dropped), key=lambda found: -found[1])
    for group, inner in run.dropped.items():
        if isinstance(inner, dict):
            counts += [(f"{group}: {reason}", n) for reason, n in _counts(inner)]
    return [(reason, {"meaning": explain(reason)}, f"{n:,.0f}") for reason, n in counts]


def _counts(found: dict[str, Any]) -> list[tuple[str, float]]:
    return [(reason, n) for reason, value in found.items() if (n := as_number(value)) is not None]


def _alignment(run: RunData) -> dict[str, Any] | None:
    if run.alignment is None:
        return None
    try:
        chunks = run.alignment["chunks"]
        view = {**run.alignment, "chunks": chunks[:_MOST_CHUNKS]}
        return {
            "problem": None,
            "summary": " ".join(summary_lines(run.alignment)),
            "viewer": viewer([view], ("student", "teacher")),
            "shown": len(view["chunks"]),
            "total": len(chunks),
        }
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        return {"problem": repr(error)}


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
