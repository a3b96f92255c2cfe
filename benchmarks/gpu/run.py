"""`limbeck train` as a user runs it, on real text: files in, loader processes, packed documents, live teacher, logging.

    PYTHONPATH=. python benchmarks/gpu/run.py --text FOLDER --student-tokenizer S --teacher-tokenizer T [--steps 40]

Llama-3.2-1B's shape from Qwen3-4B's (random weights) over the real tokenizers of both. Tokens are real student tokens,
seconds are those between two steps' ends, waiting for data included. Writes the row `run_packed` into results.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import GIB, save_row
from benchmarks.gpu.step import SHAPES

WARMUP = 12


def run_file(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The run file of the benchmark."""
    packing = {"enabled": True, "train_mb_tokens": args.tokens, "teacher_mb_tokens": args.tokens,
               "sequence_length_round": 512}  # fmt: skip
    shared: dict[str, Any] = {
        "init": "random",
        "precision": "bfloat16",
        "sequence_packing": packing,
        "max_total_sequence_length": 2048,
        "compile": {"enabled": True, "dynamic": True},
    }
    tied = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    shapes = {side: {k: v for k, v in shape.items() if k != "vocab_size"} | tied for side, shape in SHAPES.items()}
    return {
        "policy": {
            **shared,
            "tokenizer": {"name": args.student_tokenizer},
            "model_overrides": {**shapes["student"], "vocab_size": SHAPES["student"]["vocab_size"]},
            "train_global_batch_size": args.documents,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "fused": True}},
        },
        "teacher": {
            **shared,
            "tokenizer": {"name": args.teacher_tokenizer},
            "model_overrides": {**shapes["teacher"], "vocab_size": SHAPES["teacher"]["vocab_size"]},
        },
        "loss_fn": {"mode": "boundary_kl", "projection_matrix_path": args.projection},
        "data": {"train": args.text, "max_document_bytes": 6000, "max_input_seq_length": 2048},
        "distillation": {"num_prompts_per_step": args.documents, "max_num_steps": args.steps, "max_num_epochs": 100,
                         "val_period": 0, "val_at_end": False},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": folder, "tensorboard_enabled": False},
    }  # fmt: skip


def _random_weights_on_the_device() -> None:
    """Four billion random numbers take seconds there and minutes on the host."""
    from limbeck.models import policy

    load = policy.load_model

    def load_there(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return load(*args, **kwargs)

    policy.load_model = load_there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True, help="text file or pattern")
    parser.add_argument("--student-tokenizer", required=True)
    parser.add_argument("--teacher-tokenizer", required=True)
    parser.add_argument("--projection", default=None)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=18_432)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    from limbeck.algorithms.config import MasterConfig
    from limbeck.algorithms.xtoken_off_policy_distillation import run

    _random_weights_on_the_device()
    with tempfile.TemporaryDirectory() as folder:
        run(MasterConfig.model_validate(run_file(args, folder)))
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/seconds" in row][WARMUP:]
    seconds = [row["train/seconds"] for row in steps]
    tokens = [row["train/tokens_per_s"] * row["train/seconds"] for row in steps]
    row = {
        "tokens_per_s": round(sum(tokens) / sum(seconds)),
        "ms": round(statistics.median(seconds) * 1e3, 1),
        "tokens": round(sum(tokens) / len(tokens)),
        "waited_for_data_ms": round(statistics.mean(row["train/time/data"] for row in steps) * 1e3, 2),
        "steps": len(steps),
        "loss": steps[-1]["train/loss"],
    }
    if torch.cuda.is_available():
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
        save_row("run_packed", row)
    print(f"run_packed: {row}")


if __name__ == "__main__":
    main()
