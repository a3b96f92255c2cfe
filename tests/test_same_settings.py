"""The same settings mean the same in a run file, on the command line, in ``limbeck.distil`` and in the Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, TrainingArguments

import limbeck
from limbeck.algorithms.dispatch import resolve_run
from limbeck.config import load_config
from limbeck.errors import LimbeckError
from limbeck.integrations import DistillationTrainer
from limbeck.tools.pair import Pair, values_of
from limbeck.tools.summary import rate_by_default
from tests.cli.command import run
from tests.test_api import folders  # noqa: F401

SETTINGS: dict[str, dict[str, Any]] = {
    "short forms": {"lr": 1e-3, "batch_size": 2, "steps": 1, "max_length": 40},
    "names of one section": {"num_prompts_per_step": 4, "max_num_steps": 1, "kl_loss_weight": 0.5},
    "dotted names": {"policy.lr": 1e-3, "loss_fn.mode": "boundary_kl", "distillation.max_num_steps": 1, "seed": 3},
    "whole sections": {"loss_fn": {"mode": "uld"}, "policy": {"dtype": "fp32"}, "steps": 1},
    "a schedule by its name": {"scheduler": "cosine", "warmup_steps": 1, "steps": 2, "num_prompts_per_step": 6},
}
QUIET = {"tensorboard_enabled": False, "progress": False}


def stored(run_dir: Path) -> dict[str, Any]:
    """The resolved run file of a run folder, without the folder's own name."""
    found: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    found["logger"].pop("log_dir")
    return found


class Captured(Exception):
    """Ends a call of ``limbeck.distil`` where its run would begin."""


