"""A run file in a dozen lines, for whoever starts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from limbeck.algorithms.run_folder import CONFIG_NAME

Section = Mapping[str, Any]


def summary(config: BaseModel) -> list[str]:
    """What a resolved run file says that a user would check before a long run, a line per section that it has."""
    values = config.model_dump(mode="json")
    rows = [(name, text) for name, text in _rows(values) if text]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _rows(values: Section) -> Iterator[tuple[str, str]]:
    policy, loop = values["policy"], values["distillation"]
    yield "student", _model(policy)
    teachers = [values["teacher"]] if values.get("teacher") else values.get("teachers") or []
    for number, own in enumerate(teachers):
        yield f"teacher {number}" if len(teachers) > 1 else "teacher", _teacher(own)
    own = values.get("on_policy") or {}
    if own.get("fraction") != 1:
        yield "loss", _loss(values, bool(teachers))
    yield "own text", own_text(own)
    data = values.get("data") or values.get("traces") or {}
    yield "data", _data(data)
    yield "length", _lengths(data, policy)
    yield "batch", _batch(policy, loop)
    optimizer, schedules = policy["optimizer"], policy.get("scheduler") or []
    rate = optimizer["kwargs"].get("lr")
    named = [_last(s["name"]) for s in (schedules if isinstance(schedules, list) else [schedules]) if s.get("name")]
    yield "optimizer", ", ".join([_last(optimizer["name"]), *([] if rate is None else [f"lr {rate}"]), *named])
    yield "steps", f"at most {loop['max_num_steps']:,}, at most {_many(loop['max_num_epochs'], 'epoch')}"
    yield "checkpoints", _checkpoints(values["checkpointing"])
    folder = values["logger"]["log_dir"]
    yield "run folder", f"{folder} ({CONFIG_NAME} in it is the whole configuration)"


def _model(own: Section) -> str:
    name = own["model_name"] or f"random {own['model_overrides'].get('model_type')}"
    parts = [f"{name} with random weights" if own["model_name"] and own["init"] == "random" else name]
    parts.append(own["precision"])
    lora = own.get("lora")
    if lora and lora["enabled"]:
        parts.append(f"LoRA of rank {lora['r']}")
    return ", ".join(parts)


def _teacher(own: Section) -> str:
    if own["cache"] is not None:
        return f"{_model(own)}, read from the cache {own['cache']}"
    return f"{_model(own)}, behind a server" if own["server"] is not None else _model(own)


def _loss(values: Section, taught: bool) -> str:
    if "loss_fn" in values:
        loss = values["loss_fn"]
        if not taught or not loss["kl_loss_weight"]:
            return "cross-entropy alone"
        gate = "" if loss["gate"] == "none" else f" ({loss['gate']} gate)"
        said = f"{loss['kl_loss_weight']:g} x {loss['mode']}{gate} + {loss['ce_loss_scale']:g} x cross-entropy"
        return said if len(values.get("teachers") or []) < 2 else f"{said}; teachers {_combined(loss)}"
    loss = values.get("loss") or {}
    return ", ".join(name for name in ("policy", "hint", "preference") if name in loss)


def _combined(loss: Section) -> str:
    """How several teachers are."""
    if loss["teacher_combination"] != "sum":
        return {"select_teacher": "chosen text by text", "averaged_logits": "averaged"}[loss["teacher_combination"]]
    if loss["teacher_scoring"] != "static":
        return f"weighed text by text ({loss['teacher_scoring']})"
    weights = loss["teacher_weights"]
    return "weighed alike" if weights is None else f"weighed {' : '.join(f'{weight:g}' for weight in weights)}"


def own_text(own: Section) -> str:
    """What the ``on_policy`` section of a run file says about the text that the student writes; empty where it writes
    none."""
    if not own.get("fraction"):
        return ""
    prompts = "all records" if own["fraction"] == 1 else f"{own['fraction']:.0%} of records"
    if own.get("failed_states"):
        prompts = "failed states"
    parts = [f"{_many(own['samples_per_prompt'], 'answer')} of at most {own['max_new_tokens']:,} tokens to {prompts}"]
    if own.get("policy_gradient"):
        parts.append(f"policy gradient by {own['policy_gradient']['credit']}")
    else:
        parts.append(f"{own['loss_fn']['mode']}, {own['loss_fn']['direction']}")
    if own.get("anchor"):
        parts.append(f"anchor {own['anchor']['weight']:g} x {own['anchor']['kind']}")
    if own.get("reward"):
        parts.append(f"reward {own['reward']['weight']:g} x {own['reward']['function'] or 'judge'}")
    return "; ".join(parts)


def _data(data: Section) -> str:
    parts = [_paths(data.get("train"))]
    if data.get("mode"):
        parts.append(str(data["mode"]))
    if data.get("validation"):
        parts.append(f"validation on {_paths(data['validation'])}")
    return ", ".join(part for part in parts if part)


def _paths(value: Any) -> str:
    paths = [str(path) for path in (value if isinstance(value, list) else [value]) if path is not None]
    return " and ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")


_LONGER = {"split": "split", "cut": "cut", "skip": "left out", "error": "refused"}
"""What happens to texts that no context holds, in words."""


def _lengths(data: Section, policy: Section) -> str:
    own = policy["max_total_sequence_length"]
    given = data.get("max_input_seq_length") or data.get("max_seq_length")
    longer = _LONGER.get(data.get("long_documents", "")) if data.get("mode") != "chat" else None
    return f"at most {min(own, given or own):,} tokens" + (f"; longer texts are {longer}" if longer else "")


def _batch(policy: Section, loop: Section) -> str:
    records = _many(loop["num_prompts_per_step"], "record") + " per step"
    for name in ("sequence_packing", "dynamic_batching"):
        if policy[name]["enabled"]:
            return f"{records}, micro-batches of {policy[name]['train_mb_tokens']:,} tokens"
    return f"{records}, micro-batches of {policy['train_micro_batch_size']}"


def _checkpoints(own: Section) -> str:
    if not own["enabled"]:
        return "none (checkpointing.enabled is false)"
    period = f"every {_many(own['save_period'], 'step')} and at the end" if own["save_period"] else "at the end"
    best = f", the best by {own['metric_name']}" if own["metric_name"] else ""
    where = f" in {own['checkpoint_dir']}" if own["checkpoint_dir"] else ""
    return f"{period}{best}{where}"


def _many(number: int, unit: str) -> str:
    return f"{number:,} {unit}" + ("" if number == 1 else "s")


def _last(name: str) -> str:
    return Path(name).suffix.removeprefix(".") or name
