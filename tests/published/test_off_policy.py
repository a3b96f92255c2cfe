"""What the published page of off-policy distillation states: configuration, state, set-up, loop and validation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import NotRequired, get_type_hints

from limbeck.algorithms import xtoken_off_policy_distillation as xtoken
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.config import MasterConfig, OffPolicyDistillationConfig
from limbeck.config import merge
from limbeck.errors import ConfigError, StoppedEarly
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy, PolicyConfig, published_metrics
from limbeck.teachers.live import LiveTeacher
from limbeck.utils import CheckpointManager, Logger, Timer
from limbeck.utils.checkpoint import CheckpointingConfig
from tests.helpers import runs

STATE = "current_epoch current_step total_steps consumed_samples total_valid_tokens"


# ---- names and types -------------------------------------------------------------------------------------------------


def test_keys_beside_the_students_sequence_are_a_frozen_set() -> None:
    keys = xtoken.XTOKEN_NON_STUDENT_SEQ_KEYS
    assert isinstance(keys, frozenset)
    assert all(isinstance(key, str) for key in keys)
    assert {"teacher_input_ids", "teacher_token_mask", "alignment_pair_valid", "alignment_teacher_chunk_id"} <= keys
    assert not keys & {"input_ids", "token_mask", "alignment_student_chunk_id"}


def test_the_settings_of_the_loop() -> None:
    fields = OffPolicyDistillationConfig.model_fields
    for name in ("num_prompts_per_step", "max_num_steps", "max_num_epochs", "seed", "val_period"):
        assert fields[name].annotation is int
    for name in ("val_at_start", "val_at_end"):
        assert fields[name].annotation is bool


def test_the_state_of_a_run() -> None:
    kinds = get_type_hints(xtoken.OffPolicyDistillationSaveState, include_extras=True)
    assert {name: kinds[name] for name in STATE.split()} == dict.fromkeys(STATE.split(), int)
    assert kinds["val_loss"] == NotRequired[float]


def test_the_state_of_a_run_that_begins() -> None:
    state = xtoken._default_off_policy_distillation_save_state()
    assert {name: state[name] for name in STATE.split()} == dict.fromkeys(STATE.split(), 0)  # type: ignore[literal-required]
    assert "val_loss" not in state


def test_the_sections_of_a_configuration() -> None:
    assert issubclass(MasterConfig, BaseModel)
    kinds = {
        "policy": PolicyConfig,
        "loss_fn": CrossTokenizerDistillationLossConfig,
        "distillation": OffPolicyDistillationConfig,
        "checkpointing": CheckpointingConfig,
    }
    assert {name: MasterConfig.model_fields[name].annotation for name in kinds} == kinds
    assert {"teacher", "data", "logger", "cluster"} <= MasterConfig.model_fields.keys()


def test_the_orders_of_arguments() -> None:
    orders = {
        xtoken.setup: "master_config student_tokenizer teacher_tokenizer train_dataset val_dataset",
        xtoken.xtoken_off_policy_distillation_train: (
            "student_policy teacher_policy dataloader val_dataloader loss_fn logger checkpointer "
            "off_policy_distillation_state master_config"
        ),
        xtoken.validate: "student_policy teacher_policy val_dataloader loss_fn master_config timer",
    }
    for function, names in orders.items():
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(names.split())] == names.split()
    assert inspect.signature(xtoken.validate).parameters["timer"].default is None


# ---- runs ------------------------------------------------------------------------------------------------------------


def parts(stuff: Path, run_dir: Path, **more: Any) -> tuple[Any, ...]:
    """What ``setup`` gives, by the published arguments."""
    values = runs.settings(stuff, run_dir)
    values["distillation"] |= {"max_num_steps": 3, "val_period": 0, "val_at_start": False, "val_at_end": False}
    config = runs.resolved(merge(values, more))
    student, teachers = load_tokenizers(config)
    train, val = load_datasets(config)
    return xtoken.setup(config, student, teachers[0], train, val)


def test_set_up_gives_nine_things_in_order(stuff: Path, tmp_path: Path) -> None:
    found = parts(stuff, tmp_path / "run")
    kinds = (
        *(Policy, Policy, StatefulDataLoader, StatefulDataLoader, CrossTokenizerDistillationLossFn),
        *(Logger, CheckpointManager, dict, MasterConfig),
    )
    assert len(found) == 9
    assert all(isinstance(value, kind) for value, kind in zip(found, kinds, strict=True))
    found[5].close()


@pytest.mark.parametrize("validation", ["val.jsonl", None])
def test_the_validation_loader_goes_by_the_data_not_by_the_gates(
    stuff: Path, tmp_path: Path, validation: str | None
) -> None:
    data = {"validation": None if validation is None else str(stuff / validation)}
    found = parts(stuff, tmp_path / "run", data=data, checkpointing={"metric_name": None})
    assert (found[3] is None) == (validation is None)
    found[5].close()


def test_a_run_by_the_published_calls(stuff: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is pulled, the teacher reads its own ids, the student takes one step; the state counts."""
    student, teacher, loader, val_loader, loss, logger, checkpointer, state, config = parts(stuff, tmp_path / "run")
    order: list[str] = []
    before = {name: p.clone() for name, p in teacher.model.named_parameters()}
    monkeypatch.setattr(student.trainer, "step", _counted(order, "step", student.trainer.step))
    monkeypatch.setattr(LiveTeacher, "signal", _counted(order, "teacher", LiveTeacher.signal))
    monkeypatch.setattr(student, "train", _counted(order, "train", student.train))
    result = xtoken.xtoken_off_policy_distillation_train(
        student, teacher, loader, val_loader, loss, logger, checkpointer, state, config
    )
    assert result is None
    first = order.index("train")  # before it both are compared on the first records
    assert order[first:].count("train") == order[first:].count("step") == student.steps == 3
    assert [name for name in order[first:] if name != "step"][:2] == ["train", "teacher"]
    assert (state["total_steps"], state["consumed_samples"]) == (3, 12)
    assert state["total_valid_tokens"] > 0
    assert "val_loss" not in state
    for name, p in teacher.model.named_parameters():
        assert torch.equal(p, before[name]), "a teacher is not trained"


