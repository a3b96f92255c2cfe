"""Cross-entropy and distillation by class of token, in passes without gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from limbeck.data.layout import aligned_chunks
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.blocks import CHUNK_KINDS
from limbeck.tokens.classes import TEXT_CLASSES
from tests.helpers import tiny
from tests.helpers.interpreter import interpreter_fault
from tests.losses.cases import make_models, run
from tests.losses.test_tree_kl import COARSE, FINE, projection_of, text_batch

PAIR = (FINE, COARSE)
CLASS_OF_ID = np.arange(FINE.size, dtype=np.uint8) % 3  # two classes have no token


@pytest.mark.parametrize("mode", ["tree_kl", "boundary_kl", "alm"])
@pytest.mark.parametrize("fast_path", ["off", "force"])
def test_the_classes_add_up(fast_path: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fast_path == "force":
        if (fault := interpreter_fault()) is not None:
            pytest.skip(fault)
        monkeypatch.setattr("limbeck.losses.fast.kernels.nodes.SEGMENTS", 128)
    batch = text_batch(PAIR, samples=3)
    models = make_models(batch, FINE.size, COARSE.size, dtype=torch.float32)
    options = {"mode": mode, "fast_path": fast_path, "temperature": 1.5}
    loss_fn = CrossTokenizerDistillationLossFn(options, projections=[projection_of(PAIR)])
    loss_fn.count_by_class(CLASS_OF_ID)
    with torch.no_grad():
        _, metrics = run(loss_fn, batch, models)
    for name in ("ce_loss", "teacher_0/kl_loss"):
        parts = [metrics[f"{name}/{kind}"] for kind in TEXT_CLASSES]
        assert [float(count) > 0 for _, count in parts] == [True, True, True, False, False]
        for i in (0, 1):
            assert sum(float(part[i]) for part in parts) == pytest.approx(float(metrics[name][i]), rel=1e-5)
    by_kind = [metrics[f"teacher_0/kl_loss/{kind}"] for kind in CHUNK_KINDS]
    assert sum(float(count) > 0 for _, count in by_kind) > 1
    for i in (0, 1):
        whole = float(metrics["teacher_0/kl_loss"][i])
        assert sum(float(part[i]) for part in by_kind) == pytest.approx(whole, rel=1e-5)
    layout = aligned_chunks(batch, 0)
    assert layout is not None
    kinds = 2 * (layout.student_count_C > 1).long() + (layout.teacher_count_C > 1)
    assert [float(count) for _, count in by_kind] == torch.bincount(kinds, minlength=4).tolist()
    ids = batch["input_ids"][:, 1:]
    targets = ids[torch.arange(ids.shape[1]) < batch["input_lengths"][:, None] - 1]
    counted = np.bincount(CLASS_OF_ID[targets.numpy()], minlength=3).tolist()
    assert [float(metrics[f"ce_loss/{kind}"][1]) for kind in TEXT_CLASSES[:3]] == counted
    _, trained = run(loss_fn, batch, models)
    assert "ce_loss/digits" not in trained
    assert "teacher_0/kl_loss/one_to_one" not in trained


def test_tables_follow_the_rows_to_their_device_without_a_teacher_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn = CrossTokenizerDistillationLossFn({}, projections=[])
    loss_fn.scale.to("meta")  # as if the rows were elsewhere
    moved: list[torch.device] = []
    monkeypatch.setattr(loss_fn, "to", moved.append)
    tiny.student().train(tiny.batch(), loss_fn, teachers=[], eval_mode=True)
    assert set(moved) == {torch.device("cpu")}
