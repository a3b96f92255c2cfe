"""Adapters under sharded layouts: stored whole, resumed under any other layout, merged on export from each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from limbeck.errors import ConfigError
from limbeck.models.policy import Policy
from tests.distributed.cases import Case, batch, loss_of, student_of, teachers_of, together
from tests.helpers.tiny import QWEN3, config, tokenizer

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "tensor": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
}
CASE = Case(student=QWEN3)
SETTINGS = {
    "lora": {"r": 4, "alpha": 8.0},
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}},
}


def train(student: Policy, layout: dict[str, Any], rows: tuple[int, ...]) -> list[float]:
    teachers = teachers_of(CASE, {key: value for key, value in layout.items() if key != "fsdp"})
    out = student.train(batch(CASE, rows), loss_of(CASE), teachers=teachers, mbs=4)
    after = student.train(batch(CASE, rows), loss_of(CASE), teachers=teachers, mbs=4, eval_mode=True)
    return [out["loss"], out["grad_norm"], after["loss"]]


def resumed(layout: dict[str, Any], folder: Path) -> Policy:
    return student_of(CASE, layout, SETTINGS, weights_path=folder / "weights", optimizer_path=folder / "state")


def rows_of(name: str, rank: int) -> tuple[int, ...]:
    return CASE.rows[rank] if name == "fsdp" else CASE.rows[0] + CASE.rows[1]


def work(rank: int, world: int, root: str) -> dict[str, Any]:
    folder, out = Path(root), {}
    for name, layout in LAYOUTS.items():
        student = student_of(CASE, layout, SETTINGS)
        train(student, layout, rows_of(name, rank))
        student.save_checkpoint(folder / name / "weights", folder / name / "state")
        out[f"alone to {name}"] = train(resumed(layout, folder / "alone"), layout, rows_of(name, rank))
        held = [p for p in student.model.parameters() if p.requires_grad]
        assert student.optimizer is not None
        out[f"only adapters, {name}"] = len(held) == len(student.optimizer.state) == 2 * 2 * 7
    for start, end in (("tensor", "fsdp"), ("fsdp", "tensor")):
        out[f"{start} to {end}"] = train(resumed(LAYOUTS[end], folder / start), LAYOUTS[end], rows_of(end, rank))
    return out


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Any]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("adapters")
    student, rows = student_of(CASE, {}, SETTINGS), CASE.rows[0] + CASE.rows[1]
    train(student, {}, rows)
    student.save_checkpoint(folder / "alone" / "weights", folder / "alone" / "state")
    expected = train(student, {}, rows)
    return folder, expected, together(2, work, folder / "ranks", str(folder))[0]


def test_a_run_goes_on_under_another_layout(outcome: Any) -> None:
    _, expected, found = outcome
    for name, numbers in found.items():
        assert numbers == (True if name.startswith("only") else pytest.approx(expected, rel=1e-5)), name


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_shards_resume_on_one_process(outcome: Any, layout: str) -> None:
    folder, expected, _ = outcome
    student = resumed({}, folder / layout)
    assert student.steps == 1
    assert train(student, {}, CASE.rows[0] + CASE.rows[1]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_exports_are_merged(outcome: Any, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    found, expected = (AutoModelForCausalLM.from_pretrained(outcome[0] / n / "weights") for n in (layout, "alone"))
    plain = Policy(config(QWEN3), tokenizer(300), device="cpu", seed=0)
    moved = 0.0
    for (name, a), b, start in zip(
        found.named_parameters(), expected.parameters(), plain.model.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        moved = max(moved, float((a - start).detach().abs().max()))
    assert moved > 1e-3
    adapters = [
        load_file(outcome[0] / n / "weights" / "adapter" / "adapter_model.safetensors") for n in (layout, "alone")
    ]
    assert set(adapters[0]) == set(adapters[1])
    for name, value in adapters[0].items():
        torch.testing.assert_close(value, adapters[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_on_an_embedding_are_refused_with_shards() -> None:
    from limbeck.distributed.sharding import ShardedModel

    settings = config(lora={"r": 4, "target_modules": ["embed_tokens"]})
    policy = Policy(settings, tokenizer(300), device="cpu", seed=0)
    sharded = ShardedModel.__new__(ShardedModel)
    sharded.model = policy.model
    with pytest.raises(ConfigError, match=r"embed_tokens', a Embedding"):
        sharded._check_adapters()
