"""A teacher with the student's vocabulary that ends answers with another token: an end is an end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.in_turn import InTurn
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import get_microbatch_iterator
from limbeck.distributed.comm import Comm
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden
from limbeck.losses.chunk_policy import BEHAVIOR, ChunkPolicyConfig, ChunkPolicyLossFn
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE, ShardedAxis
from tests.losses import reference
from tests.losses.cases import make_batch, make_models, microbatch, run
from tests.losses.test_with_data import CONFIGS

V = 23
ENDS = (3, 7, 20)
BATCH = {k: v for k, v in make_batch(samples=6, seed=31).items() if not k.startswith(("teacher", "alignment"))}
# every row ends with one of the ends
BATCH["input_ids"][torch.arange(6), BATCH["input_lengths"] - 1] = torch.tensor([3, 7, 3, 20, 7, 3])


def loss_fn(ends: Any = ENDS, **cfg: Any) -> CrossTokenizerDistillationLossFn:
    settings = {"ce_loss_scale": 0.0, "block_rows": 6, **cfg}
    return CrossTokenizerDistillationLossFn(settings, projections=[None], ends=[ends])


def one_end(p: Tensor) -> Tensor:
    """Probabilities with the ends as one bucket behind the others."""
    kept = torch.ones(V, dtype=torch.bool).index_fill(0, torch.tensor(ENDS), False)
    return torch.cat((p[kept], p[~kept].sum()[None]))


def with_tail(p: Tensor, kept: Tensor) -> Tensor:
    return torch.cat((p[kept], p[-1:], (1 - p[kept].sum() - p[-1])[None]))


def positions() -> list[tuple[int, int]]:
    """Row of the flat batch that predicts, and what follows it."""
    width, out = BATCH["input_ids"].shape[1], []
    for b in range(6):
        for t in range(1, int(BATCH["input_lengths"][b])):
            if BATCH["token_mask"][b, t] and BATCH["sample_mask"][b] > 0:
                out.append((b * width + t - 1, int(BATCH["input_ids"][b, t])))
    return out


def logits_of(models: Any) -> tuple[Tensor, Tensor]:
    return models.hidden @ models.weight.t(), models.teacher_hidden[0] @ models.teacher_weight[0].t()


@pytest.mark.parametrize("topk", [None, 5])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_the_loss_is_that_of_one_event(direction: str, topk: int | None) -> None:
    models = make_models(BATCH, V, [V], seed=5)
    student, teacher = logits_of(models)
    total, count, tau = student.sum() * 0, 0, 1.5
    for row, _ in positions():
        p_t, p_s = (one_end((side[row] / tau).softmax(-1)) for side in (teacher, student))
        if topk:
            kept = p_t[:-1].topk(topk).indices
            p_t, p_s = with_tail(p_t, kept), with_tail(p_s, kept)
        total, count = total + reference.divergence(p_t, p_s, direction) * tau**2, count + 1
    loss, metrics = run(loss_fn(direction=direction, temperature=tau, topk=topk), BATCH, models)
    torch.testing.assert_close(loss, total / count, rtol=1e-8, atol=1e-10)
    grads = (torch.autograd.grad(x, models.hidden, retain_graph=True)[0] for x in (loss, total / count))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
    assert int(metrics["chunks"][0]) == count


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_a_teacher_that_lists_its_likeliest_tokens(direction: str) -> None:
    models, k = make_models(BATCH, V, [V], seed=5), 6
    student, teacher = logits_of(models)
    total, count, without = student.sum() * 0, 0, 0
    for row, _ in positions():
        p_t, p_s = teacher[row].softmax(-1), student[row].softmax(-1)
        listed = p_t.topk(k).indices
        is_end = torch.isin(listed, torch.tensor(ENDS))
        others, buckets = (
            listed[~is_end],
            [p_t[listed[~is_end]]],
        )
        buckets_s = [p_s[others]]
        if is_end.any():
            buckets.append(p_t[listed[is_end]].sum()[None])
            buckets_s.append(p_s[list(ENDS)].sum()[None])
        without += not is_end.any()
        p_t, p_s = (torch.cat((*b, (1 - torch.cat(b).sum())[None])) for b in (buckets, buckets_s))
        total, count = total + reference.divergence(p_t, p_s, direction), count + 1
    assert 0 < without < count, "lists with and without an end"
    loss, _ = run(loss_fn(direction=direction), BATCH, models, "topk", k=k)
    torch.testing.assert_close(loss, total / count, rtol=1e-8, atol=1e-10)
    grads = (torch.autograd.grad(x, models.hidden, retain_graph=True)[0] for x in (loss, total / count))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)


def test_padded_and_packed_batches_give_the_same_loss() -> None:
    raw = {k: v for k, v in make_batch(samples=7, seed=13).items() if not k.startswith(("teacher", "alignment"))}
    raw["input_ids"][torch.arange(7), raw["input_lengths"] - 1] = 3
    data = BatchedDataDict(raw)
    torch.manual_seed(0)
    body, head, teacher_body = (torch.randn(V, 6, dtype=torch.float64) for _ in range(3))
    body.requires_grad_()
    teacher_head = Head(V, weight=torch.randn(V, 6, dtype=torch.float64))
    fn = loss_fn(gate="soft")
    counts, results = fn.denominators(data), {}
    for name, cfg in CONFIGS.items():
        total: Any = 0.0
        for mine in get_microbatch_iterator(data, cfg, 2, None, None)[0]:
            ids = mine.processed_inputs.input_ids.reshape(-1)
            inputs = fn.build_layout(mine, [mine.processed_inputs.row_start])
            signal = TeacherHidden(teacher_body[ids], teacher_head, ids)
            total = total + fn.compute_loss(body[ids], Head(V, weight=head), [signal], inputs, counts)[0]
        results[name] = (total, *torch.autograd.grad(total, [body]))
    for name in ("dynamic", "packed"):
        for a, b in zip(results[name], results["fixed"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_student_with_its_own_end_is_right_where_its_teacher_ends_otherwise() -> None:
    """A teacher that is the student with two ends exchanged: nothing to learn, and the gate is that of the event."""
    models = make_models(BATCH, V, [V], seed=5)
    order = torch.arange(V)
    order[3], order[7] = 7, 3
    models.teacher_hidden, models.teacher_weight = [models.hidden.detach()], [models.weight.detach()[order]]
    loss, metrics = run(loss_fn(gate="soft"), BATCH, models)
    assert abs(float(loss.detach())) < 1e-12
    assert torch.autograd.grad(loss, models.hidden)[0].abs().max() < 1e-12
    assert float(metrics["teacher_0/gate"][0] / metrics["teacher_0/gate"][1]) == pytest.approx(0.5)
    assert float(metrics["proj_accuracy"][0]) == float(metrics["proj_accuracy"][1])
    assert float(run(loss_fn(()), BATCH, models)[0].detach()) > 1e-3


def test_one_end_changes_nothing() -> None:
    models = make_models(BATCH, V, [V], seed=5)
    plain = CrossTokenizerDistillationLossFn({"ce_loss_scale": 0.0, "block_rows": 6}, projections=[None])
    assert torch.equal(run(plain, BATCH, models)[0], run(loss_fn(()), BATCH, models)[0])


@pytest.mark.parametrize("listed", [False, True])
def test_what_a_teacher_says_of_a_realised_end(listed: bool) -> None:
    log_p = torch.randn(4, V, dtype=torch.float64).log_softmax(-1)
    ids = torch.tensor([7, 5, 3, 20])
    scores = TeacherScores(logits=log_p)
    if listed:
        top = log_p.topk(V)
        picked = log_p.gather(1, ids[:, None]).squeeze(1)
        scores = TeacherScores(topk_ids=top.indices, topk_logprobs=top.values, next_logprob=picked)
    want = log_p[:, list(ENDS)].logsumexp(-1)
    want[1] = log_p[1, 5]
    torch.testing.assert_close(scores.log_prob_of(ids, ends=ENDS), want)
    torch.testing.assert_close(replace(scores).log_prob_of(ids), log_p.gather(1, ids[:, None]).squeeze(1))


def test_the_policy_gradient_goes_by_the_event() -> None:
    """The expected gradient at every position is that of the reverse KL with one end: all tokens in turn, by weight."""
    torch.manual_seed(1)
    log_s = torch.randn(V, dtype=torch.float64).log_softmax(-1).requires_grad_()
    log_t = torch.randn(V, dtype=torch.float64).log_softmax(-1)
    p_s, p_t = one_end(log_s.softmax(-1)), one_end(log_t.exp())
    want = torch.autograd.grad((p_s * (p_s.log() - p_t.log())).sum(), log_s)[0]
    ids = torch.stack((torch.zeros(V, dtype=torch.int64), torch.arange(V)), 1)
    batch: Any = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((V,), 2),
            "token_mask": torch.tensor([[0, 1]] * V),
            "sample_mask": log_s.detach().exp(),
            BEHAVIOR: torch.stack((torch.zeros(V, dtype=torch.float64), log_s.detach()), 1),
        }
    )
    fn = ChunkPolicyLossFn(ChunkPolicyConfig(advantage_clip=None), ends=[ENDS])
    counts = fn.denominators(batch)
    inputs = fn.build_layout(microbatch(batch), [None])
    hidden, flat = (side.expand(2 * V, V) for side in (log_s, log_t))
    signal = TeacherHidden(flat, Head.identity(V), ids.reshape(-1))
    loss, _ = fn.compute_loss(hidden, Head.identity(V), [signal], inputs, counts)
    found = torch.autograd.grad(loss * counts["chunks_0"], log_s)[0]
    torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["hidden", "topk"])
@pytest.mark.parametrize("topk", [None, 5])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_ranks_that_hold_shards_of_the_vocabulary_compute_the_same(direction: str, topk: int | None, kind: str) -> None:
    def outcome(comm: Comm) -> tuple[Tensor, ...]:
        models = make_models(BATCH, V, [V], seed=5)
        models.hidden, whole = models.hidden.detach().clone().requires_grad_(), models.weight.detach()
        axis = ShardedAxis.of_rows(comm, V, V) if comm.size > 1 else WHOLE
        weight = whole[axis.place(V)[0] : axis.place(V)[1]].clone().requires_grad_()
        head = Head(V, weight=weight, axis=axis)
        loss, _ = run(loss_fn(direction=direction, topk=topk, gate="soft"), BATCH, models, kind, head, k=6)
        return loss.detach(), *torch.autograd.grad(loss, [models.hidden, weight])

    want = outcome(Comm.alone())
    ranks = InTurn(2).run(outcome)
    for found in ranks:
        torch.testing.assert_close(found[:2], want[:2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([found[2] for found in ranks]), want[2], rtol=1e-9, atol=1e-12)
