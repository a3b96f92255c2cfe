"""Settings of `limbeck demo`, chosen on documents that it neither trains nor reports on, with three seeds.

    PYTHONPATH=. python benchmarks/demo_settings.py FOLDER [--teacher MODEL] [--seeds 1 2 3] [--rates 1e-3 ...]
        [--parallel 2]
    PYTHONPATH=. python benchmarks/demo_settings.py FOLDER --table

Every run is the demo's own run file with another learning rate or other weights, through `limbeck train`; its bits per
byte are of `dev`, forty documents of the standard library behind the demo's own. FOLDER keeps texts, vocabulary, the
teacher's signals and finished runs, so that a second call goes on; on another machine texts are those of FOLDER.
`--teacher` names the demo's teacher where it lies elsewhere. Results go to ``benchmarks/demo_settings.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import parser, record
from benchmarks.quality.suite import limbeck
from limbeck.config import dump_yaml
from limbeck.demo import TEACHER, demo_config, standard_library_texts, train_tokenizer, write_texts
from limbeck.utils.files import write_atomic
from limbeck.utils.logger import read_metrics

DOCUMENTS, HELD_OUT, DEV, STEPS = 120, 40, 40, 150
LOSSES: dict[str, dict[str, float] | None] = {
    "cross-entropy": None,
    "1 x tree_kl + 1 x cross-entropy": {"ce_loss_scale": 1.0},
    "1 x tree_kl + .3 x cross-entropy": {"ce_loss_scale": 0.3},
    "1 x tree_kl": {"ce_loss_scale": 0.0},
}
"""Weights beside the demo's own; None: no teacher."""


@dataclass(frozen=True)
class Job:
    """One run."""

    loss: str
    rate: float
    seed: int


def prepare(folder: Path) -> None:
    """The demo's texts and vocabulary, and the documents behind them."""
    if (folder / "tokenizer").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder, train=DOCUMENTS, held_out=HELD_OUT)
    texts = list(dict.fromkeys(standard_library_texts()))
    random.Random(0).shuffle(texts)
    dev = texts[HELD_OUT + DOCUMENTS : HELD_OUT + DOCUMENTS + DEV]
    write_atomic(folder / "dev.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in dev))
    train_tokenizer(folder / "vocabulary.txt", folder / "tokenizer")


def run_file(folder: Path, job: Job, teacher: str) -> dict[str, Any]:
    """The demo's run file with a job's settings, validated on `dev`; in float32, as on a processor."""
    weights = LOSSES[job.loss]
    values: dict[str, Any] = yaml.safe_load(
        dump_yaml(demo_config(folder, distil=weights is not None, steps=STEPS, documents=DOCUMENTS))
    )
    values["policy"]["optimizer"]["kwargs"]["lr"] = job.rate
    values["policy"]["precision"] = "float32"
    values["data"]["validation"] = str(folder / "dev.jsonl")
    values["distillation"] |= {"seed": job.seed, "val_period": STEPS, "val_at_start": False}
    values["logger"]["log_dir"] = str(folder / "runs" / f"{list(LOSSES).index(job.loss)}_{job.rate:g}_{job.seed}")
    if weights is not None:
        values["loss_fn"] |= weights
        values["teacher"] |= {"model_name": teacher, "precision": "float32"}
    return values


def bits(folder: Path, job: Job, teacher: str) -> float:
    """Bits per byte of a job's student, trained where it is not yet."""
    values = run_file(folder, job, teacher)
    out = Path(values["logger"]["log_dir"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.yaml").write_text(yaml.safe_dump(values))
    limbeck("train", str(out / "run.yaml"), "-q", "--json", log=out / "log")
    found: float = read_metrics(out / "metrics.jsonl")[-1]["val/bpb"]
    return found


def table(runs: Iterable[dict[str, Any]]) -> str:
    """Markdown: mean and spread over seeds, by loss and learning rate."""
    found = defaultdict[tuple[str, float], list[float]](list)
    for run in runs:
        found[run["loss"], run["rate"]].append(run["bpb"])
    rates = sorted({rate for _, rate in found})
    lines = ["| | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for loss in LOSSES:
        own = [found[loss, rate] for rate in rates]
        cells = [f"{statistics.mean(b):.3f} ± {statistics.stdev(b):.3f}" if len(b) > 1 else "-" for b in own]
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--teacher", default=TEACHER)
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3])
    options.add_argument("--parallel", type=int, default=2)
    options.add_argument("--table", action="store_true", help="only print what the results file holds")
    args: argparse.Namespace = options.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())["runs"]))
        return
    prepare(args.folder)
    jobs = [Job(loss, rate, seed) for seed, loss, rate in itertools.product(args.seeds, LOSSES, args.rates)]
    taught = next(job for job in jobs if LOSSES[job.loss] is not None)
    once = args.folder / "cache.yaml"
    once.write_text(yaml.safe_dump(run_file(args.folder, taught, args.teacher)))
    limbeck("cache", str(once), "--json", log=args.folder / "cache.log")
    with ThreadPoolExecutor(args.parallel) as pool:
        found = list(pool.map(lambda job: bits(args.folder, job, args.teacher), jobs))
    runs = [asdict(job) | {"bpb": own} for job, own in zip(jobs, found, strict=True)]
    record(args.out, {"documents": DOCUMENTS, "dev": DEV, "steps": STEPS, "runs": runs})
    print(table(runs))


if __name__ == "__main__":
    main()
