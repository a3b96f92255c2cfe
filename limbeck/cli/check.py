"""``limbeck check``: is a pair of models worth a run on some data?"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, model_files, print_json, read_run_file, short_name
from limbeck.errors import ExitCode


def check_command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDENT TEACHER | RUN_FILE [KEY=VALUE]...",
            help="Model folders, tokenizer files or hub ids, with --data; or a run file, and settings over it.",
        ),
    ],
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Data file of the run to come; repeatable.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows to look at, spread over the data.", min=1)] = 64,
    text_key: Annotated[
        str | None, typer.Option(help="Column that holds the text (default: text, or the run file's).")
    ] = None,
    score: Annotated[bool, typer.Option(help="Score rows with both models, where their weights lie here.")] = True,
    scored_bytes: Annotated[int, typer.Option(help="Bytes that both models score.", min=100)] = 20_000,
    seconds: Annotated[float, typer.Option(help="Time for scoring rows; one is scored in any case.", min=0)] = 60.0,
    pilot: Annotated[
        bool | None,
        typer.Option(
            "--pilot/--no-pilot",
            help="Train some steps with and without the teacher, and compare. Default: of a run file, where that costs "
            "less than --pilot-seconds.",
        ),
    ] = None,
    pilot_seconds: Annotated[float, typer.Option(help="Time for the pilot.", min=1)] = 60.0,
    pilot_write: Annotated[
        bool | None,
        typer.Option(
            "--pilot-write/--no-pilot-write",
            help="In the pilot, also train on text that the teacher writes. Default: where that is cheap.",
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", "-m", help="GiB of a GPU to train on (default: this machine's).", min=1)
    ] = None,
    json_output: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained page.")] = None,
) -> None:
    """Audit a pair before a run: alignment, reach, special tokens, templates, headroom, memory; one verdict.

    Tokenizers are enough for the first half. A pilot says what the teacher is worth to a student that reads the data.
    Exit code 4: the pair is not worth a run on this data.

    Example: limbeck check run.yaml --pilot

    Example: limbeck check ./Llama-3.2-1B ./Qwen3-4B --data train.jsonl --html check.html
    """
    from limbeck.check import add_pilot, check_pair, check_run, spec_of
    from limbeck.cli.progress import display

    options: dict[str, Any] = {"rows": rows, "score": score, "scored_bytes": scored_bytes, "seconds": seconds}
    options |= {"memory_gib": memory, **({} if text_key is None else {"text_key": text_key})}
    budget: dict[str, Any] = {"pilot_seconds": pilot_seconds, "pilot_write": pilot_write}
    if data:
        config, (student, teacher) = None, _pair(models)
    else:
        config = _config(models)
        student, teacher = spec_of(config.policy), spec_of(config.all_teachers[0])
    if html is not None:
        from limbeck.utils.files import refuse_inputs

        refuse_inputs(html, [*model_files(student, teacher), *map(Path, data or [])])
    with display(quiet=json_output) as screen:
        if config is not None:
            report = check_run(config, pilot=pilot, **budget, progress=screen, **options)
        else:
            report = check_pair(student, teacher, data or [], progress=screen, **options)
            if pilot:
                drafted = _drafted(student, teacher, data or [], text_key)
                report = add_pilot(
                    report, drafted, pilot=True, seconds=pilot_seconds, write=pilot_write, progress=screen
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


def _pair(models: list[str]) -> tuple[str, str]:
    if len(models) != 2:
        raise typer.BadParameter("with --data two models are expected: STUDENT TEACHER")
    return models[0], models[1]


def _config(words: list[str]) -> Any:
    """The validated configuration of a run file that has a teacher."""
    if len(words) > 1 and "=" not in words[1]:
        raise typer.BadParameter(f"{words[1]!r} is no setting (key=value); for a pair of models give --data as well")
    loaded = read_run_file(words[0], words[1:])
    if importlib.util.find_spec("torch") is None:
        # reported alone, by `main`, before the imports below fail somewhere inside
        raise ModuleNotFoundError(name="torch")
    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.tools.pilot import refuse

    config, _ = resolve_run(*loaded)
    refuse(config, pilot=False)
    return config


def _drafted(student: str, teacher: str, data: list[str], text_key: str | None) -> Any:
    """The run that limbeck train would begin with the pair."""
    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.tools.pair import Pair, values_of

    settings = {} if text_key is None else {"data.text_key": text_key}
    config, _ = resolve_run(values_of(Pair(student, teacher, tuple(data), (), (), settings), write=False))
    return config


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
