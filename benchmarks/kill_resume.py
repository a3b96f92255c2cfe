"""Kill a training run again and again, let it resume, and compare it bit by bit with one that was left alone.

    python -m benchmarks.kill_resume --kills 48

Every attempt is a ``limbeck train`` in a process of its own that ends by SIGKILL: at a random moment of its steps,
while a checkpoint is being written, or while it starts. Most processes are forks of one that has done nothing but the
imports, which take longer than everything else; every sixth is a new ``python -m limbeck``. What must be equal in the
end: weights, optimizer state, random generators, metrics (apart from clocks), counts of what was left out, and which
checkpoints are kept. Writes ``kill_resume.json`` beside this file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# one thread: sums then have one order, and a fork is safe
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import yaml
from safetensors.torch import load_file

from benchmarks.common import parser, record
from limbeck.cli import main as main_command
from limbeck.demo import train_tokenizer, write_texts
from limbeck.utils.logger import read_metrics

CLOCKS = ("train/tokens_per_s", "train/seconds", "train/time/")
PRELOAD = ("transformers.models.llama.modeling_llama", "torch.distributed.checkpoint", "limbeck.report.run_page")
WAYS = ("steps", "checkpoint", "checkpoint", "start")


def model(tokenizer: Path, **more: Any) -> dict[str, Any]:
    """A tiny random model; dropout draws random numbers in every step of the one that is trained."""
    arch = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "attention_dropout": 0.1,
    }
    return {"init": "random", "tokenizer": {"name": str(tokenizer)}, "model_overrides": arch, **more}


def prepare(folder: Path, steps: int, documents: int = 90) -> Path:
    """Data, two tokenizers and the run file."""
    write_texts(folder, train=documents, held_out=10)
    for name, size in (("student", 400), ("teacher", 700)):
        train_tokenizer(folder / "vocabulary.txt", folder / name, size)
    values = {
        "policy": model(
            folder / "student",
            train_micro_batch_size=2,
            optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 0.003}},
            scheduler={"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": steps}},
        ),
        "teacher": model(folder / "teacher", logprob_batch_size=4),
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_input_seq_length": 64,
        },
        "loss_fn": {"mode": "boundary_kl", "dynamic_loss_scaling": True},
        "distillation": {
            "num_prompts_per_step": 4,
            "max_num_steps": steps,
            "max_num_epochs": 1000,
            "val_period": 20,
            "seed": 3,
        },
        "checkpointing": {"save_period": 2, "keep_top_k": 2, "metric_name": "val/bpb"},
        "logger": {"tensorboard_enabled": False, "progress": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class Attempt:
    """A command as a user starts it, in a process of its own; what it says goes to ``log``."""

    def __init__(self, arguments: list[str], log: Path, *, fresh: bool) -> None:
        self.log = log
        self._fork: Any = None
        self._fresh: subprocess.Popen[bytes] | None = None
        if fresh:
            with self.log.open("wb") as out:
                self._fresh = subprocess.Popen([sys.executable, "-m", "limbeck", *arguments], stdout=out, stderr=out)
        else:
            self._fork = multiprocessing.get_context("fork").Process(target=_command, args=(arguments, self.log))
            self._fork.start()

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._fork.exitcode if self._fresh is None else self._fresh.poll()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        process = self._fork if self._fresh is None else self._fresh
        process.kill()
        self.wait()

    def wait(self) -> None:
        """Until it ends by itself."""
        if self._fresh is None:
            self._fork.join()
        else:
            self._fresh.wait()

    def check(self) -> None:
        """Stop the benchmark if the run failed by itself."""
        if self.code not in (0, None, -signal.SIGKILL):
            raise SystemExit(f"the run failed with {self.code}: {self.log.read_text()[-2000:]}")


def _command(arguments: list[str], log: Path) -> None:
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    main_command(arguments)


def training(run_file: Path, run_dir: Path, *, fresh: bool = False) -> Attempt:
    """A training run that has begun."""
    arguments = ["train", str(run_file), f"logger.log_dir={run_dir}", "--quiet"]
    return Attempt(arguments, run_dir.with_suffix(".log"), fresh=fresh)


def finish(run_file: Path, run_dir: Path) -> float:
    """Run to the end; seconds."""
    begin = time.monotonic()
    attempt = training(run_file, run_dir)
    attempt.wait()
    attempt.check()
    return time.monotonic() - begin


def temporary(run_dir: Path) -> list[str]:
    """Folders of a checkpoint that is being written or removed."""
    folder = run_dir / "checkpoints"
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p.name for p in found if not p.name.startswith("step_"))


def latest(run_dir: Path) -> int:
    """Step of the newest whole checkpoint."""
    steps = [int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step_*")]
    return max(steps, default=0)


def wait_for_checkpoint(attempt: Attempt, run_dir: Path, number: int) -> None:
    """Until the process begins to write its ``number``-th checkpoint."""
    seen: set[str] = set(temporary(run_dir))
    while attempt.code is None and number:
        now = [name for name in temporary(run_dir) if name.startswith("tmp_") and name not in seen]
        number -= bool(now)
        seen.update(now if number else ())
        time.sleep(0.0005)


def kill_once(run_file: Path, run_dir: Path, way: str, rng: random.Random, *, fresh: bool) -> dict[str, Any]:
    """Start the run, kill it in the given way, and say what it left (killed at its start, it may find that too)."""
    metrics = run_dir / "metrics.jsonl"
    begin = time.monotonic()
    before = metrics.stat().st_ino if metrics.exists() else -1
    attempt = training(run_file, run_dir, fresh=fresh)
    # a run rewrites this file when it is set up, before its first step
    limit = rng.uniform(0.0, 1.5) if way == "start" else 600.0
    while attempt.code is None and time.monotonic() - begin < limit:
        if metrics.exists() and metrics.stat().st_ino != before:
            break
        time.sleep(0.001)
    if way == "steps":
        time.sleep(rng.uniform(0.0, 1.0))
    elif way == "checkpoint":
        wait_for_checkpoint(attempt, run_dir, rng.randint(1, 2))
        time.sleep(rng.uniform(0.0, 0.05))
    ended = attempt.code is not None
    attempt.kill()
    attempt.check()
    return {
        "way": way,
        "process": "new" if fresh else "fork",
        "seconds": round(time.monotonic() - begin, 3),
        "killed": not ended,
        "left_unfinished": temporary(run_dir),
        "last_checkpoint": latest(run_dir),
    }


def digest(folder: Path) -> dict[str, str]:
    """Hashes of all stored tensors below a folder (the files' headers have no fixed order)."""
    out = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, value in load_file(path).items():
            raw = hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            out[f"{path.relative_to(folder)}:{name}"] = f"{value.dtype} {tuple(value.shape)} {raw}"
    return out


def steady(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics without clocks."""
    return [{k: v for k, v in r.items() if not k.startswith(CLOCKS)} for r in read_metrics(run_dir / "metrics.jsonl")]


def _part(hashes: dict[str, str], lead: str) -> dict[str, str]:
    found = {name: value for name, value in hashes.items() if name.startswith(lead)}
    assert found, f"nothing stored under {lead}"
    return found


def compare(steps: int, whole: Path, broken: Path) -> dict[str, bool]:
    """What the two runs have in common."""
    a, b = (digest(run / "checkpoints" / f"step_{steps}") for run in (whole, broken))
    kept = [sorted(p.name for p in (r / "checkpoints").iterdir()) for r in (whole, broken)]
    return {
        "weights_identical": _part(a, "policy/weights") == _part(b, "policy/weights"),
        "optimizer_and_generators_identical": a == b,
        "metrics_identical": steady(whole) == steady(broken),
        "skipped_identical": (whole / "skipped.json").read_bytes() == (broken / "skipped.json").read_bytes(),
        "same_checkpoints_kept": kept[0] == kept[1],
        "nothing_left_behind": not [p for p in broken.rglob("*") if p.name.startswith(("tmp_", "del_", "old_"))]
        and not list(broken.rglob("*.tmp")),
    }


def main() -> None:
    """Run, kill, compare, write the result; exit code 1 if anything differs."""
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--kills", type=int, default=48)
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()
    rng = random.Random(args.seed)
    for name in PRELOAD:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_file = prepare(folder, args.steps)
        whole, broken = folder / "whole", folder / "broken"
        seconds = finish(run_file, whole)
        kills: list[dict[str, Any]] = []
        while sum(k["killed"] for k in kills) < args.kills:
            number = len(kills)
            way = WAYS[number % len(WAYS)]
            kills.append(kill_once(run_file, broken, way, rng, fresh=number % 6 == 5))
            print(json.dumps(kills[-1]), flush=True)
            if latest(broken) >= args.steps:
                raise SystemExit("the run was complete before all kills were done; give more --steps")
        finish(run_file, broken)
        result = {
            "steps": args.steps,
            "kills": len([k for k in kills if k["killed"]]),
            "kills_during_a_checkpoint": sum(bool(k["left_unfinished"]) and k["way"] != "start" for k in kills),
            **compare(args.steps, whole, broken),
            "uninterrupted_seconds": round(seconds, 1),
            "attempts": kills,
        }
    record(args.out, result)
    print(json.dumps({k: v for k, v in result.items() if k != "attempts"}))
    if not all(v for v in result.values() if isinstance(v, bool)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
