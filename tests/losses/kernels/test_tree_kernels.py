"""tree_kl by kernels against the plain path: loss, metrics and gradients, through `compute_loss`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, fast
from limbeck.losses.fast.kernels import nodes, padded, tables
from limbeck.losses.fast.kernels.cells import cell_masses
from limbeck.losses.fast.kernels.stats import column_stats
from limbeck.losses.fast.kernels.tables import cell_tables
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.projection import VocabTrees
from tests.losses.cases import FakeProjection, Models, make_models, run
from tests.losses.kernels.test_fast_path import assert_same, error
from tests.losses.test_tree_kl import COARSE, FINE, PAIRS, Pair, projection_of, text_batch
from tests.projection import worlds

BOTH_WAYS = ["coarser teacher", "finer teacher"]


@pytest.fixture(autouse=True)
def _many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SEGMENTS", 128)
    monkeypatch.setattr(nodes, "BUCKETS", 4)  # so that some positions take several turns
    monkeypatch.setattr(tables, "PIECE", 3)  # so that some cells have several pieces


def without_a_cell(trees: VocabTrees, cell: int) -> VocabTrees:
    """Trees whose tokens of one cell belong to none: mass that the other side cannot answer."""
    sides = [np.where(side == cell, -1, side - (side > cell)) for side in (trees.student_cell, trees.teacher_cell)]
    return replace(trees, student_cell=sides[0].astype(np.int32), teacher_cell=sides[1].astype(np.int32))


def copied(models: Models, dtype: torch.dtype) -> Models:
    """The same numbers in another type."""

    def wide(t: Tensor) -> Tensor:
        return t.detach().to(dtype)

    hidden, weight = wide(models.hidden).requires_grad_(), wide(models.weight).requires_grad_()
    return Models(hidden, weight, [wide(t) for t in models.teacher_hidden], [wide(t) for t in models.teacher_weight])


def compare(
    pair: Pair,
    tolerance: float = 1e-5,
    *,
    dtype: torch.dtype = torch.float32,
    projection: FakeProjection | None = None,
    batch: dict[str, Any] | None = None,
    spread: float = 1.0,
    judge_dtype: torch.dtype | None = None,
    kind: str = "hidden",
    **cfg: Any,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Hold the kernels against the plain path on the same numbers; returns the kernels' metrics."""
    batch = text_batch(pair, samples=3) if batch is None else batch
    projection = projection or projection_of(pair)
    models = make_models(batch, pair[0].size, pair[1].size, seed=3, dtype=dtype)
    with torch.no_grad():
        models.hidden *= spread
    judge = copied(models, judge_dtype or dtype)
    found = []
    for fast_path, own in (("off", judge), ("force", models)):
        options = {"mode": "tree_kl", "ce_loss_scale": 0.5, "kl_loss_weight": 0.7, "fast_path": fast_path, **cfg}
        loss, metrics = run(CrossTokenizerDistillationLossFn(options, projections=[projection]), batch, own, kind, k=3)
        loss.backward()
        found.append((loss.detach(), metrics))
    (want, seen), (got, mine) = found
    assert error(got, want) <= tolerance
    assert error(models.hidden.grad, judge.hidden.grad) <= tolerance
    assert error(models.weight.grad, judge.weight.grad) <= tolerance
    assert set(mine) == set(seen)
    for name, (value, count) in seen.items():
        assert float(mine[name][1]) == pytest.approx(float(count)), name
        slack = 1.0 if "accuracy" in name and tolerance > 1e-3 else 0.0
        assert abs(float(mine[name][0]) - float(value)) <= 4 * tolerance * (1 + abs(float(value))) + slack, name
    return mine


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_two_teachers(way: str) -> None:
    pair = PAIRS[way]
    one = text_batch(pair, samples=3)
    own = {name: value for name, value in one.items() if name.startswith(("teacher_", "alignment_"))}
    batch = one | {name.replace("_", f"_{i}_", 1): value for i in range(2) for name, value in own.items()}
    found = []
    for fast_path in ("off", "force"):
        models = make_models(batch, pair[0].size, [pair[1].size] * 2, seed=3, dtype=torch.float32)
        options = {"mode": "tree_kl", "teacher_weights": [0.8, 0.3], "fast_path": fast_path}
        loss_fn = CrossTokenizerDistillationLossFn(options, projections=[projection_of(pair)] * 2)
        loss, metrics = run(loss_fn, batch, models)
        loss.backward()
        found.append((loss.detach(), models, metrics))
    assert_same(found, 1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_equals_the_plain_path(name: str, direction: str) -> None:
    metrics = compare(PAIRS[name], direction=direction)
    inner = "inner_student_kl" if name == "coarser teacher" else "inner_teacher_kl"
    assert float(metrics[f"teacher_0/{inner}"][1]) > 0


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_float64_is_the_judge(name: str) -> None:
    # floors under rest buckets are 1e-6 in float32
    compare(PAIRS[name], 3e-5, judge_dtype=torch.float64)


@pytest.mark.parametrize("seed", [1, 5])
def test_random_vocabularies_weights_and_temperature(seed: int) -> None:
    weights = {"root_weight": 0.5, "inner_student_weight": 2.0, "inner_teacher_weight": 3.0, "chunk_weight": 0.25}
    compare(PAIRS[f"random {seed}"], temperature=1.7, jsd_beta=0.3, jsd_rescale=True, direction="jsd", **weights)
    # a rest of nearly 0 is a difference of two numbers near 1
    compare(PAIRS[f"random {seed}"], 1e-4, temperature=0.6, **weights)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_tokens_in_no_cell(direction: str) -> None:
    projection = projection_of((FINE, COARSE))
    assert projection.trees is not None
    projection.trees = without_a_cell(projection.trees, 1)
    metrics = compare((FINE, COARSE), projection=projection, direction=direction)
    assert float(metrics["teacher_0/uncovered_mass"][0]) > 0


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_top_k_lists(name: str, direction: str) -> None:
    compare(PAIRS[name], 2e-5, kind="topk", direction=direction)


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_within_their_rounding(dtype: torch.dtype, name: str) -> None:
    compare(PAIRS[name], 2e-2, dtype=dtype)


@pytest.mark.parametrize(("name", "kind"), zip(BOTH_WAYS, ["hidden", "topk"], strict=True))
def test_gates(name: str, kind: str) -> None:
    metrics = compare(PAIRS[name], 2e-5, gate="soft", kind=kind)
    share, count = metrics["teacher_0/gate"]
    assert 0 < float(share) < float(count)


def test_large_logits_in_float16() -> None:
    compare((FINE, COARSE), 2e-2, dtype=torch.float16, spread=6.0)


def test_several_blocks_and_masked_samples() -> None:
    batch = text_batch((FINE, COARSE), samples=4, seed=2)
    batch["sample_mask"][1] = 0
    batch["token_mask"][2] = 0
    compare((FINE, COARSE), batch=batch, block_rows=16)


def test_rows_without_chunks_and_chunks_that_are_all_single() -> None:
    batch = text_batch((FINE, FINE), samples=3)
    valid = batch["alignment_0_pair_valid"].clone()
    valid[:, 1::2] = False
    valid[2] = False
    for key in ("", "0_"):
        batch[f"alignment_{key}pair_valid"] = batch[f"alignment_{key}pair_is_correct"] = valid
    metrics = compare((FINE, FINE), batch=batch)
    assert float(metrics["teacher_0/inner_student_kl"][1]) == 0


def test_what_the_kernels_do_not_know_is_refused_where_they_are_forced() -> None:
    batch = text_batch((FINE, COARSE))
    models = make_models(batch, FINE.size, COARSE.size, dtype=torch.float32)
    options = {"mode": "tree_kl", "fast_path": "force", "condition": "counted"}
    loss_fn = CrossTokenizerDistillationLossFn(options, projections=[projection_of((FINE, COARSE))])
    with pytest.raises(LossError, match="use 'auto'"):
        run(loss_fn, batch, models)


def test_where_the_plain_path_does_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fast._warn_once.cache_clear()
    hidden, head = torch.zeros(1, 2, device="meta"), Head(3, weight=torch.zeros(3, 2), softcap=30.0)
    monkeypatch.setattr(fast, "triton_available", lambda: True)
    on_cuda = SimpleNamespace(device=torch.device("cuda"), dtype=hidden.dtype)
    for _ in range(2):
        assert fast.usable_orders("auto", None, on_cuda, head, []) is None  # type: ignore[arg-type]
    assert [record.message for record in caplog.records if "plain torch" in record.message] == caplog.messages
    assert len(caplog.messages) == 1


def test_masses_of_cells() -> None:
    pair = worlds.random_pair(5)
    objective = TreeKL(None, projection_of(pair))
    found = cell_tables(objective)
    logits = torch.randn(pair[1].size, padded(130), generator=torch.Generator().manual_seed(0))
    lse, probs = column_stats(logits).lse, logits.softmax(0)
    side = found.teacher
    masses = cell_masses(logits, lse, side)
    want = torch.zeros(objective.num_cells + 1, logits.shape[1]).index_add(0, objective.teacher_cell, probs)
    for number, cell in enumerate(objective.teacher_cell[found.row.long()].tolist()):
        source, place = int(side.source[number]), int(side.place[number])
        assert (source >= 0) != (place >= 0)
        assert number >= found.simple or source == int(found.row[number])
        got = probs[source] if source >= 0 else masses[place]
        torch.testing.assert_close(got, want[cell], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(masses[side.rows - 1], want[-1], rtol=1e-5, atol=1e-7)
