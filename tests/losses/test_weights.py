"""Schedules of the channel weights."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from limbeck.losses.weights import ChannelWeights, WeightConfig


def test_warm_up_plateau_and_decay() -> None:
    schedule = WeightConfig(value=2.0, warmup_steps=4, decay="linear", decay_start=10, decay_steps=5, final=0.5)
    assert [schedule.at(s) for s in (0, 1, 3, 4, 10)] == [0.0, 0.5, 1.5, 2.0, 2.0]
    assert schedule.at(12) == pytest.approx(0.5 + 1.5 * 3 / 5)
    assert schedule.at(15) == schedule.at(1000) == 0.5
    cosine = WeightConfig(value=1.0, decay="cosine", decay_steps=8)
    assert cosine.at(0) == 1.0
    assert cosine.at(4) == pytest.approx(0.5)
    assert cosine.at(8) == cosine.at(9) == pytest.approx(0.0)
    assert WeightConfig(value=0.3).at(7) == 0.3


def test_channel_factors_follow_their_schedules() -> None:
    weights = ChannelWeights(alpha=WeightConfig(value=1.0, warmup_steps=2), beta=WeightConfig(value=0.1))
    assert weights.at(0) == {"policy": 1.0, "hint": 0.0, "preference": 0.1}
    assert weights.at(1)["hint"] == 0.5
    assert ChannelWeights().at(3) == {"policy": 1.0, "hint": 0.0, "preference": 0.0}


def test_nonsense_is_refused() -> None:
    bad: list[dict[str, Any]] = [
        {"value": -1.0},
        {"value": float("nan")},
        {"warmup_steps": -1},
        {"decay": "step"},
        {"decay": "linear"},
        {"decay": "linear", "decay_steps": 3, "warmup_steps": 5},
    ]
    for fields in bad:
        with pytest.raises(ValidationError):
            WeightConfig(**fields)
