"""Optimizers and learning-rate schedules by dotted name, as in the published run files."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from limbeck.config import resolve
from limbeck.distributed.sharding import group_by_layout
from limbeck.errors import ConfigError, one_line

ALLOWED_MODULES = ("torch.optim", "transformers.optimization", "bitsandbytes.optim", "torchao.optim")
_MOST_RATE = 1e3
_NUMBERS_LIKE = {"lr": "1e-5", "weight_decay": "0.01", "eps": "1e-8", "momentum": "0.9"}
_NUMBERS = _NUMBERS_LIKE.keys()
_WAYS = {"fused", "foreach", "capturable", "differentiable"}
"""Arguments that choose how an optimizer computes, not what: of no interest to whoever goes on from its state."""
# no part begins with an underscore: what modules keep to themselves is out of a run file's reach
_NAME = re.compile(r"([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)\.([A-Za-z]\w*)")


DEFAULT_ARGUMENTS: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.0}


class OptimizerConfig(BaseModel):
    """An optimizer by dotted name, such as ``torch.optim.AdamW``."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    name: str = "torch.optim.AdamW"
    """The class; words such as ``adamw`` and ``sgd`` stand for torch's."""
    kwargs: dict[str, Any] = {}
    """Its arguments; ``lr`` is the learning rate."""

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_default(cls, data: Any) -> Any:
        """Without a name the arguments given are changes of the default optimizer's."""
        if isinstance(data, Mapping) and "name" not in data and isinstance(data.get("kwargs"), Mapping):
            return {**data, "kwargs": {**DEFAULT_ARGUMENTS, **data["kwargs"]}}
        return data

    @model_validator(mode="after")
    def _numbers(self) -> OptimizerConfig:
        for key in _NUMBERS & self.kwargs.keys():
            value = self.kwargs[key]
            wrong = value is None or isinstance(value, str | bool | list | dict) or not math.isfinite(value)
            if wrong or (key == "lr" and value > _MOST_RATE):
                raise ValueError(f"kwargs.{key} is {value!r}; give a number, such as {_NUMBERS_LIKE[key]}")
        return self


