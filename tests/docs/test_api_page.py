"""What docs/api.md lists exists and is explained: a public name without a docstring would be missing from the page."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests.docs.blocks import ROOT

MODULES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    public = getattr(module, "__all__", [key for key in vars(module) if not key.startswith("_")])
    values = {key: getattr(module, key) for key in public}
    ours = {
        key: value
        for key, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("limbeck")
    }
    assert not [key for key, value in ours.items() if not value.__doc__]
