"""A page: one HTML file that needs and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from limbeck.errors import ConfigError, one_line
from limbeck.utils.files import write_atomic

_HERE = Path(__file__).parent
_SCRIPTS = ("charts.js", "page.js", "traces.js", "alignment.js", "vocabulary.js")


@dataclass(frozen=True)
class Page:
    """A template and the plain values that it shows. Text in the values is never markup.

    Style and script stand in the page; the content-security policy allows these two by their hashes, and nothing else:
    should text ever become markup, it still could not run or load anything.
    """

    template: str
    title: str
    data: Mapping[str, Any]

    def render(self, *, live: bool = False) -> str:
        """The page as a string. ``live``: it asks the server that it came from for news, and nobody else."""
        style, script = _static("style.css"), "".join(map(_static, (*_SCRIPTS, *(["live.js"] if live else []))))
        policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
        policy += "; connect-src 'self'" if live else ""
        template = _environment().get_template(f"{self.template}.html")
        # both are files of this package, not data
        inline = {"style": Markup(style), "script": Markup(script)}
        return template.render(self.data, title=self.title, policy=policy, live=live, **inline)

    def write(self, path: str | Path) -> Path:
        """Write the page, whole or not at all; returns its path."""
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # JSON can spell lone surrogates, which UTF-8 cannot
            write_atomic(target, self.render().encode("utf-8", "replace"))
        except OSError as error:
            raise ConfigError(
                f"the page {str(target)!r} cannot be written: {one_line(error)}; give another place."
            ) from error
        return target


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined, auto_reload=False
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return environment


@cache
def _static(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
