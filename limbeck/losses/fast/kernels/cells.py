"""tree_kl's kernels at the roots: divergence over cells.

A cell's mass on a side is the probability of its token there, or, where it has several, a row that was summed for it
(`cell_masses`). In one pass over the cells, with q the student's and p the teacher's mass of a cell, each lane adds to
the divergence, and R, minus the gradient with respect to q (up to a factor and a constant of the lane), replaces one
row of the teacher's logits: that of the cell's first teacher token.

Reference: `limbeck.losses.objectives.tree_kl.TreeKL.root`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels.direct import PairSums
from limbeck.losses.fast.kernels.stats import (
    LOG2E,
    WIDE,
    WIDE_WARPS,
    fast_log2,
    fast_reciprocal,
    mass_of,
    project_columns,
    splits_for,
)
from limbeck.losses.fast.kernels.tables import CellTables, SideCells
from limbeck.losses.objectives.distributions import TINY as TINY_VALUE

LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(TINY_VALUE)
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)

SUMS = tl.constexpr(0)
FORWARD = tl.constexpr(1)
REVERSE = tl.constexpr(2)
JSD = tl.constexpr(3)


class RootSums(NamedTuple):
    """Per lane `[C]`: teacher and student mass on cells, the student's on cells that are compared, the divergence's
    sum, `sum q R` over cells, and whether both sides prefer one cell."""

    target: Tensor
    mass: Tensor
    compared: Tensor
    value: Tensor
    dot: Tensor
    right: Tensor


# What one cell adds to the divergence (in bits), and R.
@triton.jit
def _cell(q, p, inv_target, inv_norm, beta, KIND: tl.constexpr):
    value = q
    residual = q
    if KIND == FORWARD:
        residual = p * fast_reciprocal(q + SMALLEST)
        value = tl.where(p > 0, p * (fast_log2(tl.maximum(p, SMALLEST)) - fast_log2(q + SMALLEST)), 0.0)
    if KIND == REVERSE:
        s = (q + SMALLEST) * inv_norm
        gap = tl.log2(tl.maximum(s, SMALLEST)) - tl.log2(tl.maximum(p * inv_target, TINY))
        residual = -gap * LN2
        value = s * gap
    if KIND == JSD:
        s = tl.maximum((q + SMALLEST) * inv_norm, SMALLEST)
        t = tl.maximum(p * inv_target, TINY)
        log_m = tl.log2((1 - beta) * s + beta * t)
        gap = tl.log2(s) - log_m
        residual = -(1 - beta) * gap * LN2
        value = beta * t * (tl.log2(t) - log_m) + (1 - beta) * s * gap
    return value, residual


# One cell's part of a lane's sums; where some is False it has none. Returns R, and the sums.
@triton.jit
def _with_cell(
    q, p, cell, some, target, mass, compared, value, dot, best_s, best_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
    KIND: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    q = tl.where(some, q, 0.0)
    p = tl.where(some, p, 0.0)
    target += p
    mass += q
    if LISTED:
        # cells that the list does not name share the rest's bucket
        q = tl.where(p > 0, q, 0.0)
    compared += q
    arg_s = tl.where(q > best_s, cell, arg_s)
    best_s = tl.maximum(best_s, q)
    arg_t = tl.where(p > best_t, cell, arg_t)
    best_t = tl.maximum(best_t, p)
    residual = q
    if KIND != SUMS:
        cell_value, residual = _cell(q, p, inv_t, inv_n, beta, KIND)
        if LISTED:
            cell_value = tl.where(p > 0, cell_value, 0.0)
            residual = tl.where(p > 0, residual - rest, 0.0)
        value += tl.where(some, cell_value, 0.0)
        dot += tl.where(some, q * residual, 0.0)
    return residual, target, mass, compared, value, dot, best_s, best_t, arg_s, arg_t


# The probability of one token.
@triton.jit
def _token(x_ptr, token, lanes, col, some, scale, base):
    x = tl.load(x_ptr + token.to(tl.int64) * lanes + col, mask=some, other=float("-inf")).to(tl.float32)
    return tl.exp2(x * scale - base)


# Reads both sides' masses of every cell once and writes R over one row of the teacher's logits for each. Over cells,
# whose two rows of memory neighbouring lanes read whole wherever their tokens lie. Programs split the cells, since
# there are too few tiles of lanes to fill a GPU; their parts are added outside. The first `simple` cells have one token
# on either side, and are most: their loads need no sums, and four of them are under way together; of the others two.
# Stores come last, since each would hold up the loads behind it. r_ptr is t_ptr, by a type whose range R needs; a row
# that is written belongs to this cell alone, so no other cell reads it later.
@triton.jit
def _root_kernel(
    s_ptr, t_ptr, r_ptr, sum_s_ptr, sum_t_ptr, lse_s_ptr, lse_t_ptr, target_ptr, norm_ptr, rest_ptr,
    source_s_ptr, place_s_ptr, source_t_ptr, place_t_ptr, row_ptr, out_ptr, arg_ptr,
    simple, number, lanes_s, lanes_t, width, per_simple, per_other, inv_tau, beta,
    KIND: tl.constexpr, LISTED: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = col < width
    scale = inv_tau * LOG2E
    base_s = tl.load(lse_s_ptr + col, mask=inside, other=0.0) * LOG2E
    base_t = tl.load(lse_t_ptr + col, mask=inside, other=0.0) * LOG2E
    rest = base_s
    if LISTED:
        rest = tl.load(rest_ptr + col, mask=inside, other=0.0)
    inv_t, inv_n = base_s, base_s
    if KIND > FORWARD:
        inv_t = 1.0 / tl.load(target_ptr + col, mask=inside, other=1.0)
        inv_n = 1.0 / tl.load(norm_ptr + col, mask=inside, other=1.0)
    target = tl.zeros([BN], tl.float32)
    mass = tl.zeros([BN], tl.float32)
    compared = tl.zeros([BN], tl.float32)
    value = tl.zeros([BN], tl.float32)
    dot = tl.zeros([BN], tl.float32)
    top_s = tl.full([BN], -1.0, tl.float32)
    top_t = tl.full([BN], -1.0, tl.float32)
    arg_s = tl.zeros([BN], tl.int32)
    arg_t = tl.zeros([BN], tl.int32)
    start = tl.program_id(1) * per_simple
    end = tl.minimum(start + per_simple, simple)
    for i in range(start, end, 4):
        last = end - 1
        i1 = tl.minimum(i + 1, last)
        i2 = tl.minimum(i + 2, last)
        i3 = tl.minimum(i + 3, last)
        some1 = inside & (i + 1 < end)
        some2 = inside & (i + 2 < end)
        some3 = inside & (i + 3 < end)
        row0 = tl.load(source_t_ptr + i)
        row1 = tl.load(source_t_ptr + i1)
        row2 = tl.load(source_t_ptr + i2)
        row3 = tl.load(source_t_ptr + i3)
        q0 = _token(s_ptr, tl.load(source_s_ptr + i), lanes_s, col, inside, scale, base_s)
        q1 = _token(s_ptr, tl.load(source_s_ptr + i1), lanes_s, col, some1, scale, base_s)
        q2 = _token(s_ptr, tl.load(source_s_ptr + i2), lanes_s, col, some2, scale, base_s)
        q3 = _token(s_ptr, tl.load(source_s_ptr + i3), lanes_s, col, some3, scale, base_s)
        p0 = _token(t_ptr, row0, lanes_t, col, inside, scale, base_t)
        p1 = _token(t_ptr, row1, lanes_t, col, some1, scale, base_t)
        p2 = _token(t_ptr, row2, lanes_t, col, some2, scale, base_t)
        p3 = _token(t_ptr, row3, lanes_t, col, some3, scale, base_t)
        r0, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t = _with_cell(
            q0, p0, i, inside, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
            KIND, LISTED,
        )  # fmt: skip
        r1, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t = _with_cell(
            q1, p1, i1, some1, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
            KIND, LISTED,
        )  # fmt: skip
        r2, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t = _with_cell(
            q2, p2, i2, some2, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
            KIND, LISTED,
        )  # fmt: skip
        r3, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t = _with_cell(
            q3, p3, i3, some3, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
            KIND, LISTED,
        )  # fmt: skip
        if KIND != SUMS:
            tl.store(r_ptr + row0.to(tl.int64) * lanes_t + col, r0.to(r_ptr.dtype.element_ty), mask=inside)
            tl.store(r_ptr + row1.to(tl.int64) * lanes_t + col, r1.to(r_ptr.dtype.element_ty), mask=some1)
            tl.store(r_ptr + row2.to(tl.int64) * lanes_t + col, r2.to(r_ptr.dtype.element_ty), mask=some2)
            tl.store(r_ptr + row3.to(tl.int64) * lanes_t + col, r3.to(r_ptr.dtype.element_ty), mask=some3)
    start = simple + tl.program_id(1) * per_other
    end = tl.minimum(start + per_other, number)
    for i in range(start, end, 2):
        j = tl.minimum(i + 1, end - 1)
        also = inside & (i + 1 < end)
        source0 = tl.load(source_s_ptr + i)
        source1 = tl.load(source_s_ptr + j)
        place0 = tl.load(place_s_ptr + i)
        place1 = tl.load(place_s_ptr + j)
        q0 = mass_of(s_ptr, sum_s_ptr, source0, place0, lanes_s, col, width, scale, base_s)
        q1 = mass_of(s_ptr, sum_s_ptr, source1, place1, lanes_s, col, width, scale, base_s)
        source0 = tl.load(source_t_ptr + i)
        source1 = tl.load(source_t_ptr + j)
        place0 = tl.load(place_t_ptr + i)
        place1 = tl.load(place_t_ptr + j)
        p0 = mass_of(t_ptr, sum_t_ptr, source0, place0, lanes_t, col, width, scale, base_t)
        p1 = mass_of(t_ptr, sum_t_ptr, source1, place1, lanes_t, col, width, scale, base_t)
        r0, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t = _with_cell(
            q0, p0, i, inside, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
            KIND, LISTED,
        )  # fmt: skip
        r1, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t = _with_cell(
            q1, p1, j, also, target, mass, compared, value, dot, top_s, top_t, arg_s, arg_t, rest, inv_t, inv_n, beta,
            KIND, LISTED,
        )  # fmt: skip
        if KIND != SUMS:
            row0 = tl.load(row_ptr + i).to(tl.int64)
            row1 = tl.load(row_ptr + j).to(tl.int64)
            tl.store(r_ptr + row0 * lanes_t + col, r0.to(r_ptr.dtype.element_ty), mask=inside)
            tl.store(r_ptr + row1 * lanes_t + col, r1.to(r_ptr.dtype.element_ty), mask=also)
    part = SPLITS * width
    out = tl.program_id(1) * width + col
    tl.store(out_ptr + out, target, mask=inside)
    tl.store(out_ptr + part + out, mass, mask=inside)
    tl.store(out_ptr + 2 * part + out, compared, mask=inside)
    tl.store(out_ptr + 3 * part + out, value, mask=inside)
    tl.store(out_ptr + 4 * part + out, dot, mask=inside)
    tl.store(out_ptr + 5 * part + out, top_s, mask=inside)
    tl.store(out_ptr + 6 * part + out, top_t, mask=inside)
    tl.store(arg_ptr + out, arg_s, mask=inside)
    tl.store(arg_ptr + part + out, arg_t, mask=inside)


def root_sums(
    kind: Any,
    logits: tuple[Tensor, Tensor],
    lse: tuple[Tensor, Tensor],
    masses: tuple[Tensor, Tensor],
    tables: CellTables,
    chunks: int,
    residual: Tensor,
    temperature: float = 1.0,
    *,
    totals: tuple[Tensor, Tensor] | None = None,
    rest: Tensor | None = None,
    beta: float = 0.5,
    pairs: PairSums | None = None,
) -> RootSums:
    """Sums over cells at the first `chunks` lanes of student `[V, L_s]` and teacher `[U, L_t]` logits.

    kind: `SUMS` (masses only, nothing is overwritten) or a direction; masses: `cell_masses` of both sides; residual:
    the teacher's memory, by the type of R; totals `[C]`: the teacher's mass on cells and the student's normaliser,
    which reverse and jsd need beforehand; rest `[C]`: the teacher's tokens are a list; cells without one of them are
    not compared, and R of the others is what it is beyond that of the rest's bucket; pairs (forward, nothing else): the
    sums of `tables`' pairs, whose cells are not read again, and keep the teacher's logits; then `mass` and `compared`
    are without them.
    """
    student, teacher = logits
    simple, number = tables.simple, tables.row.numel()
    if pairs is not None:
        simple = tables.pair_teacher.numel()
    width = min(-(-chunks // WIDE) * WIDE, student.shape[1], teacher.shape[1])
    splits = splits_for(number if pairs is None else number - simple)
    per_simple = -(-simple // splits) if pairs is None else 0
    sums = torch.empty(7, splits, width, dtype=torch.float32, device=student.device)
    arg = torch.empty(2, splits, width, dtype=torch.int32, device=student.device)
    unused = lse[0], lse[0]
    # 1 in lanes without a chunk, since the kernel divides by these
    known = [F.pad(t.clamp(min=SMALLEST.value), (0, width - chunks), value=1.0) for t in totals or ()] or unused
    listed = lse[0] if rest is None else F.pad(rest, (0, width - chunks))
    _root_kernel[(-(-width // WIDE), splits)](
        student, teacher, residual, *masses, *lse, *known, listed, tables.student.source, tables.student.place,
        tables.teacher.source, tables.teacher.place, tables.row, sums, arg, simple, number, student.shape[1],
        teacher.shape[1], width, per_simple, -(-(number - simple) // splits), 1 / temperature, beta,
        KIND=kind, LISTED=rest is not None, SPLITS=splits, BN=WIDE, num_warps=WIDE_WARPS,
    )  # fmt: skip
    target, mass, compared, value, dot = sums[:5, :, :chunks].sum(1)
    best = sums[5:, :, :chunks].max(1)
    chosen = arg[:, :, :chunks].gather(1, best.indices[:, None]).squeeze(1)
    if pairs is not None:
        # with a floor this small, sum q R is sum p
        pair_kept, larger = pairs.kept[:chunks], torch.stack((pairs.best_q, pairs.best_p))[:, :chunks] >= best.values
        target, value, dot = target + pair_kept, value + pairs.cross[:chunks], dot + pair_kept
        chosen = torch.where(larger, torch.stack((pairs.pair_q, pairs.pair_p))[:, :chunks], chosen)
    return RootSums(target, mass, compared, value * LN2.value, dot, chosen[0] == chosen[1])


# Adds the further pieces of a long list to its row. A kernel of its own, since a piece's sum is whole only when all
# programs of the one before are done; one program per row and tile of lanes, so no addition is atomic.
@triton.jit
def _join_kernel(mass_ptr, row_ptr, offset_ptr, lanes, first_piece, BN: tl.constexpr):
    i = tl.program_id(0)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = col < lanes
    row = tl.load(row_ptr + i).to(tl.int64)
    total = tl.load(mass_ptr + row * lanes + col, mask=inside, other=0.0)
    for piece in range(tl.load(offset_ptr + i), tl.load(offset_ptr + i + 1)):
        total += tl.load(mass_ptr + (first_piece + piece).to(tl.int64) * lanes + col, mask=inside, other=0.0)
    tl.store(mass_ptr + row * lanes + col, total, mask=inside)


def cell_masses(logits: Tensor, lse: Tensor, cells: SideCells, temperature: float = 1.0) -> Tensor:
    """Masses `[rows + pieces, L]`, float32, of the cells with several tokens and, in row `cells.rows - 1`, of tokens in
    no cell; what comes behind the rows is scratch."""
    mass = project_columns(logits, lse, cells.pieces, cells, temperature)
    if cells.long_row.numel():
        lanes = logits.shape[1]
        _join_kernel[(cells.long_row.numel(), -(-lanes // WIDE))](
            mass, cells.long_row, cells.long_offset, lanes, cells.rows, BN=WIDE, num_warps=WIDE_WARPS
        )
    return mass
