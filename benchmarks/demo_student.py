"""Would a real student make a better demo? SmolLM2-135M-Instruct into MiniMind2-Small, on the demo's own texts.

Every run is one of `limbeck train`: the same documents and start, with cross-entropy alone or with a divergence beside
it. All are measured twice, on `dev`, documents that the demo neither trains nor reports on, and on `held_out`, those of
the demo: the learning rate of an arm is chosen on the first, and what the table says is the second.

    python -m benchmarks.demo_student FOLDER [--arms ce tree_kl ...] [--lrs 1e-5 3e-5 ...] [--seeds 1 2 3]
        [--budgets 30x120 ...] [--parallel 12] [--minutes 4] [--student MODEL] [--teacher MODEL]
    python -m benchmarks.demo_student FOLDER --table

A budget is steps x documents, because a clock measures the load of a machine as well. FOLDER keeps the texts, the
teacher's signals and a line per finished run, so that a second call goes on; on another machine texts are those of
FOLDER, not of its own standard library. Results go to ``benchmarks/demo_student.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import device, parser, record, worker_pool
from benchmarks.minimind import minimind
from limbeck.algorithms.caching import cache_teachers
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import resolve
from limbeck.demo import TEACHER, standard_library_texts
from limbeck.utils.files import write_atomic
from limbeck.utils.logger import SAMPLES_NAME, read_metrics

BATCH = 8
LENGTH = 320
HELD_OUT = DEV = 40
WARM = 5

ARMS: dict[str, dict[str, Any] | None] = {
    "ce": None,
    "tree_kl": {},
    "tree_kl_.3": {"kl_loss_weight": 0.3},
    "tree_kl_hard": {"gate": "hard"},
    "tree_kl_soft": {"gate": "soft"},
}
"""Settings of ``loss_fn`` beside ``tree_kl``, by arm; None: cross-entropy alone. The weight is 1 where none is said."""


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: str
    lr: float
    steps: int
    documents: int
    seed: int


@dataclass(frozen=True)
class Place:
    """Where runs find their models and texts."""

    folder: Path
    student: str
    teacher: str

    def texts(self, name: str) -> str:
        return str(self.folder / f"{name}.jsonl")


def write_splits(place: Place, budgets: Sequence[tuple[int, int]], few: bool) -> None:
    """The demo's held-out and training documents, and others to choose settings on; what lies there stays."""
    texts = list(dict.fromkeys(standard_library_texts()))
    random.Random(0).shuffle(texts)
    dev, held_out = (4, 4) if few else (DEV, HELD_OUT)
    splits = {"held_out": texts[:held_out], "dev": texts[-dev:]}
    splits |= {f"train_{size}": texts[HELD_OUT : HELD_OUT + size] for _, size in budgets}
    place.folder.mkdir(parents=True, exist_ok=True)
    for name, part in splits.items():
        if not Path(place.texts(name)).exists():
            write_atomic(Path(place.texts(name)), "".join(json.dumps({"text": text}) + "\n" for text in part))


