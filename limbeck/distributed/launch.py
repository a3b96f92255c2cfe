"""Where the processes of a run come from: this one, those that torchrun started, or workers of a Ray cluster."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from limbeck.distributed.comm import leave_distributed
from limbeck.errors import ConfigError, LimbeckError, one_line


class ClusterConfig(BaseModel):
    """Where the processes of a run come from."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    num_nodes: int = Field(default=1, ge=1)
    """Machines of the run: Ray starts processes on as many, those of torchrun are counted against it."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """Accelerators of each machine; default: as many as there are, 0: none."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How processes talk; ``auto``: nccl between GPUs, gloo between CPUs."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds that the processes wait for one that does not answer, before the run ends."""
    launcher: Literal["local", "ray"] = "local"
    """``local``: this process, or those that torchrun started. ``ray``: workers of a Ray cluster."""
    num_workers: int | None = Field(default=None, ge=1)
    """Ray: training processes; default: num_nodes x gpus_per_node, or 1 without GPUs."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """Ray: processor cores that each worker reserves."""
    ray_address: str | None = None
    """Ray: address of a running cluster; default: the one this machine belongs to, or a new one on it."""
    max_restarts: int = Field(default=3, ge=-1)
    """Ray: how often a run goes on from its last checkpoint after a worker dies; -1: without end."""
    cache_parts: int = Field(default=64, ge=1, le=999)
    """Ray: parts into which ``limbeck cache`` cuts the records; workers take one after the other. Fixed per cache."""


def check_cluster(cluster: ClusterConfig, world: int) -> None:
    """Refuse a run whose number of processes is not what the ``cluster`` section promises."""
    # under Ray the number of workers is a setting of its own
    if not cluster.gpus_per_node or cluster.launcher != "local" or world == 1:
        return
    promised = cluster.gpus_per_node * cluster.num_nodes
    if promised != world:
        raise ConfigError(
            f"cluster.num_nodes {cluster.num_nodes} x gpus_per_node {cluster.gpus_per_node} = {promised}, but {world} "
            "processes were started; correct the run file or the launcher"
        )


def launch(run: Callable[[Any], Path], config: Any) -> Path:
    """Run ``run(config)`` where ``config.cluster.launcher`` says; returns the run folder.

    ``run``: a module-level function of one validated configuration. Under ``local`` it is simply called: a process
    that torchrun started finds its peers in the environment (see ``init_distributed``). Under ``ray`` the
    same function runs in the workers of a Ray Train job, and goes on from its last checkpoint after one dies.
    """
    if config.cluster.launcher == "ray":
        run_on_ray(run, config)
        return Path(config.logger.log_dir)
    return run(config)


# ---- the same function under Ray Train: placement, process group, restarts from the last checkpoint ----


def load_ray() -> Any:
    """Ray, which is an optional part of the installation."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "cluster.launcher is 'ray' but Ray is not installed; pip install 'limbeck[ray]', or set it to local"
        ) from error


def check_address(address: str | None, patience: float = 5.0) -> None:
    """Refuse the address of a cluster that does not answer: Ray itself tries for minutes, and again."""
    named = address or os.environ.get("RAY_ADDRESS") or ""
    host, _, port = named.removeprefix("ray://").rpartition(":")
    # "auto" and the like are looked up by Ray
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=patience).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"the Ray cluster {named!r} does not answer: {one_line(error, 200)}") from error


@contextmanager
def connected(cluster: Any) -> Iterator[Any]:
    """Ray, connected to the cluster of a run file; one that was started here ends with the block."""
    ray = load_ray()
    mine = not ray.is_initialized()
    if mine:
        _connect(ray, cluster.ray_address)
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    kwargs: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
    if address is None and not os.environ.get("RAY_ADDRESS"):
        kwargs["include_dashboard"] = False
    named = address or os.environ.get("RAY_ADDRESS")
    check_address(address)
    try:
        ray.init(address=address, **kwargs)
    except Exception as error:  # Ray has no class of its own for a start that takes longer than it waits
        line = one_line(error, 200)
        if named:
            raise ConfigError(f"the Ray cluster {named!r} cannot be joined: {line}") from error
        raise ConfigError(
            f"Ray cannot be started on this machine: {line}; try again, or give cluster.ray_address"
        ) from error


def number_of_workers(cluster: Any) -> int:
    """Training processes that a run file asks for."""
    return int(cluster.num_workers or cluster.num_nodes * (cluster.gpus_per_node or 1))


