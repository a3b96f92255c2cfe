"""Cells, trees of spellings and pair rules, on random tiny vocabularies and against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from limbeck.errors import ProjectionError
from limbeck.projection.trees import SpellingTree, VocabTrees, find_cells
from tests.projection import worlds
from tests.projection.worlds import TinyVocab, tiny_vocab, trees_of

Pair = tuple[TinyVocab, TinyVocab]
pairs = given(pair=worlds.vocab_pairs())
few = settings(max_examples=60, deadline=None)


def joined(pair: Pair) -> list[set[tuple[str, int]]]:
    """Cells by enumeration: connected parts of the graph "first token of a spelling"."""
    sigma, tau = worlds.spellings(*pair)
    parts = [{("s", s), ("t", spelling[0])} for s, spelling in enumerate(tau)]
    parts += [{("t", t), ("s", spelling[0])} for t, spelling in enumerate(sigma)]
    merged: list[set[tuple[str, int]]] = []
    for part in parts:
        touching = [other for other in merged if other & part]
        merged = [other for other in merged if not other & part] + [part.union(*touching)]
    return merged


@few
@pairs
def test_cells_are_the_connected_parts_and_hold_one_pair_of_equal_bytes(pair: Pair) -> None:
    trees = trees_of(*pair)
    found: dict[int, set[tuple[str, int]]] = {}
    for name, cells in (("s", trees.student_cell), ("t", trees.teacher_cell)):
        for token, cell in enumerate(cells.tolist()):
            found.setdefault(cell, set()).add((name, token))
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, joined(pair)))
    assert sorted(found) == list(range(trees.num_cells))
    sigma, tau = worlds.spellings(*pair)
    for members in found.values():
        mutual = [s for side, s in members if side == "s" and sigma[tau[s][0]] == (s,)]
        equal = [s for s in mutual if pair[0].data[s] == pair[1].data[tau[s][0]] and len(tau[s]) == 1]
        assert len(equal) == 1


@few
@pairs
def test_cells_and_trees_mirror_each_other(pair: Pair) -> None:
    trees, mirror = trees_of(*pair), trees_of(*pair[::-1])
    both = np.concatenate([trees.student_cell, trees.teacher_cell])
    other = np.concatenate([mirror.teacher_cell, mirror.student_cell])
    assert len({*zip(both.tolist(), other.tolist(), strict=True)}) == trees.num_cells == mirror.num_cells
    for name, array in trees.student_tree.arrays().items():
        np.testing.assert_array_equal(array, mirror.teacher_tree.arrays()[name])


@few
@pairs
def test_nodes_are_the_prefixes_of_spellings(pair: Pair) -> None:
    sigma, _ = worlds.spellings(*pair)
    tree = trees_of(*pair).student_tree
    prefixes = {spelling[:j] for spelling in sigma for j in range(len(spelling) + 1)}
    assert tree.num_nodes == len(prefixes)
    for prefix in prefixes:
        node = tree.find(prefix)
        below = {t for t, spelling in enumerate(sigma) if spelling[: len(prefix)] == prefix}
        assert set(tree.members(node).tolist()) == below
        exact = tree.members(node)[: tree.ends[node]].tolist()
        assert set(exact) == {t for t in below if sigma[t] == prefix}
        children = range(tree.child_offsets[node], tree.child_offsets[node + 1])
        assert {(*prefix, int(tree.token[c])) for c in children} == {p for p in prefixes if p and p[:-1] == prefix}
        covered = [tree.ends[node], *(tree.stop[c] - tree.start[c] for c in children)]
        assert sum(covered) == len(below)
    assert tree.find((0,) * 9) == -1
    np.testing.assert_array_equal(tree.first, [spelling[0] for spelling in sigma])


@few
@pairs
def test_trees_give_back_their_spellings(pair: Pair) -> None:
    sigma, tau = worlds.spellings(*pair)
    trees = trees_of(*pair)
    assert trees.student_tree.spellings() == [tuple(spelling) for spelling in sigma]
    assert trees.teacher_tree.spellings() == [tuple(spelling) for spelling in tau]


@few
@pairs
def test_against_the_oracle(pair: Pair) -> None:
    reference = worlds.oracle()
    if reference is None:
        pytest.skip("the oracle is not beside this checkout; the other tests enumerate by themselves")
    tables, trees = worlds.oracle_tables(reference, *pair), trees_of(*pair)
    assert tables.num_cells == trees.num_cells
    for mine, theirs in ((trees.student_cell, tables.cell_s), (trees.teacher_cell, tables.cell_t)):
        assert len({*zip(mine.tolist(), theirs.tolist(), strict=True)}) == trees.num_cells
    assert tables.student_tree.order == trees.student_tree.order.tolist()
    assert tables.teacher_tree.order == trees.teacher_tree.order.tolist()


def test_a_letter_is_the_cell_of_what_begins_with_it() -> None:
    student = tiny_vocab("ab", [(0, 1)])  # a b ab
    teacher = tiny_vocab("ab", [(0, 0), (2, 1)])  # a b aa aab
    trees = trees_of(student, teacher)
    assert trees.student_cell.tolist() == [0, 1, 0, 2]  # ab is spelled a b by the teacher
    assert trees.teacher_cell.tolist() == [0, 1, 0, 0, 2]  # aa and aab are spelled a a and a ab by the student
    assert trees.num_cells == 3
    assert trees.student_tree.members(trees.student_tree.find((0, 2))).tolist() == [3]


def test_ids_without_a_partner_have_no_cell() -> None:
    student, teacher = find_cells([(0,), ()], [(0,), (), ()])
    assert student.tolist() == [0, -1, -1]
    assert teacher.tolist() == [0, -1]


def test_tensors_come_back_and_hostile_ones_are_refused() -> None:
    trees = trees_of(*worlds.random_pair(3))
    stored = trees.tensors()
    again = VocabTrees.from_tensors(stored)
    for name, array in again.tensors().items():
        np.testing.assert_array_equal(array, stored[name])
    for name in stored:
        with pytest.raises(ProjectionError):
            VocabTrees.from_tensors({k: v for k, v in stored.items() if k != name})
        with pytest.raises(ProjectionError):
            VocabTrees.from_tensors({**stored, name: stored[name] + np.int32(1 << 20)})
        with pytest.raises(ProjectionError):
            VocabTrees.from_tensors({**stored, name: stored[name].astype(np.int64)})
    with pytest.raises(ProjectionError, match="unknown"):
        VocabTrees.from_tensors({**stored, "more": stored["student_cell"]})


def test_spellings_that_run_in_circles_are_refused() -> None:
    with pytest.raises(ProjectionError, match="circles"):
        find_cells([(0,), (1,)], [(1,), (0,)])


def test_a_tree_of_nothing_has_one_node() -> None:
    tree = SpellingTree.from_spellings([(), ()], 3)
    assert (tree.num_nodes, tree.order.size, tree.first.tolist()) == (1, 0, [-1, -1])
    assert tree.find((1,)) == -1
