"""One step over the three channels: against plain float64 formulas, however it is cut, and with channels off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from limbeck.algorithms.trace_distillation import TraceRun, setup
from limbeck.data.microbatch import plan_microbatches
from limbeck.errors import LossError
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from tests.helpers.trace_runs import config

SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}
ALL = {"policy": 0.7, "hint": 1.3, "preference": 0.4}


def made(where: Path, **more: Any) -> TraceRun:
    """A run in float64 whose optimizer moves the weights by exactly minus the gradient."""
    policy = {"optimizer": SGD, "max_grad_norm": None, **more.pop("policy", {})}
    run = setup(config(where, policy=policy, **more))
    run.logger.close()
    run.student.model.double()
    # A teacher that differs from the student, so that no term is zero.
    torch.manual_seed(1)
    for source in run.step.teachers:
        if source.policy is not run.student:
            source.policy.model.double()
            for p in source.policy.model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
    return run


def weights(run: TraceRun) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in run.student.model.named_parameters()}


def gradients(run: TraceRun, batch: Any, factors: dict[str, float]) -> tuple[float, dict[str, torch.Tensor]]:
    before = weights(run)
    result = run.step(batch, factors)
    return result["loss"], {n: before[n] - p.detach() for n, p in run.student.model.named_parameters()}


def batch_of(run: TraceRun) -> Any:
    return run.loader.collate_fn([run.loader.dataset[i] for i in range(len(run.loader.dataset))])


def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [B, T, V]: entry t is about the token at t."""
    logits = model(input_ids=ids).logits.double()
    return F.pad(torch.log_softmax(logits, -1)[:, :-1], (0, 0, 1, 0))


def plain_loss(run: TraceRun, batch: Any, factors: dict[str, float], share: float = 0.0) -> torch.Tensor:
    """The objective from full logits, formula by formula; sums over rows in Python."""
    model = run.student.model
    # policy: reward-weighted log-likelihood per token
    mask = (batch["response_mask"] > 0) & (batch["sample_mask"] > 0)[:, None]
    log_p = log_probs(model, batch["input_ids"]).gather(2, batch["input_ids"][..., None])[..., 0]
    policy = -(log_p * batch["advantages"].double()[:, None] * batch["response_weights"].double())[mask].sum()
    policy = policy / batch["response_weights"].double()[mask].sum()
    # hint: reverse KL at the target tokens, mean within a site, then over sites
    student = log_probs(model, batch["sdpo_student_input_ids"])
    teachers = [log_probs(s.policy.model, batch["ctx_teacher_input_ids"]).detach() for s in run.step.teachers]
    hint = torch.zeros((), dtype=torch.float64)
    for i, weight in enumerate(batch["site_weight"].double()):
        keep = batch["student_response_valid"][i]
        s = student[i, batch["student_response_idx"][i][keep]]
        parts = [t[i, batch["teacher_response_idx"][i][keep]] for t in teachers]
        t = parts[0] if not share else torch.log_softmax((1 - share) * parts[0] + share * parts[1], -1)
        hint = hint + weight * (s.exp() * (s - t)).sum(-1).mean()
    hint = hint / batch["site_weight"].double().sum()
    # preference: DPO against the log-probs of the start
    sides = []
    for side in ("chosen", "rejected"):
        ids = batch[f"dpo_{side}_input_ids"]
        own = log_probs(model, ids).gather(2, ids[..., None])[..., 0]
        sides.append((own * batch[f"dpo_{side}_response_mask"]).sum(1))
    reference = run.step.reference.values[run.step.reference._places(batch)]
    margin = sides[0] - reference[:, 0] - sides[1] + reference[:, 1]
    preference = -(F.logsigmoid(0.1 * margin) * batch["dpo_weights"].double()).sum() / batch["dpo_weights"].sum()
    return factors["policy"] * policy + factors["hint"] * hint + factors["preference"] * preference


@pytest.mark.parametrize("teacher", ["frozen", "trust_region"])
def test_a_whole_step_is_the_plain_formula(tmp_path: Path, teacher: str) -> None:
    run = made(tmp_path, loss={"hint": {"self_teacher": teacher, "trust_region": 0.3}})
    batch = batch_of(run)
    assert len(batch["site_weight"]) == 2
    assert len(batch["dpo_weights"]) == 2
    expected = plain_loss(run, batch, ALL, share=0.3 if teacher == "trust_region" else 0.0)
    names = [n for n, _ in run.student.model.named_parameters()]
    grads = torch.autograd.grad(expected, list(run.student.model.parameters()))
    loss, found = gradients(run, batch, ALL)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, grad in zip(names, grads, strict=True):
        # chunk weights and counts travel in float32
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7)


