"""What the quality benchmark measures of a loss: the gradients of its parts, coverage, shared mass."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality.probes import Probed
from limbeck.losses import CrossTokenizerDistillationLossFn
from tests.losses.cases import run
from tests.losses.test_tree_kl import PAIRS, build, models_of, text_batch


def test_cosines_are_those_of_the_gradients_of_the_parts() -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair, samples=6)
    models = models_of(batch, pair)

    def shift(**settings: float) -> torch.Tensor:
        off = dict.fromkeys(("root_weight", "inner_student_weight", "inner_teacher_weight", "chunk_weight"), 0.0)
        loss, _ = run(build(pair, **{**off, **settings}), batch, models)
        return torch.autograd.grad(loss, models.hidden)[0].sum(0)

    probed = Probed(build(pair, ce_loss_scale=0.5))
    loss, _ = run(probed, batch, models)  # type: ignore[arg-type]
    plain, _ = run(build(pair, ce_loss_scale=0.5), batch, models)
    assert torch.equal(loss, plain)
    found = probed.figures()
    root, inner = shift(root_weight=1.0), shift(inner_student_weight=1.0)
    cosine = float(torch.cosine_similarity(root, inner, dim=0))
    assert found["teacher_0/cosine_root_inner_student"] == pytest.approx(cosine, abs=1e-9)
    assert found["teacher_0/norm_ratio_root_inner_student"] == pytest.approx(float(inner.norm() / root.norm()))
    assert -1 <= found["teacher_0/cosine_ce"] <= 1
    for share in ("strict_chunks", "shared_mass_student", "shared_mass_teacher"):
        assert 0 < found[f"teacher_0/{share}"] < 1
    assert isinstance(probed.loss, CrossTokenizerDistillationLossFn)
