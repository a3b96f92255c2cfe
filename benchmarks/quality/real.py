"""The quality benchmark on real models: at which amount of text does a teacher stop helping, and in which domain?

    PYTHONPATH=. python benchmarks/quality/real.py CORPUS WORK --student FOLDER --teacher MODEL
        [--megabytes .1 .3 1 3] [--arms ce tree_kl_ce_.3:.1,.3 ...] [--then trl_gold ...] [--seeds 1 2 3] [--epochs 2]
        [--lr 3e-5 1e-4 3e-4] [--choices hellaswag.jsonl arc_easy.jsonl piqa.jsonl] [--parallel 6] [--minutes 9]
        [--models "TEACHER teaches STUDENT"] [--adapt 6]

CORPUS is what `corpus.py` wrote; the student reads documents of its part of `--domains`, in equal shares of bytes, and
is measured on the held-out part of the same domains, on sums to be worked out, and on files of multiple choice. Student
and teacher as they come are measured, too: a teacher teaches nothing where it is no better. A model that needs its
BOS token (`limbeck doctor MODEL` tells) comes with a tokenizer that sets it. With `--adapt` the teacher first reads
so many megabytes of *other* documents of the domains (the corpus's teacher part), once, with cross-entropy alone: one
that has read the student's own documents would teach what they say, not what follows in texts like them.

Of several learning rates every arm of `--sweep` takes for each amount of text the one that is best for it, and every
other one the rate of cross-entropy alone or, where it is taught, of the default of a pretrained student; by the bits
per byte of documents that nobody reports on and that no model here reads (of the corpus's teacher part). Every arm is
a `limbeck train` run, but those of `trl_gold.py`, which are TRL's own trainer on the same run file. An arm is run on
every amount of text, or on those behind its colon.
Text that is too little for `--least-steps` is read more often than `--epochs` times; cross-entropy alone, which such
reading spoils, has arms that end sooner (`ce_75`, ...). Results go to `WORK/real.jsonl`, one line per finished run,
and a second call goes on where the first one stopped.

SmolLM2-135M into MiniMind2-Small, on one GPU:

    PYTHONPATH=. python benchmarks/quality/real.py CORPUS WORK --student minimind --teacher smollm2.gguf --parallel 12
        --megabytes 3 1 .3 .1 --arms ce tree_kl_ce_.3 tree_kl_soft --then boundary_kl_ce_.3 tree_kl:.3,1 trl_gold_ce:.3
        --choices hellaswag.jsonl arc_easy.jsonl piqa.jsonl
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import trl_gold
from benchmarks.quality.corpus import read_texts
from benchmarks.quality.corpus import write_texts as write_documents
from benchmarks.quality.suite import (
    ARMS,
    CONTEXT,
    Key,
    Results,
    Row,
    computed_in,
    held_out,
    latest,
    measure,
    run_file,
    run_module,
    schedule,
    train,
    write_run,
)

FIRST = "SmolLM2-135M-Instruct teaches MiniMind2-Small"
DOMAINS = ("english", "gsm8k", "code", "wiki")
DEFAULT_ARMS = ["ce", "boundary_kl_ce_.3", "tree_kl_ce_.3", "tree_kl_soft"]
TAUGHT = "tree_kl_soft"
"""The default of a pretrained student, whose learning rate all taught arms take that have no sweep of their own."""
ADAPTED_RATE = 1e-4
DEV_BYTES = 30_000
SWEEP_SEED = 0
SOONER = {"ce_75": 75, "ce_150": 150, "ce_300": 300}
"""Arms of cross-entropy alone that end after so many steps, each under a schedule of its own."""
WARMUP = 10
"""Behind a single step of warm-up the first steps of AdamW cost a student at 3e-4 more than it learned from 26 more."""


def is_alone(arm: str) -> bool:
    """Whether an arm is cross-entropy alone."""
    return arm == "ce" or arm in SOONER


def warmup(steps: int) -> int:
    """Steps of warm-up: a twentieth of all, but ten or half of them at the least."""
    return max(steps // 20, min(steps // 2, WARMUP))


def cut(texts: dict[str, list[str]], size: int) -> dict[str, list[str]]:
    """Documents of every domain, in equal shares of so many bytes as far as they reach: what a domain lacks, the others
    give."""
    left, taken = size, dict[str, list[str]]()
    for i, name in enumerate(sorted(texts, key=lambda name: sum(map(len, texts[name])))):
        share, own = left // (len(texts) - i), list[str]()
        documents = texts[name].copy()
        random.Random(name).shuffle(documents)
        while documents and sum(len(text.encode()) for text in own) < share:
            own.append(documents.pop())
        left -= sum(len(text.encode()) for text in own)
        taken[name] = own
    return taken


def write_texts(
    corpus: Path,
    part: str,
    out: Path,
    domains: Iterable[str],
    size: int,
    document_bytes: int | None = None,
    apart_from: Path | None = None,
) -> int:
    """`out/DOMAIN.jsonl` with about so many bytes of a part of the corpus, documents up to so many of their own and
    none of another such folder's; the number of documents."""
    texts = {}
    for name in domains:
        taken = set(read_texts(apart_from / f"{name}.jsonl")) if apart_from else set[str]()
        own = (
            text.encode()[:document_bytes].decode(errors="ignore")
            for text in read_texts(corpus / part / f"{name}.jsonl")
        )
        texts[name] = [text for text in own if text not in taken]
    chosen = cut(texts, size)
    for name, documents in chosen.items():
        write_documents(documents, out / f"{name}.jsonl")
    return sum(map(len, chosen.values()))


