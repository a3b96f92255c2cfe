"""Would a real student make a better demo? SmolLM2-135M-Instruct into MiniMind2-Small, on the demo's own texts.

Every arm is one run as `limbeck train` does it: the same documents, steps and start, with cross-entropy alone or with a
divergence beside it. Settings are chosen on `dev`, documents that no table reports; `held_out` are those of the demo.
The budget is a number of steps, because a clock measures the load of a machine as well; CPU seconds are told.

    OMP_NUM_THREADS=1 python -m benchmarks.demo_student FOLDER --arm ce --lr 1e-4 [--seed 1] [--on dev|held_out]
    OMP_NUM_THREADS=1 python -m benchmarks.demo_student FOLDER --arm kl_loss_weight=0.3 gate=soft --lr 1e-4

Adds a row to ``benchmarks/demo_student.json``; FOLDER keeps texts, the teacher's signals and the runs.
"""

from __future__ import annotations

import json
import math
import random
import resource
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import parser, record
from benchmarks.minimind import minimind
from limbeck.algorithms.caching import cache_teachers
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import resolve
from limbeck.demo import TEACHER, standard_library_texts
from limbeck.utils.files import write_atomic
from limbeck.utils.logger import SAMPLES_NAME, read_metrics

BATCH = 8
LENGTH = 192
HELD_OUT = DEV = 40


def write_splits(folder: Path, train: int) -> None:
    """The demo's held-out and training documents, and others to choose settings on."""
    texts = list(dict.fromkeys(standard_library_texts()))
    random.Random(0).shuffle(texts)
    splits = {"held_out": texts[:HELD_OUT], "train": texts[HELD_OUT : HELD_OUT + train], "dev": texts[-DEV:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in splits.items():
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in part))


def settings(folder: Path, name: str, args: Any, loss: dict[str, Any] | None) -> MasterConfig:
    """The run of one arm; without ``loss`` there is no teacher."""
    warm = 5
    cosine = {"T_max": max(args.steps - warm, 1)}
    values: dict[str, Any] = {
        "policy": {
            "model_name": str(minimind()),
            "tokenizer": {"bos": True},
            "max_total_sequence_length": LENGTH,
            "train_micro_batch_size": BATCH,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": args.lr, "weight_decay": 0.01}},
            "scheduler": [
                {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": warm}},
                {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": cosine},
                {"milestones": [warm]},
            ],
        },
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / f"{args.on}.jsonl"),
            "max_input_seq_length": LENGTH,
            "max_teacher_seq_length": LENGTH,
        },
        "distillation": {
            "num_prompts_per_step": BATCH,
            "max_num_steps": args.steps,
            "max_num_epochs": math.ceil(args.steps * BATCH / args.documents) + 1,
            "val_period": 0,
            "seed": args.seed,
        },
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / name), "print_seconds": 30, "tensorboard_enabled": False},
    }
    if loss is not None:
        values["loss_fn"] = {"mode": "tree_kl", "block_rows": 2048, **loss}
        values["teacher"] = {
            "model_name": TEACHER,
            "cache": str(folder / "teacher_cache"),
            "cache_k": 256,
            "max_total_sequence_length": LENGTH,
            "logprob_batch_size": 8,
        }
    return resolve(MasterConfig, values)


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(folder: Path, args: Any) -> dict[str, Any]:
    """Train one arm; its settings and figures."""
    if not (folder / "train.jsonl").exists():
        write_splits(folder, args.documents)
    loss = None if args.arm == ["ce"] else {k: yaml.safe_load(v) for k, v in (pair.split("=") for pair in args.arm)}
    arm = " ".join(args.arm)
    name = f"{arm} {args.lr:g} {args.steps} {args.seed} {args.on}".replace(" ", "_")
    config = settings(folder, name, args, loss)
    begun = cpu_seconds()
    if loss is not None:
        cache_teachers(config, say=lambda line: None)
    cached = cpu_seconds()
    run(config)
    rows = read_metrics(folder / name / "metrics.jsonl")
    bits = [row["val/bpb"] for row in rows if "val/bpb" in row]
    teacher = [row["val/teacher_bpb"] for row in rows if "val/teacher_bpb" in row]
    samples = [row for row in read_metrics(folder / name / SAMPLES_NAME) if row["number"] == 0]
    return {
        "arm": arm,
        "lr": args.lr,
        "steps": args.steps,
        "documents": args.documents,
        "seed": args.seed,
        "on": args.on,
        "bpb_start": bits[0],
        "bpb_end": bits[-1],
        "bpb_teacher": teacher[0] if teacher else None,
        "cpu_s_teacher": round(cached - begun),
        "cpu_s_training": round(cpu_seconds() - cached),
        "texts": [{key: row[key] for key in ("writer", "step", "prompt", "text")} for row in samples],
    }


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--arm", nargs="+", default=["ce"], help="ce, or settings of loss_fn beside tree_kl")
    arguments.add_argument("--lr", type=float, default=1e-4)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--documents", type=int, default=120)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--on", choices=["dev", "held_out"], default="dev")
    args = arguments.parse_args()
    earlier = json.loads(args.out.read_text(encoding="utf-8"))["runs"] if args.out.exists() else []
    row = measure(args.folder, args)
    record(args.out, {"runs": [*earlier, row]})
    print(json.dumps({key: value for key, value in row.items() if key != "texts"}))


if __name__ == "__main__":
    main()
