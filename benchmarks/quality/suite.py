"""The quality benchmark: students from scratch, a teacher that has read more, one arm per objective, several seeds.

    PYTHONPATH=. python benchmarks/quality/suite.py CORPUS WORK [--pairs coarse fine] [--arms ce tree_kl ...]
        [--seeds 1 2 3] [--parallel 6] [--minutes 9]

CORPUS is what `corpus.py` wrote. Everything runs through `limbeck train` and `limbeck eval`: first the two teachers,
then each arm. A finished run is a line of `WORK/results.jsonl`, and is not repeated; what does not begin within
`--minutes` waits for the next call. `tables.py` draws the results.

`coarse`: the teacher has 32,768 tokens, the student 8,192; `fine`: the other way round; `same`: both 8,192.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import origin

Key = tuple[str, str, int]
"""Pair, arm, seed."""

PAIRS = {"coarse": ("bpe_8k", "bpe_32k"), "fine": ("bpe_32k", "bpe_8k"), "same": ("bpe_8k", "bpe_8k")}
"""Student's and teacher's tokenizer."""

TREE = {"mode": "tree_kl"}
ARMS: dict[str, dict[str, Any] | None] = {
    "ce": None,
    "boundary_kl": {"mode": "boundary_kl"},
    "tree_kl": TREE,
    "tree_kl_soft": TREE | {"gate": "soft"},
    "tree_kl_hard": TREE | {"gate": "hard"},
    "tree_kl_.3": TREE | {"kl_loss_weight": 0.3},
    "tree_kl_cheap": TREE | {"condition": "cheap"},
    "tree_kl_exact": TREE | {"condition": "exact"},
    "tree_kl_cheap_soft": TREE | {"condition": "cheap", "gate": "soft"},
    "tree_kl_cheap_hard": TREE | {"condition": "cheap", "gate": "hard"},
    "tree_kl_terminals": TREE | {"terminal_weight": 1.0},
    "tree_kl_weight_.3": TREE | {"condition": "cheap", "kl_loss_weight": 0.3},
    "tree_kl_root": TREE | {"chunk_weight": 0.0, "inner_student_weight": 0.0, "inner_teacher_weight": 0.0},
    "tree_kl_no_chunk": TREE | {"chunk_weight": 0.0},
    "tree_kl_all_chunks": TREE | {"chunk_terms": "all"},
    "tree_kl_all_chunks_soft": TREE | {"chunk_terms": "all", "gate": "soft"},
    "tree_kl_exact_soft": TREE | {"condition": "exact", "gate": "soft"},
    "tree_kl_terminals_soft": TREE | {"terminal_weight": 1.0, "gate": "soft"},
    "tree_kl_soft_.3": TREE | {"gate": "soft", "kl_loss_weight": 0.3},
    "boundary_kl_soft": {"mode": "boundary_kl", "gate": "soft"},
    "boundary_kl_no_chunk": {"mode": "boundary_kl", "chunk_weight": 0.0},
    "p_kl_norm": {"mode": "p_kl_norm"},
    "alm": {"mode": "alm"},
    "uld": {"mode": "uld"},
    "p_kl": {"mode": "p_kl"},
    "gold": {"mode": "gold"},
    "h_kl": {"mode": "h_kl"},
    "strict": {"mode": "strict"},
    "strict_full": {"mode": "strict", "strict_topk": None},
    "strict_rest_forward": {"mode": "strict", "strict_topk": None, "strict_rest": True, "direction": "forward"},
    "strict_span_.25": {"mode": "strict", "span_weight": 0.25},
    "simct": {"mode": "simct"},
    "escd": {"mode": "escd"},
    "bpm": {"mode": "bpm"},
    "bpm_forward": {"mode": "bpm", "direction": "forward"},
    "bpm_blanks": {"mode": "bpm", "mask_blanks": False},
}
"""Loss settings by arm; None: cross-entropy alone. Weights of divergence and cross-entropy are 1 where none is said."""

STUDENT = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
TEACHER = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12}
CONTEXT = 640


@dataclass(frozen=True)
class Sizes:
    """Steps and documents per step of teachers and students."""

    teacher_steps: int
    teacher_documents: int
    student_steps: int
    student_documents: int


def model(corpus: Path, tokenizer: str, shape: dict[str, int], steps: int, lr: float, batch: int) -> dict[str, Any]:
    """A Llama of that shape with random weights, trained under a cosine schedule."""
    warmup = max(steps // 20, 1)
    return {
        "init": "random",
        "tokenizer": {"name": str(corpus / tokenizer)},
        "model_overrides": {
            "model_type": "llama",
            "tie_word_embeddings": True,
            "max_position_embeddings": CONTEXT,
            "num_key_value_heads": shape["num_attention_heads"],
            **shape,
        },
        "precision": "float32",
        "max_total_sequence_length": CONTEXT,
        "train_micro_batch_size": batch,
        "max_grad_norm": 1.0,
        "optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True},
        },
        "scheduler": [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.05, "total_iters": warmup}},
            {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": steps - warmup}},
            {"milestones": [warmup]},
        ],
    }


def run_file(
    corpus: Path, part: str, policy: dict[str, Any], steps: int, documents: int, seed: int, folder: Path
) -> dict[str, Any]:
    """What all runs of the benchmark share."""
    return {
        "policy": policy,
        "data": {
            "train": str(corpus / part / "*.jsonl"),
            "append_eos": True,
            "max_input_seq_length": CONTEXT,
            "num_workers": 1,
        },
        "distillation": {
            "num_prompts_per_step": documents,
            "max_num_steps": steps,
            "max_num_epochs": 1000,
            "seed": seed,
        },
        "checkpointing": {"keep_top_k": 1},
        "logger": {"log_dir": str(folder), "tensorboard_enabled": False},
    }


def limbeck(*arguments: str, log: Path) -> str:
    """Standard output of a `limbeck` command; its messages go to a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a") as messages:
        done = subprocess.run(
            [sys.executable, "-m", "limbeck", *arguments],
            stdout=subprocess.PIPE, stderr=messages, text=True, env=environment,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"limbeck {arguments[0]} ended with {done.returncode}; see {log}")
    return done.stdout


