"""Seconds of a step that samples, scores and trains, one after the other and at the same time.

    python -m benchmarks.overlap

A tiny student learns on-policy from an engine and a teacher behind servers on this machine. Both answer in a time that
is known: whatever they would compute elsewhere is a pause here, so that only the training uses the processor. The
engine writes its answers one after the other, as does the teacher with its rows. Sample, score and train are seconds of
a step by the run's own metrics; in a run that overlaps ``ratio`` is the step over the longest of the three. Each length
of pauses is a run with ``overlap: 0`` and one with ``overlap: 1``. Writes ``overlap.json`` beside this file.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common import parser, record

SKIPPED = 2  # first steps, which fill the pipeline
ROWS = 16
PAUSES = {"sample": (6.0, 2.0), "score": (2.0, 6.0), "sample and score": (6.0, 6.0), "train": (0.5, 0.5)}
"""Seconds of sampling and of scoring a step, by what takes longest."""


class Paced:
    """Answers one after the other, each in ``seconds``, as a server does that is as busy as it can be."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._lock, self._free = seconds, threading.Lock(), 0.0

    def wait(self, answers: int = 1) -> None:
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + self.seconds * answers
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


class Teacher:
    """A teacher to whom every token is as likely: ``k`` of them, and the one that came."""

    def __init__(self, vocab_size: int, seconds: float) -> None:
        self.probability, self.pace = 1.0 / vocab_size, Paced(seconds)
        self.name, self.size = "teacher", vocab_size

    def handle(self, tokenize: Any, path: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return 200, {"data": [{"id": self.name, "max_model_len": 4096}]}
        prompts = [tokenize(body["prompt"])] if isinstance(body["prompt"], str) else body["prompt"]
        self.pace.wait(len(prompts))
        k = body["prompt_logprobs"]
        return 200, {"choices": [self._choice(i, ids, k) for i, ids in enumerate(prompts)]}

    def _choice(self, number: int, ids: list[int], k: int) -> dict[str, Any]:
        said = {"logprob": math.log(self.probability)}
        places = [{str(t): said for t in {*range(k), token}} for token in ids[1:]]
        return {"index": number, "prompt_token_ids": ids, "prompt_logprobs": [None, *places]}


class Engine:
    """A sampler whose answers are chance, of one length."""

    def __init__(self, vocab_size: int, tokens: int, seconds: float) -> None:
        self.size, self.tokens, self.pace = vocab_size, tokens, Paced(seconds)

    def handle(self, path: str, body: Any) -> tuple[int, Any]:
        if not path.endswith("/completions"):
            return 200, {"data": [{"id": "student"}]}
        self.pace.wait()
        chance = random.Random(body["seed"])
        ids = [chance.randrange(300, self.size - 10) for _ in range(self.tokens)]
        said = {"token_logprobs": [-1.0] * self.tokens}
        return 200, {"choices": [{"token_ids": ids, "logprobs": said, "finish_reason": "length"}]}


def settings(folder: Path, run_dir: Path, engine: str, teacher: str, overlap: int, steps: int) -> dict[str, Any]:
    """The run that is measured."""
    arch = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    own = {"tokenizer": {"name": str(folder / "student")}}
    server = {"concurrency": ROWS, "retries": 0}
    return {
        "algorithm": "on_policy_distillation",
        "policy": {**own, "init": "random", "model_overrides": arch, "train_micro_batch_size": 4},
        "teacher": {**own, "server": {**server, "url": teacher, "k": 8, "prompts_per_request": 1}},
        "data": {"train": str(folder / "train.jsonl"), "max_input_seq_length": 256, "long_documents": "cut"},
        "on_policy": {
            "max_new_tokens": 96,
            "prompt_tokens": 32,
            "policy_gradient": {},
            "overlap": overlap,
            # chance is not the student's
            "guard": {"max_length_growth": None, "min_ended_ratio": None, "max_repeated": None},
            "engine": {"server": {**server, "url": engine}, "weights": str(run_dir / "weights"), "max_gap": None},
        },
        "distillation": {
            "num_prompts_per_step": ROWS,
            "max_num_steps": steps,
            "max_num_epochs": 100,
            "val_at_start": False,
            "seed": 1,
        },
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(run_dir), "tensorboard_enabled": False, "progress": False},
    }


def measured(folder: Path, name: str, sample: float, score: float, overlap: int, steps: int) -> dict[str, float]:
    """Median seconds of a run whose engine takes ``sample`` and whose teacher ``score`` seconds for a step's rows."""
    from limbeck.algorithms.dispatch import resolve_and_run
    from limbeck.tokens import ByteTokenizer
    from limbeck.tokens.loading import load_tokenizer
    from tests.helpers.servers import listening

    tokenizer = ByteTokenizer.of(load_tokenizer(str(folder / "student")))
    engine = Engine(tokenizer.vocab.size, 96, sample / ROWS)
    teacher = Teacher(tokenizer.vocab.size, 0.0)

    def answers(path: str, body: Any, headers: Any) -> Any:
        # what is asked before the first sample is no part of a step
        teacher.pace.seconds = score / ROWS if engine.pace._free else 0.0
        return teacher.handle(lambda text: tokenizer.encode(text).ids.tolist(), path, body)

    run_dir = folder / f"{name.replace(' ', '_')}_{overlap}"
    with (
        listening(lambda path, body, headers: engine.handle(path, body)) as engine_url,
        listening(answers) as teacher_url,
    ):
        resolve_and_run(settings(folder, run_dir, engine_url, teacher_url, overlap, steps))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][SKIPPED:-1]

    def median(*names: str) -> float:
        return round(statistics.median(sum(row[f"train/{one}"] for one in names) for row in rows), 3)

    if overlap:
        out = {key: median(f"overlap/{key}") for key in ("sample", "score", "train")}
    else:
        out = {"sample": median("time/sample"), "score": median("time/teacher")}
        out["train"] = round(median("seconds") - sum(out.values()), 3)
    # of the main thread: until samples are there and collated, and the engine has the new weights
    out["waiting"] = median("time/sample")
    if overlap:
        out["hand_over"] = median("time/hand_over")
    out["step"] = median("seconds")
    out["ratio"] = round(out["step"] / max(out["sample"], out["score"], out["train"]), 2)
    return out


def prepare(folder: Path) -> None:
    """Texts to begin with, and a tokenizer."""
    from limbeck.demo import standard_library_texts, train_tokenizer

    text = "\n\n".join(dict.fromkeys(standard_library_texts(2000)))
    (folder / "vocabulary.txt").write_text(text, encoding="utf-8")
    parts = [text[i * 400 : (i + 1) * 400] for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in parts), encoding="utf-8")
    train_tokenizer(folder / "vocabulary.txt", folder / "student", 4096)


def main() -> None:
    """Measure runs in which another part is the longest, and write the table."""
    import torch

    arguments = parser(__file__, __doc__)
    arguments.add_argument("--steps", type=int, default=8)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        for name, (sample, score) in PAUSES.items():
            for overlap in (0, 1):
                row = measured(folder, name, sample, score, overlap, args.steps)
                table.append({"longest": name, "overlap": overlap, **row})
                print(json.dumps(table[-1]), flush=True)
    record(args.out, {"rows": ROWS, "steps": args.steps, "table": table})


if __name__ == "__main__":
    main()
