"""On-policy against off-policy distillation at equal student tokens, with much stored text and with little.

    python -m benchmarks.on_policy_curve [--records 64 8000] [--arms off on mixed] [--seeds 1 2 3] [--jobs 9] [--tiny]

The task is to go on from four digits, each further one being the sum (mod 10) of the one before it and the one four
before it: ``4 1 8 2`` -> `` 6 7 5 7 3 ...``. A wrong digit spoils the answer and leads to a state that the stored
solution of the problem does not have. A teacher is trained from scratch on the whole task, with a tokenizer that joins
a space and a digit. Students of single bytes first learn from ``--records`` stored solutions until they are right on
some problems of a development set. From there, on the same records and with the same teacher, each arm takes as many
steps of as many student tokens: on stored text (`off`, fraction 0, forward KL), on what the student writes itself
(`on`, fraction 1, reverse KL), on half of each (`mixed`); further arms (``ARMS``) have another share of own text,
another direction of the divergence, or sample from the nucleus of .95. Every arm first chooses its learning rate on the
development set, with a seed of its own. The figures are shares of test problems whose greedy answer is right as a
whole, and of digits that follow from those that the student itself wrote before, over the student tokens that were
trained on; and how sure the student is at the end of the digits that it gets wrong in answers to its records.

Runs are made by ``--jobs`` processes at a time (``OMP_NUM_THREADS=1``); what is already there is not made again. With
``--records 64 --jobs 9`` one H200 needs somewhat more than two minutes. Writes ``benchmarks/on_policy_curve.json``, or
``--out``. Beside the script lie

- ``on_policy_curve.json``: an H200, with a teacher and students that began on a CPU; of 8000 records the stored text
  alone;
- ``on_policy_curve_directions.json``: a CPU, from the same teacher and the same beginnings, with further arms
  (``--records 64 --rates 1e-3 3e-3``);
- ``on_policy_curve_warm_up.json``: the same with ``--warm-up 10 --rates 3e-3 1e-2``;
- ``on_policy_curve_cpu.json``: a CPU, other beginnings and a teacher that is right on 92%, from several calls with
  ``--rates 1e-3 --teacher-steps 300 --teacher-rows 64``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.common import parser, record, worker_pool
from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.errors import LossError
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.tokens import ByteVocab, load_tokenizer
from limbeck.utils.logger import read_metrics

END = "<eos>"
GIVEN, TERMS = 4, 16
"""Digits of a problem, and of its answer."""
TASK = f"a recurrence of digits, {GIVEN} given and {TERMS} to follow"
PROMPT, ANSWER = 2 * GIVEN - 1, 2 * TERMS + 1
"""Characters of a problem, and of its answer with the end."""
MERGED = 280
"""Tokens of the teacher's vocabulary; the student's has the 256 bytes and the end."""
SWEEP_SEED = 0
"""Of the student with which learning rates are chosen."""
TEACHER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8}
STUDENT = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Arm(NamedTuple):
    """What a student learns from: the share of sampled text, and the divergence on stored and on sampled text."""

    fraction: float
    stored: str = "forward"
    sampled: str = "reverse"
    top_p: float = 1.0


ARMS = {
    "off": Arm(0.0),
    "on": Arm(1.0),
    "mixed": Arm(0.5),
    "quarter": Arm(0.25),
    "off_reverse": Arm(0.0, stored="reverse"),
    "on_forward": Arm(1.0, sampled="forward"),
    "on_jsd": Arm(1.0, sampled="jsd"),
    "on_top_p": Arm(1.0, top_p=0.95),
    "on_jsd_top_p": Arm(1.0, sampled="jsd", top_p=0.95),
    "on_forward_top_p": Arm(1.0, sampled="forward", top_p=0.95),
    "mixed_jsd_top_p": Arm(0.5, sampled="jsd", top_p=0.95),
    "mixed_forward_top_p": Arm(0.5, sampled="forward", top_p=0.95),
}


class World(NamedTuple):
    """What all runs share: where they lie, shapes of the models, and how much is done."""

    folder: Path
    student: dict[str, Any]
    teacher: dict[str, Any]
    rows: int
    steps: int
    points: int
    teacher_rows: int
    teacher_steps: int
    start_steps: int
    start_rate: float
    enough: float
    warm_up: int


class Run(NamedTuple):
    """An arm's run: stored records, what it learns from, learning rate, seed, and the weights that it begins with."""

    records: int
    arm: str
    rate: float
    seed: int
    start: str


