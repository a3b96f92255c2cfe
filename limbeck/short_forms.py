"""Short forms of run-file keys: what people type, and the key that it stands for.

A short form is rewritten where it is read (in each file, in each override), so that whatever comes later still wins;
a file that gives a short form and its long key is refused. `limbeck schema` and docs/configuration.md are made from
the tables here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from limbeck.errors import ConfigError

_MODEL = {
    "model": "model_name",
    "dtype": "precision",
    "torch_dtype": "precision",
    "max_length": "max_total_sequence_length",
    "chat_template": "tokenizer.chat_template",
}
_TRAINED = {
    "lr": "optimizer.kwargs.lr",
    "learning_rate": "optimizer.kwargs.lr",
    "weight_decay": "optimizer.kwargs.weight_decay",
    "betas": "optimizer.kwargs.betas",
    "micro_batch_size": "train_micro_batch_size",
    "grad_clip": "max_grad_norm",
    "gradient_checkpointing": "dtensor_cfg.activation_checkpointing",
    "activation_checkpointing": "dtensor_cfg.activation_checkpointing",
    "tensor_parallel_size": "dtensor_cfg.tensor_parallel_size",
    "context_parallel_size": "dtensor_cfg.context_parallel_size",
    "fsdp": "dtensor_cfg.fsdp",
}
_LOOP = {
    "batch_size": "num_prompts_per_step",
    "max_steps": "max_num_steps",
    "steps": "max_num_steps",
    "epochs": "max_num_epochs",
    "num_epochs": "max_num_epochs",
    "eval_steps": "val_period",
}

KEYS: dict[str, str] = {
    # first: they are tried in this order, and those below look for policy
    "student": "policy",
    **{f"policy.{short}": f"policy.{long}" for short, long in {**_MODEL, **_TRAINED}.items()},
    **{f"teacher.{short}": f"teacher.{long}" for short, long in _MODEL.items()},
    **{f"distillation.{short}": f"distillation.{long}" for short, long in _LOOP.items()},
    **{short: f"distillation.{long}" for short, long in _LOOP.items()},
    "seed": "distillation.seed",
    "tasks": "distillation.tasks",
    "lr": "policy.optimizer.kwargs.lr",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "weight_decay": "policy.optimizer.kwargs.weight_decay",
    "micro_batch_size": "policy.train_micro_batch_size",
    "scheduler": "policy.scheduler",
    "warmup_steps": "policy.warmup_steps",
    "lora": "policy.lora",
    "max_length": "data.max_input_seq_length",
    "max_seq_length": "data.max_input_seq_length",
    "data.max_length": "data.max_input_seq_length",
    "data.max_seq_length": "data.max_input_seq_length",
    "data.batch_size": "distillation.num_prompts_per_step",
    "temperature": "loss_fn.temperature",
    "output_dir": "logger.log_dir",
    "log_dir": "logger.log_dir",
    "save_steps": "checkpointing.save_period",
}
"""Short key -> the key that it stands for."""

SECTIONS: dict[str, str] = {
    "policy": "model_name",
    "teacher": "model_name",
    "data": "train",
    "traces": "train",
    "loss_fn": "mode",
    "policy.optimizer": "name",
    "policy.tokenizer": "name",
    "teacher.tokenizer": "name",
    "teacher.loss_fn": "mode",
}
"""Sections that may be given as one word: the key that it is the value of."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_OPTIMIZERS = {
    name.lower(): f"torch.optim.{name}" for name in ("AdamW", "Adam", "SGD", "RMSprop", "Adafactor", "NAdam", "RAdam")
}
WORDS: dict[str, dict[str, str]] = {
    "policy.precision": _DTYPES,
    "policy.param_dtype": _DTYPES,
    "teacher.precision": _DTYPES,
    "teacher.param_dtype": _DTYPES,
    "policy.optimizer.name": _OPTIMIZERS,
}
"""Key -> words that stand for its values."""

SCHEDULES = ("constant", "cosine", "linear")
"""``policy.scheduler`` by one word, over ``distillation.max_num_steps`` and behind ``policy.warmup_steps``."""
WARMUP = "policy.warmup_steps"

_ABSENT = object()


def long_key(parts: Sequence[str], value: Any) -> list[str]:
    """The full key of an override: ``policy.lr`` is ``policy.optimizer.kwargs.lr``, ``teacher=NAME`` its model_name."""
    out = list(parts)
    for short, long in KEYS.items():
        head = short.split(".")
        looked_up = _as_teacher(out)
        if looked_up[: len(head)] == head:
            out = [*out[: len(out) - len(looked_up)], *long.split("."), *looked_up[len(head) :]]
    word_key = SECTIONS.get(".".join(_as_teacher(out)))
    return [*out, word_key] if word_key and isinstance(value, str) else out


def _as_teacher(parts: Sequence[str]) -> list[str]:
    """``teachers.1.dtype`` is looked up as ``teacher.dtype``."""
    if len(parts) > 1 and parts[0] == "teachers" and parts[1].isdigit():
        return ["teacher", *parts[2:]]
    return list(parts)


