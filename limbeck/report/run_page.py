"""A run folder as one HTML page: headline figures, curves, validation, what was left out, alignment, configuration."""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limbeck.errors import ConfigError
from limbeck.report.alignment import chunk_html, summary_lines
from limbeck.report.charts import NARROW, WIDE, Series, format_number, line_chart, wants_log
from limbeck.report.comparison import comparison_page
from limbeck.report.reasons import explain
from limbeck.report.run_data import Points, RunData, find_runs, read_run
from limbeck.report.style import card, chip, document, table
from limbeck.utils.files import write_atomic

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
_VALIDATION = {
    "val/bpb": ("bits per byte", False),
    "val/teacher_bpb": ("teacher's", None),
    "val/ce_loss": ("cross-entropy", False),
    "val/kl_loss": ("KL", False),
    "val/accuracy": ("accuracy", True),
    "val/coverage": ("coverage", None),
    "val/loss": ("loss", False),
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
        return _write(run_page(read_run(folder)), target)
    return write_comparison(runs, target)


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one page that lays the curves of several runs over each other and return its path."""
    runs = [read_run(folder) for folder in find_runs([Path(d) for d in run_dirs])]
    return _write(comparison_page(runs), Path(out))


def _write(page: str, target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, page)
    except OSError as error:
        raise ConfigError(f"the page {str(target)!r} cannot be written: {error}; give another --out.") from error
    return target


def run_page(run: RunData) -> str:
    """The page as a string."""
    sections = [
        _header(run),
        _notes(run),
        _cards(run),
        _curves(run),
        _validations(run),
        _dropped(run),
        _alignment(run),
        _details(run),
        f"<footer>{html.escape(' '.join(filter(None, ('limbeck', str(run.versions.get('limbeck', ''))))))}</footer>",
    ]
    return document(f"{run.name}: distillation run", "".join(sections))


# -- head --------------------------------------------------------------------------------------------------------------


def _short(model: str) -> str:
    """The last part of a path, so that heads stay readable; the configuration has the whole."""
    return Path(model).name or model


def _header(run: RunData) -> str:
    esc = html.escape
    teachers = ", ".join(f"<b>{esc(_short(t))}</b>" for t in run.teachers)
    taught = f" distilled from {teachers}" if teachers else " trained without a teacher"
    steps = f"{run.last_step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    facts = [("steps", steps)]
    mode = run.setting("loss_fn.mode") or run.setting("loss.mode")
    if mode:
        facts.insert(0, ("loss", mode))
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
    chips = "".join(chip(label, value) for label, value in facts)
    known = run.student != "unknown"
    line = f'<p class="flow-line"><b>{esc(_short(run.student))}</b>{taught}</p>' if known else ""
    return (
        f'<header><div><div class="mark">Limbeck run</div><h1>{esc(run.name)}</h1>{line}'
        f'<div class="chips">{chips}</div></div><button class="theme" type="button">light / dark</button></header>'
    )


def _notes(run: RunData) -> str:
    notes = list(run.problems)
    for step in run.failed_steps:
        notes.append(f"Step {step} failed; its batch is kept in failed_batch_step_{step}.")
    if not run.rows:
        notes.append("There are no metrics yet: the run has not finished its first step.")
    return "".join(f'<div class="note">{html.escape(note)}</div>' for note in notes)


def _arrow(points: Points) -> str:
    first, last = points[0][1], points[-1][1]
    if len(points) == 1:
        return format_number(first)
    return f"<small>{format_number(first)} →</small> {format_number(last)}"


def _change(points: Points) -> str:
    first, last = points[0][1], points[-1][1]
    if len(points) < 2 or first == 0:
        return ""
    change = (last - first) / abs(first)
    kind = "good" if change < 0 else "bad" if change > 0 else ""
    return f'<span class="{kind}">{change:+.1%}</span> since step {points[0][0]:,}'


def _cards(run: RunData) -> str:
    cards = []
    bpb, teacher = run.points("val/bpb"), run.points("val/teacher_bpb")
    if bpb:
        cards.append(card("Bits per byte, validation", _arrow(bpb), _change(bpb)))
    if teacher:
        level = teacher[-1][1]
        below = ""
        if bpb and bpb[0][1] > level and len(bpb) > 1:
            closed = (bpb[0][1] - bpb[-1][1]) / (bpb[0][1] - level)
            below = f"{closed:.0%} of the student's gap closed"
        cards.append(card("Teacher's bits per byte", format_number(level), below))
    kl = run.points("val/kl_loss") or run.points("train/kl_loss")
    if kl:
        where = "validation" if run.points("val/kl_loss") else "training"
        cards.append(card(f"KL to the teacher, {where}", _arrow(kl), _change(kl)))
    if not bpb and (loss := run.points("train/loss")):
        cards.append(card("Training loss", _arrow(loss), _change(loss)))
    speed = run.points("train/tokens_per_s")
    if speed:
        # the first step compiles and fills caches
        usual = statistics.median(v for _, v in (speed[1:] or speed))
        cards.append(card("Tokens per second", format_number(usual), _effort(run)))
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _effort(run: RunData) -> str:
    """Tokens and time of all logged steps."""
    both = [(row.get("train/tokens_per_s"), row.get("train/seconds")) for row in run.rows]
    known = [(float(s), float(t)) for s, t in both if isinstance(s, int | float) and isinstance(t, int | float)]
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


def _curves(run: RunData) -> str:
    if not run.rows:
        return ""
    bits = [Series("student", run.points("val/bpb"), 0, markers=True)]
    bits += [Series(n, _level(p, run), 1 + i, dashed=True) for i, (n, p) in enumerate(teacher_levels(run))]
    wide = line_chart("Bits per byte", bits, width=WIDE, height=300, note="on the validation set; less is better")
    charts = [f'<div class="wide">{wide}</div>'] if bits[0].points else []
    for title, train, val in (
        ("Loss", "train/loss", "val/loss"),
        ("KL to the teacher", "train/kl_loss", "val/kl_loss"),
        ("Cross-entropy", "train/ce_loss", "val/ce_loss"),
    ):
        pair = [
            Series("train", run.points(train), 0, smooth=True),
            Series("validation", run.points(val), 2, markers=True),
        ]
        charts.append(line_chart(title, pair))
    shares = [
        Series("accuracy", run.points("val/accuracy"), 2, markers=True),
        Series("alignment coverage", run.points("val/coverage"), 3, markers=True),
    ]
    charts.append(line_chart("Accuracy and coverage", shares, note="validation"))
    shown, small = "".join(charts), "".join(_machine(run))
    if not shown and not small:
        return ""
    return f'<h2>Curves</h2><div class="charts">{shown}</div><div class="charts small">{small}</div>{_further(run)}'


def _machine(run: RunData) -> list[str]:
    """How the run went rather than what it reached."""
    norm, speed, rate = (run.points(f"train/{key}") for key in ("grad_norm", "tokens_per_s", "lr"))

    def small(title: str, one: Series, *, log: bool = False, zero: bool = False) -> str:
        return line_chart(title, [one], width=NARROW, height=210, log=log, zero=zero)

    return [
        small("Gradient norm", Series("before clipping", norm, 4, smooth=True), log=wants_log(norm)),
        small("Tokens per second", Series("student", speed, 5, smooth=True), zero=True),
        small("Learning rate", Series("lr", rate, 6), zero=True),
    ]


def _further(run: RunData) -> str:
    """All other metrics, small and folded away."""
    rest = [key for key in run.metric_names() if key not in _SHOWN and not re.fullmatch(_TEACHER_BITS, key)]
    charts = []
    for key in rest:
        points = run.points(key)
        colour = 2 if key.startswith("val/") else 7
        one = Series(key.partition("/")[0], points, colour, smooth=len(points) > 60, markers=True)
        charts.append(line_chart(key.partition("/")[2] or key, [one], width=NARROW, height=200, log=wants_log(points)))
    if not charts:
        return ""
    return (
        f"<details><summary>{len(charts)} further metrics</summary>"
        f'<div class="charts small">{"".join(charts)}</div></details>'
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def _validations(run: RunData) -> str:
    rows = [row for row in run.rows if any(key in row for key in _VALIDATION)]
    columns = [key for key in _VALIDATION if run.points(key)]
    if not rows or not columns:
        return ""
    best: dict[str, float] = {}
    for key in columns:
        higher = _VALIDATION[key][1]
        if higher is not None and len(rows) > 1:
            values = [v for _, v in run.points(key)]
            best[key] = max(values) if higher else min(values)
    cells = []
    for row in rows:
        line = [f"{row['step']:,}"]
        for key in columns:
            value = row.get(key)
            text = f"{value:.4f}" if isinstance(value, int | float) else ""
            line.append(f'<span class="best">{text}</span>' if text and value == best.get(key) else text)
        cells.append(line)
    body = table(["step", *(_VALIDATION[key][0] for key in columns)], cells, text_columns=0)
    return f'<h2>Validation</h2><div class="panel tall">{body}</div>'


def _dropped(run: RunData) -> str:
    counts = {k: v for k, v in run.dropped.items() if isinstance(v, int | float)}
    nested = {k: v for k, v in run.dropped.items() if isinstance(v, dict)}
    head = "<h2>What was left out <small>counted over all epochs, never repaired in silence</small></h2>"
    rows = [_reason_row(reason, count) for reason, count in sorted(counts.items(), key=lambda x: -x[1])]
    for group, inner in nested.items():
        rows += [_reason_row(f"{group}: {r}", c) for r, c in inner.items() if isinstance(c, int | float)]
    if rows:
        return f'{head}<div class="panel">{table(["reason", "what it means", "count"], rows, text_columns=2)}</div>'
    if not (run.folder / "dropped.json").is_file():
        return f'{head}<p class="empty">Not counted yet: a run writes this at the end of an epoch.</p>'
    return f'{head}<p class="empty">Nothing.</p>'


def _reason_row(reason: str, count: float) -> list[str]:
    return [html.escape(reason), f'<span class="sub">{html.escape(explain(reason))}</span>', f"{count:,.0f}"]


def _alignment(run: RunData) -> str:
    if run.alignment is None:
        return ""
    try:
        chunks = run.alignment["chunks"]
        boxes = "".join(chunk_html(chunk) for chunk in chunks[:_MOST_CHUNKS])
        lines = " ".join(summary_lines(run.alignment))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = html.escape(repr(error))
        return f'<h2>Alignment</h2><div class="note">alignment_sample.json cannot be shown: {why}.</div>'
    more = (
        f'<p class="empty">The first {_MOST_CHUNKS} of {len(chunks):,} chunks.</p>'
        if len(chunks) > _MOST_CHUNKS
        else ""
    )
    return (
        "<h2>Alignment of a sample <small>student above, teacher below</small></h2>"
        f'<div class="panel"><p class="empty">{html.escape(lines)}</p><div class="keys">'
        '<span class="chunk k-1n">1:n</span>one student token, several of the teacher '
        '<span class="chunk k-n1">n:1</span>the reverse <span class="chunk k-nm">n:m</span>several on both sides '
        '<span class="chunk inexact">not exact</span>a normaliser changed the text</div>'
        f'<div class="flow">{boxes}</div>{more}</div>'
    )


def _details(run: RunData) -> str:
    out = []
    if run.config_text:
        out.append(
            f"<details><summary>Resolved configuration</summary><pre>{html.escape(run.config_text)}</pre></details>"
        )
    if run.versions:
        rows = [[html.escape(k), html.escape(_plain(v))] for k, v in sorted(run.versions.items())]
        body = table(["what", "value"], rows, text_columns=2)
        out.append(f"<details><summary>Versions and fingerprints</summary>{body}</details>")
    return f"<h2>Details</h2>{''.join(out)}" if out else ""


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
