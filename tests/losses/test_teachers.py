"""Several teachers, same-vocabulary teachers, dynamic scaling, the published call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.errors import ConfigError, LossError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden, TeacherLogits
from limbeck.losses.objectives.h_kl import HKL
from limbeck.losses.objectives.p_kl import PKL
from tests.distributed.cases import Case, close, step
from tests.helpers.tiny import TEXTS
from tests.losses import reference
from tests.losses.cases import make_batch, make_models, make_projection, microbatch, run, starts

V_S, V_T = 23, 31
BATCH = make_batch(samples=5, seed=31, teachers=2)
PLAIN = {k: v for k, v in BATCH.items() if not k.startswith(("teacher", "alignment"))}
PROJECTIONS = [make_projection(V_S, V_T, seed=s) for s in range(2)]


def two(**cfg: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "ce_loss_scale": 0.0, "block_rows": 6, **cfg}, projections=PROJECTIONS
    )


@pytest.fixture
def models() -> Any:
    return make_models(BATCH, V_S, [V_T, V_T], seed=9)


def per_sample(models: Any) -> list[list[Tensor]]:
    """boundary_kl of each teacher on each sample alone, divided by that teacher's chunks in the whole batch."""
    logits = (models.hidden @ models.weight.t()).view(*BATCH["input_ids"].shape, -1)
    out = []
    for i in range(2):
        ids = BATCH[f"teacher_{i}_input_ids"]
        teacher = (models.teacher_hidden[i] @ models.teacher_weight[i].t()).view(*ids.shape, -1)
        chunks = len(reference.chunks_of(BATCH, i))
        row = []
        for b in range(5):
            alone = dict(
                BATCH, sample_mask=torch.zeros(5).index_fill(0, torch.tensor([b]), float(BATCH["sample_mask"][b]))
            )
            row.append(reference.kd("boundary_kl", alone, logits, teacher, PROJECTIONS[i].dense(), i=i)[0] / chunks)
        out.append(row)
    return out


def plain_scores(models: Any, kind: str) -> Tensor:
    """Scores `[2, B]` by loops: per student token for -ce, per teacher token otherwise."""
    out = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    for i in range(2):
        ids = BATCH[f"teacher_{i}_input_ids"]
        log_p = (models.teacher_hidden[i] @ models.teacher_weight[i].t()).view(*ids.shape, -1).log_softmax(-1)
        for b in range(5):
            chunks = [c for c in reference.chunks_of(BATCH, i) if c[0] == b]
            rows = [(t - 1, int(ids[b, t])) for _, _, z in chunks for t in z]
            if not rows:
                continue
            if kind == "ce":
                out[i, b] = sum(log_p[b, r, j] for r, j in rows) / sum(len(a) for _, a, _ in chunks)
            elif kind == "entropy":
                out[i, b] = sum((log_p[b, r].exp() * log_p[b, r]).sum() for r, _ in rows) / len(rows)
            else:
                out[i, b] = sum(log_p[b, r].max().exp() for r, _ in rows) / len(rows)
    return out