def expand(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run file with long keys in place of its short forms; expanding twice is expanding once."""
    out = copy.deepcopy(dict(config))
    teachers = out.pop("teachers", _ABSENT)
    _expand(out, "")
    if teachers is not _ABSENT:
        out["teachers"] = teachers
        if isinstance(teachers, list):
            out["teachers"] = [
                _expand({"teacher": teacher}, f"teachers.{i}")["teacher"] for i, teacher in enumerate(teachers)
            ]
    return out


def _expand(out: dict[str, Any], where: str) -> dict[str, Any]:
    for short, long in KEYS.items():
        # every time: what was just renamed may be a section in one word, as of `student: NAME`
        _spread_sections(out)
        value = _get(out, short)
        if value is _ABSENT:
            continue
        if _get(out, long) is not _ABSENT:
            names = [key.replace("teacher", where, 1) if where else key for key in (short, long)]
            raise ConfigError(f"{names[0]!r} is short for {names[1]!r}, and both are given; keep one of them")
        _pop(out, short)
        _put(out, long, value)
    _spread_sections(out)
    for key, words in WORDS.items():
        value = _get(out, key)
        if isinstance(value, str) and value.lower() in words:
            _put(out, key, words[value.lower()])
    return out


def _spread_sections(out: dict[str, Any]) -> None:
    for section, key in SECTIONS.items():
        value = _get(out, section)
        if isinstance(value, str):
            _put(out, section, {key: value})


def _get(node: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _put(node: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        if node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            raise ConfigError(f"{part!r} is {node[part]!r}, which has no keys, so there is no place for {key!r}")
        node = node[part]
    node[last] = value


def _pop(node: dict[str, Any], key: str) -> None:
    *path, last = key.split(".")
    for part in path:
        node = node[part]
    del node[last]


def write_out_schedule(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run file whose ``policy.scheduler`` is a word, or that has ``policy.warmup_steps``, with the schedule written
    out over ``steps`` optimizer steps."""
    word, warmup = _get(config, "policy.scheduler"), _get(config, WARMUP)
    if not isinstance(word, str) and warmup is _ABSENT:
        return config
    if not isinstance(word, str | None) and word is not _ABSENT:
        raise ConfigError(f"policy.scheduler is written out, which leaves no place for {WARMUP}; leave one of them out")
    kind = word if isinstance(word, str) else "constant"
    if kind not in SCHEDULES:
        raise ConfigError(
            f"'policy.scheduler' is {kind!r}; expected {', '.join(SCHEDULES)}, or a section with name and kwargs"
        )
    first = 0 if warmup in (_ABSENT, None) else warmup
    if isinstance(first, float) and 0 <= first < 1:
        first = int(first * steps)
    # a bool is an int, too
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < steps:
        raise ConfigError(
            f"{WARMUP!r} is {first!r}; expected a share of the steps below 1, or a whole number from 0 to below "
            f"{steps}, the run's steps"
        )
    out = copy.deepcopy(config)
    if warmup is not _ABSENT:
        _pop(out, WARMUP)
    _put(out, "policy.scheduler", _schedule(kind, first, steps))
    return out


def _schedule(kind: str, warmup: int, steps: int) -> Any:
    arguments: dict[str, tuple[str, dict[str, Any]]] = {
        # torch's own default is a third of the rate for five steps
        "constant": ("ConstantLR", {"factor": 1.0, "total_iters": 1}),
        "cosine": ("CosineAnnealingLR", {"T_max": steps - warmup}),
        "linear": ("LinearLR", {"start_factor": 1.0, "end_factor": 0.0, "total_iters": steps - warmup}),
    }
    name, kwargs = arguments[kind]
    main = {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs}
    if not warmup:
        return main
    # the first step is taken at 1 / (warmup + 1) of the learning rate, step number `warmup` at all of it
    rise = {"start_factor": 1.0 / (warmup + 1), "total_iters": warmup}
    return [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": rise}, main, {"milestones": [warmup]}]


def schedule_word(written: Any, steps: Any) -> tuple[str, int] | None:
    """The word and the warm-up that a schedule of a run of so many steps was written out of; None for one of another
    making."""
    if not isinstance(steps, int):
        return None
    plain = _bare(written)
    first = plain[0].get("kwargs", {}).get("total_iters") if isinstance(plain, list) and plain else 0
    if not isinstance(first, int) or not 0 <= first < steps:
        return None
    return next(((kind, first) for kind in SCHEDULES if _bare(_schedule(kind, first, steps)) == plain), None)


def _bare(written: Any) -> Any:
    """A schedule without the keys that are not given: a resolved one has them as null, or as an empty section."""
    if isinstance(written, list):
        return [_bare(entry) for entry in written]
    return {k: v for k, v in written.items() if v not in (None, {})} if isinstance(written, Mapping) else written
