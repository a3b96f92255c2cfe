"""``limbeck init``: what it writes can be trained, what it is told is looked at, what is there is never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from limbeck.algorithms.build import load_datasets, make_loaders
from limbeck.algorithms.config import MasterConfig
from limbeck.config import load_config, parse_yaml, resolve
from limbeck.errors import DataError
from limbeck.models.loading import load_model
from limbeck.tools import draft
from limbeck.tools.draft import Model
from tests.cli.command import run
from tests.helpers import runs, tiny

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
    # the shorter of both models' limits, and as many steps of four as twenty records are worth
    assert config.policy.max_total_sequence_length == config.teacher.max_total_sequence_length == 128
    assert (config.distillation.num_prompts_per_step, config.distillation.max_num_epochs) == (4, 3)
    assert config.distillation.max_num_steps == 15
    assert config.logger.log_dir == "runs/mine"
    text = Path("mine.yaml").read_text()
    assert "one pass over 20 records is 5" in text
    # what a run chooses by itself, and what is the default anyway, is not in the file
    for key in ("train_micro_batch_size", "train_mb_tokens", "precision", "kl_loss_weight", "ce_loss_scale", "gate"):
        assert key not in text
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
    assert "without validation data" in err


def test_a_hub_id_is_taken_at_its_word_and_no_teacher_is_cross_entropy(place: Path, capsys) -> None:
    code, _, err = run(capsys, "init", "--student", "owner/name", "--data", "train.jsonl")
    assert code == 0
    assert "the student 'owner/name' was not looked at: " in err
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
    answers = iter(["./none", "student", "none", "none.jsonl", "train.jsonl val.jsonl", "none"])
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
    train, val = load_datasets(config)
    # a tenth is held out
    assert (len(train), len(val)) == (22, 2)
    assert config.distillation.max_num_steps == 3 * (22 // config.distillation.num_prompts_per_step)
    Path("long.txt").write_text("One line of a long chapter.\n" * 4000)
    assert run(capsys, "init", "--student", "student", "--data", "long.txt", "--yes")[0] == 0
    long = resolve(MasterConfig, load_config("run.yaml"))
    once = len(load_datasets(long)[0]) // long.distillation.num_prompts_per_step
    assert long.distillation.max_num_steps == once * long.distillation.max_num_epochs > 1
    config.data.split_documents, config.data.holdout = "file", 0.0
    whole, _ = load_datasets(config)
    with pytest.raises(DataError, match=r"1 records .*split_documents: blank"):
        make_loaders(config, None, whole, None, val_collator=None)


def sized(parameters: int | None) -> Model:
    return Model("m", True, parameters=parameters)


@pytest.mark.parametrize(
    ("records", "target_bytes", "on_gpu", "batch", "passes", "steps"),
    [
        # enough tokens for a step: 24,000 on a GPU, 4,000 on a CPU
        (100_000, 400.0, True, 240, 1, 416),
        (100_000, 400.0, False, 40, 1, 2_500),
        (100_000, 8_000.0, True, 12, 1, 8_333),
        # little data: fifty steps go before large ones, and it is read again where it is too little for that
        (2_000, 400.0, True, 40, 1, 50),
        (200, 400.0, True, 4, 1, 50),
        (100, 400.0, True, 4, 2, 50),
        (20, 400.0, True, 4, 3, 15),
        (1, 400.0, True, 1, 3, 3),
    ],
)
def test_records_of_a_step_go_by_tokens_and_by_how_many_there_are(
    records: int, target_bytes: float, on_gpu: bool, batch: int, passes: int, steps: int
) -> None:
    found = draft._batch(draft._Text(records, target_bytes, 4.0), records, on_gpu)
    assert (found, *draft._length(records, found, {})) == (batch, passes, steps)


@pytest.mark.parametrize("validated", [1, 20, 500, 5_000])
@pytest.mark.parametrize("teacher", [None, 10**6, 10**10])
@pytest.mark.parametrize("steps", [1, 15, 50, 2_000])
def test_validations_between_start_and_end_cost_at_most_15_percent(
    validated: int, teacher: int | None, steps: int
) -> None:
    student, batch = 10**8, 32
    period = draft._val_period(sized(student), [sized(teacher)] if teacher else [], steps, batch, validated)
    number = len(range(period, steps, period)) if period else 0
    other = teacher or 0
    assert number * validated * (student + other) <= 0.15 * steps * batch * (3 * student + other) + 1
    assert number <= 9
    assert validated > 1 or steps < 50 or number == 9


def test_what_is_given_is_in_the_file_and_what_follows_from_it_goes_by_it(place: Path) -> None:
    given = {
        "policy": {"optimizer": {"kwargs": {"lr": 1e-3}}},
        "distillation": {"max_num_steps": 3, "seed": 4},
        "loss_fn": {"mode": "uld"},
    }
    models = [draft.look_at_model(name) for name in ("student", "teacher")]
    text = draft.draft_run(models[0], models[1:], ["train.jsonl"], [], "runs/x", settled=given).text
    config = resolve(MasterConfig, parse_yaml(text, "the draft"))
    assert config.policy.optimizer.kwargs["lr"] == 1e-3
    assert (config.distillation.max_num_steps, config.distillation.seed, config.loss_fn.mode) == (3, 4, "uld")
    assert config.data.holdout == 0.1
    assert "lr: 1e" not in text


def test_sizes_of_models_come_from_the_headers_of_their_files(tmp_path: Path) -> None:
    model = load_model({"init": "random", "model_overrides": tiny.LLAMA}, vocab_size=300, seed=0)
    model.save_pretrained(tmp_path / "m")
    tiny.tokenizer(300).save_pretrained(tmp_path / "m")
    assert draft.look_at_model(str(tmp_path / "m")).parameters == sum(p.numel() for p in model.parameters())
