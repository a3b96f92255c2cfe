"""Every default and every recipe resolves to the values that it had. New keys may come; none may go or change."""

from __future__ import annotations

import pytest

from tests.golden import recipes

STORED = dict(zip(("defaults", "recipes"), recipes.load(), strict=True))
FOUND = dict(zip(("defaults", "recipes"), recipes.current(), strict=True))


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in STORED.items() for name in names])
def test_values_are_those_stored(part: str, name: str) -> None:
    found, stored = FOUND[part][name], STORED[part][name]
    assert {key: found.get(key, "(gone)") for key in stored} == stored


def test_what_a_recipe_changes_is_stored() -> None:
    assert {name: set(values) for name, values in FOUND["recipes"].items()} == {
        name: set(values) for name, values in STORED["recipes"].items()
    }
