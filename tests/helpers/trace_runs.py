"""Run files for training on the shipped traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from limbeck.algorithms.config import TraceMasterConfig
from limbeck.config import merge, resolve
from tests.helpers.tiny import LLAMA
from tests.helpers.tokenizers import WORKSHOP, workshop

MODEL = {**LLAMA, "max_position_embeddings": 2048}


def tokenizer_folder(where: Path, size: int = 400) -> str:
    folder = where / f"tokenizer{size}"
    if not folder.exists():
        workshop(size).save_pretrained(folder)
    return str(folder)


def short_traces(where: Path, names: tuple[str, ...] = ("store-count-1", "store-count-2", "store-count-3")) -> str:
    """Some of the shipped traces, with one tool each instead of all, so that sequences stay short."""
    path = where / f"{'_'.join(names)}.jsonl"
    if not path.exists():
        traces = [json.loads(line) for line in WORKSHOP.read_text(encoding="utf-8").splitlines()]
        kept = [json.dumps({**trace, "tools": trace["tools"][:1]}) for trace in traces if trace["id"] in names]
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return str(path)


def settings(where: Path, **more: Any) -> dict[str, Any]:
    base = {
        "policy": {
            "init": "random",
            "model_overrides": MODEL,
            "tokenizer": {"name": tokenizer_folder(where)},
            "train_micro_batch_size": 2,
            "logprob_batch_size": 4,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.0}},
        },
        "traces": {"train": short_traces(where), "shuffle": True},
        "loss": {"block_rows": 64},
        "distillation": {
            "num_prompts_per_step": 3,
            "max_num_steps": 4,
            "max_num_epochs": 100,
            "seed": 3,
            "val_at_start": False,
            "val_at_end": False,
            "monitor": {"period": 2, "generate": 0},
        },
        "logger": {"log_dir": str(where / "run"), "tensorboard_enabled": False, "progress": False},
        "checkpointing": {"enabled": False},
    }
    return merge(base, more)


def config(where: Path, **more: Any) -> TraceMasterConfig:
    return resolve(TraceMasterConfig, settings(where, **more))
