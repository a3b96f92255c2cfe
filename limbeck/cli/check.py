"""``limbeck check``: is a pair of models worth a run on some data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, model_files, print_json, short_name
from limbeck.errors import ExitCode


def check_command(
    student: Annotated[
        str, typer.Argument(metavar="STUDENT", help="Student's model folder, tokenizer file or hub id.")
    ],
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="Teacher's model folder, tokenizer file or hub id.")
    ],
    data: Annotated[list[str], typer.Option("--data", "-d", help="Data file of the run to come; repeatable.")],
    rows: Annotated[int, typer.Option(help="Rows to look at, spread over the data.", min=1)] = 64,
    text_key: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    score: Annotated[bool, typer.Option(help="Score rows with both models, where their weights lie here.")] = True,
    scored_bytes: Annotated[int, typer.Option(help="Bytes that both models score.", min=100)] = 20_000,
    memory: Annotated[float, typer.Option("--memory", "-m", help="GiB of the device to train on.", min=1)] = 80.0,
    json_output: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained page.")] = None,
) -> None:
    """Audit a pair before a run: alignment, reach, special tokens, templates, headroom, memory; one verdict.

    Tokenizers are enough for the first half. Exit code 4: the pair is not worth a run on this data.

    Example: limbeck check ./Llama-3.2-1B ./Qwen3-4B --data train.jsonl --html check.html
    """
    from limbeck.check import check_pair
    from limbeck.cli.progress import display

    if html is not None:
        from limbeck.utils.files import refuse_inputs

        refuse_inputs(html, [*model_files(student, teacher), *map(Path, data)])
    with display(quiet=json_output) as shown:
        report = check_pair(
            student,
            teacher,
            data,
            rows=rows,
            text_key=text_key,
            score=score,
            scored_bytes=scored_bytes,
            memory_gib=memory,
            shown=shown,
        )
    if html is not None:
        from limbeck.report.check import check_page

        check_page(report, (short_name(student), short_name(teacher))).write(html)
    if json_output:
        print_json({key: value for key, value in report.items() if key != "views"})
    else:
        print_check(report)
        if html is not None:
            typer.echo(f"page: {html}")
    if not report["verdict"]["worth"]:
        raise typer.Exit(ExitCode.NOT_WORTH_IT)


def print_check(report: dict[str, Any]) -> None:
    """Findings as a table of at most 80 columns, what was skipped, and the verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    screen = Console()
    screen = screen if screen.is_terminal and screen.width < 80 else Console(width=80)
    table = Table(show_edge=False, pad_edge=False, header_style="bold", box=None)
    table.add_column("", width=4)
    table.add_column("what", width=19, overflow="fold")
    table.add_column("found", overflow="fold")
    styles = {"ok": "green", "note": "yellow", "bad": "bold red"}
    for finding in report["findings"]:
        text = Text(finding["found"])
        if finding["remedy"]:
            text.append(f"; {finding['remedy']}", style=styles[finding["level"]])
        table.add_row(Text(finding["level"], style=styles[finding["level"]]), finding["what"], text)
    for what, why in report["skipped"].items():
        table.add_row(Text("skip", style="dim"), what, Text(why, style="dim"))
    screen.print(table)
    verdict = report["verdict"]
    screen.print()
    screen.print(Text(verdict["sentence"], style="bold green" if verdict["worth"] else "bold red"))
