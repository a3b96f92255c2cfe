"""Several ranks on one machine, each in its own process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ranks(count: int, work: Callable[..., Any], *args: Any) -> None:
    """``work(rank, *args)`` in ``count`` processes; the first error of one is raised here.

    Children of a fork server end without tearing down their interpreter. In one that is torn down, a thread of gloo
    that still lets go of a tensor is ended by the interpreter and aborts the process: rare, and after the work is done.
    """
    mp.get_context("forkserver").set_forkserver_preload(["tests.distributed.cases", "transformers.models.auto"])
    mp.start_processes(work, args=args, nprocs=count, start_method="forkserver")
