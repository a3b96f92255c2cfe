"""``limbeck.distil``: the run of a run file, from Python, with models and data that are in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import limbeck
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.api import Distilled
from limbeck.errors import ConfigError, DataError, LimbeckError
from limbeck.models.loading import load_model
from tests.helpers import runs, tiny

TEXTS = runs.documents(12, 1)
SHORT: dict[str, Any] = {
    "num_prompts_per_step": 4,
    "max_num_steps": 3,
    "seed": 5,
    "max_input_seq_length": 48,
    "tensorboard_enabled": False,
    "progress": False,
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}},
    "scheduler": "constant",
    "warmup_steps": 0,
}


def loaded(name: str, seed: int = 0) -> Any:
    arch, size = (tiny.LLAMA, 300) if name == "student" else (tiny.QWEN3, 340)
    return load_model({"init": "random", "model_overrides": arch}, vocab_size=size, seed=seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders ``student`` and ``teacher``, and ``train.jsonl``, ``val.jsonl``."""
    folder = tmp_path_factory.mktemp("models")
    runs.write_data(folder, train=12)
    for name, size in (("student", 300), ("teacher", 340)):
        loaded(name).save_pretrained(folder / name)
        tiny.tokenizer(size).save_pretrained(folder / name)
    return folder


def distil(folders: Path, run_dir: Path, *given: Any, **settings: Any) -> Distilled:
    student, teacher, data = given or (str(folders / "student"), folders / "teacher", TEXTS)
    return limbeck.distil(student, teacher, data, log_dir=str(run_dir), **{**SHORT, **settings})


def weights(result: Distilled) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in result.student.state_dict().items()}


def test_the_same_run_from_a_run_file_from_names_and_from_memory(folders: Path, tmp_path: Path) -> None:
    section = {"optimizer": SHORT["optimizer"]}
    config = runs.resolved(
        {
            "policy": {"model_name": str(folders / "student"), **section},
            "teacher": {"model_name": str(folders / "teacher")},
            "data": {
                "train": str(folders / "train.jsonl"),
                "validation": str(folders / "val.jsonl"),
                "max_input_seq_length": 48,
            },
            "distillation": {"num_prompts_per_step": 4, "max_num_steps": 3, "seed": 5},
            "logger": {"log_dir": str(tmp_path / "file"), "tensorboard_enabled": False, "progress": False},
        }
    )
    expected = runs.rows(run(config))
    held_out = datasets.Dataset.from_list([{"text": text} for text in runs.documents(7, 2)])
    tokenizers = {"student_tokenizer": tiny.tokenizer(300), "teacher_tokenizer": tiny.tokenizer(340)}
    model = loaded("student")
    in_memory = distil(folders, tmp_path / "memory", model, loaded("teacher"), TEXTS, validation=held_out, **tokenizers)
    named = distil(folders, tmp_path / "names", validation=[{"text": text} for text in runs.documents(7, 2)])
    assert in_memory.student is model
    for result in (named, in_memory):
        assert runs.rows(result.run_dir) == expected
        assert len(result.values("val/bpb")) == 2
        assert result.report.is_file()
        assert (result.run_dir / "checkpoints" / "step_3" / "policy" / "weights" / "model.safetensors").is_file()


def test_the_result_writes(folders: Path, tmp_path: Path) -> None:
    result = distil(folders, tmp_path / "run")
    ids = result.tokenizer("the quick", return_tensors="pt")["input_ids"]
    assert result.student.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= ids.shape[1] + 3
    assert "student" not in repr(result)


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_in_memory_goes_on_from_its_checkpoint(folders: Path, tmp_path: Path, adapters: bool) -> None:
    more: dict[str, Any] = {"lora": {"r": 2}} if adapters else {}
    tokenizers = {"student_tokenizer": tiny.tokenizer(300), "teacher_tokenizer": tiny.tokenizer(340)}
    whole = distil(folders, tmp_path / "a", loaded("student"), loaded("teacher"), TEXTS, **tokenizers, **more)
    distil(folders, tmp_path / "b", loaded("student"), loaded("teacher"), TEXTS, max_num_steps=2, **tokenizers, **more)
    again = loaded("student", seed=0 if adapters else 9)
    rest = distil(folders, tmp_path / "b", again, loaded("teacher"), TEXTS, **tokenizers, **more)
    found = weights(rest)
    assert all(torch.equal(value, found[name]) for name, value in weights(whole).items())
    with pytest.raises(DataError, match="teacher_0 is"):
        distil(folders, tmp_path / "b", loaded("student"), loaded("teacher", 3), TEXTS, **tokenizers, **more)
    with pytest.raises(DataError, match=r"data\.train"):
        distil(folders, tmp_path / "b", loaded("student"), loaded("teacher"), TEXTS[:-1], **tokenizers, **more)


