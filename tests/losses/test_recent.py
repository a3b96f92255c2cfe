"""The objectives of 2026: worked examples, settings and refusals; values and gradients are in `test_modes.py` too."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from limbeck.losses.divergences import DivergenceSpec
from limbeck.losses.objectives import OBJECTIVES
from limbeck.losses.objectives.base import BlockLogits, refuse_shards
from limbeck.losses.objectives.config import PublishedConfig
from limbeck.losses.objectives.simct import unit_divergence
from limbeck.losses.vocab.axis import ShardedAxis
from tests.losses.cases import (
    FakeProjection,
    Models,
    make_batch,
    make_models,
    make_projection,
    of_mode,
    run,
)
from tests.losses.test_modes import compare, expected, settings_for
from tests.losses.test_tree_kl import (
    COARSE,
    FINE,
    Pair,
    chunks_of,
    divergence,
    gradients,
    models_of,
    same_in_layout,
    sums_over_chunks,
    text_batch,
)
from tests.projection import worlds
from tests.projection.worlds import TinyVocab


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("k", [1, 3, None])
def test_strict_compares_the_students_most_likely_shared_tokens(k: int | None, rest: bool, direction: str) -> None:
    batch, projection = make_batch(seed=3, one_to_one=True), make_projection(23, 31, seed=1)
    models = make_models(batch, seed=2)
    options: dict[str, Any] = {"strict_topk": k, "strict_rest": rest, "direction": direction}
    want = expected("strict", batch, models, projection, **options)
    compare(settings_for("strict", **options), batch, models, projection, want, "hidden")


def test_strict_teaches_nothing_outside_one_to_one_chunks_unless_it_is_asked_to() -> None:
    batch, projection = make_batch(seed=5), make_projection(23, 31)
    models = make_models(batch, seed=1)

    def losses(**cfg: Any) -> tuple[torch.Tensor, dict[str, float]]:
        fn = CrossTokenizerDistillationLossFn({"mode": "strict", "ce_loss_scale": 0.0, **cfg}, projections=[projection])
        loss, metrics = run(fn, batch, models)
        return loss, {name: float(pair[0]) for name, pair in metrics.items()}

    plain, figures = losses()
    spans, more = losses(span_weight=0.5)
    chunks = figures["chunks"]
    assert float(plain.detach()) == pytest.approx(figures["teacher_0/strict_kl"] / chunks)
    assert more["teacher_0/span_loss"] > 1
    assert float((spans - plain).detach()) == pytest.approx(0.5 * more["teacher_0/span_loss"] / chunks)
    assert 0 < figures["teacher_0/kept_mass_student"] <= figures["teacher_0/shared_mass_student"] < chunks


def test_a_mode_brings_its_own_direction_unless_one_is_named() -> None:
    config = CrossTokenizerDistillationLossConfig
    assert config(mode="strict").objective.spec.direction == "reverse"
    assert config(mode="strict", direction="forward").objective.spec.direction == "forward"
    assert config().objective.spec.direction == "forward"
    assert config(**config(mode="strict").model_dump()).objective.spec.direction == "reverse"


# ---- on bytes ----

PAIRS: dict[str, Pair] = {
    "coarser teacher": (FINE, COARSE),
    "finer teacher": (COARSE, FINE),
    **{f"random {seed}": worlds.random_pair(seed) for seed in (1, 2, 5, 8)},
}


def projection_of(pair: Pair) -> FakeProjection:
    """Rules for two pieces, and the bytes and trees of the pair."""
    student, teacher = pair
    tau = worlds.spellings(*pair)[1]
    indices = np.array([[spelling[0], spelling[1] if len(spelling) > 1 else -1] for spelling in tau], np.int32)
    weights = np.where(indices[:, 1:] < 0, [[1.0, 0.0]], [[0.9, 0.1]]).astype(np.float32)
    trees = worlds.trees_of(*pair)
    return FakeProjection(indices, weights, teacher.size, trees=trees, token_bytes=(student.data, teacher.data))


def loss_of(pair: Pair, **cfg: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn(
        of_mode({"ce_loss_scale": 0.0, "block_rows": 5, **cfg}), projections=[projection_of(pair)]
    )


class Enumerated:
    """The objectives on bytes from their definitions: one chunk, one token at a time."""

    def __init__(self, pair: Pair, direction: str = "forward") -> None:
        self.student, self.teacher = pair
        self.direction = direction

    def longest(self, data: bytes) -> int | None:
        found = [u for u, own in enumerate(self.student.data) if own and data.startswith(own)]
        return max(found, key=lambda u: len(self.student.data[u]), default=None)

    def head(self, w: int) -> int | None:
        return self.student.end if w == self.teacher.end else self.longest(self.teacher.data[w])

    def compare(self, target: dict[int | None, Tensor], p: Tensor) -> Tensor:
        """Over the student's tokens that the target names, and the rest."""
        named = [u for u in target if u is not None]
        rest = p[[u for u in range(len(p)) if u not in named]].sum() + 1e-12
        gone = target.get(None, torch.zeros((), dtype=p.dtype))
        t = torch.stack([*(target[u] for u in named), gone])
        s = torch.cat((p[named], rest[None]))
        return divergence(t, s, self.direction)

    def root(self, p_s: Tensor, p_t: Tensor) -> Tensor:
        target: dict[int | None, Tensor] = {}
        for w in range(len(p_t)):
            target[self.head(w)] = target.get(self.head(w), torch.zeros((), dtype=p_t.dtype)) + p_t[w]
        return self.compare(target, p_s)

    def events(self) -> list[set[int]]:
        """Connected groups of teacher tokens that the student lacks."""
        lacking = [w for w, data in enumerate(self.teacher.data) if data and data not in self.student.data]
        groups = [{w} for w in lacking]
        for a, b in itertools.permutations(lacking, 2):
            if self.teacher.data[b].startswith(self.teacher.data[a]):
                one, two = (next(g for g in groups if w in g) for w in (a, b))
                if one is not two:
                    groups.remove(two)
                    one |= two
        return groups

    def child(self, a: int, p_t: Tensor, p_next: Tensor) -> Tensor:
        total = p_next.sum() * 0
        for group in self.events():
            shortest = min((self.teacher.data[w] for w in group), key=len)
            own = self.student.data[a]
            if not own or shortest == own or not shortest.startswith(own):
                continue
            inside = [u for u, data in enumerate(self.student.data) if data.startswith(shortest[len(own) :])]
            if inside:
                total = total - p_t[sorted(group)].sum() * p_next[inside].sum().log()
        return total

    def every_row(self, s: list[int], t: list[int], p_s: list[Tensor], p_t: list[Tensor]) -> dict[str, Tensor]:
        """BPM: each row's target by walking along the realised teacher tokens, one token off them at a time."""
        own, theirs = [self.student.data[i] for i in s], [self.teacher.data[i] for i in t]
        out = {"root_kl": self.root(p_s[0], p_t[0]), "inner_student_kl": p_s[0].sum() * 0}
        for row in range(len(s)):
            offset = sum(map(len, own[:row]))
            at = max(k for k in range(len(t)) if sum(map(len, theirs[:k])) <= offset)
            written = theirs[at][: offset - sum(map(len, theirs[:at]))]
            target: dict[int | None, Tensor] = {}
            total = sum(p_t[at][w] for w, data in enumerate(self.teacher.data) if data.startswith(written))
            text, likely = b"", 1 / total
            for level in range(at, len(t)):
                for w, data in enumerate(self.teacher.data):
                    if level == at and not data.startswith(written):
                        continue
                    if level + 1 < len(t) and w == t[level]:
                        continue
                    whole = text + (data[len(written) :] if level == at else data)
                    head = self.student.end if w == self.teacher.end and not whole and not row else self.longest(whole)
                    target[head] = target.get(head, torch.zeros((), dtype=torch.float64)) + likely * p_t[level][w]
                text = text + (theirs[level][len(written) :] if level == at else theirs[level])
                likely = likely * p_t[level][t[level]]
            name = "inner_student_kl" if row else "root_kl"
            value = self.compare(target, p_s[row])
            out[name] = value if not row else out[name] + value
        return out

    def partition(self, s: list[int], t: list[int], p_s: list[Tensor], p_t: list[Tensor]) -> dict[str, Tensor]:
        """The shared tokens at the start, and the last tokens that spell a token of the other side."""
        sigma, tau = worlds.spellings(self.student, self.teacher)
        shared = [(u, spelling[0]) for u, spelling in enumerate(tau) if len(spelling) == 1]
        out = {
            "boundary_kl": self.events_and_rest(
                torch.stack([p_t[0][w] for _, w in shared]), torch.stack([p_s[0][u] for u, _ in shared])
            ),
            "chunk_kl": p_s[0].sum() * 0,
        }
        if len(s) == len(t) == 1:
            return out
        before_s, before_t = (
            math.prod(
                (p[i] for p, i in zip(rows[:-1], ids[:-1], strict=True)), start=torch.ones((), dtype=torch.float64)
            )
            for rows, ids in ((p_s, s), (p_t, t))
        )
        ours, theirs = [before_s * p_s[-1][s[-1]]], [before_t * p_t[-1][t[-1]]]
        if len(t) == 1 and sigma[t[0]] == tuple(s):
            found = [
                w for w, spelling in enumerate(sigma) if len(spelling) == len(s) and spelling[:-1] == tuple(s[:-1])
            ]
            ours, theirs = [before_s * p_s[-1][sigma[w][-1]] for w in found], [p_t[0][w] for w in found]
        elif len(s) == 1 and tau[s[0]] == tuple(t):
            found = [u for u, spelling in enumerate(tau) if len(spelling) == len(t) and spelling[:-1] == tuple(t[:-1])]
            ours, theirs = [p_s[0][u] for u in found], [before_t * p_t[-1][tau[u][-1]] for u in found]
        return out | {"chunk_kl": self.events_and_rest(torch.stack(theirs), torch.stack(ours))}

    def events_and_rest(self, target: Tensor, own: Tensor) -> Tensor:
        both = [torch.cat((mass, 1 - mass.sum()[None])) for mass in (target, own)]
        return divergence(*both, self.direction)