def sweep_of(arm: str, amount: str) -> str:
    """Name of the pair of the runs that choose an arm's learning rate: `sweep_MB` of cross-entropy alone,
    `sweep_ARM_MB` of others."""
    return f"sweep_{amount}" if arm == "ce" else f"sweep_{arm}_{amount}"


def swept_by(pair: str) -> tuple[str, str]:
    """Arm and amount of text of such a pair.

    >>> swept_by(sweep_of("tree_kl_ce_.3", "1")), swept_by("sweep_0.3")
    (('tree_kl_ce_.3', '1'), ('ce', '0.3'))
    """
    arm, _, amount = pair.removeprefix("sweep_").rpartition("_")
    return arm or "ce", amount


def best_rates(rows: Iterable[Row]) -> dict[str, float]:
    """Of the rows of every sweep (arm: the rate) the rate with the fewest bits per byte."""
    bits: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["pair"].startswith("sweep_"):
            mean = statistics.mean(own["bpb"] for own in row["measures"].values())
            bits.setdefault(row["pair"], {})[float(row["arm"])] = mean
    return {pair: min(own, key=own.__getitem__) for pair, own in bits.items()}


Amounts = Mapping[str, Sequence[str]]
"""Arms, each with the amounts of text that it is run on."""


def arm_amounts(written: Iterable[str], amounts: Sequence[str]) -> Amounts:
    """`ARM` or `ARM:MB,MB`, as they are written on the command line.

    >>> arm_amounts(["ce", "tree_kl:.3,1"], ["0.1", "0.3", "1"])
    {'ce': ['0.1', '0.3', '1'], 'tree_kl': ['0.3', '1']}
    """
    found = {}
    for text in written:
        arm, _, own = text.partition(":")
        if arm not in (known := [*SOONER, *ARMS, *trl_gold.ARMS]):
            raise SystemExit(f"{arm!r} is no arm; give some of {', '.join(known)}")
        found[arm] = [f"{float(size):g}" for size in own.split(",")] if own else list(amounts)
        if strange := set(found[arm]) - set(amounts):
            raise SystemExit(f"{text!r}: {', '.join(sorted(strange))} MB are not among --megabytes")
    return found


def wanted_runs(arms: Amounts, amounts: Iterable[str], seeds: Iterable[int]) -> list[Key]:
    """Seeds are outermost: what is cut off is a seed of some arms, not an arm."""
    return [
        (f"real_{amount}", arm, seed)
        for seed in seeds
        for amount in amounts
        for arm, own in arms.items()
        if amount in own
    ]


