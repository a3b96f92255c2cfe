"""Statistics of a block's logits that every objective reads: log-sum-exp, maximum and its place over the vocabulary,
and the student's probability on chosen teacher columns, `q[i] = sum_s W[s, column_i] p(s)`.

References: `column_stats_reference`, `project_columns_reference`, and `VocabMap.project_at`, whose layout is row-major.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels import COLUMNS
from limbeck.losses.fast.kernels.tables import ByColumn, ProjectionTables

WIDE, WIDE_WARPS = 512, 2
"""Columns and warps of programs that walk through the vocabulary token by token: 16 bytes per thread and load."""

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite, so that an empty part leaves no NaN
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def splits_for(size: int, least: int = 32, most: int = 256) -> int:
    """Parts of the vocabulary that are reduced side by side: a power of two, each part with at least `least` rows."""
    return min(most, 1 << max(size // least, 1).bit_length() - 1)


class ColumnStats(NamedTuple):
    """Statistics of logits `[V, L]`, `[L]` each: log-sum-exp at temperature 1 and at tau (the same tensor where tau is
    1), and the lowest id that has the largest logit (int32)."""

    lse: Tensor
    lse_tau: Tensor
    argmax: Tensor


# The device's own logarithm (relative error 2^-22). Triton's is a polynomial of some twenty instructions; its
# interpreter knows no other.
@triton.jit
def fast_log2(x):
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


# The device's own reciprocal, for the same reason.
@triton.jit
def fast_reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


# A tile of logits, -inf beyond the vocabulary's end.
@triton.jit
def _load(x_ptr, token, end, lanes, col):
    # tokens x lanes may be beyond int32
    offset = token.to(tl.int64)[:, None] * lanes + col[None, :]
    return tl.load(x_ptr + offset, mask=(token < end)[:, None], other=float("-inf")).to(tl.float32)


# Reads every logit once; writes four numbers per lane and part of the vocabulary. Programs split the vocabulary, since
# there are too few tiles of lanes to fill a GPU; each keeps BV running results and joins them at its end, so the loop
# over tokens exchanges nothing between threads.
@triton.jit
def _partial_kernel(
    x_ptr, top_ptr, sum_ptr, scaled_ptr, arg_ptr, size, lanes, per_split, inv_tau,
    SCALED: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, size)
    rows = tl.arange(0, BV)
    top = tl.full([BV, BN], LOWEST, tl.float32)
    arg = tl.zeros([BV, BN], tl.int32)
    total = tl.zeros([BV, BN], tl.float32)
    scaled = tl.zeros([BV, BN], tl.float32)
    for v in range(start, end, 4 * BV):
        token = v + rows
        x0 = _load(x_ptr, token, end, lanes, col)
        x1 = _load(x_ptr, token + BV, end, lanes, col)
        x2 = _load(x_ptr, token + 2 * BV, end, lanes, col)
        x3 = _load(x_ptr, token + 3 * BV, end, lanes, col)
        old = top
        # of these rows only the first is remembered; which of them it was is found at the end
        most = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        arg = tl.where(most > top, v, arg)
        top = tl.maximum(top, most)
        # one rescaling per four loads: the exponential unit is what this loop waits for
        base = top * LOG2E
        total = total * tl.exp2((old - top) * LOG2E)
        total += tl.exp2(x0 * LOG2E - base) + tl.exp2(x1 * LOG2E - base)
        total += tl.exp2(x2 * LOG2E - base) + tl.exp2(x3 * LOG2E - base)
        if SCALED:
            tau2 = inv_tau * LOG2E
            scaled = scaled * tl.exp2((old - top) * tau2)
            scaled += tl.exp2((x0 - top) * tau2) + tl.exp2((x1 - top) * tau2)
            scaled += tl.exp2((x2 - top) * tau2) + tl.exp2((x3 - top) * tau2)
    best = tl.max(top, 0)
    out = tl.program_id(1) * lanes + col
    tl.store(top_ptr + out, best)
    tl.store(sum_ptr + out, tl.sum(total * tl.exp2((top - best[None, :]) * LOG2E), 0))
    tl.store(arg_ptr + out, tl.min(tl.where(top == best[None, :], arg, 2147483647), 0))
    if SCALED:
        tl.store(scaled_ptr + out, tl.sum(scaled * tl.exp2((top - best[None, :]) * (inv_tau * LOG2E)), 0))


# Reads the parts once, and STEP logits of each lane, among which is the largest; writes each lane's results once. A
# kernel of its own, because a part must be rescaled to the largest maximum of all parts, which is known only when the
# last of them is done.
@triton.jit
def _combine_kernel(
    x_ptr, top_ptr, sum_ptr, scaled_ptr, arg_ptr, lse_ptr, tau_ptr, out_arg_ptr, size, lanes, inv_tau,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    part_offset = tl.arange(0, SPLITS)[:, None] * lanes + col[None, :]
    top = tl.load(top_ptr + part_offset)
    best = tl.max(top, 0)
    total = tl.sum(tl.load(sum_ptr + part_offset) * tl.exp2((top - best[None, :]) * LOG2E), 0)
    tl.store(lse_ptr + col, best + tl.log(total))
    last = 2147483647
    first = tl.min(tl.where(top == best[None, :], tl.load(arg_ptr + part_offset), last), 0)
    first = tl.where(first < size, first, 0)  # no maximum is one of NaN
    token = first[None, :] + tl.arange(0, STEP)[:, None]
    offset = token.to(tl.int64) * lanes + col[None, :]
    x = tl.load(x_ptr + offset, mask=token < size, other=float("-inf")).to(tl.float32)
    argmax = tl.min(tl.where(x == best[None, :], token, last), 0)
    tl.store(out_arg_ptr + col, tl.where(argmax < size, argmax, first))
    if SCALED:
        total = tl.sum(tl.load(scaled_ptr + part_offset) * tl.exp2((top - best[None, :]) * (inv_tau * LOG2E)), 0)
        tl.store(tau_ptr + col, best * inv_tau + tl.log(total))


def column_stats(logits: Tensor, temperature: float = 1.0) -> ColumnStats:
    """Statistics of every column of logits `[V, L]` (any floating type; computed in float32)."""
    size, lanes = logits.shape
    scaled = temperature != 1.0
    splits = splits_for(size, most=128)
    parts = logits.new_empty(4 if scaled else 3, splits, lanes, dtype=torch.float32)
    arg = parts[-1].view(torch.int32)
    lse = torch.empty(lanes, dtype=torch.float32, device=logits.device)
    lse_tau = torch.empty_like(lse) if scaled else lse
    argmax = torch.empty(lanes, dtype=torch.int32, device=logits.device)
    step = 4 * 8
    per_split = -(-size // (splits * step)) * step
    _partial_kernel[(lanes // COLUMNS, splits)](
        logits, parts[0], parts[1], parts[2], arg, size, lanes, per_split, 1 / temperature,
        SCALED=scaled, BV=8, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    _combine_kernel[(lanes // 16,)](
        logits, parts[0], parts[1], parts[2], arg, lse, lse_tau, argmax, size, lanes, 1 / temperature,
        SCALED=scaled, SPLITS=splits, STEP=step, BN=16, num_warps=4,
    )  # fmt: skip
    return ColumnStats(lse, lse_tau, argmax)


TOKENS = 256
"""Lanes that one program of `token_log_probs` handles."""


# Reads one logit of each lane. One kernel in place of the ten small operations that plain torch takes for it.
@triton.jit(do_not_specialize=["width"])
def _token_kernel(x_ptr, lse_ptr, id_ptr, out_ptr, width, lanes, tau, BN: tl.constexpr):
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.load(id_ptr + col, mask=col < width, other=-1).to(tl.int64)
    x = tl.load(x_ptr + token * lanes + col, mask=token >= 0, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + col, mask=token >= 0, other=0.0)
    tl.store(out_ptr + col, tl.where(token >= 0, x / tau - lse, 0.0), mask=col < width)


def token_log_probs(logits: Tensor, lse: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability `[width]` of token `ids[i]` at lane i of logits `[V, L]`; 0 where the id is negative."""
    out = torch.empty(ids.numel(), dtype=torch.float32, device=logits.device)
    if ids.numel():
        _token_kernel[(-(-ids.numel() // TOKENS),)](
            logits, lse, ids, out, ids.numel(), logits.shape[1], temperature, BN=TOKENS, num_warps=4
        )
    return out


def column_stats_reference(logits: Tensor, temperature: float = 1.0) -> ColumnStats:
    """The same in plain torch."""
    wide = logits.float()
    lse = wide.logsumexp(0)
    lse_tau = lse if temperature == 1.0 else (wide / temperature).logsumexp(0)
    return ColumnStats(lse, lse_tau, wide.argmax(0).int())


# The mass of a token or cell of the other side: one token's probability, or the row that was summed for it. One of
# source and place is -1; its load is masked, and what it stands for is 0.
@triton.jit
def mass_of(x_ptr, sum_ptr, source, place, lanes, col, width, scale, base):
    x_at = x_ptr + source.to(tl.int64) * lanes + col
    x = tl.load(x_at, mask=col < tl.where(source >= 0, width, 0), other=float("-inf")).to(tl.float32)
    row = tl.load(sum_ptr + place.to(tl.int64) * lanes + col, mask=col < tl.where(place >= 0, width, 0), other=0.0)
    return row + tl.exp2(x * scale - base)


# One entry of a column's list: its weight, and its student token's logits; weight 0 behind the list's end.
@triton.jit
def weighted_entry(x_ptr, student_ptr, weight_ptr, entry, last, lanes, width, col, scale, base):
    some = entry < last
    safe = tl.minimum(entry, last - 1)
    student = tl.load(student_ptr + safe)
    weight = tl.where(some, tl.load(weight_ptr + safe), 0.0)
    x = tl.load(x_ptr + student.to(tl.int64) * lanes + col, mask=col < tl.where(some, width, 0), other=float("-inf"))
    return weight, x.to(tl.float32) * scale - base


# Reads the logits of a teacher column's student tokens, writes the column once. One program per column and tile of
# lanes walks through the column's list: neighbouring lanes read neighbouring memory whatever the tokens are, four
# entries are under way at a time, and no two programs add to one place. The longest lists come first in
# `tables.multi_source`.
@triton.jit
def _project_kernel(
    x_ptr, lse_ptr, out_ptr, column_ptr, offset_ptr, student_ptr, weight_ptr, lanes, inv_tau, BN: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = col < lanes
    column = tl.load(column_ptr + row)
    first = tl.load(offset_ptr + column)
    last = tl.load(offset_ptr + column + 1)
    scale = inv_tau * LOG2E
    base = tl.load(lse_ptr + col, mask=inside, other=0.0) * LOG2E
    total = tl.zeros([BN], tl.float32)
    for e in range(first, last, 4):
        w0, x0 = weighted_entry(x_ptr, student_ptr, weight_ptr, e, last, lanes, lanes, col, scale, base)
        w1, x1 = weighted_entry(x_ptr, student_ptr, weight_ptr, e + 1, last, lanes, lanes, col, scale, base)
        w2, x2 = weighted_entry(x_ptr, student_ptr, weight_ptr, e + 2, last, lanes, lanes, col, scale, base)
        w3, x3 = weighted_entry(x_ptr, student_ptr, weight_ptr, e + 3, last, lanes, lanes, col, scale, base)
        total += w0 * tl.exp2(x0) + w1 * tl.exp2(x1) + w2 * tl.exp2(x2) + w3 * tl.exp2(x3)
    tl.store(out_ptr + row.to(tl.int64) * lanes + col, total, mask=inside)


def project_columns(logits: Tensor, lse: Tensor, columns: Tensor, tables: ByColumn, temperature: float = 1.0) -> Tensor:
    """Mass of teacher columns `[K]` under student logits `[V, L]` with log-sum-exp `[L]`: float32 `[K, L]`."""
    lanes = logits.shape[1]
    out = torch.empty(columns.numel(), lanes, dtype=torch.float32, device=logits.device)
    if columns.numel():
        _project_kernel[(columns.numel(), -(-lanes // WIDE))](
            logits, lse, out, columns, tables.offsets, tables.students, tables.weights, lanes, 1 / temperature,
            BN=WIDE, num_warps=WIDE_WARPS,
        )  # fmt: skip
    return out


def project_columns_reference(
    logits: Tensor, lse: Tensor, columns: Tensor, tables: ProjectionTables, temperature: float = 1.0
) -> Tensor:
    """The same in plain torch."""
    probs = (logits.float() / temperature - lse).exp()
    offsets = tables.offsets.tolist()
    rows = [
        (probs[tables.students[a:b].long()] * tables.weights[a:b, None]).sum(0)
        for a, b in ((offsets[c], offsets[c + 1]) for c in columns.tolist())
    ]
    return torch.stack(rows) if rows else probs.new_empty(0, logits.shape[1])
