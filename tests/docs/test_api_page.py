"""docs/api.md is what the docstrings say."""

from __future__ import annotations

from tests.docs import api_page


def test_the_page_is_what_the_docstrings_say() -> None:
    stored = api_page.PAGE.read_text(encoding="utf-8")
    assert stored == api_page.page(), "docstrings have changed: python -m tests.docs.api_page writes docs/api.md anew"


def test_what_is_on_the_page_is_explained() -> None:
    """A public class or function without a docstring is an entry without a text."""
    bare = [
        f"{name}.{public}"
        for name in api_page.MODULES
        for module in [__import__(name, fromlist=["x"])]
        for public in api_page.public_names(module)
        if callable(value := getattr(module, public)) and api_page.entry(public, value) and not value.__doc__
    ]
    assert not bare
