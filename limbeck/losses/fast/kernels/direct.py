"""The teacher's statistics and a forward KL over pairs, in one pass that writes nothing but sums.

A pair is a teacher token whose probability is compared with that of one student token, which counts nowhere else: most
columns of a projection, and the cells of one token on either side. With p the teacher's and q the student's
probability of a pair, a lane's `cross` is `sum p (log2 p - log2(q + floor))`. The teacher's log-sum-exp is not known
before its logits have been read, so p is taken against the largest logit so far, and all sums are rescaled when that
grows. The gradient kernel reads the pairs' logits once more (`Direct` in `gradient.py`), so the slope of a pair is
never stored.

References: `column_stats_reference` and `pair_sums_reference`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels.stats import LOG2E, LOWEST, ColumnStats, fast_log2, fast_reciprocal
from limbeck.losses.fast.kernels.tables import GROUP

LANES, WARPS = 512, 4
"""Columns and warps of a program."""

SPLITS = 256
"""Parts of the vocabulary that are reduced side by side."""

SMALLEST = 1.1754943508222875e-38
"""A floor that changes no probability but 0."""


class PairLists(Protocol):
    """Student and teacher token of each pair `[P]`, and the teacher's tokens in no pair; int32."""

    @property
    def pair_student(self) -> Tensor: ...
    @property
    def pair_teacher(self) -> Tensor: ...
    @property
    def unpaired(self) -> Tensor: ...


class PairSums(NamedTuple):
    """Per lane of the teacher `[L_t]`: its statistics; over pairs `sum p`, `sum p (log2 p - log2(q + floor))` and
    `sum p / (q + floor)`; the largest q and p, and the numbers of their pairs; the teacher token of the first."""

    stats: ColumnStats
    kept: Tensor
    cross: Tensor
    slopes: Tensor
    best_q: Tensor
    best_p: Tensor
    pair_q: Tensor
    pair_p: Tensor
    column: Tensor


# The logits of a list's i-th token.
@triton.jit
def _row(x_ptr, id_ptr, i, lanes, col, inside):
    token = tl.load(id_ptr + i).to(tl.int64)
    return tl.load(x_ptr + token * lanes + col, mask=inside, other=0.0).to(tl.float32)


# The same, -inf behind the list's end.
@triton.jit
def _row_or_none(x_ptr, id_ptr, i, end, lanes, width, col):
    token = tl.load(id_ptr + tl.minimum(i, end - 1)).to(tl.int64)
    some = col < tl.where(i < end, width, 0)
    return tl.load(x_ptr + token * lanes + col, mask=some, other=float("-inf")).to(tl.float32)


# The sums with one more pair: x the teacher's logits, y the student's.
@triton.jit
def _with_pair(x, y, scale, base_s, peak, kept, cross, slopes, floor, FLOORED: tl.constexpr):
    gap = x * scale - peak
    p = tl.exp2(gap)
    log_q = y * scale - base_s
    if FLOORED:
        q = tl.exp2(log_q) + floor
        cross += p * (gap - fast_log2(q))
        slopes += p * fast_reciprocal(q)
    else:
        # 2^-126 is SMALLEST: its floor as a maximum, without an exponential and a logarithm
        cross += p * (gap - tl.maximum(log_q, -126.0))
    kept += p
    return kept, cross, slopes


