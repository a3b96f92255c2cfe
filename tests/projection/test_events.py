"""Outcomes that are the same events for both sides, against the oracle's enumeration and against plain facts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from limbeck.projection.events import NodeBuckets, NodeEvents
from tests.projection import worlds
from tests.projection.worlds import TinyVocab, trees_of

Pair = tuple[TinyVocab, TinyVocab]
pairs = given(pair=worlds.vocab_pairs().map(lambda pair: (pair[0].all_written(), pair[1].all_written())))
few = settings(max_examples=40, deadline=None)


def events_of(pair: Pair) -> NodeEvents:
    """Of the student tree."""
    trees = trees_of(*pair)
    assert trees.student_pairs is not None
    assert trees.teacher_pairs is not None
    return NodeEvents(trees.student_tree, trees.teacher_tree, trees.student_pairs, trees.teacher_pairs)


def as_sets(found: NodeBuckets, barred: set[int], fine_size: int) -> set[tuple[frozenset[int], frozenset[int]]]:
    """Outcomes without a barred coarse token."""
    sides = [
        [frozenset(ids[bucket == b].tolist()) for b in range(found.count)]
        for ids, bucket in ((found.fine, found.fine_bucket), (found.coarse, found.coarse_bucket))
    ]
    if found.rest >= 0:
        assert not sides[0][found.rest]
        sides[0][found.rest] = frozenset(range(fine_size)) - frozenset(found.outside.tolist())
    return {(fine, coarse) for fine, coarse in zip(*sides, strict=True) if not coarse & barred}


@few
@pairs
def test_outcomes_inside_tokens_are_the_oracles(pair: Pair) -> None:
    reference = worlds.oracle()
    if reference is None:
        pytest.skip("the oracle is not beside this checkout")
    tables: Any = worlds.oracle_tables(reference, *pair)
    sigma, tau = worlds.spellings(*pair)
    events = events_of(pair)
    paths = {spelling[:j] for spelling in sigma for j in range(1, len(spelling) + 1) if spelling != (pair[0].end,)}
    for path in sorted(paths):
        found = events[events.tree.find(path)]
        before = next(u for u in (None, *pair[0].written()) if u is None or pair[0].rule().allowed(u, path[0]))
        for last in (None, *pair[1].written()):
            want, own = reference.exact_buckets(tables.S, tables.T, sigma, tau, path, before, last)
            barred = set() if last is None else set(pair[1].rule().forbidden(last).tolist())
            assert as_sets(found, barred, pair[0].size) == {(frozenset(f), frozenset(c)) for f, c in want}
            assert found.own.tolist() == sorted(own)


@few
@pairs
def test_the_rules_spelling_is_the_tokenizers(pair: Pair) -> None:
    for vocab in pair:
        rule = vocab.rule()
        assert rule.token_bytes == list(vocab.data)
        rng = np.random.default_rng(0)
        for length in range(1, 9):
            text = bytes(rng.choice(np.frombuffer(b"ab", np.uint8), length).tolist())
            assert rule.spell(text) == vocab.spell(text)
        for u in vocab.written():
            assert [v for v in range(vocab.size) if not rule.allowed(u, v)] == rule.forbidden(u).tolist()
    assert pair[0].rule().spell(b"z") == ()
