"""Loss and gradient do not depend on how a batch is cut, ordered, padded or packed (float32, 1e-6 relative)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden
from tests.losses.cases import PLAIN_MODES, make_batch, make_models, make_projection, starts

V_S, V_T = 23, 31
# P-KL's columns depend on batch neighbours by definition, unless they are all columns.
CONFIGS: dict[str, dict[str, Any]] = {
    **{mode: {} for mode in PLAIN_MODES},
    "strict": {"strict_topk": 5, "span_weight": 0.1},
    "scored": {"teacher_scoring": "ce"},
    "selected": {"teacher_combination": "select_teacher"},
}


def build(name: str) -> CrossTokenizerDistillationLossFn:
    mode = name if name not in ("scored", "selected") else "boundary_kl"
    projections = [make_projection(V_S, V_T, seed=s) for s in range(2)]
    return CrossTokenizerDistillationLossFn({"mode": mode, "block_rows": 5, **CONFIGS[name]}, projections=projections)


@pytest.fixture(scope="module")
def data() -> tuple[dict[str, Any], Any]:
    batch = make_batch(samples=6, seed=11, teachers=2)
    return batch, make_models(batch, V_S, [V_T, V_T], seed=4, dtype=torch.float32)


def pick(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {k: v[rows] if isinstance(v, Tensor) else [v[r] for r in rows] for k, v in batch.items()}


def padded(x: Tensor, extra: int, value: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, extra), value=value)


def evaluate(
    loss_fn: CrossTokenizerDistillationLossFn, data: tuple[dict[str, Any], Any], groups: list[list[int]], layout: str
) -> tuple[Tensor, list[Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Sum of losses over micro-batches given as lists of samples; gradients with respect to the whole batch's hidden
    states and the head. layout: "padded", "wide" (padding full of junk) or "packed" (samples end to end, reversed)."""
    batch, models = data
    counts = loss_fn.denominators(batch)
    total, metrics = torch.zeros(()), {}
    for rows in groups:
        part = pick(batch, rows)
        hidden, start = gather(
            part["input_ids"], batch["input_ids"], models.hidden, rows, part["input_lengths"], layout
        )
        signals, teacher_starts = [], []
        for i in range(2):
            ids, lengths = part[f"teacher_{i}_input_ids"], part[f"teacher_{i}_input_lengths"]
            source = batch[f"teacher_{i}_input_ids"]
            t_hidden, t_start = gather(ids, source, models.teacher_hidden[i], rows, lengths, layout)
            flat, _ = gather(ids, source, source.reshape(-1, 1), rows, lengths, layout)
            head = Head(V_T, weight=models.teacher_weight[i])
            signals.append(TeacherHidden(t_hidden, head, flat.reshape(-1)))
            teacher_starts.append(t_start)
        if layout == "wide":
            for key in list(part):
                if isinstance(part[key], Tensor) and part[key].ndim == 2 and "pair" not in key:
                    part[key] = padded(part[key], 3, -1 if "chunk_id" in key else 1)
        micro = SimpleNamespace(data_dict=part, processed_inputs=SimpleNamespace(row_start=start))
        inputs = loss_fn.build_layout(micro, teacher_starts)
        loss, parts = loss_fn.compute_loss(hidden, Head(V_S, weight=models.weight), signals, inputs, counts)
        total = total + loss
        for key, (value, count) in parts.items():
            old = metrics.get(key, (0.0, 0.0))
            metrics[key] = (old[0] + value, old[1] + count)
    return total, list(torch.autograd.grad(total, [models.hidden, models.weight])), metrics


