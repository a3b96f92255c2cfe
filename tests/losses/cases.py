"""Random micro-batches for the loss tests: aligned samples, projections and signals of odd shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden, TeacherLogits, TeacherTopK
from limbeck.losses.divergences import Direction
from limbeck.losses.objectives import OBJECTIVES
from limbeck.losses.objectives.config import PublishedConfig
from limbeck.losses.vocab.projection import common_pairs
from limbeck.projection import VocabTrees


@dataclass
class FakeProjection:
    """The duck type that the losses depend on."""

    indices: np.ndarray
    weights: np.ndarray
    teacher_size: int
    teacher_fingerprint: str = "t"
    trees: VocabTrees | None = None
    token_bytes: tuple[tuple[bytes, ...], tuple[bytes, ...]] | None = None

    def exact_pairs(self) -> tuple[Tensor, Tensor]:
        return common_pairs(self, 1 - 1e-6)

    def dense(self) -> Tensor:
        out = torch.zeros(self.indices.shape[0], self.teacher_size, dtype=torch.float64)
        for s in range(self.indices.shape[0]):
            for t, w in zip(self.indices[s], self.weights[s], strict=True):
                if t >= 0:
                    out[s, t] += float(w)
        return out


def of_mode(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the keys of other modes than the one that they name."""
    own = OBJECTIVES[settings.get("mode", "tree_kl")].Config.model_fields
    foreign = {key for kind in OBJECTIVES.values() for key in kind.Config.model_fields} - set(own)
    return {key: value for key, value in settings.items() if key not in foreign}


def directions_of(mode: str) -> list[str]:
    """The directions that a mode takes; of one without, none."""
    if "direction" not in OBJECTIVES[mode].Config.model_fields:
        return []
    published = issubclass(OBJECTIVES[mode].Config, PublishedConfig)
    return [direction for direction in get_args(Direction) if direction != "jsd" or not published]


PLAIN_MODES = [mode for mode, kind in OBJECTIVES.items() if not kind.needs_trees and not kind.needs_bytes]
"""Modes that a projection alone is enough for."""


def make_projection(v_s: int, v_t: int, seed: int = 0, k: int = 3) -> FakeProjection:
    """Half exact rows (with collisions), some of several pieces, some empty; some teacher columns unreached."""
    rng = np.random.default_rng(seed)
    indices = np.full((v_s, k), -1, np.int32)
    weights = np.zeros((v_s, k), np.float32)
    reached = max(k, int(v_t * 0.85))
    for s in range(v_s):
        kind = rng.random()
        if kind < 0.5:
            indices[s, 0], weights[s, 0] = rng.integers(0, reached), 1.0
        elif kind < 0.9:
            pieces = int(rng.integers(2, k + 1))
            indices[s, :pieces] = rng.choice(reached, pieces, replace=False)
            raw = 0.9 * 0.1 ** np.arange(pieces)
            weights[s, :pieces] = raw / raw.sum()
    indices[0, 0], weights[0] = 0, [1.0] + [0.0] * (k - 1)
    indices[0, 1:] = -1
    if v_s > 1:  # some mass is always without a mapping: a rest bucket that is 0 by construction has no sharp value
        indices[1], weights[1] = -1, 0.0
    return FakeProjection(indices, weights, v_t)


def make_batch(
    samples: int = 4,
    v_s: int = 23,
    v_t: int = 31,
    seed: int = 0,
    pad: int = 0,
    teachers: int = 1,
    one_to_one: bool = False,
    chunks_per_sample: tuple[int, int] = (1, 6),
) -> dict[str, Any]:
    """A right-padded batch with one alignment per teacher. Samples start with a token outside every chunk (bos), hold
    some tokens that belong to none, an inexact chunk now and then, and one masked sample from the third on."""
    rng = np.random.default_rng(seed)
    batch: dict[str, Any] = {}
    lengths = rng.integers(6, 14, samples)
    width = int(lengths.max()) + pad
    ids = rng.integers(0, v_s, (samples, width))
    mask = np.zeros((samples, width), np.int64)
    for b in range(samples):
        mask[b, int(rng.integers(0, 3)) : lengths[b]] = 1
    batch["input_ids"], batch["input_lengths"] = torch.tensor(ids), torch.tensor(lengths)
    batch["token_mask"] = torch.tensor(mask)
    sample_mask = np.ones(samples, np.float32)
    if samples > 2:
        sample_mask[2] = 0
    batch["sample_mask"], batch["idx"] = torch.tensor(sample_mask), list(range(samples))
    for i in range(teachers):
        fields = _alignment(rng, lengths, width, v_t, pad, one_to_one, chunks_per_sample)
        for name, value in fields.items():
            batch[name.format(i=f"{i}_")] = value
            if i == 0:
                batch[name.format(i="")] = value
    return batch


