"""``limbeck init``: a first run file, asked for or by options."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from limbeck.cli.options import note
from limbeck.errors import ConfigError, LimbeckError

T = TypeVar("T")


def init_command(
    out: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.yaml"),
    student: Annotated[str | None, typer.Option("--student", "-s", help="Model folder, GGUF file or hub id.")] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", "-t", help="The same; none: cross-entropy alone.")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="Training files, globs or hf:owner/name.")] = None,
    validation: Annotated[list[str] | None, typer.Option("--validation", help="Held-out files.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; replace a file that is there.")] = False,
) -> None:
    """Write a run file with comments: asks for student, teacher and data, and looks at them.

    Without a terminal nothing is asked: give --student and --data, and --yes to replace a file.

    Example: limbeck init run.yaml --student ./Llama-3.2-1B --teacher ./Qwen3-4B --data 'data/*.jsonl'
    """
    asks = not yes and sys.stdin.isatty()
    if out.exists() and not yes and not (asks and typer.confirm(f"{out} is there already; replace it?")):
        raise ConfigError(f"{str(out)!r} is there already; give another name, or --yes to replace it")

    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.algorithms.draft import draft_run, look_at_data, look_at_model
    from limbeck.config import load_config
    from limbeck.utils.files import write_atomic

    def look_at_teacher(name: str) -> Any:
        return None if name in ("", "none") else look_at_model(name)

    def look_at_files(names: str | list[str]) -> list[str]:
        files = names.split() if isinstance(names, str) else names
        if not files:
            raise ConfigError("no data file is given; give files, globs or hf:owner/name")
        look_at_data(files)
        return files

    mine = _answer(student, "student (model folder, GGUF file or hub id)", "--student", look_at_model, asks)
    if teacher is None and not asks:
        teacher = "none"
    theirs = _answer(teacher, "teacher (the same, or none)", "--teacher", look_at_teacher, asks)
    files = _answer(data, "training data (files or globs)", "--data", look_at_files, asks)
    draft = draft_run(mine, theirs, files, validation or [], f"runs/{out.stem}")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.draft.yaml")
    try:
        write_atomic(partial, draft.text)
        resolve_run(load_config(partial))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    for line in draft.notes:
        note(f"note: {line}")
    typer.echo(f"written to {out}; read it, then: limbeck train {out}")


def _answer(given: Any, question: str, option: str, look: Callable[[Any], T], asks: bool) -> T:
    """What an option gives, or the answer to a question, asked until it can be used."""
    if given is not None:
        return look(given)
    if not asks:
        raise ConfigError(f"{option} is missing, and nobody can be asked here; give it as an option")
    while True:
        try:
            return look(typer.prompt(question).strip())
        except LimbeckError as error:
            note(str(error))
