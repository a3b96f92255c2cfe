"""``limbeck train --dry-run``: what would happen, everything that is wrong, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from limbeck.config import merge
from limbeck.errors import ConfigError, ExitCode
from limbeck.tokens import load_tokenizer
from limbeck.utils.files import model_path
from tests.helpers import runs
from tests.helpers.runs import limbeck, settings, write_run_file


@pytest.fixture(scope="module")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stuff")
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("a dry run reads no weights")

    monkeypatch.setattr("limbeck.models.loading.load_model", load)


def test_a_run_that_would_start(stuff: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", settings(stuff, tmp_path / "run"))
    code, out, said = limbeck("train", run_file, "--dry-run")
    assert code == 0, said
    assert "nothing is wrong" in out
    for line in (
        "begins at step 1",
        "student: (random llama), sequences of at most 48 tokens",
        "teacher: (random qwen3), sequences of at most 64 tokens",
        "data: 20 records, 7 to validate",
        "of the student's tokens have a counterpart",
        "the first 4 rows: ",
        "training: 8 steps, 5 of them an epoch",
        "memory: about ",
    ):
        assert line in said, (line, said)
    assert not (tmp_path / "run").exists()


def test_all_problems_at_once(stuff: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = {
        "policy": {"max_total_sequence_length": 4096},
        "teacher": {"tokenizer": {"name": "/nowhere/teacher"}},
        "data": {"train": "/nowhere/train.jsonl", "max_input_seq_length": 4096},
        "logger": {"log_dir": str(tmp_path / "file" / "run")},
    }
    run_file = write_run_file(tmp_path / "run.yaml", merge(settings(stuff, tmp_path / "run"), wrong))
    code, _, said = limbeck("train", run_file, "--dry-run")
    problems = [line for line in said.splitlines() if line.startswith("problem: ")]
    assert code == ExitCode.USAGE
    for part in ("run folder: ", "student has 256 positions", "/nowhere/teacher", "/nowhere/train.jsonl"):
        assert len([line for line in problems if part in line]) == 1, (part, problems)
    code, out, _ = limbeck("train", run_file, "--dry-run", "--json")
    assert code == ExitCode.USAGE
    assert len(json.loads(out)["problems"]) == len(problems)


def test_an_unusable_run_file_is_a_problem_too(stuff: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", settings(stuff, tmp_path / "run"))
    code, _, said = limbeck("train", run_file, "--dry-run", "policy.optimizer.kwargs.lr=fast")
    assert code == ExitCode.USAGE
    assert "kwargs.lr is 'fast'; give a number, such as 1e-5" in said


def test_fewer_records_than_a_step(stuff: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", settings(stuff, tmp_path / "run"))
    code, _, said = limbeck("train", run_file, "--dry-run", "distillation.num_prompts_per_step=64")
    assert code == ExitCode.USAGE
    assert "20 records are fewer than one step of 64" in said


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path, stuff: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="a run folder without a checkpoint"):
        model_path(tmp_path)
    for step in ("9", "10", "2.tmp"):
        weights = tmp_path / "checkpoints" / f"step_{step}" / "policy" / "weights"
        weights.mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step_10" / "policy" / "weights"
    assert model_path(tmp_path) == str(newest)
    load_tokenizer(stuff / "student").save_pretrained(newest)
    assert len(load_tokenizer(tmp_path)) == 300
    (tmp_path / "config.json").write_text("{}")
    assert model_path(tmp_path) == str(tmp_path)
    assert model_path("owner/name") == "owner/name"


def test_a_folder_with_a_gguf_file_alone_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_1.gguf").touch()
    assert model_path(tmp_path) == str(tmp_path / "m.Q4_1.gguf")
    (tmp_path / "m.Q8_0.gguf").touch()
    assert model_path(tmp_path) == str(tmp_path), "none of several is chosen"
    (tmp_path / "m.Q8_0.gguf").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert model_path(tmp_path) == str(tmp_path)
