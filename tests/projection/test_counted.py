from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import limbeck.projection.counted as counted_module
from limbeck.projection import count_pairs
from limbeck.tokens import ByteVocab
from tests.helpers.tokenizers import byte_level

STUDENT = byte_level(["ab", "cd", "zz"])
TEACHER = byte_level(["abc", "b"], order_from=9)
# "abcd": the student cuts ab|cd, the teacher abc|d, one chunk of two tokens each.  "ab": ab on both sides.
TEXTS = ["abcd", "ab", "abcd", "b", "cd"]


def ids(tokenizer: Any, *tokens: bytes) -> list[int]:
    return [ByteVocab.from_tokenizer(tokenizer).ids_by_bytes[t] for t in tokens]


def test_pairs_are_counted_at_shared_boundaries() -> None:
    counter = count_pairs(STUDENT, TEACHER, TEXTS)
    found = {(int(s), int(t)): int(n) for s, t, n in zip(*counter.pairs(), strict=True)}
    ab, cd, b = ids(STUDENT, b"ab", b"cd", b"b")
    abc, ab_t, b_t, c_t = ids(TEACHER, b"abc", b"ab", b"b", b"c")
    assert found == {(ab, abc): 2, (ab, ab_t): 1, (b, b_t): 1, (cd, c_t): 1}
    assert counter.boundaries == 5
    assert counter.student_tokens[[ab, cd, b]].tolist() == [3, 3, 1]


def test_the_result_does_not_depend_on_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab cd zz abc", "", "水 ab", "\n\n"] * 20
    whole = count_pairs(STUDENT, TEACHER, texts).pairs()
    monkeypatch.setattr(counted_module, "_BATCH_TEXTS", 3)
    monkeypatch.setattr(counted_module, "_MERGE_KEYS", 7)
    for one, other in zip(whole, count_pairs(STUDENT, TEACHER, iter(texts)).pairs(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_chunks_that_a_normaliser_changed_are_left_out_and_counted() -> None:
    counter = count_pairs(STUDENT, byte_level(["é"], nfc=True), ["e\u0301"])
    assert (counter.boundaries, counter.inexact) == (0, 1)
