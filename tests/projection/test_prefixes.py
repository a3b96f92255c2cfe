"""Prefixes of tokens by their bytes, against plain comparison of all pairs."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from limbeck.projection import Projection, load_or_build
from limbeck.projection.prefixes import BytePrefixes, SortedTokens
from limbeck.tokens import ByteVocab
from tests.helpers.tokenizers import tiny


def random_tokens(seed: int) -> list[bytes]:
    """All of few bytes, among them the highest one; some twice, some empty."""
    rng = np.random.default_rng(seed)
    letters = [b"a", b"b", b"\xff"]
    made = [b"".join(letters[i] for i in rng.integers(0, 3, int(rng.integers(0, 5)))) for _ in range(30)]
    return [*made, *letters]


@pytest.mark.parametrize("seed", range(4))
def test_ranges_and_longest_prefixes(seed: int) -> None:
    tokens = random_tokens(seed)
    found = SortedTokens(tokens)
    texts = [bytes(t) for size in range(1, 5) for t in itertools.product(b"ab\xff", repeat=size)]
    for text in texts:
        first, last = found.going_on(text)
        assert sorted(found.ids[first:last]) == [i for i, t in enumerate(tokens) if t and t.startswith(text)]
        begins = [t for t in tokens if t and text.startswith(t)]
        assert found.beginning(text) == tokens.index(max(begins, key=len))
    assert found.beginning(b"c") == -1
    assert found.beginning(b"") == -1


def test_heads_of_specials_are_their_partners() -> None:
    tables = BytePrefixes([b"a", b"ab", b"", b""], [b"abc", b"b", b"", b""], {2: 3, 1: 0})
    assert tables.head.tolist() == [1, -1, 3, -1]


def test_projections_know_the_bytes_where_tokenizers_are_at_hand(tmp_path: Path) -> None:
    student, teacher = tiny(300), tiny(340)
    bytes_of = tuple(ByteVocab.from_tokenizer(t).token_bytes for t in (student, teacher))
    path = tmp_path / "w.safetensors"
    built = load_or_build(student, teacher, path)
    assert built.token_bytes == bytes_of
    assert load_or_build(student, teacher, path).token_bytes == bytes_of
    assert Projection.load(path).token_bytes is None
