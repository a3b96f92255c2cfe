"""Docstrings as Markdown, for the page of the Python API: ``mkdocs.yml`` names this file as an extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe


def as_markdown(text: str) -> str:
    """Examples fenced, roles of reStructuredText as plain code."""
    text = re.sub(r":[a-z]+:(?=`)", "", text)
    example = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
    return example.sub(lambda match: f"{match[1]}```python\n{match[0]}\n{match[1]}```", text)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
