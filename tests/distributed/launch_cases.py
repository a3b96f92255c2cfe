"""A tiny whole run as a run file, for every way of launching it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.models.tiny import LLAMA, QWEN3, TEXTS, tokenizer

# What two equal runs differ in: clocks, and what is derived from them.
_CLOCKS = ("seconds", "tokens_per_s", "time/")


def write_run(folder: Path, **more: Any) -> Path:
    """``run.yaml`` with tokenizers and data beside it; ``more`` replaces or adds keys within its sections."""
    for name, size in (("student", 300), ("teacher", 340)):
        if not (folder / name).exists():
            tokenizer(size).save_pretrained(folder / name)
    # the number comes first: texts that are cut to the context must still differ
    texts = [f"({i}) {text}" for i in range(4) for text in TEXTS]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    run: dict[str, Any] = {
        "policy": {
            "init": "random",
            "tokenizer": {"name": str(folder / "student")},
            "model_overrides": LLAMA,
            "max_total_sequence_length": 64,
            "train_micro_batch_size": 2,
        },
        "teacher": {
            "init": "random",
            "tokenizer": {"name": str(folder / "teacher")},
            "model_overrides": QWEN3,
            "logprob_batch_size": 4,
        },
        "loss_fn": {"mode": "boundary_kl", "kl_loss_weight": 1.0, "ce_loss_scale": 1.0},
        "data": {"train": str(folder / "train.jsonl"), "max_input_seq_length": 64},
        "distillation": {"num_prompts_per_step": 4, "max_num_steps": 6, "val_at_start": False, "seed": 3},
        "checkpointing": {"save_period": 1, "keep_top_k": 2},
        "logger": {"log_dir": str(folder / "run"), "tensorboard_enabled": False, "progress": False},
        "cluster": {"backend": "gloo"},
    }
    for section, values in more.items():
        run[section] = {**run[section], **values}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without clocks."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(c in k for c in _CLOCKS) and k != "wall"} for row in rows]
