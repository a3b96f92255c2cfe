"""Sums, as accuracy: a teacher that reads single digits, students whose tokens hold up to three.

    PYTHONPATH=. python benchmarks/quality/sums.py TOKENIZERS WORK [--seeds 1 2 3] [--parallel 6] [--minutes 4]

TOKENIZERS holds `qwen2_5/tokenizer.json` (the teacher's) and `llama3_2/tokenizer.json` (the students'). Both are
trained from scratch on sums of two and three digits: the teacher on plenty, the students on few of them, which every
arm reads as often. Scores are greedy answers to held-out sums, by the verifier `number`.

Of several `--texts` and `--rates`, cross-entropy alone decides, on problems that are not reported: the better rate of
each amount, then the amount where it has about half of the teacher's sums right. `--cut` leaves both tokenizers only
the tokens that sums can have: they split sums as before, every run is short, and `h_kl` is `gold`, since what it pairs
beside equal tokens is gone. A finished run is a line of `WORK/results.jsonl`, and is not repeated. `--tiny` tries the
machinery in a few steps.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command, origin
from benchmarks.quality.corpus import write_texts
from benchmarks.quality.suite import ARMS, TINY, Results, Row, computed_in, latest, model, run_file, train
from benchmarks.quality.tables import grid
from limbeck.tokens.loading import read_tokenizer
from limbeck.utils.paired import paired

ENDS = {"qwen2_5": "<|endoftext|>", "llama3_2": "<|end_of_text|>"}
"""The teacher's tokenizer and the students', with the token that ends a text."""
TEACHER, STUDENT = ENDS
DEFAULT = "tree_kl_ce_.3"
ASKED = ("ce", DEFAULT, "gold_ce_.3", "h_kl_ce_.3", "p_kl_ce_.3", "tree_kl_counted_ce_.3")
SPLITS = ("test", "dev")
"""Held-out problems: those that are reported, and those that amounts and rates are chosen on."""
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
LAYERS = {TEACHER: 4, STUDENT: 3}
CONTEXT = 32
WORTHY = 0.95
"""Share of the sums that the teacher has to have right."""


# -- text and tokenizers -----------------------------------------------------------------------------------------------


def sums(most: int, seed: int = 0) -> list[dict[str, str]]:
    """All pairs of numbers from 10 to `most` in one random order, every pair once and one way round."""
    own = random.Random(seed)
    pairs = [(a, b) if own.random() < 0.5 else (b, a) for a in range(10, most + 1) for b in range(a, most + 1)]
    own.shuffle(pairs)
    return [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs]


def write_sums(folder: Path, most: int, problems: int, students: Sequence[int]) -> None:
    """`test.jsonl` and `dev.jsonl` of problems, `teacher.jsonl` of all other sums as texts and `student_N.jsonl` of the
    first of them."""
    rest = sums(most)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        own, rest = rest[:problems], rest[problems:]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in own))
    # a prompt ends with a line, as a task asks a model without a chat template
    texts = [f"{problem['prompt']}\n{problem['answer']}" for problem in rest]
    write_texts(texts, folder / "teacher.jsonl")
    for number in students:
        if number > len(texts):
            raise SystemExit(f"{number} texts are wanted, and there are {len(texts)} sums up to {most} + {most}")
        write_texts(texts[:number], folder / f"student_{number}.jsonl")


def write_tokenizer(source: Path, folder: Path, cut: bool) -> None:
    """A published tokenizer without its chat template, and if it is cut with the tokens of sums and of single bytes
    alone, beside the first and last of a text."""
    spec, named = json.loads((source / "tokenizer.json").read_text()), {"eos_token": ENDS[source.name]}
    if (bos := "<|begin_of_text|>") in {added["content"] for added in spec["added_tokens"]}:
        named["bos_token"] = bos
    if cut:
        own = spec["model"]
        kept = [token for token in own["vocab"] if len(token) == 1 or set(token) <= set("0123456789+=ĠĊ")]
        own["vocab"] = {token: index for index, token in enumerate(kept)}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in own["merges"]]
        own["merges"] = [merge for merge in merges if {*merge, "".join(merge)} <= own["vocab"].keys()]
        added = [one for one in spec["added_tokens"] if one["content"] in named.values()]
        spec["added_tokens"] = [one | {"id": len(kept) + index} for index, one in enumerate(added)]
        for processor in (spec["post_processor"] or {}).get("processors", ()):
            for token, one in processor.get("special_tokens", {}).items():
                one["ids"] = [one["id"] for one in spec["added_tokens"] if one["content"] == token]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))


def tokens(folder: Path, text: str) -> list[str]:
    """How a tokenizer splits a text."""
    tokenizer = read_tokenizer(folder)
    return [tokenizer.vocab.join([token]).decode() for token in tokenizer.encode(text, bos=False).ids.tolist()]


# -- runs --------------------------------------------------------------------------------------------------------------


class Sums:
    """Runs of one folder."""

    def __init__(self, tokenizers: Path, work: Path, args: argparse.Namespace) -> None:
        self.work, self.args, self._teaching = work, args, threading.Lock()
        write_sums(work, args.most, args.problems, args.texts)
        for name in ENDS:
            write_tokenizer(tokenizers / name, work / name, args.cut)
            print(name, tokens(work / name, "47 + 285 =\n332"), flush=True)

    def settings(self, name: str, text: str, steps: int, rate: float, seed: int, split: str) -> dict[str, Any]:
        """Run file of a model with a tokenizer of that name."""
        batch = self.args.batch
        shape = TINY if self.args.tiny else SHAPE | {"num_hidden_layers": LAYERS[name]}
        policy = model(self.work / name, shape, steps, rate, batch) | {"max_total_sequence_length": CONTEXT}
        settings = run_file([self.work / f"{text}.jsonl"], policy, steps, batch, seed, self.work)
        # hundreds of short texts a step: a worker takes longer to lay them out than a small model to read them
        settings["data"] |= {"max_input_seq_length": CONTEXT, "num_workers": 2}
        task = {"name": "sums", "data": str(self.work / f"{split}.jsonl"), "verifier": "number"}
        asked = {"problems": self.args.problems, "max_new_tokens": 8}
        settings["distillation"] |= {"tasks": [task | asked], "val_at_start": False}
        return settings

    def trained(self, settings: dict[str, Any], folder: Path) -> Row:
        """Seconds of a run, and for every problem 1 where its last validation has it solved."""
        shutil.rmtree(folder, ignore_errors=True)
        settings["logger"]["log_dir"] = str(folder)
        seconds = train(settings, folder)
        found = json.loads((folder / "tasks.jsonl").read_text().splitlines()[-1])
        solved = [int(score) for _, score in sorted(zip(found["problems"], found["scores"], strict=True))]
        return {"seconds": seconds, "solved": "".join(map(str, solved)), "reasons": found["reasons"]}

    def teacher(self) -> Path:
        """Run folder of the teacher, which the first that needs it trains; its scores lie beside it."""
        folder, args = self.work / "taught", self.args
        done = self.work / "taught.json"
        with self._teaching:
            if not done.exists():
                settings = self.settings(TEACHER, "teacher", args.teacher_steps, args.teacher_rate, 1, SPLITS[0])
                done.write_text(json.dumps(self.trained(settings, folder)))
        return folder

    def run(self, pair: str, arm: str, seed: int) -> Row:
        """The teacher, or one student."""
        row: Row = {"pair": pair, "arm": arm, "seed": seed, "precision": computed_in()}
        if arm == "teacher":
            self.teacher()
            return row | json.loads((self.work / "taught.json").read_text())
        split, texts, steps, rate = pair.split("_")
        settings = self.settings(STUDENT, f"student_{texts}", int(steps), float(rate), seed, split)
        settings["checkpointing"] = {"enabled": False}
        if (loss := ARMS[arm]) is not None:
            own = {"model_name": str(latest(self.teacher())), "tokenizer": {"name": str(self.work / TEACHER)}}
            settings["teachers"] = [own | {"precision": "auto", "max_total_sequence_length": CONTEXT}]
            settings["loss_fn"] = {"block_rows": 4096} | loss
        return row | self.trained(settings, self.work / f"{pair}_{arm}_{seed}")


class Scores(Results):
    """Rows with scores of tasks."""

    def report(self, row: Row) -> None:
        """Store and print a finished run."""
        with self._writing, self.path.open("a") as file:
            file.write(json.dumps(row | self._more | {"command": command(), "origin": origin()}) + "\n")
        print(f"{time.time() - self._began:6.0f} s", row["pair"], row["arm"], row["seed"],
              f"{accuracy([row]):.1%} right ({row['seconds']} s)", flush=True)  # fmt: skip


# -- the table ---------------------------------------------------------------------------------------------------------


def accuracy(rows: Iterable[Row]) -> float:
    """Mean over runs of the share of problems that they solve."""
    return statistics.mean(row["solved"].count("1") / len(row["solved"]) for row in rows)


def by_problem(rows: Sequence[Row]) -> dict[int, float]:
    """For every problem the share of runs that solve it."""
    return {i: statistics.mean(map(int, own)) for i, own in enumerate(zip(*(r["solved"] for r in rows), strict=True))}


def standard_error(values: Sequence[float]) -> str:
    """Of a mean of several runs, as it stands behind it."""
    return f" ± {statistics.stdev(values) / len(values) ** 0.5:.1%}" if len(values) > 1 else ""


def table(rows: Sequence[Row], pair: str) -> str:
    """Every arm's accuracy with its standard error over seeds, and beside the default, seeds that both have: the mean
    difference with standard errors over problems and over seeds."""
    own = {(row["arm"], row["seed"]): row for row in rows if row["pair"] == pair}
    lines = []
    for arm in dict.fromkeys(arm for arm, _ in own):
        mine = [row for (name, _), row in own.items() if name == arm]
        each = [accuracy([row]) for row in mine]
        line = [arm, f"{statistics.mean(each):.1%}{standard_error(each)}", str(len(mine)), "-", "-", "-"]
        both = [row["seed"] for row in mine if (DEFAULT, row["seed"]) in own and arm != DEFAULT]
        if both:
            here, default = ([own[name, seed] for seed in both] for name in (arm, DEFAULT))
            found = paired(by_problem(default), by_problem(here))
            assert found is not None
            differences = [accuracy([a]) - accuracy([b]) for a, b in zip(here, default, strict=True)]
            line[3] = f"{found['difference']:+.1%}"
            line[4] = f"{found['standard_error']:.1%}"
            line[5] = standard_error(differences).removeprefix(" ± ") or "-"
        lines.append(line)
    head = ["arm", "sums right", "seeds", "less the default", "error over problems", "error over seeds"]
    return grid(head, lines)


def pairs(args: argparse.Namespace, split: str) -> list[str]:
    """All amounts and rates, as a row names them."""
    return [f"{split}_{texts}_{args.steps}_{rate:g}" for texts in args.texts for rate in args.rates]


def chosen(rows: Sequence[Row], tried: Sequence[str]) -> str:
    """The pair in which cross-entropy has about half of the teacher's sums right, at the better rate of its amount."""
    taught = accuracy(row for row in rows if row["arm"] == "teacher")
    best: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row["pair"] in tried:
            amount = row["pair"].split("_")[1]
            best[amount] = max(best.get(amount, (-1.0, "")), (accuracy([row]), row["pair"]))
    return min(best.values(), key=lambda own: abs(own[0] - taught / 2))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--cut", action="store_true", help="tokenizers with the tokens of sums alone")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ASKED)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--most", type=int, default=299, help="largest number that is added")
    parser.add_argument("--texts", nargs="+", type=int, default=[10_000, 20_000, 40_000], help="sums of a student")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-3], help="of a student")
    parser.add_argument("--steps", type=int, default=600, help="of a student")
    parser.add_argument("--teacher-steps", type=int, default=1200)
    parser.add_argument("--teacher-rate", type=float, default=1.5e-3)
    parser.add_argument("--batch", type=int, default=512, help="sums of a step")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="try the machinery: two steps, eight problems")
    args = parser.parse_args()
    if args.tiny:
        args.steps = args.teacher_steps = 2
        args.texts, args.batch, args.problems = [32, 64], 8, 8
    bench = Sums(args.tokenizers, args.work, args)
    results = Scores(args.work / "results.jsonl", args.minutes, parallel=args.parallel, cut=args.cut, most=args.most)
    dev, test = pairs(args, "dev"), pairs(args, "test")
    tried = [(pair, "ce", 0) for pair in dev] if len(dev) > 1 else []
    results.fill([("teacher", "teacher", 1), *tried], bench.run, dict, args.parallel)
    rows = results.rows()
    if not any(row["arm"] == "teacher" for row in rows):
        raise SystemExit(f"the teacher is not there; see {args.work / 'taught' / 'log'}")
    pair = test[dev.index(chosen(rows, dev))] if tried else test[0]
    results.fill([(pair, arm, seed) for seed in args.seeds for arm in args.arms], bench.run, dict, args.parallel)
    rows = results.rows()
    for name in dict.fromkeys(row["pair"] for row in rows):
        print(f"\n{name}\n\n{table(rows, name)}")
    taught = accuracy(row for row in rows if row["arm"] == "teacher")
    if taught < WORTHY and not args.tiny:
        print(f"\nThe teacher has {taught:.1%} right; below {WORTHY:.0%} the figures say nothing of objectives.")


if __name__ == "__main__":
    main()
