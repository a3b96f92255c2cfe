"""The losses on real micro-batches (fixed, dynamic, packed) and on a stored projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import get_microbatch_iterator
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden, blocks
from limbeck.projection import Projection
from limbeck.teachers.live import LiveTeacher
from tests.helpers import tiny
from tests.losses.cases import make_batch, make_projection

V_S, V_T = 23, 31


@pytest.fixture
def stored(tmp_path: Path) -> str:
    made = make_projection(V_S, V_T, k=3)
    order = np.argsort(-made.weights, axis=1, kind="stable")
    indices = np.take_along_axis(made.indices, order, 1)
    weights = np.take_along_axis(made.weights, order, 1)
    exact = np.full(V_S, -1, np.int32)
    exact[0] = 0
    projection = Projection(indices, weights, exact, V_T, "0" * 64, "1" * 64, "rules")
    return str(projection.save(tmp_path / "w.safetensors"))


CONFIGS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "sequence_length_round": 4}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
}


@pytest.mark.parametrize("mode", ["boundary_kl", "gold", "p_kl"])
def test_every_batching_gives_the_same_loss(mode: str, stored: str) -> None:
    """Models that look at one token at a time, so that packing cannot change what they say."""
    raw = make_batch(samples=7, v_s=V_S, v_t=V_T, seed=13)
    data = BatchedDataDict({k: v for k, v in raw.items() if not k.startswith(("teacher_0_", "alignment_0_"))})
    torch.manual_seed(0)
    body = torch.randn(V_S, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V_S, 6, dtype=torch.float64, requires_grad=True)
    teacher_body, teacher_head = torch.randn(V_T, 5).double(), Head(V_T, weight=torch.randn(V_T, 5).double())
    loss_fn = CrossTokenizerDistillationLossFn({"mode": mode, "projection_matrix_path": stored, "block_rows": 7})
    counts = loss_fn.denominators(data)
    results = {}
    for name, cfg in CONFIGS.items():
        student, count = get_microbatch_iterator(data, cfg, 2, None, None)
        teacher, _ = get_microbatch_iterator(data, cfg, 2, None, None, key_prefix="teacher_")
        total: Any = 0.0
        for mine, theirs in zip(student, teacher, strict=True):
            ids = theirs.processed_inputs.input_ids.reshape(-1)
            inputs = loss_fn.build_layout(mine, [theirs.processed_inputs.row_start])
            hidden = body[mine.processed_inputs.input_ids.reshape(-1)]
            signal = TeacherHidden(teacher_body[ids], teacher_head, ids)
            total = total + loss_fn.compute_loss(hidden, Head(V_S, weight=head), [signal], inputs, counts)[0]
        assert count > 1
        results[name] = (total, torch.autograd.grad(total, [body, head]))
    for name in ("dynamic", "packed"):
        torch.testing.assert_close(results[name][0], results["fixed"][0], rtol=1e-10, atol=1e-12)
        for a, b in zip(results[name][1], results["fixed"][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_pass_without_gradient_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teachers, loss_fn = tiny.student(), [LiveTeacher(tiny.teacher())], tiny.loss_fn()
    trained = tiny.student().train(tiny.batch(), loss_fn, teachers=teachers)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a gradient went through the head")

    monkeypatch.setattr(blocks.BlockedLoss, "_through_head", refuse)
    measured = student.train(tiny.batch(), loss_fn, teachers=teachers, eval_mode=True)
    assert measured["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    with pytest.raises(AssertionError, match="gradient"):
        student.train(tiny.batch(), loss_fn, teachers=teachers)
