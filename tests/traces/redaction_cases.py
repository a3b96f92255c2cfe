"""The committed lists of secrets and of innocent lines, with their random parts drawn.

The lists hold shapes, not keys: a scanner of this repository finds nothing in them, and nothing in them was ever valid.
"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass
from pathlib import Path

_ALPHABETS = {
    "a": string.ascii_letters + string.digits,
    "b": string.ascii_letters + string.digits + "+/",
    "d": string.digits,
    "h": "0123456789abcdef",
    "l": string.ascii_lowercase + string.digits,
    "u": string.ascii_uppercase + string.digits,
    "w": string.ascii_letters,
}
_DRAWN = re.compile(r"\{([abdhluw])(\d+)\}")


@dataclass(frozen=True)
class Case:
    """A text and the secrets in it; ``line`` is where the list has it."""

    line: int
    text: str
    secrets: tuple[str, ...]


def cases(name: str, seed: int = 0) -> list[Case]:
    """The cases of ``secrets.txt`` or ``innocent.txt``."""
    chance = random.Random(f"{name}/{seed}")

    def drawn(match: re.Match[str]) -> str:
        return "".join(chance.choices(_ALPHABETS[match[1]], k=int(match[2])))

    found = []
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            continue
        plain = _DRAWN.sub(drawn, line)
        text = re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), plain)
        marked = re.findall("«(.*?)»", text, re.DOTALL)
        found.append(Case(number, text.replace("«", "").replace("»", ""), tuple(marked)))
    return found
