"""Cases whose answer is known by hand: the flaws of the reference modes, and that the corrected ones lack them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherLogits
from tests.losses.cases import FakeProjection, make_batch, make_models, make_projection, microbatch, run, starts


def one_chunk(student_ids: list[int], teacher_ids: list[int]) -> dict[str, Any]:
    """One sample: a first token outside every chunk, then one chunk of all the given tokens."""
    fields: dict[str, Any] = {"sample_mask": torch.ones(1), "idx": [0]}
    for side, ids in (("", student_ids), ("teacher_0_", teacher_ids)):
        fields[f"{side}input_ids"] = torch.tensor([[0, *ids]])
        fields[f"{side}input_lengths"] = torch.tensor([len(ids) + 1])
        fields[f"{side}token_mask"] = torch.ones(1, len(ids) + 1, dtype=torch.int64)
    fields["alignment_0_pair_valid"] = fields["alignment_0_pair_is_correct"] = torch.ones(1, 1, dtype=torch.bool)
    fields["alignment_0_student_chunk_id"] = torch.tensor([[-1] + [0] * len(student_ids)])
    fields["alignment_0_teacher_chunk_id"] = torch.tensor([[-1] + [0] * len(teacher_ids)])
    return fields


def loss_of(
    cfg: dict[str, Any], batch: dict[str, Any], projection: Any, student: Tensor, teacher: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Loss on logits `[T, V]` of a one-sample batch, cross-entropy left out."""
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "ce_loss_scale": 0.0, **cfg}, projections=[projection]
    )
    inputs = loss_fn.build_layout(microbatch(batch), [starts(batch["teacher_0_input_ids"])])
    signal = TeacherLogits(teacher, batch["teacher_0_input_ids"].reshape(-1))
    return loss_fn.compute_loss(student, Head.identity(student.shape[1]), [signal], inputs, loss_fn.denominators(batch))


def sure(ids: list[int], size: int, share: float = 0.99) -> Tensor:
    """Logits `[len + 1, size]` that give each id `share` and spread the rest evenly; the last row is never read."""
    rows = torch.full((len(ids) + 1, size), math.log((1 - share) / (size - 1)), dtype=torch.float64)
    for t, i in enumerate(ids):
        rows[t, i] = math.log(share)
    return rows


# The student has the numeral "201" (id 1) as one token; the teacher writes "2", "0", "1" (ids 2, 3, 4).
SIZE = 50
NUMERAL = FakeProjection(
    np.array([[0, -1, -1], [2, 3, 4]] + [[j, -1, -1] for j in range(2, SIZE)], np.int32),
    np.array([[1, 0, 0], [0.9009, 0.0901, 0.0090]] + [[1, 0, 0]] * (SIZE - 2), np.float32),
    SIZE,
)


def target_mass(teacher: Tensor) -> float:
    """What the mean of the teacher's log-probabilities leaves of a probability of 1."""
    return float(torch.log_softmax(teacher[:3], -1).mean(0).exp().sum())


def test_reference_target_collapses_on_2_0_1() -> None:
    teacher = sure([2, 3, 4], SIZE)
    assert target_mass(teacher) < 0.06  # "a teacher that is 99% sure leaves 4% of target mass"
    batch = one_chunk([1], [2, 3, 4])
    student = sure([1], SIZE)
    loss, _ = loss_of({"mode": "p_kl"}, batch, NUMERAL, student, teacher)
    assert float(loss) < 0  # and the "KL" turns negative
    uncertain = torch.zeros(2, SIZE, dtype=torch.float64)
    flat, _ = loss_of({"mode": "p_kl"}, batch, NUMERAL, uncertain, teacher)
    assert float(flat) < 0.2  # a student that knows nothing is hardly told so


@pytest.mark.parametrize("mode", ["boundary_kl", "alm"])
def test_corrected_modes_teach_2_0_1(mode: str) -> None:
    batch, teacher = one_chunk([1], [2, 3, 4]), sure([2, 3, 4], SIZE)
    uncertain = torch.zeros(2, SIZE, dtype=torch.float64, requires_grad=True)
    loss, _ = loss_of({"mode": mode}, batch, NUMERAL, uncertain, teacher)
    good, _ = loss_of({"mode": mode}, batch, NUMERAL, sure([1], SIZE), teacher)
    assert float(good) >= 0
    assert float(loss.detach()) > float(good) + 1.0
    (grad,) = torch.autograd.grad(loss, uncertain)
    assert grad[0, 1] < 0  # the numeral is pushed up


def test_chunk_term_is_the_binary_kl_of_chain_rule_products() -> None:
    batch, teacher = one_chunk([1], [2, 3, 4]), sure([2, 3, 4], SIZE, 0.8)
    student = sure([1], SIZE, 0.3)
    _, metrics = loss_of({"mode": "boundary_kl"}, batch, NUMERAL, student, teacher)
    p, q = 0.8**3, 0.3
    want = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert float(metrics["teacher_0/chunk_kl"][0]) == pytest.approx(want, rel=1e-9)
    assert float(metrics["teacher_0/chunk_kl"][1]) == 1


