"""Commands in one process share what they load."""

from __future__ import annotations

import functools

import pytest

from limbeck.tokens import read_tokenizer

load_once = functools.cache(read_tokenizer)


@pytest.fixture(autouse=True)
def _tokenizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tokenizers take seconds to read, and what is computed from one is kept with it."""
    for user in ("limbeck.tokens", "limbeck.doctor"):
        monkeypatch.setattr(f"{user}.read_tokenizer", load_once)
