"""Checks that a run file alone decides: refused before tokenizers, data and weights are read.

A run stops at the first check that fails, ``limbeck train --dry-run`` tells all of them: both call the checks that
:func:`checks` lists, so that neither knows one that the other lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from limbeck.algorithms.config import MasterConfig, OnPolicyMasterConfig
from limbeck.algorithms.ray_sampler import refuse_without_ray
from limbeck.algorithms.rewards import make_reward
from limbeck.algorithms.run_folder import refuse_changes
from limbeck.algorithms.vllm_sampler import load_vllm
from limbeck.distributed.comm import Comm
from limbeck.distributed.launch import check_address, check_cluster, load_ray
from limbeck.errors import ConfigError
from limbeck.models.lora import load_peft
from limbeck.models.optim import check_optimizer
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.logger import check_writers
from limbeck.utils.progress import say

Check = Callable[[], object]


def preflight(config: Any) -> None:
    """Refuse a run file that cannot be run. ``config``: of any algorithm."""
    for _, check in checks(config):
        check()
    for line in notes(config):
        say(line)


def notes(config: Any) -> list[str]:
    """Lines about what a run file says that does nothing here; nothing is refused for it."""
    cluster, world, lines = config.cluster, Comm.world().size, list[str]()
    promised = (cluster.gpus_per_node or 1) * cluster.num_nodes
    if cluster.launcher == "local" and world == 1 < promised:
        lines.append(
            f"one process, though cluster.num_nodes x gpus_per_node is {promised}: torchrun --nproc-per-node "
            f"{cluster.gpus_per_node} -m limbeck train starts more, or cluster.launcher: ray"
        )
    if config.logger.monitor_gpus and not torch.cuda.is_available():
        lines.append("on the CPU: no GPU memory to log (logger.monitor_gpus)")
    if isinstance(config, MasterConfig) and config.data.validates:
        loop = config.distillation
        if not (loop.val_period or loop.val_at_start or loop.val_at_end):
            lines.append("validation data is given, but nothing validates: set distillation.val_period or val_at_end")
    return lines


def checks(config: Any) -> list[tuple[str, Check]]:
    """(what is looked at, a function that raises a ``LimbeckError`` where it is wrong)."""
    policy, steps = config.policy, config.distillation.max_num_steps
    checks_by_part: list[tuple[str, Check]] = [
        ("run folder", partial(_same_configuration, config)),
        ("cluster", partial(check_cluster, config.cluster, Comm.world().size)),
        ("logger", partial(check_writers, config.logger)),
        ("optimizer", partial(check_optimizer, policy.optimizer, policy.scheduler, steps)),
    ]
    if config.cluster.launcher == "ray":
        checks_by_part += [("cluster", load_ray), ("cluster", partial(check_address, config.cluster.ray_address))]
    if isinstance(config, MasterConfig):
        checks_by_part.append(("loss", partial(_refuse_no_loss, config)))
    if policy.adapters is not None:
        checks_by_part.append(("student", load_peft))
    if isinstance(config, OnPolicyMasterConfig) and config.on_policy.fraction:
        checks_by_part += _of_sampling(config)
    return checks_by_part


def _of_sampling(config: OnPolicyMasterConfig) -> list[tuple[str, Check]]:
    checks_by_part: list[tuple[str, Check]] = []
    reward, engine = config.on_policy.reward, config.on_policy.engine
    if reward is not None and not reward.environment:
        checks_by_part.append(("reward", partial(make_reward, reward)))
    if config.on_policy.environment is not None:
        checks_by_part.append(("environment", config.on_policy.environment.ready))
    if engine is not None and engine.vllm is not None:
        checks_by_part.append(("engine", load_vllm))
    if engine is not None and engine.ray is not None:
        checks_by_part.append(("engine", partial(refuse_without_ray, config.cluster.launcher)))
    return checks_by_part


def stored_checkpoints(config: Any) -> CheckpointManager:
    """The checkpoints of a run's folder, to be looked at alone."""
    settings = config.checkpointing.model_copy(update={"enabled": False})
    return CheckpointManager(settings, run_dir=config.logger.log_dir)


def _refuse_no_loss(config: MasterConfig) -> None:
    """Refuse weights by which nothing is learnt."""
    loss = config.loss_fn
    samples = isinstance(config, OnPolicyMasterConfig) and config.on_policy.fraction == 1
    if not (config.all_teachers or loss.ce_loss_scale or loss.dynamic_loss_scaling or samples):
        why = "loss_fn.kl_loss_weight is 0" if config.named_teachers else "there is no teacher"
        raise ConfigError(f"loss_fn.ce_loss_scale is 0 and {why}, so that nothing would be learnt; raise a weight")


def _same_configuration(config: Any) -> None:
    if config.checkpointing.enabled and stored_checkpoints(config).latest() is not None:
        refuse_changes(config, config.logger.log_dir)
