"""Show how probable models find failed and better messages of traces, model beside model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# figure -> (title, whether more is better)
_FIGURES: dict[str, tuple[str, bool | None]] = {
    "failed_logprob": ("failed message", False),
    "hinted_logprob": ("failed message, behind its hint", None),
    "worse_logprob": ("rejected message", False),
    "better_logprob": ("better message", True),
    "better_above_worse": ("better above rejected, share", True),
}


def print_traces(result: Mapping[str, Any], names: Mapping[str, str], console: Console) -> None:
    """Means over all places, then one line per place; ``names``: how each model is called in the head of a column."""
    models = list(result)
    first = result[models[0]]
    title = f"traces: mean log p in nats per message ({first['sites']} failed, {first['pairs']} pairs)"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("in front of the same state")
    for model in models:
        table.add_column(Text(names.get(model, model)), justify="right")
    for key, (label, higher) in _FIGURES.items():
        table.add_row(label, *_cells([result[m][key] for m in models], higher))
    console.print(table)
    console.print(_places(result, models, names))
    for model in models:
        dropped = result[model]["dropped"]
        if dropped:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            console.print(f"{names.get(model, model)}: left out {listed}.".replace("\n", " "), style="dim")


def _places(result: Mapping[str, Any], models: list[str], names: Mapping[str, str]) -> Table:
    table = Table(title="log p by place", title_justify="left", title_style="bold", header_style="bold")
    for column in ("trace", "message", "error"):
        table.add_column(column, overflow="fold")
    for kind in ("failed", "better"):
        for model in models:
            table.add_column(Text(f"{kind}\n{names.get(model, model)}"), justify="right")
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
