"""A run file in a dozen lines, for whoever starts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from limbeck.algorithms.config import MasterConfig, TraceMasterConfig
from limbeck.algorithms.run_folder import CONFIG_NAME
from limbeck.config import keys_of, with_settings
from limbeck.errors import LimbeckError
from limbeck.teachers.build import TeacherConfig
from limbeck.tools.draft import usual_rate

Section = Mapping[str, Any]


def summary(config: BaseModel) -> list[str]:
    """Summary of a resolved run file that a user would check before a long run, a line per section that it has."""
    values = config.model_dump(mode="json")
    teachers: list[TeacherConfig] = []
    if isinstance(config, MasterConfig):
        teachers = config.named_teachers
    elif isinstance(config, TraceMasterConfig) and config.teacher is not None:
        teachers = [config.teacher]
    chosen: list[str] = []
    if isinstance(config, MasterConfig):
        pretrained = config.policy.init == "pretrained"
        chosen = config.loss_fn.explain_choices(pretrained=pretrained, teachers=len(teachers), modes=config.modes)
    rows = [(name, text) for name, text in _rows(values, teachers, "; ".join(chosen)) if text]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def rate_by_default(config: BaseModel, values: Section, settings: Section) -> list[str]:
    """A line about a learning rate that nobody has given, where one is chosen for runs of this kind.

    ``values``, ``settings``: the run file as it was written, and what was set over it.
    """
    # exactly this class, as on-policy runs are one as well; a run that has begun keeps its rate
    if type(config) is not MasterConfig or (Path(config.logger.log_dir) / CONFIG_NAME).is_file():
        return []
    policy = with_settings(keys_of(MasterConfig), values, settings)["policy"]
    rate = config.policy.optimizer.kwargs.get("lr")
    if rate is None or "lr" in policy.get("optimizer", {}).get("kwargs", {}):
        return []
    try:
        usual = usual_rate(config)
    except LimbeckError:
        return []  # the run says it better
    if usual is None:
        return []
    return [f"no learning rate is given: {rate:g} by default; limbeck init would choose {usual:g} (lr={usual:g})"]


def _rows(values: Section, teachers: Sequence[TeacherConfig], chosen: str) -> Iterator[tuple[str, str]]:
    policy, loop = values["policy"], values["distillation"]
    yield "student", _model(policy)
    for number, section in enumerate(teachers):
        yield f"teacher {number}" if len(teachers) > 1 else "teacher", _teacher(section)
    on_policy = values.get("on_policy") or {}
    if on_policy.get("fraction") != 1:
        yield "loss", _loss(values, bool(teachers))
        yield "by default", chosen
    yield "own text", own_text(on_policy)
    data = values.get("data") or values.get("traces") or {}
    yield "data", _data(data)
    yield "length", _lengths(data, policy)
    yield "batch", _batch(policy, loop)
    optimizer, schedules = policy["optimizer"], policy.get("scheduler") or []
    rate = optimizer["kwargs"].get("lr")
    named = [_last(s["name"]) for s in (schedules if isinstance(schedules, list) else [schedules]) if s.get("name")]
    yield "optimizer", ", ".join([_last(optimizer["name"]), *([] if rate is None else [f"lr {rate}"]), *named])
    early = loop["early_stopping"]
    until = f", until {early['metric']} has not improved in {_many(early['patience'], 'validation')}" if early else ""
    yield "steps", f"at most {loop['max_num_steps']:,}, at most {_many(loop['max_num_epochs'], 'epoch')}{until}"
    yield "checkpoints", _checkpoints(values["checkpointing"])
    folder = values["logger"]["log_dir"]
    yield "run folder", f"{folder} ({CONFIG_NAME} in it is the whole configuration)"


def _model(section: Section) -> str:
    name = section["model_name"] or f"random {section['model_overrides'].get('model_type')}"
    parts = [f"{name} with random weights" if section["model_name"] and section["init"] == "random" else name]
    parts.append(section["precision"])
    lora = section.get("lora")
    if lora and lora["enabled"]:
        parts.append(f"LoRA of rank {lora['r']}")
    return ", ".join(parts)


def _teacher(section: TeacherConfig) -> str:
    text = section.kind.shown(section.source, section)
    return f"{text}, {section.precision}" if section.kind.loads_model else text


def _loss(values: Section, taught: bool) -> str:
    if "loss_fn" in values:
        loss = values["loss_fn"]
        if not taught or not loss["kl_loss_weight"]:
            return "cross-entropy alone"
        gate = "" if loss["gate"] == "none" else f" ({loss['gate']} gate)"
        objectives = [teacher.get("loss_fn") or loss for teacher in values.get("teachers") or [{}]]
        mode = " and ".join(dict.fromkeys(one["mode"] for one in objectives))
        said = f"{loss['kl_loss_weight']:g} x {mode}{gate} + {loss['ce_loss_scale']:g} x cross-entropy"
        if loss["dynamic_loss_scaling"]:
            said = f"{mode}{gate}, scaled to cross-entropy, + 1 x cross-entropy"
        return said if len(values.get("teachers") or []) < 2 else f"{said}; teachers {_combined(loss)}"
    loss = values.get("loss") or {}
    return ", ".join(name for name in ("policy", "hint", "preference") if name in loss)


def _combined(loss: Section) -> str:
    """How several teachers are."""
    if loss["teacher_combination"] != "sum":
        return {"select_teacher": "chosen text by text", "averaged_logits": "averaged"}[loss["teacher_combination"]]
    if loss["teacher_scoring"] != "static":
        return f"weighted per text ({loss['teacher_scoring']})"
    weights = loss["teacher_weights"]
    return "weighted equally" if weights is None else f"weighted {' : '.join(f'{weight:g}' for weight in weights)}"


def own_text(on_policy: Section) -> str:
    """Summary of the ``on_policy`` section of a run file: the text that the student writes; empty where it writes
    none."""
    if not on_policy.get("fraction"):
        return ""
    prompts = "all records" if on_policy["fraction"] == 1 else f"{on_policy['fraction']:.0%} of records"
    if on_policy.get("failed_states"):
        prompts = "failed states"
    answers = _many(on_policy["samples_per_prompt"], "answer")
    parts = [f"{answers} of at most {on_policy['max_new_tokens']:,} tokens to {prompts}"]
    if environment := on_policy.get("environment"):
        origin = environment.get("source") or environment.get("name") or " ".join(environment.get("command", ()))
        parts.append(f"tools of {origin}, at most {_many(environment['max_turns'], 'turn')}")
    if on_policy.get("policy_gradient"):
        parts.append(f"policy gradient by {on_policy['policy_gradient']['credit']}")
    else:
        loss = on_policy["loss_fn"]
        parts.append(", ".join(word for word in (loss["mode"], loss.get("direction")) if word))
    if on_policy.get("anchor"):
        parts.append(f"anchor {on_policy['anchor']['weight']:g} x {on_policy['anchor']['kind']}")
    if on_policy.get("reward"):
        reward = on_policy["reward"]
        source = reward["function"] or (reward["verifier"] or {}).get("name")
        source = source or ("environment" if reward.get("environment") else "judge")
        parts.append(f"reward {reward['weight']:g} x {source}")
    return "; ".join(parts)


def _data(data: Section) -> str:
    parts = [_paths(data.get("train"))]
    if data.get("mode"):
        parts.append(str(data["mode"]))
    if data.get("validation"):
        parts.append(f"validation on {_paths(data['validation'])}")
    if data.get("holdout"):
        parts.append(f"{data['holdout']:.2g} of it held out for validation")
    return ", ".join(part for part in parts if part)


def _paths(value: Any) -> str:
    paths = [str(path) for path in (value if isinstance(value, list) else [value]) if path is not None]
    return " and ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")


_LONGER = {"split": "split", "cut": "cut", "skip": "left out", "error": "refused"}
"""Treatment of texts that no context holds, in words."""


def _lengths(data: Section, policy: Section) -> str:
    limit = policy["max_total_sequence_length"]
    wanted = data.get("max_input_seq_length") or data.get("max_seq_length")
    longer = _LONGER.get(data.get("long_documents", "")) if data.get("mode") != "chat" else None
    return f"at most {min(limit, wanted or limit):,} tokens" + (f"; longer texts are {longer}" if longer else "")


def _batch(policy: Section, loop: Section) -> str:
    records = _many(loop["num_prompts_per_step"], "record") + " per step"
    for name in ("sequence_packing", "dynamic_batching"):
        if policy[name]["enabled"] and policy[name]["train_mb_tokens"]:
            return f"{records}, micro-batches of {policy[name]['train_mb_tokens']:,} tokens"
    rows = policy["train_micro_batch_size"]
    return records if rows is None else f"{records}, micro-batches of {rows}"


def _checkpoints(section: Section) -> str:
    if not section["enabled"]:
        return "none (checkpointing.enabled is false)"
    period = f"every {_many(section['save_period'], 'step')} and at the end" if section["save_period"] else "at the end"
    best = f", the best by {section['metric_name']}" if section["metric_name"] else ""
    where = f" in {section['checkpoint_dir']}" if section["checkpoint_dir"] else ""
    return f"{period}{best}{where}"


def _many(number: int, unit: str) -> str:
    return f"{number:,} {unit}" + ("" if number == 1 else "s")


def _last(name: str) -> str:
    return Path(name).suffix.removeprefix(".") or name