def train(settings: dict[str, Any], folder: Path) -> Path:
    """Runs a run file, and gives the folder of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    limbeck("train", str(path), "-q", "--json", log=folder / "log")
    return latest(folder)


def latest(folder: Path) -> Path:
    steps = sorted((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    if not steps:
        raise RuntimeError(f"{folder} has no checkpoint")
    return steps[-1] / "policy" / "weights"


def measure(model: Path, corpus: Path, log: Path) -> dict[str, Any]:
    """Bits per byte of a model or of a run's student, by domain and by class of token."""
    files = [argument for path in sorted((corpus / "held_out").glob("*.jsonl")) for argument in ("-d", str(path))]
    found = json.loads(limbeck("eval", str(model), *files, "--context", str(CONTEXT), "--json", log=log))
    (own,) = found["models"].values()
    return {
        Path(path).stem: {key: figures[key] for key in ("bpb", "bytes", "classes")} for path, figures in own.items()
    }


def teacher(corpus: Path, work: Path, tokenizer: str, sizes: Sizes) -> Path:
    """A teacher over that tokenizer, trained once."""
    folder = work / f"teacher_{tokenizer}"
    if not (folder / "done").exists():
        policy = model(corpus, tokenizer, TEACHER, sizes.teacher_steps, 6e-4, sizes.teacher_documents)
        train(run_file(corpus, "teacher", policy, sizes.teacher_steps, sizes.teacher_documents, 1, folder), folder)
        (folder / "done").touch()
    return latest(folder)


