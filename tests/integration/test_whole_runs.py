"""Runs of every kind from end to end: chat, adapters, several teachers, caches, two processes, the recipe of CI."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from limbeck.config import merge
from limbeck.tokens import load_tokenizer
from tests import zoo
from tests.algorithms.test_distillation_validation import bits_per_byte, held_out
from tests.helpers import runs
from tests.helpers.processes import free_port
from tests.helpers.runs import checkpoint, limbeck, model, rows, settings, write_run_file
from tests.helpers.tokenizers import TEXTS, trained_bpe
from tests.patience import WAIT_SECONDS

# Losses of the recipe cpu_smoke with cross-entropy at weight 1; they change only where the arithmetic, the data or the
# recipe does.
SMOKE_LOSSES = [
    *(17.90649, 16.3823, 13.19968, 13.44594, 12.8617, 12.80982, 17.92424, 10.95901, 10.31947, 13.43402),
    *(9.17744, 8.46614, 8.0149, 7.56896, 6.81041, 9.32801, 8.1925, 10.48844, 9.24323, 6.46451),
]
# Bits per byte before and after 20 of the 60 steps of the recipe on_policy_cpu.
ON_POLICY_BITS = [2.4921, 1.0203]
# Other numbers of threads add in another order, and twenty steps carry that on.
SMOKE_TOLERANCE = 1e-2


def trained(stuff: Path, run_dir: Path, *options: str, **more: Any) -> list[dict[str, Any]]:
    """Metrics of a whole run through the command."""
    values = merge(settings(stuff, run_dir), more)
    if "teachers" in more:
        values.pop("teacher")
    run_file = write_run_file(run_dir.with_suffix(".yaml"), values)
    code, _, err = limbeck("train", run_file, "-q", *options)
    assert code == 0, err
    return rows(run_dir)


def test_the_run_folder_is_complete(stuff, tmp_path):
    trained(stuff, tmp_path / "run", logger={"tensorboard_enabled": True})
    run_dir = tmp_path / "run"
    assert {p.name for p in run_dir.iterdir()} >= {
        "config.yaml",
        "versions.json",
        "metrics.jsonl",
        "skipped.json",
        "report.html",
        "tensorboard",
        "checkpoints",
    }
    versions = json.loads((run_dir / "versions.json").read_text())
    assert {"torch", "transformers", "seed", "student_fingerprint", "teacher_fingerprints"} <= set(versions)
    # the stored configuration is a run file: it resumes this run
    assert "complete" in limbeck("train", run_dir / "config.yaml", "-q")[2]


def test_adapters_are_merged_on_export(stuff, tmp_path):
    found = trained(
        stuff,
        tmp_path / "run",
        policy={"lora": {"r": 4, "dropout": 0.1}},
        data={"max_input_seq_length": 256, "max_teacher_seq_length": 256},
        checkpointing={"keep_top_k": None},
    )
    folder = checkpoint(tmp_path / "run", 8) / "policy" / "weights"
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not [name for name, _ in plain.named_parameters() if "lora" in name]
    expected = bits_per_byte(plain, AutoTokenizer.from_pretrained(folder), held_out(stuff))
    assert found[-1]["val/bpb"] == pytest.approx(expected, rel=1e-5)
    assert found[-1]["val/bpb"] < found[0]["val/bpb"]
    # resume from the middle: adapters, their optimizer and dropout's generator
    uninterrupted = runs.weight_bytes(tmp_path / "run", 8)
    shutil.rmtree(checkpoint(tmp_path / "run", 8))
    assert limbeck("train", tmp_path / "run.yaml", "-q")[0] == 0
    assert runs.weight_bytes(tmp_path / "run", 8) == uninterrupted
    assert rows(tmp_path / "run") == found


def test_two_teachers(stuff, tmp_path):
    """One with a tokenizer of its own, one with the student's, told apart by their fingerprints."""
    shutil.copytree(stuff / "student", tmp_path / "copy")
    same = model(stuff, "student", tokenizer={"name": str(tmp_path / "copy")})
    found = trained(stuff, tmp_path / "run", teachers=[same, model(stuff, "teacher")])
    last = found[-1]
    assert last["val/bpb"] < found[0]["val/bpb"]
    assert last["val/teacher_bpb"] == last["val/teacher_0_bpb"] != last["val/teacher_1_bpb"]
    # only teachers with other tokens need a projection
    assert "train/teacher_1/uncovered_mass" in last
    assert "train/teacher_0/uncovered_mass" not in last


def test_a_cache_replaces_the_teacher(stuff, tmp_path):
    weights = tmp_path / "teacher"
    first = trained(
        stuff, tmp_path / "make", "distillation.max_num_steps=1", policy=model(stuff, "teacher"), teacher=None
    )
    assert first
    shutil.copytree(checkpoint(tmp_path / "make", 1) / "policy" / "weights", weights)
    teacher = {"model_name": str(weights), "tokenizer": {"name": str(stuff / "teacher")}, "cache_k": 340}
    values = settings(stuff, tmp_path / "live")
    values["teacher"] = teacher
    run_file = write_run_file(tmp_path / "run.yaml", values)
    assert limbeck("train", run_file, "-q")[0] == 0
    cache = f"teacher.cache={tmp_path / 'cache'}"
    code, out, err = limbeck("cache", run_file, cache, "--json")
    assert code == 0, err
    assert json.loads(out)["caches"][0]["documents"] == 27
    assert json.loads(limbeck("cache", run_file, cache, "--json")[1])["caches"][0]["documents"] == 27
    shutil.rmtree(weights)
    code, _, err = limbeck("train", run_file, "-q", cache, f"logger.log_dir={tmp_path / 'cached'}")
    assert code == 0, err
    live, cached = rows(tmp_path / "live"), rows(tmp_path / "cached")
    for name in ("train/loss", "train/kl_loss", "val/bpb", "val/teacher_bpb"):
        assert cached[-1][name] == pytest.approx(live[-1][name], abs=2e-3), name