def worker_resources(ray: Any, cluster: Any, workers: int) -> dict[str, float]:
    """Resources that each worker reserves; a cluster that cannot hold them all is an error, for Ray would wait for
    ever."""
    needs = {"CPU": float(cluster.cpus_per_worker)}
    if cluster.gpus_per_node or (cluster.gpus_per_node is None and ray.cluster_resources().get("GPU", 0) >= workers):
        needs["GPU"] = 1.0
    has = ray.cluster_resources()
    for name, amount in needs.items():
        if has.get(name, 0.0) < amount * workers:
            raise ConfigError(
                f"the Ray cluster has {has.get(name, 0.0):g} {name}, but {workers} workers of {amount:g} each need "
                f"{amount * workers:g}; lower cluster.num_workers or add machines"
            )
    return needs


class Outcome:
    """An actor that remembers the one line with which a run ended on purpose; a restart would end the same way."""

    def __init__(self) -> None:
        self._found: tuple[str, str] | None = None

    def end(self, kind: str, line: str) -> None:
        self._found = self._found or (kind, line)

    def get(self) -> tuple[str, str] | None:
        return self._found


def run_on_ray(run: Callable[[Any], Any], config: Any) -> None:
    """Run ``run(config)`` in every worker of a Ray Train job.

    ``config``: a pydantic model with a ``cluster`` section. The run folder must be storage that all machines share:
    after a worker dies, all start again and ``run`` itself goes on from the latest checkpoint in it.
    """
    cluster = config.cluster
    with connected(cluster) as ray:
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer

        workers = number_of_workers(cluster)
        needs = worker_resources(ray, cluster, workers)
        # reserves nothing: a core for it could be one that the workers need, for which Ray would wait
        outcome = ray.remote(num_cpus=0)(Outcome).remote()
        folder = Path(config.logger.log_dir).absolute()
        trainer = TorchTrainer(
            _work,
            train_loop_config={**_payload(run, config), "outcome": outcome},
            # Ray takes whole seconds
            torch_config=TorchConfig(backend=_backend(cluster, "GPU" in needs), timeout_s=math.ceil(cluster.timeout)),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu="GPU" in needs, resources_per_worker=needs),
            run_config=RunConfig(
                name="ray",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=cluster.max_restarts),
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            _end_as_recorded(ray.get(outcome.get.remote()))
            line = " ".join(str(error).split())[:300]
            raise LimbeckError(
                f"the Ray run failed more often than cluster.max_restarts={cluster.max_restarts} allows: {line}"
            ) from error
        # workers that end on purpose return, which Ray takes for success
        _end_as_recorded(ray.get(outcome.get.remote()))


def _backend(cluster: Any, gpus: bool) -> str:
    return str(cluster.backend) if cluster.backend != "auto" else ("nccl" if gpus else "gloo")


def _payload(run: Callable[[Any], Any], config: Any) -> dict[str, Any]:
    data = config.model_dump(mode="json")
    # in a worker the same function must not start Ray again
    data["cluster"]["launcher"] = "local"
    model = type(config)
    return {
        "run": f"{run.__module__}:{run.__qualname__}",
        "model": f"{model.__module__}:{model.__qualname__}",
        "config": data,
        "folder": os.getcwd(),
    }


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _end_as_recorded(recorded: tuple[str, str] | None) -> None:
    """End as the workers did, where they ended by an error."""
    if recorded is not None:
        raise _named(recorded[0])(recorded[1])


def _work(payload: dict[str, Any]) -> None:
    """A worker: this process has its rank and its process group; the rest is as under torchrun."""
    import ray
    import torch
    from ray.train import get_context

    # Ray may have started this worker anew for a run that has ended on purpose
    if ray.get(payload["outcome"].get.remote()) is not None:
        return
    context = get_context()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        LOCAL_RANK=str(context.get_local_rank()),
        WORLD_SIZE=str(context.get_world_size()),
    )
    # relative paths of a run file mean the folder in which the command was given
    if os.path.isdir(payload["folder"]):
        os.chdir(payload["folder"])
    if torch.cuda.is_available():
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    try:
        _named(payload["run"])(_named(payload["model"]).model_validate(payload["config"]))
    except LimbeckError as error:
        # an end on purpose: the driver gets it, and this worker returns, for Ray would start a worker that fails again
        kind = type(error)
        ray.get(payload["outcome"].end.remote(f"{kind.__module__}:{kind.__qualname__}", str(error)))
        leave_distributed()
    except RuntimeError:  # what a collective raises when a peer has left
        if not _peer_ended(payload["outcome"]):
            raise


def _peer_ended(outcome: Any, patience: float = 5.0) -> bool:
    """Whether this worker only failed because a peer ended on purpose, which may be reported a moment later."""
    import ray

    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if ray.get(outcome.get.remote()) is not None:
            return True
        time.sleep(0.2)
    return False
