"""Forward KL over pairs of tokens, not renormalised: `sum_pairs p_T (log p_T - log p_S)` for each column.

Serves gold and H-KL (common pairs) and a teacher with the student's own vocabulary (every token is a pair).
Reference: the first half of `limbeck.losses.objectives.common_kl.CommonKL`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels.stats import LOG2E, LOWEST, WIDE, WIDE_WARPS, splits_for
from limbeck.losses.fast.kernels.tables import PairTables


class PairsOut(NamedTuple):
    """Per column `[C]`: the divergence, the teacher's mass on the pairs, and whether both sides prefer one pair."""

    rows: Tensor
    kept: Tensor
    right: Tensor


# Reads both sides' logits at each pair once, writes sums per lane and part. Pair by pair: a pair's two rows of memory
# are read whole by neighbouring lanes, wherever the two tokens lie in their vocabularies.
@triton.jit
def _pairs_kernel(
    s_ptr, t_ptr, lse_s_ptr, lse_t_ptr, student_ptr, teacher_ptr, out_ptr, arg_ptr,
    number, lanes_s, lanes_t, width, per_split, inv_tau,
    SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = col < width
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, number)
    scale = inv_tau * LOG2E
    base_s = tl.load(lse_s_ptr + col, mask=inside, other=0.0) * LOG2E
    base_t = tl.load(lse_t_ptr + col, mask=inside, other=0.0) * LOG2E
    rows = tl.zeros([BN], tl.float32)
    kept = tl.zeros([BN], tl.float32)
    best_s = tl.full([BN], LOWEST, tl.float32)
    best_t = tl.full([BN], LOWEST, tl.float32)
    arg_s = tl.zeros([BN], tl.int32)
    arg_t = tl.zeros([BN], tl.int32)
    for i in range(start, end):
        student = tl.load(student_ptr + i).to(tl.int64)
        teacher = tl.load(teacher_ptr + i).to(tl.int64)
        s = tl.load(s_ptr + student * lanes_s + col, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + teacher * lanes_t + col, mask=inside, other=0.0).to(tl.float32)
        log_t = t * scale - base_t
        p = tl.exp2(log_t)
        rows += p * (log_t - (s * scale - base_s))
        kept += p
        arg_s = tl.where(s > best_s, i, arg_s)
        arg_t = tl.where(t > best_t, i, arg_t)
        best_s = tl.maximum(best_s, s)
        best_t = tl.maximum(best_t, t)
    part = SPLITS * width
    out = tl.program_id(1) * width + col
    tl.store(out_ptr + out, rows, mask=inside)
    tl.store(out_ptr + part + out, kept, mask=inside)
    tl.store(out_ptr + 2 * part + out, best_s, mask=inside)
    tl.store(out_ptr + 3 * part + out, best_t, mask=inside)
    tl.store(arg_ptr + out, arg_s, mask=inside)
    tl.store(arg_ptr + part + out, arg_t, mask=inside)


def pairs_divergence(
    student: Tensor,
    teacher: Tensor,
    lse_student: Tensor,
    lse_teacher: Tensor,
    tables: PairTables,
    chunks: int,
    temperature: float = 1.0,
) -> PairsOut:
    """Over the first `chunks` columns of student `[V, L_s]` and teacher `[U, L_t]` logits."""
    number = tables.student.numel()
    width = min(-(-chunks // WIDE) * WIDE, student.shape[1], teacher.shape[1])
    splits = splits_for(number)
    sums = torch.empty(4, splits, width, dtype=torch.float32, device=student.device)
    arg = torch.empty(2, splits, width, dtype=torch.int32, device=student.device)
    _pairs_kernel[(-(-width // WIDE), splits)](
        student, teacher, lse_student, lse_teacher, tables.student, tables.teacher, sums, arg,
        number, student.shape[1], teacher.shape[1], width, -(-number // splits), 1 / temperature,
        SPLITS=splits, BN=WIDE, num_warps=WIDE_WARPS,
    )  # fmt: skip
    rows, kept = sums[:2, :, :chunks].sum(1)
    best = sums[2:, :, :chunks].max(1).indices
    chosen = arg[:, :, :chunks].gather(1, best[:, None]).squeeze(1)
    return PairsOut(rows * math.log(2), kept, chosen[0] == chosen[1])
