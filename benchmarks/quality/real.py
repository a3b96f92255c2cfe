"""The quality benchmark on real models: at which amount of text does a teacher stop helping, and in which domain?

    PYTHONPATH=. python benchmarks/quality/real.py CORPUS WORK --student FOLDER --teacher MODEL
        [--megabytes .1 .3 1 3] [--arms ce tree_kl ...] [--seeds 1 2 3] [--epochs 2] [--parallel 6] [--minutes 9]

CORPUS is what `corpus.py` wrote; the student reads documents of its part of `--domains`, in equal shares of bytes, and
is measured on the held-out part of the same domains. Student and teacher as they come are measured, too: a teacher
teaches nothing where it is no better. A model that needs its begin token (`limbeck doctor MODEL` tells) comes with a
tokenizer that sets it. Every arm is a `limbeck train` run; results go to `WORK/real.jsonl`, one line per
finished run, and a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.quality.suite import ARMS, CONTEXT, Results, measure, run_file, train

DOMAINS = ("english", "gsm8k", "code", "wiki")
DEFAULT_ARMS = ["ce", "boundary_kl", "tree_kl", "tree_kl_soft", "tree_kl_hard", "tree_kl_.3"]
BATCH = 16
LR = 3e-4


def cut_corpus(corpus: Path, out: Path, domains: tuple[str, ...], megabytes: float) -> int:
    """`out/student` with so much text, in equal shares of the domains as far as they reach, and `out/held_out`; the
    number of documents."""
    left, count = round(megabytes * 1e6), 0
    texts = {name: (corpus / "student" / f"{name}.jsonl").read_text().strip().split("\n") for name in domains}
    for part in ("student", "held_out"):
        (out / part).mkdir(parents=True, exist_ok=True)
    # the smallest first: what a domain lacks, the others give
    for i, name in enumerate(sorted(domains, key=lambda name: sum(map(len, texts[name])))):
        lines, share, taken = texts[name], left // (len(domains) - i), list[str]()
        random.Random(name).shuffle(lines)
        while lines and sum(len(json.loads(line)["text"].encode()) for line in taken) < share:
            taken.append(lines.pop())
        left -= sum(len(json.loads(line)["text"].encode()) for line in taken)
        count += len(taken)
        (out / "student" / f"{name}.jsonl").write_text("".join(line + "\n" for line in taken))
        shutil.copy(corpus / "held_out" / f"{name}.jsonl", out / "held_out" / f"{name}.jsonl")
    return count


def policy(model: Path, steps: int) -> dict[str, Any]:
    """The student as it comes, under a cosine schedule."""
    warmup = max(steps // 20, 1)
    return {
        "model_name": str(model),
        "precision": "float32",
        "max_total_sequence_length": CONTEXT,
        "train_micro_batch_size": BATCH,
        "max_grad_norm": 1.0,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.05, "total_iters": warmup}},
            {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": max(steps - warmup, 1)}},
            {"milestones": [warmup]},
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--megabytes", nargs="+", type=float, default=[0.3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    args = parser.parse_args()
    results = Results(args.work / "real.jsonl", args.minutes, epochs=args.epochs, learning_rate=LR, batch=BATCH)
    texts = {f"real_{size:g}": args.work / f"text_{size:g}" for size in args.megabytes}
    documents = {
        pair: cut_corpus(args.corpus, texts[pair], tuple(args.domains), size)
        for pair, size in zip(texts, args.megabytes, strict=True)
    }

    def as_it_comes(pair: str, side: str, seed: int) -> dict[str, Any]:
        measures = measure(getattr(args, side), next(iter(texts.values())), args.work / f"{side}.log")
        return {"pair": pair, "arm": side, "seed": seed, "seconds": 0, "measures": measures}

    def distil(pair: str, arm: str, seed: int) -> dict[str, Any]:
        folder, steps = args.work / f"{pair}_{arm}_{seed}", max(documents[pair] * args.epochs // BATCH, 1)
        shutil.rmtree(folder, ignore_errors=True)
        settings = run_file(texts[pair], "student", policy(args.student, steps), steps, BATCH, seed, folder)
        loss = ARMS[arm]
        if loss is not None:
            settings["teacher"] = {
                "model_name": str(args.teacher), "precision": "float32", "max_total_sequence_length": CONTEXT
            }  # fmt: skip
            settings["loss_fn"] = {"block_rows": 2048, **loss}
        start = time.time()
        train(settings, folder)
        row = {"pair": pair, "arm": arm, "seed": seed, "steps": steps, "seconds": round(time.time() - start)}
        row["measures"] = measure(folder, texts[pair], folder / "log")
        shutil.rmtree(folder / "checkpoints")
        return row

    results.fill([("real", "student", 1), ("real", "teacher", 1)], as_it_comes, args.parallel)
    results.fill(
        [(pair, arm, seed) for seed in args.seeds for pair in texts for arm in args.arms], distil, args.parallel
    )


if __name__ == "__main__":
    main()
