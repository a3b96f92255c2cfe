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
_SCRIPTS = ("make.js", "charts.js", "page.js", "traces.js", "alignment.js")


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


# Characters that a browser hides, drops or obeys: control characters, and those that turn the direction of text around.
_TURNS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **{code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), *_TURNS)},
}


def _with_signs(value: Any) -> Any:
    """Text of data with a sign for every character that could not be seen or would change what is seen around it."""
    # exactly str: Markup (the script behind the policy's hash, JSON) must stay as it is
    return value.translate(_SIGNS) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        finalize=_with_signs,
    )
    # NaN and Infinity are no JSON: the browser's JSON.parse would refuse all of it
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return environment


@cache
def _static(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