class Real:
    """Runs of one student and one teacher (`models`) on amounts of text, in megabytes as they are written."""

    def __init__(self, corpus: Path, work: Path, models: dict[str, Path], args: argparse.Namespace) -> None:
        self.work, self.models, self.epochs, self.least_steps = work, models, args.epochs, args.least_steps
        self.max_steps, self.batch = (2, 2) if args.tiny else (None, args.batch)
        amounts = [f"{size:g}" for size in args.megabytes]
        most = ("4", "--max-bytes", "2000") if args.tiny else (str(args.questions),)
        self._eval_options = ("--max-documents", *most)
        self.documents = {
            amount: write_texts(
                corpus,
                "student",
                work / f"text_{amount}",
                args.domains,
                round(float(amount) * 1e6),
                args.document_bytes,
            )
            for amount in amounts
        }
        write_texts(corpus, "teacher", work / "dev", args.domains, DEV_BYTES * len(args.domains))
        self.dev = sorted((work / "dev").glob("*.jsonl"))
        self.teacher = {"model_name": str(models["teacher"]), "precision": "auto", "max_total_sequence_length": CONTEXT}
        if args.adapt:
            number = write_texts(
                corpus, "teacher", work / "adapted_text", args.domains, round(args.adapt * 1e6), apart_from=work / "dev"
            )
            if not number:
                raise SystemExit(
                    "no document is left for the teacher: those that choose learning rates are all there are"
                )
            self._adapt(max(number // self.batch, 1))
        own = {*args.domains, "sums"}
        self.reported = [*(path for path in held_out(corpus, work) if path.stem in own), *args.choices]

    def _adapt(self, steps: int) -> None:
        """The teacher reads `adapted_text` once; from here on it is what that run leaves."""
        folder, tokenizer = self.work / "adapted", str(self.models["teacher"])
        steps = min(steps, self.max_steps or steps)
        if not (folder / "done").exists():
            files = sorted((self.work / "adapted_text").glob("*.jsonl"))
            policy = self.policy(steps, ADAPTED_RATE, "teacher")
            train(run_file(files, policy, steps, self.batch, SWEEP_SEED, folder), folder)
            (folder / "done").touch()
        self.models = self.models | {"teacher": folder}
        self.teacher |= {"model_name": str(latest(folder)), "tokenizer": {"name": tokenizer}}

    def policy(self, steps: int, lr: float, side: str = "student") -> dict[str, Any]:
        """The student (or the teacher) as it comes, under a cosine schedule."""
        return {
            "model_name": str(self.models[side]),
            "precision": "auto",
            "max_total_sequence_length": CONTEXT,
            "train_micro_batch_size": self.batch,
            "max_grad_norm": 1.0,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": schedule(steps, warmup(steps)),
        }

    def folder(self, row: Row) -> Path:
        """Run folder of a row."""
        return self.work / f"{row['pair']}_{row['arm']}_{row['seed']}"

    def length(self, amount: str, arm: str = "ce") -> tuple[int, int]:
        """Epochs and steps of a run on so many megabytes: little text is read again."""
        documents = self.documents[amount]
        epochs = max(self.epochs, math.ceil(self.least_steps * self.batch / documents))
        steps = max(documents * epochs // self.batch, 1)
        if arm in SOONER:
            steps = min(steps, SOONER[arm])
            epochs = math.ceil(steps * self.batch / documents)
        return epochs, min(steps, self.max_steps or steps)

    def run(self, row: Row, amount: str, arm: str, lr: float) -> Row:
        """Trains one student on so many megabytes; the row with what the run was."""
        folder = self.folder(row)
        epochs, steps = self.length(amount, arm)
        shutil.rmtree(folder, ignore_errors=True)
        files = sorted((self.work / f"text_{amount}").glob("*.jsonl"))
        settings = run_file(files, self.policy(steps, lr), steps, self.batch, row["seed"], folder)
        if not is_alone(arm):
            settings["teacher"] = self.teacher
        start = time.time()
        if arm in trl_gold.ARMS:
            run_module(trl_gold.__name__, write_run(settings, folder), arm, log=folder / "log")
        else:
            loss = ARMS.get(arm)
            train(settings | ({"loss_fn": {"block_rows": 4096, **loss}} if loss else {}), folder)
        what = {"epochs": epochs, "steps": steps, "warmup": warmup(steps), "learning_rate": lr}
        return row | what | {"precision": computed_in(), "seconds": round(time.time() - start)}

    def model(self, row: Row) -> Path:
        """What is measured: a model as it comes, or a run's student."""
        if row["arm"] in self.models:
            return self.models[row["arm"]]
        return trl_gold.student_folder(self.folder(row)) if row["arm"] in trl_gold.ARMS else self.folder(row)

    def measured(self, row: Row) -> Row:
        """The row with its figures, of a sweep on other documents than all others; weights of runs are not kept."""
        files = self.dev if row["pair"].startswith("sweep_") else self.reported
        row |= measure(self.model(row), files, self.work / "eval.log", *self._eval_options)
        if row["arm"] not in self.models:
            shutil.rmtree(self.folder(row) / "checkpoints")
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--models", default=FIRST, help="names of teacher and student, as tables show them")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--megabytes", nargs="+", type=float, default=[1, 0.3, 0.1], help="in the order of the runs")
    parser.add_argument("--arms", nargs="*", metavar="ARM[:MB,MB]", default=DEFAULT_ARMS, help="none: the sweep alone")
    parser.add_argument("--then", nargs="+", metavar="ARM[:MB,MB]", default=[], help="behind all seeds of --arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--adapt", type=float, help="megabytes of other documents that the teacher reads first")
    parser.add_argument("--batch", type=int, default=16, help="documents per step")
    parser.add_argument("--document-bytes", type=int, help="of a document that the student reads, at the most")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--least-steps", type=int, default=48, help="more epochs where the text has fewer")
    parser.add_argument("--lr", nargs="+", type=float, default=[3e-5, 1e-4, 3e-4])
    parser.add_argument("--sweep", nargs="+", metavar="ARM", choices=["ce", *ARMS], default=["ce", TAUGHT],
                        help="arms that choose a learning rate of their own")  # fmt: skip
    parser.add_argument("--choices", nargs="+", type=Path, default=[], help="files of multiple choice")
    parser.add_argument("--questions", type=int, default=400, help="of each file of multiple choice or sums")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="try the machinery: two steps of two documents, few bytes")
    args = parser.parse_args()
    amounts = [f"{size:g}" for size in args.megabytes]
    arms, then = arm_amounts(args.arms, amounts), arm_amounts(args.then, amounts)
    if trl_gold.ARMS.keys() & {*arms, *then} and (why := trl_gold.missing()):
        raise SystemExit(why)
    bench = Real(args.corpus, args.work, {"student": args.student, "teacher": args.teacher}, args)
    more = {"batch": bench.batch, "parallel": args.parallel, "models": args.models}
    if args.document_bytes:
        more["document_bytes"] = args.document_bytes
    results = Results(args.work / "real.jsonl", args.minutes, **more)

    def start(pair: str, arm: str, seed: int) -> Row:
        row: Row = {"pair": pair, "arm": arm, "seed": seed, "seconds": 0}
        if pair == "real":
            return row
        row["swept"], amount = swept_by(pair)
        return bench.run(row, amount, row["swept"], float(arm))

    def chooser(arm: str) -> str:
        return "ce" if is_alone(arm) else arm if arm in args.sweep else TAUGHT

    needed = dict.fromkeys(map(chooser, [*arms, *then] or args.sweep))
    swept = [
        (sweep_of(arm, amount), f"{lr:g}", SWEEP_SEED)
        for amount in amounts
        for arm in needed
        for lr in args.lr
        if len(args.lr) > 1
    ]
    results.fill([("real", "student", 1), ("real", "teacher", 1), *swept], start, bench.measured, args.parallel)
    rates = best_rates(results.rows())
    print("learning rates:", rates or args.lr[0], flush=True)

    def distil(pair: str, arm: str, seed: int) -> Row:
        amount = pair.removeprefix("real_")
        rate = rates[sweep_of(chooser(arm), amount)] if swept else args.lr[0]
        return bench.run({"pair": pair, "arm": arm, "seed": seed}, amount, arm, rate)

    wanted = [run for own in (arms, then) for run in wanted_runs(own, amounts, args.seeds)]
    results.fill(wanted, distil, bench.measured, args.parallel)


if __name__ == "__main__":
    main()
