"""``limbeck report``: pages from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from limbeck.cli.options import JsonOption, print_json
from limbeck.errors import ConfigError


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several make one page that compares them.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Page to write (default: report.html in the run folder, or here for several)."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a page that follows the runs, to browsers on this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Where --watch serves it; 0: any free port.")
    ] = 8321,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a self-contained page about a run, or one that compares several.

    Example: limbeck report runs/mine    limbeck report runs/ce runs/distilled -o compare.html

    While it trains: limbeck report runs/mine --watch
    """
    if watch:
        if out is not None:
            raise ConfigError(
                "--watch serves a page and writes none; leave out --out, or write the page without --watch"
            )
        _watch(runs, port, open_page=open_page, json_output=json_output)
        return
    from limbeck.report.run_page import write_comparison, write_report
    from limbeck.utils.files import refuse_inputs

    if out is not None:
        # a page is no input: an earlier one may be replaced
        refuse_inputs(out, [file for run in runs for file in run.glob("*") if file.suffix != ".html"])
    page = write_report(runs[0], out) if len(runs) == 1 else write_comparison(runs, out or Path("report.html"))
    if json_output:
        print_json({"page": str(page)})
    else:
        typer.echo(f"page: {page}")
    if open_page:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def _watch(runs: list[Path], port: int, *, open_page: bool, json_output: bool) -> None:
    from limbeck.report.run_data import find_runs
    from limbeck.report.watch import open_server

    files = [run for run in runs if run.is_file()]
    if files:
        find_runs(files)
    with open_server(runs, port) as server:
        if json_output:
            print_json({"url": server.url})
        else:
            typer.echo(f"page: {server.url}  (Ctrl-C ends)")
            for run in runs:
                if not run.exists():
                    typer.echo(f"{str(run)!r} does not exist yet; the page waits for it")
        if open_page:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("\nno longer watching; the runs go on", err=True)
