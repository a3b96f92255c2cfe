"""``limbeck init``: what it writes can be trained, what it is told is looked at, what is there is never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from limbeck.algorithms.build import load_datasets, make_loaders
from limbeck.algorithms.config import MasterConfig
from limbeck.config import load_config, resolve
from limbeck.errors import DataError
from tests.cli.command import run
from tests.helpers import runs

CHAT = {"prompt": "Two and two?", "completion": "Four."}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two model folders (tokenizer and configuration) and data."""
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    for name, positions in (("student", 256), ("teacher", 128)):
        (tmp_path / name / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_writes_is_a_run_file_with_comments(place: Path, capsys) -> None:
    options = ("--student", "student", "--teacher", "teacher", "--data", "train.jsonl", "--validation", "val.jsonl")
    code, out, err = run(capsys, "init", "mine.yaml", *options)
    assert (code, err) == (0, "")
    assert "limbeck train mine.yaml" in out
    config = resolve(MasterConfig, load_config("mine.yaml"))
    assert config.policy.model_name == "student"
    assert config.teacher is not None
    assert config.data.mode == "text"
    # the shorter of both models' limits, and one pass over the twenty records
    assert config.policy.max_total_sequence_length == config.teacher.max_total_sequence_length == 128
    assert config.distillation.max_num_steps == 20 // config.distillation.num_prompts_per_step
    assert config.logger.log_dir == "runs/mine"
    text = Path("mine.yaml").read_text()
    assert "one pass over 20 records" in text
    assert "two tokenizers" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_chat_data_and_one_tokenizer_are_noticed(place: Path, capsys) -> None:
    options = ("--student", "student", "--teacher", "student", "--data", "chat.jsonl")
    code, _, err = run(capsys, "init", *options)
    assert code == 0
    assert load_config("run.yaml")["data"]["mode"] == "chat"
    # no more records to a step than there are
    assert load_config("run.yaml")["distillation"]["num_prompts_per_step"] == 1
    assert "one tokenizer" in Path("run.yaml").read_text()
    assert "the student's tokenizer has no chat template: set policy.tokenizer.chat_template" in err
    assert "without data.validation" in err


def test_a_hub_id_is_taken_at_its_word_and_no_teacher_is_cross_entropy(place: Path, capsys) -> None:
    code, _, err = run(capsys, "init", "--student", "owner/name", "--data", "train.jsonl")
    assert code == 0
    assert "'owner/name' is taken for a hub id" in err
    assert "teacher" not in load_config("run.yaml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--student", "student"), "--data is missing"),
        (("--data", "train.jsonl"), "--student is missing"),
        (("--student", "./none", "--data", "train.jsonl"), "there is no model at './none'"),
        (("--student", ".", "--data", "train.jsonl"), "holds neither config.json nor a .gguf file"),
        (("--student", "student", "--data", "none.jsonl"), "'none.jsonl' does not exist"),
    ],
)
def test_bad_answers_are_one_line_and_write_nothing(place: Path, capsys, options: tuple[str, ...], said: str) -> None:
    code, out, err = run(capsys, "init", *options)
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not list(place.glob("*.yaml"))
    assert not list(place.glob(".*"))


def test_a_file_that_is_there_stays_unless_told(place: Path, capsys) -> None:
    Path("run.yaml").write_text("mine")
    options = ("--student", "student", "--data", "train.jsonl")
    code, _, err = run(capsys, "init", *options)
    assert (code, "--yes" in err, Path("run.yaml").read_text()) == (1, True, "mine")
    assert run(capsys, "init", "--yes", *options)[0] == 0
    assert "policy:" in Path("run.yaml").read_text()


def test_on_a_terminal_it_asks_until_answers_can_be_used(place: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text("mine")
    answers = iter(["./none", "student", "none", "none.jsonl", "train.jsonl val.jsonl"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question: "replace" in question)
    monkeypatch.setattr("typer.prompt", lambda question: next(answers))
    code, _, err = run(capsys, "init")
    assert code == 0
    assert "there is no model at './none'" in err
    assert load_config("run.yaml")["data"]["train"] == ["train.jsonl", "val.jsonl"]


def test_a_text_file_becomes_paragraphs(place: Path, capsys) -> None:
    Path("book.txt").write_text("\n\n".join(f"Paragraph {n}." for n in range(24)))
    assert run(capsys, "init", "--student", "student", "--data", "book.txt")[0] == 0
    config = resolve(MasterConfig, load_config("run.yaml"))
    assert config.data.split_documents == "blank_lines"
    assert config.distillation.max_num_steps == 24 // config.distillation.num_prompts_per_step
    train, _ = load_datasets(config)
    assert len(train) == 24
    Path("long.txt").write_text("One line of a long chapter.\n" * 4000)
    assert run(capsys, "init", "--student", "student", "--data", "long.txt", "--yes")[0] == 0
    long = resolve(MasterConfig, load_config("run.yaml"))
    assert long.distillation.max_num_steps == len(load_datasets(long)[0]) // long.distillation.num_prompts_per_step > 1
    config.data.split_documents = "file"
    whole, _ = load_datasets(config)
    with pytest.raises(DataError, match=r"1 records is smaller than one global batch of .*split_documents: blank"):
        make_loaders(config, None, whole, None, val_collator=None)