# Reads the teacher's logits once, and the student's at pairs. Programs split the pairs and the other teacher tokens,
# since there are too few tiles of lanes to fill a GPU; `_join_kernel` adds their parts. Four rows of each side are
# under way together, and of four only the group that holds the largest is remembered: which it was is found at the end.
@triton.jit(do_not_specialize=["pairs", "others", "per_pairs", "per_others"])
def _pair_kernel(
    s_ptr, t_ptr, lse_s_ptr, pair_s_ptr, pair_t_ptr, other_ptr, out_ptr, arg_ptr,
    pairs, others, per_pairs, per_others, lanes_s, lanes_t, inv_tau, floor,
    FLOORED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = col < lanes_t
    inside_s = col < tl.minimum(lanes_s, lanes_t)
    scale = inv_tau * LOG2E
    base_s = tl.load(lse_s_ptr + col, mask=inside_s, other=0.0) * LOG2E
    kept = tl.zeros([BN], tl.float32)
    cross = tl.zeros([BN], tl.float32)
    slopes = tl.zeros([BN], tl.float32)
    top = tl.full([BN], LOWEST, tl.float32)
    best = tl.full([BN], LOWEST, tl.float32)
    arg_t = tl.zeros([BN], tl.int32)
    arg_s = tl.zeros([BN], tl.int32)
    start = tl.program_id(1) * per_pairs
    for i in range(start, tl.minimum(start + per_pairs, pairs), 4):
        x0 = _row(t_ptr, pair_t_ptr, i, lanes_t, col, inside)
        x1 = _row(t_ptr, pair_t_ptr, i + 1, lanes_t, col, inside)
        x2 = _row(t_ptr, pair_t_ptr, i + 2, lanes_t, col, inside)
        x3 = _row(t_ptr, pair_t_ptr, i + 3, lanes_t, col, inside)
        y0 = _row(s_ptr, pair_s_ptr, i, lanes_s, col, inside_s)
        y1 = _row(s_ptr, pair_s_ptr, i + 1, lanes_s, col, inside_s)
        y2 = _row(s_ptr, pair_s_ptr, i + 2, lanes_s, col, inside_s)
        y3 = _row(s_ptr, pair_s_ptr, i + 3, lanes_s, col, inside_s)
        most = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        arg_t = tl.where(most > top, i, arg_t)
        most = tl.maximum(most, top)
        shift = (top - most) * scale
        top = most
        shrink = tl.exp2(shift)
        # a new maximum moves every log2 p of the sum, and not only its factor
        cross = (cross + kept * shift) * shrink
        kept *= shrink
        if FLOORED:
            slopes *= shrink
        peak = top * scale
        kept, cross, slopes = _with_pair(x0, y0, scale, base_s, peak, kept, cross, slopes, floor, FLOORED)
        kept, cross, slopes = _with_pair(x1, y1, scale, base_s, peak, kept, cross, slopes, floor, FLOORED)
        kept, cross, slopes = _with_pair(x2, y2, scale, base_s, peak, kept, cross, slopes, floor, FLOORED)
        kept, cross, slopes = _with_pair(x3, y3, scale, base_s, peak, kept, cross, slopes, floor, FLOORED)
        most = tl.maximum(tl.maximum(y0, y1), tl.maximum(y2, y3))
        arg_s = tl.where(most > best, i, arg_s)
        best = tl.maximum(most, best)
    part = tl.num_programs(1) * lanes_t
    out = tl.program_id(1) * lanes_t + col
    tl.store(out_ptr + out, top, mask=inside)
    tl.store(out_ptr + part + out, kept, mask=inside)
    tl.store(out_ptr + 2 * part + out, cross, mask=inside)
    tl.store(out_ptr + 3 * part + out, slopes, mask=inside)
    tl.store(out_ptr + 4 * part + out, best, mask=inside)
    tl.store(arg_ptr + out, arg_t, mask=inside)
    tl.store(arg_ptr + part + out, arg_s, mask=inside)
    top = tl.full([BN], LOWEST, tl.float32)
    arg_t = tl.zeros([BN], tl.int32)
    total = tl.zeros([BN], tl.float32)
    start = tl.program_id(1) * per_others
    end = tl.minimum(start + per_others, others)
    for i in range(start, end, 4):
        x0 = _row_or_none(t_ptr, other_ptr, i, end, lanes_t, lanes_t, col)
        x1 = _row_or_none(t_ptr, other_ptr, i + 1, end, lanes_t, lanes_t, col)
        x2 = _row_or_none(t_ptr, other_ptr, i + 2, end, lanes_t, lanes_t, col)
        x3 = _row_or_none(t_ptr, other_ptr, i + 3, end, lanes_t, lanes_t, col)
        most = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        arg_t = tl.where(most > top, i, arg_t)
        most = tl.maximum(most, top)
        total *= tl.exp2((top - most) * scale)
        top = most
        peak = top * scale
        total += tl.exp2(x0 * scale - peak) + tl.exp2(x1 * scale - peak)
        total += tl.exp2(x2 * scale - peak) + tl.exp2(x3 * scale - peak)
    tl.store(out_ptr + 5 * part + out, top, mask=inside)
    tl.store(out_ptr + 6 * part + out, total, mask=inside)
    tl.store(arg_ptr + 2 * part + out, arg_t, mask=inside)


# Of a group of four tokens that starts at `first`: the number of the first one whose logit is `best`.
@triton.jit
def _place(x_ptr, id_ptr, first, number, best, lanes, col, inside):
    first = tl.minimum(first, number)
    pair_index = tl.where(first < number, first, 0)
    for back in tl.static_range(4):
        candidate = first + (3 - back)
        some = inside & (candidate < number)
        token = tl.load(id_ptr + candidate, mask=some, other=0).to(tl.int64)
        x = tl.load(x_ptr + token * lanes + col, mask=some, other=float("-inf")).to(tl.float32)
        pair_index = tl.where(some & (x == best), candidate, pair_index)
    return pair_index


# Reads the parts once, and some logits of each lane; writes each lane's results once. A kernel of its own, because a
# part must be rescaled to the largest maximum of all parts, which is known only when the last of them is done.
@triton.jit(do_not_specialize=["splits", "pairs", "others"])
def _join_kernel(
    part_ptr, arg_ptr, s_ptr, t_ptr, lse_s_ptr, pair_s_ptr, pair_t_ptr, other_ptr, out_ptr, place_ptr,
    splits, pairs, others, lanes_s, lanes_t, inv_tau,
    SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_s = col < lanes_s
    number = tl.arange(0, SPLITS)[:, None]
    # the second half is always true, and gives the mask its shape
    real = (number < splits) & (col >= 0)[None, :]
    offset = number * lanes_t + col[None, :]
    part = splits * lanes_t
    scale = inv_tau * LOG2E
    top = tl.load(part_ptr + offset, mask=real, other=LOWEST)
    rest_top = tl.load(part_ptr + 5 * part + offset, mask=real, other=LOWEST)
    best_t = tl.max(top, 0)
    rest_t = tl.max(rest_top, 0)
    peak = tl.maximum(best_t, rest_t)
    kept = tl.load(part_ptr + part + offset, mask=real, other=0.0)
    total = tl.sum(kept * tl.exp2((top - peak[None, :]) * scale), 0)
    rest = tl.load(part_ptr + 6 * part + offset, mask=real, other=0.0)
    total += tl.sum(rest * tl.exp2((rest_top - peak[None, :]) * scale), 0)
    tl.store(out_ptr + col, peak * inv_tau + tl.log(total))
    log_total = tl.log2(total)
    shift = (top - peak[None, :]) * scale - log_total[None, :]
    shrink = tl.exp2(shift)
    tl.store(out_ptr + lanes_t + col, tl.sum(kept * shrink, 0))
    cross = tl.load(part_ptr + 2 * part + offset, mask=real, other=0.0)
    tl.store(out_ptr + 2 * lanes_t + col, tl.sum((cross + kept * shift) * shrink, 0))
    slopes = tl.load(part_ptr + 3 * part + offset, mask=real, other=0.0)
    tl.store(out_ptr + 3 * lanes_t + col, tl.sum(slopes * shrink, 0))
    of_s = tl.load(part_ptr + 4 * part + offset, mask=real, other=LOWEST)
    best_s = tl.max(of_s, 0)
    lse_s = tl.load(lse_s_ptr + col, mask=inside_s, other=0.0)
    tl.store(out_ptr + 4 * lanes_t + col, tl.exp2((best_s * inv_tau - lse_s) * LOG2E))
    tl.store(out_ptr + 5 * lanes_t + col, tl.exp2((best_t - peak) * scale - log_total))
    last = 2147483647
    first_t = tl.min(tl.where(real & (top == best_t[None, :]), tl.load(arg_ptr + offset, mask=real, other=0), last), 0)
    of_arg = tl.load(arg_ptr + part + offset, mask=real, other=0)
    first_s = tl.min(tl.where(real & (of_s == best_s[None, :]), of_arg, last), 0)
    of_arg = tl.load(arg_ptr + 2 * part + offset, mask=real, other=0)
    first_r = tl.min(tl.where(real & (rest_top == rest_t[None, :]), of_arg, last), 0)
    pair_s = _place(s_ptr, pair_s_ptr, first_s, pairs, best_s, lanes_s, col, inside_s)
    pair_t = _place(t_ptr, pair_t_ptr, first_t, pairs, best_t, lanes_t, col, col >= 0)
    other = _place(t_ptr, other_ptr, first_r, others, rest_t, lanes_t, col, col >= 0)
    some = pairs > 0
    token = tl.load(pair_t_ptr + pair_t, mask=some & (col >= 0), other=last)
    other = tl.load(other_ptr + other, mask=(others > 0) & (col >= 0), other=last)
    either = (best_t == rest_t) & some
    token = tl.where(either, tl.minimum(token, other), tl.where(best_t > rest_t, token, other))
    tl.store(place_ptr + col, token)
    tl.store(place_ptr + lanes_t + col, pair_s)
    tl.store(place_ptr + 2 * lanes_t + col, pair_t)
    tl.store(place_ptr + 3 * lanes_t + col, tl.load(pair_t_ptr + pair_s, mask=some & (col >= 0), other=0))


def pair_sums(
    student: Tensor, teacher: Tensor, lse_student: Tensor, lists: PairLists, floor: float, temperature: float = 1.0
) -> PairSums:
    """student `[V, L_s]`, teacher `[U, L_t]`: logits, of which the lanes of the same number belong together (others
    have statistics, and sums that mean nothing); lse_student `[L_s]` at the temperature. floor: added to q; `SMALLEST`
    leaves `slopes` at 0."""
    lanes_s, lanes_t = student.shape[1], teacher.shape[1]
    pairs, others = lists.pair_teacher.numel(), lists.unpaired.numel()
    splits = min(SPLITS, max(max(pairs, others) // 32, 1))
    parts = torch.empty(7, splits, lanes_t, dtype=torch.float32, device=teacher.device)
    args = torch.empty(3, splits, lanes_t, dtype=torch.int32, device=teacher.device)
    sums = torch.empty(6, lanes_t, dtype=torch.float32, device=teacher.device)
    places = torch.empty(4, lanes_t, dtype=torch.int32, device=teacher.device)
    per_pairs, per_others = (-(-number // (splits * GROUP)) * GROUP for number in (pairs, others))
    _pair_kernel[(-(-lanes_t // LANES), splits)](
        student, teacher, lse_student, lists.pair_student, lists.pair_teacher, lists.unpaired, parts, args,
        pairs, others, per_pairs, per_others, lanes_s, lanes_t, 1 / temperature, floor,
        FLOORED=floor > SMALLEST, BN=LANES, num_warps=WARPS,
    )  # fmt: skip
    _join_kernel[(lanes_t // 16,)](
        parts, args, student, teacher, lse_student, lists.pair_student, lists.pair_teacher, lists.unpaired, sums,
        places, splits, pairs, others, lanes_s, lanes_t, 1 / temperature,
        SPLITS=triton.next_power_of_2(splits), BN=16, num_warps=4,
    )  # fmt: skip
    lse, kept, cross, slopes, best_q, best_p = sums
    argmax, pair_q, pair_p, column = places
    return PairSums(ColumnStats(lse, lse, argmax), kept, cross, slopes, best_q, best_p, pair_q, pair_p, column)


def pair_sums_reference(
    student: Tensor, teacher: Tensor, lse_student: Tensor, lists: PairLists, floor: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(kept, cross, slopes) of the lanes that both sides have, in plain torch."""
    lanes = min(student.shape[1], teacher.shape[1])
    log_p = (teacher[:, :lanes].float() / temperature).log_softmax(0)[lists.pair_teacher.long()]
    q = (student[:, :lanes].float() / temperature - lse_student[:lanes]).exp()[lists.pair_student.long()] + floor
    p = log_p.exp()
    return p.sum(0), (p * (log_p - q.log())).sum(0) / torch.log(torch.tensor(2.0)), (p / q).sum(0)
