"""What a run says when it starts, and how it ends before its time."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.loop import TrainingLoop
from limbeck.errors import ExitCode, StoppedEarly
from tests.helpers import runs
from tests.helpers.runs import limbeck, settings, write_run_file

STEPS = 6


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    """A shell's background jobs ignore the keyboard's signal, and so would the runs of these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that saves at its end alone."""
    folder = tmp_path_factory.mktemp("stops")
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    values = settings(folder, folder / "run", checkpointing={"save_period": 0})
    values["distillation"] |= {"max_num_steps": STEPS, "val_period": 3}
    return write_run_file(folder / "run.yaml", values)


@pytest.fixture(scope="module")
def started(run_file: Path) -> str:
    """What the whole run has said."""
    code, _, said = limbeck("train", run_file)
    assert code == 0, said
    return said


def signal_after(monkeypatch: pytest.MonkeyPatch, number: int, step: int, times: int = 1) -> None:
    """Let a signal arrive once a step is taken."""
    take = TrainingLoop._step

    def taken(self: TrainingLoop[Any], batch: object) -> None:
        take(self, batch)
        if self.run.state.total_steps == step:
            for _ in range(times):
                signal.raise_signal(number)

    monkeypatch.setattr(TrainingLoop, "_step", taken)


def test_every_stage_has_a_line_with_its_time(started: str, run_file: Path) -> None:
    begun = started[: started.index("the first step")]
    stages = ("starting", "tokenizers", "data", "tables of the loss", "loading the student", "loading the teacher")
    for stage in (*stages, "looking at how texts begin", "validating before training"):
        assert re.search(rf"^{stage}.*\d s$", begun, re.MULTILINE), (stage, begun)
    assert re.search(r"^the first step \.\.\. \d\.\d s$", started, re.MULTILINE)
    assert "\nbeginning at step 1 of 6\n" in begun


def test_the_configuration_is_told_in_a_few_lines(started: str, run_file: Path) -> None:
    lines = started.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("student "))
    last = next(number for number, line in enumerate(lines) if line.startswith("run folder "))
    assert 8 <= last - first + 1 <= 12
    assert next(line for line in lines if line.startswith("length ")).endswith("48 tokens; longer texts are cut")
    assert str(run_file.parent / "run") in lines[last]
    assert "config.yaml" in lines[last]
    assert (run_file.parent / "run" / "config.yaml").is_file()


def test_a_finished_run_says_so_before_anything_is_loaded(
    started: str, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("limbeck.algorithms.xtoken_off_policy_distillation.load_tokenizers", load)
    code, out, said = limbeck("train", run_file)
    assert code == 0, said
    assert "complete with 6 steps; nothing is left to do" in said
    assert "report:" in out
    monkeypatch.undo()
    # another configuration is none of a finished run's business
    code, _, said = limbeck("train", run_file, "-q", "loss_fn.temperature=2")
    assert code == 1
    assert "another configuration" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_saves_says_so_and_the_next_start_goes_on(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    folder = f"logger.log_dir={tmp_path}"
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signal_after(patch, number, 2)
        found, out, said = limbeck("train", run_file, folder)
    assert found == code, said
    assert said.splitlines()[-1] == (
        "limbeck: stopped at step 2 of 6; it is saved: run the same command again to go on"
    )
    assert "report:" in out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    found, _, said = limbeck("train", run_file, folder, "distillation.max_num_steps=3", "distillation.val_at_end=false")
    assert found == 0, said
    assert "\nresuming from step 2 of 3\n" in said


def test_without_checkpoints_both_the_end_and_the_next_start_say_why(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (f"logger.log_dir={tmp_path}", "checkpointing.enabled=false", "distillation.val_at_start=false")
    with monkeypatch.context() as patch:
        signal_after(patch, signal.SIGINT, 2)
        code, _, said = limbeck("train", run_file, *options)
    assert code == 130
    assert "nothing is saved, because checkpointing.enabled is false: the next start begins at step 1" in said
    code, _, said = limbeck(
        "train", run_file, *options, "distillation.max_num_steps=1", "distillation.val_at_end=false"
    )
    assert code == 0, said
    assert "beginning at step 1 of 1: an earlier run in this folder came to step 2 and left no checkpoint" in said


def test_a_second_interrupt_ends_the_run_at_once(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_after(monkeypatch, signal.SIGINT, 2, times=2)
    code, _, said = limbeck("train", run_file, f"logger.log_dir={tmp_path}", "distillation.val_at_start=false")
    assert code == 130
    assert said.splitlines()[-1] == "limbeck: ended at once, nothing was saved; the next start begins at step 1"


def test_an_interrupt_breaks_off_a_validation_and_saves(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate(self: TrainingLoop[Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr("limbeck.algorithms.xtoken_off_policy_distillation.OffPolicyLoop.validate", validate)
    code, _, said = limbeck("train", run_file, f"logger.log_dir={tmp_path}", "distillation.val_at_start=false")
    assert code == 130
    assert "stopped at step 3 of 6; it is saved" in said
    assert (tmp_path / "checkpoints" / "step_3").is_dir()


def test_an_interrupt_before_the_first_step_ends_at_once(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("limbeck.algorithms.xtoken_off_policy_distillation.load_tokenizers", load)
    code, _, said = limbeck("train", run_file, f"logger.log_dir={tmp_path / 'new'}")
    assert code == 130
    assert said.splitlines()[-1] == "limbeck: ended at once, nothing was saved; the next start begins at step 1"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_demo_that_is_stopped_prints_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    def stopped(folder: Path, **options: object) -> None:
        raise StoppedEarly("stopped at step 16 of 150; run the same command again to go on", interrupted=interrupted)

    monkeypatch.setattr("limbeck.demo.run_demo", stopped)
    code, out, said = limbeck("demo", "--out", tmp_path / "demo")
    assert code == (ExitCode.INTERRUPTED if interrupted else ExitCode.STOPPED_EARLY)
    assert out == ""
    line = f"the demo in {tmp_path / 'demo'} was stopped before its end; run the same command again to go on"
    assert said.splitlines()[-1] == f"limbeck: {line}"
    assert "step 16" not in said
