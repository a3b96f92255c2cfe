"""A run folder as one HTML page: headline figures, samples, curves, validation, what was left out, alignment."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limbeck.align.view import summary_lines
from limbeck.errors import ConfigError
from limbeck.report.alignment import viewer
from limbeck.report.comparison import comparison_page
from limbeck.report.page import Page
from limbeck.report.reasons import explain
from limbeck.report.run_charts import RunCharts, run_axis, short, sources, teacher_levels
from limbeck.report.run_data import Points, RunData, as_number, find_runs, read_run
from limbeck.report.series import format_number
from limbeck.tokens.vocab import readable

PAGE_NAME = "report.html"
_MOST_CHUNKS = 400
_MOST_VALIDATIONS = 300
_MOST_SAMPLES = 12
_MOST_CHARACTERS = 2000
_VALIDATION = {
    "val/bpb": ("bits per byte", False),
    "val/teacher_bpb": ("teacher's", None),
    "val/ce_loss": ("cross-entropy", False),
    "val/kl_loss": ("distillation loss", False),
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
        return run_page(_read(folder)).write(target)
    return write_comparison(runs, target)


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one page that lays the curves of several runs over each other and return its path."""
    runs = [_read(folder) for folder in find_runs([Path(d) for d in run_dirs])]
    return comparison_page(runs).write(out)


def _read(folder: Path) -> RunData:
    """A run, refused where nothing of its configuration and none of its steps can be read."""
    run = read_run(folder)
    if run.problems and not run.config and not run.steps:
        raise ConfigError(f"{str(folder)!r} holds no run that can be read; {' '.join(run.problems).rstrip('.')}")
    return run


def run_page(run: RunData) -> Page:
    """All that a run folder says, as a page."""
    known = run.student != "unknown"
    charts = RunCharts(run)
    data = {
        "name": run.name,
        "student": short(run.student) if known else None,
        "teachers": [short(teacher) for teacher in run.teachers],
        "self_teacher": run.self_teacher,
        "facts": _facts(run),
        "banners": _banners(run),
        "notes": _notes(run),
        "cards": _cards(run),
        "samples": _samples(run),
        "axes": [run_axis(run)],
        "sections": charts.sections(),
        "further_charts": charts.further(),
        "validation": _validations(run),
        "skipped": _skipped(run),
        "counted": any((run.folder / name).is_file() for name in ("skipped.json", "dropped.json")),
        "alignment": _alignment(run),
        "config_text": run.config_text,
        "versions": [(name, _plain(value)) for name, value in sorted(run.versions.items())],
        "footer": " ".join(filter(None, ("limbeck", str(run.versions.get("limbeck", ""))))),
    }
    kind = "run on agent traces" if run.on_traces else "distillation run"
    return Page("run", f"{run.name}: {kind}", data)


# -- head --------------------------------------------------------------------------------------------------------------


def _facts(run: RunData) -> list[tuple[str, str]]:
    steps = f"{run.last_step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    facts = [("steps", steps)]
    if run.objective:
        facts.insert(0, ("loss", run.objective))
    if run.own_text:
        facts.insert(1, ("own text", run.own_text))
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
    if run.end:
        notes.append(f"{run.end[:1].upper()}{run.end[1:]}.")
    notes += [f"Step {step} failed; its batch is kept in failed_batch_step_{step}." for step in run.failed_steps]
    if not run.history.steps:
        notes.append("There are no metrics yet: the run has not finished its first step.")
    return notes


def _banners(run: RunData) -> list[str]:
    """Warnings in front of the figures: a teacher worse than its student, a student that got worse."""
    banners = []
    bits = [value for _, value in run.points("val/bpb")]
    for name, points in teacher_levels(run):
        if not bits or not points:
            continue
        level, who = points[-1][1], "The teacher" if name == "teacher" else name.capitalize()
        start, now = (
            f"{format_number(level)} against {format_number(value)} bits per byte on the validation text"
            for value in (bits[0], bits[-1])
        )
        if level > bits[0]:
            advice = "It pulls the student back; take another teacher, other text, or cross-entropy alone."
            banners.append(f"{who} is worse than the student was at the start: {start}. {advice}")
        elif level > bits[-1]:
            banners.append(f"{who} is now worse than the student: {now}. From here on it may pull the student back.")
    if len(bits) > 1 and bits[-1] > bits[0]:
        both = f"{format_number(bits[0])} bits per byte at the start, {format_number(bits[-1])} now"
        banners.append(f"The student got worse: {both}.")
    return banners


