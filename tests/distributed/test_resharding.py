"""Checkpoints do not depend on the layout: written under one, read under another, the run goes on as if alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.models.policy import Policy
from tests.distributed.cases import CASES, batch, loss_of, student_of, teachers_of, together
from tests.helpers.tiny import QWEN3

pytestmark = pytest.mark.slow

LAYOUTS = {"fsdp": {"fsdp": True}, "tensor": {"tensor_parallel_size": 2}, "context": {"context_parallel_size": 2}}
CASE = CASES["boundary_kl"]
TIED = CASES["same vocabulary"]
SETTINGS = {
    # a large eps: Adam's first steps would blow up the last bits of gradients that are almost zero
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}},
    "scheduler": [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {}},
        {"milestones": [2]},
    ],
}


def train(student: Policy, case: Any, layout: dict[str, Any], rows: tuple[int, ...]) -> list[float]:
    teachers = teachers_of(case, {key: value for key, value in layout.items() if key != "fsdp"})
    out = student.train(batch(case, rows), loss_of(case), teachers=teachers, mbs=4)
    # what the step made of the weights shows whether the optimizer's state arrived
    after = student.train(batch(case, rows), loss_of(case), teachers=teachers, mbs=4, eval_mode=True)
    return [out["loss"], out["grad_norm"], out["lr"], after["loss"]]


def save(student: Policy, folder: Path) -> None:
    student.save_checkpoint(folder / "weights", folder / "optimizer")


def resumed(case: Any, layout: dict[str, Any], folder: Path) -> Policy:
    return student_of(case, layout, SETTINGS, weights_path=folder / "weights", optimizer_path=folder / "optimizer")


def work(rank: int, world: int, root: str) -> dict[str, list[float]]:
    folder, out = Path(root), {}
    for name, layout in LAYOUTS.items():
        for kind, case in (("untied", CASE), ("tied", TIED)):
            rows = case.rows[rank] if name == "fsdp" else case.rows[0] + case.rows[1]
            student = student_of(case, layout, SETTINGS)
            train(student, case, layout, rows)
            save(student, folder / name / kind)
            again = resumed(case, layout, folder / name / kind)
            out[f"{name} to {name}, {kind}"] = train(again, case, layout, rows)
            again = resumed(case, layout, folder / "alone" / kind)
            out[f"alone to {name}, {kind}"] = train(again, case, layout, rows)
    rows = CASE.rows[rank]
    out["tensor to fsdp, untied"] = train(
        resumed(CASE, LAYOUTS["fsdp"], folder / "tensor" / "untied"), CASE, LAYOUTS["fsdp"], rows
    )
    return out


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]], dict[str, list[float]]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("resharding")
    expected = {}
    for kind, case in (("untied", CASE), ("tied", TIED)):
        student, rows = student_of(case, {}, SETTINGS), case.rows[0] + case.rows[1]
        train(student, case, {}, rows)
        save(student, folder / "alone" / kind)
        expected[kind] = train(student, case, {}, rows)
    return folder, expected, together(2, work, folder / "ranks", str(folder))[0]


def test_a_run_goes_on_under_another_layout(outcome: Any) -> None:
    _, expected, found = outcome
    assert len(found) == 13
    for name, numbers in found.items():
        assert numbers == pytest.approx(expected[name.split(", ")[1]], rel=1e-5), name


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_shards_resume_on_one_process(outcome: Any, layout: str, kind: str) -> None:
    folder, expected, _ = outcome
    case = CASE if kind == "untied" else TIED
    student = resumed(case, {}, folder / layout / kind)
    assert student.steps == 1
    assert train(student, case, {}, case.rows[0] + case.rows[1]) == pytest.approx(expected[kind], rel=1e-5)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_weights_are_a_plain_folder_from_any_layout(outcome: Any, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = outcome[0]
    for kind in ("untied", "tied"):
        found, expected = (
            AutoModelForCausalLM.from_pretrained(folder / name / kind / "weights") for name in (layout, "alone")
        )
        assert found.config.tie_word_embeddings is (kind == "tied")
        for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert QWEN3["tie_word_embeddings"]
