"""``limbeck align``: two tokenizations of one text, chunk by chunk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.cli.options import JsonOption, model_files, print_json, short_name
from limbeck.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SHADES = ("cyan", "magenta")


def align_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STUDENT TEACHER] [TEXT]", help="Model folders, tokenizer files or hub ids; a text, '-' reads it."
        ),
    ] = None,
    student: Annotated[
        str | None, typer.Option("--student", "-s", help="Student's model, tokenizer or hub id.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", "-t", help="Teacher's model, tokenizer or hub id.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text from a file.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", "-m", help="JSON file: a list of messages, or {messages, tools}.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Data file whose rows to align; repeatable.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows to take from --data, spread over it.", min=1)] = 20,
    text_key: Annotated[str, typer.Option(help="Column of --data that holds the text.")] = "text",
    score: Annotated[
        bool, typer.Option("--score", help="Load both models: log-probabilities and divergence of every chunk.")
    ] = False,
    json_output: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained page.")] = None,
) -> None:
    """Show two tokenizations of one text side by side, chunk by chunk.

    Example: limbeck align ./Llama-3.2-1B ./Qwen3-4B "In 2011 the café had 1,024 visitors."

    Where do both models disagree? limbeck align ./small ./large --data train.jsonl --score --html page.html
    """
    student, teacher, text = _sort_words(words or [], student, teacher)
    # an empty text is one that was given
    if sum(bool(x) or x == "" for x in (text, file, messages, data)) != 1:
        raise ConfigError("give exactly one of a text, --file, --messages or --data.")
    conversation, tools = _read_messages(messages) if messages else (None, None)
    content = "" if messages or data else _read_text(text, file)

    from limbeck.align.view import view_messages, view_text
    from limbeck.tokens import read_tokenizer

    if html:
        from limbeck.utils.files import refuse_inputs

        inputs = [path for path in (file, messages, *map(Path, data or ())) if path]
        refuse_inputs(html, [*model_files(student, teacher), *inputs])
    tokenizers = read_tokenizer(student), read_tokenizer(teacher)
    if data:
        view = _view_rows(*tokenizers, data, rows, text_key)
    elif conversation is not None:
        view = view_messages(*tokenizers, conversation, tools)
    else:
        view = view_text(*tokenizers, content)
    notes = _score(view, student, teacher, quiet=json_output) if score else []
    names = short_name(student), short_name(teacher)
    if html:
        from limbeck.report.alignment import write_alignment_page

        write_alignment_page(view, html, names, notes=notes)
    if json_output:
        print_json(view)
        return
    _print_view(view, names, notes)
    if html:
        typer.echo(f"page: {html}")


def _print_view(view: dict[str, Any], names: tuple[str, str], notes: list[str]) -> None:
    """Rows or one alignment on the terminal, and what a reader should know about them."""
    from rich.console import Console

    screen = Console(soft_wrap=False)
    if "rows" in view:
        print_rows(view, screen)
    else:
        print_alignment(view, screen, names)
    for line in notes:
        screen.print(line, highlight=False, markup=False)


def _sort_words(words: list[str], student: str | None, teacher: str | None) -> tuple[str, str, str | None]:
    """Student, teacher and text; the two models come first where no option names them."""
    left = list(words)
    named = []
    for side, value in (("student", student), ("teacher", teacher)):
        if value is None and not left:
            raise typer.BadParameter(f'the {side} is missing: limbeck align STUDENT TEACHER "text", or --{side} MODEL.')
        named.append(left.pop(0) if value is None else value)
    if len(left) > 1:
        raise ConfigError(f"{len(left)} texts are given, {left[0]!r} and {left[1]!r}; quote a text of several words.")
    return named[0], named[1], left[0] if left else None


def _view_rows(
    student_tokenizer: object, teacher_tokenizer: object, data: list[str], limit: int, text_key: str
) -> dict[str, Any]:
    """``{"rows": [views with their ``source``], "summary"}``; a row that a template refuses has its ``problem``."""
    from limbeck.align.view import merged_summary, view_messages, view_text
    from limbeck.cli.progress import display
    from limbeck.data.rows import sample_rows
    from limbeck.errors import TemplateError

    views: list[dict[str, Any]] = []
    sampled = sample_rows(data, limit, text_key=text_key)
    with display() as screen:
        bar = screen.begin("aligning rows", len(sampled))
        for row in sampled:
            try:
                if row.messages is not None:
                    view = view_messages(student_tokenizer, teacher_tokenizer, row.messages, row.tools)
                else:
                    view = view_text(student_tokenizer, teacher_tokenizer, row.text or "")
            except TemplateError as error:
                view = {"problem": str(error)}
            views.append({"source": row.source, **view})
            bar.advance()
    usable = [view for view in views if "problem" not in view]
    if not usable:
        raise DataError(f"none of {len(views)} rows can be rendered; the first: {views[0]['problem']}")
    return {"rows": views, "summary": merged_summary(usable)}


def _score(view: dict[str, Any], student: str, teacher: str, *, quiet: bool) -> list[str]:
    """Put both models' scores into a view; what a reader should know about them."""
    from limbeck.cli.progress import display
    from limbeck.evaluation.chunks import ChunkScorer

    rows = [row for row in view.get("rows", [view]) if "problem" not in row]
    with display(quiet=quiet) as screen:
        bar = screen.begin("loading both models", len(rows))
        scorer = ChunkScorer(student, teacher)
        for number, row in enumerate(rows):
            bar.update(number, note="scoring")
            scorer.score(row)
        bar.close()
    return scorer.notes


