"""The code blocks of README and docs: how they are found, what they promise, and how they are parsed.

Every block names its language. Which are run, and how, is said in ``test_blocks.py``. A comment on the line before a
block changes what is asked of it, visible to whoever edits the page and to nobody who reads it:

    <!-- not run: needs two machines -->   the block is parsed, not run; the reason is part of the test's list
    <!-- output -->                        a text block that the command or program above it prints, compared by `shows`

A block with ``title="run.yaml"`` is written to a file of that name, so that later commands of the page can use it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LANGUAGES = ("sh", "yaml", "python", "json", "jsonl", "text", "mermaid", "dockerfile")

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$", re.MULTILINE | re.DOTALL
)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.*?) -->\s*$")
_OUTPUT = re.compile(r"<!-- output -->\s*$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    title: str | None
    not_run: str | None
    """Why the block is parsed and not run."""
    is_output: bool

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block; lines joined, comments left out."""
        joined = self.code.replace("\\\n", " ")
        words = [shlex.split(line, comments=True) for line in joined.splitlines()]
        return [command for command in words if command]


def read_blocks(path: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip("\n") + "\n"
        language, _, rest = match["info"].strip().partition(" ")
        reason, title = _NOT_RUN.search(before), _TITLE.search(rest)
        indent = len(match["indent"])
        found.append(
            Block(
                page=str(path.relative_to(ROOT)),
                line=text.count("\n", 0, match.start()) + 1,
                language=language,
                code="".join(line[indent:] for line in match["code"].splitlines(keepends=True)),
                title=title and title[1],
                not_run=reason and reason["reason"],
                is_output=_OUTPUT.search(before) is not None,
            )
        )
    return found


_NUMBER = r"[-+]?[\d][\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?"
_PART = re.compile(rf"(?P<any>\.\.\.|…)|(?P<number>{_NUMBER})|(?P<rule>[─━═┄╌-]{{3,}})|(?P<space>\s+)")


def _pattern(line: str) -> str:
    """A line as a pattern: a number stands for any, so do rules and white space, and ``...`` for any text."""
    made, end = "", 0
    for part in _PART.finditer(line):
        made += re.escape(line[end : part.start()])
        made += {"any": ".*?", "number": _NUMBER, "rule": "[─━═┄╌-]+", "space": r"\s*"}[str(part.lastgroup)]
        end = part.end()
    return made + re.escape(line[end:])


def shows(shown: str, printed: str) -> str | None:
    """None if the lines shown on a page come in this order in what was printed, else the first that does not.

    Numbers are compared as numbers of any value, white space as any white space, ``...`` as any text.
    """
    at = 0
    for line in map(str.strip, shown.splitlines()):
        if not line or line in ("...", "…"):
            continue
        match = re.compile(_pattern(line)).search(printed, at)
        if match is None:
            return line
        at = match.end()
    return None
