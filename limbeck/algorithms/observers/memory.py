"""Memory of this process with every step; with ``logger.monitor_gpus`` also what is allocated on the accelerator."""

from __future__ import annotations

import torch

from limbeck.algorithms.run import Observer, Run, Step
from limbeck.distributed.device import memory_in_use
from limbeck.utils.logger import LoggerConfig


class MemoryMonitor(Observer):
    """GiB that this process holds: resident in main memory and, where there is one, on the accelerator at most."""

    name = "memory"

    def __init__(self, config: LoggerConfig) -> None:
        self.config = config

    def on_start(self, run: Run) -> None:
        if self.config.monitor_gpus and run.student.device.type == "cuda":
            run.timer.synchronize = torch.cuda.synchronize

    def on_step(self, run: Run, step: Step) -> None:
        device = run.student.device
        step.metrics["memory/resident_gib"] = memory_in_use(torch.device("cpu")) / 2**30
        if device.type == "cuda":
            step.metrics["memory/device_gib"] = memory_in_use(device) / 2**30
            if self.config.monitor_gpus:
                step.metrics["memory/allocated_gib"] = torch.cuda.memory_allocated(device) / 2**30
