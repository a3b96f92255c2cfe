"""Whole runs on traces in two processes: the figures of one, and a run that goes on under another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from limbeck.algorithms.trace_distillation import run
from tests.distributed.cases import together
from tests.helpers import runs
from tests.helpers.trace_runs import config, short_traces, tokenizer_folder

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {"fsdp": {"fsdp": True}, "tensor": {"tensor_parallel_size": 2}}
NAMES = ("store-count-1", "store-count-2", "store-count-3", "files-todo-2")
ADAM = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "eps": 1e-3}}


def run_to(step: int, folder: Path, name: str, layout: dict[str, Any]) -> None:
    """Start the run ``name``, or go on with it, until ``step``."""
    made = config(
        folder,
        policy={"optimizer": ADAM, "dtensor_cfg": layout},
        # the longest trace loses its last messages, which must be counted once per trace and epoch
        traces={"train": short_traces(folder, NAMES), "max_seq_length": 380},
        loss={"hint": {"self_teacher": "ema", "ema_decay": 0.5}},
        distillation={
            "num_prompts_per_step": 2,
            "max_num_steps": step,
            "val_period": 2,
            "val_at_start": True,
            "monitor": {"period": 1, "generate": 1, "max_new_tokens": 2},
        },
        logger={"log_dir": str(folder / name)},
        checkpointing={"enabled": True, "save_period": 1, "keep_top_k": None},
    )
    run(made)


def work(rank: int, world: int, root: str) -> int:
    folder = Path(root)
    for name, layout in LAYOUTS.items():
        run_to(3, folder, name, layout)
        # what one process began
        run_to(3, folder, f"alone, then {name}", layout)
    # and back on other shards
    run_to(4, folder, "tensor", LAYOUTS["fsdp"])
    return rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("runs")
    tokenizer_folder(where)
    short_traces(where, NAMES)
    run_to(4, where, "alone", {})
    for layout in LAYOUTS:
        run_to(1, where, f"alone, then {layout}", {})
    together(2, work, where / "ranks", str(where))
    for name in ("fsdp", "alone, then fsdp", "alone, then tensor"):
        run_to(4, where, name, {})
    return where


@pytest.mark.parametrize("name", ["fsdp", "tensor", "alone, then fsdp", "alone, then tensor"])
def test_a_run_is_the_same_under_any_layout(folder: Path, name: str) -> None:
    expected, found = runs.rows(folder / "alone"), runs.rows(folder / name)
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]
    for a, b in zip(expected, found, strict=True):
        # a run that stopped in between was validated there, too
        assert set(a) <= set(b)
        for key, value in a.items():
            assert b[key] == pytest.approx(value, rel=2e-5, abs=1e-5), (a["step"], key)
    lost = [json.loads((folder / which / "skipped.json").read_text()) for which in ("alone", name)]
    assert lost[0] == lost[1]
    assert lost[0]["policy_rows_cut"] > 0
    ends = [folder / which / "checkpoints" / "step_4" / "policy" / "weights" for which in ("alone", name)]
    models = [AutoModelForCausalLM.from_pretrained(end) for end in ends]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
