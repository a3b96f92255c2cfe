"""``limbeck export``: a run's student as a folder for others, and to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from limbeck.cli.options import JsonOption, print_json


def export_command(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the model.")],
    checkpoint: Annotated[str, typer.Option("--checkpoint", "-c", help="best, latest, or a step.")] = "best",
    license: Annotated[
        str | None, typer.Option(help="Licence of the result, by its short name on the hub, for the card.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to the hub, where a token is set.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: for everybody to see.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a run's student as a transformers folder with a model card; a LoRA run's adapters beside it.

    Example: limbeck export runs/mine -o out --license apache-2.0
    """
    from limbeck.export import export_run, push_folder, require_token

    if push is not None:
        require_token()
    folder = export_run(run, out, checkpoint=checkpoint, license=license)
    address = None if push is None else push_folder(folder, push, private=not public)
    if json_output:
        print_json({"folder": str(folder), "pushed": address})
        return
    typer.echo(f"folder: {folder}")
    if address is not None:
        typer.echo(f"pushed: {address}")
