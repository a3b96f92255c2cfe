"""An objective of a user's own, `examples/objective.py`: its formula, gradient, settings, and every way to run it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.config import refuse_unknown_keys, resolve
from limbeck.errors import ConfigError, LossError
from limbeck.losses import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.tools.summary import summary
from tests.distributed.cases import Case, close, step, together
from tests.helpers import runs
from tests.helpers.tiny import TEXTS
from tests.losses import reference
from tests.losses.cases import Models, make_batch, make_models, make_projection, run

MODE = "examples.objective:Top1CE"


def loss_of(projection: Any, **cfg: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn(
        {"mode": MODE, "ce_loss_scale": 0.0, "block_rows": 4, **cfg}, projections=[projection]
    )


def expected(batch: dict[str, Any], models: Models, projection: Any, min_prob: float) -> Tensor:
    """One chunk after another."""
    student = (models.hidden @ models.weight.t()).view(*batch["input_ids"].shape, -1).log_softmax(-1)
    teacher = (models.teacher_hidden[0] @ models.teacher_weight[0].t()).view(*batch["teacher_0_input_ids"].shape, -1)
    partner = dict(zip(*(side.tolist() for side in reversed(projection.exact_pairs())), strict=True))
    total, chunks = student.sum() * 0, reference.chunks_of(batch)
    for b, s, t in chunks:
        prob, token = teacher[b, t[0] - 1].softmax(-1).max(-1)
        if int(token) in partner and float(prob) >= min_prob:
            total = total - student[b, s[0] - 1, partner[int(token)]]
    return total / len(chunks)


@pytest.mark.parametrize("kind", ["hidden", "logits", "topk"])
@pytest.mark.parametrize("min_prob", [0.0, 0.4])
def test_its_formula(min_prob: float, kind: str) -> None:
    batch, projection = make_batch(seed=1, samples=8), make_projection(23, 31, seed=1)
    models = make_models(batch, seed=2)
    want = expected(batch, models, projection, min_prob)
    loss, metrics = run(loss_of(projection, min_prob=min_prob), batch, models, kind)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(loss, [models.hidden, models.weight]),
        torch.autograd.grad(want, [models.hidden, models.weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    counted, number = metrics["teacher_0/counted"]
    assert 0 < float(counted) < float(number)


def test_its_gradient_is_that_of_finite_differences() -> None:
    batch = make_batch(seed=1, samples=4)
    models, fn = make_models(batch, seed=2), loss_of(make_projection(23, 31))

    def loss(hidden: Tensor) -> Tensor:
        return run(fn, batch, replace(models, hidden=hidden))[0]

    assert torch.autograd.gradcheck(loss, models.hidden.detach().clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("min_prob", [0.0, 0.9])
def test_what_a_teacher_says_that_is_no_number_stops_the_run(min_prob: float) -> None:
    batch, projection = make_batch(seed=3), make_projection(23, 31)
    width = batch["teacher_0_input_ids"].shape[1]
    for b, _, t in reference.chunks_of(batch):
        models = make_models(batch)
        models.teacher_hidden[0][b * width + t[0] - 1] = torch.nan
        with pytest.raises(LossError):
            run(loss_of(projection, min_prob=min_prob), batch, models)


# ---- in every layout ----

ROWS = tuple(range(len(TEXTS)))
LOSS = {"mode": MODE, "min_prob": 0.003, "kl_loss_weight": 0.7}
LAYOUTS = {
    "one row at a time": Case(LOSS, mbs=1),
    "packed": Case(LOSS, packed=True),
    "a cache's lists": Case(LOSS, topk=16),
    "a cache's lists, packed": Case(LOSS, topk=16, packed=True),
}


def one_rank(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    case = Case(LOSS)
    return step(case, layout, ROWS if "tensor_parallel_size" in layout else case.rows[rank])


def assert_same_step(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("loss", "grad_norm"):
        close(found[name], wanted[name], name)
    for name, value in wanted["gradients"].items():
        close(found["gradients"][name], value, name, floor=1e-7)


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_take_the_same_step(name: str) -> None:
    wanted = step(Case(LOSS), {}, ROWS)
    assert_same_step(step(LAYOUTS[name], {}, ROWS), wanted)
    assert 0 < wanted["metrics"]["teacher_0/counted"][0] < wanted["metrics"]["teacher_0/counted"][1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=["data", "tensor"])
def test_two_processes_take_the_same_step(layout: dict[str, Any], tmp_path: Path) -> None:
    wanted = step(Case(LOSS), {}, ROWS)
    for found in together(2, one_rank, tmp_path, layout):
        assert_same_step(found, wanted)


# ---- in a run file ----


def test_a_run_learns_by_it(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    values = runs.settings(tmp_path, tmp_path / "run", loss_fn={"mode": MODE, "min_prob": 0.001})
    values["distillation"]["max_num_steps"] = 2
    refuse_unknown_keys(values, {})
    config = runs.resolved(values)
    assert runs.resolved(config.model_dump(mode="json")) == config
    assert any(MODE in line for line in summary(config))
    off_policy.run(config)
    losses = [row["train/kl_loss"] for row in runs.rows(tmp_path / "run") if "train/kl_loss" in row]
    assert losses
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_prob": 2},
        {"min_pro": 0.1},
        {"direction": "reverse"},
        {"mode": "examples.objective:Nothing"},
        {"mode": "math:pi"},
    ],
)
def test_its_settings_are_its_own(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        resolve(CrossTokenizerDistillationLossConfig, {"mode": MODE, **bad})
