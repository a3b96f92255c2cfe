"""What several commands share: options, and how results are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="Settings that replace the file's: key.sub=value.")]


def model_files(*specs: str) -> list[Path]:
    """What model folders and tokenizer files hold that a command reads; no output may take its place."""
    found: list[Path] = []
    for path in map(Path, specs):
        patterns = ("*.json", "*.model", "*.txt", "*.jinja", "*.gguf", "model*.safetensors")
        found += [path] if path.is_file() else [file for pattern in patterns for file in path.glob(pattern)]
    return found


def short_name(spec: str) -> str:
    """What a page or a table calls a model: the last part of its path."""
    path = Path(spec)
    return path.parent.name if path.name in ("tokenizer.json", "tekken.json") else path.name or spec


def console() -> Console:
    """Standard output for tables; a file or a pipe has no width of its own to keep to."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=160)


def print_json(value: Any) -> None:
    """A result as one line of JSON on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def note(line: str) -> None:
    """A line for the user on standard error, where it does not mix with results."""
    typer.echo(line, err=True)
