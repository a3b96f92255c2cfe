"""The chunk term by a kernel: log-probabilities of whole chunks on both sides, their binary divergence, its gradient.

References: `limbeck.losses.objectives.base.chunk_log_probs`, `limbeck.losses.divergences.binary_divergence`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.divergences import DivergenceSpec
from limbeck.losses.fast.kernels.cells import FORWARD, JSD, REVERSE
from limbeck.losses.fast.position_order import SidePositions

CHUNKS = 128
"""Chunks that one program handles."""
NEARLY_ONE = tl.constexpr(-1e-6)
"""Log-probability that one of 0 counts as, so that its complement has one."""
LOG_HALF = tl.constexpr(-math.log(2))


# What a bucket adds to the divergence, and its derivative by the logarithm of the student's share s. The target t comes
# with its own logarithm, which may be floored.
@triton.jit
def bucket_terms(log_s, t, log_t, beta, rescale, KIND: tl.constexpr):
    value = tl.where(t > 0, t * (log_t - log_s), 0.0)
    slope = -t
    if KIND == REVERSE:
        s = tl.exp(log_s)
        value = s * (log_s - log_t)
        slope = value + s
    if KIND == JSD:
        s = tl.exp(log_s)
        log_m = tl.log((1 - beta) * s + beta * t)
        student_term = (1 - beta) * s * (log_s - log_m)
        value = (beta * tl.where(t > 0, t * (log_t - log_m), 0.0) + student_term) * rescale
        slope = student_term * rescale
    return value, slope


# The same where every bucket's part is capped: p log(p / q) - p + q, which is never negative, up to the cap.
@triton.jit
def _capped_terms(log_s, t, log_t, beta, rescale, clip, KIND: tl.constexpr):
    value, slope = bucket_terms(log_s, t, log_t, beta, rescale, KIND)
    s = tl.exp(log_s)
    if KIND == FORWARD:
        value += s - t
        slope += s
    if KIND == REVERSE:
        value += t - s
        slope -= s
    return tl.minimum(value, clip), tl.where(value <= clip, slope, 0.0)


# log(1 - exp(x)) and its derivative, for x <= 0. Near 0 by the series of 1 - exp(x): the difference would lose all of
# its digits.
@triton.jit
def _complement(x):
    x = tl.minimum(x, NEARLY_ONE)
    series = 1.0 + x / 9.0
    for k in tl.static_range(8, 1, -1):
        series = 1.0 + x / k * series
    p = tl.exp(x)
    rest = tl.where(x > LOG_HALF, -x * series, 1.0 - p)
    return tl.log(rest), -p / rest


# Sums a chunk's log-probabilities on both sides, writes its divergence and, at every lane of the student's tokens, the
# derivative by the chunk's log-probability. Over chunks; the tokens behind the first of a chunk lie one after another,
# in lanes behind those of all chunks.
@triton.jit(do_not_specialize=["start", "single", "chunks"])
def _chunk_kernel(
    s_ptr, t_ptr, weight_ptr, s_first_ptr, s_count_ptr, t_first_ptr, t_count_ptr, row_ptr, slope_ptr,
    start, single, chunks, beta, rescale, clip, KIND: tl.constexpr, CLIP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    chunk = start + tl.program_id(0) * BM + tl.arange(0, BM)
    real = chunk < chunks
    several = real & (chunk >= single)
    log_s = tl.load(s_ptr + chunk, mask=real, other=-1.0)
    log_t = tl.load(t_ptr + chunk, mask=real, other=-1.0)
    s_first = tl.load(s_first_ptr + chunk - single, mask=several, other=0) + chunks
    s_count = tl.load(s_count_ptr + chunk - single, mask=several, other=0)
    t_first = tl.load(t_first_ptr + chunk - single, mask=several, other=0) + chunks
    t_count = tl.load(t_count_ptr + chunk - single, mask=several, other=0)
    for k in range(tl.max(s_count, 0)):
        log_s += tl.load(s_ptr + s_first + k, mask=k < s_count, other=0.0)
    for k in range(tl.max(t_count, 0)):
        log_t += tl.load(t_ptr + t_first + k, mask=k < t_count, other=0.0)
    rest_s, by_rest = _complement(log_s)
    rest_t, _ = _complement(log_t)
    log_t = tl.minimum(log_t, NEARLY_ONE)
    if CLIP:
        value, slope = _capped_terms(log_s, tl.exp(log_t), log_t, beta, rescale, clip, KIND)
        other, rest_slope = _capped_terms(rest_s, tl.exp(rest_t), rest_t, beta, rescale, clip, KIND)
    else:
        value, slope = bucket_terms(log_s, tl.exp(log_t), log_t, beta, rescale, KIND)
        other, rest_slope = bucket_terms(rest_s, tl.exp(rest_t), rest_t, beta, rescale, KIND)
    tl.store(row_ptr + chunk - start, value + other, mask=real)
    slope = (slope + rest_slope * by_rest) * tl.load(weight_ptr + chunk, mask=real, other=0.0)
    tl.store(slope_ptr + chunk, slope, mask=real)
    for k in range(tl.max(s_count, 0)):
        tl.store(slope_ptr + s_first + k, slope, mask=k < s_count)


class ChunkTerm(NamedTuple):
    """rows: divergence of each chunk; slope `[L]`: derivative by the realised token's log-probability at each lane."""

    rows: Tensor
    slope: Tensor


def direction(spec: DivergenceSpec) -> dict[str, Any]:
    """A direction as `bucket_terms` takes it."""
    rescale = 1 / (spec.beta * (1 - spec.beta)) if spec.kind == "jsd" and spec.rescale else 1.0
    kind = {"forward": FORWARD, "reverse": REVERSE, "jsd": JSD}[spec.kind]
    return {"beta": spec.beta, "rescale": rescale, "KIND": kind}


def chunk_term(
    student: tuple[Tensor, SidePositions],
    teacher: tuple[Tensor, SidePositions],
    weight: Tensor,
    spec: DivergenceSpec,
    start: int,
    single: int,
    lanes: int,
) -> ChunkTerm:
    """Binary divergences of the chunks from `start` on. student, teacher: log-probability of the realised token of each
    lane, and the side; weight `[C]`: of each chunk in the gradient; single: chunks of one token on both sides, which
    come first; lanes: of the student's logits."""
    (log_s, student_side), (log_t, teacher_side) = student, teacher
    chunks = weight.numel()
    rows = torch.empty(chunks - start, dtype=torch.float32, device=log_s.device)
    slope = torch.zeros(lanes, dtype=torch.float32, device=log_s.device)
    if chunks > start:
        _chunk_kernel[(-(-(chunks - start) // CHUNKS),)](
            log_s, log_t, weight, student_side.extra_first, student_side.extra_count, teacher_side.extra_first,
            teacher_side.extra_count, rows, slope,
            start, single, chunks, **direction(spec), clip=spec.entry_clip or 0.0, CLIP=spec.entry_clip is not None,
            BM=CHUNKS, num_warps=4,
        )  # fmt: skip
    return ChunkTerm(rows, slope)
