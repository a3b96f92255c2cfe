"""The examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import limbeck
from tests.helpers.tokenizers import workshop
from tests.losses.cases import make_projection

ROOT = Path(limbeck.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def names() -> dict[str, Any]:
    """What examples speak of without making it."""
    return {
        "tokenizer": workshop(),
        "load_tokenizer": lambda folder: workshop(),
        "projection": make_projection(8, 8),
        "teacher_size": 8,
        "student_logits": torch.randn(4, 8),
        "teacher_logits": torch.randn(4, 8),
    }


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs=names(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