# ---- chat ------------------------------------------------------------------------------------------------------------

ROLES = {
    "smollm2": ["<|im_start|>", "<|im_end|>"],
    "llama3_2": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}


def chat_tokenizer(name: str, size: int, folder: Path) -> None:
    """A small vocabulary with the special tokens and the chat template of a real model."""
    roles = ROLES[name]
    made = trained_bpe(
        TEXTS,
        size + len(roles),
        specials=roles,
        template=zoo.tokenizer(name).chat_template,
        bos_token=roles[0],
        eos_token=roles[-1],
        pad_token=roles[-1],
    )
    made.save_pretrained(folder)


def test_chat_with_two_templates(tmp_path):
    for side, name, size in (("student", "smollm2", 300), ("teacher", "llama3_2", 330)):
        chat_tokenizer(name, size, tmp_path / side)
    for part, count in (("train", 12), ("val", 5)):
        lines = []
        for i in range(count):
            # stripped: the teacher's template strips every message, and one that differs is left out
            question, answer = TEXTS[i % 6], TEXTS[(i + 1) % 6].strip()
            lines.append(
                {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            )
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    lengths = {"max_input_seq_length": 256, "max_teacher_seq_length": 384}
    found = trained(
        tmp_path,
        tmp_path / "run",
        data={"mode": "chat", **lengths},
        loss_fn={"mode": "tree_kl"},
        policy={"model_overrides": {"max_position_embeddings": 512}},
        teacher={"model_overrides": {"max_position_embeddings": 512}},
    )
    last = found[-1]
    assert last["val/bpb"] < found[0]["val/bpb"]
    assert last["val/coverage"] > 0.99
    # only the assistants' answers count, with the end of their turn
    tokenizer = load_tokenizer(tmp_path / "student")
    answers = sum(
        len(tokenizer(TEXTS[(i + 1) % 6].strip(), add_special_tokens=False)["input_ids"]) + 1 for i in range(5)
    )
    assert last["val/tokens"] == pytest.approx(answers, abs=5)


# ---- two processes ---------------------------------------------------------------------------------------------------


def _rank(rank: int, port: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs.serve(arguments)


def test_two_processes_train_like_one(stuff, tmp_path):
    """What torchrun does: the same command twice, with ranks in the environment."""
    one = trained(stuff, tmp_path / "one")
    port = free_port()
    options = ["train", str(tmp_path / "one.yaml"), "-q", f"logger.log_dir={tmp_path / 'two'}"]
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_rank, args=(r, port, options), daemon=True) for r in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0
    two = rows(tmp_path / "two")
    assert [r["step"] for r in two] == [r["step"] for r in one]
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-6)
    weights = [
        load_file(checkpoint(tmp_path / n, 8) / "policy" / "weights" / "model.safetensors") for n in ("one", "two")
    ]
    for name, value in weights[0].items():
        assert torch.allclose(weights[1][name], value, rtol=0, atol=1e-3), name
    assert (tmp_path / "two" / "skipped.json").read_bytes() == (tmp_path / "one" / "skipped.json").read_bytes()
    assert len(list((checkpoint(tmp_path / "two", 8) / "train_state").iterdir())) == 2


# ---- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_smoke_recipe_gives_the_stored_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["loss_fn.ce_loss_scale=1.0", f"logger.log_dir={tmp_path / 'run'}"]
    code, _, err = limbeck("train", "cpu_smoke", "-q", *options)
    assert code == 0, err
    found = [row["train/loss"] for row in rows(tmp_path / "run") if "train/loss" in row]
    assert len(found) == 20
    assert found == pytest.approx(SMOKE_LOSSES, rel=SMOKE_TOLERANCE)


@pytest.mark.slow
def test_the_on_policy_recipe_teaches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shorter = ("distillation.max_num_steps=20", "checkpointing.enabled=false")
    code, _, err = limbeck("train", "on_policy_cpu", "-q", *shorter, f"logger.log_dir={tmp_path / 'run'}")
    assert code == 0, err
    found = rows(tmp_path / "run")
    steps = [row for row in found if "train/on_policy/kl_loss" in row]
    # in some steps no record is a prompt
    assert 15 <= len(steps) <= 20
    # a token that is chosen otherwise on another machine changes what follows, so that losses agree only on the whole
    assert [row["val/bpb"] for row in found if "val/bpb" in row] == pytest.approx(ON_POLICY_BITS, rel=0.1)
    assert max(row["train/sample/length"] for row in steps) <= 20.0
    written = (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8")
    assert '"writer": "student"' in written


@pytest.mark.parametrize("condition", ["none", "counted"])
def test_tree_kl_brings_the_student_nearer_to_the_teacher(stuff, tmp_path, condition):
    found = trained(
        stuff,
        tmp_path / "run",
        loss_fn={"mode": "tree_kl", "condition": condition, "ce_loss_scale": 0.01},
        distillation={"max_num_steps": 16, "val_period": 0},
    )
    steps = [row for row in found if "train/teacher_0/root_kl" in row]
    assert len(steps) == 16
    assert all(
        f"train/teacher_0/{part}" in steps[-1] for part in ("inner_student_kl", "inner_teacher_kl", "uncovered_mass")
    )
    assert ("train/teacher_0/uncovered_root_teacher" in steps[-1]) == (condition != "none")
    for name in ("kl_loss", "teacher_0/inner_student_kl", "teacher_0/inner_teacher_kl"):
        values = [row[f"train/{name}"] for row in steps]
        assert sum(values[-4:]) < 0.8 * sum(values[:4]), name
