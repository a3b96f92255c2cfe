"""Tiny models on the two tiny tokenizers, and real batches for them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy
from limbeck.projection import build_rules, build_trees
from tests.helpers.tokenizers import TEXTS as TEXTS
from tests.helpers.tokenizers import tiny as tokenizer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}


def config(arch: dict[str, Any] = LLAMA, **more: Any) -> dict[str, Any]:
    return {
        "init": "random",
        "precision": "float32",
        "model_overrides": dict(arch),
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}},
        **more,
    }


def student(seed: int = 0, *, dp_group: Any = None, **more: Any) -> Policy:
    return Policy(config(**more), tokenizer(300), name="student", device="cpu", seed=seed, dp_group=dp_group)


def teacher(seed: int = 1, **more: Any) -> Policy:
    return Policy(config(QWEN3, **more), tokenizer(340), name="teacher", device="cpu", seed=seed, init_optimizer=False)


@functools.cache
def collator(cross: bool = True) -> CrossTokenizerCollator:
    return CrossTokenizerCollator(
        student_tokenizer=tokenizer(300),
        teacher_tokenizer=tokenizer(340) if cross else None,
        ctx_length_student=64,
        ctx_length_teacher=64,
        append_eos=True,
    )


def batch(rows: list[int] | None = None, cross: bool = True) -> BatchedDataDict:
    picked = list(range(len(TEXTS))) if rows is None else rows
    return collator(cross)([{"text": TEXTS[i], "idx": i, "loss_multiplier": 1.0} for i in picked])


@functools.cache
def projection() -> Any:
    return replace(build_rules(tokenizer(300), tokenizer(340)), trees=build_trees(tokenizer(300), tokenizer(340)))


def loss_fn(cross: bool = True, **settings: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "block_rows": 7, **settings}, projections=[projection() if cross else None]
    )


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