def test_common_set_kl_suppresses_uncommon_tokens() -> None:
    """The gradient of the common-set KL on an uncommon logit j is p_S[j] times the teacher's mass on C."""
    size, common = 12, 8
    indices = np.array([[j if j < common else -1] for j in range(size)], np.int32)
    projection = FakeProjection(indices, (indices >= 0).astype(np.float32), size)
    gen = torch.Generator().manual_seed(0)
    student = torch.randn(2, size, generator=gen, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, size, generator=gen, dtype=torch.float64)
    p_s, p_t = student[0].detach().softmax(-1), teacher[0].softmax(-1)
    # The sorted L1 part has a gradient of its own on uncommon tokens: take it off by subtracting its autograd value.
    loss, _ = loss_of({"mode": "gold"}, one_chunk([1], [1]), projection, student, teacher)
    l1 = (
        student[0].softmax(-1)[common:].sort(descending=True).values - p_t[common:].sort(descending=True).values
    ).abs()
    (grad,) = torch.autograd.grad(loss - l1.sum(), student)
    torch.testing.assert_close(grad[0, common:], p_s[common:] * p_t[:common].sum(), rtol=1e-9, atol=1e-12)
    assert (grad[0, common:] > 0).all()


def identity(size: int) -> FakeProjection:
    return FakeProjection(np.arange(size, dtype=np.int32)[:, None], np.ones((size, 1), np.float32), size)


@pytest.mark.parametrize("mode", ["boundary_kl", "alm", "uld", "p_kl", "gold", "h_kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_models_cost_nothing(mode: str, dtype: torch.dtype) -> None:
    """Same vocabulary through an identity projection, one-token chunks: no loss, and no gradient."""
    size = 17
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    student = logits.clone().requires_grad_()
    loss, _ = loss_of({"mode": mode}, one_chunk([3], [3]), identity(size), student, logits)
    (grad,) = torch.autograd.grad(loss, student)
    assert abs(float(loss.detach())) < 2e-6
    # An L1 distance has no gradient of zero at its minimum; all others do.
    assert mode in ("uld", "gold", "h_kl") or float(grad.abs().max()) < 2e-6


@pytest.mark.parametrize("mode", ["boundary_kl", "alm"])
def test_chunks_of_several_tokens_cost_nothing_at_equality(mode: str) -> None:
    size = 11
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    student = logits.clone().requires_grad_()
    loss, _ = loss_of({"mode": mode}, one_chunk([3, 1, 2], [3, 1, 2]), identity(size), student, logits)
    (grad,) = torch.autograd.grad(loss, student)
    assert abs(float(loss.detach())) < 1e-9
    assert float(grad.abs().max()) < 1e-9


def test_predicting_positions_with_one_hot_logits() -> None:
    """The row before a token predicts it: one-hot logits there, and nowhere else, make loss and accuracy perfect."""
    ids, size = [5, 2, 7, 7, 1], 9
    batch = one_chunk(ids, ids)
    batch["alignment_0_student_chunk_id"] = batch["alignment_0_teacher_chunk_id"] = torch.tensor([[-1, 0, 1, 2, 3, 4]])
    batch["alignment_0_pair_valid"] = batch["alignment_0_pair_is_correct"] = torch.ones(1, 5, dtype=torch.bool)
    rows = torch.zeros(6, size, dtype=torch.float64)
    rows[torch.arange(5), torch.tensor(ids)] = 60.0
    loss_fn = CrossTokenizerDistillationLossFn({"mode": "boundary_kl"}, projections=[identity(size)])
    signal = TeacherLogits(rows, batch["teacher_0_input_ids"].reshape(-1))
    inputs = loss_fn.build_layout(microbatch(batch), [torch.tensor([0])])
    loss, metrics = loss_fn.compute_loss(rows, Head.identity(size), [signal], inputs, loss_fn.denominators(batch))
    assert float(loss) < 1e-9
    assert metrics["accuracy"] == (5, 5)
    assert metrics["proj_accuracy"] == (5, 5)
    wrong, _ = loss_fn.compute_loss(rows.roll(1, 0), Head.identity(size), [signal], inputs, loss_fn.denominators(batch))
    assert float(wrong) > 10


@pytest.mark.parametrize("mode", ["boundary_kl", "p_kl", "gold", "alm", "uld", "h_kl"])
def test_no_chunk_gives_a_zero_that_is_attached(mode: str) -> None:
    batch = make_batch(seed=1)
    batch["alignment_0_pair_valid"] = torch.zeros_like(batch["alignment_0_pair_valid"])
    models = make_models(batch)
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": mode, "ce_loss_scale": 0.0}, projections=[make_projection(23, 31)]
    )
    loss, metrics = run(loss_fn, batch, models)
    assert float(loss.detach()) == 0
    grads = torch.autograd.grad(loss, [models.hidden, models.weight])
    assert all(bool((g == 0).all()) for g in grads)
    batch["token_mask"] = torch.zeros_like(batch["token_mask"])
    loss, metrics = run(loss_fn, batch, models)
    assert loss.requires_grad
    assert float(loss.detach()) == 0
    assert metrics["tokens"][0] == metrics["chunks"][0] == 0


def test_a_wrongly_certain_student_can_be_moved() -> None:
    """Binary KL in float32 where the student's chunk probability rounds to 1."""
    batch = one_chunk([1, 1], [1])
    student = torch.zeros(3, 6)
    student[:, 1] = 40.0
    student.requires_grad_()
    teacher = torch.zeros(2, 6)
    loss, _ = loss_of({"mode": "alm"}, batch, identity(6), student, teacher)
    (grad,) = torch.autograd.grad(loss, student)
    assert math.isfinite(float(loss.detach()))
    assert torch.isfinite(grad).all()
    less_sure = torch.zeros(3, 6)
    less_sure[:, 1] = 8.0
    less_sure.requires_grad_()
    loss, _ = loss_of({"mode": "alm"}, batch, identity(6), less_sure, teacher)
    (grad,) = torch.autograd.grad(loss, less_sure)
    assert grad[0, 1] > 0.01
