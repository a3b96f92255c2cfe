"""Which algorithm a run file asks for: its ``algorithm`` key, cross-tokenizer distillation where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from limbeck.config import near_name, resolve
from limbeck.errors import ConfigError

DEFAULT = "xtoken_off_policy_distillation"
# Name -> (module, its config model). Imported on demand: each brings models and losses of its own.
_ALGORITHMS = {
    DEFAULT: ("limbeck.algorithms.xtoken_off_policy_distillation", "MasterConfig"),
    "on_policy_distillation": ("limbeck.algorithms.on_policy_distillation", "OnPolicyMasterConfig"),
    "trace_distillation": ("limbeck.algorithms.trace_distillation", "TraceMasterConfig"),
}


def run_file_models() -> dict[str, type[BaseModel]]:
    """The configuration class of every algorithm's run files, the default's first."""
    return {name: getattr(import_module(path), model) for name, (path, model) in _ALGORITHMS.items()}


def resolve_run(raw_config: Mapping[str, Any]) -> tuple[BaseModel, Callable[[Any], Path]]:
    """The validated configuration of a run file, and the function that runs it."""
    name = raw_config.get("algorithm", DEFAULT)
    if not isinstance(name, str) or name not in _ALGORITHMS:
        near = near_name(str(name), _ALGORITHMS)
        hint = f"did you mean {near!r}?" if near else f"known are {', '.join(_ALGORITHMS)}"
        raise ConfigError(f"'algorithm' is {name!r}, which is unknown; {hint}")
    path, model_name = _ALGORITHMS[name]
    module = import_module(path)
    model: type[BaseModel] = getattr(module, model_name)
    data = {key: value for key, value in raw_config.items() if key != "algorithm" or key in model.model_fields}
    return resolve(model, data), module.run


def resolve_and_run(raw_config: Mapping[str, Any]) -> Path:
    """Validate a run file and run what it asks for; returns the run folder."""
    config, run = resolve_run(raw_config)
    return run(config)
