"""A run ends when a metric of its validations no longer improves, and knows so after a kill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limbeck.algorithms.config import TraceMasterConfig
from limbeck.algorithms.observers.early_stopping import EarlyStopping, EarlyStoppingConfig
from limbeck.config import resolve
from limbeck.errors import ConfigError
from limbeck.report.run_page import write_report
from tests.gates import Gate
from tests.helpers import runs, trace_runs
from tests.helpers.runs import limbeck, refused, resolved, settings, start, weight_bytes, write_run_file


def looked_at(higher: bool = False) -> Any:
    """As much of a run as the observer looks at."""
    return SimpleNamespace(config=SimpleNamespace(checkpointing=SimpleNamespace(higher_is_better=higher)))


def seen(values: list[float | None], higher: bool = False, **own: Any) -> EarlyStopping:
    """An observer after validations with these values, 10 steps apart."""
    observer = EarlyStopping(EarlyStoppingConfig(metric="val/bpb", **own))
    for number, value in enumerate(values):
        means = {"loss": 1.0} | ({} if value is None else {"bpb": value})
        observer.on_validation(looked_at(higher), 10 * number, means)
    return observer


def test_what_improves_is_saved_and_what_does_not_ends_the_run() -> None:
    assert seen([2.0, 1.9, 1.8]).wants_checkpoint()
    waiting = seen([2.0, 1.9, 1.95, 1.9], patience=3)
    assert (waiting.wants_checkpoint(), waiting.stop_reason()) == (False, None)
    assert seen([2.0, 1.9, 1.95, 1.9, 1.91], patience=3).stop_reason() == (
        "val/bpb has not improved in 3 validations since step 10, where it was 1.9"
    )
    assert seen([2.0, 1.9, 1.95, 1.89, 1.91, 1.92], patience=3).stop_reason() is None
    assert seen([0.1, 0.2, 0.3], higher=True, patience=1).stop_reason() is None
    assert seen([0.3, 0.2], higher=True, patience=1).stop_reason() is not None


def test_an_improvement_is_larger_than_min_delta() -> None:
    small = seen([2.0, 1.99, 1.985], patience=2, min_delta=0.05)
    assert small.stop_reason() == (
        "val/bpb has not improved by more than 0.05 in 2 validations since step 0, where it was 2"
    )
    assert seen([2.0, 1.99, 1.94], patience=2, min_delta=0.05).stop_reason() is None


def test_what_is_no_number_does_not_improve() -> None:
    assert seen([2.0, float("nan"), None], patience=2).stop_reason() is not None
    assert seen([float("nan")], patience=1).stop_reason() == (
        "val/bpb has not improved in 1 validation since the start"
    )


def test_a_stored_state_is_that_of_its_metric() -> None:
    first = seen([2.0, 1.9, 1.95])
    stored = json.loads(json.dumps(first.state_dict()))
    second = EarlyStopping(first.config)
    second.load_state_dict(stored)
    assert second.state_dict() == first.state_dict()
    other = EarlyStopping(EarlyStoppingConfig(metric="val/loss"))
    other.load_state_dict(stored)
    assert other.waited == 0


def values(stuff: Path, run_dir: Path, own: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A run that is validated at every step."""
    found = settings(stuff, run_dir, checkpointing={"save_period": 0, "metric_name": None}, **more)
    found["distillation"] |= {"val_period": 1, "max_num_steps": 20, "early_stopping": own}
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"validation": None}}, "give data.validation"),
        ({"distillation": {"val_period": 0}}, "set distillation.val_period"),
        ({"distillation": {"early_stopping": {"metric": "train/loss"}}}, "by train/loss,"),
        ({"checkpointing": {"metric_name": "val/loss"}}, "'val/bpb' and checkpointing.metric_name 'val/loss'"),
        ({"distillation": {"early_stopping": {"patience": 0}}}, "early_stopping.patience"),
    ],
)
def test_what_cannot_work_is_refused(stuff: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    plain = values(stuff, tmp_path, {"metric": "val/bpb"})
    for section, keys in changes.items():
        plain[section] = {**plain[section], **keys}
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolved(plain)


def test_one_metric_ranks_checkpoints_and_ends_the_run(stuff: Path, tmp_path: Path) -> None:
    config = resolved(values(stuff, tmp_path, {}))
    assert (config.distillation.early_stopping.metric, config.checkpointing.metric_name) == ("val/bpb", "val/bpb")
    again = resolved(config.model_dump(mode="json"))
    assert again == config
    named = resolved({**values(stuff, tmp_path, {}), "checkpointing": {"metric_name": "val:loss"}})
    assert named.distillation.early_stopping.metric == "val/loss"
    traces = trace_runs.settings(tmp_path, distillation={"early_stopping": {}, "val_period": 1})
    with pytest.raises(ConfigError, match=r"early_stopping\.metric"):
        resolve(TraceMasterConfig, traces)


@pytest.mark.slow
def test_a_run_ends_early_says_so_and_is_complete(stuff: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", values(stuff, tmp_path / "run", {"patience": 2, "min_delta": 9}))
    code, _, said = limbeck("train", run_file)
    assert code == 0, said
    line = (
        "the run ended early at step 2 of 20: val/bpb has not improved by more than 9 in 2 validations since step 0, "
        "where it was"
    )
    assert line in said
    assert "; the best checkpoint is step_2" in said
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()
    assert "The run ended early at step 2 of 20" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    code, _, said = limbeck("train", run_file)
    assert code == 0, said
    assert "complete with 2 steps; nothing is left to do (it ended early: val/bpb has not improved" in said
    # more patience: it goes on
    code, _, said = limbeck("train", run_file, "distillation.early_stopping.patience=3")
    assert code == 0, said
    assert "ended early at step 3 of 20" in said


@pytest.mark.slow
def test_a_metric_with_a_typing_error_ends_the_run_before_its_first_step(stuff: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", values(stuff, tmp_path / "run", {"metric": "val/bqb"}))
    assert "which no validation of this run measures" in refused("train", run_file, "-q")


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_step_with_the_same_weights(stuff: Path, tmp_path: Path) -> None:
    dropout = {"policy": {"model_overrides": {"attention_dropout": 0.1}}}
    own = values(stuff, tmp_path / "whole", {"patience": 3, "min_delta": 0.05}, **dropout)
    # learns at first, and then stands still
    own["policy"]["scheduler"] = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 3, "gamma": 0.0}}
    run_file = write_run_file(tmp_path / "run.yaml", own)
    code, _, said = limbeck("train", run_file, "-q")
    assert code == 0, said
    end = json.loads((tmp_path / "whole" / "end.json").read_text())
    assert 3 <= end["step"] < 20
    kept = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert len(kept) > 1
    broken = tmp_path / "broken"
    for number, step in enumerate((2, end["step"])):
        gate = Gate(tmp_path / f"gate_{number}")
        process = start("train", run_file, "-q", f"logger.log_dir={broken}", hold=(gate, "row written", step))
        process.kill()
        process.join()
    assert limbeck("train", run_file, "-q", f"logger.log_dir={broken}")[0] == 0
    assert json.loads((broken / "end.json").read_text()) == end
    assert weight_bytes(broken, end["step"]) == weight_bytes(tmp_path / "whole", end["step"])
    assert runs.rows(broken) == runs.rows(tmp_path / "whole")
    assert sorted(path.name for path in (broken / "checkpoints").iterdir()) == kept
