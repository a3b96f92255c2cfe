"""Show an evaluation in the terminal: models side by side, the best of each row in bold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from limbeck.utils.files import short_names

_FIGURES: dict[str, tuple[str, bool]] = {
    "acc": ("accuracy", True),
    "acc_norm": ("accuracy, per byte", True),
    "exact": ("right answers, written", True),
    "ended": ("answers that end in time", True),
    "accuracy": ("chosen above rejected", True),
    "chosen_logprob": ("log p of chosen", True),
    "rejected_logprob": ("log p of rejected", False),
    "margin": ("margin", True),
}
"""Further figures: title, and whether more is better."""
_TRACE_FIGURES: dict[str, tuple[str, bool | None]] = {
    "failed_logprob": ("failed message", False),
    "hinted_logprob": ("failed message, behind its hint", None),
    "worse_logprob": ("rejected message", False),
    "better_logprob": ("better message", True),
    "better_above_worse": ("better above rejected, share", True),
}
"""How probable messages of traces are: title, and whether more is better."""
_SCORED = {"chat": " (assistant)", "choice": " (right answers)", "pairs": " (chosen)", "answers": " (right answers)"}
"""Part of a file that the bits per byte are about, where that is not all of it."""


def print_evaluation(result: Mapping[str, Any], console: Console) -> None:
    """Bits per byte by file and model, then accuracies and preferences where there are any, then notes."""
    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = result["models"]
    names = {spec: _model_name(short, result, spec) for spec, short in short_names(models).items()}
    modes = result.get("files", {})
    files = {file: f"{short}{_SCORED.get(modes[file], '')}" for file, short in short_names(modes).items()}
    if files:
        console.print(_bpb_table(models, names, files))
    figures = _figure_table(models, names, files)
    if figures is not None:
        console.print(figures)
    if "tasks" in result:
        print_tasks(result["tasks"], names, console)
    if "traces" in result:
        print_traces(result["traces"], names, console)
    if "lm_eval" in result:
        console.print(_harness_table(result["lm_eval"], names))
    for note in notes(models, names, files):
        console.print(note, style="dim", highlight=False)
    for warning in bos_warnings(result.get("loaded", {})):
        console.print(warning, style="yellow", highlight=False, markup=False)


def print_tasks(result: Mapping[str, Any], names: Mapping[str, str], console: Console) -> None:
    """Problems solved, by task and model, and what tells each model from the first on the same problems."""
    table = Table(title="problems solved")
    table.add_column("task")
    for spec in result["scores"]:
        table.add_column(names.get(spec, spec), justify="right")
    for task, others in result["pairs"].items():
        scores = [of_model[task] for of_model in result["scores"].values()]
        cells = [f"{one['score']:.1%} ± {one['standard_error']:.1%}" for one in scores]
        table.add_row(f"{task} ({scores[0]['problems']})", *cells)
        for spec, pair in others.items():
            name = names.get(spec, spec).replace("\n", " ")
            gain = f"{pair['difference']:+.1%} ± {pair['standard_error']:.1%}"
            line = f"{task}, {name} less the first: {gain}, p = {pair['p']:.3g} (McNemar)"
            console.print(line, style="dim", highlight=False)
    console.print(table)


def _model_name(short: str, result: Mapping[str, Any], spec: str) -> str:
    step = result.get("loaded", {}).get(spec, {}).get("step")
    return short if step is None else f"{short}\nstep {step}"


def _table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(Text(column), justify="right")
    return table


def _row(values: list[float | None], digits: int, higher: bool) -> list[Text]:
    """Values as text; the best one bold where there is something to compare."""
    # as shown: values that look the same are equally good
    known = [round(v, digits) for v in values if v is not None]
    best = (max(known) if higher else min(known)) if len(values) > 1 and known else None
    cells = []
    for value in values:
        if value is None:
            cells.append(Text("-", style="dim"))
        else:
            cells.append(Text(f"{value:.{digits}f}", style="bold green" if round(value, digits) == best else ""))
    return cells


def _bpb_table(models: Mapping[str, Any], names: Mapping[str, str], files: Mapping[str, str]) -> Table:
    table = _table("bits per byte (less is better)", ["file"], [*names.values(), "documents", "bytes"])
    for file, short in files.items():
        rows = [models[spec][file] for spec in names]
        cells = _row([row["bpb"] for row in rows], 4, higher=False)
        table.add_row(Text(short), *cells, f"{rows[0]['documents']:,}", f"{max(row['bytes'] for row in rows):,}")
    if len(files) > 1:
        table.add_section()
        table.add_row("all bytes", *_row([_overall(models[spec]) for spec in names], 4, higher=False), "", "")
    return table


def _overall(by_file: Mapping[str, Mapping[str, Any]]) -> float | None:
    rows = [row for row in by_file.values() if row["bpb"] is not None]
    total = sum(row["bytes"] for row in rows)
    # all bits over all bytes: in a mean of the files' figures a small file would count as much as a large one
    return sum(row["bpb"] * row["bytes"] for row in rows) / total if total else None


def _figure_table(models: Mapping[str, Any], names: Mapping[str, str], files: Mapping[str, str]) -> Table | None:
    table = _table("choices", ["file", "figure"], names.values())
    for file, short in files.items():
        rows = [models[spec][file] for spec in names]
        for key, (title, higher) in _FIGURES.items():
            if key in rows[0]:
                table.add_row(Text(short), title, *_row([row[key] for row in rows], 3, higher))
                short = ""
    return table if table.row_count else None


def _harness_table(results: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    table = _table("lm-eval", ["task", "figure"], names.values())
    first = next(iter(results.values()))
    for task, figures in first.items():
        label = task
        for figure in figures:
            if "stderr" not in figure:
                values = [results[spec].get(task, {}).get(figure) for spec in names]
                table.add_row(Text(label), Text(figure), *_row(values, 4, higher=True))
                label = ""
    return table


def notes(models: Mapping[str, Any], names: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    """Notes without which the figures would mislead: unequal bytes, lossy tokens, what was left out."""
    out = []
    for file, short in files.items():
        sizes = {names[spec].replace("\n", " "): models[spec][file]["bytes"] for spec in names}
        low, high = min(sizes.values()), max(sizes.values())
        if high > low * 1.005:
            listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            out.append(
                f"{short}: models were scored on different numbers of bytes ({listed}); a document's first token has "
                "no predictor where the tokenizer sets no BOS token."
            )
        for spec in names:
            skipped = models[spec][file].get("skipped")
            if skipped:
                listed = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
                out.append(f"{short}, {names[spec]}: {listed}.".replace("\n", " "))
    return out


def bos_warnings(loaded: Mapping[str, Any]) -> list[str]:
    """One line for every model whose texts began otherwise than it expects, or than its tokenizer begins them."""
    out = []
    for spec, details in loaded.items():
        bos = details.get("bos")
        if bos is None:
            continue
        how, does = ("behind its BOS token", "sets none") if bos["expected"] else ("without", "sets one")
        said = f"a plain text has {bos['bits']}; its tokenizer {does}"
        if bos["followed"]:
            out.append(f"{spec} was scored {how}, as its weights expect: {said}.")
        else:
            advice = "so its figures are too high; add --bos expected"
            out.append(f"warning: {spec} expects its texts {how}: {said}, {advice}")
    return out


def print_traces(result: Mapping[str, Any], names: Mapping[str, str], console: Console) -> None:
    """Means over all places, then one line per place; ``names``: how each model is called in the head of a column."""
    models = list(result)
    first = result[models[0]]
    title = f"traces: mean log p in nats per message ({first['sites']} failed, {first['pairs']} pairs)"
    table = _table(title, ["in front of the same state"], [names.get(model, model) for model in models])
    for key, (label, higher) in _TRACE_FIGURES.items():
        table.add_row(label, *_cells([result[m][key] for m in models], higher))
    console.print(table)
    if "behaviour" in first:
        console.print(_behaviour(result, models, names))
    console.print(_places(result, models, names))
    for model in models:
        skipped = result[model]["skipped"]
        if skipped:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            console.print(f"{names.get(model, model)}: left out {listed}.".replace("\n", " "), style="dim")


_BEHAVIOUR = {
    "calls": ("makes a call that parses", True),
    "repeated": ("makes the failed call again", False),
    "known_tool": ("names existing tools", True),
    "valid": ("fits the tools' schemas", True),
    "recovered": ("makes the calls that put it right", True),
    "unended": ("does not end in time", False),
}


def _behaviour(result: Mapping[str, Any], models: list[str], names: Mapping[str, str]) -> Table:
    states = result[models[0]]["behaviour"]["states"]
    title = f"what is written at {states} failed states: share of answers"
    table = _table(title, ["the answer"], [names.get(model, model) for model in models])
    for key, (label, higher) in _BEHAVIOUR.items():
        table.add_row(label, *_cells([result[m]["behaviour"][key] for m in models], higher, digits=2))
    return table


def _places(result: Mapping[str, Any], models: list[str], names: Mapping[str, str]) -> Table:
    columns = [f"{kind}\n{names.get(model, model)}" for kind in ("failed", "better") for model in models]
    table = _table("log p by place", ["trace", "message", "error"], columns)
    rows = [{(row["trace"], row["message"]): row for row in result[m]["rows"]} for m in models]
    for key, row in rows[0].items():
        cells: list[Text] = []
        for kind, higher in (("failed", False), ("better", True)):
            cells += _cells([other.get(key, {}).get(kind) for other in rows], higher, digits=1)
        table.add_row(Text(key[0]), str(key[1]), row["kind"], *cells)
    return table


def _cells(values: list[float | None], higher: bool | None, digits: int = 3) -> list[Text]:
    known = [v for v in values if v is not None]
    best = None
    if len(known) > 1 and higher is not None:
        best = max(known) if higher else min(known)
    return [
        Text("-", style="dim") if v is None else Text(f"{v:.{digits}f}", style="bold green" if v == best else "")
        for v in values
    ]