LAYOUTS = {
    "one": {"train_micro_batch_size": 1},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 1100}},
    "packed": {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 1100},
        "attn_implementation": "sdpa",
    },
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_step_does_not_depend_on_how_it_is_cut(tmp_path: Path, layout: str) -> None:
    whole = made(tmp_path, policy={"train_micro_batch_size": 8})
    loss, expected = gradients(whole, batch_of(whole), ALL)
    cut = made(tmp_path, policy=LAYOUTS[layout])
    other, found = gradients(cut, batch_of(cut), ALL)
    assert other == pytest.approx(loss, rel=1e-6)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7)


def test_pairs_stay_whole_in_every_plan(tmp_path: Path) -> None:
    run = made(tmp_path, policy=LAYOUTS["dynamic"])
    plan = plan_microbatches(batch_of(run).channel("preference"), run.student.cfg, 2, group_size=2)
    assert sorted(row for rows in plan for row in rows) == [0, 1, 2, 3]
    assert all(rows[i] % 2 == 0 and rows[i + 1] == rows[i] + 1 for rows in plan for i in range(0, len(rows), 2))


def test_without_alpha_and_beta_it_is_the_plain_objective_bit_for_bit(tmp_path: Path) -> None:
    adam = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}}
    run = setup(config(tmp_path, policy=adam))
    plain = setup(config(tmp_path, policy=adam))
    batch = batch_of(run)
    loss_fn = PolicyGradientLossFn(run.loss_fn.policy.cfg, block_rows=run.loss_fn.policy.block_rows)
    for _ in range(2):
        run.step(batch, {"policy": 1.0, "hint": 0.0, "preference": 0.0}, monitored=True)
        channel = batch.channel("policy")
        loss_fn.prepare_batch(channel)
        plain.student.train(channel, loss_fn)
    assert any(len(batch[key]) for key in ("site_weight", "dpo_weights"))
    for name, value in weights(run).items():
        assert torch.equal(value, weights(plain)[name])


def test_a_run_with_zero_weights_is_the_run_without_the_channels(tmp_path: Path) -> None:
    from limbeck.algorithms.trace_distillation import train

    ends = []
    for switches in (
        {"loss": {"alpha": 0.0, "beta": 0.0}},
        {"traces": {"channels": {"hint": False, "preference": False}}},
    ):
        run = setup(config(tmp_path, distillation={"max_num_steps": 2}, **switches))
        assert not run.step.teachers
        assert run.step.reference is None
        train(run)
        ends.append(weights(run))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_reference_log_probs_belong_to_their_tokens(tmp_path: Path) -> None:
    run = setup(config(tmp_path))
    batch = batch_of(run)
    batch["dpo_chosen_input_ids"][0, 3] += 1
    with pytest.raises(LossError, match="other tokens"):
        run.step(batch, ALL)


def test_the_average_follows_the_student(tmp_path: Path) -> None:
    run = setup(config(tmp_path, loss={"hint": {"self_teacher": "ema", "ema_decay": 0.75}}))
    start = weights(run)
    run.step(batch_of(run), ALL)
    now, average = weights(run), run.step.teachers[0].state_dict()["ema"]
    for name, value in average.items():
        torch.testing.assert_close(value, 0.75 * start[name] + 0.25 * now[name])


def test_a_live_teacher_leaves_the_student_in_training(tmp_path: Path) -> None:
    run = setup(config(tmp_path, loss={"hint": {"self_teacher": "live"}}))
    seen = []
    run.student.body.register_forward_hook(lambda module, *_: seen.append(module.training))
    before = weights(run)
    run.step(batch_of(run), {"policy": 0.0, "hint": 1.0, "preference": 0.0})
    # teacher and student take turns; the student's pass must not inherit the teacher's mode
    assert seen == [False, True]
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())


@pytest.mark.parametrize("divergence", ["jsd", "reverse"])
def test_disjoint_sides_stop_the_run(tmp_path: Path, divergence: str) -> None:
    run = setup(config(tmp_path, loss={"hint": {"divergence": divergence}}))
    with torch.no_grad():
        head = run.student.model.lm_head.weight.mul_(300)
        run.step.teachers[0].policy.model.lm_head.weight.copy_(-head)
    with pytest.raises(LossError, match="maximum"):
        run.step(batch_of(run), {"policy": 0.0, "hint": 1.0, "preference": 0.0}, monitored=True)


def test_a_shifted_batch_stops_before_any_gradient(tmp_path: Path) -> None:
    run = setup(config(tmp_path))
    batch = batch_of(run)
    batch["sdpo_alignment_teacher_chunk_id"] = batch["sdpo_alignment_teacher_chunk_id"].roll(1, 1)
    before = weights(run)
    with pytest.raises(LossError, match="ids"):
        run.step(batch, {"policy": 0.0, "hint": 1.0, "preference": 0.0})
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())
