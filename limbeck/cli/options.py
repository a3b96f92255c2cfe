"""Parts that several commands share: options, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

StudentOption = Annotated[
    str, typer.Option("--student", "-s", help="Student's model folder, tokenizer file or hub id.")
]
TeacherOption = Annotated[
    str, typer.Option("--teacher", "-t", help="Teacher's model folder, tokenizer file or hub id.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RunFileArgument = Annotated[Path, typer.Argument(help="YAML run file, or a recipe's name (limbeck recipes list).")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the file's: key.sub=value; a name alone where one section has it."),
]


def read_run_file(run_file: str | Path, overrides: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run file and the settings over it, refused for an unknown key before anything is imported that takes
    seconds."""
    from limbeck.config import load_config, read_settings, refuse_unknown_keys

    run_file_and_settings = load_config(run_file), read_settings(overrides or [])
    refuse_unknown_keys(*run_file_and_settings)
    return run_file_and_settings


def distillation_of(run_file_and_settings: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """The validated configuration of a run file that distils teachers; another is refused."""
    from limbeck.algorithms.config import MasterConfig
    from limbeck.algorithms.dispatch import resolve_run

    config, _ = resolve_run(*run_file_and_settings)
    if not isinstance(config, MasterConfig):
        raise ConfigError("this run file trains on traces; give one that distils on data")
    return config


def model_files(*specs: str) -> list[Path]:
    """Files of model folders and tokenizers that a command reads; no output may take its place."""
    files: list[Path] = []
    for path in map(Path, specs):
        patterns = ("*.json", "*.model", "*.txt", "*.jinja", "*.gguf", "model*.safetensors")
        files += [path] if path.is_file() else [file for pattern in patterns for file in path.glob(pattern)]
    return files


def short_name(spec: str) -> str:
    """Name of a model on a page or in a table: the last part of its path."""
    path = Path(spec)
    return path.parent.name if path.name in ("tokenizer.json", "tekken.json") else path.name or spec


def console() -> Console:
    """Standard output for tables; a file or a pipe has no width of its own to keep to."""
    from rich.console import Console

    screen = Console()
    return screen if screen.is_terminal else Console(width=160)


def print_names(rows: Mapping[str, str], key: str, *, as_json: bool) -> None:
    """Names and what they stand for, as a table or as one object of JSON under ``key``."""
    if as_json:
        print_json({key: rows})
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, what in rows.items():
        table.add_row(name, what)
    console().print(table)


def print_json(value: Any) -> None:
    """A result as one line of JSON on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def note(line: str) -> None:
    """A line for the user on standard error, where it does not mix with results."""
    typer.echo(line, err=True)
