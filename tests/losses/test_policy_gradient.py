"""GRPO, Dr. GRPO and the reward-weighted likelihood against float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from limbeck.data.layout import TokenLayout
from limbeck.errors import ConfigError, LossError
from limbeck.losses.blocks import token_log_probs
from limbeck.losses.policy_gradient import (
    PolicyGradientLossFn,
    group_advantages,
    policy_token_losses,
)
from tests.losses.trace_cases import (
    WIDTH,
    gradients,
    hidden_and_head,
    microbatch,
    naive_log_probs,
    naive_logits,
    policy_batch,
    take,
)


def reference(batch: dict[str, Any], log_p: Tensor, mode: str, divisor: float = 64.0) -> Tensor:
    """The whole loss with plain loops over sequences and tokens."""
    total, sequences, weights = log_p.new_zeros(()), 0, 0.0
    rewards = batch["rewards"].double()
    for b in range(len(rewards)):
        if batch["sample_mask"][b] == 0:
            continue
        group = [i for i in range(len(rewards)) if batch["group_index"][i] == batch["group_index"][b]]
        group = [i for i in group if batch["sample_mask"][i] > 0]
        mean = rewards[group].mean()
        advantage = rewards[b] - mean
        if mode == "grpo":
            advantage = advantage / (rewards[group].std(correction=0) + 1e-6)
        tokens = [t for t in range(1, int(batch["input_lengths"][b])) if batch["token_mask"][b, t]]
        sequences += 1
        for t in tokens:
            weight = batch["response_weights"][b, t].double()
            if mode == "reward_weighted":
                loss = -log_p[b, t] * advantage
                weights += float(weight)
            else:
                ratio = (log_p[b, t] - batch["behavior_logprobs"][b, t].double()).exp()
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + loss * weight / (len(tokens) if mode == "grpo" else 1)
    count = {"grpo": sequences, "dr_grpo": sequences * divisor, "reward_weighted": weights}[mode]
    return total / count


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "reward_weighted"])
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient(mode: Any, seed: int) -> None:
    batch = policy_batch(seed=seed)
    hidden, head = hidden_and_head(6 * WIDTH, seed)
    loss_fn = PolicyGradientLossFn({"mode": mode, "divisor": 64.0}, block_rows=4)
    loss_fn.prepare_batch(batch)
    assert loss_fn.active.mode == mode
    counts = loss_fn.denominators(batch)
    loss, metrics = loss_fn.compute_loss(hidden, head, (), loss_fn.build_layout(microbatch(batch)), counts)
    expected = reference(batch, naive_log_probs(hidden, head, batch), mode)
    # Rewards and weights are float32, so sums over them agree to that.
    assert torch.allclose(loss, expected, rtol=2e-5)
    for mine, theirs in zip(gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True):
        assert torch.allclose(mine, theirs, rtol=2e-5, atol=1e-7)
    total, count = metrics["policy/loss"]
    assert float(total / count) == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "reward_weighted"])
def test_micro_batches_add_up(mode: Any) -> None:
    batch = policy_batch()
    hidden, head = hidden_and_head(6 * WIDTH)
    loss_fn = PolicyGradientLossFn({"mode": mode})
    loss_fn.prepare_batch(batch)
    counts = loss_fn.denominators(batch)
    whole, _ = loss_fn.compute_loss(hidden, head, (), loss_fn.build_layout(microbatch(batch)), counts)
    parts = []
    for rows in ([4, 0], [1, 5, 2], [3]):
        own = torch.cat([hidden.reshape(6, WIDTH, -1)[r] for r in rows])
        inputs = loss_fn.build_layout(microbatch(take(batch, rows)))
        parts.append(loss_fn.compute_loss(own, head, (), inputs, counts)[0])
    assert torch.allclose(torch.stack(parts).sum(), whole, rtol=1e-12)


def test_the_mode_is_named_for_what_it_is() -> None:
    batch = policy_batch()
    loss_fn = PolicyGradientLossFn()
    loss_fn.prepare_batch(dict(batch))
    assert loss_fn.active.mode == "dr_grpo"
    ungrouped = {**batch, "group_index": torch.full((6,), -1)}
    unscored = {**batch, "behavior_valid": torch.zeros_like(batch["behavior_valid"])}
    for lacking, what in ((ungrouped, "groups"), (unscored, "behaviour log-probs")):
        loss_fn.prepare_batch(dict(lacking))
        assert loss_fn.active.mode == "reward_weighted"
        for mode in ("grpo", "dr_grpo"):
            with pytest.raises(LossError, match=what):
                PolicyGradientLossFn({"mode": mode}).prepare_batch(dict(lacking))
    loss_fn.prepare_batch(ungrouped)
    assert torch.equal(ungrouped["advantages"], ungrouped["rewards"] * ungrouped["sample_mask"])


def test_advantages_have_no_std_and_sum_to_zero() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 7.0, 3.0])
    groups = torch.tensor([4, 4, 4, 9, -1, 9])
    valid = torch.tensor([1, 1, 1, 1, 1, 0])
    found = group_advantages(rewards, groups, valid=valid)
    assert torch.allclose(found, torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.0, 7.0, 0.0]))
    scaled = group_advantages(rewards, groups, std=True)
    std = rewards[:3].std(correction=0)
    assert torch.allclose(scaled[:3], found[:3] / (std + 1e-6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(-1, 3)), min_size=1, max_size=12))
def test_group_advantages_are_centred(rows: list[tuple[float, int]]) -> None:
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    groups = torch.tensor([g for _, g in rows])
    found = group_advantages(rewards, groups)
    for group in groups.unique():
        member = groups == group
        if group < 0:
            assert torch.equal(found[member], rewards[member])
        else:
            assert abs(float(found[member].sum())) < 1e-9


def test_clipping_stops_the_gradient_only_where_it_should() -> None:
    behavior = torch.zeros(4, dtype=torch.float64)
    log_p = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    losses, metrics = policy_token_losses(log_p, advantage, behavior)
    (grad,) = torch.autograd.grad(losses.sum(), log_p)
    # A good token that is already likelier, and a bad one that is already less likely, are left alone.
    assert (grad == 0).tolist() == [True, False, False, True]
    assert float(metrics["clip_fraction"][0]) == 2.0
    on_policy, _ = policy_token_losses(log_p, advantage, log_p.detach())
    assert torch.allclose(on_policy, -advantage)


def test_token_log_probs_in_blocks() -> None:
    hidden, head = hidden_and_head(12)
    rows, ids = torch.tensor([1, 2, 5, 7, 11]), torch.tensor([3, 0, 16, 4, 4])
    tokens = TokenLayout(rows, ids, torch.ones(5))
    weight = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for block in (1, 2, 100):
        expected = torch.log_softmax(naive_logits(hidden, head), -1)[rows, ids]
        found = token_log_probs(hidden, head, tokens, block_rows=block)
        assert torch.allclose(found, expected, rtol=1e-12)
        # Not a plain sum: the gradient must follow whatever a loss does with the values.
        pairs = zip(
            gradients((found.exp() * weight).sum() ** 2, hidden, head),
            gradients((expected.exp() * weight).sum() ** 2, hidden, head),
            strict=True,
        )
        for mine, theirs in pairs:
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
    empty = TokenLayout(rows[:0], ids[:0], torch.zeros(0))
    assert not gradients(token_log_probs(hidden, head, empty).sum(), hidden, head)[0].any()


def test_ids_and_rows_out_of_range_are_refused() -> None:
    hidden, head = hidden_and_head(3)
    for row, token in ((3, 0), (0, 17)):
        layout = TokenLayout(torch.tensor([row]), torch.tensor([token]), torch.ones(1))
        with pytest.raises(LossError):
            token_log_probs(hidden, head, layout)


def test_a_batch_that_was_not_annotated_is_refused() -> None:
    with pytest.raises(LossError, match="prepare_batch"):
        PolicyGradientLossFn().build_layout(microbatch(policy_batch()))


@pytest.mark.parametrize(
    "settings_", [{"mode": "ppo"}, {"clip_low": 0.0}, {"divisor": -1.0}, {"normalisation": "mean"}, {"clip_high": 0.0}]
)
def test_bad_settings_are_refused(settings_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PolicyGradientLossFn(settings_)
