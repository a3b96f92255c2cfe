"""``limbeck report``: pages from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from limbeck.cli.options import JsonOption, print_json


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several make one page that compares them.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Page to write (default: report.html in the run folder, or here for several)."
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a self-contained page about a run, or one that compares several.

    Example: limbeck report runs/mine    limbeck report runs/ce runs/distilled -o compare.html
    """
    from limbeck.report.run_page import write_comparison, write_report
    from limbeck.utils.files import refuse_inputs

    if out is not None:
        refuse_inputs(out, [file for run in runs for file in run.glob("*") if file.suffix != ".html"])
    page = write_report(runs[0], out) if len(runs) == 1 else write_comparison(runs, out or Path("report.html"))
    if json_output:
        print_json({"page": str(page)})
    else:
        typer.echo(f"page: {page}")
    if open_page:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
