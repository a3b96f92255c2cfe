"""Forward KL of the teacher's distribution to the projected student over the whole teacher vocabulary, in one pass.

With p_T the teacher, q the projected student and members the columns that some student token reaches, each column of
the batch adds `sum_member p_T (log p_T - log(kept) - log(q + TINY) + normaliser)`; `r = p_T / (q + TINY)`, minus the
gradient with respect to q, replaces the teacher's logits of the members in place; other columns are not even read.

Reference: `limbeck.losses.objectives.corrected.target_divergence` (kind forward, no rest bucket).
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels import stats
from limbeck.losses.fast.kernels.direct import PairSums
from limbeck.losses.fast.kernels.stats import (
    LOG2E,
    WIDE,
    WIDE_WARPS,
    fast_log2,
    fast_reciprocal,
    mass_of,
    splits_for,
    weighted_entry,
)
from limbeck.losses.fast.kernels.tables import ProjectionTables
from limbeck.losses.objectives.corrected import TINY as TINY_VALUE

TINY = tl.constexpr(TINY_VALUE)


class BoundaryOut(NamedTuple):
    """Per column `[C]`: the divergence, the teacher mass on reachable columns, `sum_v q r`, and the projected
    student's best column; ratio `[U, L_t]`: r where a column is reachable, in the memory of the teacher's logits."""

    rows: Tensor
    kept: Tensor
    student_term: Tensor
    argmax: Tensor
    ratio: Tensor


# Reads the teacher's logits at reachable columns once and overwrites them with r; reads a student logit, or a row of
# `multi_mass`, for each. Over the teacher's columns and not the student's tokens: then q is whole when it is needed,
# and the sums stay in registers. Programs split the columns, since there are too few tiles of lanes to fill a GPU;
# their parts are added outside. r_ptr is t_ptr, by a type whose range r needs.
@triton.jit
def _boundary_kernel(
    s_ptr, t_ptr, r_ptr, q_ptr, lse_s_ptr, lse_t_ptr, reached_ptr, source_ptr, place_ptr, out_ptr, arg_ptr,
    number, lanes_s, lanes_t, width, per_split, inv_tau,
    SPLITS: tl.constexpr, FAST: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = col < width
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, number)
    scale = inv_tau * LOG2E
    base_s = tl.load(lse_s_ptr + col, mask=inside, other=0.0) * LOG2E
    base_t = tl.load(lse_t_ptr + col, mask=inside, other=0.0) * LOG2E
    kept = tl.zeros([BN], tl.float32)
    cross = tl.zeros([BN], tl.float32)
    student = tl.zeros([BN], tl.float32)
    best = tl.full([BN], -1.0, tl.float32)
    arg = tl.zeros([BN], tl.int32)
    for i in range(start, end, 2):
        # two tokens at a time: their loads are under way together; the store of one would hold up the next
        second = i + 1 < end
        also = col < tl.where(second, width, 0)
        v0 = tl.load(reached_ptr + i)
        v1 = tl.load(reached_ptr + tl.minimum(i + 1, end - 1))
        at0 = t_ptr + v0.to(tl.int64) * lanes_t + col
        at1 = t_ptr + v1.to(tl.int64) * lanes_t + col
        log0 = tl.load(at0, mask=inside, other=0.0).to(tl.float32) * scale - base_t
        log1 = tl.load(at1, mask=also, other=float("-inf")).to(tl.float32) * scale - base_t
        source0 = tl.load(source_ptr + v0)
        source1 = tl.load(source_ptr + v1)
        place0 = tl.load(place_ptr + v0)
        place1 = tl.load(place_ptr + v1)
        q0 = mass_of(s_ptr, q_ptr, source0, place0, lanes_s, col, width, scale, base_s)
        q1 = mass_of(s_ptr, q_ptr, source1, place1, lanes_s, col, width, scale, base_s)
        p0 = tl.exp2(log0)
        p1 = tl.exp2(log1)
        if FAST:
            gap0 = log0 - fast_log2(q0 + TINY)
            gap1 = tl.where(also, log1 - fast_log2(q1 + TINY), 0.0)
            r0 = p0 * fast_reciprocal(q0 + TINY)
            r1 = p1 * fast_reciprocal(q1 + TINY)
        else:
            gap0 = log0 - tl.log2(q0 + TINY)
            gap1 = tl.where(also, log1 - tl.log2(q1 + TINY), 0.0)
            r0 = tl.exp2(gap0)
            r1 = tl.exp2(gap1)
        tl.store(r_ptr + v0.to(tl.int64) * lanes_t + col, r0.to(r_ptr.dtype.element_ty), mask=inside)
        tl.store(r_ptr + v1.to(tl.int64) * lanes_t + col, r1.to(r_ptr.dtype.element_ty), mask=also)
        kept += p0 + p1
        cross += p0 * gap0 + p1 * gap1
        student += q0 * r0 + tl.where(also, q1 * r1, 0.0)
        arg = tl.where(q0 > best, v0, arg)
        best = tl.maximum(best, q0)
        arg = tl.where(q1 > best, v1, arg)
        best = tl.maximum(best, q1)
    part = SPLITS * width
    out = tl.program_id(1) * width + col
    tl.store(out_ptr + out, kept, mask=inside)
    tl.store(out_ptr + part + out, cross, mask=inside)
    tl.store(out_ptr + 2 * part + out, student, mask=inside)
    tl.store(out_ptr + 3 * part + out, best, mask=inside)
    tl.store(arg_ptr + out, arg, mask=inside)


# The columns that are no pairs: reads the logits of a column's student tokens and the teacher's, and writes r over the
# latter. As `_boundary_kernel`, but q is summed here, so that it is never stored; a program has every SPLITS-th column,
# since the longest lists come first.
@triton.jit(do_not_specialize=["number"])
def _others_kernel(
    s_ptr, t_ptr, r_ptr, lse_s_ptr, lse_t_ptr, column_ptr, offset_ptr, student_ptr, weight_ptr, out_ptr, arg_ptr,
    number, lanes_s, lanes_t, width, inv_tau,
    SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = col < width
    scale = inv_tau * LOG2E
    base_s = tl.load(lse_s_ptr + col, mask=inside, other=0.0) * LOG2E
    base_t = tl.load(lse_t_ptr + col, mask=inside, other=0.0) * LOG2E
    kept = tl.zeros([BN], tl.float32)
    cross = tl.zeros([BN], tl.float32)
    student = tl.zeros([BN], tl.float32)
    best = tl.full([BN], -1.0, tl.float32)
    arg = tl.zeros([BN], tl.int32)
    for i in range(tl.program_id(1), number, SPLITS):
        v = tl.load(column_ptr + i)
        at = v.to(tl.int64) * lanes_t + col
        z = tl.load(t_ptr + at, mask=inside, other=0.0)
        first = tl.load(offset_ptr + v)
        last = tl.load(offset_ptr + v + 1)
        q = tl.zeros([BN], tl.float32)
        for e in range(first, last, 8):
            for k in tl.static_range(8):
                w, x = weighted_entry(s_ptr, student_ptr, weight_ptr, e + k, last, lanes_s, width, col, scale, base_s)
                q += w * tl.exp2(x)
        log_p = z.to(tl.float32) * scale - base_t
        p = tl.exp2(log_p)
        r = p * fast_reciprocal(q + TINY)
        kept += p
        cross += p * (log_p - fast_log2(q + TINY))
        student += q * r
        arg = tl.where(q > best, v, arg)
        best = tl.maximum(best, q)
        tl.store(r_ptr + at, r.to(r_ptr.dtype.element_ty), mask=inside)
    part = SPLITS * width
    out = tl.program_id(1) * width + col
    tl.store(out_ptr + out, kept, mask=inside)
    tl.store(out_ptr + part + out, cross, mask=inside)
    tl.store(out_ptr + 2 * part + out, student, mask=inside)
    tl.store(out_ptr + 3 * part + out, best, mask=inside)
    tl.store(arg_ptr + out, arg, mask=inside)


OTHERS = 256
"""Parts of the columns that are no pairs."""
OTHER_LANES, OTHER_WARPS = 512, 2


def boundary_divergence(
    student: Tensor,
    teacher: Tensor,
    lse_student: Tensor,
    lse_teacher: Tensor,
    multi_mass: Tensor | None,
    tables: ProjectionTables,
    chunks: int,
    temperature: float = 1.0,
    pairs: PairSums | None = None,
) -> BoundaryOut:
    """student `[V, L_s]`, teacher `[U, L_t]`: logits whose first `chunks` columns belong together; the teacher's
    are overwritten with r there. lse_* `[L]` at the temperature; multi_mass `[c, L_s]`: `project_columns` of
    `tables.multi_source`; pairs: the sums of `tables`' pairs, whose columns are not read again, and keep the teacher's
    logits (no multi_mass is needed then)."""
    reached = tables.reached if pairs is None else tables.others
    size, number = teacher.shape[0], reached.numel()
    # r reaches 1 / TINY: float16 would make it infinite, bfloat16 has the same size and holds it
    ratio = teacher.view(torch.bfloat16) if teacher.dtype == torch.float16 else teacher
    width = min(-(-chunks // WIDE) * WIDE, student.shape[1], teacher.shape[1])
    splits = splits_for(number) if pairs is None else min(OTHERS, max(number, 1))
    sums = torch.empty(4, splits, width, dtype=torch.float32, device=student.device)
    arg = torch.empty(splits, width, dtype=torch.int32, device=student.device)
    if multi_mass is not None:
        _boundary_kernel[(-(-width // WIDE), splits)](
            student, teacher, ratio, multi_mass, lse_student, lse_teacher, reached, tables.source,
            tables.place, sums, arg, number, student.shape[1], teacher.shape[1], width, -(-number // splits),
            1 / temperature, SPLITS=splits, FAST=stats.FAST, BN=WIDE, num_warps=WIDE_WARPS,
        )  # fmt: skip
    else:
        _others_kernel[(-(-width // OTHER_LANES), splits)](
            student, teacher, ratio, lse_student, lse_teacher, reached, tables.offsets, tables.students, tables.weights,
            sums, arg, number, student.shape[1], teacher.shape[1], width, 1 / temperature,
            SPLITS=splits, BN=OTHER_LANES, num_warps=OTHER_WARPS,
        )  # fmt: skip
    kept, cross, term = sums[:3, :, :chunks].sum(1)
    best = sums[3, :, :chunks].max(0)
    column = arg[:, :chunks].gather(0, best.indices[None]).squeeze(0)
    if pairs is not None:
        own = pairs.kept[:chunks]
        kept, cross = kept + own, cross + pairs.cross[:chunks]
        term = term + own - TINY_VALUE * pairs.slopes[:chunks]
        column = torch.where(best.values > pairs.best_q[:chunks], column, pairs.column[:chunks])
    normaliser = math.log1p(size * TINY_VALUE + TINY_VALUE)
    rows = cross * math.log(2) - kept * (kept.clamp(min=TINY_VALUE).log() - normaliser)
    return BoundaryOut(rows, kept, term, column, ratio)
