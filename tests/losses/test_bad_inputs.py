"""Bad input is a clear error before any gradient: which side, which row, what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from limbeck.errors import ConfigError, LossError, ProjectionError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherLogits
from limbeck.losses.objectives import OBJECTIVES
from limbeck.losses.objectives.common_kl import CommonKL
from limbeck.losses.objectives.shared_vocabulary import SharedVocabulary
from tests.losses.cases import (
    PLAIN_MODES,
    FakeProjection,
    make_batch,
    make_models,
    make_projection,
    microbatch,
    run,
    starts,
)

BATCH = make_batch(samples=3, seed=2)


def build(**cfg: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn({"mode": "boundary_kl", **cfg}, projections=[make_projection(23, 31)])


def first_rows(loss_fn: CrossTokenizerDistillationLossFn) -> tuple[int, int]:
    inputs = loss_fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    (layout,) = inputs.layouts
    return int(layout.student_rows_M[layout.student_first_C[1]]), int(layout.teacher_rows_Q[layout.teacher_first_C[1]])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("mode", PLAIN_MODES)
def test_non_finite_logits_name_side_and_row(value: float, mode: str) -> None:
    loss_fn = build(mode=mode, block_rows=3)
    row_s, row_t = first_rows(loss_fn)
    models = make_models(BATCH)
    with torch.no_grad():
        models.hidden[row_s, 0] = value
    with pytest.raises(LossError, match=f"student: row {row_s} "):
        run(loss_fn, BATCH, models)
    models = make_models(BATCH)
    models.teacher_hidden[0][row_t, 0] = value
    with pytest.raises(LossError, match=f"teacher_0: row {row_t} "):
        run(loss_fn, BATCH, models)


def test_non_finite_topk_names_the_row() -> None:
    loss_fn, models = build(mode="alm"), make_models(BATCH)
    row = first_rows(loss_fn)[1]
    (signal,) = models.signals(BATCH, "topk")
    signal.next_logprob[row] = torch.nan
    inputs = loss_fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    with pytest.raises(LossError, match=f"teacher_0: row {row} "):
        loss_fn.compute_loss(
            models.hidden, Head(23, weight=models.weight), [signal], inputs, loss_fn.denominators(BATCH)
        )


def test_rows_without_loss_may_hold_anything() -> None:
    loss_fn, models = build(), make_models(BATCH)
    want, _ = run(loss_fn, BATCH, models)
    blocks = loss_fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])]).blocks
    used = {row for block in blocks for row in block.rows_N.tolist()}
    with torch.no_grad():
        for row in set(range(models.hidden.shape[0])) - used:
            models.hidden[row] = torch.nan
    loss, _ = run(loss_fn, BATCH, models)
    assert torch.equal(loss, want)
    assert torch.isfinite(torch.autograd.grad(loss, models.weight)[0]).all()


@pytest.mark.parametrize("kind", ["hidden", "logits", "topk"])
def test_ids_that_were_not_scored(kind: str) -> None:
    loss_fn, models = build(), make_models(BATCH)
    row = first_rows(loss_fn)[1]
    (signal,) = models.signals(BATCH, kind)
    ids, at = (signal.next_ids, row) if kind == "topk" else (signal.input_ids.clone(), row + 1)
    ids[at] = (ids[at] + 1) % 31
    setattr(signal, "next_ids" if kind == "topk" else "input_ids", ids)
    inputs = loss_fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    with pytest.raises(LossError, match=f"row {row} scored token id"):
        loss_fn.compute_loss(
            models.hidden, Head(23, weight=models.weight), [signal], inputs, loss_fn.denominators(BATCH)
        )


def test_ids_and_rows_out_of_range() -> None:
    loss_fn, models = build(), make_models(BATCH)
    inputs = loss_fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    counts, head = loss_fn.denominators(BATCH), Head(23, weight=models.weight)
    top = int(BATCH["input_ids"].max())
    with pytest.raises(LossError, match=r"student: token id \d+ .*head of 3"):
        loss_fn.compute_loss(models.hidden, Head(3, weight=models.weight), models.signals(BATCH), inputs, counts)
    assert top > 3
    with pytest.raises(LossError, match="4 hidden rows"):
        loss_fn.compute_loss(models.hidden[:4], head, models.signals(BATCH), inputs, counts)
    (signal,) = models.signals(BATCH, "logits")
    narrow = TeacherLogits(signal.full_logits, signal.input_ids, 5)
    with pytest.raises(LossError, match=r"teacher_0: token id \d+ .*vocabulary of 5"):
        loss_fn.compute_loss(models.hidden, head, [narrow], inputs, counts)
    short = TeacherLogits(signal.full_logits[:4], signal.input_ids)
    with pytest.raises(LossError, match="signal has 4 rows"):
        loss_fn.compute_loss(models.hidden, head, [short], inputs, counts)
    with pytest.raises(LossError, match="0 teacher signals for 1 teachers"):
        loss_fn.compute_loss(models.hidden, head, [], inputs, counts)
    sized = build(student_vocab_size=20)
    with pytest.raises(LossError, match=r"student_vocab_size is 20 .*23"):
        sized.compute_loss(models.hidden, head, [signal], inputs, counts)


def test_a_matrix_of_other_tokenizers() -> None:
    models = make_models(BATCH)
    other = CrossTokenizerDistillationLossFn({"mode": "boundary_kl"}, projections=[make_projection(19, 31)])
    with pytest.raises(ProjectionError, match="19 student tokens"):
        run(other, BATCH, models)
    other = CrossTokenizerDistillationLossFn({"mode": "boundary_kl"}, projections=[make_projection(23, 40)])
    with pytest.raises(ProjectionError, match="40 teacher tokens"):
        run(other, BATCH, models)


@pytest.mark.parametrize("mode", [m for m in PLAIN_MODES if issubclass(OBJECTIVES[m], (CommonKL, SharedVocabulary))])
def test_empty_common_set(mode: str) -> None:
    indices = np.array([[0, 1], [1, 2]], np.int32)
    projection = FakeProjection(indices, np.full((2, 2), 0.5, np.float32), 3)
    with pytest.raises(LossError, match=f"{mode!r} .*common"):
        CrossTokenizerDistillationLossFn({"mode": mode}, projections=[projection])


@pytest.mark.parametrize("mode", [m for m in PLAIN_MODES if OBJECTIVES[m].needs_logits])
def test_reference_modes_refuse_topk(mode: str) -> None:
    with pytest.raises(LossError, match=f"teacher_0: .*{mode!r}"):
        run(build(mode=mode), BATCH, make_models(BATCH), "topk")


def test_topk_refuses_other_temperatures() -> None:
    with pytest.raises(LossError, match="temperature is 2"):
        run(build(temperature=2.0), BATCH, make_models(BATCH), "topk")


def test_teachers_that_do_not_fit_their_batch() -> None:
    plain = {k: v for k, v in BATCH.items() if not k.startswith(("teacher", "alignment"))}
    with pytest.raises(LossError, match="no teacher_0_input_ids"):
        build().denominators(plain)
    same = CrossTokenizerDistillationLossFn({}, projections=[None])
    with pytest.raises(LossError, match=r"teacher 0 .*ids"):
        same.build_layout(microbatch(BATCH), [None])
    models = make_models(plain, 23, [31])
    with pytest.raises(LossError, match="scores 31 tokens against 23"):
        run(same, plain, models)
    with pytest.raises(ConfigError, match="1 teachers but 2 teacher_weights"):
        build(teacher_weights=[0.5, 0.5])
    with pytest.raises(LossError, match="0 teacher row starts"):
        build().build_layout(microbatch(BATCH), [])
