"""A rank that dies in the middle of a step costs that step and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from limbeck.losses.contract import Teacher
from limbeck.models.policy import Policy
from limbeck.utils import CheckpointManager
from tests.distributed.cases import CASES, batch, loss_of, student_of, teachers_of, together
from tests.helpers.processes import free_port
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.slow

CASE = CASES["one row at a time"]
STEPS = 3
ADAM = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}}


class Fatal(Teacher):
    """A teacher that kills its process at the n-th micro-batch."""

    def __init__(self, teacher: Any, at: int | None) -> None:
        self.teacher, self.left, self.vocab_size = teacher, at, teacher.vocab_size

    def log_probs(self, batch: Any) -> torch.Tensor:
        return self.teacher.log_probs(batch)

    def signal(self, *args: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.teacher.signal(*args)


def run(rank: int, folder: Path, fatal: int | None = None) -> dict[str, torch.Tensor]:
    """Train from the latest checkpoint to the last step, saving after each; the weights at the end."""
    manager = CheckpointManager({"checkpoint_dir": str(folder), "keep_top_k": None})
    latest = manager.latest()
    paths = {}
    if latest is not None:
        paths = {"weights_path": latest / "weights", "optimizer_path": latest / "optimizer"}
    student: Policy = student_of(CASE, {}, ADAM, **paths)
    for number in range(student.steps + 1, STEPS + 1):
        teachers = [Fatal(t, fatal if number == STEPS else None) for t in teachers_of(CASE, {})]
        student.train(batch(CASE, CASE.rows[rank]), loss_of(CASE), teachers=teachers, mbs=1)
        with manager.saving(number, {"loss": 0.0}) as path:
            student.save_checkpoint(path / "weights", path / "optimizer")
    return {name: value.clone() for name, value in student.model.state_dict().items()}


def until_killed(rank: int, world: int, root: str, victim: int, at: int) -> None:
    torch.save(run(rank, Path(root) / "whole"), f"{root}/whole-{rank}.pt")
    dist.barrier()
    run(rank, Path(root) / "killed", at if rank == victim else None)


def resume(rank: int, world: int, root: str) -> dict[str, torch.Tensor]:
    return run(rank, Path(root) / "killed")


def test_a_killed_rank_costs_one_step(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    victim, at = random.randrange(2), random.randrange(4)
    with pytest.raises(Exception, match=r"SIGKILL|terminated|Connection|closed|reset"):
        together(2, until_killed, tmp_path / "first", str(tmp_path), victim, at)
    manager = CheckpointManager({"checkpoint_dir": str(tmp_path / "killed")})
    assert [p.name for p in manager.checkpoints()] == ["step_1", "step_2"], (victim, at)
    found = together(2, resume, tmp_path / "second", str(tmp_path))
    for rank in range(2):
        expected = torch.load(tmp_path / f"whole-{rank}.pt", weights_only=True)
        assert set(found[rank]) == set(expected)
        assert all(torch.equal(found[rank][name], value) for name, value in expected.items()), (victim, at)


WAITING = """
import os, sys, time
from limbeck.distributed.comm import Comm, init_distributed, naming_silent_ranks
from limbeck.errors import LimbeckError
world = init_distributed("gloo", 2.0)
world.barrier()
if world.rank == 1:
    time.sleep(600)
try:
    with naming_silent_ranks(0.5):
        world.barrier()
except LimbeckError as error:
    print(error)
    sys.stdout.flush()
    os._exit(7)
"""


def test_a_rank_that_does_not_answer_is_named() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING], env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=WAIT_SECONDS)[0].decode()
        assert ranks[0].returncode == 7
        assert "rank 1 has not answered rank 0 within cluster.timeout" in said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
