"""The objectives of 2026: worked examples, settings and refusals; values and gradients are in `test_modes.py` too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from tests.losses.cases import make_batch, make_models, make_projection, run
from tests.losses.test_modes import compare, expected, settings_for


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("k", [1, 3, None])
def test_strict_compares_the_students_most_likely_shared_tokens(k: int | None, rest: bool, direction: str) -> None:
    batch, projection = make_batch(seed=3, one_to_one=True), make_projection(23, 31, seed=1)
    models = make_models(batch, seed=2)
    options: dict[str, Any] = {"strict_topk": k, "strict_rest": rest, "direction": direction}
    want = expected("strict", batch, models, projection, **options)
    compare(settings_for("strict", **options), batch, models, projection, want, "hidden")


def test_strict_teaches_nothing_outside_one_to_one_chunks_unless_it_is_asked_to() -> None:
    batch, projection = make_batch(seed=5), make_projection(23, 31)
    models = make_models(batch, seed=1)

    def losses(**cfg: Any) -> tuple[torch.Tensor, dict[str, float]]:
        fn = CrossTokenizerDistillationLossFn({"mode": "strict", "ce_loss_scale": 0.0, **cfg}, projections=[projection])
        loss, metrics = run(fn, batch, models)
        return loss, {name: float(pair[0]) for name, pair in metrics.items()}

    plain, figures = losses()
    spans, more = losses(span_weight=0.5)
    chunks = figures["chunks"]
    assert float(plain.detach()) == pytest.approx(figures["teacher_0/strict_kl"] / chunks)
    assert more["teacher_0/span_loss"] > 1
    assert float((spans - plain).detach()) == pytest.approx(0.5 * more["teacher_0/span_loss"] / chunks)
    assert 0 < figures["teacher_0/kept_mass_student"] <= figures["teacher_0/shared_mass_student"] < chunks


def test_a_mode_brings_its_own_direction_unless_one_is_named() -> None:
    config = CrossTokenizerDistillationLossConfig
    assert config(mode="strict").direction == "reverse"
    assert config(mode="strict", direction="forward").direction == "forward"
    assert config().direction == "forward"
    assert config(**config(mode="strict").model_dump()).direction == "reverse"
