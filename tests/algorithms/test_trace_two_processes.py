"""Two data-parallel processes take the run of one: groups, sites and pairs are counted over both."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from limbeck.algorithms.trace_distillation import setup, train
from limbeck.utils.logger import read_metrics
from tests.helpers.trace_runs import config, short_traces

# store-count-3 has neither site nor pair, so one process waits through fillers of both channels
NAMES = ("store-count-1", "store-count-2", "store-count-3", "files-todo-2")


def _run(where: Path, name: str) -> Path:
    made: Any = config(
        where,
        policy={"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}, "train_micro_batch_size": 1},
        traces={"train": short_traces(where, NAMES), "shuffle": False},
        loss={"hint": {"self_teacher": "ema"}},
        distillation={"num_prompts_per_step": 2, "max_num_steps": 2, "val_at_start": True, "val_at_end": True},
        logger={"log_dir": str(where / name)},
        checkpointing={"enabled": True},
    )
    parts = setup(made)
    train(parts)
    return where / name


def _work(rank: int, port: int, where: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    try:
        _run(Path(where), "two")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_take_the_run_of_one(tmp_path: Path) -> None:
    one = _run(tmp_path, "one")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_work, args=(port, str(tmp_path)), nprocs=2, join=True)
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (one, tmp_path / "two")]
    assert len(rows[0]) == len(rows[1]) == 3
    for a, b in zip(*rows, strict=True):
        for key, value in a.items():
            if "/time/" not in key and not key.endswith(("seconds", "tokens_per_s")):
                assert b[key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
    assert json.loads((tmp_path / "two" / "dropped.json").read_text()) == {}
