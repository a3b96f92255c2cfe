"""Two data-parallel processes take the run of one: groups, sites and pairs are counted over both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms.trace_distillation import setup, train
from limbeck.errors import LimbeckError, TemplateError
from limbeck.traces.dataset import TraceCollate
from limbeck.utils.logger import read_metrics
from tests.helpers.processes import free_port, ranks
from tests.helpers.trace_runs import config, short_traces
from tests.patience import WAIT_SECONDS

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


def _fail(rank: int, port: int, where: str) -> None:
    """Rank 1 cannot collate a pair of the reference, then finds other tokens than the reference was computed for."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    folder = Path(where)
    made = config(
        folder,
        traces={"train": short_traces(folder, NAMES), "shuffle": False},
        distillation={"num_prompts_per_step": 4, "max_num_steps": 1},
        cluster={"backend": "gloo", "timeout": WAIT_SECONDS},
    )
    collate, said = TraceCollate.__call__, []

    def refuse(self: TraceCollate, rows: Any) -> Any:
        if rank == 1:
            raise TemplateError("the template refuses it")
        return collate(self, rows)

    for broken in ("collate", "reference"):
        TraceCollate.__call__ = refuse if broken == "collate" else collate  # type: ignore[method-assign]
        try:
            parts = setup(made)
            assert parts.step.reference is not None
            parts.step.reference.checks += rank
            train(parts)
        except LimbeckError as error:
            said.append(f"{type(error).__name__}: {error}")
    (folder / f"said_{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_an_error_of_one_process_in_the_reference_ends_the_other_and_names_it(tmp_path: Path) -> None:
    ranks(2, _fail, free_port(), str(tmp_path))
    first, second = (json.loads((tmp_path / f"said_{rank}.json").read_text()) for rank in range(2))
    assert first[0] == "TemplateError: rank 1: the template refuses it"
    assert second[0] == "TemplateError: the template refuses it"
    assert first[1].startswith("LossError: ")
    assert "rank 1: the reference log-probs were computed for other tokens" in first[1]
    assert "the reference log-probs were computed for other tokens" in second[1]


@pytest.mark.slow
def test_two_processes_take_the_run_of_one(tmp_path: Path) -> None:
    one = _run(tmp_path, "one")
    ranks(2, _work, free_port(), str(tmp_path))
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (one, tmp_path / "two")]
    assert len(rows[0]) == len(rows[1]) == 3
    for a, b in zip(*rows, strict=True):
        for key, value in a.items():
            if not {"time", "memory"} & set(key.split("/")) and not key.endswith(("seconds", "tokens_per_s")):
                assert b[key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
    assert json.loads((tmp_path / "two" / "skipped.json").read_text()) == {}
