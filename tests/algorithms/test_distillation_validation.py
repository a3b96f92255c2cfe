"""Validation against plain transformers logits, and against itself with other batch sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher, run
from limbeck.config import merge
from tests.helpers import runs

REQUIRED = {
    "step",
    "train/loss",
    "train/kl_loss",
    "train/ce_loss",
    "train/grad_norm",
    "train/tokens_per_s",
    "val/bpb",
    "val/teacher_bpb",
    "val/kl_loss",
    "val/ce_loss",
    "val/accuracy",
    "val/coverage",
}


def finished(stuff: Path, run_dir: Path, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    values = runs.settings(stuff, run_dir, data={"max_input_seq_length": 256, "max_teacher_seq_length": 256})
    values["distillation"] |= {"max_num_steps": 2, "val_period": 1}
    config = runs.resolved(merge(values, more))
    run(config)
    return config, runs.rows(run_dir, clocks=True)


def val_part(row: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row.items() if k.startswith("val/")}


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """By the book: one text at a time, full logits, all tokens that have a predecessor."""
    nats, size = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logprobs = model(input_ids=ids).logits[0, :-1, : len(tokenizer)].double().log_softmax(-1)
        nats -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
        # in a byte-level vocabulary every character of a token's name stands for one byte
        size += sum(len(t) for t in tokenizer.convert_ids_to_tokens(ids[0, 1:].tolist()))
    return nats / math.log(2) / size


def held_out(stuff: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (stuff / "val.jsonl").read_text(encoding="utf-8").splitlines()]


def test_bits_per_byte_by_hand(stuff, tmp_path):
    config, rows = finished(stuff, tmp_path / "run")
    folder = runs.checkpoint(tmp_path / "run", 2) / "policy" / "weights"
    student = AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = held_out(stuff)
    assert rows[2]["val/bpb"] == pytest.approx(bits_per_byte(student, AutoTokenizer.from_pretrained(folder), texts))
    tokenizer = AutoTokenizer.from_pretrained(stuff / "teacher")
    teacher = live_teacher(config, 0, tokenizer).model
    expected = bits_per_byte(teacher, tokenizer, texts)
    for row in rows:
        assert row["val/teacher_bpb"] == pytest.approx(expected)
    assert rows[2]["val/bpb"] < rows[0]["val/bpb"]


@pytest.mark.parametrize(
    "teachers", [pytest.param("one", marks=pytest.mark.slow), "two", pytest.param("scored", marks=pytest.mark.slow)]
)
def test_any_batch_size_is_one_big_batch(stuff, tmp_path, teachers):
    more: dict[str, Any] = {}
    if teachers != "one":
        more = {"teacher": None, "teachers": [runs.model(stuff, "teacher"), runs.model(stuff, "student")]}
        more["loss_fn"] = {"teacher_weights": [0.3, 0.9]}
    if teachers == "scored":
        more["loss_fn"] = {"teacher_scoring": "ce"}
    expected = None
    for size in (7, 3, 1):
        _, rows = finished(
            stuff, tmp_path / str(size), **more, distillation={"val_batch_size": size, "val_at_end": False}
        )
        if expected is None:
            expected = val_part(rows[1])
            loss = rows[1]["val/kl_loss"] + rows[1]["val/ce_loss"]
            assert rows[1]["val/loss"] == pytest.approx(loss)
        assert val_part(rows[1]) == pytest.approx(expected, rel=1e-5), size


def test_metrics_have_the_promised_names(stuff, tmp_path):
    _, rows = finished(stuff, tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert set(rows[1]) >= REQUIRED
    assert not [name for name in rows[0] if name.startswith("train/")]
    assert all(isinstance(v, int | float) and math.isfinite(v) for row in rows for v in row.values())
    assert rows[1]["val/coverage"] == pytest.approx(1.0)
    assert rows[1]["val/tokens"] == sum(
        len(AutoTokenizer.from_pretrained(stuff / "student")(t, add_special_tokens=False)["input_ids"]) - 1
        for t in held_out(stuff)
    )


def test_cross_entropy_alone_needs_no_teacher(stuff, tmp_path):
    _, rows = finished(stuff, tmp_path / "run", teacher=None)
    assert rows[1]["train/loss"] == pytest.approx(rows[1]["train/ce_loss"], rel=1e-6)
    assert "val/bpb" in rows[1]
    assert "val/teacher_bpb" not in rows[1]


def test_a_run_without_validation_data(stuff, tmp_path):
    _, rows = finished(stuff, tmp_path / "run", data={"validation": None}, checkpointing={"metric_name": None})
    assert [row["step"] for row in rows] == [1, 2]
    assert not [name for row in rows for name in row if name.startswith("val/")]
