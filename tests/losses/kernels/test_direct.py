"""Losses whose pairs of tokens are read again by the gradient's kernel, against the plain path."""

from __future__ import annotations

import pytest
import torch

from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.fast.kernels.tables import cell_tables, projection_tables
from limbeck.losses.vocab.projection import VocabMap
from tests.losses.cases import make_batch, make_models, make_projection, run
from tests.losses.kernels.test_fast_path import assert_same, both
from tests.losses.kernels.test_tree_kernels import compare, copied, without_a_cell
from tests.losses.test_tree_kl import Pair, projection_of
from tests.projection.worlds import tiny_vocab

V_S, V_T = 60, 160

# most letters begin no other token on either side: cells that are pairs
LETTERS = "abcdefghijklmno"
MORE = len(LETTERS) - 3
FINE = tiny_vocab(LETTERS, [(0, 1), (1, 2), (0, 0)])
COARSE = tiny_vocab(
    LETTERS,
    [(0, 1), (3 + MORE, 2), (3 + MORE, 0), (1, 1), (5 + MORE, 1), (4 + MORE, 0), (2, 2), (2, 0), (1, 2), (0, 2)],
)
PAIRS: dict[str, Pair] = {"coarser teacher": (FINE, COARSE), "finer teacher": (COARSE, FINE)}
BOTH_WAYS = list(PAIRS)


def test_the_cases_have_pairs_and_others() -> None:
    tables = projection_tables(VocabMap(make_projection(V_S, V_T), V_T))
    assert tables.pair_teacher.numel() >= 8
    assert tables.others.numel() >= 8
    assert tables.unpaired.numel() > tables.others.numel()
    for pair in PAIRS.values():
        loss_fn = CrossTokenizerDistillationLossFn({"mode": "tree_kl"}, projections=[projection_of(pair)])
        (objective,) = loss_fn.teachers
        cells = cell_tables(objective)  # type: ignore[arg-type]
        assert cells.pair_teacher.numel() >= 8
        assert cells.row.numel() > cells.pair_teacher.numel()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_boundary_kl(temperature: float) -> None:
    options = {"temperature": temperature, "kl_loss_weight": 0.7, "chunk_weight": 1.3}
    batch = make_batch(samples=5, seed=3, v_s=V_S, v_t=V_T)
    assert_same(both(options, batch, v_s=V_S, v_t=V_T), 2e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # an overflow, in the interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boundary_kl_in_narrow_types(dtype: torch.dtype) -> None:
    batch = make_batch(samples=3, seed=1, v_s=V_S, v_t=V_T)
    assert_same(both({}, batch, dtype=dtype, v_s=V_S, v_t=V_T), 1e-2)


@pytest.mark.parametrize("options", [{"block_rows": 16}, {"gate": "soft"}])
def test_boundary_kl_in_blocks_and_with_a_gate(options: dict[str, object]) -> None:
    batch = make_batch(samples=6, seed=4, v_s=V_S, v_t=V_T)
    assert_same(both(options, batch, v_s=V_S, v_t=V_T), 2e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_boundary_kl_against_float64(temperature: float) -> None:
    batch = make_batch(samples=5, seed=3, v_s=V_S, v_t=V_T)
    models = make_models(batch, V_S, V_T, seed=0, dtype=torch.float32)
    found = []
    for fast_path, own in (("off", copied(models, torch.float64)), ("force", models)):
        options = {"mode": "boundary_kl", "temperature": temperature, "fast_path": fast_path}
        loss_fn = CrossTokenizerDistillationLossFn(options, projections=[make_projection(V_S, V_T)])
        loss, metrics = run(loss_fn, batch, own)
        loss.backward()
        found.append((loss.detach(), own, metrics))
    assert_same(found, 2e-6)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_tree_kl(name: str) -> None:
    compare(PAIRS[name], temperature=1.4)


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tree_kl_in_narrow_types(dtype: torch.dtype, name: str) -> None:
    compare(PAIRS[name], 2e-2, dtype=dtype)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_tree_kl_against_float64(name: str) -> None:
    compare(PAIRS[name], 3e-5, judge_dtype=torch.float64)


def test_tree_kl_with_large_logits_and_gates() -> None:
    compare((FINE, COARSE), 2e-2, dtype=torch.float16, spread=6.0)
    compare(PAIRS["coarser teacher"], 2e-5, gate="soft")


def test_tree_kl_with_tokens_in_no_cell() -> None:
    projection = projection_of((FINE, COARSE))
    assert projection.trees is not None
    projection.trees = without_a_cell(projection.trees, 1)
    metrics = compare((FINE, COARSE), projection=projection)
    assert float(metrics["teacher_0/uncovered_mass"][0]) > 0
