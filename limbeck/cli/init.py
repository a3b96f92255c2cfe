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
    validation: Annotated[
        list[str] | None,
        typer.Option("--validation", help="Held-out files; none: a tenth of the data is held out (data.holdout)."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A configuration of NeMo RL (x-token) or TRL (GOLD, GKD) to port.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The same as OUT.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; replace a file that is there.")] = False,
) -> None:
    """Write a run file with comments: asks for student, teacher, data and validation, and looks at them.

    Without a terminal nothing is asked: give --student and --data, and --yes to replace a file.

    With --from a run file is made of another library's configuration: what differs is said beside each line.

    Example: limbeck init run.yaml --student ./Llama-3.2-1B --teacher ./Qwen3-4B --data 'data/*.jsonl'
    """
    out = output or out
    asks = not yes and sys.stdin.isatty()
    if out.exists() and not yes and not (asks and typer.confirm(f"{out} is there already; replace it?")):
        raise ConfigError(f"{str(out)!r} is there already; give another name, or --yes to replace it")

    if source is not None:
        if options := [
            name for name, value in (("--student", student), ("--teacher", teacher), ("--data", data)) if value
        ]:
            raise ConfigError(f"{options[0]} and --from are both given; change models and data in {out} afterwards")
        _port(source, out)
        return

    from limbeck.tools.draft import draft_run, look_at_data, look_at_model

    def look_at_teacher(name: str) -> Any:
        return None if name in ("", "none") else look_at_model(name)

    def look_at_files(names: str | list[str]) -> list[str]:
        files = names.split() if isinstance(names, str) else names
        if not files:
            raise ConfigError("no data file is given; give files, globs or hf:owner/name")
        look_at_data(files)
        return files

    def look_at_validation(names: str) -> list[str]:
        return [] if names in ("", "none") else look_at_files(names)

    mine = _answer(student, "student (model folder, GGUF file or hub id)", "--student", look_at_model, asks)
    if teacher is None and not asks:
        teacher = "none"
    theirs = _answer(teacher, "teacher (the same, or none)", "--teacher", look_at_teacher, asks)
    files = _answer(data, "training data (files or globs)", "--data", look_at_files, asks)
    if validation is None and asks:
        question = "validation data (files, or none: a tenth of the data is held out)"
        validation = _answer(None, question, "--validation", look_at_validation, asks)
    draft = draft_run(mine, [] if theirs is None else [theirs], files, validation or [], f"runs/{out.stem}")
    _write(draft.text, out)
    for line in draft.notes:
        note(f"note: {line}")
    typer.echo(f"written to {out}; read it, then: limbeck train {out}")


def _write(text: str, out: Path) -> None:
    """Write a run file that loads; one that does not leaves what is there as it is."""
    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.config import load_config
    from limbeck.utils.files import write_atomic

    out.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, so that replace is a rename
    partial = out.with_name(f".{out.name}.draft.yaml")
    try:
        write_atomic(partial, text)
        resolve_run(load_config(partial))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def _port(source: Path, out: Path) -> None:
    from limbeck.tools.port import FILL_IN, port_file

    port = port_file(source)
    text = port.text(source.name)
    _write(text, out)
    note(f"{len(port.rows)} keys of {port.library} were changed, mapped or left out: {out} says how, line by line")
    if FILL_IN in text:
        note(f"note: some values were not in the configuration; they are {FILL_IN} in {out}")
    typer.echo(f"written to {out}; read it, then: limbeck train {out} --dry-run")


def _answer(value: Any, question: str, option: str, look: Callable[[Any], T], asks: bool) -> T:
    """Value of an option, or the answer to a question, asked until it can be used."""
    if value is not None:
        return look(value)
    if not asks:
        raise ConfigError(f"{option} is missing, and nobody can be asked here; give it as an option")
    while True:
        try:
            return look(typer.prompt(question).strip())
        except LimbeckError as error:
            note(str(error))