def _course(title: str, points: Points, *, higher: bool = False, judged: bool = True) -> dict[str, str]:
    """A card that tells where a metric began, where it stands, and the change; ``higher`` is better, or less is."""
    (start, first), (_, last) = points[0], points[-1]
    if len(points) == 1:
        return {"title": title, "value": format_number(first), "below": ""}
    card = {"title": title, "first": format_number(first), "value": format_number(last), "below": ""}
    if first != 0:
        # rounded before it is judged, as it is shown; abs, as log-probabilities are negative
        change = round((last - first) / abs(first), 3)
        better = change > 0 if higher else change < 0
        kind = "" if change == 0 or not judged else "good" if better else "bad"
        card |= {"change": f"{change:+.1%}" if change else "no change", "kind": kind, "below": f"since step {start:,}"}
    return card


def _cards(run: RunData) -> list[dict[str, str]]:
    cards = []
    bpb = run.points("val/bpb")
    levels = [(name, points[-1][1]) for name, points in teacher_levels(run) if points]
    worse = bool(bpb) and any(level > bpb[0][1] for _, level in levels)
    if bpb:
        # a gain beside a teacher that is worse is none of its making
        cards.append(_course("Bits per byte, validation", bpb, judged=not worse))
    for name, level in levels:
        title = "Teacher's bits per byte" if name == "teacher" else f"{name.capitalize()}, bits per byte"
        below = "worse than the student from the start" if bpb and bpb[0][1] <= level else ""
        cards.append({"title": title, "value": format_number(level), "below": below})
    cards += _worth(run)
    kl = run.points("val/kl_loss") or run.points("train/kl_loss")
    if kl and run.divergence is not None:
        where = "validation" if run.points("val/kl_loss") else "training"
        cards.append(_course(f"Distillation loss, {where}", kl))
        cards[-1]["below"] = f"{cards[-1]['below']}, {run.divergence}".lstrip(", ")
    cards += _reach(run)
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


def _worth(run: RunData) -> list[dict[str, str]]:
    """Gain by the teacher beside cross-entropy alone; nothing where that was not trained."""
    if run.gain is None or run.baseline is None:
        return []
    step, _ = run.gain
    level = format_number(dict(run.baseline.points("val/bpb"))[step])
    return [
        {
            "title": "Over cross-entropy alone",
            "value": run.shown_gain(step),
            "below": f"bits per byte at step {step:,}; {level} without the teacher",
        }
    ]


def _reach(run: RunData) -> list[dict[str, str]]:
    """How much of a teacher's probability the loss cannot compare."""
    cards = []
    for i in range(max(1, len(run.teachers))):
        keys = [f"{where}/teacher_{i}/uncovered_mass" for where in ("val", "train")]
        share = next((value for key in keys if (value := run.last(key)) is not None), None)
        if share is not None:
            whose = f"teacher {i}'s probability" if len(run.teachers) > 1 else "the teacher's probability"
            cards.append({"title": "Not covered", "value": f"{share:.1%}", "below": f"of {whose}"})
    return cards


def _effort(run: RunData) -> str:
    """Tokens and time of all logged steps."""
    totals = run_axis(run)
    if "tokens" not in totals:
        return "median over all steps"
    return f"{_compact(totals['tokens'][-1])} tokens in {_duration(totals['seconds'][-1])} of steps"


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


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(run: RunData) -> dict[str, Any]:
    """Samples of the models: behind each fixed prompt side by side, and the last of every other kind in a list."""
    rows = [row for row in run.samples if isinstance(row.get("text"), str) and isinstance(row.get("prompt"), str)]
    fixed: dict[tuple[str, str], list[dict[str, Any]]] = {}
    others: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("kind"):
            others.setdefault(str(row["kind"]), []).append(row)
        else:
            fixed.setdefault((str(row.get("number")), row["prompt"]), []).append(row)
    prompts = [_side_by_side(prompt, samples) for (_, prompt), samples in list(fixed.items())[-_MOST_SAMPLES:]]
    kinds = [
        {"kind": kind, "count": len(samples), "rows": [_written(row) for row in samples[-_MOST_SAMPLES:]]}
        for kind, samples in others.items()
    ]
    return {"prompts": prompts, "kinds": kinds}


