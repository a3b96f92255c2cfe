"""``limbeck recipes``: the run files that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from limbeck.cli.options import JsonOption, print_names
from limbeck.errors import ConfigError

recipes_app = typer.Typer(
    help="Run files that come with the package: list, show, copy.\n\nExample: limbeck recipes copy chat mine.yaml",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(help="A recipe's name, see `limbeck recipes list`.")]


@recipes_app.command("list")
def list_command(json_output: JsonOption = False) -> None:
    """Name every recipe and say what it is for; `limbeck train NAME` runs one from any folder.

    Example: limbeck recipes list
    """
    from limbeck.config import recipe_names

    recipes = {name: describe(_text(name)) for name in recipe_names()}
    print_names(recipes, "recipes", as_json=json_output)


@recipes_app.command("show")
def show_command(name: NameArgument) -> None:
    """Print a recipe.

    Example: limbeck recipes show chat
    """
    typer.echo(_text(name), nl=False)


@recipes_app.command("copy")
def copy_command(
    name: NameArgument,
    to: Annotated[Path | None, typer.Argument(help="File or folder; default: NAME.yaml here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Copy a recipe to change it; data and recipes that it names are still found.

    Example: limbeck recipes copy chat mine.yaml
    """
    from limbeck.utils.files import write_atomic

    text = _text(name)
    target = to or Path()
    if target.is_dir():
        target = target / f"{Path(name).stem}.yaml"
    if target.exists() and not force:
        raise ConfigError(f"{str(target)!r} is there already; give another name, or --force to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text)
    typer.echo(f"copied to {target}; change it, then: limbeck train {target}")


def describe(text: str) -> str:
    """Purpose of a run file: the first line of the comment that it begins with."""
    return text.partition("\n")[0].lstrip("# ")


def _text(name: str) -> str:
    from limbeck.config import recipe_file, recipe_names
    from limbeck.key_names import near_name

    path = recipe_file(name)
    if path is None:
        near = near_name(name, recipe_names())
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(recipe_names())}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}")
    return path.read_text(encoding="utf-8")
