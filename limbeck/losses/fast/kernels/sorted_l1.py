"""L1 distance of two lists of probabilities in falling order, without sorting them.

The distance of two sorted lists, cut after k places, is an area: with `A(x)` the number of entries above x, at most k,
it is the integral over x of `|A_student(x) - A_teacher(x)|`. So counts and masses in narrow bins of log p are enough.
Inside a bin the integral of A is exact (count above, and the mean of the bin); only where the two curves cross inside
one bin, or where place k falls into it, is the area approximate, by at most that bin's share. The slope of the loss at
an entry is the sign of the difference in its bin. Entries far beyond place k are not counted: see `_histogram`.

Counts and masses are summed in one integer each, so the result does not depend on the order of the additions.
Reference: `limbeck.losses.objectives.uld.sorted_l1`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels import COLUMNS
from limbeck.losses.fast.kernels.stats import LOG2E, WIDE, WIDE_WARPS, splits_for

PER_OCTAVE = 64
"""Bins per factor of two in probability; one bin is 1.1% wide."""

BINS = 2048
"""Bins in all: probabilities below 2^-32 share the last one."""

SAMPLE = 16
"""One of so many tokens is looked at to find where the first k end."""

STEP, LANES = 64, 16
"""Bins and columns that a program of the scans over bins holds at a time."""

_PER_OCTAVE = tl.constexpr(PER_OCTAVE)
_BINS = tl.constexpr(BINS)
# mass has the lower 44 bits, room for 2^20 entries of at most 2^24 units; the count has the bits above
_COUNT_SHIFT = tl.constexpr(44)
_COUNT_ONE = tl.constexpr(1 << 44)
_MASS_BITS = tl.constexpr((1 << 44) - 1)
_MASS_UNIT = tl.constexpr(float(1 << 24))


class TailL1(NamedTuple):
    """Per column `[C]`: the distance and `sum_s slope(s) p(s)`; slope bfloat16 `[BINS, width]`: d distance / d p."""

    rows: Tensor
    mass: Tensor
    slope: Tensor


@triton.jit
def bin_of(log2_p):
    """Bin of a probability given as its logarithm to base 2."""
    return tl.minimum(tl.maximum(-log2_p * _PER_OCTAVE, 0.0), _BINS - 1.0).to(tl.int32)


# Reads each listed token's logits once; adds one integer per entry (count and mass together) to its bin, [BINS, width].
# Atomic, since the bin depends on the value; neighbouring lanes add to neighbouring places, and integers make the sum
# independent of the order.
@triton.jit
def _histogram_kernel(
    x_ptr, lse_ptr, ids_ptr, limit_ptr, out_ptr, number, lanes, width, per_split, stride, inv_tau, BN: tl.constexpr
):
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = col < width
    start = tl.program_id(1) * per_split
    scale = inv_tau * LOG2E
    base = tl.load(lse_ptr + col, mask=inside, other=0.0) * LOG2E
    limit = tl.load(limit_ptr + col, mask=inside, other=-1)
    for i in range(start, tl.minimum(start + per_split, number)):
        token = tl.load(ids_ptr + i * stride).to(tl.int64)
        log_p = tl.load(x_ptr + token * lanes + col, mask=inside, other=0.0).to(tl.float32) * scale - base
        bin_index = bin_of(log_p)
        part = tl.exp2(log_p + bin_index.to(tl.float32) / _PER_OCTAVE)  # of the bin's upper border
        units = tl.minimum(part, 1.0) * _MASS_UNIT + 0.5
        one = units.to(tl.int64) + _COUNT_ONE
        tl.atomic_add(out_ptr + bin_index * width + col, one, mask=bin_index <= limit, sem="relaxed")


# Reads the sample's counts once, from the largest bin down, writes one bin number per lane.
@triton.jit
def _limit_kernel(counts_ptr, limit_ptr, lanes, need, BINS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr):
    """The bin in which the `need`-th largest entry of each column lies."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    above = tl.zeros([BN], tl.float32)
    limit = tl.zeros([BN], tl.int32)
    for b in range(0, BINS, BB):
        offset = (b + tl.arange(0, BB))[:, None] * lanes + col[None, :]
        count = (tl.load(counts_ptr + offset) >> _COUNT_SHIFT).to(tl.float32)
        running = tl.cumsum(count, 0) + above[None, :]
        limit += tl.sum((running < need).to(tl.int32), 0)
        above += tl.sum(count, 0)
    tl.store(limit_ptr + col, limit)


@triton.jit
def _area(above, count, mass, low, high, k):
    """(integral of min(A, k) over the bin, share of the bin's entries that are among the first k)."""
    kept = tl.minimum(tl.maximum(k - above, 0.0), count)
    some = tl.maximum(count, 1.0)
    share = kept / some
    mean = mass / some
    # of a bin that place k falls into, the larger entries count: spread evenly around the mean
    spread = tl.minimum(high - mean, mean - low)
    excess = mean - low + spread * (1.0 - share)
    return tl.minimum(above, k) * (high - low) + kept * tl.where(kept < count, excess, mean - low), share


