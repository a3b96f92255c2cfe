"""Forward KL of the teacher's distribution to the projected student over the whole teacher vocabulary.

With p_T the teacher, q the projected student and members the columns that some student token reaches, each column of
the batch adds `sum_member p_T (log p_T - log(kept) - log(q + TINY) + normaliser)`. Most members are pairs, whose sums
`pair_sums` has made; of the others `r = p_T / (q + TINY)`, minus the gradient with respect to q, replaces the teacher's
logits in place; columns that are no members are not even read.

Reference: `limbeck.losses.objectives.distributions.target_divergence` (kind forward, no rest bucket).
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels.direct import LANES, WARPS, PairSums
from limbeck.losses.fast.kernels.stats import LOG2E, fast_log2, fast_reciprocal, weighted_entry
from limbeck.losses.fast.kernels.tables import ProjectionTables
from limbeck.losses.objectives.distributions import TINY as TINY_VALUE

TINY = tl.constexpr(TINY_VALUE)

SPLITS = 256
"""Parts of the columns that are reduced side by side."""


class BoundaryOut(NamedTuple):
    """Per column `[C]`: the divergence, the teacher mass on reachable columns, `sum_v q r`, and the projected
    student's best column; ratio `[U, L_t]`: r of the members that are no pairs, in the memory of the teacher's
    logits."""

    rows: Tensor
    kept: Tensor
    student_term: Tensor
    argmax: Tensor
    ratio: Tensor


# The members that are no pairs: reads the logits of a column's student tokens and the teacher's, and writes r over the
# latter. Over the teacher's columns and not the student's tokens: then q is whole when it is needed, is never stored,
# and the sums stay in registers. Programs split the columns, since there are too few tiles of lanes to fill a GPU;
# their parts are added outside. Each has every SPLITS-th column, since the longest lists come first. r_ptr is t_ptr, by
# a type whose range r needs.
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
        offset = v.to(tl.int64) * lanes_t + col
        z = tl.load(t_ptr + offset, mask=inside, other=0.0)
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
        tl.store(r_ptr + offset, r.to(r_ptr.dtype.element_ty), mask=inside)
    part = SPLITS * width
    out = tl.program_id(1) * width + col
    tl.store(out_ptr + out, kept, mask=inside)
    tl.store(out_ptr + part + out, cross, mask=inside)
    tl.store(out_ptr + 2 * part + out, student, mask=inside)
    tl.store(out_ptr + 3 * part + out, best, mask=inside)
    tl.store(arg_ptr + out, arg, mask=inside)


def boundary_divergence(
    student: Tensor,
    teacher: Tensor,
    lse_student: Tensor,
    pairs: PairSums,
    tables: ProjectionTables,
    chunks: int,
    temperature: float = 1.0,
) -> BoundaryOut:
    """student `[V, L_s]`, teacher `[U, L_t]`: logits whose first `chunks` columns belong together; lse_student `[L_s]`
    at the temperature. pairs: the sums of `tables`' pairs, whose columns keep the teacher's logits; the other members
    are overwritten with r."""
    size, number = teacher.shape[0], tables.others.numel()
    # r reaches 1 / TINY: float16 would make it infinite, bfloat16 has the same size and holds it
    ratio = teacher.view(torch.bfloat16) if teacher.dtype == torch.float16 else teacher
    width = min(-(-chunks // LANES) * LANES, student.shape[1], teacher.shape[1])
    splits = min(SPLITS, max(number, 1))
    sums = torch.empty(4, splits, width, dtype=torch.float32, device=student.device)
    arg = torch.empty(splits, width, dtype=torch.int32, device=student.device)
    _others_kernel[(-(-width // LANES), splits)](
        student, teacher, ratio, lse_student, pairs.stats.lse_tau, tables.others, tables.offsets, tables.students,
        tables.weights, sums, arg, number, student.shape[1], teacher.shape[1], width, 1 / temperature,
        SPLITS=splits, BN=LANES, num_warps=WARPS,
    )  # fmt: skip
    kept, cross, term = sums[:3, :, :chunks].sum(1)
    best = sums[3, :, :chunks].max(0)
    pair_kept = pairs.kept[:chunks]
    kept, cross = kept + pair_kept, cross + pairs.cross[:chunks]
    # of a pair q r is p - TINY p / (q + TINY)
    term = term + pair_kept - TINY_VALUE * pairs.slopes[:chunks]
    column = arg[:, :chunks].gather(0, best.indices[None]).squeeze(0)
    column = torch.where(best.values > pairs.best_q[:chunks], column, pairs.column[:chunks])
    normaliser = math.log1p(size * TINY_VALUE + TINY_VALUE)
    rows = cross * math.log(2) - kept * (kept.clamp(min=TINY_VALUE).log() - normaliser)
    return BoundaryOut(rows, kept, term, column, ratio)