def student(corpus: Path, work: Path, pair: str, arm: str, seed: int, sizes: Sizes) -> dict[str, Any]:
    """Trains and measures one student; its weights are not kept."""
    own, other = PAIRS[pair]
    folder = work / f"{pair}_{arm}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    policy = model(corpus, own, STUDENT, sizes.student_steps, 1e-3, sizes.student_documents)
    settings = run_file(corpus, "student", policy, sizes.student_steps, sizes.student_documents, seed, folder)
    loss = ARMS[arm]
    if loss is not None:
        settings["teacher"] = {
            "model_name": str(latest(work / f"teacher_{other}")),
            "tokenizer": {"name": str(corpus / other)},
            "precision": "float32",
            "max_total_sequence_length": CONTEXT,
        }
        settings["loss_fn"] = {"block_rows": 2048, **loss}
    start = time.time()
    train(settings, folder)
    row = {"pair": pair, "arm": arm, "seed": seed, "seconds": round(time.time() - start)}
    row["measures"] = measure(folder, corpus, folder / "log")
    shutil.rmtree(folder / "checkpoints")
    return row


class Results:
    """Rows of a results file, and the clock of one call of a script."""

    def __init__(self, path: Path, minutes: float, **more: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._minutes, self._more, self._begun = path, minutes, more, time.time()
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.have = {(row["pair"], row["arm"], row["seed"]) for row in rows}

    def report(self, row: dict[str, Any]) -> None:
        """Store a finished run and print its mean over the domains."""
        with self._path.open("a") as file:
            file.write(json.dumps(row | self._more | {"origin": origin()}) + "\n")
        bits = [domain["bpb"] for domain in row["measures"].values()]
        print(f"{time.time() - self._begun:6.0f} s", row["pair"], row["arm"], row["seed"],
              f"{sum(bits) / len(bits):.4f} ({row['seconds']} s)", flush=True)  # fmt: skip

    def fill(self, keys: Iterable[Key], job: Callable[..., dict[str, Any]], parallel: int) -> None:
        """``job(*key)`` for every key that has no row yet, as far as they can begin in time. A run that fails costs its
        own row alone."""

        def one(key: Key) -> None:
            if time.time() - self._begun > 60 * self._minutes:
                return
            try:
                self.report(job(*key))
            except RuntimeError as error:
                print(*key, error, flush=True)

        with ThreadPoolExecutor(parallel) as pool:
            list(pool.map(one, [key for key in keys if key not in self.have]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=["coarse", "fine"])
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["ce", "boundary_kl", "tree_kl", "tree_kl_cheap", "tree_kl_exact"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--sizes", nargs=4, type=int, default=[500, 48, 300, 24], metavar="N",
                        help="steps and documents per step of teachers, then of students")  # fmt: skip
    args = parser.parse_args()
    corpus, work, sizes = args.corpus, args.work, Sizes(*args.sizes)
    results = Results(work / "results.jsonl", args.minutes, sizes=args.sizes)

    def teach(pair: str, tokenizer: str, seed: int) -> dict[str, Any]:
        teacher(corpus, work, tokenizer, sizes)
        folder = work / f"teacher_{tokenizer}"
        measures = measure(folder, corpus, folder / "log")
        return {"pair": pair, "arm": tokenizer, "seed": seed, "seconds": 0, "measures": measures}

    def distil(pair: str, arm: str, seed: int) -> dict[str, Any]:
        return student(corpus, work, pair, arm, seed, sizes)

    results.fill(
        [("teacher", name, 1) for name in sorted({PAIRS[pair][1] for pair in args.pairs})], teach, args.parallel
    )
    # seeds outermost: what is cut off is a seed of some arms, not an arm
    wanted = [(pair, arm, seed) for seed in args.seeds for arm in args.arms for pair in args.pairs]
    results.fill(wanted, distil, args.parallel)


if __name__ == "__main__":
    main()
