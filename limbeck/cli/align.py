"""``limbeck align``: two tokenizations of one text, chunk by chunk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.cli.options import JsonOption, StudentOption, TeacherOption, model_files, print_json
from limbeck.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SHADES = ("cyan", "magenta")


def align_command(
    student: StudentOption,
    teacher: TeacherOption,
    text: Annotated[str | None, typer.Argument(help="Text to align; '-' reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text from a file.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", "-m", help="JSON file: a list of messages, or {messages, tools}.")
    ] = None,
    json_output: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained page.")] = None,
) -> None:
    """Show two tokenizations of one text side by side, chunk by chunk.

    Example: limbeck align --student ./Llama-3.2-1B --teacher ./Qwen3-4B "In 2011 the café had 1,024 visitors."
    """
    if sum(x is not None for x in (text, file, messages)) != 1:
        raise ConfigError("give exactly one of a text, --file or --messages.")
    conversation, tools = _read_messages(messages) if messages else (None, None)
    content = "" if messages else _read_text(text, file)

    from limbeck.align.view import view_messages, view_text
    from limbeck.tokens import read_tokenizer

    tokenizers = read_tokenizer(student), read_tokenizer(teacher)
    view = view_text(*tokenizers, content) if conversation is None else view_messages(*tokenizers, conversation, tools)
    names = _short(student), _short(teacher)
    if html:
        from limbeck.report.alignment import write_alignment_page
        from limbeck.utils.files import refuse_inputs

        refuse_inputs(html, [*model_files(student, teacher), *(path for path in (file, messages) if path)])
        write_alignment_page(view, html, names)
    if json_output:
        print_json(view)
        return
    from rich.console import Console

    print_alignment(view, Console(soft_wrap=False), names)
    if html:
        typer.echo(f"page: {html}")


def _short(spec: str) -> str:
    path = Path(spec)
    return path.parent.name if path.name in ("tokenizer.json", "tekken.json") else path.name or spec


def _read_text(text: str | None, file: Path | None) -> str:
    if file is None:
        return sys.stdin.read() if text == "-" else str(text)
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}; convert it first.") from error


def _read_messages(path: Path) -> tuple[list[dict[str, Any]], Any]:
    try:
        data = json.loads(_read_text(None, path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno} is no JSON: {error.msg}.") from error
    messages, tools = (data.get("messages"), data.get("tools")) if isinstance(data, dict) else (data, None)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"{path} holds no list of messages; expected [{{role, content}}, ...] or {{messages: [...]}}.")
    return messages, tools


def print_alignment(view: dict[str, Any], console: Console, names: tuple[str, str]) -> None:
    """Two tokenizations side by side, one row per chunk; chunks that are not 1:1 carry their kind."""
    from rich.table import Table
    from rich.text import Text

    from limbeck.align.view import summary_lines

    table = Table(title=None, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right", style="dim")
    table.add_column(f"student  {names[0]}", overflow="fold")
    table.add_column(f"teacher  {names[1]}", overflow="fold")
    table.add_column("kind")
    for number, chunk in enumerate(view["chunks"]):
        kind = "" if chunk["kind"] == "1:1" else chunk["kind"]
        if not chunk["exact"]:
            kind = f"{chunk['kind']} not exact"
        style = "red" if not chunk["exact"] else "yellow" if kind else "dim"
        table.add_row(
            str(number),
            _coloured(chunk["student_tokens"], chunk["exact"]),
            _coloured(chunk["teacher_tokens"], chunk["exact"]),
            Text(kind, style=style),
        )
    console.print(table)
    console.print()
    for line in summary_lines(view):
        console.print(line, highlight=False)


def _coloured(tokens: list[str], exact: bool) -> Text:
    from rich.text import Text

    from limbeck.tokens.vocab import readable

    text = Text()
    for i, token in enumerate(tokens):
        text.append(readable(token), style="red" if not exact else _SHADES[i % 2])
        if i + 1 < len(tokens):
            text.append("|", style="dim")
    return text
