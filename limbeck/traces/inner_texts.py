"""Texts inside texts: JSON in strings, HTML entities, URL encoding, base64. What is found in one has a place outside.

Example:
    >>> inner = unescaped('{"args": "{\\\\"password\\\\": 1}"}')
    >>> inner.text, inner.place(inner.text.index("password"))
    ('{"args": "{"password": 1}"}', 13)
"""

from __future__ import annotations

import base64
import binascii
import html
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

_ESCAPE = re.compile(
    r"\\(?:u00(?P<unicode>[2-7][0-9A-Fa-f])|(?P<sign>[\"'`\\/nrt]))"
    r"|%(?P<percent>[2-7][0-9A-Fa-f]|0[Aa])|&(?P<entity>quot|apos|lt|gt|amp|#\d{2,3}|#x[0-9a-fA-F]{2});"
)
_SIGNS = {"n": "\n", "r": "\r", "t": "\t"}
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/]{24,}={0,2}(?![A-Za-z0-9+/_-])")


@dataclass
class Inner:
    """A text that another one spells; ``place`` says where."""

    text: str
    _inside: list[int] = field(default_factory=list)
    _outside: list[int] = field(default_factory=list)

    def place(self, offset: int) -> int:
        """The offset in the outer text of an offset in this one."""
        index = bisect_right(self._inside, offset) - 1
        return offset if index < 0 else self._outside[index] + offset - self._inside[index]


def unescaped(text: str) -> Inner | None:
    """The text with one layer of escapes read; None where it has none."""
    if not ("\\" in text or "%" in text or "&" in text):
        return None
    parts, inside, outside = list[str](), list[int](), list[int]()
    done = length = 0
    for match in _ESCAPE.finditer(text):
        start, end = match.span()
        kind, written = match.lastgroup, match[match.lastgroup or 0]
        if kind == "sign":
            read = _SIGNS.get(written, written)
        elif kind == "entity":
            read = html.unescape(f"&{written};")
        else:
            read = chr(int(written, 16))
        parts += [text[done:start], read]
        length += start - done + 1
        inside.append(length)
        outside.append(end)
        done = end
    if not parts:
        return None
    return Inner("".join([*parts, text[done:]]), inside, outside)


def encoded(text: str) -> Iterator[tuple[int, int, str]]:
    """Where a text has base64 of another text, and that text."""
    for match in _BASE64.finditer(text):
        written = match[0].rstrip("=")
        # most of what looks like base64 is none, or of no text: its beginning says so
        if not decoded(written[:24]).isascii():
            continue
        inner = decoded(written)
        if inner.isascii() and sum(map(str.isprintable, inner)) + inner.count("\n") + inner.count("\t") == len(inner):
            yield match.start(), match.end(), inner


def decoded(written: str) -> str:
    """The text of base64 without its padding; what is no text has signs beyond ASCII."""
    try:
        return base64.b64decode(written + "=" * (-len(written) % 4)).decode("latin-1")
    except binascii.Error:
        return "\x80"