def _side_by_side(prompt: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_student = sorted((row for row in rows if row.get("writer") == "student"), key=lambda row: row["step"])
    first_and_last = [by_student[0], by_student[-1]] if len(by_student) > 1 else by_student
    columns = [(f"Student, step {row['step']:,}", row) for row in first_and_last]
    for row in rows:
        writer = str(row.get("writer"))
        if writer != "student":
            columns.append(("How the text goes on" if writer == "data" else writer.capitalize(), row))
    between = by_student[1:-1]
    kept = [between[i * len(between) // _MOST_SAMPLES] for i in range(min(len(between), _MOST_SAMPLES))]
    return {
        "prompt": prompt[-_MOST_CHARACTERS:],
        "columns": [{"who": who, **_written(row)} for who, row in columns],
        "between": [_written(row) for row in (between if len(between) <= _MOST_SAMPLES else kept)],
    }


def _written(row: Mapping[str, Any]) -> dict[str, Any]:
    """A sample for a page; figures besides are shown as they are."""
    known = ("step", "writer", "number", "prompt", "text", "kind", "ended")
    figures = [
        (name, format_number(n)) for name, v in row.items() if name not in known and (n := as_number(v)) is not None
    ]
    return {
        "step": row["step"],
        "prompt": row["prompt"][-_MOST_CHARACTERS:],
        "text": _seen(row["text"][:_MOST_CHARACTERS]),
        "cut": row.get("ended") is False or len(row["text"]) > _MOST_CHARACTERS,
        "figures": figures,
    }


def _seen(text: str) -> str:
    """A text whose signs are all white space as signs that can be seen: a beginner of a student writes such ones."""
    return text if text.strip() else readable(text) or "(nothing)"


# -- tables ------------------------------------------------------------------------------------------------------------


def _validations(run: RunData) -> dict[str, Any] | None:
    titles = dict(_VALIDATION)
    for i in range(len(run.teachers)):
        whose = f", teacher {i}" if len(run.teachers) > 1 else ""
        titles[f"val/teacher_{i}/uncovered_mass"] = (f"uncovered mass{whose}", None)
        if whose:
            titles[f"val/teacher_{i}_bpb"] = (f"teacher {i}'s bits", None)
    for name, student, _ in sources(run):
        titles[student] = (name, False)
    values = {key: dict(points) for key in titles if (points := run.points(key))}
    if len(run.teachers) > 1 and "val/teacher_0_bpb" in values:
        values.pop("val/teacher_bpb", None)
    steps = sorted({step for by_step in values.values() for step in by_step})
    if not steps:
        return None
    best: dict[str, float] = {}
    for key, by_step in values.items():
        higher = titles[key][1]
        if higher is not None and len(steps) > 1:
            best[key] = max(by_step.values()) if higher else min(by_step.values())
    steps_shown = set(steps)
    if len(steps) > _MOST_VALIDATIONS:
        steps_shown = {steps[i * len(steps) // _MOST_VALIDATIONS] for i in range(_MOST_VALIDATIONS)} | {steps[-1]}
        # the best values are marked, so that their rows stay
        steps_shown |= {step for key, value in best.items() for step, v in values[key].items() if v == value}
    cells = []
    for step in (step for step in steps if step in steps_shown):
        line: list[dict[str, Any]] = [{"text": f"{step:,}", "best": False}]
        for key, by_step in values.items():
            value = by_step.get(step)
            text = "" if value is None else f"{value:.4f}"
            line.append({"text": text, "best": bool(text) and value == best.get(key)})
        cells.append(line)
    columns = ["step", *(titles[key][0] for key in values)]
    return {"columns": columns, "rows": cells, "left_out": len(steps) - len(cells)}


def _skipped(run: RunData) -> list[dict[str, Any]]:
    """Reason, what it means, how often, and a bar's length of at most 100."""
    counts = sorted(_counts(run.skipped), key=lambda pair: -pair[1])
    for group, inner in run.skipped.items():
        if isinstance(inner, dict):
            counts += [(f"{group}: {reason}", n) for reason, n in _counts(inner)]
    most = max((n for _, n in counts), default=0.0)
    read = run_axis(run).get("tokens", [])
    cut = dict(counts).get("truncated_tokens", 0.0)
    # of what was read and what was cut off
    share = f": {cut / (cut + read[-1]):.0%} of the text" if read and cut else ""
    return [
        {
            "reason": reason,
            "meaning": explain(reason) + (share if reason == "truncated_tokens" else ""),
            "count": f"{n:,.0f}",
            "bar": round(100 * n / most, 1) if most > 0 and n > 0 else 0,
        }
        for reason, n in counts
    ]


def _counts(reasons: dict[str, Any]) -> list[tuple[str, float]]:
    return [(reason, n) for reason, value in reasons.items() if (n := as_number(value)) is not None]


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