# Reads both histograms once, from the largest bin down, since A(x) is a running count; writes the slope of every bin
# (the gradient kernel looks it up) and two numbers per lane.
@triton.jit
def _area_kernel(
    s_ptr, t_ptr, slope_ptr, rows_ptr, mass_ptr, lanes, k, BINS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr
):
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    above_s = tl.zeros([BN], tl.float32)
    above_t = tl.zeros([BN], tl.float32)
    rows = tl.zeros([BB, BN], tl.float32)
    total = tl.zeros([BB, BN], tl.float32)
    unit = 1.0 / _MASS_UNIT
    for b in range(0, BINS, BB):
        bins = b + tl.arange(0, BB)
        offset = bins[:, None] * lanes + col[None, :]
        high = tl.exp2(-bins.to(tl.float32) / _PER_OCTAVE)[:, None]
        low = tl.where(bins == BINS - 1, 0.0, tl.exp2(-(bins + 1).to(tl.float32) / _PER_OCTAVE))[:, None]
        packed_s = tl.load(s_ptr + offset)
        packed_t = tl.load(t_ptr + offset)
        count_s = (packed_s >> _COUNT_SHIFT).to(tl.float32)
        count_t = (packed_t >> _COUNT_SHIFT).to(tl.float32)
        mass_s = (packed_s & _MASS_BITS).to(tl.float32) * unit * high
        mass_t = (packed_t & _MASS_BITS).to(tl.float32) * unit * high
        before_s = tl.cumsum(count_s, 0) - count_s + above_s[None, :]
        before_t = tl.cumsum(count_t, 0) - count_t + above_t[None, :]
        area_s, share_s = _area(before_s, count_s, mass_s, low, high, k)
        area_t, _unused = _area(before_t, count_t, mass_t, low, high, k)
        gap = area_s - area_t
        slope = tl.where(gap > 0, share_s, tl.where(gap < 0, -share_s, 0.0))
        rows += tl.abs(gap)
        total += slope * mass_s
        tl.store(slope_ptr + offset, slope.to(slope_ptr.dtype.element_ty))
        above_s += tl.sum(count_s, 0)
        above_t += tl.sum(count_t, 0)
    tl.store(rows_ptr + col, tl.sum(rows, 0))
    tl.store(mass_ptr + col, tl.sum(total, 0))


def _histogram(logits: Tensor, lse: Tensor, ids: Tensor, width: int, k: int, temperature: float) -> Tensor:
    """Counts and masses of the tokens `ids` by bin, `[BINS, width]`; surely of the k largest, seldom of the others.

    Adding an entry to its bin is what this costs, and entries beyond place k do not matter. So a sample of every
    `SAMPLE`-th token tells first, with room to spare, down to which bin the k largest reach.
    """
    device = logits.device
    limit = torch.full((width,), BINS, dtype=torch.int32, device=device)
    out = torch.zeros(BINS, width, dtype=torch.int64, device=device)
    share = k / SAMPLE
    # share is the mean of the sample's count, its root at least the deviation: six of those, and some more for few
    need = share + 6 * share**0.5 + 16
    strides = [SAMPLE, 1] if ids.numel() > SAMPLE * need else [1]
    for stride in strides:
        number = -(-ids.numel() // stride)
        splits = splits_for(number, 64)
        if number:
            _histogram_kernel[(-(-width // WIDE), splits)](
                logits, lse, ids, limit, out, number, logits.shape[1], width, -(-number // splits), stride,
                1 / temperature, BN=WIDE, num_warps=WIDE_WARPS,
            )  # fmt: skip
        if stride > 1:
            _limit_kernel[(width // LANES,)](out, limit, width, need, BINS=BINS, BB=STEP, BN=LANES, num_warps=4)
            out.zero_()
    return out


def sorted_rest(
    student: Tensor,
    teacher: Tensor,
    lse_student: Tensor,
    lse_teacher: Tensor,
    ids_student: Tensor,
    ids_teacher: Tensor,
    chunks: int,
    k: int,
    temperature: float = 1.0,
) -> TailL1:
    """Distance of the k largest probabilities of the tokens ids_* (int32) in the first `chunks` columns of student
    `[V, L_s]` and teacher `[U, L_t]` logits, with its slope for the gradient."""
    width = -(-chunks // COLUMNS) * COLUMNS
    counts_s = _histogram(student, lse_student, ids_student, width, k, temperature)
    counts_t = _histogram(teacher, lse_teacher, ids_teacher, width, k, temperature)
    slope = torch.empty(BINS, width, dtype=torch.bfloat16, device=student.device)
    rows = torch.empty(2, width, dtype=torch.float32, device=student.device)
    _area_kernel[(width // LANES,)](
        counts_s, counts_t, slope, rows[0], rows[1], width, float(k), BINS=BINS, BB=STEP, BN=LANES, num_warps=4
    )
    return TailL1(rows[0, :chunks], rows[1, :chunks], slope)
