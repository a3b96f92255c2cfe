"""``limbeck doctor``: what this installation and some models are good for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, console, print_json
from limbeck.errors import ExitCode


def doctor_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Models whose tokenizer, head, weights and template to check, or run folders."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check this installation and, if given, models: versions, devices, extras, tokenizers, heads, chat templates;
    of run folders the checkpoints.

    Example: limbeck doctor ./Llama-3.2-1B ./Qwen3-4B
    """
    from limbeck.doctor import examine

    findings = examine(models or [])
    if json_output:
        print_json({"findings": findings})
    else:
        print_findings(findings)
    if any(f["level"] == "bad" for f in findings):
        raise typer.Exit(ExitCode.ERROR)


def print_findings(findings: list[dict[str, Any]]) -> None:
    """Findings as a table with colours."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, header_style="bold")
    for column in ("", "what", "found", "remedy"):
        table.add_column(column, overflow="fold")
    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("bad", "bold red")}
    for f in findings:
        mark, style = marks[f["level"]]
        table.add_row(Text(mark, style=style), Text(f["what"]), Text(f["found"]), Text(f["remedy"]))
    console().print(table)
