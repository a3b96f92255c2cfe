"""``limbeck train --dry-run``: what would happen, everything that is wrong, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from limbeck.algorithms import run_folder
from limbeck.config import merge
from limbeck.errors import ConfigError, ExitCode
from limbeck.models import loading
from limbeck.models.policy import Policy
from limbeck.tokens import load_tokenizer
from limbeck.utils.files import model_path
from tests.helpers import trace_runs
from tests.helpers.runs import limbeck, model, refused, settings, write_run_file


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made without numbers, or not at all."""
    load = loading.load_model

    def outline(*args: Any, **options: Any) -> Any:
        assert options["device"] == loading.META, "a dry run reads no weights"
        return load(*args, **options)

    monkeypatch.setattr(loading, "load_model", outline)


@pytest.mark.usefixtures("no_weights")
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


@pytest.mark.usefixtures("no_weights")
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


BERT = {
    "model_type": "bert",
    "is_decoder": True,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
ONE_CYCLE = {"max_lr": 0.1, "total_steps": 5}

ON_POLICY = {"algorithm": "on_policy_distillation"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer's argument": (
        {"policy": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01, "betaz": 1}}}},
        "refuses the arguments",
    ),
    "arguments that do not go together": (
        {"policy": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"fused": True, "foreach": True}}}},
        "refuses the arguments",
    ),
    "an optimizer that there is none of": ({"policy": {"optimizer": {"name": "torch.optim.AdamX"}}}, "has no 'AdamX'"),
    "an optimizer of a missing package": (
        {"policy": {"optimizer": {"name": "bitsandbytes.optim.AdamW8bit"}}},
        "not installed",
    ),
    "an optimizer that computes the loss again": (
        {"policy": {"optimizer": {"name": "torch.optim.LBFGS", "kwargs": {"lr": 0.1}}}},
        "takes no step of gradients alone",
    ),
    "an optimizer of sparse gradients": (
        {"policy": {"optimizer": {"name": "torch.optim.SparseAdam", "kwargs": {"lr": 0.1}}}},
        "takes no step of gradients alone",
    ),
    "a schedule's argument": (
        {"policy": {"scheduler": {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step": 2}}}},
        "refuses the arguments",
    ),
    "a schedule that wants a figure": (
        {"policy": {"scheduler": {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}},
        "policy.scheduler fails at step 1 of 8",
    ),
    "a schedule that ends before the run": (
        {"policy": {"scheduler": {"name": "torch.optim.lr_scheduler.OneCycleLR", "kwargs": ONE_CYCLE}}},
        "policy.scheduler fails at step 6 of 8",
    ),
    "wandb is not installed": ({"logger": {"wandb_enabled": True}}, "logger.wandb_enabled needs the package wandb"),
    "trackio is not installed": ({"logger": {"trackio_enabled": True}}, "logger.trackio_enabled needs the package"),
    "tensorboard's argument": (
        {"logger": {"tensorboard_enabled": True, "tensorboard": {"flush": 3}}},
        "unexpected keyword argument 'flush'",
    ),
    "a value that tensorboard finds out": (
        {"logger": {"tensorboard_enabled": True, "tensorboard": {"max_queue": "x"}}},
        "logger.tensorboard is {'max_queue': 'x'}",
    ),
    "tensorboard's folder": (
        {"logger": {"tensorboard_enabled": True, "tensorboard": {"log_dir": "x"}}},
        "which the run itself sets",
    ),
    "fewer records than a step": ({"distillation": {"num_prompts_per_step": 64}}, "20 records"),
    "data that is not there": ({"data": {"train": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "validation that is not there": ({"data": {"validation": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "another number of lengths": ({"data": {"max_teacher_seq_length": [64, 64]}}, "2 entries for 1 teachers"),
    "micro-batches without room for a row": (
        {"policy": {"sequence_packing": {"enabled": True, "train_mb_tokens": 16}}},
        "train_mb_tokens is 16, but a row of the student may have 48 tokens",
    ),
    "micro-batches without room for a teacher's row": (
        {"policy": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 60}}},
        "teacher_mb_tokens is 60, but a row of a teacher may have 64 tokens",
    ),
    "another size of the student's vocabulary": (
        {"loss_fn": {"student_vocab_size": 7}},
        "student_vocab_size is 7 but the head has 300 tokens",
    ),
    "a projection that is not there": ({"loss_fn": {"projection_matrix_path": "nowhere.safetensors"}}, "nowhere.s"),
    "a task whose problems are not there": (
        {"distillation": {"tasks": [{"name": "a", "data": "nowhere.jsonl", "verifier": "exact"}]}},
        "nowhere.jsonl",
    ),
    "a task without a problem": (
        {"distillation": {"tasks": [{"name": "a", "data": "plain.jsonl", "verifier": "exact"}]}},
        "task 'a' has no problem",
    ),
    "a metric that nothing measures": ({"checkpointing": {"metric_name": "val/nope"}}, "val/nope"),
    "a metric with a letter too much": ({"checkpointing": {"metric_name": "val/bpbs"}}, "take val/bpb"),
    "a metric of a teacher that there is none of": (
        {"checkpointing": {"metric_name": "val/teacher_1/kl_loss"}},
        "val/teacher_1/kl_loss",
    ),
    "early stopping by a metric that nothing measures": (
        {
            "checkpointing": {"metric_name": None},
            "distillation": {"val_period": 1, "early_stopping": {"metric": "val/nope"}},
        },
        "val/nope",
    ),
    "answers of a task that no position holds": (
        {"distillation": {"tasks": [{"name": "a", "data": "chat.jsonl", "verifier": "exact", "max_new_tokens": 4096}]}},
        "task 'a' has 256 positions",
    ),
    "weights by which nothing is learnt": (
        {"loss_fn": {"kl_loss_weight": 0, "ce_loss_scale": 0}},
        "nothing would be learnt",
    ),
    "a rate that is no number": ({"policy": {"optimizer": {"kwargs": {"lr": float("inf")}}}}, "kwargs.lr is inf"),
    "a pattern that is none": ({"policy": {"lora": {"target_modules": "[("}}}, "'[(' is no pattern"),
    "whole modules that are not there": ({"policy": {"lora": {"modules_to_save": ["embed"]}}}, "names 'embed'"),
    "a rate that no run survives": ({"policy": {"optimizer": {"kwargs": {"lr": 1e30}}}}, "kwargs.lr is 1e+30"),
    "a mistyped key of a model": (
        {"policy": {"model_overrides": {"num_hiden_layers": 2}}},
        "did you mean 'num_hidden_layers'?",
    ),
    "a head with weights of its own": (
        {"policy": {"model_overrides": BERT}},
        "does more between its body and its logits than a linear head (cls.predictions",
    ),
    "a metric that no objective measures": (
        {"checkpointing": {"metric_name": "val/teacher_0/rootkl"}},
        "take val/teacher_0/",
    ),
    "a file that is no model": ({"teacher": {"init": "pretrained", "model_name": "FILE"}}, "'FILE' is a file"),
    "budgets of more teachers than there are": (
        {
            "policy": {
                "train_micro_batch_size": None,
                "dynamic_batching": {"enabled": True, "train_mb_tokens": 100, "teacher_mb_tokens": [100, 100]},
            }
        },
        "2 numbers for the 1 teachers",
    ),
    "a cluster that does not answer": (
        {"cluster": {"launcher": "ray", "ray_address": "127.0.0.1:9"}},
        "'127.0.0.1:9' does not answer",
    ),
    "another number of projections": ({"loss_fn": {"projection_matrix_path": [None, None]}}, "2 entries for 1"),
    "more positions than there are": (
        {"policy": {"max_total_sequence_length": 4096}, "data": {"max_input_seq_length": 4096}},
        "student has 256 positions, but its sequences may have 4096 tokens",
    ),
    "adapters that fit nothing": ({"policy": {"lora": {"target_modules": ["nothing"]}}}, "does not fit the model"),
    "an attention that there is none of": ({"policy": {"attn_implementation": "spda"}}, "no model can be made"),
    "sizes that do not go together": ({"policy": {"model_overrides": {"num_attention_heads": 7}}}, "no model can be"),
    "a kind of model that there is none of": ({"teacher": {"model_overrides": {"model_type": "lama"}}}, "lama"),
    "a model that is not there": ({"teacher": {"init": "pretrained", "model_name": "/nowhere/m"}}, "/nowhere/m"),
    "a duration": ({"checkpointing": {"checkpoint_must_save_by": "soon"}}, "duration 'soon'"),
    "a checkpoint folder that is a file": ({"checkpointing": {"checkpoint_dir": "FILE"}}, "FILE"),
    "a run folder below a file": ({"logger": {"log_dir": "FILE/run"}}, "cannot be written"),
    "quantised weights to be trained": ({"policy": {"quantization": "8bit"}}, "cannot be trained"),
    "half precision in training": ({"policy": {"precision": "float16"}}, "loses small gradients"),
    "a cache that is not there": ({"teacher": {"cache": "nowhere"}}, "nowhere"),
    "a server that does not answer": (
        {"teacher": {"server": {"url": "http://127.0.0.1:9/v1", "retries": 0, "timeout": 1}}},
        "127.0.0.1:9",
    ),
    "offloading without shards": ({"policy": {"dtensor_cfg": {"cpu_offload": True}}}, "cpu_offload"),
    "Ray is not installed": ({"cluster": {"launcher": "ray"}}, "Ray is not installed"),
    "peft is not installed": ({"policy": {"lora": {"r": 4}}}, "policy.lora needs the package peft"),
    "conversations without a template": (
        {"data": {"train": "chat.jsonl", "validation": "chat.jsonl"}},
        "chat template",
    ),
    "a template that is none": (
        {
            "data": {"train": "chat.jsonl", "validation": "chat.jsonl"},
            "policy": {"tokenizer": {"chat_template": "{% for %}"}},
        },
        "",
    ),
    "a reward that there is none of": (
        {**ON_POLICY, "on_policy": {"samples_per_prompt": 2, "max_new_tokens": 4, "reward": {"function": "json:bark"}}},
        "json:bark",
    ),
    "vLLM is not installed": (
        {**ON_POLICY, "on_policy": {"max_new_tokens": 4, "engine": {"vllm": {}, "weights": "w"}}},
        "on_policy.engine.vllm needs vLLM",
    ),
    "an engine of Ray without Ray": (
        {**ON_POLICY, "on_policy": {"max_new_tokens": 4, "engine": {"ray": {}}}},
        "set cluster.launcher to ray",
    ),
}
ABSENT = {
    "a file that is no model": ("teacher", "model_overrides"),
    "a head with weights of its own": ("policy", "model_overrides"),
}
"""Keys that a case is without."""
MISSING = {"Ray is not installed": "ray", "peft is not installed": "peft"}
CHAT = {"messages": [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]}


@pytest.mark.parametrize("case", REFUSED)
def test_the_dry_run_says_what_the_run_refuses(
    case: str, stuff: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    change, part = REFUSED[case]
    Path("chat.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 8)
    Path("plain.jsonl").write_text(json.dumps({"text": "No question."}))
    if case in MISSING:
        monkeypatch.setitem(sys.modules, MISSING[case], None)
    plain = settings(stuff, tmp_path / "run")
    if "scheduler" in change.get("policy", {}):
        del plain["policy"]["scheduler"]
    if case in ABSENT:
        section, key = ABSENT[case]
        del plain[section][key]
    run_file = write_run_file(tmp_path / "run.yaml", merge(plain, change))
    before = sorted(tmp_path.rglob("*"))
    code, out, said = limbeck("train", run_file, "--dry-run", "--json")
    assert code == ExitCode.USAGE, said
    assert sorted(tmp_path.rglob("*")) == before, "a dry run leaves nothing"
    problems = json.loads(out)["problems"]
    sentence = refused("train", run_file, "-q").removeprefix("limbeck: ")
    assert part in sentence
    assert any(problem.endswith(sentence) for problem in problems), (sentence, problems)
    assert len(problems) == 1, problems


LISTS: dict[str, tuple[dict[str, Any], str]] = {
    "whole distributions": ({"loss_fn": {"mode": "gold"}}, "needs full logits, not a top-k list"),
    "another temperature": ({"loss_fn": {"temperature": 2.0}}, "but a top-k list is stored at 1"),
    "logits to average": ({"loss_fn": {"teacher_combination": "averaged_logits"}}, "no logits to average"),
}


@pytest.fixture
def cached(stuff: Path, tmp_path: Path) -> dict[str, Any]:
    """A run file whose teacher is a folder of top-k lists."""
    values = settings(stuff, tmp_path / "run")
    values["teacher"] |= {"cache": str(tmp_path / "cache"), "cache_k": 8}
    assert limbeck("cache", write_run_file(tmp_path / "cache.yaml", values))[0] == 0
    return values


def test_what_lists_cannot_give_is_refused_before_a_model_is_loaded(cached: dict[str, Any], tmp_path: Path) -> None:
    for case, (change, part) in LISTS.items():
        run_file = write_run_file(tmp_path / "run.yaml", merge(cached, change))
        code, out, _ = limbeck("train", run_file, "--dry-run", "--json")
        sentence = refused("train", run_file, "-q").removeprefix("limbeck: ")
        assert code == ExitCode.USAGE, case
        assert part in sentence
        assert json.loads(out)["problems"] == [f"inputs: {sentence}"]
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_first_records_without_a_token_that_counts_are_no_fault_of_the_data(stuff: Path, tmp_path: Path) -> None:
    """The run takes the next ones."""
    nothing = '{"text": "a"}\n'
    for name, lines in (("some", nothing * 12 + (stuff / "train.jsonl").read_text()), ("none", nothing * 12)):
        (tmp_path / f"{name}.jsonl").write_text(lines)
        values = settings(stuff, tmp_path / "run", data={"train": str(tmp_path / f"{name}.jsonl")})
        run_file = write_run_file(tmp_path / "run.yaml", values)
        code, _, said = limbeck("train", run_file, "--dry-run")
        if name == "some":
            assert code == 0, said
            assert "tokens to learn from" in said
            # a run that ends before them is one of nothing
            short = ("data.shuffle=false", "distillation.max_num_steps=2")
            code, out, _ = limbeck("train", run_file, "--dry-run", "--json", *short)
            sentence = refused("train", run_file, "-q", *short).removeprefix("limbeck: ")
            assert (code, json.loads(out)["problems"]) == (ExitCode.USAGE, [f"inputs: {sentence}"])
            assert "in 8 records no token counts" in sentence
        else:
            assert code == ExitCode.USAGE
            assert "data.train holds nothing to learn from: in 12 records no token counts" in said
            assert "data.train holds nothing to learn from" in refused("train", run_file, "-q")


def test_a_stored_projection_of_hints_that_is_not_there(tmp_path: Path) -> None:
    teacher = {
        "init": "random",
        "model_overrides": trace_runs.MODEL,
        "tokenizer": {"name": trace_runs.tokenizer_folder(tmp_path, 300)},
    }
    values = trace_runs.settings(
        tmp_path, teacher=teacher, loss={"hint": {"projection_matrix_path": str(tmp_path / "nowhere.safetensors")}}
    )
    run_file = write_run_file(tmp_path / "run.yaml", {**values, "algorithm": "trace_distillation"})
    code, out, _ = limbeck("train", run_file, "--dry-run", "--json")
    sentence = refused("train", run_file, "-q").removeprefix("limbeck: ")
    assert code == ExitCode.USAGE
    assert "loss.hint.projection_matrix_path" in sentence
    assert json.loads(out)["problems"] == [f"inputs: {sentence}"]
    assert not (tmp_path / "nowhere.safetensors").exists()


def test_a_run_of_another_configuration(stuff: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", settings(stuff, tmp_path / "run"))
    short = ("distillation.max_num_steps=2", "distillation.val_at_end=false", "distillation.val_at_start=false")
    assert limbeck("train", run_file, "-q", *short)[0] == 0
    code, out, _ = limbeck("train", run_file, "--dry-run", "--json", "loss_fn.temperature=2")
    sentence = refused("train", run_file, "-q", "loss_fn.temperature=2").removeprefix("limbeck: ")
    assert code == ExitCode.USAGE
    assert json.loads(out)["problems"] == [f"run folder: {sentence}"]
    code, out, said = limbeck("train", run_file, "--dry-run", *short)
    assert code == 0
    assert "the run is complete with 2 steps" in said
    with run_folder.held(tmp_path / "run"):
        code, out, _ = limbeck("train", run_file, "--dry-run", "--json")
        sentence = refused("train", run_file, "-q").removeprefix("limbeck: ")
    assert code == ExitCode.USAGE
    assert json.loads(out)["problems"] == [f"run folder: {sentence}"]
    # a checkpoint that is damaged is no problem while an older one is whole, and stays where it is
    newest = tmp_path / "run" / "checkpoints" / "step_9"
    shutil.copytree(newest.with_name("step_2"), newest)
    (newest / "policy" / "weights" / "model.safetensors").unlink()
    code, _, said = limbeck("train", run_file, "--dry-run")
    assert code == 0, said
    assert "the run goes on from step_2" in said
    assert newest.is_dir()


def test_memory_of_a_gpu_is_not_logged_where_there_is_none(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path / "run", logger={"monitor_gpus": True})
    values["distillation"] |= {"max_num_steps": 1, "val_at_start": False, "val_at_end": False}
    code, _, said = limbeck("train", write_run_file(tmp_path / "run.yaml", values))
    assert code == 0, said
    assert torch.cuda.is_available() or "no GPU memory to log (logger.monitor_gpus)" in said


def _without(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight is missing": (_without, "1 are missing (model.norm.weight)"),
    "cut off": (lambda folder: os.truncate(folder / "model.safetensors", 1000), "cannot be loaded"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "cannot be loaded"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_weights_that_do_not_fit_are_found_by_their_headers(case: str, stuff: Path, tmp_path: Path) -> None:
    policy = Policy(model(stuff, "teacher"), load_tokenizer(stuff / "teacher"), device="cpu", init_optimizer=False)
    policy.save_checkpoint(tmp_path / "m")
    own = {"init": "pretrained", "model_name": str(tmp_path / "m"), "model_overrides": None}
    values = settings(stuff, tmp_path / "run")
    values["teacher"] = {key: value for key, value in {**values["teacher"], **own}.items() if value is not None}
    run_file = write_run_file(tmp_path / "run.yaml", values)
    assert limbeck("train", run_file, "--dry-run")[0] == 0
    spoil, part = SPOILT[case]
    spoil(tmp_path / "m")
    code, out, _ = limbeck("train", run_file, "--dry-run", "--json")
    assert code == ExitCode.USAGE
    sentence = refused("train", run_file, "-q").removeprefix("limbeck: ")
    assert part in sentence
    assert [problem for problem in json.loads(out)["problems"] if problem.endswith(sentence)]


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path, stuff: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*checkpoint"):
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
