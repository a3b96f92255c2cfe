"""Runs that are killed, stopped, continued or continued wrongly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from limbeck.errors import ExitCode
from tests.gates import Gate, Place
from tests.helpers.runs import (
    checkpoint,
    leftovers,
    limbeck,
    refused,
    rows,
    settings,
    start,
    weight_bytes,
    write_data,
    write_run_file,
)

STEPS = 12
# dropout draws from the global generator in every step, so a resume that loses its place there shows
DROPOUT = {"policy": {"model_overrides": {"attention_dropout": 0.1}}}


@pytest.fixture(scope="module")
def whole(stuff: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run file and the folder of its uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    values = settings(stuff, folder / "run", **DROPOUT, checkpointing={"save_period": 2, "keep_top_k": 2})
    values["distillation"]["max_num_steps"] = STEPS
    run_file = write_run_file(folder / "run.yaml", values)
    code, out, err = limbeck("train", run_file, "-q")
    assert code == 0, err
    assert "run folder" in out
    return run_file, folder / "run"


def assert_same(broken: Path, uninterrupted: Path) -> None:
    assert weight_bytes(broken, STEPS) == weight_bytes(uninterrupted, STEPS)
    assert rows(broken) == rows(uninterrupted)
    assert (broken / "skipped.json").read_bytes() == (uninterrupted / "skipped.json").read_bytes()
    assert leftovers(broken) == []
    kept = [sorted(p.name for p in (run / "checkpoints").iterdir()) for run in (broken, uninterrupted)]
    assert kept[0] == kept[1]


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else -1


def saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("tmp_step_*"))


def test_kills_do_not_change_a_bit(whole, tmp_path):
    run_file, uninterrupted = whole
    run_dir = tmp_path / "run"
    moments: list[tuple[Place, int, Any]] = [
        ("row written", 1, lambda: steps_done(run_dir) == 1),
        ("save begun", 2, lambda: saving(run_dir)),
        ("row written", 5, lambda: steps_done(run_dir) == 5),
        ("save filled", 6, lambda: saving(run_dir) and checkpoint(run_dir, 4).exists()),
    ]
    for number, (place, step, is_now) in enumerate(moments):
        gate = Gate(tmp_path / f"gate_{number}")
        process = start("train", run_file, "-q", f"logger.log_dir={run_dir}", hold=(gate, place, step))
        assert is_now()
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert limbeck("train", run_file, "-q", f"logger.log_dir={run_dir}")[0] == 0
    assert_same(run_dir, uninterrupted)


def test_sigterm_saves_and_a_resume_goes_on(whole, tmp_path):
    run_file, uninterrupted = whole
    run_dir = tmp_path / "run"
    # nothing but the signal would save before the end
    options = ("-q", f"logger.log_dir={run_dir}", "checkpointing.save_period=0")
    gate = Gate(tmp_path / "gate")
    process = start("train", run_file, *options, hold=(gate, "row written", 3))
    os.kill(process.pid, signal.SIGTERM)
    gate.open()
    process.join()
    assert process.exitcode == ExitCode.STOPPED_EARLY
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert 3 <= int(saved.name.removeprefix("step_")) < STEPS
    assert rows(run_dir) == rows(uninterrupted)[: len(rows(run_dir))]
    assert limbeck("train", run_file, *options)[0] == 0
    assert weight_bytes(run_dir, STEPS) == weight_bytes(uninterrupted, STEPS)
    assert rows(run_dir) == rows(uninterrupted)


def test_sigterm_means_what_it_meant_before_a_run(whole, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run_file, _ = whole
    limbeck("train", run_file, "-q", f"logger.log_dir={tmp_path}", "distillation.max_num_steps=1")
    assert signal.getsignal(signal.SIGTERM) is before


def test_more_steps_continue_a_finished_run(whole, tmp_path):
    run_file, uninterrupted = whole
    # 5 is an epoch's end, where no position of the loader is stored; 7 lies within one
    for first in (5, 7):
        run_dir = tmp_path / str(first)
        options = ("-q", f"logger.log_dir={run_dir}", "distillation.val_at_end=false")
        assert limbeck("train", run_file, *options, f"distillation.max_num_steps={first}")[0] == 0
        assert (run_dir / "checkpoints" / f"step_{first}").is_dir()
        assert limbeck("train", run_file, *options)[0] == 0
        assert weight_bytes(run_dir, STEPS) == weight_bytes(uninterrupted, STEPS)
        assert [r["step"] for r in rows(run_dir)] == list(range(STEPS + 1))


def test_a_complete_run_says_so_and_changes_nothing(whole):
    run_file, run_dir = whole
    before = rows(run_dir, clocks=True), weight_bytes(run_dir, STEPS)
    code, _, err = limbeck("train", run_file, "-q")
    assert code == 0
    assert f"complete with {STEPS} steps" in err
    assert (rows(run_dir, clocks=True), weight_bytes(run_dir, STEPS)) == before


def test_a_folder_of_another_run_is_refused(whole):
    run_file, run_dir = whole
    before = rows(run_dir, clocks=True)
    changes = ("policy.optimizer.kwargs.lr=0.5", "loss_fn.mode=p_kl")
    line = refused("train", run_file, "-q", *changes)
    assert "policy.optimizer.kwargs.lr: 0.01 -> 0.5" in line
    assert "loss_fn.mode: 'boundary_kl' -> 'p_kl'" in line
    assert "logger.log_dir" in line
    assert rows(run_dir, clocks=True) == before


@pytest.mark.parametrize("steps", [5, 6])
@pytest.mark.parametrize("changed", ["train", "validation"])
def test_changed_data_are_refused(stuff, tmp_path, steps, changed):
    # after 5 steps of 4 records an epoch of 20 is over; 6 lies within the second
    write_data(tmp_path)
    values = settings(stuff, tmp_path / "run")
    values["data"] |= {"train": str(tmp_path / "train.jsonl"), "validation": str(tmp_path / "val.jsonl")}
    run_file = write_run_file(tmp_path / "run.yaml", values)
    options = ("-q", "checkpointing.keep_top_k=null")
    assert limbeck("train", run_file, *options, f"distillation.max_num_steps={steps}")[0] == 0
    path = tmp_path / ("train.jsonl" if changed == "train" else "val.jsonl")
    path.write_text(path.read_text(encoding="utf-8").replace("the", "der", 1), encoding="utf-8")
    line = refused("train", run_file, *options)
    assert f"data.{changed}" in line


def test_checkpoints_are_ranked_by_their_own_validation(stuff, tmp_path):
    values = settings(stuff, tmp_path / "run")
    values["checkpointing"] = {"save_period": 1, "keep_top_k": 1, "metric_name": "val/bpb"}
    run_file = write_run_file(tmp_path / "run.yaml", values)
    limbeck("train", run_file, "-q", "distillation.max_num_steps=7", "distillation.val_at_end=false")
    # validated at 4 alone: that one is the best, 7 the latest; what lies between was never measured
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_4", "step_7"]
    infos = [checkpoint(tmp_path / "run", step) / "training_info.json" for step in (4, 7)]
    assert ["val_loss" in json.loads(info.read_text()) for info in infos] == [True, False]
