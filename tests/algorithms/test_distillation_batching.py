"""The loop computes the same loss and gradients however a step's rows are laid out, and whoever the teachers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from limbeck.algorithms.caching import cache_teachers
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import merge
from tests.helpers import runs

# One plain gradient step: the change of the weights is the gradient.
GRADIENT = {
    "policy": {
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
        "scheduler": None,
        "max_grad_norm": None,
    },
    "distillation": {
        "num_prompts_per_step": 8,
        "max_num_steps": 1,
        "val_period": 0,
        "val_at_start": False,
        "val_at_end": False,
    },
    "checkpointing": {"save_period": 1},
}
BUDGET = {"enabled": True, "train_mb_tokens": 96, "logprob_mb_tokens": 96}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"train_micro_batch_size": 1},
    "three": {"train_micro_batch_size": 3},
    "all": {"train_micro_batch_size": 8},
    "dynamic": {"dynamic_batching": BUDGET},
    "packed": {"sequence_packing": BUDGET},
    "packed_spread": {"sequence_packing": {**BUDGET, "algorithm": "first_fit_decreasing"}},
    "padded": {"make_sequence_length_divisible_by": 16},
}


@pytest.fixture(scope="module")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stuff")
    runs.write_tokenizers(folder)
    runs.write_data(folder, train=16, val=7)
    return folder


def outcome(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metrics and weights after a run."""
    run_dir = run(runs.resolved(values))
    last = runs.rows(run_dir)[-1]
    weights = load_file(runs.checkpoint(run_dir, last["step"]) / "policy" / "weights" / "model.safetensors")
    return last, weights


def step(stuff: Path, run_dir: Path, **more: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The outcome of one gradient step with some settings changed."""
    values = merge(runs.settings(stuff, run_dir, **GRADIENT), more)
    if "teachers" in more:
        values.pop("teacher")
    return outcome(values)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for name in ("train/loss", "train/kl_loss", "train/ce_loss", "train/grad_norm"):
        assert found[0][name] == pytest.approx(expected[0][name], rel=tolerance, abs=tolerance), name
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name], value, rtol=0, atol=tolerance), name


def two_teachers(stuff: Path) -> list[dict[str, Any]]:
    """One with a tokenizer of its own, one with the student's."""
    return [runs.model(stuff, "teacher"), runs.model(stuff, "student")]


@pytest.fixture(scope="module")
def plain(stuff: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    return {
        "one": step(stuff, folder / "one"),
        "two": step(stuff, folder / "two", teachers=two_teachers(stuff)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_one_gradient(stuff, tmp_path, plain, layout):
    assert_close(step(stuff, tmp_path / "run", policy=LAYOUTS[layout]), plain["one"])


@pytest.mark.parametrize("layout", ["three", "dynamic", "packed"])
def test_layouts_give_one_gradient_with_two_teachers(stuff, tmp_path, plain, layout):
    found = step(stuff, tmp_path / "run", policy=LAYOUTS[layout], teachers=two_teachers(stuff))
    assert_close(found, plain["two"])
    assert {"train/teacher_0/kl_loss", "train/teacher_1/kl_loss"} <= set(found[0])


def test_the_gradient_is_not_zero(plain):
    assert plain["one"][0]["train/grad_norm"] > 0.1
    assert abs(plain["one"][0]["train/loss"] - plain["two"][0]["train/loss"]) > 1e-4


@pytest.mark.parametrize("layout", ["three", "packed"])
def test_two_updates_in_a_step(stuff, tmp_path, layout):
    updates = {"train_global_batch_size": 4}
    plain = step(stuff, tmp_path / "plain", policy=updates)
    assert_close(step(stuff, tmp_path / "other", policy={**updates, **LAYOUTS[layout]}), plain)


def test_two_steps_are_the_two_updates_of_one(stuff, tmp_path):
    """Two steps of four records are one step of eight in two updates.

    Rows are padded to the longest of their step, so the two runs multiply matrices of other widths, and a CPU may add
    those products in another order: equal within float32, not bit for bit.
    """
    updates = step(stuff, tmp_path / "updates", policy={"train_global_batch_size": 4})
    steps = {"num_prompts_per_step": 4, "max_num_steps": 2}
    halves = step(stuff, tmp_path / "halves", distillation=steps)
    first = step(stuff, tmp_path / "first", distillation={**steps, "max_num_steps": 1})
    for name, value in updates[1].items():
        assert torch.allclose(halves[1][name], value, rtol=0, atol=1e-5), name
    assert any((first[1][name] - value).abs().max() > 1e-2 for name, value in updates[1].items())


def test_joined_documents_are_one_update(stuff, tmp_path):
    """Records of several documents: all rows of a step belong to one update, whatever their number."""
    data = {"join_to_bytes": 100000, "shuffle": False}
    found = step(stuff, tmp_path / "joined", data=data, distillation={"num_prompts_per_step": 1})
    apart = step(stuff, tmp_path / "apart", data={"shuffle": False}, distillation={"num_prompts_per_step": 16})
    assert_close(found, apart)


@pytest.mark.parametrize(("kind", "tolerance"), [("topk", 5e-4), ("hidden", 1e-3)])
def test_a_cached_teacher_is_the_live_one(stuff, tmp_path, plain, kind, tolerance):
    teacher = {"cache": str(tmp_path / "cache"), "cache_kind": kind, "cache_k": 340}
    values = merge(runs.settings(stuff, tmp_path / "unused", **GRADIENT), {"teacher": teacher})
    (summary,) = cache_teachers(runs.resolved(values), say=lambda line: None)
    assert summary["documents"] == 16 + 7
    assert_close(step(stuff, tmp_path / "run", teacher=teacher), plain["one"], tolerance)


def test_loader_workers_change_nothing(stuff, tmp_path, plain):
    found = step(stuff, tmp_path / "run", data={"num_workers": 1})
    assert found[0] == plain["one"][0]


@pytest.mark.parametrize("layout", ["one", "packed"])
def test_a_model_taught_by_itself_stays_as_it_is(stuff, tmp_path, layout):
    folder = tmp_path / "model"
    values = runs.settings(stuff, tmp_path / "first", **GRADIENT)
    run(runs.resolved(values))
    (runs.checkpoint(tmp_path / "first", 1) / "policy" / "weights").rename(folder)
    again = {"model_name": str(folder), "logprob_batch_size": 3}
    values = runs.settings(stuff, tmp_path / "run", **GRADIENT)
    values["policy"] = {k: v for k, v in values["policy"].items() if k not in ("init", "model_overrides", "tokenizer")}
    values["policy"] |= {**again, **LAYOUTS[layout]}
    # another folder with the same tokens: what counts is the tokenizer's fingerprint, not its name
    values["teacher"] = {**again, "tokenizer": {"name": str(stuff / "student")}}
    values["loss_fn"]["ce_loss_scale"] = 0.0
    found = outcome(values)
    assert found[0]["train/loss"] == pytest.approx(0.0, abs=1e-9)
    assert found[0]["train/grad_norm"] == pytest.approx(0.0, abs=1e-6)
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.allclose(found[1][name], value, rtol=0, atol=1e-7), name