@pytest.fixture
def place(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder with two tiny models, texts and conversations, to work in."""
    for name in ("student", "teacher", "train.jsonl", "val.jsonl"):
        (tmp_path / name).symlink_to(folders / name)
    texts = [json.loads(line)["text"] for line in (folders / "train.jsonl").read_text().splitlines()]
    chats = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]} for t in texts]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "book.txt").write_text("\n\n".join(texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flat(config: Any) -> dict[str, Any]:
    """Every key of a resolved run file, dotted, with its value; but for the run folder, which each way names anew."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                yield from walk(value, f"{path}.{key}" if path else key)
        else:
            yield path, node

    return {key: value for key, value in walk(config.model_dump(mode="json"), "") if key != "logger.log_dir"}


def by_command(data: str, validation: list[str], settings: dict[str, Any], teacher: str | None = "teacher") -> Any:
    """What ``limbeck train --student`` runs."""
    pair = Pair("student", teacher, (data,), tuple(validation), (), settings, "runs/command")
    return resolve_run(values_of(pair, write=False))[0]


def by_distil(monkeypatch: pytest.MonkeyPatch, *given: Any, **settings: Any) -> Any:
    """What ``limbeck.distil`` runs."""
    found: list[Any] = []

    def capture(config: Any, *parts: Any, **models: Any) -> None:
        found.append(config)
        raise Captured

    monkeypatch.setattr("limbeck.api.train_student", capture)
    with pytest.raises(Captured):
        limbeck.distil(*given, **settings)
    return found[0]


def by_init(capsys: Any, data: str, validation: list[str]) -> Any:
    """What ``limbeck train`` runs of the file that ``limbeck init`` writes."""
    words = [word for file in validation for word in ("--validation", file)]
    pair = ("--student", "student", "--teacher", "teacher", "--data", data)
    code, _, err = run(capsys, "init", "run.yaml", *pair, *words, "--yes")
    assert code == 0, err
    return resolve_run(load_config("run.yaml"))[0]


PAIRS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "texts": ("train.jsonl", [], {}),
    "texts with validation": ("train.jsonl", ["val.jsonl"], {}),
    "paragraphs": ("book.txt", [], {}),
    "conversations": ("chats.jsonl", [], {}),
    "from scratch": ("train.jsonl", [], {"policy.init": "random"}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_way_chooses_alike(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str) -> None:
    data, validation, settings = PAIRS[name]
    expected = flat(by_command(data, validation, settings))
    held_out = {"validation": validation[0]} if validation else {}
    assert flat(by_distil(monkeypatch, "student", "teacher", data, **held_out, **settings)) == expected
    if not settings:
        assert flat(by_init(capsys, data, validation)) == expected
    if not data.endswith(".jsonl"):
        return
    # models and records in memory: the same choices, other names
    student, teacher = (AutoModelForCausalLM.from_pretrained(side) for side in ("student", "teacher"))
    records = [json.loads(line) for line in Path(data).read_text().splitlines()]
    if "policy.init" not in settings:
        found = flat(by_distil(monkeypatch, student, teacher, records, **held_out))
        assert {key for key in found if found[key] != expected[key]} == {"data.train"}


CHOSEN = {
    "policy.optimizer.kwargs.lr": "by the student's size and the text",
    "policy.scheduler": "cosine with a warm-up over the steps",
    "policy.max_total_sequence_length": "short without a GPU, and no longer than the models' positions",
    "teacher.max_total_sequence_length": "the same",
    "policy.train_global_batch_size": "records of a step",
    "distillation.num_prompts_per_step": "enough tokens for a step",
    "distillation.max_num_steps": "passes over the data",
    "distillation.max_num_epochs": "little text is read again",
    "distillation.val_period": "validations cost at most 15%",
    "data.holdout": "where there is no validation data",
    "data.mode": "by the first record, which a run file leaves to its run",
    "data.split_documents": "a paragraph of plain text is a document",
    "checkpointing.save_period": "five in a run",
}
"""Keys that ``init``, ``train --student`` and ``distil`` write, where a bare run file has its defaults."""


def test_a_bare_run_file_differs_in_what_is_chosen_alone(place: Path) -> None:
    differing: set[str] = set()
    for data, validation, settings in PAIRS.values():
        section = {"train": data, **({"validation": validation[0]} if validation else {})}
        bare = {"policy": {"model_name": "student"}, "teacher": {"model_name": "teacher"}, "data": section}
        found, chosen = flat(resolve_run(bare, settings)[0]), flat(by_command(data, validation, settings))
        differing |= {key for key in {**found, **chosen} if found.get(key) != chosen.get(key)}
    assert {key for key in differing if not key.startswith("policy.scheduler")} | {"policy.scheduler"} == set(CHOSEN)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_by_any_name_win_over_what_is_chosen(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = SETTINGS[name]
    expected = by_command("train.jsonl", [], given)
    assert flat(by_distil(monkeypatch, "student", "teacher", "train.jsonl", **given)) == flat(expected)
    # a run file with these settings over it has them, too
    bare = {"policy": {"model_name": "student"}, "teacher": {"model_name": "teacher"}, "data": {"train": "train.jsonl"}}
    plain, settled = flat(resolve_run(bare)[0]), flat(resolve_run(bare, given)[0])
    found = flat(expected)
    for key in (key for key in settled if settled[key] != plain.get(key) and not key.startswith("policy.scheduler")):
        assert found[key] == settled[key], key


def test_a_run_file_and_its_settings_are_stored_alike(place: Path, capsys: Any) -> None:
    given = SETTINGS["short forms"]
    base = {"student": "student", "teacher": "teacher", "data": "train.jsonl", "logger": QUIET}
    Path("run.yaml").write_text(yaml.safe_dump(base))
    texts = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    code, _, err = run(capsys, "train", "run.yaml", *texts, "log_dir=command")
    assert code == 0, err
    settled = resolve_run(load_config("run.yaml"), given)[0].model_dump(mode="json")
    settled["logger"].pop("log_dir")
    assert stored(Path("command")) == settled


@pytest.mark.parametrize("name", ["texts", "paragraphs", "conversations"])
def test_a_run_file_without_a_learning_rate_is_told_the_one_that_init_chooses(place: Path, name: str) -> None:
    """Of a run as long as the chosen one, read as it is read."""
    data, _, _ = PAIRS[name]
    chosen = by_command(data, [], {}, None)
    loop, section = chosen.distillation, chosen.data.model_dump(exclude_unset=True)
    values = {
        "policy": {"model_name": "student", "max_total_sequence_length": 256},
        "data": section,
        "distillation": {
            key: getattr(loop, key) for key in ("num_prompts_per_step", "max_num_steps", "max_num_epochs")
        },
    }
    config = resolve_run(values)[0]
    (line,) = rate_by_default(config, values, {})
    rate = chosen.policy.optimizer.kwargs["lr"]
    assert f"(lr={rate:g})" in line
    assert "1e-05" in line
    for given in ({"lr": rate}, {"optimizer": "sgd"}, {"lora": {"r": 2}}):
        assert rate_by_default(resolve_run(values, given)[0], values, given) == []
    # one from scratch has a rate of its own
    drawn = {"policy.init": "random"}
    (line,) = rate_by_default(resolve_run(values, drawn)[0], values, drawn)
    from_scratch = by_command(data, [], drawn, None).policy.optimizer.kwargs["lr"]
    assert f"(lr={from_scratch:g})" in line
    assert from_scratch > 10 * rate


def test_several_teachers_have_the_length_of_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = by_command("train.jsonl", [], {})
    both = by_distil(monkeypatch, "student", ["teacher", {"model_name": "teacher"}], "train.jsonl")
    assert {teacher.max_total_sequence_length for teacher in both.teachers} == {one.teacher.max_total_sequence_length}


def test_a_run_from_python_goes_on_with_what_was_chosen_for_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"batch_size": 2, "log_dir": "run", **QUIET}
    limbeck.distil("student", "teacher", "train.jsonl", max_num_steps=1, **given)
    more = by_distil(monkeypatch, "student", "teacher", "train.jsonl", max_num_steps=10, **given)
    assert (more.checkpointing.save_period, more.distillation.max_num_steps) == (1, 10)
    anew = by_distil(monkeypatch, "student", "teacher", "train.jsonl", max_num_steps=10, batch_size=2)
    assert anew.checkpointing.save_period == 2
    # a folder of before, without the file of its choices, has the defaults that it had
    Path("run", "run.yaml").unlink()
    assert by_distil(monkeypatch, "student", "teacher", "train.jsonl", **given).policy.optimizer.kwargs["lr"] == 1e-5


def test_what_is_refused_leaves_no_folder(place: Path) -> None:
    with pytest.raises(LimbeckError):
        limbeck.distil("student", "teacher", ["a text", "another"], log_dir="run", max_num_stepz=3)
    with pytest.raises(LimbeckError):
        limbeck.distil("student", "teacher", [{"words": "a"}], log_dir="run")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 2.0, "max_length": 40},
        {"loss_fn": "uld", "append_eos": True},
        {"loss_fn.mode": "boundary_kl", "ce_loss_scale": 0.5, "data.max_length": 32},
        {"policy.init": "random", "long_documents": "cut"},
    ],
    ids=str,
)
def test_the_trainer_settles_loss_data_and_teacher_as_a_run_does(
    folders: Path,  # noqa: F811
    tmp_path: Path,
    given: dict[str, Any],
) -> None:
    """Steps, rates and batches are those of TrainingArguments there; the rest is one configuration."""
    records = [json.loads(line) for line in (folders / "train.jsonl").read_text().splitlines()]
    trainer = DistillationTrainer(
        AutoModelForCausalLM.from_pretrained(folders / "student"),
        TrainingArguments(str(tmp_path), report_to=[], use_cpu=True),
        teacher=folders / "teacher",
        train_dataset=records,
        **given,
    )
    teacher = {"model_name": str(folders / "teacher"), "max_total_sequence_length": 256}
    policy = {"model_name": str(folders / "student"), "max_total_sequence_length": 256}
    run_file = {"policy": policy, "teacher": teacher, "data": {"train": "train_dataset", "mode": "text"}}
    config: Any = resolve_run(run_file, given)[0]
    assert trainer.run_config == config
    assert trainer.loss_fn.cfg == config.loss_fn