@pytest.mark.slow
def test_a_teacher_that_does_not_count_is_not_asked(folders: Path, tmp_path: Path) -> None:
    result = distil(folders, tmp_path / "run", kl_loss_weight=0.0, max_num_steps=1)
    assert "train/kl_loss" not in result.metrics[-1]


def test_every_call_without_a_folder_gets_its_own(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**SHORT, "max_num_steps": 1}
    found = [limbeck.distil(folders / "student", None, TEXTS, **settings).run_dir for _ in range(2)]
    assert [path.as_posix() for path in found] == ["runs/distil", "runs/distil-2"]


def test_bars_where_a_notebook_shows_them(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ipykernel", object())
    distil(folders, tmp_path / "run", progress=True)
    said = capsys.readouterr()
    assert "step: 100%" in said.err
    assert "loss" in said.err
    assert "bits per byte" in said.out


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"student": 3}, "the student is a int; give a model folder"),
    "a teacher that is none": ({"teacher": object()}, "the teacher is a object; give"),
    "no data": ({"data": []}, "the data are an empty list"),
    "an iterator": ({"data": iter(TEXTS)}, "give files, a list of texts or records"),
    "numbers": ({"data": [1, 2]}, "the data are a list of int; give texts"),
    "a file that is not there": ({"data": "missing.jsonl"}, "'missing.jsonl' does not exist"),
    "a mixture": ({"data": ["a text", __file__]}, "1 of the 2 strings are files"),
    "an object in a record": ({"data": [{"text": {1, 2}}]}, "what JSON cannot hold"),
    "a record without text": ({"data": [{"words": "a"}]}, "has no 'text', only words"),
    "a misspelt setting": ({"max_num_step": 3}, "did you mean 'max_num_steps'"),
    "a setting of two sections": (
        {"mode": "tree_kl"},
        "'mode' is a setting of several sections; give loss_fn.mode or data.mode",
    ),
    "a misspelt section key": ({"loss_fn": {"mod": "x"}}, "unknown key 'loss_fn.mod'"),
    "another algorithm": ({"algorithm": "trace_distillation"}, "start other algorithms with limbeck train"),
    "ray": ({"launcher": "ray"}, "limbeck.distil runs here"),
    "a model without a source": ({"student": loaded("student")}, "its tokenizer is unknown; give student_tokenizer"),
    "tokenizers": ({"teacher_tokenizer": ["a", "b"]}, "1 teachers but 2 teacher_tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(folders: Path, tmp_path: Path, name: str) -> None:
    more, said = REFUSED[name]
    given = {"student": folders / "student", "teacher": folders / "teacher", "data": TEXTS} | more
    with pytest.raises(LimbeckError) as error:
        limbeck.distil(log_dir=str(tmp_path / "run"), **{**SHORT, **given})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_student_is_not_its_own_teacher(folders: Path) -> None:
    model, tokenizer = loaded("student"), tiny.tokenizer(300)
    with pytest.raises(ConfigError, match="the same object"):
        limbeck.distil(model, model, TEXTS, student_tokenizer=tokenizer, teacher_tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="requires_grad_"):
        limbeck.distil(model.requires_grad_(False), folders / "teacher", TEXTS, student_tokenizer=tokenizer)


def test_conversations_by_a_data_section(folders: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chats = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]} for t in TEXTS]
    section = {"chat_template": template}
    result = distil(
        folders,
        tmp_path / "run",
        {"model_name": str(folders / "student"), "tokenizer": section},
        {"model_name": str(folders / "teacher"), "tokenizer": section},
        {"train": chats, "mode": "chat"},
        max_num_steps=1,
    )
    assert result.values("train/loss")
