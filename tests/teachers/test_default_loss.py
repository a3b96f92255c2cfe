"""The default loss with every kind of teacher and of training: what a user gets who sets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from tests.golden.cases import LAYOUTS, StepCase, _play_steps

MODE = CrossTokenizerDistillationLossConfig().mode
PARTS = ("root_kl", "inner_student_kl", "inner_teacher_kl", "chunk_kl", "uncovered_mass", "cell_error")
LORA = {"lora": {"r": 4, "alpha": 8, "target_modules": "all-linear"}}


def step(folder: Path, **case: Any) -> dict[str, Any]:
    """Figures of one step; cross-entropy has weight 1, so that the loss is not the comparison alone."""
    made = StepCase({"mode": MODE, "ce_loss_scale": 1.0}, **{"rows": (0, 1, 2), "steps": 1, **case})
    # teachers that are not here score in float64
    (found,), _ = _play_steps(made, "float64", folder)
    return found


def part(found: dict[str, Any], name: str) -> tuple[float, float]:
    value, count = found[f"metrics/teacher_0/{name}"]
    return float(value), float(count)


def test_it_is_the_best_of_the_measured_ones() -> None:
    assert MODE == "tree_kl"


@pytest.mark.parametrize("source", ["hidden", "topk", "server"])
def test_teachers_that_are_not_here(tmp_path: Path, source: str) -> None:
    live, far = step(tmp_path), step(tmp_path, source=source)
    for name in PARTS:
        (here, count), (there, same) = part(live, name), part(far, name)
        assert same == count, name
        if source == "hidden":  # stored as bfloat16
            assert there == pytest.approx(here, rel=3e-2, abs=1e-4), name
        elif name == "root_kl":  # a list has fewer buckets, and no comparison gets larger by joining some
            assert 0.3 * here < there < 1.01 * here
    assert far["loss"] == pytest.approx(live["loss"], rel=0.15)


@pytest.mark.parametrize(
    ("plain", "case"),
    [
        ({"policy": {**LORA, **LAYOUTS["rows of 4"]}}, {"policy": {**LORA, **LAYOUTS["packed"]}}),
        ({}, {"teachers": ("cross", "same")}),
    ],
    ids=["LoRA, packed", "two teachers"],
)
def test_other_ways_of_training(tmp_path: Path, plain: dict[str, Any], case: dict[str, Any]) -> None:
    plain, found = step(tmp_path, **plain), step(tmp_path, **case)
    assert found["grad_norm"] > 0
    for name in PARTS:
        assert part(found, name) == pytest.approx(part(plain, name), rel=1e-4, abs=1e-5), name
