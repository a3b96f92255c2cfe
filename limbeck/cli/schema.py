"""``limbeck schema``: what a run file may say, for editors and readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from limbeck.cli.options import note


def schema_command(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file instead of printing.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="A page for readers instead of a JSON schema.")] = False,
) -> None:
    """Print the JSON schema of run files: every key with its type, default and meaning.

    Editors complete keys and show their meaning with it. The page that --markdown prints is docs/configuration.md.

    Example: limbeck schema -o run.schema.json
    """
    from limbeck.tools.schema import json_schema, reference
    from limbeck.utils.files import write_atomic

    text = reference() if markdown else json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text)
    use = "" if markdown else f"; in a run file's first line: # yaml-language-server: $schema={out}"
    note(f"written to {out}{use}")
