"""Plain settings of a policy: the same keys and defaults as ``PolicyConfig``, without pydantic.

Machines that only compute need no pydantic; a test keeps both in step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from limbeck.utils.errors import ConfigError

_BATCHING: dict[str, Any] = {
    "enabled": False,
    "train_mb_tokens": None,
    "logprob_mb_tokens": None,
    "teacher_mb_tokens": None,
    "sequence_length_round": 1,
}

DEFAULTS: dict[str, Any] = {
    "model_name": None,
    "tokenizer": {"name": None, "chat_template": None, "chat_template_kwargs": {}},
    "init": "pretrained",
    "model_overrides": {},
    "train_global_batch_size": 32,
    "train_micro_batch_size": 1,
    "logprob_batch_size": 1,
    "max_total_sequence_length": 2048,
    "precision": "float32",
    "param_dtype": None,
    "attn_implementation": None,
    "trust_remote_code": False,
    "dtensor_cfg": {
        "enabled": True,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "context_parallel_attention": "auto",
        "fsdp": False,
    },
    "dynamic_batching": dict(_BATCHING),
    "sequence_packing": {**_BATCHING, "algorithm": "modified_first_fit_decreasing"},
    "make_sequence_length_divisible_by": 1,
    "max_grad_norm": 1.0,
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "weight_decay": 0.0}},
    "scheduler": None,
    "lora": None,
    "compile": {"enabled": False, "mode": None, "dynamic": None},
}

# Sections that are values: replaced as a whole, not merged key by key.
_WHOLE = ("optimizer", "scheduler", "lora", "model_overrides")

LORA_DEFAULTS: dict[str, Any] = {
    "enabled": True,
    "r": 16,
    "alpha": 32.0,
    "dropout": 0.0,
    "target_modules": "all-linear",
    "modules_to_save": None,
    "use_rslora": False,
}


def plain_settings(config: Any) -> dict[str, Any]:
    """Settings as a plain dict with all keys, from a ``PolicyConfig`` or a mapping with some of them."""
    if hasattr(config, "model_dump"):
        return dict(config.model_dump())
    if not isinstance(config, Mapping):
        raise ConfigError(f"a policy configuration must be a mapping or a PolicyConfig, got {type(config).__name__}")
    out = copy.deepcopy(DEFAULTS)
    for key, value in config.items():
        if key not in out:
            raise ConfigError(f"unknown policy key {key!r}; known keys are {sorted(out)}")
        if key == "compile" and isinstance(value, bool):
            value = {"enabled": value}
        if isinstance(out[key], dict) and key not in _WHOLE:
            odd = sorted(set(value) - set(out[key]))
            if odd:
                raise ConfigError(f"unknown policy key {key}.{odd[0]!r}; known keys are {sorted(out[key])}")
            out[key].update(copy.deepcopy(dict(value)))
        else:
            out[key] = copy.deepcopy(value)
    return out
