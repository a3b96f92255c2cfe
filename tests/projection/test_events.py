"""Outcomes that are the same events for both sides, against the oracle's enumeration and against plain facts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from limbeck.projection import events as module
from limbeck.projection.events import Conditions, NodeBuckets, NodeEvents, Runs
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


def runs_of(pair: Pair, texts: list[bytes]) -> tuple[Runs, Runs]:
    """Both sides of texts that are one chunk each."""
    sides = []
    for vocab in pair:
        spelled = [vocab.spell(text) for text in texts]
        count = np.array([len(ids) for ids in spelled])
        last = np.array([vocab.end, *(ids[-1] for ids in spelled[:-1])])
        sides.append(Runs(np.concatenate(spelled), np.cumsum(count) - count, count, last))
    return sides[0], sides[1]


@pytest.mark.parametrize("exact", [False, True])
def test_what_one_process_finds_another_learns(exact: bool) -> None:
    pair = tuple(vocab.all_written() for vocab in worlds.random_pair(5))
    runs = runs_of(pair, [data for vocab in pair for data in vocab.data if data])
    finder, learner = (Conditions(trees_of(*pair), exact=exact) for _ in range(2))
    facts = finder.news(*runs)
    assert facts["student"]
    assert bool(facts.get("student_nodes")) == exact
    assert not any(finder.news(*runs).values())  # sent once
    learner.learn(facts)
    assert not any(learner.news(*runs).values())
    for last, ids in facts["student"].items():
        np.testing.assert_array_equal(learner.student[last], Conditions(trees_of(*pair), exact=exact).student[last])
        np.testing.assert_array_equal(learner.student[last], ids)


def test_the_oldest_outcomes_are_forgotten_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NODES", 2)
    events = events_of(tuple(vocab.all_written() for vocab in worlds.random_pair(5)))
    nodes = [
        n for n in range(1, events.tree.num_nodes) if events.tree.child_offsets[n + 1] > events.tree.child_offsets[n]
    ]
    first = events[nodes[0]]
    for node in nodes[1:]:
        assert events[node].count >= 0
    assert len(events.found) == 2
    again = events[nodes[0]]
    np.testing.assert_array_equal(again.coarse, first.coarse)
