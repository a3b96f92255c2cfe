"""`limbeck train` as a user runs it, on real text: files in, loader processes, packed documents, live teacher, logging.

    PYTHONPATH=. python benchmarks/gpu/run.py --text FOLDER --student-tokenizer S --teacher-tokenizer T [--steps 40]
    PYTHONPATH=. python benchmarks/gpu/run.py ... --tiny      # two small layers each, also without a GPU

Llama-3.2-1B's shape from Qwen3-4B's (random weights) over the real tokenizers of both. Tokens are real student tokens,
seconds are those between two steps' ends, waiting for data included. Then the bare step: the same student, teacher and
loss on batches that lie ready, without loader, logging or loop. The distance between the two is taken apart by the
loop's own sections (`limbeck train --profile`, whose steps wait for the device and are no part of the speed). Writes
the row `run_packed` into results.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import GIB, save_row
from benchmarks.gpu.step import SHAPES, TINY

PROFILED = 8
WARMUP = 1 + PROFILED + 2
"""Steps that are not timed: the first, those under the profile, and those under its trace."""
BARE = 8
AROUND = ("data", "logging", "validation", "checkpoint", "other")
"""Sections of the loop that a bare step does not have."""


def run_file(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The run file of the benchmark."""
    packing = {"enabled": True, "train_mb_tokens": args.tokens, "teacher_mb_tokens": args.tokens,
               "sequence_length_round": 512}  # fmt: skip
    shared: dict[str, Any] = {
        "init": "random",
        "precision": "float32" if args.tiny else "bfloat16",
        "sequence_packing": packing,
        "max_total_sequence_length": 2048,
        "compile": {"enabled": not args.tiny, "dynamic": True},
    }
    tied = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    shapes = {side: shape | (TINY if args.tiny else {}) | tied for side, shape in SHAPES.items()}
    if args.tiny:
        # as many ids as the tokenizers have
        shapes = {side: {k: v for k, v in shape.items() if k != "vocab_size"} for side, shape in shapes.items()}
    return {
        "policy": {
            **shared,
            "tokenizer": {"name": args.student_tokenizer},
            "model_overrides": shapes["student"],
            "train_global_batch_size": args.documents,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "fused": not args.tiny}},
        },
        "teacher": {
            **shared,
            "tokenizer": {"name": args.teacher_tokenizer},
            "model_overrides": shapes["teacher"],
        },
        "loss_fn": {"mode": "boundary_kl", "projection_matrix_path": args.projection},
        "data": {"train": args.text, "max_document_bytes": 6000, "max_input_seq_length": 2048},
        "distillation": {"num_prompts_per_step": args.documents, "max_num_steps": args.steps, "max_num_epochs": 100,
                         "val_period": 0, "val_at_end": False},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": folder, "tensorboard_enabled": False, "profile_steps": PROFILED},
    }  # fmt: skip


def _random_weights_on_the_device() -> None:
    """Four billion random numbers take seconds there and minutes on the host."""
    from limbeck.models import loading

    load = loading.load_model

    def load_there(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return load(*args, **kwargs)

    loading.load_model = load_there


def bare_step(parts: tuple[Any, ...]) -> float:
    """Seconds of a step on batches that lie ready; ``parts``: what ``setup`` gave, after the run."""
    from limbeck.algorithms.xtoken_off_policy_distillation import as_teachers

    student, teacher, loader, _, loss_fn = parts[:5]
    loader.sampler.set_epoch(0)
    batches = list(itertools.islice(loader, 1 + BARE))
    teachers = as_teachers(teacher)
    for number, batch in enumerate(batches):
        student.train(batch, loss_fn, teachers=teachers)
        if number == 0:
            _wait()
            begun = time.perf_counter()
    _wait()
    return (time.perf_counter() - begun) / max(len(batches) - 1, 1)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The run, and the bare step behind it."""
    from limbeck.algorithms import xtoken_off_policy_distillation as algorithm
    from limbeck.algorithms.build import load_datasets, load_tokenizers
    from limbeck.algorithms.loop import whole_run
    from limbeck.algorithms.profiling import PROFILE_NAME, means

    config = algorithm.MasterConfig.model_validate(run_file(args, folder))
    with whole_run(config):
        student_tokenizer, others = load_tokenizers(config)
        parts = algorithm.setup(config, student_tokenizer, others, *load_datasets(config))
        algorithm.xtoken_off_policy_distillation_train(*parts)
        bare = bare_step(parts)
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/seconds" in row][WARMUP:]
    sections = means(json.loads((Path(folder) / PROFILE_NAME).read_bytes())["steps"])
    seconds = [row["train/seconds"] for row in steps]
    tokens = [row["train/tokens_per_s"] * row["train/seconds"] for row in steps]
    whole = statistics.mean(seconds)
    return {
        "tokens_per_s": round(sum(tokens) / sum(seconds)),
        "ms": round(statistics.median(seconds) * 1e3, 1),
        "tokens": round(sum(tokens) / len(tokens)),
        "waited_for_data_ms": round(statistics.mean(row["train/time/data"] for row in steps) * 1e3, 2),
        "steps": len(steps),
        "loss": steps[-1]["train/loss"],
        "bare_step_ms": round(bare * 1e3, 1),
        "distance_to_the_bare_step": round(1 - bare / whole, 4),
        "around_the_step_ms": {name: round(sections[name] * 1e3, 2) for name in AROUND if name in sections},
        "sections_ms": {name: round(value * 1e3, 2) for name, value in sections.items() if name not in AROUND},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text file or pattern")
    parser.add_argument("--student-tokenizer", required=True)
    parser.add_argument("--teacher-tokenizer", required=True)
    parser.add_argument("--projection", default=None)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=18_432)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    args = parser.parse_args()
    _random_weights_on_the_device()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(args, folder)
    if torch.cuda.is_available() and not args.tiny:
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
        save_row("run_packed", row)
    print(f"run_packed: {json.dumps(row)}")


if __name__ == "__main__":
    main()
