"""Forward KL of the teacher's distribution to the projected student over the whole teacher vocabulary, in one pass.

With p_T the teacher, q the projected student and members the columns that some student token reaches, each column of
the batch adds `sum_member p_T (log p_T - log(kept) - log(q + TINY) + normaliser)`; `r = p_T / (q + TINY)`, minus the
gradient with respect to q, replaces the teacher's logits in place.

Reference: `limbeck.losses.corrected_modes.target_divergence` (kind forward, no rest bucket).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.corrected_modes import TINY as TINY_VALUE
from limbeck.losses.kernels import COLUMNS
from limbeck.losses.kernels.stats import LOG2E, splits_for
from limbeck.losses.kernels.tables import ProjectionTables

TINY = tl.constexpr(TINY_VALUE)


class BoundaryOut(NamedTuple):
    """Per column `[C]`: the divergence, the teacher mass on reachable columns, `sum_v q r`, and the projected
    student's best column."""

    rows: Tensor
    kept: Tensor
    student_term: Tensor
    argmax: Tensor


@triton.jit
def _boundary_kernel(
    s_ptr, t_ptr, q_ptr, lse_s_ptr, lse_t_ptr, source_ptr, place_ptr, out_ptr, arg_ptr,
    size, ld_s, ld_t, out_ld, per_split, inv_tau,
    SPLITS: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, size)
    scale = inv_tau * LOG2E
    base_s = tl.load(lse_s_ptr + col)[None, :] * LOG2E
    base_t = tl.load(lse_t_ptr + col)[None, :] * LOG2E
    kept = tl.zeros([BV, BN], tl.float32)
    cross = tl.zeros([BV, BN], tl.float32)
    student = tl.zeros([BV, BN], tl.float32)
    best = tl.full([BV, BN], -1.0, tl.float32)
    arg = tl.zeros([BV, BN], tl.int32)
    for v in range(start, end, BV):
        at = v + tl.arange(0, BV)
        inside = at < end
        source = tl.load(source_ptr + at, mask=inside, other=-1)
        place = tl.load(place_ptr + at, mask=inside, other=-1)
        reached = (source >= 0) | (place >= 0)
        t_at = t_ptr + at.to(tl.int64)[:, None] * ld_t + col[None, :]
        t = tl.load(t_at, mask=inside[:, None], other=0.0).to(tl.float32)
        s_at = s_ptr + source.to(tl.int64)[:, None] * ld_s + col[None, :]
        s = tl.load(s_at, mask=(source >= 0)[:, None], other=float("-inf")).to(tl.float32)
        q_at = q_ptr + place.to(tl.int64)[:, None] * ld_s + col[None, :]
        q = tl.load(q_at, mask=(place >= 0)[:, None], other=0.0)
        q += tl.exp2(s * scale - base_s)
        log_t = t * scale - base_t
        gap = log_t - tl.log2(q + TINY)
        p = tl.where(reached[:, None], tl.exp2(log_t), 0.0)
        r = tl.where(reached[:, None], tl.exp2(gap), 0.0)
        kept += p
        cross += p * gap
        student += q * r
        arg = tl.where(q > best, at[:, None], arg)
        best = tl.maximum(best, q)
        tl.store(t_at, r.to(t_ptr.dtype.element_ty), mask=inside[:, None])
    part = SPLITS * out_ld
    out = tl.program_id(1) * out_ld + col
    top = tl.max(best, 0)
    tl.store(out_ptr + out, tl.sum(kept, 0))
    tl.store(out_ptr + part + out, tl.sum(cross, 0))
    tl.store(out_ptr + 2 * part + out, tl.sum(student, 0))
    tl.store(out_ptr + 3 * part + out, top)
    tl.store(arg_ptr + out, tl.min(tl.where(best == top[None, :], arg, 2147483647), 0))


def boundary_divergence(
    student: Tensor,
    teacher: Tensor,
    lse_student: Tensor,
    lse_teacher: Tensor,
    complex_mass: Tensor,
    tables: ProjectionTables,
    chunks: int,
    temperature: float = 1.0,
) -> BoundaryOut:
    """student `[V_s, ld_s]`, teacher `[V_t, ld_t]`: logits whose first `chunks` columns belong together; the teacher's
    are overwritten with r there. lse_* `[ld]` at the temperature; complex_mass `[c, ld_s]`: `project_columns` of
    `tables.complex`."""
    tiles = -(-chunks // COLUMNS)
    width, size = tiles * COLUMNS, teacher.shape[0]
    splits = splits_for(size)
    sums = torch.empty(4, splits, width, dtype=torch.float32, device=student.device)
    arg = torch.empty(splits, width, dtype=torch.int32, device=student.device)
    per_split = -(-size // (splits * 8)) * 8
    _boundary_kernel[(tiles, splits)](
        student, teacher, complex_mass, lse_student, lse_teacher, tables.source, tables.place, sums, arg,
        size, student.shape[1], teacher.shape[1], width, per_split, 1 / temperature,
        SPLITS=splits, BV=8, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    kept, cross, term = sums[:3, :, :chunks].sum(1)
    best = sums[3, :, :chunks].max(0)
    normaliser = math.log1p(size * TINY_VALUE + TINY_VALUE)
    rows = cross * math.log(2) - kept * (kept.clamp(min=TINY_VALUE).log() - normaliser)
    return BoundaryOut(rows, kept, term, arg[:, :chunks].gather(0, best.indices[None]).squeeze(0))
