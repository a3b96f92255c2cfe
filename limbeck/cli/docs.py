"""``limbeck docs``: the documentation in the terminal, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

import limbeck
from limbeck.cli.options import JsonOption, console, print_json, print_names
from limbeck.errors import ConfigError


def docs_command(
    page: Annotated[str | None, typer.Argument(help="A page's name, such as `data`; none: list all.")] = None,
    search: Annotated[str | None, typer.Option("--search", "-s", help="Show the lines that hold this word.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Read the documentation in the terminal: list pages, show one, or search all of them.

    Example: limbeck docs losses; limbeck docs --search warmup
    """
    pages = find_pages()
    if search is not None:
        chosen = {page: _page(pages, page)} if page else pages
        _print_found(search_pages(chosen, search), search, json_output)
    elif page is not None:
        text = _page(pages, page).read_text(encoding="utf-8")
        if json_output:
            print_json({"page": page, "text": text})
        else:
            _print_page(text)
    else:
        titles = {name: _title(path.read_text(encoding="utf-8")) for name, path in pages.items()}
        print_names(titles, "pages", as_json=json_output)


def find_pages() -> dict[str, Path]:
    """Every page by its name: those inside the package, or of the checkout that it is imported from."""
    package = Path(limbeck.__file__).parent
    for folder in (package / "docs", package.parent / "docs"):
        pages = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.md"))}
        # beside an installed package docs/ may be somebody else's
        if "index" in pages:
            return pages
    raise ConfigError("the documentation is not part of this installation; it lies in docs/ of the source")


def search_pages(pages: dict[str, Path], word: str) -> list[tuple[str, str, str]]:
    """(page, heading, line) of every line that holds ``word``, whatever its case."""
    hits = []
    for name, path in pages.items():
        heading = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
            if word.casefold() in line.casefold():
                hits.append((name, heading, line.strip()))
    return hits


def _page(pages: dict[str, Path], name: str) -> Path:
    from limbeck.key_names import near_name

    plain = name.removeprefix("docs/").removesuffix(".md")
    if plain in pages:
        return pages[plain]
    near = near_name(plain, pages)
    hint = f"did you mean {near!r}?" if near else f"limbeck docs lists them, limbeck docs --search {plain} searches"
    raise ConfigError(f"there is no page {name!r}; {hint}")


def _title(text: str) -> str:
    heading = re.search(r"^# +(.*)$", text, re.MULTILINE)
    return heading[1] if heading else ""


def _print_page(text: str) -> None:
    from rich.markdown import Markdown

    out = console()
    # a pipe gets the page as it is written
    if out.is_terminal:
        out.print(Markdown(text))
    else:
        typer.echo(text, nl=False)


def _print_found(hits: list[tuple[str, str, str]], word: str, json_output: bool) -> None:
    if json_output:
        print_json({"found": [{"page": name, "heading": heading, "line": line} for name, heading, line in hits]})
        return
    if not hits:
        raise ConfigError(f"no page holds {word!r}")
    last = ""
    for name, heading, line in hits:
        if name != last:
            typer.secho(name, bold=True)
            last = name
        typer.echo(f"  {heading}: {line}" if heading and heading not in line else f"  {line}")