def test_static_weights(models: Any) -> None:
    parts = per_sample(models)
    loss, metrics = run(two(teacher_weights=[0.8, 0.2]), BATCH, models)
    want = 0.8 * sum(parts[0]) + 0.2 * sum(parts[1])
    torch.testing.assert_close(loss, want, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(metrics["kl_loss"][0], want.detach(), rtol=1e-7, atol=1e-9)
    grads = (torch.autograd.grad(x, models.hidden)[0] for x in (loss, want))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    equal, _ = run(two(), BATCH, models)
    torch.testing.assert_close(equal, 0.5 * sum(parts[0]) + 0.5 * sum(parts[1]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["ce", "entropy", "max_prob"])
def test_scored_weights(kind: str, models: Any) -> None:
    parts, scores = per_sample(models), plain_scores(models, kind)
    weights = (scores * 2.5).softmax(0).nan_to_num(0)
    want = sum(weights[i, b] * parts[i][b] for i in range(2) for b in range(5))
    loss, metrics = run(two(teacher_scoring=kind, scoring_alpha=2.5), BATCH, models)
    torch.testing.assert_close(loss, want, rtol=1e-7, atol=1e-9)
    assert 0 < float(metrics["teacher_0/weight"][0]) < float(metrics["teacher_0/weight"][1])


def test_scores_of_topk_teachers(models: Any) -> None:
    """With the whole vocabulary listed, a top-k teacher is scored as the live one."""
    for kind in ("ce", "entropy", "max_prob"):
        a, _ = run(two(mode="alm", teacher_scoring=kind), BATCH, models)
        b, _ = run(two(mode="alm", teacher_scoring=kind), BATCH, models, "topk", k=V_T)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_select_teacher(models: Any) -> None:
    parts, scores = per_sample(models), plain_scores(models, "ce")
    want = sum(parts[int(scores[:, b].argmax())][b] for b in range(5))
    loss, _ = run(two(teacher_combination="select_teacher"), BATCH, models)
    torch.testing.assert_close(loss, want, rtol=1e-7, atol=1e-9)


# ---- an objective for each ----

OWN = [PKL.Config(vocab_topk=9), HKL.Config(uncommon_topk=6)]


def test_two_objectives_are_the_sum_of_the_two_losses(models: Any) -> None:
    """In float64, by the reference; P-KL's columns are those of one micro-batch."""
    logits = (models.hidden @ models.weight.t()).view(*BATCH["input_ids"].shape, -1)
    want, parts = logits.sum() * 0, []
    options = [("p_kl", {"vocab_topk": 9}), ("h_kl", {"uncommon_topk": 6})]
    for i, (mode, own) in enumerate(options):
        ids = BATCH[f"teacher_{i}_input_ids"]
        teacher = (models.teacher_hidden[i] @ models.teacher_weight[i].t()).view(*ids.shape, -1)
        dense = PROJECTIONS[i].dense()
        total, chunks = reference.kd(mode, BATCH, logits, teacher, dense, i=i, exact_only=False, **own)
        parts.append(total / chunks)
        want = want + [0.8, 0.2][i] * parts[-1]
    settings = {"mode": "tree_kl", "ce_loss_scale": 0.0, "block_rows": 6, "teacher_weights": [0.8, 0.2]}
    fn = CrossTokenizerDistillationLossFn(settings, projections=PROJECTIONS, teacher_objectives=OWN)
    assert [objective.mode for objective in fn.objectives] == ["p_kl", "h_kl"]
    loss, metrics = run(fn, BATCH, models)
    torch.testing.assert_close(loss, want, rtol=1e-7, atol=1e-9)
    for mine, theirs in zip(
        torch.autograd.grad(loss, [models.hidden, models.weight]),
        torch.autograd.grad(want, [models.hidden, models.weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    for i, part in enumerate(parts):
        total, number = metrics[f"teacher_{i}/kl_loss"]
        torch.testing.assert_close(total / number, part.detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layout", [{"mbs": 1}, {"mbs": 4}, {"packed": True}], ids=["rows of 1", "rows of 4", "packed"])
def test_two_objectives_in_every_layout(layout: dict[str, Any]) -> None:
    """P-KL on all columns, since its choice of some depends on what shares a micro-batch."""
    own = [PKL.Config(), HKL.Config(uncommon_topk=50)]
    rows = tuple(range(len(TEXTS)))
    cases = [Case(teachers=("cross", "cross")), Case(teachers=("cross", "cross"), **layout)]
    wanted, found = (step(case, {}, rows, objectives=own) for case in cases)
    assert wanted["metrics"].keys() >= {"teacher_0/proj_accuracy", "teacher_1/uncommon_l1"}
    for name in ("loss", "grad_norm"):
        close(found[name], wanted[name], name)
    for name, value in wanted["gradients"].items():
        close(found["gradients"][name], value, name, floor=1e-7)


def same(count: int = 1, **cfg: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "ce_loss_scale": 0.0, "block_rows": 6, **cfg}, projections=[None] * count
    )


def same_reference(student: Tensor, teacher: Tensor, direction: str, tau: float = 1.0) -> tuple[Tensor, int]:
    total, count = student.sum() * 0, 0
    width = PLAIN["input_ids"].shape[1]
    for b in range(5):
        for t in range(1, int(PLAIN["input_lengths"][b])):
            if PLAIN["token_mask"][b, t] and PLAIN["sample_mask"][b] > 0:
                row = b * width + t - 1
                p_t, p_s = (teacher[row] / tau).softmax(-1), (student[row] / tau).softmax(-1)
                total, count = total + reference.divergence(p_t, p_s, direction) * tau**2, count + 1
    return total, count


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_same_vocabulary_teacher(direction: str) -> None:
    models = make_models(PLAIN, V_S, [V_S], seed=5)
    logits, teacher = models.hidden @ models.weight.t(), models.teacher_hidden[0] @ models.teacher_weight[0].t()
    want, count = same_reference(logits, teacher, direction, 1.5)
    loss, metrics = run(same(direction=direction, temperature=1.5), PLAIN, models)
    torch.testing.assert_close(loss, want / count, rtol=1e-8, atol=1e-10)
    assert int(metrics["chunks"][0]) == count == int(same().denominators(PLAIN)["chunks_0"])
    grads = (torch.autograd.grad(x, models.hidden)[0] for x in (loss, want / count))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
    zero, _ = run(same(direction=direction), PLAIN, _copied(models))
    assert abs(float(zero.detach())) < 1e-12


def _copied(models: Any) -> Any:
    models.teacher_hidden, models.teacher_weight = [models.hidden.detach()], [models.weight.detach()]
    return models


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_same_vocabulary_topk_teacher(direction: str) -> None:
    models = make_models(PLAIN, V_S, [V_S], seed=5)
    listed, _ = run(same(direction=direction), PLAIN, models, "topk", k=4)
    chosen, _ = run(same(direction=direction, topk=4), PLAIN, models)
    torch.testing.assert_close(listed, chosen, rtol=1e-8, atol=1e-10)
    with pytest.raises(LossError, match="topk_by='student'"):
        run(same(topk=4, topk_by="student"), PLAIN, models, "topk")


def test_same_vocabulary_in_another_context() -> None:
    """A teacher that reads the same target ids behind a longer prefix: aligned one to one, no projection."""
    prefix, ids = 3, PLAIN["input_ids"]
    shifted = torch.cat((torch.zeros(5, prefix, dtype=torch.int64), ids), 1)
    position = torch.arange(ids.shape[1]).repeat(5, 1)
    inside = (position >= 2) & (position < PLAIN["input_lengths"][:, None])
    chunk = torch.where(inside, position - 2, -1)
    batch = {
        **PLAIN,
        "teacher_0_input_ids": shifted,
        "teacher_0_input_lengths": PLAIN["input_lengths"] + prefix,
        "alignment_0_student_chunk_id": chunk,
        "alignment_0_teacher_chunk_id": torch.nn.functional.pad(chunk, (prefix, 0), value=-1),
        "alignment_0_pair_valid": torch.ones_like(ids, dtype=torch.bool),
        "alignment_0_pair_is_correct": torch.ones_like(ids, dtype=torch.bool),
    }
    hidden = torch.randn(*ids.shape, 7, dtype=torch.float64)
    weight = torch.randn(V_S, 7, dtype=torch.float64)
    teacher = torch.cat((torch.randn(5, prefix, 7, dtype=torch.float64), hidden), 1).flatten(0, 1)
    fn = same()
    inputs = fn.build_layout(microbatch(batch), [starts(shifted)])
    head = Head(V_S, weight=weight)
    signal = TeacherHidden(teacher, head, shifted.reshape(-1))
    loss, metrics = fn.compute_loss(hidden.flatten(0, 1), head, [signal], inputs, fn.denominators(batch))
    assert abs(float(loss)) < 1e-12
    assert float(metrics["chunks"][0]) > 10


def test_averaged_logits() -> None:
    models = make_models(PLAIN, V_S, [V_S, V_S], seed=6)
    logits = models.hidden @ models.weight.t()
    full = [h @ w.t() for h, w in zip(models.teacher_hidden, models.teacher_weight, strict=True)]
    want, count = same_reference(logits, 0.75 * full[0] + 0.25 * full[1], "forward")
    fn = same(2, teacher_combination="averaged_logits", teacher_weights=[3.0, 1.0])
    loss, _ = run(fn, PLAIN, models)
    torch.testing.assert_close(loss, want / count, rtol=1e-8, atol=1e-10)
    with pytest.raises(LossError, match="teacher_combination"):
        run(fn, PLAIN, models, "topk")
    with pytest.raises(ConfigError, match="'averaged_logits'"):
        CrossTokenizerDistillationLossFn({"teacher_combination": "averaged_logits"}, projections=[None, PROJECTIONS[0]])
    with pytest.raises(LossError, match=r"teacher_1 .*teacher_0"):
        run(two(teacher_combination="averaged_logits"), BATCH, make_models(BATCH, V_S, [V_T, V_T]))


def test_dynamic_scaling_is_one_number_per_step(models: Any) -> None:
    cfg = {"mode": "boundary_kl", "dynamic_loss_scaling": True, "dynamic_scaling_decay": 0.5}
    fn = CrossTokenizerDistillationLossFn(cfg, projections=PROJECTIONS)
    loss, metrics = run(fn, BATCH, models)
    kd, ce = (float(metrics[n][0] / metrics[n][1]) for n in ("kl_loss", "ce_loss"))
    assert float(loss.detach()) == pytest.approx(kd + ce)  # no estimate yet: the ratio is 1
    fn.step_end(metrics)
    again, _ = run(fn, BATCH, models)
    assert float(again.detach()) == pytest.approx(2 * ce)  # sg(CE / KD) KD + CE
    fn.step_end({"kl_loss": (10 * kd, 1), "ce_loss": (ce, 1)})
    third, _ = run(fn, BATCH, models)
    ratio = ce / (5.5 * kd)
    assert float(third.detach()) == pytest.approx(ratio * kd + ce)
    restored = CrossTokenizerDistillationLossFn(cfg, projections=PROJECTIONS)
    restored.load_state_dict(fn.state_dict())
    assert restored.scale.ratio() == fn.scale.ratio() == pytest.approx(ratio)
    with pytest.raises(LossError, match="finite"):
        fn.step_end({"kl_loss": (float("nan"), 1), "ce_loss": (1.0, 1)})


def test_published_call_equals_compute() -> None:
    models = make_models(BATCH, V_S, [V_T], seed=1)
    fn = CrossTokenizerDistillationLossFn({"gold_loss": False, "vocab_topk": 9}, projections=PROJECTIONS[:1])
    want, _ = run(fn, BATCH, models)
    logits = (models.hidden @ models.weight.t()).view(*BATCH["input_ids"].shape, -1)
    teacher = (models.teacher_hidden[0] @ models.teacher_weight[0].t()).view(*BATCH["teacher_input_ids"].shape, -1)
    tokens = fn.denominators(BATCH)["tokens"]
    loss, metrics = fn(BATCH, torch.tensor(5), tokens, logits, teacher)
    torch.testing.assert_close(loss, want)
    a, b = (torch.autograd.grad(x, models.weight)[0] for x in (loss, want))
    torch.testing.assert_close(a, b)
    assert {"loss", "kl_loss", "ce_loss", "accuracy", "proj_accuracy", "chunks", "tokens"} <= metrics.keys()
    half, _ = fn(BATCH, None, 2 * tokens, logits, teacher, global_valid_chunks=[2 * fn.denominators(BATCH)["chunks_0"]])
    torch.testing.assert_close(half, want / 2)


def test_no_teacher_is_plain_cross_entropy() -> None:
    models = make_models(PLAIN, V_S, [])
    fn = CrossTokenizerDistillationLossFn({}, projections=[])
    loss, metrics = run(fn, PLAIN, models)
    ce, tokens = reference.ce(PLAIN, (models.hidden @ models.weight.t()).view(*PLAIN["input_ids"].shape, -1))
    torch.testing.assert_close(loss, ce / tokens)
    assert "kl_loss" not in metrics
    fn.step_end(metrics)


def test_misalignment_is_reported_by_the_step() -> None:
    size = 6
    batch = {k: v[:1] for k, v in PLAIN.items()}
    rows = batch["input_ids"].numel()
    batch["input_ids"] = batch["input_ids"] % size
    student, teacher = torch.zeros(rows, size), torch.zeros(rows, size)
    student[:, 0], teacher[:, 1] = 80.0, 80.0
    fn = same(direction="jsd", jsd_patience=2)
    inputs = fn.build_layout(microbatch(batch), [None])
    signal = TeacherLogits(teacher, batch["input_ids"].reshape(-1))
    _, metrics = fn.compute_loss(student, Head.identity(size), [signal], inputs, fn.denominators(batch))
    with pytest.warns(UserWarning, match="misaligned"):
        fn.step_end(metrics)
    with pytest.raises(LossError, match="for 2 steps"):
        fn.step_end(metrics)


def test_a_resumed_run_remembers_how_long_jsd_was_at_its_maximum() -> None:
    settings = {"direction": "jsd", "jsd_patience": 2}
    worst = {"kl_loss": (0.69, 1.0), "ce_loss": (1.0, 1.0)}
    first, resumed = (CrossTokenizerDistillationLossFn(settings, projections=[None]) for _ in range(2))
    with pytest.warns(UserWarning, match="misaligned"):
        first.step_end(worst)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(LossError, match="for 2 steps"):
        resumed.step_end(worst)
    old = {name: value for name, value in first.state_dict().items() if name != "guard.seen"}
    resumed.load_state_dict(old)  # a checkpoint of an earlier version
    assert resumed.guard.seen == 0
