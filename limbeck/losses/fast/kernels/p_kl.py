"""P-KL on the micro-batch's teacher columns K: divergence and gradient, in one pass over `[K, n]`.

Reference: `limbeck.losses.objectives.p_kl.PKL` (forward).
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels import COLUMNS
from limbeck.losses.fast.kernels.stats import splits_for
from limbeck.losses.objectives.p_kl import P_KL_EPS

EPS = tl.constexpr(P_KL_EPS)


class PKlOut(NamedTuple):
    """Per column `[C]`: the divergence, the constant that belongs to every entry's gradient, `sum_v q (R - shift)`, and
    whether both sides prefer one column. R, minus the gradient with respect to q without the constant, replaced q."""

    rows: Tensor
    shift: Tensor
    student_term: Tensor
    right: Tensor


# Reads q and the teacher's logits at K once, overwrites q with R. K is small and dense, so tiles of BV tokens by BN
# lanes are read in order, without a table; programs split K, and parts are added outside.
@triton.jit
def _p_kl_kernel(
    q_ptr, t_ptr, lse_ptr, sum_ptr, out_ptr, arg_ptr, size, lanes_q, lanes_t, out_lanes, per_split, inv_tau,
    SPLITS: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, size)
    lse = tl.load(lse_ptr + col)[None, :]
    scale = 1.0 / tl.maximum(tl.load(sum_ptr + col), EPS)[None, :]
    rows = tl.zeros([BV, BN], tl.float32)
    dot = tl.zeros([BV, BN], tl.float32)
    best_q = tl.full([BV, BN], -1e30, tl.float32)
    best_t = tl.full([BV, BN], -1e30, tl.float32)
    arg_q = tl.zeros([BV, BN], tl.int32)
    arg_t = tl.zeros([BV, BN], tl.int32)
    for v in range(start, end, BV):
        column = v + tl.arange(0, BV)
        inside = (column < end)[:, None]
        q_at = q_ptr + column.to(tl.int64)[:, None] * lanes_q + col[None, :]
        t_at = t_ptr + column.to(tl.int64)[:, None] * lanes_t + col[None, :]
        # less than any mass, so that no place behind the end is the best
        q = tl.load(q_at, mask=inside, other=-1.0)
        # float16 has no -1e30
        t = tl.where(inside, tl.load(t_at, mask=inside, other=0.0).to(tl.float32), -1e30)
        arg_q = tl.where(q > best_q, column[:, None], arg_q)
        arg_t = tl.where(t > best_t, column[:, None], arg_t)
        best_q = tl.maximum(best_q, q)
        best_t = tl.maximum(best_t, t)
        share = tl.maximum(q, 0.0) * scale
        log_t = t * inv_tau - lse
        p = tl.exp(log_t)
        rows += tl.where(inside, p * (log_t - tl.log(share + EPS)), 0.0)
        slope = p / (share + EPS)
        dot += slope * share
        tl.store(q_at, slope * scale, mask=inside)
    part = SPLITS * out_lanes
    out = tl.program_id(1) * out_lanes + col
    top_q = tl.max(best_q, 0)
    top_t = tl.max(best_t, 0)
    tl.store(out_ptr + out, tl.sum(rows, 0))
    tl.store(out_ptr + part + out, tl.sum(dot, 0))
    tl.store(out_ptr + 2 * part + out, top_q)
    tl.store(out_ptr + 3 * part + out, top_t)
    tl.store(arg_ptr + out, tl.min(tl.where(best_q == top_q[None, :], arg_q, 2147483647), 0))
    tl.store(arg_ptr + part + out, tl.min(tl.where(best_t == top_t[None, :], arg_t, 2147483647), 0))


def p_kl_divergence(
    mass: Tensor, teacher: Tensor, lse: Tensor, total: Tensor, chunks: int, temperature: float = 1.0
) -> PKlOut:
    """mass `[K, L_q]`: each chunk's q, overwritten with R; teacher `[K, L_t]`: its logits at K (of a chunk's mean
    row); lse `[L_t]`: mean log-sum-exp within K; total `[L_q]`: sum of q over K. The first `chunks` columns count."""
    tiles, size = -(-chunks // COLUMNS), mass.shape[0]
    width = tiles * COLUMNS
    splits = splits_for(size)
    sums = torch.empty(4, splits, width, dtype=torch.float32, device=mass.device)
    arg = torch.empty(2, splits, width, dtype=torch.int32, device=mass.device)
    per_split = -(-size // (splits * 8)) * 8
    _p_kl_kernel[(tiles, splits)](
        mass, teacher, lse, total, sums, arg, size, mass.shape[1], teacher.shape[1], width, per_split,
        1 / temperature, SPLITS=splits, BV=8, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    rows, dot = sums[:2, :, :chunks].sum(1)
    best = sums[2:, :, :chunks].max(1).indices
    chosen = arg[:, :, :chunks].gather(1, best[:, None]).squeeze(1)
    whole = total[:chunks]
    none = torch.zeros_like(dot)
    shift = torch.where(whole > P_KL_EPS, dot / whole.clamp(min=P_KL_EPS), none)
    # a divergence of normalised q does not change with its scale
    term = torch.where(whole > P_KL_EPS, none, dot)
    return PKlOut(rows, shift, term, chosen[0] == chosen[1])


# Reads the lanes of a chunk's tokens once, writes its own lane once. Over chunks and not over lanes: lanes of several
# tokens are few, and a chunk's sum needs no atomic addition.
@triton.jit(do_not_specialize=["start", "extras", "chunks"])
def _chunk_mean_kernel(
    x_ptr, first_ptr, count_ptr, size, lanes, start, extras, chunks, BV: tl.constexpr, BN: tl.constexpr
):
    chunk = tl.program_id(0) * BN + tl.arange(0, BN)
    column = (tl.program_id(1) * BV + tl.arange(0, BV)).to(tl.int64)
    real = chunk < chunks
    inside = (column < size)[:, None] & real[None, :]
    first = tl.load(first_ptr + chunk, mask=real, other=0)
    count = tl.load(count_ptr + chunk, mask=real, other=0)
    address = x_ptr + column[:, None] * lanes + (start + chunk)[None, :]
    total = tl.load(address, mask=inside, other=0.0)
    for j in range(tl.max(count, 0)):
        more = inside & (j < count)[None, :]
        total += tl.load(x_ptr + column[:, None] * lanes + (extras + first + j)[None, :], mask=more, other=0.0)
    tl.store(address, total / (count + 1).to(tl.float32)[None, :], mask=inside)


def mean_over_chunks(values: Tensor, start: int, extras: int, first: Tensor, count: Tensor) -> None:
    """Replace the columns `start + m` of values `[K, L]` by the mean of themselves and `count[m]` more columns, those
    from `extras + first[m]` on. first, count: int32 `[M]`."""
    if count.numel():
        grid = (-(-count.numel() // 32), -(-values.shape[0] // 16))
        _chunk_mean_kernel[grid](
            values, first, count, values.shape[0], values.shape[1], start, extras, count.numel(),
            BV=16, BN=32, num_warps=4,
        )  # fmt: skip
