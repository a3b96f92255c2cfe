"""Every mode against the plain float64 reference, values and gradients; blocks against no blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.objectives import OBJECTIVES
from limbeck.losses.objectives.config import PublishedConfig
from tests.losses import reference
from tests.losses.cases import PLAIN_MODES as MODES
from tests.losses.cases import directions_of, make_batch, make_models, make_projection, of_mode, run

AS_PUBLISHED = {mode for mode, kind in OBJECTIVES.items() if issubclass(kind.Config, PublishedConfig)}
NO_LIST = {mode for mode, kind in OBJECTIVES.items() if kind.needs_logits}  # no top-k teacher
DIRECTED = [(m, d) for m in MODES for d in directions_of(m) or ["forward"]]
SCORED = [(m, k) for m in MODES for k in ("hidden", "logits", "topk") if k != "topk" or m not in NO_LIST]


def expected(mode: str, batch: dict[str, Any], models: Any, projection: Any, **options: Any) -> torch.Tensor:
    shape = batch["input_ids"].shape
    logits = (models.hidden @ models.weight.t()).view(*shape, -1)
    t_shape = batch["teacher_input_ids"].shape
    teacher = (models.teacher_hidden[0] @ models.teacher_weight[0].t()).view(*t_shape, -1)
    kd, chunks = reference.kd(mode, batch, logits, teacher, projection.dense(), **options)
    ce, tokens = reference.ce(batch, logits)
    return 0.7 * kd / max(chunks, 1) + 0.3 * ce / max(tokens, 1)


def settings_for(mode: str, **extra: Any) -> dict[str, Any]:
    return of_mode({"mode": mode, "kl_loss_weight": 0.7, "ce_loss_scale": 0.3, **extra})


def compare(cfg: dict[str, Any], batch: Any, models: Any, projection: Any, want: torch.Tensor, kind: str) -> None:
    wanted = torch.autograd.grad(want, [models.hidden, models.weight])
    loss, _ = run(CrossTokenizerDistillationLossFn(cfg, projections=[projection]), batch, models, kind)
    got = torch.autograd.grad(loss, [models.hidden, models.weight])
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-9)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tau", [1.0, 1.7])
@pytest.mark.parametrize(("mode", "direction"), DIRECTED)
def test_matches_reference(mode: str, tau: float, direction: str) -> None:
    batch, projection = make_batch(seed=3), make_projection(23, 31, seed=1)
    models = make_models(batch, seed=2)
    beta = 0.3
    want = expected(
        mode,
        batch,
        models,
        projection,
        tau=tau,
        direction=direction,
        beta=beta,
        exact_only=mode not in AS_PUBLISHED,
        vocab_topk=9,
        uncommon_topk=6,
        chunk_weight=0.4,
        strict_topk=4,
        span_weight=0.3,
    )
    cfg = settings_for(
        mode,
        temperature=tau,
        direction=direction,
        jsd_beta=beta,
        vocab_topk=9,
        uncommon_topk=6,
        chunk_weight=0.4,
        strict_topk=4,
        span_weight=0.3,
        block_rows=4,
    )
    compare(cfg, batch, models, projection, want, "hidden")


@pytest.mark.parametrize("mode", [m for m in MODES if m not in NO_LIST])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_topk_teacher_matches_reference(mode: str, direction: str, k: int) -> None:
    batch, projection = make_batch(seed=5), make_projection(23, 31, seed=6)
    models = make_models(batch, seed=7)
    want = expected(mode, batch, models, projection, direction=direction, stored_k=k)
    loss_fn = CrossTokenizerDistillationLossFn(settings_for(mode, direction=direction), projections=[projection])
    loss, _ = run(loss_fn, batch, models, "topk", k=k)
    torch.testing.assert_close(loss, want, rtol=1e-7, atol=1e-9)
    got = torch.autograd.grad(loss, [models.hidden, models.weight])
    for a, b in zip(got, torch.autograd.grad(want, [models.hidden, models.weight]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 5),
    v_s=st.integers(3, 40),
    v_t=st.integers(3, 40),
    block=st.integers(1, 30),
    exact=st.booleans(),
)
def test_odd_shapes(mode: str, seed: int, samples: int, v_s: int, v_t: int, block: int, exact: bool) -> None:
    batch = make_batch(samples=samples, v_s=v_s, v_t=v_t, seed=seed)
    projection = make_projection(v_s, v_t, seed=seed)
    models = make_models(batch, v_s, v_t, seed=seed)
    want = expected(mode, batch, models, projection, exact_only=exact, vocab_topk=7, uncommon_topk=5)
    cfg = settings_for(
        mode,
        direction="forward",
        vocab_topk=7,
        uncommon_topk=5,
        block_rows=block,
        exact_token_match_only=exact,
        allow_inexact=not exact,
    )
    compare(cfg, batch, models, projection, want, "logits")


@pytest.mark.parametrize(("mode", "kind"), SCORED)
def test_every_block_size_gives_the_same(mode: str, kind: str) -> None:
    batch, projection = make_batch(seed=8, samples=3), make_projection(23, 31)
    models = make_models(batch)
    results = []
    for block in [*range(1, 12), 10_000]:
        cfg = settings_for(mode, block_rows=block, vocab_topk=11, uncommon_topk=7)
        loss, metrics = run(CrossTokenizerDistillationLossFn(cfg, projections=[projection]), batch, models, kind)
        results.append((loss, torch.autograd.grad(loss, [models.hidden, models.weight]), metrics))
    loss, grads, metrics = results[-1]
    for other, other_grads, other_metrics in results[:-1]:
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(other_grads, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert other_metrics.keys() == metrics.keys()
        for name, (value, count) in metrics.items():
            torch.testing.assert_close(other_metrics[name][0], value, rtol=1e-10, atol=1e-10)
            assert other_metrics[name][1] == count


@pytest.mark.parametrize("mode", ["boundary_kl", "alm"])
@pytest.mark.parametrize("kind", ["hidden", "topk"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_corrected_modes_are_never_negative(mode: str, kind: str, direction: str) -> None:
    for seed in range(6):
        batch = make_batch(seed=seed)
        loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": mode, "direction": direction, "ce_loss_scale": 0.0}, projections=[make_projection(23, 31, seed)]
        )
        loss, _ = run(loss_fn, batch, make_models(batch, seed=seed, dtype=torch.float32), kind)
        assert float(loss.detach()) >= -1e-6


def advantages(batch: dict[str, Any], models: Any) -> dict[tuple[int, int], float]:
    """log p_T - log p_S of the realised text of every usable chunk."""
    logits = (models.hidden @ models.weight.t(), models.teacher_hidden[0] @ models.teacher_weight[0].t())
    out: dict[tuple[int, int], float] = {}
    for sign, side, ids, scores in zip(
        (-1, 1),
        ("student", "teacher"),
        (batch["input_ids"], batch["teacher_input_ids"]),
        logits,
        strict=True,
    ):
        log_p = scores.detach().view(*ids.shape, -1).log_softmax(-1)
        for b, t in (batch[f"alignment_{side}_chunk_id"] >= 0).nonzero().tolist():
            key = b, int(batch[f"alignment_{side}_chunk_id"][b, t])
            out[key] = out.get(key, 0.0) + sign * float(log_p[b, t - 1, ids[b, t]])
    return out


def only(batch: dict[str, Any], chunks: set[tuple[int, int]]) -> dict[str, Any]:
    """The batch with these chunks alone."""
    out = {**batch}
    for key in ("alignment_pair_valid", "alignment_0_pair_valid"):
        out[key] = batch[key].clone()
        for b, c in out[key].nonzero().tolist():
            out[key][b, c] &= (b, c) in chunks
    return out


@pytest.mark.parametrize(("mode", "kind"), SCORED)
def test_a_gate_keeps_the_chunks_on_which_the_teacher_is_far_ahead(mode: str, kind: str) -> None:
    batch, projection = make_batch(seed=3, samples=6), make_projection(23, 31)
    models = make_models(batch, seed=2)
    cfg = {"mode": mode, "ce_loss_scale": 0.0, "block_rows": 4}
    found = advantages(batch, models)
    # beyond 1/2 on either side the ramp has ended
    batch = only(batch, {key for key, value in found.items() if abs(value) > 0.5})
    gated, metrics = run(
        CrossTokenizerDistillationLossFn({**cfg, "gate": "soft"}, projections=[projection]), batch, models, kind
    )
    kept = only(batch, {key for key, value in found.items() if value > 0})
    plain, counted = run(CrossTokenizerDistillationLossFn(cfg, projections=[projection]), kept, models, kind)
    share = float(metrics["teacher_0/gate"][0] / metrics["teacher_0/gate"][1])
    assert 0 < share < 1
    assert float(metrics["teacher_0/gate"][0]) == float(counted["chunks"][0])
    torch.testing.assert_close(gated, plain * share, rtol=1e-6, atol=1e-9)
    for mine, theirs in zip(
        torch.autograd.grad(gated, [models.hidden, models.weight]),
        torch.autograd.grad(plain * share, [models.hidden, models.weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("mode", "kind"), SCORED)
def test_an_objective_names_what_it_measures(mode: str, kind: str) -> None:
    batch = make_batch(seed=3, samples=6)
    fn = CrossTokenizerDistillationLossFn({"mode": mode, "gate": "soft"}, projections=[make_projection(23, 31)])
    _, metrics = run(fn, batch, make_models(batch, seed=2), kind)
    measured = {name.removeprefix("teacher_0/") for name in metrics if name.startswith("teacher_0/")}
    assert measured <= {"kl_loss", "gate", *(OBJECTIVES[mode].measures or ())}


def test_a_gate_holds_for_a_teacher_of_the_same_vocabulary() -> None:
    batch = make_batch(seed=8, one_to_one=True, v_t=23)
    batch["teacher_input_ids"] = batch["teacher_0_input_ids"] = batch["input_ids"]
    for key in ("teacher_input_lengths", "teacher_0_input_lengths"):
        batch[key] = batch["input_lengths"]
    for key in ("alignment_teacher_chunk_id", "alignment_0_teacher_chunk_id"):
        batch[key] = batch["alignment_student_chunk_id"]
    models = make_models(batch, v_t=23)
    ahead = [value > 0 for value in advantages(batch, models).values()]
    fn = CrossTokenizerDistillationLossFn({"gate": "soft", "ce_loss_scale": 0.0}, projections=[None])
    loss, metrics = run(fn, batch, models)
    plain, _ = run(CrossTokenizerDistillationLossFn({"ce_loss_scale": 0.0}, projections=[None]), batch, models)
    assert any(ahead)
    assert 0 < float(loss.detach()) < float(plain.detach())
    assert 0 < float(metrics["teacher_0/gate"][0]) < float(metrics["teacher_0/gate"][1])