def settings(place: Place, job: Job) -> MasterConfig:
    """The run of one job."""
    loss = ARMS[job.arm]
    values: dict[str, Any] = {
        "policy": {
            "model_name": place.student,
            "tokenizer": {"bos": True},
            "precision": "float32",
            "max_total_sequence_length": LENGTH,
            "train_micro_batch_size": BATCH,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": job.lr, "weight_decay": 0.01}},
            "scheduler": [
                {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": WARM}},
                {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": max(job.steps - WARM, 1)}},
                {"milestones": [WARM]},
            ],
        },
        "data": {
            "train": place.texts(f"train_{job.documents}"),
            "validation": [place.texts("held_out"), place.texts("dev")],
            "max_input_seq_length": LENGTH,
            "max_teacher_seq_length": LENGTH,
            "long_documents": "cut",
        },
        "distillation": {
            "num_prompts_per_step": BATCH,
            "max_num_steps": job.steps,
            "max_num_epochs": math.ceil(job.steps * BATCH / job.documents) + 1,
            "val_period": 0,
            "seed": job.seed,
            "samples": {"number": 1 if job.seed == 1 else 0},
        },
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(place.folder / "runs" / run_name(job)), "tensorboard_enabled": False},
    }
    if loss is not None:
        values["loss_fn"] = {"mode": "tree_kl", "ce_loss_scale": 1.0, "block_rows": 2048, **loss}
        values["teacher"] = {
            "model_name": place.teacher,
            "precision": "float32",
            "cache": str(place.folder / f"teacher_{job.documents}"),
            "cache_k": 256,
            "max_total_sequence_length": LENGTH,
            "logprob_batch_size": BATCH,
        }
    return resolve(MasterConfig, values)


def run_name(job: Job) -> str:
    return "_".join(str(part) for part in asdict(job).values())


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def cache(place: Place, documents: int) -> float:
    """Have the teacher read the texts of one budget; the CPU seconds that it took."""
    begun = cpu_seconds()
    cache_teachers(settings(place, Job("tree_kl", 1e-5, 1, documents, 1)), say=lambda line: None)
    return cpu_seconds() - begun


def measure(place: Place, job: Job) -> dict[str, Any]:
    """Train one job; its settings and figures."""
    config = settings(place, job)
    begun, cpu = time.perf_counter(), cpu_seconds()
    run(config)
    folder = Path(config.logger.log_dir)
    rows = read_metrics(folder / "metrics.jsonl")
    figures: dict[str, Any] = {}
    for split in ("dev", "held_out"):
        bits = [row[f"val/{split}.jsonl/bpb"] for row in rows if f"val/{split}.jsonl/bpb" in row]
        teacher = [row[f"val/{split}.jsonl/teacher_bpb"] for row in rows if f"val/{split}.jsonl/teacher_bpb" in row]
        figures[split] = {"start": bits[0], "end": bits[-1], "teacher": teacher[0] if teacher else None}
    samples = read_metrics(folder / SAMPLES_NAME) if (folder / SAMPLES_NAME).exists() else []
    texts = [{key: row[key] for key in ("writer", "step", "prompt", "text")} for row in samples]
    seconds = {"seconds": round(time.perf_counter() - begun, 1), "cpu_seconds": round(cpu_seconds() - cpu, 1)}
    return {**asdict(job), "device": device(), **seconds, **figures, "texts": texts}


def fill(place: Place, jobs: list[Job], parallel: int, minutes: float) -> None:
    """Every job that has no row yet, as far as they can begin in time. One that fails costs its own row alone."""
    path, end = place.folder / "rows.jsonl", time.time() + 60 * minutes
    have = {Job(*(row[key] for key in ("arm", "lr", "steps", "documents", "seed"))) for row in read_rows(place)}
    wanted = iter([job for job in jobs if job not in have])
    with worker_pool(parallel) as pool, path.open("a", encoding="utf-8") as rows:
        for job, row in _results(pool, place, wanted, parallel, end):
            if isinstance(row, Exception):
                print(run_name(job), "failed:", row, flush=True)
                continue
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            print(f"{run_name(job)}: dev {row['dev']['end']:.4f}, {row['seconds']} s", flush=True)


def _results(
    pool: ProcessPoolExecutor, place: Place, wanted: Iterator[Job], parallel: int, end: float
) -> Iterator[tuple[Job, Any]]:
    """What the jobs give as they end; never more of them given out than can run."""
    running = {}
    while True:
        while len(running) < parallel and time.time() < end and (job := next(wanted, None)) is not None:
            running[pool.submit(measure, place, job)] = job
        if not running:
            return
        done = next(as_completed(running))
        yield running.pop(done), done.exception() or done.result()


def read_rows(place: Place) -> list[dict[str, Any]]:
    path = place.folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Per budget and arm: means over seeds on dev by learning rate, and on held_out at the rate that is best there."""
    groups: dict[tuple[int, int, str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["steps"], row["documents"], row["arm"], row["lr"]].append(row)
    lrs = sorted({key[3] for key in groups})
    lines = []
    for steps, documents in sorted({key[:2] for key in groups}):
        lines += [f"{steps} steps, {documents} documents", ""]
        lines += ["| arm | " + " | ".join(f"dev, {lr:g}" for lr in lrs) + " | held_out at the best |"]
        lines += ["|---|" + "---:|" * (len(lrs) + 1)]
        for arm in ARMS:
            means = {lr: _mean(groups.get((steps, documents, arm, lr), []), "dev") for lr in lrs}
            if not (known := {lr: mean for lr, mean in means.items() if mean is not None}):
                continue
            best = min(known, key=lambda lr: known[lr])
            held_out = [row["held_out"]["end"] for row in groups[steps, documents, arm, best]]
            spread = f" ± {statistics.stdev(held_out):.3f}" if len(held_out) > 1 else ""
            cells = ["-" if mean is None else f"{mean:.3f}" for mean in means.values()]
            lines += [f"| {arm} | " + " | ".join(cells) + f" | {statistics.mean(held_out):.3f}{spread} |"]
        lines += [""]
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], split: str) -> float | None:
    return statistics.mean(row[split]["end"] for row in rows) if rows else None


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    arguments.add_argument("--lrs", nargs="+", type=float, default=[1e-5, 3e-5, 6e-5, 1e-4])
    arguments.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    arguments.add_argument("--budgets", nargs="+", type=_budget, default=[(30, 120), (30, 240), (60, 120)])
    arguments.add_argument("--parallel", type=int, default=1)
    arguments.add_argument("--minutes", type=float, default=math.inf, help="no run begins after that many")
    arguments.add_argument("--student", help="the folder of MiniMind2-Small, where npm cannot fetch it")
    arguments.add_argument("--teacher", default=TEACHER)
    arguments.add_argument("--tiny", action="store_true", help="two steps on few documents: does it run?")
    arguments.add_argument("--table", action="store_true", help="print the tables of what is there")
    args = arguments.parse_args()
    if args.tiny:
        args.budgets, args.lrs, args.seeds = [(2, 16)], args.lrs[:1], args.seeds[:1]
    if not args.table:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        place = Place(args.folder, args.student or str(minimind()), args.teacher)
        write_splits(place, args.budgets, args.tiny)
        begun = time.time()
        taught = any(ARMS[arm] is not None for arm in args.arms)
        for documents in dict.fromkeys(size for _, size in args.budgets if taught):
            print(f"the teacher has read {documents} documents: {cache(place, documents):.0f} CPU seconds", flush=True)
        jobs = [
            Job(arm, lr, *budget, seed)
            for budget in args.budgets
            for seed in args.seeds
            for lr in args.lrs
            for arm in args.arms
        ]
        fill(place, jobs, args.parallel, args.minutes - (time.time() - begun) / 60)
    rows = read_rows(Place(args.folder, "", ""))
    if not args.tiny and not args.table:
        record(args.out, {"runs": rows})
    print(table(rows))


def _budget(text: str) -> tuple[int, int]:
    steps, _, documents = text.partition("x")
    if not (steps.isdigit() and documents.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: a budget is steps x documents, as in 30x120")
    return int(steps), int(documents)


if __name__ == "__main__":
    main()
