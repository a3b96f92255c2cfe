"""A Ray cluster on this machine, whose workers see this source tree."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limbeck.distributed.launch import load_ray
from tests.patience import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
_STARTS = 3


@contextmanager
def cluster(cores: int) -> Iterator[Any]:
    """Ray on so many cores; for a fixture."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # a start that takes longer counts as a failure of the run
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(WAIT_SECONDS)
    # Ray's workers give way to all else by default: beside other tests on two cores they hardly ever run
    os.environ.update(RAY_worker_niceness="0")
    ray = load_ray()
    _start(ray, cores)
    try:
        yield ray
    finally:
        ray.shutdown()


def give_back(ray: Any, cores: int) -> None:
    """Behind a test: workers that it left behind keep cores, for which the next one would wait without end. Where they
    do not end by themselves, the cluster is started anew."""
    end = time.monotonic() + WAIT_SECONDS / 8
    while ray.available_resources().get("CPU", 0) < cores:
        if time.monotonic() > end:
            ray.shutdown()
            _start(ray, cores)
            return
        time.sleep(0.05)


def _start(ray: Any, cores: int) -> None:
    for left in reversed(range(_STARTS)):
        try:
            ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="error")
            return
        except Exception:  # Ray gives its first process 30 s, which a busy machine may not have
            ray.shutdown()
            if not left:
                raise
