"""``limbeck train --student ... --data ...``: a run file is chosen, left in the run folder, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limbeck.config import load_config
from tests.cli.command import run
from tests.test_api import folders  # noqa: F401

MORE = ("steps=2", "tensorboard_enabled=false", "progress=false")


@pytest.fixture
def place(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder with two tiny models and data, to work in."""
    for name in ("student", "teacher", "train.jsonl", "val.jsonl"):
        (tmp_path / name).symlink_to(folders / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAIR = ("train", "--student", "student", "--teacher", "teacher", "--data", "train.jsonl")


def steps(folder: str) -> list[int]:
    return [json.loads(line)["step"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_one_line_trains_and_the_same_line_goes_on(place: Path, capsys: Any) -> None:
    code, out, err = run(capsys, *PAIR, *MORE)
    assert code == 0, err
    folder = "runs/student-from-teacher"
    assert f"run folder: {folder}" in out
    file = Path(folder, "run.yaml").read_text()
    assert file.startswith("# limbeck train --student student --teacher teacher --data train.jsonl steps=2 ")
    assert load_config(f"{folder}/run.yaml")["data"]["holdout"] == 0.1
    before = steps(folder)
    assert max(before) == 2
    code, _, err = run(capsys, *PAIR, *MORE)
    assert code == 0, err
    assert "the run is complete with 2 steps" in err
    assert steps(folder) == before
    # the file that was left is the same run, too, and goes on with more steps
    code, _, err = run(capsys, "train", f"{folder}/run.yaml")
    assert code == 0, err
    assert "the run is complete with 2 steps" in err


def test_another_call_has_a_folder_of_its_own_unless_it_names_one(place: Path, capsys: Any) -> None:
    pair = ("train", "--student", "student", "--data", "train.jsonl", "--validation", "val.jsonl")
    for more in (MORE, ("steps=1", *MORE[1:])):
        code, _, err = run(capsys, *pair, *more)
        assert code == 0, err
    assert "'runs/student' holds another run; this one goes to 'runs/student-2'" in err
    assert max(steps("runs/student-2")) == 1
    assert "teacher" not in load_config("runs/student-2/run.yaml")
    code, _, err = run(capsys, *pair, *MORE, "--out", "runs/student-2")
    assert code == 1
    assert "'runs/student-2' holds another run (limbeck train --student student" in err
    assert "give another --out" in err


def test_a_dry_run_and_a_refused_call_leave_nothing(place: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, *PAIR, "--dry-run")
    assert code == 0, out
    assert run(capsys, *PAIR, "distillation.max_num_stepz=3")[0] == 1
    assert not Path("runs").exists()


def test_the_file_holds_the_settings_and_goes_by_its_own_log_dir(place: Path, capsys: Any) -> None:
    assert run(capsys, *PAIR, *MORE, "lr=1e-3", "log_dir=mine", "kl_loss_weight=0.5")[0] == 0
    found = load_config("mine/run.yaml")
    assert found["policy"]["optimizer"]["kwargs"] == {"lr": 1e-3}
    assert found["loss_fn"] == {"kl_loss_weight": 0.5}
    assert found["logger"]["log_dir"] == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a run file, a recipe's name (limbeck recipes list), or --student and --data"),
        (("--student", "student"), "--student is given without --data"),
        (("--data", "train.jsonl"), "--data is given without --student"),
        (("run.yaml", "--teacher", "teacher"), "--teacher goes with --student and --data"),
        (("run.yaml", "--student", "student", "--data", "train.jsonl"), "'run.yaml' is no setting"),
        (("--student", "student", "--data", "none.jsonl"), "'none.jsonl' does not exist"),
        (("--student", "./none", "--data", "train.jsonl"), "'./none'"),
    ],
)
def test_calls_that_name_too_little_or_too_much(place: Path, capsys: Any, words: tuple[str, ...], said: str) -> None:
    code, _, err = run(capsys, "train", *words)
    assert code == 1
    assert said in err
    assert not Path("runs").exists()


def test_a_student_from_scratch_has_a_rate_of_its_own(place: Path, capsys: Any) -> None:
    code, _, err = run(capsys, *PAIR, "--out", "drawn", "policy.init=random", *MORE)
    assert code == 0, err
    # beyond 3e-3 none was recorded, and so small a model was not trained
    assert load_config("drawn/run.yaml")["policy"]["optimizer"]["kwargs"]["lr"] == 3e-3
    assert "note: the learning rate is a guess" in err
    values = {**load_config("drawn/run.yaml"), "logger": {"log_dir": "other"}}
    del values["policy"]["optimizer"]
    Path("plain.yaml").write_text(json.dumps(values))
    code, _, err = run(capsys, "train", "plain.yaml", "--dry-run")
    assert code == 0, err
    assert "limbeck init would choose 0.003 (lr=0.003)" in err


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("data=3", "'data' is 3"),
        ("policy=3", "'policy' is 3"),
        ("teacher=[1]", "'teacher' is [1]"),
        ("steps=many", "'distillation.max_num_steps' is 'many'"),
        ("steps=-1", "'distillation.max_num_steps' is -1"),
        (f"steps={'9' * 400}", f"'distillation.max_num_steps' is {'9' * 50}"),
        (f"batch_size={'9' * 400}", f"'distillation.num_prompts_per_step' is {'9' * 50}"),
    ],
)
def test_a_section_of_another_kind_is_one_sentence(place: Path, capsys: Any, setting: str, part: str) -> None:
    code, _, err = run(capsys, *PAIR, setting)
    assert code == 1
    assert err.splitlines()[-1].startswith(f"limbeck: {part}")
    assert not Path("runs").exists()


def test_more_steps_than_there_are_records_end_with_the_last_pass(place: Path, capsys: Any) -> None:
    """The rate is that of the records that are read, not of the steps that are allowed."""
    rates = []
    for name, steps in (("few", "1"), ("many", "1000000")):
        code, _, err = run(capsys, *PAIR, "--out", name, *MORE[1:], "epochs=1", "batch_size=8", f"steps={steps}")
        assert code == 0, err
        rates.append(load_config(f"{name}/run.yaml")["policy"]["optimizer"]["kwargs"]["lr"])
    assert rates[0] == rates[1]


def test_a_run_file_that_is_a_link_to_itself(place: Path, capsys: Any) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    code, _, err = run(capsys, "train", "loop.yaml")
    assert code == 1
    assert "loop.yaml' cannot be read" in err
