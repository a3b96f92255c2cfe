"""The messages that docs/troubleshooting.md explains are still messages of the program."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"\*\*`(.+?)`\*\*", PAGE)


@functools.cache
def templates() -> str:
    """All strings of the program, one per line; what is filled in is `\\0`."""
    found = set()
    for path in (ROOT / "limbeck").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def pattern(message: str) -> str:
    """A quoted message as a pattern of templates: a value may be any part of one."""
    message = message.replace("``", "`").removeprefix("warning: ")
    parts = [part.strip("'") for part in re.split(r"\.\.\.(?!\.)", message)]
    return "[^\n]*".join(re.escape(part) for part in parts)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_exists(message: str) -> None:
    assert re.search(pattern(message), templates()), f"no message of limbeck looks like {message!r}"


def test_a_message_that_is_none_is_noticed() -> None:
    assert not re.search(pattern("cache ... is not complet"), templates().replace("complete", ""))
    assert not re.search(pattern("the alembic ... is cracked"), templates())
    assert len(MESSAGES) >= 25