def _alignment(
    rng: np.random.Generator,
    lengths: np.ndarray,
    width: int,
    v_t: int,
    pad: int,
    one_to_one: bool,
    per: tuple[int, int],
) -> dict[str, Tensor]:
    samples = len(lengths)
    plans = []
    for b in range(samples):
        s, t, plan = 1, 1, []
        for _ in range(int(rng.integers(*per))):
            n_s, n_t = (1, 1) if one_to_one else (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
            s += int(rng.integers(0, 2))
            t += int(rng.integers(0, 2))
            if s + n_s > lengths[b]:
                break
            plan.append((s, s + n_s, t, t + n_t, bool(rng.random() < 0.85)))
            s, t = s + n_s, t + n_t
        plans.append((plan, t + int(rng.integers(0, 3))))
    t_len = np.array([max(2, p[1]) for p in plans])
    t_width, count = int(t_len.max()) + pad, max(1, max(len(p[0]) for p in plans))
    s_chunk, t_chunk = np.full((samples, width), -1), np.full((samples, t_width), -1)
    valid, right = np.zeros((samples, count), bool), np.zeros((samples, count), bool)
    for b, (plan, _) in enumerate(plans):
        for c, (s0, s1, t0, t1, exact) in enumerate(plan):
            s_chunk[b, s0:s1], t_chunk[b, t0:t1] = c, c
            valid[b, c], right[b, c] = True, exact
    t_ids = rng.integers(0, v_t, (samples, t_width))
    return {
        "teacher_{i}input_ids": torch.tensor(t_ids),
        "teacher_{i}input_lengths": torch.tensor(t_len),
        "teacher_{i}token_mask": torch.ones(samples, t_width, dtype=torch.int64),
        "alignment_{i}pair_valid": torch.tensor(valid),
        "alignment_{i}pair_is_correct": torch.tensor(right),
        "alignment_{i}student_chunk_id": torch.tensor(s_chunk),
        "alignment_{i}teacher_chunk_id": torch.tensor(t_chunk),
    }


def starts(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0]) * ids.shape[1]


def microbatch(batch: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(data_dict=batch, processed_inputs=SimpleNamespace(row_start=starts(batch["input_ids"])))


def teacher_ids(batch: dict[str, Any], i: int = 0) -> Tensor:
    return batch.get(f"teacher_{i}_input_ids", batch["input_ids"])


@dataclass
class Models:
    """Random hidden states and heads of a student and its teachers over a batch."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: list[Tensor]
    teacher_weight: list[Tensor]

    def signals(self, batch: dict[str, Any], kind: str = "hidden", k: int = 5) -> list[Any]:
        out: list[Any] = []
        for i, (h, w) in enumerate(zip(self.teacher_hidden, self.teacher_weight, strict=True)):
            ids = teacher_ids(batch, i).reshape(-1)
            if kind == "hidden":
                out.append(TeacherHidden(h, Head(w.shape[0], weight=w), ids))
            elif kind == "logits":
                out.append(TeacherLogits(h @ w.t(), ids))
            else:
                log_p = torch.log_softmax((h @ w.t()).double(), -1)
                top = log_p.topk(min(k, w.shape[0]), -1)
                following = torch.cat((ids[1:], ids[:1]))
                picked = log_p.gather(1, following[:, None]).squeeze(1)
                out.append(TeacherTopK(top.indices, top.values.to(h.dtype), picked.to(h.dtype), following, w.shape[0]))
        return out


def make_models(
    batch: dict[str, Any],
    v_s: int = 23,
    v_t: int | list[int] = 31,
    seed: int = 0,
    h: int = 7,
    dtype: Any = torch.float64,
) -> Models:
    sizes = v_t if isinstance(v_t, list) else [v_t]
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    hidden = rand(batch["input_ids"].numel(), h).requires_grad_()
    weight = rand(v_s, h).requires_grad_()
    teacher = [rand(teacher_ids(batch, i).numel(), h + 2) for i in range(len(sizes))]
    return Models(hidden, weight, teacher, [rand(v, h + 2) for v in sizes])


def run(
    loss_fn: CrossTokenizerDistillationLossFn,
    batch: dict[str, Any],
    models: Models,
    kind: str = "hidden",
    head: Head | None = None,
    k: int = 5,
    counts: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Loss and metrics of a whole batch as one micro-batch."""
    n = loss_fn.num_teachers
    inputs = loss_fn.build_layout(microbatch(batch), [starts(teacher_ids(batch, i)) for i in range(n)])
    head = head or Head(models.weight.shape[0], weight=models.weight)
    counts = counts or loss_fn.denominators(batch)
    return loss_fn.compute_loss(models.hidden, head, models.signals(batch, kind, k), inputs, counts)
