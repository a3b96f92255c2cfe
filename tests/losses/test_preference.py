"""DPO, IPO and SimPO against float64 references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.errors import ConfigError, LossError
from limbeck.losses.preference import (
    PreferenceLossConfig,
    PreferenceLossFn,
    preference_pair_losses,
    response_log_probs,
)
from tests.losses.trace_cases import WIDTH, gradients, hidden_and_head, microbatch, naive_log_probs, policy_batch, take

CONFIGS = [
    PreferenceLossConfig(kind="dpo", beta=0.3),
    PreferenceLossConfig(kind="dpo", beta=0.3, label_smoothing=0.1),
    PreferenceLossConfig(kind="ipo", beta=0.4),
    PreferenceLossConfig(kind="simpo", beta=2.0, gamma=0.7),
]


def preference_batch(pairs: int = 3, seed: int = 0) -> dict[str, Any]:
    batch = policy_batch(2 * pairs, seed)
    g = torch.Generator().manual_seed(seed)
    return {
        **{key: batch[key] for key in ("input_ids", "input_lengths", "token_mask", "idx")},
        "sample_mask": torch.ones(2 * pairs),
        "pair_side": torch.tensor([1.0, -1.0]).repeat(pairs),
        "pair_weight": torch.rand(pairs, generator=g).repeat_interleave(2),
        "reference_logprobs": -10 * torch.rand(2 * pairs, generator=g),
    }


def reference(batch: dict[str, Any], log_p: Tensor, cfg: PreferenceLossConfig) -> Tensor:
    """Sum over pairs by weight, divided by the weights, one pair at a time."""
    total, weights = log_p.new_zeros(()), 0.0
    for pair in range(len(batch["input_ids"]) // 2):
        values = []
        for row in (2 * pair, 2 * pair + 1):
            tokens = [t for t in range(1, int(batch["input_lengths"][row])) if batch["token_mask"][row, t]]
            value = sum(log_p[row, t] for t in tokens)
            if cfg.kind != "simpo":
                value = value - batch["reference_logprobs"][row].double()
            values.append(value / len(tokens) if cfg.kind != "dpo" else value)
        margin = values[0] - values[1]
        if cfg.kind == "ipo":
            loss = (margin - 1 / (2 * cfg.beta)) ** 2
        else:
            logit = cfg.beta * margin - (cfg.gamma if cfg.kind == "simpo" else 0)
            eps = cfg.label_smoothing
            loss = -(1 - eps) * torch.log(torch.sigmoid(logit)) - eps * torch.log(torch.sigmoid(-logit))
        weight = float(batch["pair_weight"][2 * pair])
        total, weights = total + loss * weight, weights + weight
    return total / weights


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda s: f"{s.kind}-{s.label_smoothing}")
def test_value_and_gradient(cfg: PreferenceLossConfig) -> None:
    batch = preference_batch()
    hidden, head = hidden_and_head(6 * WIDTH)
    loss_fn = PreferenceLossFn(cfg)
    counts = loss_fn.denominators(batch)
    loss, metrics = loss_fn.compute_loss(hidden, head, (), loss_fn.build_layout(microbatch(batch)), counts)
    expected = reference(batch, naive_log_probs(hidden, head, batch), cfg)
    assert torch.allclose(loss, expected, rtol=1e-6)
    for mine, theirs in zip(gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-10)
    total, count = metrics["preference/loss"]
    assert float(total / count) == pytest.approx(float(loss), rel=1e-5)


def test_micro_batches_of_whole_pairs_add_up_in_any_order() -> None:
    batch, (hidden, head) = preference_batch(), hidden_and_head(6 * WIDTH)
    loss_fn = PreferenceLossFn()
    counts = loss_fn.denominators(batch)
    whole, _ = loss_fn.compute_loss(hidden, head, (), loss_fn.build_layout(microbatch(batch)), counts)
    parts = []
    for rows in ([5, 1, 0, 4], [2, 3]):
        own = torch.cat([hidden.reshape(6, WIDTH, -1)[r] for r in rows])
        parts.append(
            loss_fn.compute_loss(own, head, (), loss_fn.build_layout(microbatch(take(batch, rows))), counts)[0]
        )
    assert torch.allclose(torch.stack(parts).sum(), whole, rtol=1e-12)


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 3], [0, 2]])
def test_a_pair_torn_apart_is_refused(rows: list[int]) -> None:
    chosen = sum(row % 2 == 0 for row in rows)
    with pytest.raises(LossError, match=f"{chosen} chosen .*{len(rows) - chosen} rejected"):
        PreferenceLossFn().build_layout(microbatch(take(preference_batch(), rows)))


def test_a_filler_row_takes_no_part() -> None:
    batch = take(preference_batch(), [0])
    batch["sample_mask"] = torch.zeros(1)
    hidden, head = hidden_and_head(WIDTH)
    loss_fn = PreferenceLossFn()
    loss, _ = loss_fn.compute_loss(
        hidden, head, (), loss_fn.build_layout(microbatch(batch)), {"pairs": torch.tensor(3.0)}
    )
    assert loss.item() == 0.0
    assert not gradients(loss, hidden, head)[0].any()


def test_at_the_reference_dpo_is_ln_2_and_pulls_the_sides_apart() -> None:
    batch, (hidden, head) = preference_batch(), hidden_and_head(6 * WIDTH)
    loss_fn = PreferenceLossFn({"kind": "dpo", "beta": 0.5})
    inputs = loss_fn.build_layout(microbatch(batch))
    batch["reference_logprobs"] = response_log_probs(hidden, head, inputs).detach()
    inputs = loss_fn.build_layout(microbatch(batch))
    loss, metrics = loss_fn.compute_loss(hidden, head, (), inputs, loss_fn.denominators(batch))
    assert float(loss) == pytest.approx(math.log(2), rel=1e-6)
    assert float(metrics["preference/accuracy"][0]) == 0.0
    step = torch.autograd.grad(loss, hidden)[0]
    moved = response_log_probs((hidden - 0.05 * step).detach(), head, inputs)
    change = moved - batch["reference_logprobs"]
    assert bool((change[0::2] > change[1::2]).all())


def test_what_is_missing_is_named() -> None:
    batch = preference_batch()
    del batch["reference_logprobs"]
    with pytest.raises(LossError, match="reference_logprobs"):
        PreferenceLossFn().build_layout(microbatch(batch))
    PreferenceLossFn({"kind": "simpo"}).build_layout(microbatch(batch))
    batch["token_mask"][2] = 0
    with pytest.raises(LossError, match="without tokens"):
        PreferenceLossFn({"kind": "simpo"}).build_layout(microbatch(batch))
    ones = torch.ones(2)
    with pytest.raises(LossError, match="lengths"):
        preference_pair_losses(ones, ones, PreferenceLossConfig(kind="simpo"))
    with pytest.raises(LossError, match="reference log-probs"):
        preference_pair_losses(ones, ones, PreferenceLossConfig(kind="dpo"))


@pytest.mark.parametrize("bad", [{"kind": "kto"}, {"beta": 0.0}, {"label_smoothing": 0.5}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PreferenceLossFn(bad)
    with pytest.raises(ConfigError):
        PreferenceLossFn({"kind": "ipo", "label_smoothing": 0.1})