class SchedulerConfig(BaseModel):
    """One schedule by dotted name; in a list, one entry may hold the ``milestones`` at which the next one begins."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    name: str | None = None
    """A schedule of ``torch.optim.lr_scheduler`` or a ``transformers.optimization.get_...`` function."""
    kwargs: dict[str, Any] = {}
    """Its arguments; steps are optimizer steps."""
    milestones: list[int] | None = None
    """Steps at which the next schedule of the list takes over."""

    @model_validator(mode="after")
    def _one_kind(self) -> SchedulerConfig:
        if (self.name is None) == (self.milestones is None):
            raise ValueError("a scheduler entry has either a name or milestones")
        return self


def _load(name: str) -> Any:
    """The object behind a dotted name, from the allowed modules only: a run file must not call arbitrary code."""
    match = _NAME.fullmatch(name)
    module = match[1] if match else ""
    if not any(module == m or module.startswith(m + ".") for m in ALLOWED_MODULES):
        raise ConfigError(f"{name!r} is not allowed; use a name from {', '.join(ALLOWED_MODULES)}")
    assert match is not None
    try:
        return getattr(import_module(module), match[2])
    except ImportError as e:
        raise ConfigError(f"{name!r} needs the package {module.split('.')[0]!r}, which is not installed") from e
    except AttributeError as e:
        raise ConfigError(f"{module} has no {match[2]!r}; check the spelling of {name!r}") from e


def build_optimizer(
    params: Iterable[torch.nn.Parameter], config: OptimizerConfig | Mapping[str, Any]
) -> torch.optim.Optimizer:
    """``{name: torch.optim.AdamW, kwargs: {...}}`` over the parameters that want a gradient.

    Sharded parameters of different layouts become groups of their own, all with the same settings.
    """
    config = resolve(OptimizerConfig, config)
    factory: Any = _load(config.name)
    if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
        raise ConfigError(f"{config.name!r} is no optimizer; give a torch.optim.Optimizer class")
    if factory is torch.optim.SparseAdam or _asks_of_step(factory):
        raise ConfigError(
            f"{config.name!r} takes no step of gradients alone: it wants sparse ones, or to compute the loss again; "
            "give another optimizer, such as torch.optim.AdamW"
        )
    trained = [p for p in params if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter to train; check lora.target_modules and frozen parts")
    kwargs = dict(config.kwargs)
    if issubclass(factory, torch.optim.Adam) and not _WAYS & kwargs.keys() and all(p.is_cuda for p in trained):
        # one kernel for dozens of parameters, in place of a dozen each
        kwargs["fused"] = True
    try:
        groups = group_by_layout(trained)
        built: torch.optim.Optimizer = factory(
            trained if len(groups) == 1 else [{"params": group} for group in groups], **kwargs
        )
        return built
    except Exception as e:  # a class may refuse by whatever it likes
        raise ConfigError(f"optimizer {config.name!r} refuses the arguments {kwargs}: {one_line(e)}") from e


def _asks_of_step(factory: type[torch.optim.Optimizer]) -> bool:
    """Whether its step cannot be called without an argument, such as a function that computes the loss."""
    (_, *arguments) = inspect.signature(factory.step).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in plain and one.default is inspect.Parameter.empty for one in arguments)


def build_scheduler(
    optimizer: torch.optim.Optimizer,
    config: SchedulerConfig | Mapping[str, Any] | Sequence[SchedulerConfig | Mapping[str, Any]] | None,
) -> LRScheduler | None:
    """A schedule, or several in a row with one ``{milestones: [...]}`` entry: the steps at which the next begins."""
    if config is None:
        return None
    configs = [config] if isinstance(config, SchedulerConfig | Mapping) else config
    entries = [resolve(SchedulerConfig, entry) for entry in configs]
    named = [e for e in entries if e.name is not None]
    milestone_lists = [e.milestones for e in entries if e.milestones is not None]
    if not named or len(milestone_lists) > 1:
        raise ConfigError("a scheduler is a list of {name, kwargs} entries with at most one {milestones} entry")
    milestones = list(milestone_lists[0]) if milestone_lists else []
    if len(milestones) != len(named) - 1:
        raise ConfigError(
            f"{len(named)} schedules in a row need {len(named) - 1} milestones, got {len(milestones)}: {milestones}"
        )
    schedules = [_schedule(optimizer, e) for e in named]
    return schedules[0] if len(schedules) == 1 else SequentialLR(optimizer, schedules, milestones=milestones)


def _schedule(optimizer: torch.optim.Optimizer, entry: SchedulerConfig) -> LRScheduler:
    factory: Callable[..., Any] = _load(str(entry.name))
    kwargs = dict(entry.kwargs)
    is_schedule = isinstance(factory, type) and issubclass(factory, LRScheduler)
    if not is_schedule and not str(entry.name).startswith("transformers.optimization.get_"):
        raise ConfigError(f"{entry.name!r} is no learning-rate schedule; give a class of torch.optim.lr_scheduler")
    try:
        schedule = factory(optimizer, **kwargs)
    except Exception as e:  # as above
        raise ConfigError(f"scheduler {entry.name!r} refuses the arguments {kwargs}: {one_line(e)}") from e
    if not isinstance(schedule, LRScheduler):
        raise ConfigError(f"{entry.name!r} returned a {type(schedule).__name__}, not a learning-rate schedule")
    return schedule


MOST_TRIED = 20_000
"""Steps of a schedule that are tried before a run; a second's work."""