def _counted(order: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **more: Any) -> Any:
        order.append(name)
        return call(*args, **more)

    return counted


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"val_period": 2}, [2]),
        ({"val_at_start": True}, [0]),
        ({"val_at_end": True}, [3]),
        ({}, []),
    ],
    ids=["period", "start", "end", "never"],
)
def test_when_a_run_is_validated(stuff: Path, tmp_path: Path, settings: dict[str, Any], steps: list[int]) -> None:
    values = runs.settings(stuff, tmp_path / "run", checkpointing={"metric_name": None})
    gates = {"max_num_steps": 3, "val_period": 0, "val_at_start": False, "val_at_end": False}
    values["distillation"] |= {**gates, **settings}
    xtoken.run(runs.resolved(values))
    rows = runs.rows(tmp_path / "run")
    assert [row["step"] for row in rows if "val/bpb" in row] == steps


@pytest.mark.parametrize(("limits", "steps"), [((3, 100), 3), ((100, 2), 10)], ids=["steps", "epochs"])
def test_a_run_ends_by_steps_or_by_epochs(stuff: Path, tmp_path: Path, limits: tuple[int, int], steps: int) -> None:
    values = runs.settings(stuff, tmp_path / "run", data={"validation": None}, checkpointing={"metric_name": None})
    values["distillation"] |= {"max_num_steps": limits[0], "max_num_epochs": limits[1], "val_period": 0}
    xtoken.run(runs.resolved(values))
    assert runs.rows(tmp_path / "run")[-1]["step"] == steps


def test_the_seed_decides_the_order_of_records(stuff: Path, tmp_path: Path) -> None:
    seen = []
    for number, seed in enumerate((5, 5, 6)):
        found = parts(stuff, tmp_path / str(number), distillation={"seed": seed})
        seen.append([list(batch["idx"]) for batch in found[2]])
        found[5].close()
    assert seen[0] == seen[1] != seen[2]
    assert all(len(rows) == 4 for rows in seen[0]), "num_prompts_per_step records"


def test_a_deadline_saves_and_says_so(stuff: Path, tmp_path: Path) -> None:
    """The published loop returns; ours raises, so that a script that goes on does not take the run for finished."""
    student, teacher, *rest = parts(stuff, tmp_path / "run", checkpointing={"checkpoint_must_save_by": "00:00:00:00"})
    with pytest.raises(StoppedEarly):
        xtoken.xtoken_off_policy_distillation_train(student, teacher, *rest)
    assert 0 < student.steps < 3
    assert rest[4].latest() is not None


# ---- validate --------------------------------------------------------------------------------------------------------


def test_validation_takes_the_path_of_training_without_a_step(stuff: Path, tmp_path: Path) -> None:
    student, teacher, _, val_loader, loss, logger, _, _, config = parts(stuff, tmp_path / "run")
    before = {name: p.clone() for name, p in student.model.named_parameters()}
    found = xtoken.validate(student, teacher, val_loader, loss, config)
    assert isinstance(found, tuple)
    metrics, timings = found
    assert isinstance(metrics, dict)
    assert timings["validation"] > 0
    assert student.steps == 0
    for name, p in student.model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
    timer = Timer()
    again, own = xtoken.validate(student, teacher, val_loader, loss, config, timer=timer)
    assert again == metrics
    assert own.keys() == timings.keys()
    assert timer.get_elapsed("validation")
    logger.close()


def test_validation_gives_sums_and_counts_of_which_means_are_made(stuff: Path, tmp_path: Path) -> None:
    student, teacher, _, val_loader, loss, logger, _, _, config = parts(stuff, tmp_path / "run")
    metrics, _ = xtoken.validate(student, teacher, val_loader, loss, config)
    assert all(isinstance(value, tuple) and len(value) == 2 for value in metrics.values())
    means = published_metrics(metrics, loss)
    for name in ("kl_loss", "ce_loss"):
        total, count = metrics[name]
        assert means[name] == pytest.approx(total / count)
    (batch,) = [b for b in val_loader if b.size == 3][:1]
    one = student.train(batch, loss, teachers=xtoken.as_teachers(teacher), eval_mode=True)["metrics"]
    assert set(one) <= set(metrics), "what a training step gives"
    logger.close()


def test_a_tokenizer_for_every_teacher_of_the_configuration(stuff: Path, tmp_path: Path) -> None:
    config = runs.resolved(runs.settings(stuff, tmp_path / "run"))
    student, teachers = load_tokenizers(config)
    with pytest.raises(ConfigError, match="teacher tokenizers"):
        xtoken.setup(config, student, [*teachers, *teachers], *load_datasets(config))