def gather(
    part_ids: Tensor, ids: Tensor, rows_of: Tensor, rows: list[int], lengths: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    """Flat rows of some samples, laid out as asked, and each sample's first row."""
    width = ids.shape[1]
    by_sample = rows_of.view(ids.shape[0], width, -1)[rows]
    if layout == "padded":
        return by_sample.flatten(0, 1), starts(part_ids)
    if layout == "wide":
        junk = torch.full((len(rows), 3, by_sample.shape[2]), 7, dtype=rows_of.dtype)
        return torch.cat((by_sample, junk), 1).flatten(0, 1), torch.arange(len(rows)) * (width + 3)
    pieces = [by_sample[j, : int(lengths[j])] for j in reversed(range(len(rows)))]
    sizes = torch.tensor([0] + [p.shape[0] for p in pieces]).cumsum(0)
    return torch.cat(pieces), sizes[:-1].flip(0)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(
    ("groups", "layout"),
    [
        ([[0], [1], [2], [3], [4], [5]], "padded"),
        ([[0, 1, 2, 3], [4, 5]], "padded"),
        ([[5, 3, 1, 0, 2, 4]], "padded"),
        ([[0, 1, 2, 3, 4, 5]], "wide"),
        ([[0, 1, 2, 3, 4, 5]], "packed"),
        ([[4, 1], [0, 5, 3]], "packed"),  # sample 2 is masked: leaving it out changes nothing
    ],
)
def test_invariance(name: str, groups: list[list[int]], layout: str, data: tuple[dict[str, Any], Any]) -> None:
    loss_fn = build(name)
    want, want_grads, want_metrics = evaluate(loss_fn, data, [[0, 1, 2, 3, 4, 5]], "padded")
    got, grads, metrics = evaluate(loss_fn, data, groups, layout)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for a, b in zip(grads, want_grads, strict=True):
        assert float((a - b).abs().max()) <= 1e-6 * float(b.abs().max())
    for key, (value, count) in want_metrics.items():
        torch.testing.assert_close(
            metrics[key][0] / count.clamp(min=1e-9), value / count.clamp(min=1e-9), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(metrics[key][1], count, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_sample_that_counts_twice_is_one_that_is_there_twice(name: str, data: tuple[dict[str, Any], Any]) -> None:
    """Weights of samples weigh distillation as they weigh cross-entropy, and the denominators count them."""
    batch, models = data

    def logits(rows: list[int]) -> tuple[Tensor, list[Tensor]]:
        def of(ids: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
            return (hidden @ weight.T).view(*ids.shape, -1)[rows].detach()

        teachers = [
            of(batch[f"teacher_{i}_input_ids"], models.teacher_hidden[i], models.teacher_weight[i]) for i in (0, 1)
        ]
        return of(batch["input_ids"], models.hidden, models.weight), teachers

    def loss(rows: list[int], weight: list[float]) -> tuple[float, dict[str, float]]:
        part = pick(batch, rows)
        part["sample_mask"] = part["sample_mask"] * torch.tensor(weight)
        value, metrics = build(name)(part, None, None, *logits(rows))
        return float(value), {key: float(metrics[key][0] / metrics[key][1]) for key in ("kl_loss", "chunks", "tokens")}

    for weighted in ([2.0, 1.0, 1.0], [1.0, 0.5, 0.5], [0.5, 0.25, 0.25]):
        value, metrics = loss([0, 1, 3], weighted)
        twice, expected = loss([0, 0, 1, 3], [weighted[0] / 2, weighted[0] / 2, *weighted[1:]])
        same, _ = loss([0, 0, 1, 3], [1.0] * 4)
        assert value == pytest.approx(twice, rel=1e-5)
        assert value == pytest.approx(same, rel=1e-5)
        assert metrics == pytest.approx(expected, rel=1e-5)
    assert loss([0, 1, 3], [1.0, 1.0, 1.0])[0] != pytest.approx(value, rel=1e-3)


def test_a_rank_without_rows_counts_nothing(data: tuple[dict[str, Any], Any]) -> None:
    counts = build("boundary_kl").denominators(pick(data[0], []))
    assert {name: float(value) for name, value in counts.items()} == {"tokens": 0.0, "chunks_0": 0.0, "chunks_1": 0.0}
