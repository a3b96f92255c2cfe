"""tree_kl with `condition: counted`: what is counted, what it says of a text, and the loss that goes by it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from limbeck.algorithms import build as build_module
from limbeck.algorithms.xtoken_off_policy_distillation import make_parts, setup
from limbeck.config import load_config
from limbeck.errors import ConfigError, LossError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.objectives.tree_tables import EndCounts, FineSide
from limbeck.losses.vocab.axis import WHOLE
from tests.helpers import runs
from tests.helpers.tokenizers import trained_bpe
from tests.losses.cases import run, teacher_ids
from tests.losses.test_tree_kl import (
    PAIRS,
    Enumerated,
    Pair,
    build,
    chunks_of,
    divergence,
    gradients,
    models_of,
    projection_of,
    text_batch,
)
from tests.projection import worlds
from tests.projection.worlds import tiny_vocab

JOINING = tiny_vocab("abc", [(1, 1), (0, 1), (0, 0), (5, 1)])
"""Joins `bb` before `ab`, so that `abb` is `a`, `bb`, though `ab` is a token."""
LETTERS = tiny_vocab("abc", [])
SHARES = {b"a": 0.4, b"b": 0.5, b"c": 0.1}

Path_ = tuple[int, ...]


def tree_of(loss_fn: CrossTokenizerDistillationLossFn) -> TreeKL:
    objective = loss_fn.objectives[0]
    assert isinstance(objective, TreeKL)
    return objective


def spelled(pair: Pair, fine: FineSide) -> list[Path_]:
    """Every coarse token in tokens of the fine side."""
    return worlds.spellings(*pair)[0 if fine == "student" else 1]


# ---- what is counted -------------------------------------------------------------------------------------------------


def enumerated_counts(pair: Pair, batch: dict[str, Any], fine: FineSide) -> tuple[Counter[Path_], Counter[Path_]]:
    """By spelling: passages inside coarse tokens, and behind ones that ended."""
    spellings = spelled(pair, fine)
    begun = {spelling[:n] for spelling in spellings for n in range(1, len(spelling) + 1)}
    inside, behind = Counter[Path_](), Counter[Path_]()
    ids = {"student": batch["input_ids"], "teacher": teacher_ids(batch)}
    lengths = batch["input_lengths" if fine == "student" else "teacher_input_lengths"]
    for b, s, t in chunks_of(batch):
        own, coarse = (s, ids["teacher"][b, t[0]]) if fine == "student" else (t, ids["student"][b, s[0]])
        single = len(t if fine == "student" else s) == 1
        path, whole = tuple(ids[fine][b, i].item() for i in own), spellings[int(coarse)]
        for j in range(1, len(own)):
            if whole[: j + 1] == path[: j + 1]:
                inside[path[:j]] += 1
        after = own[-1] + 1
        if single and whole == path and after < int(lengths[b]):
            behind[path] += (*path, ids[fine][b, after].item()) in begun
    return inside, +behind


def by_spelling(tree: Any, values: Tensor) -> dict[Path_, int]:
    def path(node: int) -> Path_:
        return () if not node else (*path(int(tree.parent[node])), int(tree.token[node]))

    return {path(node): int(value) for node, value in enumerate(values.tolist()) if value}


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_counts_are_those_of_the_definition_and_add_up(seed: int) -> None:
    pair = worlds.random_pair(seed)
    batch = text_batch(pair, samples=5, seed=seed)
    tree = tree_of(loss_fn := build(pair, condition="counted"))
    layout = loss_fn.select_chunks(batch)[0]
    sides: tuple[FineSide, FineSide] = ("student", "teacher")
    trees = tree.trees.student_tree, tree.trees.teacher_tree
    for fine, own, host, counts in zip(sides, trees, tree.host_trees, tree.count_token_ends([layout]), strict=True):
        inside, behind = enumerated_counts(pair, batch, fine)
        assert by_spelling(own, counts.inside) == inside
        assert by_spelling(own, counts.behind) == behind
        parts = [EndCounts.of(host, layout.slice([row]), fine) for row in range(5)]
        for name in ("inside", "behind"):
            assert torch.equal(sum(getattr(part, name) for part in parts), getattr(counts, name))


# ---- what it says of a text of independent letters, where everything is known ----------------------------------------


def in_letters(joining_teaches: bool) -> tuple[TreeKL, bytes, list[int]]:
    """The objective that has counted in such a text, the text, and its tokens of the joining side."""
    rng = np.random.default_rng(0)
    text = b"".join(rng.choice(list(SHARES), 20_000, p=list(SHARES.values())).tolist())
    pair: Pair = (LETTERS, JOINING) if joining_teaches else (JOINING, LETTERS)
    sides = [list(vocab.spell(text)) for vocab in pair]
    joined = sides[joining_teaches]
    length = torch.tensor([len(JOINING.data[i]) for i in joined])
    coarse = torch.arange(len(joined))
    label = {False: torch.repeat_interleave(coarse, length), True: coarse}
    valid = torch.ones(1, len(joined), dtype=torch.bool)
    begin = torch.tensor([-1])
    batch = {
        "input_ids": torch.tensor([[pair[0].end, *sides[0]]]),
        "input_lengths": torch.tensor([len(sides[0]) + 1]),
        "token_mask": torch.ones(1, len(sides[0]) + 1),
        "sample_mask": torch.ones(1),
        "teacher_0_input_ids": torch.tensor([[pair[1].end, *sides[1]]]),
        "teacher_0_input_lengths": torch.tensor([len(sides[1]) + 1]),
        "alignment_0_student_chunk_id": torch.cat((begin, label[not joining_teaches]))[None],
        "alignment_0_teacher_chunk_id": torch.cat((begin, label[joining_teaches]))[None],
        "alignment_0_pair_valid": valid,
        "alignment_0_pair_is_correct": valid,
    }
    tree = tree_of(loss_fn := build(pair, condition="counted"))
    loss_fn.count_token_ends([loss_fn.select_chunks(batch)])
    return tree, text, joined


def starting(joined: list[int], letter: bytes) -> tuple[list[int], list[int]]:
    """Tokens that begin with a letter, and those of them that are longer."""
    found = [i for i in joined if JOINING.data[i].startswith(letter)]
    return found, [i for i in found if len(JOINING.data[i]) > 1]


def test_inside_a_student_token_its_end_has_as_much_as_tokens_end() -> None:
    tree, _, joined = in_letters(joining_teaches=False)
    assert tree.ended_teacher_tree is not None
    found, longer = starting(joined, b"a")
    node = tree.trees.teacher_tree.find([LETTERS.data.index(b"a")])
    going_on = SHARES[b"a"] + SHARES[b"b"]  # as the teacher says it: of the text, not of the token
    assert going_on > len(longer) / len(found) + 0.1
    assert (1 - float(tree.ended_teacher_tree[node])) * going_on == pytest.approx(len(longer) / len(found), abs=0.02)


def test_inside_a_teacher_token_its_end_is_followed_too() -> None:
    tree, text, joined = in_letters(joining_teaches=True)
    assert tree.ended_student_tree is not None
    found, longer = starting(joined, b"a")
    ended = float(tree.ended_student_tree[tree.trees.student_tree.find([LETTERS.data.index(b"a")])])
    # what follows an `a` at which a token begins
    starts = np.cumsum([0] + [len(JOINING.data[i]) for i in joined[:-1]])
    after = [text[at + 1 : at + 2] for at in starts.tolist() if text[at : at + 1] == b"a" and at + 1 < len(text)]
    going_on = sum(letter in (b"a", b"b") for letter in after) / len(after)
    assert going_on > len(longer) / len(found) + 0.05
    assert len(longer) / len(found) / (1 - ended) == pytest.approx(going_on, abs=0.01)


@pytest.mark.parametrize("joining_teaches", [False, True])
def test_behind_a_token_that_has_ended_less_goes_on(joining_teaches: bool) -> None:
    tree, text, joined = in_letters(joining_teaches)
    a = JOINING.data.index(b"a")
    ends = np.cumsum([len(JOINING.data[i]) for i in joined]).tolist()
    after = [text[end : end + 1] for i, end in zip(joined, ends, strict=True) if i == a and end < len(text)]
    share = sum(letter != b"c" for letter in after) / len(after)
    letters = torch.tensor([[SHARES.get(data, 0.0) for data in LETTERS.data]])
    # the fine side's distribution, behind an `a` of the joining side
    fine: FineSide = "student" if joining_teaches else "teacher"
    told = tree._behind_ended(letters, WHOLE, torch.tensor([a]), fine=fine)
    assert 1 - float(told[0, LETTERS.data.index(b"c")] / told.sum()) == pytest.approx(share, abs=0.02)
    assert share < SHARES[b"a"] + SHARES[b"b"] - 0.1
    assert torch.equal(tree._behind_ended(letters, WHOLE, torch.tensor([-1]), fine=fine), letters)


# ---- the loss --------------------------------------------------------------------------------------------------------


class Counted(Enumerated):
    """The definition with a share of tokens that end at every spelling of either tree."""

    def __init__(self, pair: Pair, direction: str, ended: Callable[[FineSide, Path_], float]) -> None:
        super().__init__(pair, direction)
        self.ended = ended

    def root(self, p_s: Tensor, p_t: Tensor) -> Tensor:
        s, t = (p.new_zeros(self.num_cells).index_add(0, c, p) for p, c in zip((p_s, p_t), self.cells, strict=True))
        s, t = s[s > 0], t[s > 0]  # what has no share of the student's side is asked of neither
        return divergence(t / t.sum(), s / s.sum(), self.direction)

    def teacher_node(self, path: Path_, p_s_root: Tensor, p_t: Tensor) -> Tensor:
        share = self.ended("teacher", path) if path in self.tau else 0.0
        return super().teacher_node(path, p_s_root, p_t * (1 - share))

    def student_node(self, path: Path_, p_t_root: Tensor, p_s: Tensor) -> Tensor:
        kids, end = self.masses(self.sigma, path, p_t_root)
        going_on = torch.stack(list(kids.values()))
        total = going_on.sum() + end
        target = going_on / (1 - self.ended("student", path)) if path in self.sigma else going_on
        if full := bool(target.sum() > total):
            target = target * total / target.sum()
        left = torch.zeros_like(total) if full else (total - target.sum()).clamp(min=0)
        target, own = torch.cat((target, left[None])), p_s[list(kids)]
        return divergence(
            target / target.sum(), torch.cat((own, (1 - own.sum()[None]).clamp(min=1e-30))), self.direction
        )

    def told(self, p: Tensor, last: int | None, fine: FineSide) -> Tensor:
        """A root's distribution of the fine side, behind a coarse token."""
        spellings = self.sigma if fine == "student" else self.tau
        if last is None or not (path := spellings[last]):
            return p
        following = {spelling[len(path)] for spelling in spellings if spelling[: len(path)] == path != spelling}
        factor = torch.ones_like(p)
        factor[list(following)] = self.ended(fine, path)
        return p * factor


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_loss_and_gradient_are_those_of_the_definition(name: str, direction: str) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=6)
    models = models_of(batch, pair)
    tree = tree_of(loss_fn := build(pair, condition="counted", direction=direction))
    tables = {"student": (tree.trees.student_tree, tree.ended_student_tree),
              "teacher": (tree.trees.teacher_tree, tree.ended_teacher_tree)}  # fmt: skip

    def ended(fine: FineSide, path: Path_) -> float:
        own, shares = tables[fine]
        assert shares is not None
        return float(shares[own.find(path)])

    reference = Counted(pair, direction, ended)
    p_s = torch.softmax(models.hidden @ models.weight.t(), -1).view(*batch["input_ids"].shape, -1)
    logits = models.teacher_hidden[0] @ models.teacher_weight[0].t()
    p_t = torch.softmax(logits, -1).view(*teacher_ids(batch).shape, -1)
    want = p_s.new_zeros(())
    chunks = chunks_of(batch)
    for b, s, t in chunks:
        ids = [batch["input_ids"][b, i].item() for i in s], [teacher_ids(batch)[b, i].item() for i in t]
        last_s = int(batch["input_ids"][b, s[0] - 1])
        last_t = int(teacher_ids(batch)[b, t[0] - 1])
        parts = reference.chunk(ids, [p_s[b, i - 1] for i in s], [p_t[b, i - 1] for i in t])
        root = reference.root(
            reference.told(p_s[b, s[0] - 1], last_t, "student"), reference.told(p_t[b, t[0] - 1], last_s, "teacher")
        )
        want = want + (root + parts["inner_student_kl"] + parts["inner_teacher_kl"] + parts["chunk_kl"]) / len(chunks)
    got, metrics = run(loss_fn, batch, models)
    assert float(got.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    for mine, theirs in zip(gradients(got, models), gradients(want, models), strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
    assert float(metrics["teacher_0/uncovered_root_student"][0]) >= 0


def test_without_a_text_it_is_refused() -> None:
    pair = PAIRS["finer teacher"]
    batch = text_batch(pair)
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "tree_kl", "condition": "counted"}, projections=[projection_of(pair)]
    )
    with pytest.raises(LossError, match="count_token_ends"):
        run(loss_fn, batch, models_of(batch, pair))


