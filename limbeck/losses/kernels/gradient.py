"""Gradient with respect to the student's logits, written over them.

Every loss of this package has, at one column of the batch and for student token s, the gradient

    kd * G(s) + cp * p_tau(s) + cp_one * p_1(s) + co * [s == label]

with four numbers per column. `NONE`: G = 0 (cross-entropy, chunk terms). `PROJECT`: G = -p_tau(s) sum_t W[s, t] R[t],
for losses on the projected student. `PAIRS`: G = -p_T(pair of s) for common tokens, and for the others
p_tau(s) * slope[bin of p_tau(s)], the slope of the sorted L1 term.

Reference: `gradient_reference`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.kernels import COLUMNS
from limbeck.losses.kernels.sorted_l1 import BINS, PER_OCTAVE, Rest, bin_of
from limbeck.losses.kernels.stats import LOG2E
from limbeck.losses.kernels.tables import TILE, PairTables, ProjectionTables

STEPS = 8
"""Tiles of student tokens that one program walks through."""

NONE = tl.constexpr(0)
PROJECT = tl.constexpr(1)
PAIRS = tl.constexpr(2)


@dataclass
class Factors:
    """Per column `[ld]`, float32: `kd`, `cp`, `cp_one` (None where the temperature is 1: part of cp) and `co`; `label`
    int32, -1 for none."""

    kd: Tensor
    cp: Tensor
    cp_one: Tensor | None
    co: Tensor
    label: Tensor


@dataclass
class Projected:
    """G of losses on the projected student. residual `[K, ld]`: R; index `[k, V_s]`: rows of R (-1: none); owner
    `[ld]` int32: column of R that belongs to a column of the logits; shift `[ld]`: taken from each entry of R."""

    residual: Tensor
    index: Tensor
    tables: ProjectionTables
    owner: Tensor
    shift: Tensor | None = None


@dataclass
class Paired:
    """G of losses on common pairs: teacher logits `[V_t, ld_t]`, their log-sum-exp, and the sorted rest (None where
    every token is common)."""

    teacher: Tensor
    lse: Tensor
    tables: PairTables
    rest: Rest | None


@triton.jit
def _gradient_kernel(
    s_ptr, lse_ptr, lse_one_ptr, kd_ptr, cp_ptr, one_ptr, co_ptr, label_ptr,
    r_ptr, index_ptr, weight_ptr, entries_ptr, owner_ptr, shift_ptr,
    t_ptr, lse_t_ptr, pair_ptr, slope_ptr,
    size, ld, r_ld, t_ld, slope_ld, first_tile, inv_tau,
    MODE: tl.constexpr, SCALED: tl.constexpr, OWNER: tl.constexpr, SHIFT: tl.constexpr, REST: tl.constexpr,
    STEPS: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = (first_tile + tl.program_id(0)) * BN + tl.arange(0, BN)
    scale = inv_tau * LOG2E
    base = tl.load(lse_ptr + col)[None, :] * LOG2E
    cp = tl.load(cp_ptr + col)[None, :]
    co = tl.load(co_ptr + col)[None, :]
    label = tl.load(label_ptr + col)[None, :]
    if SCALED:
        base_one = tl.load(lse_one_ptr + col)[None, :] * LOG2E
        cp_one = tl.load(one_ptr + col)[None, :]
    if MODE != NONE:
        kd = tl.load(kd_ptr + col)[None, :]
    if MODE == PROJECT:
        r_col = col
        if OWNER:
            r_col = tl.load(owner_ptr + col)
        if SHIFT:
            shift = tl.load(shift_ptr + col)[None, :]
    if MODE == PAIRS:
        base_t = tl.load(lse_t_ptr + col)[None, :] * LOG2E
    for step in range(STEPS):
        tile = tl.program_id(1) * STEPS + step
        at = tile * BV + tl.arange(0, BV)
        inside = at < size
        place = s_ptr + at.to(tl.int64)[:, None] * ld + col[None, :]
        z = tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)
        log_p = z * scale - base
        p = tl.exp2(log_p)
        grad = cp * p + tl.where(label == at[:, None], co, 0.0)
        if SCALED:
            grad += cp_one * tl.exp2(z * LOG2E - base_one)
        if MODE == PROJECT:
            total = tl.zeros([BV, BN], tl.float32)
            for j in range(tl.load(entries_ptr + tile, mask=tile * BV < size, other=0)):
                index = tl.load(index_ptr + j * size + at, mask=inside, other=-1)
                weight = tl.load(weight_ptr + j * size + at, mask=inside, other=0.0)[:, None]
                some = (index >= 0)[:, None]
                r = tl.load(r_ptr + index.to(tl.int64)[:, None] * r_ld + r_col[None, :], mask=some, other=0.0)
                r = r.to(tl.float32)
                if SHIFT:
                    r = tl.where(some, r - shift, 0.0)
                total += weight * r
            grad -= kd * p * total
        if MODE == PAIRS:
            pair = tl.load(pair_ptr + at, mask=inside, other=-1)
            some = (pair >= 0)[:, None]
            t = tl.load(t_ptr + pair.to(tl.int64)[:, None] * t_ld + col[None, :], mask=some, other=float("-inf"))
            grad -= kd * tl.exp2(t.to(tl.float32) * scale - base_t)
            if REST:
                other = (inside & (pair < 0))[:, None]
                where = bin_of(log_p).to(tl.int64) * slope_ld + col[None, :]
                slope = tl.load(slope_ptr + where, mask=other & (inside[:, None]), other=0.0).to(tl.float32)
                grad += kd * slope * p
        tl.store(place, grad.to(s_ptr.dtype.element_ty), mask=inside[:, None])


def _launch(
    logits: Tensor, tiles: tuple[int, int], lse: Tensor, lse_one: Tensor, factors: Factors, temperature: float,
    source: Projected | Paired | None, *, owner: bool = False,
) -> None:  # fmt: skip
    first, last = tiles
    if first >= last:
        return
    size, ld = logits.shape
    unused = lse
    args: dict[str, object] = dict.fromkeys(
        ("r_ptr", "index_ptr", "weight_ptr", "entries_ptr", "owner_ptr", "shift_ptr", "t_ptr", "lse_t_ptr", "pair_ptr",
         "slope_ptr"), unused,
    )  # fmt: skip
    args |= {"r_ld": 1, "t_ld": 1, "slope_ld": 1}
    mode, shift, rest = NONE, False, False
    if isinstance(source, Projected):
        mode, shift = PROJECT, source.shift is not None
        args |= {"r_ptr": source.residual, "index_ptr": source.index, "weight_ptr": source.tables.weight}
        args |= {"entries_ptr": source.tables.entries, "owner_ptr": source.owner, "r_ld": source.residual.shape[1]}
        args["shift_ptr"] = source.shift if shift else unused
    elif source is not None:
        mode, rest = PAIRS, source.rest is not None
        args |= {"t_ptr": source.teacher, "lse_t_ptr": source.lse, "t_ld": source.teacher.shape[1]}
        args["pair_ptr"] = source.tables.pair
        if source.rest is not None:
            args |= {"slope_ptr": source.rest.slope, "slope_ld": source.rest.slope.shape[1]}
    grid = (last - first, -(-size // (TILE * STEPS)))
    _gradient_kernel[grid](
        logits, lse, lse_one, factors.kd, factors.cp, unused if factors.cp_one is None else factors.cp_one, factors.co,
        factors.label, size=size, ld=ld, first_tile=first, inv_tau=1 / temperature, **args,
        MODE=mode, SCALED=factors.cp_one is not None, OWNER=owner, SHIFT=shift, REST=rest,
        STEPS=STEPS, BV=TILE, BN=COLUMNS, num_warps=4,
    )  # fmt: skip


def write_gradient(
    logits: Tensor,
    lse: Tensor,
    lse_one: Tensor,
    factors: Factors,
    temperature: float = 1.0,
    source: Projected | Paired | None = None,
    *,
    aligned: int = 0,
    owned: int = 0,
) -> None:
    """Overwrite logits `[V_s, ld]` with their gradient.

    lse, lse_one `[ld]`: at the temperature and at 1. Columns below `aligned` have G at the column of the same number,
    columns below `owned` at their owner's, the others have none. Where both kinds meet in a tile, owners are used.
    """
    tiles = logits.shape[1] // COLUMNS
    straight = min(aligned // COLUMNS, tiles)
    if isinstance(source, Paired):
        straight = -(-aligned // COLUMNS)
    mixed = max(-(-owned // COLUMNS), -(-aligned // COLUMNS)) if source is not None else 0
    common = (lse, lse_one, factors, temperature)
    _launch(logits, (0, straight if source is not None else 0), *common, source)
    _launch(logits, (straight if source is not None else 0, mixed), *common, source, owner=True)
    _launch(logits, (mixed, tiles), *common, None)


def gradient_reference(
    logits: Tensor,
    lse: Tensor,
    lse_one: Tensor,
    factors: Factors,
    temperature: float = 1.0,
    source: Projected | Paired | None = None,
) -> Tensor:
    """The same in plain torch, float32, not in place; every column has a `source` (a factor `kd` of 0 takes it out)."""
    z = logits.float()
    p = (z / temperature - lse).exp()
    out = factors.cp * p
    if factors.cp_one is not None:
        out = out + factors.cp_one * (z - lse_one).exp()
    out = out + factors.co * (torch.arange(z.shape[0], device=z.device)[:, None] == factors.label)
    if isinstance(source, Projected):
        total = torch.zeros_like(z)
        for index, weight in zip(source.index, source.tables.weight, strict=True):
            r = source.residual[index.clamp(min=0).long()][:, source.owner.long()].float()
            r = r if source.shift is None else r - source.shift
            total += weight[:, None] * r * (index >= 0)[:, None]
        out = out - factors.kd * p * total
    elif source is not None:
        pair = source.tables.pair
        common = (source.teacher[pair.clamp(min=0).long()].float() / temperature - source.lse).exp()
        rest = torch.zeros_like(p)
        if source.rest is not None:
            bins = (-p.log2() * PER_OCTAVE).floor().clamp(0, BINS - 1).long()
            rest = source.rest.slope.float().gather(0, bins) * p
        out = out + factors.kd * torch.where((pair >= 0)[:, None], -common, rest)
    return out