def _read_text(text: str | None, file: Path | None) -> str:
    if file is None:
        return sys.stdin.read() if text == "-" else str(text)
    try:
        # read_text would turn \r\n into \n, and other tokens would be shown than those of the file
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
    scored = any(chunk.get("divergence") is not None for chunk in view["chunks"])
    for name in ("log p student", "teacher", "apart") if scored else ():
        table.add_column(name, justify="right")
    for number, chunk in enumerate(view["chunks"]):
        kind = "" if chunk["kind"] == "1:1" else chunk["kind"]
        if not chunk["exact"]:
            kind = f"{chunk['kind']} {'added space' if chunk['same_text'] else 'not exact'}"
        style = "red" if not chunk["same_text"] else "yellow" if kind else "dim"
        table.add_row(
            str(number),
            _coloured(chunk["student_tokens"], chunk["same_text"]),
            _coloured(chunk["teacher_tokens"], chunk["same_text"]),
            Text(kind, style=style),
            *(_figures(chunk) if scored else ()),
        )
    console.print(table)
    console.print()
    for line in summary_lines(view):
        console.print(line, highlight=False)
    if scored:
        console.print("apart: KL(teacher || student) of the next cell at the chunk's start, in nats.", highlight=False)


def print_rows(view: dict[str, Any], console: Console) -> None:
    """Rows of data files, one line each, and the summary of all; where models have scored them, the chunks at which
    they are farthest apart."""
    from rich.table import Table
    from rich.text import Text

    from limbeck.align.view import summary_lines
    from limbeck.tokens.vocab import readable

    table = Table(show_edge=False, pad_edge=False, header_style="bold", expand=True)
    table.add_column("row", no_wrap=True)
    for name in ("chunks", "one to one", "exact"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("begins", overflow="ellipsis", no_wrap=True, ratio=1)
    for row in view["rows"]:
        where = Path(row["source"]).name
        if "problem" in row:
            table.add_row(Text(where), "-", "-", "-", Text(row["problem"], style="red"))
            continue
        s = row["summary"]
        share = f"{s['kinds']['1:1'] / s['chunks']:.1%}" if s["chunks"] else "-"
        text = readable("".join(chunk["text"] for chunk in row["chunks"][:12]))
        table.add_row(Text(where), f"{s['chunks']:,}", share, f"{s['coverage']:.1%}", Text(text, style="dim"))
    console.print(table)
    console.print()
    for line in summary_lines(view):
        console.print(line, highlight=False)
    scored = [(c["divergence"], c, row) for row in view["rows"] for c in row.get("chunks", ()) if "divergence" in c]
    known = sorted((item for item in scored if item[0] is not None), key=lambda item: -item[0])
    if known:
        console.print(f"\nfarthest apart, of {len(known):,} chunks (nats; what each model would have said):")
    for value, chunk, _ in known[:10]:
        said = " | ".join(_said(chunk[f"{side}_top"]) for side in ("student", "teacher"))
        console.print(
            Text(f"{value:7.3f}  {readable(chunk['text'])[:20]:<20} {said}"), no_wrap=True, overflow="ellipsis"
        )


def _said(top: list[tuple[str, float]] | None) -> str:
    from limbeck.tokens.vocab import readable

    return "  ".join(f"{readable(token)} {share:.0%}" for token, share in (top or [])[:2])


def _figures(chunk: dict[str, Any]) -> list[str]:
    values = (chunk["student_logprob"], chunk["teacher_logprob"], chunk["divergence"])
    return ["-" if value is None else f"{value:.2f}" for value in values]


def _coloured(tokens: list[str], exact: bool) -> Text:
    from rich.text import Text

    from limbeck.tokens.vocab import readable

    text = Text()
    for i, token in enumerate(tokens):
        text.append(readable(token), style="red" if not exact else _SHADES[i % 2])
        if i + 1 < len(tokens):
            text.append("|", style="dim")
    return text
