"""Places where the processes of a run wait until a test kills them or lets them go, so that no moment is missed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from limbeck.utils import CheckpointManager, files
from limbeck.utils.logger import Logger
from tests.patience import WAIT_SECONDS

Place = Literal["sampled", "row written", "save begun", "save filled", "saved"]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; fail where it does not come to hold. ``what``: the event, for the failure."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited for {WAIT_SECONDS:g} s, in vain, for {what}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Gate:
    """A folder that all processes see: one file for each process that came, and one that says it is open."""

    folder: Path

    def wait(self) -> None:
        """In a run: say that this process is here, and stay until the gate is opened, from then on for good."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"pid_{os.getpid()}").touch()
        wait_until((self.folder / "open").exists, f"the gate {self.folder} to be opened")

    def arrived(self) -> list[int]:
        """In a test: the processes that have come, by number."""
        return sorted(int(path.name.removeprefix("pid_")) for path in self.folder.glob("pid_*"))

    def open(self) -> None:
        """In a test: let all go on that wait here or will come."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "open").touch()


def hold_run(gate: Gate, place: Place, step: int) -> None:
    """Have every run of this process wait at ``gate`` at a place of ``step``; for processes that run nothing else."""
    if place == "sampled":
        # needs a model library, which not all that wait here do
        from limbeck.algorithms.rollouts import Rollouts

        _wait_around(Rollouts, "draw", gate, lambda rollouts, prompts, number, *more: number + 1 == step)
    elif place == "row written":
        _wait_around(Logger, "commit", gate, lambda logger: _last_row(logger.log_dir) == step)
    elif place == "save begun":
        _wait_around(CheckpointManager, "init_tmp_checkpoint", gate, lambda _, number, *args: number == step)
    else:
        before = place == "save filled"
        _wait_around(CheckpointManager, "finalize_checkpoint", gate, lambda _, tmp: _step_of(tmp) == step, before)


def hold_output(gate: Gate) -> None:
    """Have this process wait at ``gate`` whenever a file is written and does not have its name yet."""
    publish = files._publish

    def waiting(*args: Any) -> None:
        gate.wait()
        publish(*args)

    files._publish = waiting


def _wait_around(owner: type, name: str, gate: Gate, condition: Callable[..., bool], before: bool = False) -> None:
    """Wait at the gate after (or before) the calls of a method for whose arguments the condition holds."""
    method = getattr(owner, name)

    def waiting(*args: Any) -> Any:
        if before and condition(*args):
            gate.wait()
        result = method(*args)
        if not before and condition(*args):
            gate.wait()
        return result

    setattr(owner, name, waiting)


def _last_row(run_dir: Path) -> int:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else -1


def _step_of(tmp: Path) -> int:
    return int(tmp.name.rpartition("_")[2])