def check(fn: CrossTokenizerDistillationLossFn, pair: Pair, want: dict[str, Tensor], batch: Any, models: Any) -> Any:
    """The loss, its gradients and its parts are those that were enumerated."""
    loss, metrics = run(fn, batch, models)
    total = sum(want.values()) / len(chunks_of(batch))
    torch.testing.assert_close(loss, total, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(gradients(loss, models), gradients(total, models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    for name, value in want.items():
        assert float(metrics[f"teacher_0/{name}"][0]) == pytest.approx(float(value.detach()), rel=1e-8, abs=1e-9)
    return metrics


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_escd_is_its_definition(name: str, direction: str) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=5)
    models = models_of(batch, pair)
    plain = Enumerated(pair, direction)

    def parts(s: list[int], t: list[int], p_s: list[Tensor], p_t: list[Tensor], behind: Tensor) -> dict[str, Tensor]:
        following = p_s[1] if len(s) > 1 else behind
        return {"root_kl": plain.root(p_s[0], p_t[0]), "child_loss": plain.child(s[0], p_t[0], following)}

    want = sums_over_chunks(batch, models, parts)
    metrics = check(loss_of(pair, mode="escd", direction=direction), pair, want, batch, models)
    assert -1e-9 <= float(metrics["teacher_0/child_kl"][0]) <= float(metrics["teacher_0/child_loss"][0]) + 1e-9


@pytest.mark.parametrize(("mode", "parts"), [("bpm", Enumerated.every_row), ("partition", Enumerated.partition)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_bpm_and_partition_are_their_definitions(name: str, direction: str, mode: str, parts: Any) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=5)
    models = models_of(batch, pair)
    plain = Enumerated(pair, direction)
    want = sums_over_chunks(batch, models, lambda *sides: parts(plain, *sides[:4]))
    metrics = check(loss_of(pair, mode=mode, direction=direction), pair, want, batch, models)
    assert mode != "bpm" or float(metrics["teacher_0/blank_rows"][0]) == 0


def test_factors_of_partition() -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair, samples=5)
    models = models_of(batch, pair)
    plain = Enumerated(pair)

    def weighted(s: list[int], t: list[int], *rows: Any) -> dict[str, Tensor]:
        parts = plain.partition(s, t, *rows[:2])
        alone = len(s) == len(t) == 1
        return {"sum": parts["boundary_kl"] if alone else 0.5 * (parts["chunk_kl"] + 0.3 * parts["boundary_kl"])}

    want = sums_over_chunks(batch, models, weighted)["sum"] / len(chunks_of(batch))
    loss, metrics = run(loss_of(pair, mode="partition", chunk_weight=0.5, root_weight=0.3), batch, models)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    assert 0 < float(metrics["teacher_0/spelled_chunks"][0]) <= float(metrics["teacher_0/spelled_chunks"][1])


def test_bpm_leaves_rows_of_white_space_out() -> None:
    spaced = [TinyVocab(tuple(d.replace(b"a", b" ") for d in vocab.data), vocab.merges) for vocab in PAIRS["random 5"]]
    pair = spaced[0], spaced[1]
    batch = text_batch(pair, samples=5)
    models = models_of(batch, pair)
    masked, figures = run(loss_of(pair, mode="bpm"), batch, models)
    whole, others = run(loss_of(pair, mode="bpm", mask_blanks=False), batch, models)
    blank = [i for i, data in enumerate(pair[0].data) if data and not data.strip()]
    ids = [batch["input_ids"][b, at].item() for b, s, _ in chunks_of(batch) for at in s]
    assert float(figures["teacher_0/blank_rows"][0]) == sum(i in blank for i in ids) > 0
    assert float(others["teacher_0/blank_rows"][0]) == 0
    assert float(masked.detach()) < float(whole.detach())
    assert float(figures["teacher_0/root_kl"][1]) < float(others["teacher_0/root_kl"][1])


def test_some_pairs_have_events() -> None:
    counts = {name: len(Enumerated(pair).events()) for name, pair in PAIRS.items()}
    assert max(counts.values()) > 2, counts
    assert any(len(group) > 1 for pair in PAIRS.values() for group in Enumerated(pair).events())


# ---- the example of the ESCD paper: after `a`, the teacher's `ax`, `axy` and `az` go on ----

STUDENT = TinyVocab((b"a", b"b", b"x", b"xy", b"z", b""), ())
TEACHER = TinyVocab((b"ax", b"axy", b"az", b"b", b""), ())
AT_ROOT = [0.5, 0.2, 0.1, 0.1, 0.1]
BEHIND_A = [0.2, 0.2, 0.2, 0.3, 0.1]
TEACHER_ROOT = [0.4, 0.2, 0.3, 0.1]


def example(mode: str, behind: list[float], more: tuple[bytes, ...] = (), **cfg: Any) -> dict[str, float]:
    """Sums of the example's one chunk: the student writes `a`, `x`, the teacher `ax`. more: student tokens for which
    there are no logits."""

    def logs(rows: list[list[float]]) -> Tensor:
        return torch.tensor([[*row, 1e-30] for row in rows], dtype=torch.float64).log()[None]

    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 0, 2]]),
        "input_lengths": torch.tensor([3]),
        "token_mask": torch.ones(1, 3, dtype=torch.int64),
        "sample_mask": torch.ones(1),
        "teacher_0_input_ids": torch.tensor([[4, 0]]),
        "teacher_0_input_lengths": torch.tensor([2]),
        "alignment_0_pair_valid": torch.tensor([[True]]),
        "alignment_0_pair_is_correct": torch.tensor([[True]]),
        "alignment_0_student_chunk_id": torch.tensor([[-1, 0, 0]]),
        "alignment_0_teacher_chunk_id": torch.tensor([[-1, 0]]),
    }
    projection = FakeProjection(
        np.array([[0], [3], [0], [1], [2], [4], *([-1] for _ in more)], np.int32),
        np.array([[0.5], [1], [0.5], [0.5], [0.5], [1], *([0] for _ in more)], np.float32),
        5,
        token_bytes=((*STUDENT.data, *more), TEACHER.data),
    )
    fn = CrossTokenizerDistillationLossFn({"mode": mode, "ce_loss_scale": 0.0, **cfg}, projections=[projection])
    _, metrics = fn(batch, None, None, logs([AT_ROOT, behind, behind]), logs([TEACHER_ROOT, TEACHER_ROOT]))
    return {name.removeprefix("teacher_0/"): float(pair[0]) for name, pair in metrics.items()}


