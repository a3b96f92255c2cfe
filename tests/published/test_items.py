"""The table of published behaviours: every one has a test that is there, every difference is on a page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (HERE / "ITEMS.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]
PAGE = " ".join((DOCS / "coming_from.md").read_text(encoding="utf-8").split())


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_items_are_numbered_and_none_is_there_twice() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= 143
    said = [row[1] for row in ROWS]
    assert sorted(said) == sorted(set(said))


@pytest.mark.parametrize("file", sorted({row[3].partition("::")[0] for row in ROWS}))
def test_every_named_test_is_there(file: str) -> None:
    found = functions_of((HERE / file).resolve())
    named = {row[3].partition("::")[2] for row in ROWS if row[3].partition("::")[0] == file}
    assert named - found == set()


def test_every_difference_is_on_the_page() -> None:
    differing = [row[2] for row in ROWS if row[2]]
    assert differing
    assert [words for words in differing if words not in PAGE] == []


def test_every_test_of_this_folder_belongs_to_an_item() -> None:
    """Those of defects and newer names aside, which have more cases than items."""
    named = {row[3] for row in ROWS}
    topics = ("collator", "aligner", "microbatches", "off_policy", "policy", "traces")
    there = {f"test_{topic}.py::{name}" for topic in topics for name in functions_of(HERE / f"test_{topic}.py")}
    assert there - named == set()
