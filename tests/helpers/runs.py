"""Run files, tiny models and small data for whole runs, and the ways to start one."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from limbeck.cli import main
from limbeck.config import load_config, merge, resolve
from limbeck.utils.logger import read_metrics
from tests.gates import Gate, Place, hold_run, wait_until
from tests.helpers.tiny import LLAMA, QWEN3
from tests.helpers.tokenizers import TEXTS, tiny

# What may differ between two runs of the same run file: clocks, what is derived from them, and the process's memory.
CLOCKS = (
    "train/tokens_per_s",
    "train/sample/tokens_per_s",
    "train/seconds",
    "train/time/",
    "train/overlap/",
    "train/memory/",
)


def documents(count: int, seed: int) -> list[str]:
    """Short texts of unequal length, all different."""
    rng = random.Random(seed)
    words = sorted({w for text in TEXTS for w in text.split()})
    return [" ".join(rng.choices(words, k=rng.randint(3, 14))) for _ in range(count)]


def write_data(folder: Path, train: int = 20, val: int = 7) -> None:
    """``train.jsonl`` and ``val.jsonl``; with batches of 3 the last validation batch is ragged."""
    for name, count, seed in (("train", train, 1), ("val", val, 2)):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents(count, seed)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tokenizers(folder: Path) -> None:
    """``student`` (300 ids) and ``teacher`` (340 ids) as tokenizer folders."""
    for name, size in (("student", 300), ("teacher", 340)):
        if not (folder / name).exists():
            tiny(size).save_pretrained(folder / name)


def model(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """A section of a run file for a tiny random model with the tokenizer ``name``."""
    arch = LLAMA if name == "student" else QWEN3
    return merge(
        {"init": "random", "tokenizer": {"name": str(folder / name)}, "model_overrides": arch, "logprob_batch_size": 3},
        more,
    )


def settings(folder: Path, run_dir: Path, **more: Any) -> dict[str, Any]:
    """A whole run: four records per step, dropout-free, every step a millisecond matter."""
    base = {
        "policy": model(
            folder,
            "student",
            train_micro_batch_size=2,
            optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}},
            scheduler={"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 20}},
        ),
        "teacher": model(folder, "teacher"),
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "val.jsonl"),
            "max_input_seq_length": 48,
            "max_teacher_seq_length": 64,
            "long_documents": "cut",  # a row for every record, so that tests can count them
        },
        "loss_fn": {"mode": "boundary_kl"},
        "distillation": {
            "num_prompts_per_step": 4,
            "max_num_steps": 8,
            "max_num_epochs": 100,
            "val_period": 4,
            "val_batch_size": 3,
            "seed": 5,
            "samples": {"number": 0},
        },
        "checkpointing": {"save_period": 3, "keep_top_k": 2, "metric_name": "val/bpb"},
        "logger": {"log_dir": str(run_dir), "tensorboard_enabled": False, "progress": False},
    }
    return merge(base, more)


def resolved(values: Mapping[str, Any]) -> Any:
    """The validated configuration."""
    from limbeck.algorithms.config import MasterConfig

    return resolve(MasterConfig, values)


def write_run_file(path: Path, values: Mapping[str, Any]) -> Path:
    """Store settings as a run file."""
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    assert load_config(path) == dict(values)
    return path


def write_run(folder: Path, **more: Any) -> Path:
    """``run.yaml`` with tokenizers and data beside it, for any way to launch it; ``more`` changes keys of sections."""
    write_tokenizers(folder)
    # the number comes first: texts that are cut to the context must still differ
    texts = [f"({i}) {text}" for i in range(4) for text in TEXTS]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    base = {
        "policy": model(
            folder, "student", logprob_batch_size=1, max_total_sequence_length=64, train_micro_batch_size=2
        ),
        "teacher": model(folder, "teacher", logprob_batch_size=4),
        "loss_fn": {"mode": "boundary_kl", "kl_loss_weight": 1.0, "ce_loss_scale": 1.0},
        "data": {"train": str(folder / "train.jsonl"), "max_input_seq_length": 64, "long_documents": "cut"},
        "distillation": {"num_prompts_per_step": 4, "max_num_steps": 6, "val_at_start": False, "seed": 3},
        "checkpointing": {"save_period": 1, "keep_top_k": 2},
        "logger": {"log_dir": str(folder / "run"), "tensorboard_enabled": False, "progress": False},
        "cluster": {"backend": "gloo"},
    }
    return write_run_file(folder / "run.yaml", {**base, **{name: {**base[name], **more[name]} for name in more}})


def limbeck(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``limbeck ...`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code or 0
    return int(code), out.getvalue(), err.getvalue()


def refused(*arguments: str | Path) -> str:
    """The one line with which ``limbeck`` refuses; exit code 1, no traceback."""
    code, _, err = limbeck(*arguments)
    assert code == 1, err
    lines = [line for line in err.splitlines() if line.startswith("limbeck: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert err.rstrip().endswith(lines[0])
    return lines[0]


def rows(run_dir: Path, *, clocks: bool = False) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``, without what depends on the clock."""
    found = read_metrics(run_dir / "metrics.jsonl")
    if clocks:
        return found
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in found]


def checkpoint(run_dir: Path, step: int) -> Path:
    """Folder of a checkpoint."""
    return run_dir / "checkpoints" / f"step_{step}"


def weight_bytes(run_dir: Path, step: int) -> bytes:
    """The stored weights, byte for byte."""
    return (checkpoint(run_dir, step) / "policy" / "weights" / "model.safetensors").read_bytes()


def leftovers(run_dir: Path) -> list[str]:
    """Files and folders that only a broken-off write leaves behind."""
    marks = ("tmp_", "del_", "old_")
    return [str(p) for p in run_dir.rglob("*") if p.name.startswith(marks) or p.name.endswith(".tmp")]


def serve(arguments: list[str], hold: tuple[Gate, Place, int] | None = None) -> None:
    """What a process of its own does: ``limbeck ...`` without a word, held at a gate where asked."""
    if hold is not None:
        hold_run(*hold)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)


_context = multiprocessing.get_context("forkserver")
# The server imports everything once, so that a new process costs milliseconds and a test may start many.
_context.set_forkserver_preload(
    [
        "limbeck.cli",
        "limbeck.algorithms.xtoken_off_policy_distillation",
        "limbeck.report.run_page",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


def start(*arguments: str | Path, hold: tuple[Gate, Place, int]) -> Any:
    """``limbeck ...`` in a process of its own, which waits at a gate at a place of one step; returned once it is there.

    ``hold``: gate, place and step, as ``hold_run`` takes them.
    """
    process = _context.Process(target=serve, args=([str(a) for a in arguments], hold), daemon=True)
    process.start()
    wait_until(lambda: hold[0].arrived() == [process.pid] or not process.is_alive(), "the run at its gate")
    assert process.is_alive(), "the run ended before it came to the gate"
    return process