def test_escd_of_the_published_example() -> None:
    found = example("escd", BEHIND_A)
    assert found["root_kl"] == pytest.approx(0.4597, abs=5e-5)
    assert found["child_loss"] == pytest.approx(1.1067, abs=5e-5)
    assert found["child_loss"] - found["child_kl"] == pytest.approx(0.573, abs=5e-4)
    assert example("escd", [0.1, 0.2, 0.1, 0.5, 0.1])["child_loss"] == pytest.approx(0.9973, abs=5e-5)
    assert example("escd", [0.5, 0.2, 0.1, 0.15, 0.05])["child_loss"] == pytest.approx(1.7305, abs=5e-5)


def test_bpm_of_the_published_example() -> None:
    found = example("bpm", BEHIND_A, direction="forward")
    assert found["root_kl"] == pytest.approx(0.4597, abs=5e-5)
    assert found["inner_student_kl"] == pytest.approx(0.6895, abs=5e-5)
    moved = example("bpm", [0.1, 0.2, 0.1, 0.5, 0.1], direction="forward")
    assert moved["inner_student_kl"] == pytest.approx(0.8841, abs=5e-5)


def test_simct_of_the_published_example() -> None:
    """Units `b`, `a`+`x`, `a`+`xy`, `a`+`z`; halving all that is listed changes nothing."""
    teacher = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for half in (1.0, 0.5):
        path = [(0.5 * half * p * half) ** 0.5 for p in (0.2, 0.3, 0.1)]
        student = torch.tensor([[0.2 * half, *path]]).log()
        assert float(unit_divergence(student, teacher, DivergenceSpec("reverse"))) == pytest.approx(0.1062, abs=5e-5)


