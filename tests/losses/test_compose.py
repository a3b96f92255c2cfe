"""Schedules of the channel weights, and the total."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limbeck.errors import ConfigError
from limbeck.losses.weights import ChannelWeights, WeightSchedule, compose


def test_warm_up_plateau_and_decay() -> None:
    schedule = WeightSchedule(2.0, warmup_steps=4, decay="linear", decay_start=10, decay_steps=5, final=0.5)
    assert [schedule.at(s) for s in (0, 1, 3, 4, 10)] == [0.0, 0.5, 1.5, 2.0, 2.0]
    assert schedule.at(12) == pytest.approx(0.5 + 1.5 * 3 / 5)
    assert schedule.at(15) == schedule.at(1000) == 0.5
    cosine = WeightSchedule(1.0, decay="cosine", decay_steps=8)
    assert cosine.at(0) == 1.0
    assert cosine.at(4) == pytest.approx(0.5)
    assert cosine.at(8) == cosine.at(9) == pytest.approx(0.0)
    assert WeightSchedule(0.3).at(7) == 0.3


def test_channel_factors_follow_their_schedules() -> None:
    weights = ChannelWeights(alpha=WeightSchedule(1.0, warmup_steps=2), beta=WeightSchedule(0.1))
    assert weights.at(0) == {"policy": 1.0, "hint": 0.0, "preference": 0.1}
    assert weights.at(1)["hint"] == 0.5
    assert ChannelWeights().at(3) == {"policy": 1.0, "hint": 0.0, "preference": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_weights_the_total_is_the_plain_objective_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    policy = (x.exp() * 0.3).sum()
    # A channel that does not count may even be broken.
    others = {"hint": x.sum() * torch.nan, "preference": x.sum() / 0}
    total = compose({"policy": policy, **others}, ChannelWeights().at(0))
    assert torch.equal(total, policy)
    assert torch.equal(torch.autograd.grad(total, x)[0], torch.autograd.grad((x.exp() * 0.3).sum(), x)[0])


def test_the_total_is_the_weighted_sum() -> None:
    losses = {"policy": torch.tensor(1.0), "hint": torch.tensor(10.0), "preference": torch.tensor(100.0)}
    assert float(compose(losses, {"policy": 1.0, "hint": 0.5, "preference": 0.25})) == 31.0
    assert float(compose(losses, {"policy": 0.0, "hint": 0.5, "preference": 0.0})) == 5.0
    assert float(compose({"hint": torch.tensor(2.0)}, {"policy": 1.0, "hint": 1.0})) == 2.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="no channel counts"):
        compose({"policy": torch.tensor(1.0)}, {"policy": 0.0})
    with pytest.raises(ConfigError, match="no channels"):
        compose({"value": torch.tensor(1.0)}, {"value": 1.0})
    bad: list[dict[str, Any]] = [
        {"value": -1.0},
        {"value": float("nan")},
        {"warmup_steps": -1},
        {"decay": "step"},
        {"decay": "linear"},
        {"decay": "linear", "decay_steps": 3, "warmup_steps": 5},
    ]
    for fields in bad:
        with pytest.raises(ConfigError):
            WeightSchedule(**fields)
