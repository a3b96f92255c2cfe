"""Which algorithm a run file asks for: its ``algorithm`` key, cross-tokenizer distillation where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from limbeck.config import keys_of, resolve, with_settings
from limbeck.key_names import DEFAULT, stored_keys

# Name -> (module, its config model). Imported on demand: each brings models and losses of its own.
_ALGORITHMS = {
    DEFAULT: ("limbeck.algorithms.xtoken_off_policy_distillation", "MasterConfig"),
    "on_policy_distillation": ("limbeck.algorithms.on_policy_distillation", "OnPolicyMasterConfig"),
    "trace_distillation": ("limbeck.algorithms.trace_distillation", "TraceMasterConfig"),
}


def run_file_models() -> dict[str, type[BaseModel]]:
    """The configuration class of every algorithm's run files, the default's first."""
    return {name: getattr(import_module(path), model) for name, (path, model) in _ALGORITHMS.items()}


def resolve_run(
    raw_config: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> tuple[BaseModel, Callable[[Any], Path]]:
    """The validated configuration of a run file with settings over it, and the function that runs it.

    The one place where names, short forms and defaults are settled: for the command, ``limbeck.distil`` and
    `limbeck.integrations.DistillationTrainer` alike.
    """
    settings = settings or {}
    name = settings.get("algorithm", raw_config.get("algorithm", DEFAULT))
    stored_keys(name)  # refuses an unknown one
    path, model_name = _ALGORITHMS[name]
    module = import_module(path)
    model: type[BaseModel] = getattr(module, model_name)
    data = with_settings(keys_of(model), raw_config, settings)
    # the default's run files have no such key, but may name what they are
    if "algorithm" not in model.model_fields:
        data.pop("algorithm", None)
    return resolve(model, data), module.run


def resolve_and_run(raw_config: Mapping[str, Any]) -> Path:
    """Validate a run file and run what it asks for; returns the run folder."""
    config, run = resolve_run(raw_config)
    return run(config)