# ---- all of them ----

RECENT = [
    mode for mode, kind in OBJECTIVES.items() if kind.needs_logits and not issubclass(kind.Config, PublishedConfig)
]


@pytest.mark.parametrize("mode", RECENT)
def test_gradients_are_those_of_finite_differences(mode: str) -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair, samples=2)
    models = models_of(batch, pair)
    fn = loss_of(pair, mode=mode, strict_topk=3, span_weight=0.2, strict_rest=True)
    start = models.hidden.detach().clone()

    def loss(hidden: Tensor) -> Tensor:
        return run(fn, batch, Models(hidden, models.weight, models.teacher_hidden, models.teacher_weight))[0]

    assert torch.autograd.gradcheck(loss, start.requires_grad_(), fast_mode=True, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("mode", RECENT)
def test_no_divergence_is_negative(mode: str, direction: str) -> None:
    for name, pair in PAIRS.items():
        batch = text_batch(pair)
        fn = loss_of(pair, mode=mode, direction=direction)
        loss, metrics = run(fn, batch, models_of(batch, pair, torch.float32))
        assert float(loss.detach()) >= -1e-6, name
        for key in ("strict_kl", "root_kl", "child_kl", "inner_student_kl", "chunk_kl"):
            assert float(metrics.get(f"teacher_0/{key}", (torch.zeros(()),))[0]) >= -1e-5, (name, key)


@pytest.mark.parametrize("mode", RECENT)
def test_blocks_change_nothing(mode: str) -> None:
    pair = PAIRS["random 5"]
    batch = text_batch(pair, samples=5)
    models = models_of(batch, pair)
    whole, figures = run(loss_of(pair, mode=mode, block_rows=1000), batch, models)
    for rows in (1, 3, 7):
        loss, metrics = run(loss_of(pair, mode=mode, block_rows=rows), batch, models)
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(gradients(loss, models), gradients(whole, models), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        for name, (value, count) in figures.items():
            torch.testing.assert_close(metrics[name][0], value, rtol=1e-10, atol=1e-10)
            assert metrics[name][1] == count


@pytest.mark.parametrize("layout", ["one by one", "packed"])
@pytest.mark.parametrize("mode", RECENT)
def test_cutting_and_packing_change_nothing(mode: str, layout: str) -> None:
    pair = PAIRS["coarser teacher"]
    cfg = {"mode": mode, "ce_loss_scale": 0.5, "span_weight": 0.1}
    same_in_layout(loss_of(pair, **cfg, block_rows=1000), loss_of(pair, **cfg, block_rows=7), pair, layout)


@pytest.mark.parametrize("mode", RECENT)
def test_a_list_of_likely_tokens_is_refused(mode: str) -> None:
    pair = PAIRS["random 5"]
    batch = text_batch(pair)
    with pytest.raises(LossError, match=f"teacher_0: .*{mode!r}"):
        run(loss_of(pair, mode=mode), batch, models_of(batch, pair), "topk")


def test_a_projection_without_bytes_is_refused() -> None:
    with pytest.raises(LossError, match=r"'escd' .*bytes"):
        CrossTokenizerDistillationLossFn({"mode": "escd"}, projections=[make_projection(23, 31)])


def test_partition_needs_trees() -> None:
    with pytest.raises(LossError, match=r"'partition' .*trees"):
        CrossTokenizerDistillationLossFn({"mode": "partition"}, projections=[make_projection(23, 31)])


@pytest.mark.parametrize("mode", ["escd", "bpm"])
def test_a_head_may_lack_rows_of_tokens_without_bytes_only(mode: str) -> None:
    assert example(mode, BEHIND_A, more=(b"",)) == pytest.approx(example(mode, BEHIND_A))
    with pytest.raises(LossError, match=f"7 student .*6; .*{mode!r}"):
        example(mode, BEHIND_A, more=(b"axe",))


def test_vocabularies_that_are_split_over_ranks_are_refused() -> None:
    split = BlockLogits(torch.zeros(1, 2), ShardedAxis(Comm.alone(), [(0, 2)]))
    with pytest.raises(LossError, match="mode 'bpm' needs whole vocabularies"):
        refuse_shards("bpm", split)
