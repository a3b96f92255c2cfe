"""Where the processes of a run come from: this one, those that torchrun started, or workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def launch(run: Callable[[Any], Path], config: Any) -> Path:
    """Run ``run(config)`` where ``config.cluster.launcher`` says; returns the run folder.

    ``run``: a module-level function of one validated configuration. Under ``local`` it is simply called: a process
    that torchrun started finds its peers in the environment (see ``limbeck.distributed.process``). Under ``ray`` the
    same function runs in the workers of a Ray Train job, and goes on from its last checkpoint after one dies.
    """
    if config.cluster.launcher == "ray":
        from limbeck.distributed.ray_launch import run_on_ray

        run_on_ray(run, config)
        return Path(config.logger.log_dir)
    return run(config)