Students: TypeAlias = dict[tuple[int, int], dict[str, Any]]
"""By number of records and seed: where the weights are, and how right they are."""
Chosen: TypeAlias = dict[tuple[int, str], dict[str, Any]]
"""By number of records and arm: the learning rate, and why."""


# ---- the task --------------------------------------------------------------------------------------------------------


def problem(rng: random.Random) -> tuple[str, str]:
    """The digits that are given, and those that follow."""
    digits = [rng.randrange(10) for _ in range(GIVEN)]
    for _ in range(TERMS):
        digits.append(following(digits))
    return " ".join(map(str, digits[:GIVEN])), "".join(f" {digit}" for digit in digits[GIVEN:])


def following(digits: Sequence[int]) -> int:
    """The digit that comes next."""
    return (digits[-1] + digits[-GIVEN]) % 10


def own_digits_right(asked: str, said: str) -> tuple[int, int]:
    """Digits of an answer that follow from the digits before them as they are written, and all."""
    digits = [int(one) for one in asked.split()]
    good = 0
    written = said.split()[:TERMS]
    for count, one in enumerate(written):
        if not (len(one) == 1 and "0" <= one <= "9"):
            return good, count + 1
        good += int(one) == following(digits)
        digits.append(int(one))
    return good, len(written)


def write_data(folder: Path, records: Sequence[int], held_out: int, rows: int) -> None:
    """Problems as files: of the teacher, of each number of records, of development and of the test; all different, but
    that records are repeated where they are fewer than the rows of a step."""
    rng = random.Random(0)
    seen = dict(problem(rng) for _ in range(60_000))
    everything = sorted(seen.items())
    rng.shuffle(everything)
    test, dev, rest = everything[:held_out], everything[held_out : 2 * held_out], everything[2 * held_out :]
    files = {"test": test, "dev": dev, "teacher": rest} | {
        f"train_{count}": rest[:count] * math.ceil(rows / count) for count in records
    }
    for name, rows in files.items():
        lines = [json.dumps({"text": asked + answer}) for asked, answer in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_problems(folder: Path, name: str) -> list[tuple[str, str]]:
    """Problems of a file."""
    texts = [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(text[:PROMPT], text[PROMPT:]) for text in texts]


def write_tokenizer(folder: Path, name: str, size: int) -> None:
    """A byte-level BPE trained on problems, with an end token."""
    rng = random.Random(1)
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False, special_tokens=[END])
    made.train_from_iterator(("".join(problem(rng)) for _ in range(2000)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(folder / name)


# ---- runs ------------------------------------------------------------------------------------------------------------


def model(world: World, side: str, weights: Path | None = None) -> dict[str, Any]:
    """A section of a run file: random weights, or those of a folder."""
    own: dict[str, Any] = {"tokenizer": {"name": str(world.folder / f"{side}_tokenizer")}, "precision": "float32"}
    if weights is not None:
        return {"model_name": str(weights), **own}
    shape = world.teacher if side == "teacher" else world.student
    heads = {"num_key_value_heads": shape["num_attention_heads"], "max_position_embeddings": 64}
    overrides = {"model_type": "llama", **shape, **heads, "tie_word_embeddings": False, "initializer_range": 0.1}
    return {"init": "random", **own, "model_overrides": overrides}


def run(
    world: World, name: str, values: dict[str, Any], *, data: str, steps: int, period: int, rate: float, seed: int
) -> Path:
    """A run to its end, from wherever it was; returns its folder."""
    values["policy"] |= {
        "max_total_sequence_length": 48,
        "train_micro_batch_size": world.rows,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": rate, "weight_decay": 0.0}},
    }
    values |= {
        "data": {"train": str(world.folder / f"{data}.jsonl"), "append_eos": True, "max_input_seq_length": 48},
        "distillation": {"num_prompts_per_step": world.rows, "max_num_steps": steps, "max_num_epochs": 100_000}
        | {"seed": seed, "val_at_start": False, "val_at_end": False},
        "checkpointing": {"save_period": period, "keep_top_k": None},
        "logger": {"log_dir": str(world.folder / name), "tensorboard_enabled": False, "progress": False},
    }
    return resolve_and_run(values)


def weights(run_dir: Path, step: int) -> Path:
    """The stored weights of a step."""
    return run_dir / "checkpoints" / f"step_{step}" / "policy" / "weights"


class Answers(NamedTuple):
    """A model, and what it writes greedily to some problems."""

    model: LanguageModel
    said: list[str]
    ended: list[bool]


def answers(world: World, side: str, folder: Path, problems: list[tuple[str, str]]) -> Answers:
    """What the model of a folder answers."""
    own = load_tokenizer(str(world.folder / f"{side}_tokenizer"))
    made = LanguageModel({"model_name": str(folder), "precision": "float32"}, own)
    vocab = ByteVocab.from_tokenizer(own)
    end = [i for i, role in vocab.roles.items() if role == "eos"]
    greedy = SamplingConfig(max_new_tokens=ANSWER + 2, temperature=0, batch_size=1024)
    prompts = [torch.tensor(own(asked, add_special_tokens=False)["input_ids"]) for asked, _ in problems]
    found = LocalSampler(made, greedy, end, vocab).sample(prompts)
    said = [vocab.join(one.ids_T.tolist()).decode("utf-8", "replace") for one in found]
    return Answers(made, said, [one.ended for one in found])


def right(world: World, side: str, folder: Path, problems: list[tuple[str, str]]) -> tuple[float, float]:
    """Share of problems that a model answers right as a whole, with the end where it belongs; and share of its digits
    that follow from what it wrote before."""
    _, said, ended = answers(world, side, folder, problems)
    good = [done and text == want for done, text, (_, want) in zip(ended, said, problems, strict=True)]
    digits = [own_digits_right(asked, text) for text, (asked, _) in zip(said, problems, strict=True)]
    return sum(good) / len(good), sum(g for g, _ in digits) / max(sum(n for _, n in digits), 1)


def wrong_digits(world: World, folder: Path, problems: list[tuple[str, str]]) -> dict[str, float]:
    """How sure a student is of its mistakes: the share of digits that do not follow from those before, and the median
    probability there of the digit that it wrote and of the right one. Answers that are not all digits do not count."""
    made, said, _ = answers(world, "student", folder, problems)
    texts = [asked + text for (asked, _), text in zip(problems, said, strict=True)]
    texts = [text for text in texts if re.fullmatch(rf"[0-9]( [0-9]){{{GIVEN + TERMS - 1}}}", text)]
    if not texts:
        return {}
    # the student's tokens are bytes, so that rows are of one length and a digit is every second token
    ids_BT = torch.tensor(made.tokenizer(texts, add_special_tokens=False)["input_ids"], device=made.device)
    id_of = [made.tokenizer(str(digit), add_special_tokens=False)["input_ids"][0] for digit in range(10)]
    with made.inference():
        probs_BTV = made.model(input_ids=ids_BT).logits.softmax(-1)
    written, wanted = [], []
    for probs_TV, text in zip(probs_BTV, texts, strict=True):
        digits = [int(one) for one in text.split()]
        for place in range(GIVEN, len(digits)):
            said_digit, right_digit = digits[place], following(digits[:place])
            if said_digit != right_digit:
                row = probs_TV[2 * place - 1]
                written.append(float(row[id_of[said_digit]]))
                wanted.append(float(row[id_of[right_digit]]))
    found = {"share": round(len(written) / (TERMS * len(texts)), 4)}
    if written:
        found |= {"written": round(statistics.median(written), 4), "right": round(statistics.median(wanted), 4)}
    return found


def tokens(run_dir: Path) -> dict[int, float]:
    """Student tokens that were trained on, up to each step."""
    total, out = 0.0, {}
    for row in steps_of(run_dir):
        total += tokens_of(row)
        out[int(row["step"])] = round(total)
    return out


def tokens_of(row: dict[str, Any]) -> float:
    """Student tokens of a step."""
    return float(row["train/tokens_per_s"] * row["train/seconds"])


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics that are of training steps."""
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/tokens_per_s" in row]


def teacher_of(world: World) -> Path:
    """The teacher's weights, trained from scratch."""
    own = {"policy": model(world, "teacher")}
    steps = world.teacher_steps
    larger = world._replace(rows=world.teacher_rows)
    made = run(larger, "teacher", own, data="teacher", steps=steps, period=steps, rate=world.start_rate, seed=1)
    return weights(made, steps)


def start_of(world: World, records: int, seed: int) -> dict[str, Any]:
    """A student that has learnt from its records until it was right often enough on the development set."""
    own = {"policy": model(world, "student")}
    period = max(world.start_steps // 40, 1)
    name, dev = f"start_{records}_{seed}", read_problems(world.folder, "dev")
    steps, rate = world.start_steps, world.start_rate
    made = run(world, name, own, data=f"train_{records}", steps=steps, period=period, rate=rate, seed=seed)
    for step in range(period, steps + 1, period):
        share, digits = right(world, "student", weights(made, step), dev)
        if share >= world.enough:
            break
    return {"weights": str(weights(made, step)), "steps": step, "dev_right": share, "dev_digits_right": digits}


def curve_of(world: World, one: Run, problems: str) -> dict[str, Any]:
    """An arm's run: how right the student is on ``problems`` over the tokens that it was trained on."""
    own = ARMS[one.arm]
    values = {
        "algorithm": "on_policy_distillation",
        "policy": model(world, "student", Path(one.start)),
        "teacher": model(world, "teacher", weights(world.folder / "teacher", world.teacher_steps)),
        "loss_fn": {"ce_loss_scale": 0.0, "direction": own.stored},
        "on_policy": {
            "fraction": own.fraction,
            "prompt_tokens": PROMPT,
            "max_new_tokens": ANSWER + 2,
            "batch_size": world.rows,
            "top_p": own.top_p,
            "loss_fn": {"direction": own.sampled},
        },
    }
    period = max(world.steps // world.points, 1)
    name, data = f"{one.records}_{one.arm}_{one.rate:g}_{one.seed}", f"train_{one.records}"
    if world.warm_up:
        name, values["policy"]["warmup_steps"] = f"{name}_{world.warm_up}", world.warm_up
    found = run(world, name, values, data=data, steps=world.steps, period=period, rate=one.rate, seed=one.seed)
    spent, tried = tokens(found), read_problems(world.folder, problems)
    curve = []
    for step in sorted({*range(period, world.steps + 1, period), world.steps}):
        share, digits = right(world, "student", weights(found, step), tried)
        curve.append({"step": step, "student_tokens": spent[step], "right": share, "digits_right": round(digits, 4)})
    rows = steps_of(found)[world.steps // 2 :]
    seconds, sampling = (sum(row.get(key, 0.0) for row in rows) for key in ("train/seconds", "train/time/sample"))
    trained = sum(map(tokens_of, rows))
    speed = {"tokens_per_s": round(trained / seconds), "without_sampling": round(trained / (seconds - sampling))}
    mistakes = wrong_digits(world, weights(found, world.steps), read_problems(world.folder, data))
    return {"curve": curve, "mistakes_on_records": mistakes, "speed": speed}


def _mean_right(made: Future[Any]) -> float:
    try:
        return statistics.mean(point["right"] for point in made.result()["curve"])
    except LossError:
        # the student ran away with its own text, and was stopped
        return 0.0


class Bench:
    """All runs of a comparison, ``--jobs`` at a time."""

    def __init__(self, args: argparse.Namespace, world: World, pool: ProcessPoolExecutor) -> None:
        self.args, self.world, self.pool, self.began = args, world, pool, time.perf_counter()

    def tell(self, what: str) -> None:
        """A line with the time since the beginning."""
        print(f"[{time.perf_counter() - self.began:5.0f} s] {what}", flush=True)

    def begin(self) -> tuple[dict[str, Any], Students]:
        """How good the teacher is, and the students."""
        teaching = self.pool.submit(teacher_of, self.world)
        seeds = [*([SWEEP_SEED] if len(self.args.rates) > 1 else []), *self.args.seeds]
        wanted = [(records, seed) for records in self.args.records for seed in seeds]
        made = {one: self.pool.submit(start_of, self.world, *one) for one in wanted}
        share, digits = right(self.world, "teacher", teaching.result(), read_problems(self.world.folder, "test"))
        teacher = {"steps": self.world.teacher_steps, "right": share, "digits_right": round(digits, 4)}
        self.tell(f"teacher: {teacher}")
        students = {one: future.result() for one, future in made.items()}
        for (records, seed), own in students.items():
            self.tell(f"student of {records} records, seed {seed}: {own['steps']} steps, {own['dev_right']:.3f} right")
        return teacher, students

    def choose(self, students: Students) -> Chosen:
        """The learning rate of each arm by number of records, and the mean of the curve that each of the rates gave."""
        rates = self.args.rates
        pairs = [(records, arm) for records in self.args.records for arm in self.args.arms]
        if len(rates) == 1:
            return {pair: {"rate": rates[0]} for pair in pairs}
        found: Chosen = {}
        tried = {pair: [self._run(pair, rate, SWEEP_SEED, students, "dev") for rate in rates] for pair in pairs}
        for pair, runs in tried.items():
            shares = [_mean_right(one) for one in runs]
            by_rate = {f"{rate:g}": round(share, 4) for rate, share in zip(rates, shares, strict=True)}
            found[pair] = {"rate": rates[shares.index(max(shares))], "mean_dev_right": by_rate}
            self.tell(f"{pair[0]} records, {pair[1]}: {found[pair]}")
        return found

    def _run(self, pair: tuple[int, str], rate: float, seed: int, students: Students, problems: str) -> Future[Any]:
        one = Run(*pair, rate, seed, students[pair[0], seed]["weights"])
        return self.pool.submit(curve_of, self.world, one, problems)

    def compare(self, teacher: dict[str, Any], students: Students, chosen: Chosen) -> None:
        """Curves of all arms and seeds, by number of records; written as they come."""
        seeds = self.args.seeds
        made = {
            (*pair, seed): self._run(pair, own["rate"], seed, students, "test")
            for pair, own in chosen.items()
            for seed in seeds
        }
        found: dict[str, Any] = {}
        for (records, arm), rate in chosen.items():
            runs = {seed: made[records, arm, seed].result() for seed in self.args.seeds}
            points = list(zip(*(one["curve"] for one in runs.values()), strict=True))
            mean = [{key: round(statistics.mean(one[key] for one in point), 4) for key in point[0]} for point in points]
            starts = {seed: students[records, seed]["dev_right"] for seed in self.args.seeds}
            own = found.setdefault(str(records), {"starts": starts, "arms": {}})
            own["arms"][arm] = {**rate, "mean": mean, "runs": runs}
            self.tell(f"{records} records, {arm}: {[(one['student_tokens'], one['right']) for one in mean]}")
            about = {"task": TASK, "held_out": self.args.held_out, "rows": self.args.rows}
            about |= {"warm_up": self.args.warm_up, "teacher": teacher}
            record(self.args.out, {**about, "records": found})


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--folder", type=Path, default=Path("runs/on_policy_curve"))
    arguments.add_argument("--records", type=int, nargs="+", default=[64, 8000], help="stored solutions")
    arguments.add_argument("--arms", nargs="+", choices=ARMS, default=["off", "on", "mixed"])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3], help="that arms choose from")
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--points", type=int, default=5, help="of a curve")
    arguments.add_argument("--rows", type=int, default=64, help="problems per step")
    arguments.add_argument("--teacher-steps", type=int, default=400)
    arguments.add_argument("--teacher-rows", type=int, default=256, help="problems per step of the teacher")
    arguments.add_argument("--start-steps", type=int, default=200, help="of a student before the arms, at most")
    arguments.add_argument("--enough", type=float, default=0.05, help="share of right answers that ends them")
    arguments.add_argument("--start-rate", type=float, default=3e-3, help="learning rate of both models before")
    arguments.add_argument("--warm-up", type=int, default=0, help="steps in which an arm's learning rate rises")
    arguments.add_argument("--held-out", type=int, default=500, help="problems of the test, and of development")
    arguments.add_argument("--jobs", type=int, default=1, help="processes at a time")
    arguments.add_argument("--tiny", action="store_true", help="models small, for a trial")
    args = arguments.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        "rows",
        "steps",
        "points",
        "teacher_rows",
        "teacher_steps",
        "start_steps",
        "start_rate",
        "enough",
        "warm_up",
    )
    shapes = (TINY, TINY) if args.tiny else (STUDENT, TEACHER)
    world = World(folder, *shapes, **{name: getattr(args, name) for name in names})
    write_data(folder, args.records, args.held_out, args.rows)
    for side, size in (("student", 257), ("teacher", MERGED)):
        write_tokenizer(folder, f"{side}_tokenizer", size)
    with worker_pool(args.jobs) as pool:
        bench = Bench(args, world, pool)
        teacher, students = bench.begin()
        bench.compare(teacher, students, bench.choose(students))


if __name__ == "__main__":
    main()
