"""What a loss measures of itself: coverage, shared mass, and cosines between the gradients of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.errors import ConfigError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head
from tests.losses.cases import make_batch, make_models, make_projection, run
from tests.losses.reference import chunks_of, pairs_of
from tests.losses.test_recent import PAIRS, loss_of
from tests.losses.test_tree_kl import models_of, text_batch

V_S = 23


def mean(metrics: Any, name: str) -> float:
    value, count = metrics[name]
    return float(value / count)


def shift_gradient(loss_fn: Any, batch: Any, models: Any) -> Tensor:
    """Gradient of a vector that is added to all hidden states."""
    loss, _ = run(loss_fn, batch, models)
    return torch.autograd.grad(loss, models.hidden)[0].sum(0)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


def build(**cfg: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn({"block_rows": 4, **cfg}, projections=[make_projection(23, 31, seed=1)])


PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "boundary_kl": ("boundary_chunk", {"chunk_weight": 0.0}, {}),
    "strict": ("strict_span", {}, {"span_weight": 1.0}),
}


@pytest.mark.parametrize("head", ["linear", "softcap", "module"])
@pytest.mark.parametrize("mode", list(PARTS))
def test_cosines_are_those_of_the_gradients(mode: str, head: str) -> None:
    """The second part is what the loss gains when its weight goes from nothing to something."""
    pair, without, more = PARTS[mode]
    batch = make_batch(seed=5, samples=6)
    models = make_models(batch, seed=2)
    linear = torch.nn.Linear(7, V_S, bias=False, dtype=torch.float64)
    linear.weight = torch.nn.Parameter(models.weight.detach())
    own = {
        "linear": Head(V_S, weight=models.weight),
        "softcap": Head(V_S, weight=models.weight, softcap=3.0),
        "module": Head(V_S, module=linear),
    }[head]

    def shift(**cfg: Any) -> Tensor:
        loss, _ = run(build(mode=mode, **cfg), batch, models, head=own)
        return torch.autograd.grad(loss, models.hidden)[0].sum(0)

    first = shift(ce_loss_scale=0.0, **without)
    both = shift(ce_loss_scale=0.0, **more)
    ce = shift(kl_loss_weight=0.0)
    loss, metrics = run(build(mode=mode, probe_every=1, **more), batch, models, head=own)
    assert mean(metrics, f"teacher_0/cosine_{pair}") == pytest.approx(cosine(first, both - first), abs=1e-9)
    ratio = float((both - first).norm() / first.norm())
    assert mean(metrics, f"teacher_0/norm_ratio_{pair}") == pytest.approx(ratio, rel=1e-9)
    assert mean(metrics, "teacher_0/cosine_ce") == pytest.approx(cosine(ce, both), abs=1e-9)
    plain, _ = run(build(mode=mode, **more), batch, models, head=own)
    assert torch.equal(loss, plain)


def test_the_parts_of_tree_kl_are_measured() -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair, samples=6)
    models = models_of(batch, pair)
    off = dict.fromkeys(("root_weight", "inner_student_weight", "inner_teacher_weight", "chunk_weight"), 0.0)
    root, inner = (
        shift_gradient(loss_of(pair, mode="tree_kl", **{**off, name: 1.0}), batch, models)
        for name in ("root_weight", "inner_student_weight")
    )
    _, metrics = run(loss_of(pair, mode="tree_kl", probe_every=1), batch, models)
    assert mean(metrics, "teacher_0/cosine_root_inner_student") == pytest.approx(cosine(root, inner), abs=1e-9)


def test_coverage_and_shared_mass() -> None:
    batch, projection = make_batch(seed=5, samples=6), make_projection(23, 31, seed=1)
    models = make_models(batch, seed=1)
    _, metrics = run(build(mode="boundary_kl", probe_every=1), batch, models)
    chunks = chunks_of(batch)
    strict = [(b, a[0], z[0]) for b, a, z in chunks if len(a) == len(z) == 1]
    assert 0 < len(strict) < len(chunks)
    assert mean(metrics, "teacher_0/strict_chunks") == pytest.approx(len(strict) / len(chunks))
    for side, place in (("student", 1), ("teacher", 2)):
        tokens = sum(len(chunk[place]) for chunk in chunks)
        assert mean(metrics, f"teacher_0/strict_{side}_tokens") == pytest.approx(len(strict) / tokens)
    pairs = pairs_of(projection.dense(), 1 - 1e-6)
    p_s = (models.hidden @ models.weight.t()).detach().softmax(-1).view(*batch["input_ids"].shape, -1)
    p_t = (models.teacher_hidden[0] @ models.teacher_weight[0].t()).softmax(-1)
    p_t = p_t.view(*batch["teacher_input_ids"].shape, -1)
    own = sum(float(p_s[b, a - 1, [s for s, _ in pairs]].sum()) for b, a, _ in strict) / len(strict)
    theirs = sum(float(p_t[b, z - 1, [t for _, t in pairs]].sum()) for b, _, z in strict) / len(strict)
    assert mean(metrics, "teacher_0/shared_mass_student") == pytest.approx(own)
    assert mean(metrics, "teacher_0/shared_mass_teacher") == pytest.approx(theirs)


def test_only_every_so_many_steps_and_never_without_gradients() -> None:
    batch = make_batch(seed=5)
    models = make_models(batch)
    fn = build(mode="boundary_kl", probe_every=3)
    seen = []
    for _ in range(5):
        _, metrics = run(fn, batch, models)
        seen.append("teacher_0/strict_chunks" in metrics)
        fn.step_end({})
    assert seen == [True, False, False, True, False]
    fn = build(mode="boundary_kl", probe_every=1)
    with torch.no_grad():
        assert "teacher_0/strict_chunks" not in run(fn, batch, models)[1]
    with pytest.raises(ConfigError, match="probe_every is -1"):
        build(probe_every=-1)


@pytest.mark.parametrize("mode", ["alm", "p_kl", "gold", "uld", "p_kl_norm"])
def test_a_mode_without_parts_is_measured_against_cross_entropy(mode: str) -> None:
    batch = make_batch(seed=3, samples=6)
    models = make_models(batch, seed=2)
    _, metrics = run(build(mode=mode, probe_every=1, vocab_topk=9), batch, models)
    assert -1 <= mean(metrics, "teacher_0/cosine_ce") <= 1
    assert ("teacher_0/shared_mass_student" in metrics) == (mode != "p_kl")


def test_a_list_of_likely_tokens_has_no_shared_mass() -> None:
    batch = make_batch(seed=3, samples=6)
    _, metrics = run(build(mode="boundary_kl", probe_every=1), batch, make_models(batch), "topk")
    assert "teacher_0/cosine_boundary_chunk" in metrics
    assert "teacher_0/shared_mass_student" not in metrics
