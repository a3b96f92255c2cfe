"""Peak memory and speed of the training loop beside a plain transformers loop with full logits.

    python -m benchmarks.loop

Same models, batches, loss and optimizer. ``limbeck`` is the product's loop: hidden states and heads go into the block
loss. ``plain`` calls both models for their full logits and hands them to the same loss function in its published form,
so what it pays for is the logits, not a slower loss. Each variant is a process of its own; both are set up by the same
code, and memory is counted above what is resident after that. Writes ``loop.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import parser, record

VARIANTS = ("limbeck", "plain")
SKIPPED = 2  # first steps, which also allocate


def settings(folder: Path, rows: int, length: int, steps: int) -> dict[str, Any]:
    """The run that both variants make."""
    arch = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }

    def model(name: str) -> dict[str, Any]:
        return {"init": "random", "tokenizer": {"name": str(folder / name)}, "model_overrides": arch}

    return {
        "policy": {**model("student"), "train_micro_batch_size": rows},
        "teacher": model("teacher"),
        "data": {"train": str(folder / "train.jsonl"), "max_input_seq_length": length},
        "loss_fn": {"mode": "boundary_kl", "block_rows": 256},
        "distillation": {"num_prompts_per_step": rows, "max_num_steps": steps, "max_num_epochs": 100, "seed": 1},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "run"), "tensorboard_enabled": False, "progress": False},
    }


def prepare(folder: Path, length: int) -> None:
    """Documents long enough to fill a row, and two vocabularies."""
    from limbeck.demo import standard_library_texts, train_tokenizer

    text = "\n\n".join(dict.fromkeys(standard_library_texts(4000)))
    (folder / "vocabulary.txt").write_text(text, encoding="utf-8")
    size = 8 * length
    parts = [text[i * size : (i + 1) * size] for i in range(32)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in parts), encoding="utf-8")
    for name, ids in (("student", 8192), ("teacher", 16384)):
        train_tokenizer(folder / "vocabulary.txt", folder / name, ids)


def resident() -> float:
    """Memory of this process now, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def peak() -> float:
    """Most memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(variant: str, values: dict[str, Any]) -> dict[str, Any]:
    """Run one variant in this process."""
    from limbeck.algorithms import xtoken_off_policy_distillation as algorithm
    from limbeck.algorithms.build import load_datasets, load_tokenizers
    from limbeck.config import resolve

    config = resolve(algorithm.MasterConfig, values)
    student_tokenizer, teachers = load_tokenizers(config)
    train, val = load_datasets(config)
    parts = algorithm.setup(config, student_tokenizer, teachers, train, val)
    before = resident()
    if variant == "limbeck":
        algorithm.xtoken_off_policy_distillation_train(*parts)
        rows = [json.loads(line) for line in (Path(config.logger.log_dir) / "metrics.jsonl").read_text().splitlines()]
        steps = [(r["train/loss"], r["train/tokens_per_s"]) for r in rows]
    else:
        steps = plain_loop(parts, config.distillation.max_num_steps)
    return {
        "losses": [round(loss, 6) for loss, _ in steps],
        "tokens_per_s": round(statistics.median(speed for _, speed in steps[SKIPPED:]), 1),
        "peak_mib": round(peak() - before, 1),
        "resident_before_mib": round(before, 1),
    }


def plain_loop(parts: tuple[Any, ...], steps: int) -> list[tuple[float, float]]:
    """Loss and tokens per second by step: full logits of both models, autograd, one optimizer step."""
    import torch

    student, teacher, loader, _, loss_fn = parts[:5]
    out: list[tuple[float, float]] = []
    while len(out) < steps:
        loader.sampler.set_epoch(len(out) // len(loader))
        for batch in loader:
            if len(out) == steps:
                break
            start = time.perf_counter()
            with torch.no_grad():
                target = teacher.model(input_ids=batch["teacher_input_ids"], use_cache=False).logits
            student.model.train()
            logits = student.model(input_ids=batch["input_ids"], use_cache=False).logits
            loss, _ = loss_fn(batch, None, None, logits, target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
            student.optimizer.step()
            student.optimizer.zero_grad(set_to_none=True)
            out.append((float(loss.detach()), int(batch["input_lengths"].sum()) / (time.perf_counter() - start)))
    return out


def main() -> None:
    """Measure both variants and write the ratios."""
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, settings(args.folder, args.rows, args.length, args.steps))))
        return
    sizes = [f"--rows={args.rows}", f"--length={args.length}", f"--steps={args.steps}"]
    result: dict[str, Any] = {"rows": args.rows, "length": args.length, "vocabularies": [8192, 16384]}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), args.length)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        for variant in VARIANTS:
            command = [sys.executable, "-m", "benchmarks.loop", f"--variant={variant}", f"--folder={scratch}", *sizes]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            result[variant] = json.loads(done.stdout.splitlines()[-1])
    ours, plain = result["limbeck"], result["plain"]
    result["peak_memory_ratio"] = round(plain["peak_mib"] / ours["peak_mib"], 2)
    result["speed_ratio"] = round(ours["tokens_per_s"] / plain["tokens_per_s"], 2)
    result["largest_loss_difference"] = max(abs(a - b) for a, b in zip(ours["losses"], plain["losses"], strict=True))
    record(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