def check_optimizer(
    optimizer: OptimizerConfig,
    scheduler: SchedulerConfig | list[SchedulerConfig] | None,
    steps: int,
    params: Iterable[nn.Parameter] = (),
) -> None:
    """Refuse an optimizer or a schedule that a run of so many steps would refuse at its start or on the way.

    ``params``: those to be trained, of which number of dimensions and type count (they may lie on the meta device);
    without, a matrix stands for them.
    """
    # some optimizers take matrices alone, and none that computes in a kernel takes what has no memory
    kinds = {(p.ndim, p.dtype) for p in params if p.requires_grad} or {(2, torch.float32)}
    # by their text: torch's types have no order
    stand_ins = [nn.Parameter(torch.zeros([1] * dims, dtype=dtype)) for dims, dtype in sorted(kinds, key=str)]
    built = build_optimizer(stand_ins, optimizer)
    schedule = build_scheduler(built, scheduler)
    if schedule is None:
        return
    with warnings.catch_warnings():
        # no step of the optimizer is taken
        warnings.simplefilter("ignore")
        for step in range(1, min(steps, MOST_TRIED) + 1):
            try:
                schedule.step()
            except Exception as e:  # as above
                raise ConfigError(
                    f"policy.scheduler fails at step {step} of {steps} ({one_line(e)}); give it arguments that reach "
                    "the end of the run"
                ) from e


# ---- optimizer state that does not depend on the layout ----

_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
_LENGTHS = ("T_max", "total_iters", "_milestones")


def same_schedule(one: Any, other: Any) -> bool:
    """Whether two states are of schedules of one length, wherever they stand."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_schedule, one, other))
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return True
    lengths = all(one.get(key) == other.get(key) for key in _LENGTHS)
    return lengths and same_schedule(one.get("_schedulers"), other.get("_schedulers"))


def schedule_at(optimizer: torch.optim.Optimizer, config: Any, steps: int) -> LRScheduler | None:
    """A new schedule after so many steps; the optimizer's rates become those of the next one."""
    for group in optimizer.param_groups:
        # the schedule before has left its rate and the first one in the group; a new one begins from the first
        group["lr"] = group.pop("initial_lr", group["lr"])
    schedule = build_scheduler(optimizer, config)
    with warnings.catch_warnings():
        # the steps of the optimizer were taken before
        warnings.simplefilter("ignore")
        for _ in range(steps if schedule is not None else 0):
            assert schedule is not None
            schedule.step()
    return schedule


def _places(optimizer: torch.optim.Optimizer, order: Sequence[nn.Parameter]) -> list[int]:
    """For each parameter in the optimizer's own order, its place in ``order``."""
    index = {id(p): i for i, p in enumerate(order)}
    return [index[id(p)] for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer, order: Sequence[nn.Parameter]) -> dict[str, Any]:
    """The optimizer's state as if ``order`` were its one group of parameters, however they are grouped here."""
    state, places = optimizer.state_dict(), _places(optimizer, order)
    group = {**state["param_groups"][0], "params": list(range(len(order)))}
    return {"state": {places[i]: state["state"][i] for i in sorted(state["state"])}, "param_groups": [group]}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, order: Sequence[nn.Parameter], state: dict[str, Any]
) -> None:
    """Put back what :func:`optimizer_state` gave, under this or another layout."""
    current, places = optimizer.state_dict(), _places(optimizer, order)
    if len(state["param_groups"]) == 1 and len(state["param_groups"][0]["params"]) == len(places):
        stored = state["param_groups"][0]
        kept = _WAYS | {"params"}
        groups = [{**stored, **{k: v for k, v in group.items() if k in kept}} for group in current["param_groups"]]
        state = {
            "state": {i: state["state"][p] for i, p in enumerate(places) if p in state["state"]},
            "param_groups": groups,
        }
    optimizer.load_state_dict(state)


def empty_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's tensors, in the layout of its parameters, without moving any: a step of rate 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # a rate that is a tensor must stay one
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for p in group["params"]:
            # optimizers make state only for parameters that have a gradient
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def scheduler_state(state: Any, groups: int | None = None) -> Any:
    """A schedule's state with one entry per parameter group reduced to one, or (with ``groups``) spread again."""
    if isinstance(state, list):
        return [scheduler_state(value, groups) for value in state]
    if not isinstance(state, dict):
        return state
    spread: Callable[[list[Any]], list[Any]] = lambda v: v[:1] if groups is None else v[:1] * groups  # noqa: E731
    return {
        key: spread(value) if key in _PER_GROUP and isinstance(value, list) else scheduler_state(value, groups)
        for key, value in state.items()
    }
