"""Where a run stands: what checkpoints hold of it, those of earlier versions too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from limbeck.algorithms.run import RunState
from limbeck.errors import CheckpointError

BEFORE = {"current_epoch": 1, "current_step": 2, "total_steps": 7, "consumed_samples": 28, "total_valid_tokens": 90}


def test_a_state_is_stored_as_plain_values() -> None:
    state = RunState(**BEFORE, val_loss=1.5, observers={"skipped": {"truncated": 3}})
    stored = json.loads(json.dumps({**state.as_dict(), "step": 7, "val/bpb": 1.2}))
    assert RunState.of(stored) == state
    assert "val_loss" not in RunState().as_dict()


@pytest.mark.parametrize("counts", [{"dropped": {"truncated": 3}}, {"observers": {"dropped": {"truncated": 3}}}])
def test_counts_of_earlier_checkpoints_are_read(counts: dict[str, Any]) -> None:
    state = RunState.of({**BEFORE, **counts, "val/bpb": 1.2, "step": 7})
    assert state == RunState(**BEFORE, observers={"skipped": {"truncated": 3}})


@pytest.mark.parametrize(
    "damage",
    [{"total_steps": [4]}, {"current_epoch": "x"}, {"total_steps": True}, {"observers": 1}, {"observers": {"a": 1}}],
)
def test_a_damaged_state_is_named(damage: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        RunState.of({**BEFORE, **damage}, "the checkpoint 'step_7'")
    assert f"{next(iter(damage))!r} of the checkpoint 'step_7'" in str(error.value)
