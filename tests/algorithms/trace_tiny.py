"""A tiny tokenizer with a chat template that writes tool calls, a tiny model, and run files on the shipped traces."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from limbeck.algorithms.config import TraceMasterConfig
from limbeck.config import merge, resolve

ROOT = Path(__file__).parents[2]
WORKSHOP = ROOT / "limbeck" / "traces" / "examples" / "workshop.jsonl"
TEMPLATE = ROOT / "recipes" / "data" / "chatml_tools.jinja"

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@functools.cache
def tokenizer(size: int = 400) -> Any:
    """A byte-level BPE that was trained on the shipped traces; larger sizes know other words."""
    tok = Tokenizer(BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(WORKSHOP.read_text(encoding="utf-8").splitlines(), trainer)
    tok.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return made


def tokenizer_folder(where: Path, size: int = 400) -> str:
    folder = where / f"tokenizer{size}"
    if not folder.exists():
        tokenizer(size).save_pretrained(folder)
    return str(folder)


def short_traces(where: Path, names: tuple[str, ...] = ("store-count-1", "store-count-2", "store-count-3")) -> str:
    """Some of the shipped traces, with one tool each instead of all, so that sequences stay short."""
    path = where / f"{'_'.join(names)}.jsonl"
    if not path.exists():
        traces = [json.loads(line) for line in WORKSHOP.read_text(encoding="utf-8").splitlines()]
        kept = [json.dumps({**trace, "tools": trace["tools"][:1]}) for trace in traces if trace["id"] in names]
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return str(path)


def settings(where: Path, **more: Any) -> dict[str, Any]:
    base = {
        "policy": {
            "init": "random",
            "model_overrides": MODEL,
            "tokenizer": {"name": tokenizer_folder(where)},
            "train_micro_batch_size": 2,
            "logprob_batch_size": 4,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.0}},
        },
        "traces": {"train": short_traces(where), "shuffle": True},
        "loss": {"block_rows": 64},
        "distillation": {
            "num_prompts_per_step": 3,
            "max_num_steps": 4,
            "max_num_epochs": 100,
            "seed": 3,
            "val_at_start": False,
            "val_at_end": False,
            "monitor": {"period": 2, "generate": 0},
        },
        "logger": {"log_dir": str(where / "run"), "tensorboard_enabled": False, "progress": False},
        "checkpointing": {"enabled": False},
    }
    return merge(base, more)


def config(where: Path, **more: Any) -> TraceMasterConfig:
    return resolve(TraceMasterConfig, settings(where, **more))
