"""tree_kl on real vocabularies: every part on rows of real chunks against the oracle's plain enumeration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from limbeck.align import align_renderings
from limbeck.losses.divergences import DivergenceSpec
from limbeck.losses.objectives.tree_kl import student_node_divergence, teacher_node_divergence
from limbeck.losses.objectives.tree_tables import Positions, TreeTables, tree_buckets
from limbeck.losses.vocab.probabilities import Dense
from limbeck.projection import SpellingTree, build_trees
from limbeck.tokens import ByteTokenizer
from tests import zoo
from tests.projection import worlds
from tests.texts import TEXTS

pytestmark = pytest.mark.slow

ROWS = 200


def spellings_of(tree: SpellingTree) -> list[tuple[int, ...]]:
    """The spelling of every coarse id, from the tree's nodes."""
    out: list[tuple[int, ...]] = [()] * tree.coarse_size
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parent[node]], int(tree.token[node])))
        for coarse in tree.members(node)[: tree.ends[node]].tolist():
            out[coarse] = paths[node]
    return out


@pytest.mark.parametrize(
    ("student", "teacher"), [("llama3_2", "qwen3"), ("smollm2", "llama3_2"), ("llama3_2", "gptoss")]
)
def test_parts_of_real_rows_are_the_oracles(student: str, teacher: str) -> None:
    reference = worlds.oracle()
    if reference is None:
        pytest.skip("the oracle is not beside this checkout")
    sides = zoo.tokenizer(student), zoo.tokenizer(teacher)
    trees = build_trees(*sides)
    sigma, tau = spellings_of(trees.student_tree), spellings_of(trees.teacher_tree)
    tables: Any = SimpleNamespace(student_tree=reference.Tree(sigma), teacher_tree=reference.Tree(tau))
    mine, theirs = (ByteTokenizer.of(side).encode_batch(["\n".join(TEXTS.values())])[0] for side in sides)
    chunks = align_renderings(mine, theirs)
    generator = torch.Generator().manual_seed(0)
    checked = {"student": 0, "teacher": 0}
    for s0, s1, t0, t1 in zip(
        chunks.student_start, chunks.student_end, chunks.teacher_start, chunks.teacher_end, strict=True
    ):
        if sum(checked.values()) >= ROWS:
            break
        runs = mine.ids[s0:s1].tolist(), theirs.ids[t0:t1].tolist()
        for name, tree, oracle_tree, fine, coarse_id, sizes in (
            ("student", trees.student_tree, tables.student_tree, runs[0], runs[1][0], (len(tau), len(sigma))),
            ("teacher", trees.teacher_tree, tables.teacher_tree, runs[1], runs[0][0], (len(sigma), len(tau))),
        ):
            spelled = (sigma if name == "student" else tau)[coarse_id]
            for j in range(1, len(fine)):
                if spelled[: j + 1] != tuple(fine[: j + 1]):
                    break
                p_fine, p_coarse = (
                    torch.softmax(3 * torch.randn(size, generator=generator, dtype=torch.float64), -1) for size in sizes
                )
                node, want_node = tree.find(fine[:j]), oracle_tree.find(tuple(fine[:j]))
                at = Positions(*(torch.tensor([value]) for value in (node, 0, 0)))
                found = tree_buckets(TreeTables(tree), at, Dense(p_coarse[None]), Dense(p_fine[None]))
                divergence = student_node_divergence if name == "student" else teacher_node_divergence
                got = divergence(found, DivergenceSpec("forward"), listed=False)[0]
                judge = reference.student_node_kl if name == "student" else reference.teacher_node_kl
                assert abs(got - judge(tables, want_node, p_coarse, p_fine)) < 1e-10
                checked[name] += 1
    assert sum(checked.values()) >= 20, checked
