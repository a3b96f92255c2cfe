"""The hint loss: per-site means, directions, self-teachers, and what happens when rows are shifted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from limbeck.align import AlignmentBatch, Chunks
from limbeck.errors import ConfigError, LossError
from limbeck.losses import Head, TeacherHidden, TeacherLogits, TeacherTopK
from limbeck.losses.hint import (
    HintDistillationLossFn,
    HintLossConfig,
    ema_update,
)
from tests.losses.cases import make_projection
from tests.losses.trace_cases import HIDDEN, VOCAB, gradients, hidden_and_head, microbatch, naive_logits, take

CONFIGS = {
    "reverse": HintLossConfig(divergence="reverse"),
    "forward": HintLossConfig(divergence="forward"),
    "forward clipped": HintLossConfig(divergence="forward", entry_clip=0.05),
    "jsd": HintLossConfig(divergence="jsd"),
    "student top-k": HintLossConfig(divergence="reverse", topk=4, topk_by="student"),
    "teacher top-k": HintLossConfig(divergence="reverse", topk=4, topk_by="teacher"),
}
LENGTHS = [(6, 9, 3), (8, 10, 1), (7, 7, 4)]
"""Student length, teacher length and target tokens of each site."""


def hint_batch(weights: tuple[float, ...] = (1.0, 0.5, 2.0), seed: int = 0) -> dict[str, Any]:
    """Sites whose sequences end with the same target ids on both sides, right padded."""
    g = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randint(0, VOCAB, (3, width), generator=g) for width in (9, 11))
    chunks = []
    for row, (ls, lt, k) in enumerate(LENGTHS):
        target = torch.randint(0, VOCAB, (k,), generator=g)
        student[row, ls - k : ls], teacher[row, lt - k : lt] = target, target
        places = [torch.arange(n - k, n).numpy() for n in (ls, lt)]
        flat = torch.zeros(k, dtype=torch.int64).numpy()
        true = torch.ones(k, dtype=torch.bool).numpy()
        chunks.append(Chunks(places[0], places[0] + 1, places[1], places[1] + 1, flat, flat, true, ~true, true))
    return {
        "input_ids": student,
        "input_lengths": torch.tensor([x[0] for x in LENGTHS]),
        "token_mask": torch.zeros_like(student),
        "sample_mask": torch.ones(3),
        "teacher_input_ids": teacher,
        "teacher_input_lengths": torch.tensor([x[1] for x in LENGTHS]),
        **AlignmentBatch.from_chunks(chunks, 9, 11).as_dict(),
        "site_weight": torch.tensor(weights),
        "idx": [0, 1, 2],
    }


def teacher_logits(batch: dict[str, Any], seed: int = 5) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch["teacher_input_ids"].numel(), VOCAB, generator=g, dtype=torch.float64) * 2


def run(
    batch: dict[str, Any], hidden: Tensor, head: Head, signals: list[Any], cfg: HintLossConfig, **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    loss_fn = HintDistillationLossFn(cfg, **options)
    start = torch.arange(len(batch["idx"])) * batch["teacher_input_ids"].shape[1]
    inputs = loss_fn.build_layout(microbatch(batch), [start] * len(signals))
    return loss_fn.compute_loss(hidden, head, signals, inputs, loss_fn.denominators(batch))


def gathered(logits: Tensor, width: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """`[N, K, V]` at the rows that predict the targets, and which of them are targets."""
    out = logits.new_zeros(3, 4, VOCAB)
    valid = torch.zeros(3, 4, dtype=torch.bool)
    rows = logits.reshape(-1, width, VOCAB)
    for n, (length, (_, _, k)) in enumerate(zip(lengths, LENGTHS, strict=True)):
        out[n, :k] = rows[n, length - k - 1 : length - 1]
        valid[n, :k] = True
    return out, valid


def reference(student: Tensor, teacher: Tensor, weights: Tensor, cfg: HintLossConfig) -> Tensor:
    """Mean within each site, then the weighted mean over sites, one token at a time."""
    total, div = student.new_zeros(()), cfg.spec
    for n, (_, _, k) in enumerate(LENGTHS):
        site = student.new_zeros(())
        for j in range(k):
            p, q = (torch.softmax(x[n, j] / cfg.temperature, -1) for x in (student, teacher))
            if div.topk is not None:
                kept = (p if div.chosen_by == "student" else q).topk(div.topk).indices
                p, q = (torch.cat((x[kept], (1 - x[kept].sum())[None])) for x in (p, q))
            m = (p + q) / 2
            entries = {
                "reverse": p * (p / q).log(),
                "forward": q * (q / p).log(),
                "jsd": 0.5 * p * (p / m).log() + 0.5 * q * (q / m).log(),
            }[div.kind]
            if div.entry_clip is not None:
                # both add up to 1, so that this changes no sum; no entry is negative
                entries = entries + {"reverse": q - p, "forward": p - q, "jsd": 0 * p}[div.kind]
                entries = entries.clamp(max=div.entry_clip)
            site = site + entries.sum()
        total = total + weights[n] * site / k
    return total / weights.sum() * cfg.temperature**2


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_value_and_gradient(name: str, temperature: float) -> None:
    cfg = CONFIGS[name].model_copy(update={"temperature": temperature})
    batch, (hidden, head) = hint_batch(), hidden_and_head(27)
    logits = teacher_logits(batch)
    loss, metrics = run(
        batch, hidden, head, [TeacherLogits(logits, batch["teacher_input_ids"].reshape(-1))], cfg, block_rows=2
    )
    student, _ = gathered(naive_logits(hidden, head), 9, [x[0] for x in LENGTHS])
    teacher, _ = gathered(logits, 11, [x[1] for x in LENGTHS])
    expected = reference(student, teacher, batch["site_weight"].double(), cfg)
    assert torch.allclose(loss, expected, rtol=1e-6)
    for mine, theirs in zip(gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-9)
    assert float(metrics["hint/loss"][0] / metrics["hint/loss"][1]) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_empty_hint_gives_exactly_zero(name: str) -> None:
    """The same model on the same tokens: not nearly zero, zero."""
    batch = hint_batch()
    batch["teacher_input_ids"] = batch["input_ids"]
    batch["teacher_input_lengths"] = batch["input_lengths"]
    batch["alignment_teacher_chunk_id"] = batch["alignment_student_chunk_id"]
    hidden, head = hidden_and_head(27, dtype=torch.float32)
    signal = TeacherHidden(hidden.detach(), head, batch["input_ids"].reshape(-1))
    loss_fn = HintDistillationLossFn(CONFIGS[name], block_rows=4)
    start = torch.arange(3) * 9
    inputs = loss_fn.build_layout(microbatch(batch), [start])
    loss, metrics = loss_fn.compute_loss(hidden, head, [signal], inputs, loss_fn.denominators(batch))
    assert loss.item() == 0.0
    assert float(metrics["hint/proj_accuracy"][0]) == 8.0
    assert gradients(loss, hidden, head)[0].abs().max() < 1e-6


def test_micro_batches_and_order_change_nothing() -> None:
    batch, (hidden, head) = hint_batch(), hidden_and_head(27)
    logits = teacher_logits(batch).reshape(3, 11, VOCAB)
    loss_fn = HintDistillationLossFn()
    counts = loss_fn.denominators(batch)
    assert float(counts["sites"]) == 3.5
    whole, _ = run(batch, hidden, head, [_signal(logits, batch)], HintLossConfig())
    parts = []
    for rows in ([2, 0], [1]):
        part = take(batch, rows)
        own = torch.cat([hidden.reshape(3, 9, HIDDEN)[r] for r in rows])
        inputs = loss_fn.build_layout(microbatch(part), [torch.arange(len(rows)) * 11])
        parts.append(loss_fn.compute_loss(own, head, [_signal(logits[rows], part)], inputs, counts)[0])
    assert torch.allclose(torch.stack(parts).sum(), whole, rtol=1e-6)


def _signal(logits: Tensor, batch: dict[str, Any]) -> TeacherLogits:
    return TeacherLogits(logits.reshape(-1, VOCAB), batch["teacher_input_ids"].reshape(-1))


def test_disjoint_sides_stop_the_run_with_the_explanation() -> None:
    loss_fn = HintDistillationLossFn(HintLossConfig(divergence="jsd"))
    loss_fn.step_end({"hint/loss": (0.3, 1.0)})
    with pytest.raises(LossError, match=r"maximum.*shifted.*pred_pos"):
        loss_fn.step_end({"hint/loss": (2 * math.log(2) * 0.999, 2.0)})


def test_a_signal_of_other_tokens_is_refused() -> None:
    batch, (hidden, head) = hint_batch(), hidden_and_head(27)
    ids = batch["teacher_input_ids"].clone()
    ids[0, 8] = (ids[0, 8] + 1) % VOCAB
    scored, used = int(ids[0, 8]), int(batch["teacher_input_ids"][0, 8])
    with pytest.raises(LossError, match=rf"row 7 .*id {scored} .*id {used};"):
        run(batch, hidden, head, [TeacherLogits(teacher_logits(batch), ids.reshape(-1))], HintLossConfig())
    batch["teacher_input_ids"] = ids
    with pytest.raises(LossError, match="ids differ"):
        run(batch, hidden, head, [TeacherLogits(teacher_logits(batch), ids.reshape(-1))], HintLossConfig())


def test_top_k_signals() -> None:
    batch, (hidden, head) = hint_batch(), hidden_and_head(27)
    log_p = torch.log_softmax(teacher_logits(batch), -1)
    following = torch.roll(batch["teacher_input_ids"].reshape(-1), -1)
    top = log_p.topk(4, dim=-1)
    came = log_p.gather(1, following[:, None]).squeeze(1)
    stored = TeacherTopK(top.indices, top.values, came, following)
    live = TeacherLogits(teacher_logits(batch), batch["teacher_input_ids"].reshape(-1))
    cfg = CONFIGS["teacher top-k"]
    assert torch.allclose(
        run(batch, hidden, head, [stored], cfg)[0], run(batch, hidden, head, [live], cfg)[0], rtol=1e-9
    )
    with pytest.raises(LossError, match="live teacher"):
        run(batch, hidden, head, [stored], CONFIGS["student top-k"])


def test_trust_region_mixes_in_log_space() -> None:
    batch, (hidden, head) = hint_batch(), hidden_and_head(27)
    one, two = teacher_logits(batch), teacher_logits(batch, seed=6)
    ids = batch["teacher_input_ids"].reshape(-1)
    mixed = 0.75 * torch.log_softmax(one, -1) + 0.25 * torch.log_softmax(two, -1)
    by_mix, _ = run(batch, hidden, head, [TeacherLogits(mixed, ids)], HintLossConfig())
    pair = [TeacherLogits(one, ids), TeacherLogits(two, ids)]
    by_two, _ = run(batch, hidden, head, pair, HintLossConfig(), trust_region=0.25)
    assert torch.allclose(by_two, by_mix, rtol=1e-9)
    with pytest.raises(LossError, match=r"^1 .*2 teachers"):
        run(batch, hidden, head, pair[:1], HintLossConfig(), trust_region=0.25)


def test_ema_update() -> None:
    torch.manual_seed(0)
    model, average = nn.Linear(3, 2), nn.Linear(3, 2)
    before = [p.detach().clone() for p in average.parameters()]
    ema_update(model.parameters(), average.parameters(), 0.9)
    for new, old, p in zip(average.parameters(), before, model.parameters(), strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * p)
        assert new.grad_fn is None
    frozen = [p.detach().clone() for p in average.parameters()]
    ema_update(model.parameters(), average.parameters(), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(frozen, average.parameters(), strict=True))
    ema_update(model.parameters(), average.parameters(), 0.0)
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), average.parameters(), strict=True))
    with pytest.raises(ConfigError):
        ema_update([], [], 1.1)
    with pytest.raises(LossError, match=r"\(3,\).*\(2,\)"):
        ema_update([torch.zeros(2)], [torch.zeros(3)], 0.5)


def test_a_teacher_of_another_vocabulary_goes_through_its_projection() -> None:
    """Chunks of several tokens on a side; every site counts by its weight, not by its number of chunks."""
    projection = make_projection(VOCAB, 23, seed=1)
    batch, (hidden, head) = hint_batch(), hidden_and_head(27)
    g = torch.Generator().manual_seed(3)
    batch["teacher_input_ids"] = torch.randint(0, 23, (3, 11), generator=g)
    chunk = batch["alignment_student_chunk_id"]
    chunk[2] = torch.where(chunk[2] >= 2, chunk[2] - 1, chunk[2])
    chunk[2][chunk[2] == 2] = 2
    chunk[2, 4:6] = torch.tensor([1, 1])
    chunk[2, 6] = 2
    teacher = batch["alignment_teacher_chunk_id"]
    teacher[2, 3:7] = torch.tensor([0, 0, 1, 2])
    chunk[2, 3] = 0
    batch["alignment_pair_valid"][2, 3] = False
    logits = torch.randn(33, 23, generator=g, dtype=torch.float64)
    signal = TeacherLogits(logits, batch["teacher_input_ids"].reshape(-1))
    whole, _ = run(batch, hidden, head, [signal], CONFIGS["forward"], projection=projection)
    assert float(whole) > 0
    singles = []
    for row in range(3):
        weights = torch.zeros(3)
        weights[row] = 1.0
        alone = {**batch, "site_weight": weights}
        singles.append(run(alone, hidden, head, [signal], CONFIGS["forward"], projection=projection)[0])
    expected = (torch.stack(singles) * batch["site_weight"]).sum() / batch["site_weight"].sum()
    assert torch.allclose(whole, expected, rtol=1e-6)
    assert gradients(whole, hidden, head)[0].abs().sum() > 0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError):
        HintDistillationLossFn({"temperature": 0.0})
    with pytest.raises(ConfigError):
        HintDistillationLossFn(trust_region=2.0)
    with pytest.raises(ConfigError, match="topk"):
        HintDistillationLossFn(CONFIGS["teacher top-k"], projection=make_projection(5, 6))
    with pytest.raises(LossError, match="row starts"):
        HintDistillationLossFn().build_layout(microbatch(hint_batch()), [None])
