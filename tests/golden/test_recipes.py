"""Every recipe resolves to the values that it had. New keys may come; none may go or change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden import stored
from tests.golden.cases import RECIPES, resolved_recipe

EXPECTED = stored.load_recipes()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path) -> None:
    assert path.stem in EXPECTED, "a new recipe: record it with python -m tests.golden.record"
    assert list(changed(yaml.safe_load(resolved_recipe(path)), EXPECTED[path.stem])) == []


def test_no_recipe_is_gone() -> None:
    assert set(EXPECTED) == {path.stem for path in RECIPES}


def test_what_counts_as_changed() -> None:
    old = {"a": {"b": 1, "c": [{"d": None}, 2]}}
    assert list(changed({"a": {"b": 1, "c": [{"d": None, "new": 3}, 2]}, "new": 4}, old)) == []
    assert list(changed({"a": {"b": True, "c": [{"d": 0}, 2]}}, old)) == [
        "a.b is True, was 1",
        "a.c.0.d is 0, was None",
    ]
    assert list(changed({"a": {"c": [{"d": None}]}}, old)) == ["a.b is gone", "a.c has 1 items, had 2"]
    assert list(changed({"a": [1]}, old)) == ["a is [1], was {'b': 1, 'c': [{'d': None}, 2]}"]


def changed(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """What of ``expected`` is missing in ``found`` or another value there."""
    dot = f"{where}." if where else ""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key, value in expected.items():
            if key in found:
                yield from changed(found[key], value, f"{dot}{key}")
            else:
                yield f"{dot}{key} is gone"
    elif isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            yield f"{where} has {len(found)} items, had {len(expected)}"
        for place, pair in enumerate(zip(found, expected, strict=False)):
            yield from changed(*pair, f"{dot}{place}")
    elif type(found) is not type(expected) or found != expected:
        yield f"{where} is {found!r}, was {expected!r}"