# ---- in a run --------------------------------------------------------------------------------------------------------

NUMBERS = [f"{number * 7919 % 10**5} + {number * 104729 % 10**4}" for number in range(400)]


def on_numbers(folder: Path) -> Any:
    """Settings of a run whose student joins digits by rank and whose teacher has them one by one."""
    folder.mkdir(exist_ok=True)
    for name, size, apart in (("student", 340, False), ("teacher", 300, True)):
        tokenizer = trained_bpe(NUMBERS, size, specials=["<eos>"], split_digits=apart, eos_token="<eos>")
        tokenizer.save_pretrained(folder / name)
    run_file = runs.write_run(
        folder, loss_fn={"mode": "tree_kl", "condition": "counted"}, distillation={"max_num_steps": 2}
    )
    texts = ["\n".join(NUMBERS[i : i + 5]) for i in range(0, 400, 5)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return runs.resolved(load_config(run_file))


def test_a_run_counts_in_its_own_data(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        config = on_numbers(tmp_path / name)
        loaded = *build_module.load_tokenizers(config), *build_module.load_datasets(config)
        found.append(tree_of(setup(config, *loaded)[4]).ended_teacher_tree)
    assert found[0] is not None
    assert 0 < float(found[0].min()) < 0.2 < float(found[0].max()) < 1
    assert torch.equal(found[0], found[1])


def test_where_there_is_no_text_yet_it_is_refused(tmp_path: Path) -> None:
    config = on_numbers(tmp_path)
    loaded = *build_module.load_tokenizers(config), *build_module.load_datasets(config)
    with pytest.raises(ConfigError, match="on-policy"):
        make_parts(config, *loaded, wrap=lambda collator: collator)
