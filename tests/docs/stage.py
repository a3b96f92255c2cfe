"""The folder in which the documentation's blocks run: tiny stand-ins under the names that the pages use.

Models are two random ones of a few thousand parameters. What matters of their tokenizers is as in the models they stand
for: the student's (Llama-3.2) has numerals of up to three digits, the teacher's (Qwen3) of one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from limbeck.config import RECIPES, load_config
from tests.docs.blocks import ROOT
from tests.helpers.tiny import LLAMA, QWEN3
from tests.helpers.tokenizers import TEXTS, WORKSHOP, _wrap

STUDENTS = (
    "Llama-3.2-1B", "Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct",
    "models/llama-3.2-1b",
    "SmolLM2-135M", "small", "student", "before", "S",
)  # fmt: skip
TEACHERS = (
    "Qwen3-4B", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base", "Qwen/Qwen3-32B", "models/qwen3-4b", "large", "teacher", "T",
    "microsoft/Phi-4-mini-instruct", "path/to/model",
)  # fmt: skip
SECOND_STUDENT_FAMILY = ("meta-llama/Llama-3.2-3B",)
"""Teachers with the student's own tokenizer."""

SENTENCE = "In 2011 the café had 1,024 visitors."
_SPLITS = {
    3: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
    1: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
}


def tokenizer(digits: int, size: int) -> Any:
    """A byte-level BPE that splits text as Llama-3 (``digits`` 3) or Qwen3 (1) does, with a chat template."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[digits]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=size - len(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    numerals = " ".join(f"{n}" for n in (201, 1, 102, 4, 24, 20, 11)) if digits == 3 else ""
    words = TEXTS if digits == 3 else [*TEXTS[::2], WORKSHOP.read_text(encoding="utf-8")]
    made.train_from_iterator([*[f"{SENTENCE} {numerals}"] * 40, *words], trainer)
    template = (RECIPES / "data" / "chatml_tools.jinja").read_text(encoding="utf-8")
    return _wrap(made, specials, template, eos_token="<|im_end|>")


def _save_model(folder: Path, made: Any, arch: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(made))
    kind = {key: value for key, value in arch.items() if key != "model_type"} | {"max_position_embeddings": 4096}
    config = AutoConfig.for_model(
        arch["model_type"], vocab_size=len(made), eos_token_id=made.eos_token_id, bos_token_id=None, **kind
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    made.save_pretrained(folder)


def _texts(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    words = sorted({word for text in [*TEXTS, SENTENCE] for word in text.split()})
    for _ in range(count):
        yield " ".join(rng.choices(words, k=rng.randint(8, 20)))


def _jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


RUN = {
    "policy": {"model_name": "student", "train_micro_batch_size": 2},
    "teacher": {"model_name": "teacher"},
    "data": {"train": "train.jsonl", "validation": "val.jsonl", "max_input_seq_length": 256},
    "distillation": {"num_prompts_per_step": 4, "max_num_steps": 2},
    "checkpointing": {"metric_name": "val/bpb"},
    "logger": {"log_dir": "runs/run", "tensorboard_enabled": False},
}
"""``run.yaml``, wherever a page speaks of one without showing it."""
RUN_FOLDERS = ("ce", "distilled", "after")
"""Under ``runs/``, beside ``runs/mine``: finished runs that pages look at."""


def make_stage(folder: Path) -> None:
    """Fill ``folder`` with models, data, logs and run files."""
    models = folder / ".models"
    sides = {
        "student": (tokenizer(3, 420), LLAMA, STUDENTS),
        "teacher": (tokenizer(1, 460), QWEN3, TEACHERS),
        "large": (tokenizer(3, 420), QWEN3, SECOND_STUDENT_FAMILY),
    }
    for name, (made, arch, names) in sides.items():
        _save_model(models / name, made, arch)
        for alias in names:
            link = folder / alias
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(models / name)
    texts = {"train": 24, "val": 6, "data/train": 24, "data/val": 6, "held_out": 6, "other_documents": 24}
    for name, count in texts.items():
        _jsonl(folder / f"{name}.jsonl", [{"text": text} for text in _texts(count, len(name))])
    _jsonl(folder / "corpus" / "a.jsonl", [{"text": text} for text in _texts(8, 7)])
    (folder / "corpus.txt").write_text("\n\n".join(_texts(8, 3)), encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:]}]}
        for text in _texts(12, 5)
    ]
    for name in ("chat", "data/chat", "data/chat_val"):
        _jsonl(folder / f"{name}.jsonl", chats)
    questions = [{"question": "Which is a number?", "choices": ["2024", "vessel"], "answer": 0}]
    _jsonl(folder / "arc_easy_val.jsonl", questions * 3)
    traces = [json.loads(line) for line in WORKSHOP.read_text(encoding="utf-8").splitlines()]
    for name in ("traces", "session", "airline"):
        _jsonl(folder / f"{name}.jsonl", traces[:4])
    pairs = [
        {
            "prompt": [{"role": "user", "content": "How many flasks?"}],
            "chosen": [{"role": "assistant", "content": "Ten."}],
            "rejected": [{"role": "assistant", "content": "None."}],
        }
    ]
    _jsonl(folder / "pairs.jsonl", pairs)
    sums = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    _jsonl(folder / "prompts.jsonl", sums)
    task = {"name": "sums", "data": "prompts.jsonl", "verifier": "number", "problems": 4, "max_new_tokens": 8}
    (folder / "task.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")


SMALLER: dict[str, Any] = {
    "compile": False,
    "precision": "float32",
    "fused": False,
    "num_workers": 0,
    "attn_implementation": "sdpa",
    "max_num_steps": 2,
    "warmup_steps": 1,
    "num_prompts_per_step": 4,
    "train_global_batch_size": 4,
    "train_micro_batch_size": 2,
    "logprob_batch_size": 4,
    "make_sequence_length_divisible_by": 1,
    "train_mb_tokens": 512,
    "max_input_seq_length": 64,
    "max_total_sequence_length": 256,
    "val_period": 2,
    "save_period": 2,
    "max_new_tokens": 8,
    "monitor": {"period": 0},
}
"""What a run file for a GPU and days of work becomes here."""


def smaller(run_file: str, overrides: list[str]) -> list[str]:
    """Overrides that make a run of a page small enough for a test, for those keys of ``SMALLER`` that it sets."""
    found: list[str] = []

    def walk(node: Any, path: str) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            dotted = f"{path}.{key}" if path else str(key)
            if path != "cluster" and key in SMALLER and value not in (None, SMALLER[key]):
                found.append(f"{dotted}={json.dumps(SMALLER[key])}")
            else:
                walk(value, dotted)

    walk(load_config(run_file, overrides), "")
    return found
