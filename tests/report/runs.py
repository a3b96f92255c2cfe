"""Synthetic run folders, as a training loop leaves them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from limbeck.align.view import view_text
from limbeck.config import dump_yaml
from tests.helpers import tiny


def config(mode: str = "boundary_kl", steps: int = 400, **teacher: Any) -> dict[str, Any]:
    taught = {"teacher": {"model_name": "models/SmolLM2-135M-Instruct", **teacher}} if mode != "ce" else {}
    return {
        "policy": {"model_name": None, "init": "random", "model_overrides": {"model_type": "llama"}},
        **taught,
        "loss_fn": {"mode": mode if mode != "ce" else "boundary_kl", "temperature": 1.0},
        "data": {"train": ["train.jsonl"], "validation": ["val.jsonl"]},
        "distillation": {"max_num_steps": steps, "seed": 42, "val_period": 50},
        "logger": {"log_dir": "runs/x"},
        "checkpointing": {"metric_name": "val/bpb"},
    }


def rows(steps: int = 400, *, gain: float = 0.95, teacher: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    random_ = random.Random(seed)
    out: list[dict[str, Any]] = []
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step}
        done = 1 - math.exp(-4 * step / steps)
        if step:
            noise = random_.gauss(0, 0.12)
            ce = 5.6 - 2.6 * done * gain + noise
            kl = 2.4 - 1.7 * done * gain + 0.5 * noise
            row |= {"train/loss": ce + (kl if teacher else 0), "train/ce_loss": ce}
            row |= {"train/kl_loss": kl, "train/chunk_kl": 0.1 * kl} if teacher else {}
            row["train/grad_norm"] = 0.9 + abs(noise) * 4 + (60 if step == 3 else 0)
            row["train/lr"] = 3e-4 * min(1, step / 40) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            row["train/tokens_per_s"] = 5200 + 300 * random_.random() - (3000 if step == 1 else 0)
            row |= {"train/seconds": 1.6, "train/time/forward": 0.6 + 0.05 * random_.random()}
        if step % 50 == 0:
            row |= {"val/bpb": 3.45 - 1.0 * done * gain, "val/ce_loss": 5.6 - 2.5 * done * gain}
            row |= {"val/accuracy": 0.05 + 0.3 * done * gain, "val/coverage": 0.992}
            row |= {"val/kl_loss": 2.4 - 1.6 * done * gain, "val/teacher_bpb": 1.248} if teacher else {}
        out.append(row)
    return out


def write_run(folder: Path, *, mode: str = "boundary_kl", steps: int = 400, gain: float = 0.95, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(config(mode, steps)), encoding="utf-8")
    lines = rows(steps, gain=gain, teacher=mode != "ce", seed=seed)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines), encoding="utf-8")
    versions = {
        "limbeck": "0.1.0",
        "torch": "2.13.0",
        "transformers": "5.22.2",
        "seed": 42,
        "started": "2026-11-20T10:31:07+00:00",
        "student_fingerprint": "a1" * 32,
        "teacher_fingerprints": ["b2" * 32],
    }
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
    skipped = {"truncated": 1843, "inexact_chunks": 27, "teacher_1_inexact_chunks": 4, "no_target": 2, "odd<reason>": 1}
    (folder / "skipped.json").write_text(json.dumps(skipped), encoding="utf-8")
    view = view_text(tiny.tokenizer(300), tiny.tokenizer(340), "\n".join(tiny.TEXTS[:3]))
    (folder / "alignment_sample.json").write_text(json.dumps(view), encoding="utf-8")
    for step in (200, 400):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder
