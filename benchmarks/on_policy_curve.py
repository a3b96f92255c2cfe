"""On-policy against off-policy distillation at equal student tokens, on a task where a student's own mistakes matter.

    python -m benchmarks.on_policy_curve [--folder runs/on_policy_curve] [--steps 120] [--arms off on mixed] [--tiny]

The task is to go on from four digits, each further one being the sum (mod 10) of the one before it and the one four
before it: ``4 1 8 2`` -> `` 6 7 5 7 3 ...``. One wrong digit spoils all that follow. A teacher is trained from scratch
on it with a tokenizer that joins a space and a digit, a smaller student of single bytes for a short time. Then the same
student, teacher, problems and rate go through the training loop on stored text (`off`, fraction 0), on what the student
writes itself (`on`, fraction 1) and on half of each. The figure is the share of held-out problems whose greedy answer
is right as a whole, over the student tokens that were trained on. A run that was stopped goes on where it was when the
script is called again. Writes ``benchmarks/on_policy_curve.json``; the stored one is of a CPU, with ``--rows 64
--teacher-steps 300 --start-steps 200 --steps 36 --arms off on``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.common import parser, record
from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.tokens import ByteVocab, load_tokenizer
from limbeck.utils.logger import read_metrics

END = "<eos>"
GIVEN, TERMS = 4, 16
"""Digits of a problem, and of its answer."""
PROMPT, ANSWER = 2 * GIVEN - 1, 2 * TERMS + 1
"""Characters of a problem, and of its answer with the end."""
MERGED = 280
"""Tokens of the teacher's vocabulary; the student's has the 256 bytes and the end."""
ARMS = {"off": 0.0, "on": 1.0, "mixed": 0.5}
TEACHER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8}
STUDENT = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Starts(NamedTuple):
    """How a model is trained before the comparison: for so many steps, with a look every `period`, until the share
    of right answers is `enough`."""

    tokenizer: str
    shape: dict[str, Any]
    held_out: list[tuple[str, str]]
    steps: int
    period: int
    enough: float


def problem(rng: random.Random) -> tuple[str, str]:
    """The digits that are given, and those that follow."""
    digits = [rng.randrange(10) for _ in range(GIVEN)]
    for _ in range(TERMS):
        digits.append((digits[-1] + digits[-GIVEN]) % 10)
    return " ".join(map(str, digits[:GIVEN])), "".join(f" {digit}" for digit in digits[GIVEN:])


def write_data(folder: Path, count: int) -> list[tuple[str, str]]:
    """Training and held-out problems as files; returns the latter."""
    rng = random.Random(0)
    held_out = sorted({problem(rng) for _ in range(512)})
    known = {asked for asked, _ in held_out}
    train = [one for one in (problem(rng) for _ in range(count)) if one[0] not in known]
    for name, rows in (("train", train), ("held_out", held_out)):
        lines = [json.dumps({"text": asked + answer}) for asked, answer in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return held_out


def write_tokenizer(folder: Path, name: str, size: int) -> str:
    """A byte-level BPE trained on problems, with an end token; its folder."""
    rng = random.Random(1)
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False, special_tokens=[END])
    made.train_from_iterator(("".join(problem(rng)) for _ in range(2000)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(folder / name)
    return str(folder / name)


def model(tokenizer: str, shape: dict[str, Any], weights: Path | None = None) -> dict[str, Any]:
    """A section of a run file: random weights, or those of a folder."""
    if weights is not None:
        return {"model_name": str(weights), "tokenizer": {"name": tokenizer}, "precision": "float32"}
    heads = {"num_key_value_heads": shape["num_attention_heads"], "max_position_embeddings": 64}
    overrides = {"model_type": "llama", **shape, **heads, "tie_word_embeddings": False, "initializer_range": 0.1}
    own = {"tokenizer": {"name": tokenizer}, "precision": "float32"}
    return {"init": "random", **own, "model_overrides": overrides}


def run(folder: Path, name: str, values: dict[str, Any], *, steps: int, period: int, rows: int, rate: float) -> Path:
    """A run to its end, from wherever it was; returns its folder."""
    values["policy"] |= {
        "max_total_sequence_length": 48,
        "train_micro_batch_size": rows,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": rate, "weight_decay": 0.0}},
    }
    values |= {
        "data": {"train": str(folder / "train.jsonl"), "append_eos": True, "max_input_seq_length": 48},
        "distillation": {"num_prompts_per_step": rows, "max_num_steps": steps, "max_num_epochs": 1000, "seed": 1}
        | {"val_at_start": False, "val_at_end": False},
        "checkpointing": {"save_period": period, "keep_top_k": None},
        "logger": {"log_dir": str(folder / name), "tensorboard_enabled": False, "progress": False},
    }
    return resolve_and_run(values)


def weights(run_dir: Path, step: int) -> Path:
    """The stored weights of a step."""
    return run_dir / "checkpoints" / f"step_{step}" / "policy" / "weights"


def right(folder: Path, tokenizer: str, held_out: list[tuple[str, str]]) -> float:
    """Share of problems that a model answers right as a whole, with the end where it belongs."""
    own = load_tokenizer(tokenizer)
    made = LanguageModel({"model_name": str(folder), "precision": "float32"}, own)
    vocab = ByteVocab.from_tokenizer(own)
    end = [i for i, role in vocab.roles.items() if role == "eos"]
    greedy = SamplingConfig(max_new_tokens=ANSWER + 2, temperature=0, batch_size=512)
    prompts = [torch.tensor(own(asked, add_special_tokens=False)["input_ids"]) for asked, _ in held_out]
    found = LocalSampler(made, greedy, end, vocab).sample(prompts)
    said = [vocab.join(one.ids_T.tolist()).decode("utf-8", "replace") for one in found]
    good = [one.ended and text == want for one, text, (_, want) in zip(found, said, held_out, strict=True)]
    return sum(good) / len(good)


def tokens(run_dir: Path) -> dict[int, float]:
    """Student tokens that were trained on, up to each step."""
    total, out = 0.0, {}
    for row in steps_of(run_dir):
        total += tokens_of(row)
        out[int(row["step"])] = round(total)
    return out


def speed(run_dir: Path) -> dict[str, float]:
    """Student tokens per second of a run's second half: of whole steps, and of what is not sampling."""
    found = steps_of(run_dir)
    rows = found[len(found) // 2 :]
    seconds, trained_on = sum(row["train/seconds"] for row in rows), sum(map(tokens_of, rows))
    sampling = sum(row.get("train/time/sample", 0.0) for row in rows)
    return {"tokens_per_s": round(trained_on / seconds), "without_sampling": round(trained_on / (seconds - sampling))}


def tokens_of(row: dict[str, Any]) -> float:
    """Student tokens of a step."""
    return float(row["train/tokens_per_s"] * row["train/seconds"])


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics that are of training steps."""
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/tokens_per_s" in row]


def trained(folder: Path, side: str, own: Starts, *, rows: int, rate: float) -> tuple[Path, int, float]:
    """A model trained from scratch, as it was when it first was right often enough: its weights, the steps it took,
    and the share of problems that it answers right."""
    values = {"policy": model(own.tokenizer, own.shape)}
    made = run(folder, f"{side}_start", values, steps=own.steps, period=own.period, rows=rows, rate=rate)
    for step in range(own.period, own.steps + 1, own.period):
        share = right(weights(made, step), own.tokenizer, own.held_out)
        print(f"{side} after {step} steps: {share:.3f}", flush=True)
        if share >= own.enough:
            break
    return weights(made, step), step, share


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--folder", type=Path, default=Path("runs/on_policy_curve"))
    arguments.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--teacher-steps", type=int, default=600)
    arguments.add_argument(
        "--start-steps", type=int, default=200, help="of the student, at most: until it is right on 5%%"
    )
    arguments.add_argument("--rows", type=int, default=256, help="problems per step")
    arguments.add_argument("--rate", type=float, default=1e-4, help="learning rate of the arms")
    arguments.add_argument("--start-rate", type=float, default=3e-3, help="learning rate of both models before")
    arguments.add_argument("--tiny", action="store_true", help="everything small, for a CPU")
    args = arguments.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    held_out = write_data(folder, 2_000 if args.tiny else 50_000)[: 32 if args.tiny else 512]
    shapes = {"teacher": TINY if args.tiny else TEACHER, "student": TINY if args.tiny else STUDENT}
    names = {side: write_tokenizer(folder, side, size) for side, size in (("student", 257), ("teacher", MERGED))}
    count = {"teacher": args.teacher_steps, "student": args.start_steps}
    looks = {"teacher": 1, "student": 2 if args.tiny else 20}
    aims = {
        side: Starts(names[side], shapes[side], held_out, steps, steps // looks[side], 0.05)
        for side, steps in count.items()
    }
    made = {side: trained(folder, side, own, rows=args.rows, rate=args.start_rate) for side, own in aims.items()}
    starts = {side: path for side, (path, _, _) in made.items()}
    result: dict[str, Any] = {
        "task": f"a recurrence of digits, {GIVEN} given and {TERMS} to follow",
        "held_out": len(held_out),
        "rows": args.rows,
        "start": {side: {"steps": steps, "right": share} for side, (_, steps, share) in made.items()},
        "arms": {},
    }
    period = max(args.steps // 12, 1)
    for arm in args.arms:
        values = {
            "algorithm": "on_policy_distillation",
            "policy": model(names["student"], shapes["student"], starts["student"]),
            "teacher": model(names["teacher"], shapes["teacher"], starts["teacher"]),
            "loss_fn": {"ce_loss_scale": 0.0},
            "on_policy": {
                "fraction": ARMS[arm],
                "prompt_tokens": PROMPT,
                "max_new_tokens": ANSWER + 2,
                "batch_size": args.rows,
            },
        }
        found = run(folder, arm, values, steps=args.steps, period=period, rows=args.rows, rate=args.rate)
        spent = tokens(found)
        curve = [
            {
                "step": step,
                "student_tokens": spent[step],
                "right": right(weights(found, step), names["student"], held_out),
            }
            for step in sorted({*range(period, args.steps + 1, period), args.steps})
        ]
        result["arms"][arm] = {"curve": curve, "speed": speed(found)}
        print(arm, speed(found), [(point["student_tokens"], round(point["right"], 3)) for point in curve], flush=True)
        record(args.out, result)


if __name__ == "__main__":
    main()
