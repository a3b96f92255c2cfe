"""Gradient with respect to the student's logits, written over them.

Every loss of this package has, at one lane and for student token s, the gradient

    slope_coef * G(s) + prob_coef * p_tau(s) + prob1_coef * p_1(s) + label_coef * [s == label]

with four numbers per lane. `NONE`: G = 0 (cross-entropy, chunk terms). `PROJECT`: G = -p_tau(s) sum_t W[s, t] R[t],
for losses on the projected student. `PAIRS`: G = -p_T(pair of s) for common tokens, and for the others
p_tau(s) * slope[bin of p_tau(s)], the slope of the sorted L1 term.

`scaled` ends the backward pass: the gradient times a number that lives on the device, rounded to its final type.

References: `gradient_reference`, `(grad * factor).to(dtype)`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels.sorted_l1 import BINS, PER_OCTAVE, TailL1, bin_of
from limbeck.losses.fast.kernels.stats import LOG2E, fast_reciprocal
from limbeck.losses.fast.kernels.tables import ByRow, PairTables

LANES, WARPS, STEPS = 1024, 4, 64
"""Columns and warps of a program, and student tokens that it walks through."""

ENTRIES = 256
"""Tokens whose gradient one program of `write_entries` writes."""

NONE = tl.constexpr(0)
PROJECT = tl.constexpr(1)
PAIRS = tl.constexpr(2)


@dataclass
class Factors:
    """Per lane `[L]`, float32: the four numbers above (prob1_coef is None where the temperature is 1: it is part of
    prob_coef then); `label` int32, -1 for none."""

    slope_coef: Tensor
    prob_coef: Tensor
    prob1_coef: Tensor | None
    label_coef: Tensor
    label: Tensor


@dataclass
class Direct:
    """Student tokens whose row of R still holds the teacher's logits: R is `p_T / (p_tau + floor)` there. token `[V]`:
    1 for these; logits `[U, L_t]`: the teacher's, in the memory of R; lse `[L_t]`: at the temperature."""

    token: Tensor
    logits: Tensor
    lse: Tensor
    floor: float


@dataclass
class Projected:
    """G of losses on the projected student. residual `[K, L]`: R; index `[k, V]`: rows of R (-1: none); owner
    `[L]` int32: column of R that belongs to a column of the logits; shift `[L]`: taken from each entry of R."""

    residual: Tensor
    index: Tensor
    tables: ByRow
    owner: Tensor
    shift: Tensor | None = None
    direct: Direct | None = None


@dataclass
class Paired:
    """G of losses on common pairs: teacher logits `[U, L_t]`, their log-sum-exp, and the sorted rest (None where
    every token is common)."""

    teacher: Tensor
    lse: Tensor
    tables: PairTables
    rest: TailL1 | None


@triton.jit
def _entry(r_ptr, index_ptr, weight_ptr, entry_index, r_lanes, r_col, col, width, shift, SHIFT: tl.constexpr):
    """One entry of W's row times R, less the shift."""
    index = tl.load(index_ptr + entry_index)
    weight = tl.load(weight_ptr + entry_index)
    some = col < tl.where(index >= 0, width, 0)
    r = tl.load(r_ptr + index.to(tl.int64) * r_lanes + r_col, mask=some, other=0.0).to(tl.float32)
    if SHIFT:
        r = tl.where(index >= 0, r - shift, 0.0)
    return weight * r


# R of a token from what lies in its row, which is the teacher's logits where `direct` is 1. t_ptr: R's memory by the
# type of the logits.
@triton.jit
def _ratio(x, direct, p, scale, base_t, floor, t_ptr):
    z = x.to(t_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    # other rows hold anything, which is not used but should not overflow either
    r = tl.exp2(tl.minimum(z * scale - base_t, 0.0)) * fast_reciprocal(p + floor)
    return tl.where(direct != 0, r, x.to(tl.float32))


# The first entry of W's row times R, where some rows hold the teacher's logits.
@triton.jit
def _first_entry(
    r_ptr, t_ptr, direct_ptr, index_ptr, weight_ptr, v, r_lanes, col, width, p, scale, base_t, floor
):  # fmt: skip
    index = tl.load(index_ptr + v)
    weight = tl.load(weight_ptr + v)
    direct = tl.load(direct_ptr + v)
    some = col < tl.where(index >= 0, width, 0)
    x = tl.load(r_ptr + index.to(tl.int64) * r_lanes + col, mask=some, other=0.0)
    return weight * _ratio(x, direct, p, scale, base_t, floor, t_ptr)


@triton.jit
def _slope(t_ptr, slope_ptr, pair, z, t_lanes, slope_lanes, col, width, scale, base, base_t, REST: tl.constexpr):
    """G of a loss on common pairs for one student token."""
    t_address = t_ptr + pair.to(tl.int64) * t_lanes + col
    t = tl.load(t_address, mask=col < tl.where(pair >= 0, width, 0), other=float("-inf")).to(tl.float32)
    out = -tl.exp2(t * scale - base_t)
    if REST:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if pair < 0:
            log_p = z * scale - base
            slope_address = slope_ptr + bin_of(log_p) * slope_lanes + col
            out = tl.load(slope_address, mask=col < width, other=0.0).to(tl.float32) * tl.exp2(log_p)
    return out


@triton.jit
def _finish(
    address, v, z, slope_coef, g, prob_coef, prob1_coef, label_coef, label, scale, base, base_one, inside,
    MODE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Put the parts of one student token's gradient together and store it over its logits."""
    p = tl.exp2(z * scale - base)
    grad = prob_coef * p + tl.where(label == v, label_coef, 0.0)
    if SCALED:
        grad += prob1_coef * tl.exp2(z * LOG2E - base_one)
    if MODE == PROJECT:
        grad -= slope_coef * p * g
    if MODE == PAIRS:
        grad += slope_coef * g
    tl.store(address, grad.to(address.dtype.element_ty), mask=inside)


# Reads each logit once and writes its gradient over it. Over the student's tokens: each looks up its few entries of W,
# or its pair, so nothing is scattered and no addition is atomic. All four terms of the gradient in one pass, because
# the logits' memory is what this costs; STEPS tokens per program keep the lanes' factors in registers.
@triton.jit(do_not_specialize=["first_tile"])
def _gradient_kernel(
    s_ptr, lse_ptr, lse_one_ptr, slope_coef_ptr, prob_coef_ptr, prob1_coef_ptr, label_coef_ptr, label_ptr,
    r_ptr, index_ptr, weight_ptr, entries_ptr, owner_ptr, shift_ptr,
    t_ptr, lse_t_ptr, pair_ptr, slope_ptr,
    size, lanes, width, r_lanes, t_lanes, slope_lanes, first_tile, inv_tau, floor,
    MODE: tl.constexpr, SCALED: tl.constexpr, OWNER: tl.constexpr, SHIFT: tl.constexpr, REST: tl.constexpr,
    DIRECT: tl.constexpr,
    STEPS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    col = (first_tile + tl.program_id(0)) * BN + tl.arange(0, BN)
    inside = col < lanes
    scale = inv_tau * LOG2E
    base = tl.load(lse_ptr + col, mask=inside, other=0.0) * LOG2E
    prob_coef = tl.load(prob_coef_ptr + col, mask=inside, other=0.0)
    label_coef = tl.load(label_coef_ptr + col, mask=inside, other=0.0)
    label = tl.load(label_ptr + col, mask=inside, other=-1)
    base_one, prob1_coef, slope_coef, shift, base_t, r_col = base, prob_coef, prob_coef, prob_coef, base, col
    if SCALED:
        base_one = tl.load(lse_one_ptr + col, mask=inside, other=0.0) * LOG2E
        prob1_coef = tl.load(prob1_coef_ptr + col, mask=inside, other=0.0)
    if MODE != NONE:
        slope_coef = tl.load(slope_coef_ptr + col, mask=inside, other=0.0)
    if OWNER:
        r_col = tl.load(owner_ptr + col, mask=inside, other=0)
        width = lanes
    if SHIFT:
        shift = tl.load(shift_ptr + col, mask=inside, other=0.0)
    if MODE == PAIRS or DIRECT:
        base_t = tl.load(lse_t_ptr + col, mask=col < width, other=0.0) * LOG2E
    first = tl.program_id(1) * STEPS
    for v in range(first, tl.minimum(first + STEPS, size), 2):
        # two tokens at a time: all their loads come before the first store, which would hold them up
        other = tl.minimum(v + 1, size - 1)
        at0 = s_ptr + v * lanes.to(tl.int64) + col
        at1 = s_ptr + other * lanes.to(tl.int64) + col
        z0 = tl.load(at0, mask=inside, other=0.0).to(tl.float32)
        z1 = tl.load(at1, mask=inside, other=0.0).to(tl.float32)
        g0, g1 = z0, z1
        if MODE == PROJECT:
            if DIRECT:
                p0 = tl.exp2(z0 * scale - base)
                p1 = tl.exp2(z1 * scale - base)
                g0 = _first_entry(
                    r_ptr, t_ptr, pair_ptr, index_ptr, weight_ptr, v, r_lanes, col, width, p0, scale, base_t, floor
                )
                g1 = _first_entry(
                    r_ptr, t_ptr, pair_ptr, index_ptr, weight_ptr, other, r_lanes, col, width, p1, scale, base_t, floor
                )
            else:
                g0 = _entry(r_ptr, index_ptr, weight_ptr, v, r_lanes, r_col, col, width, shift, SHIFT)
                g1 = _entry(r_ptr, index_ptr, weight_ptr, other, r_lanes, r_col, col, width, shift, SHIFT)
            for j in range(1, tl.load(entries_ptr + v)):
                g0 += _entry(r_ptr, index_ptr, weight_ptr, j * size + v, r_lanes, r_col, col, width, shift, SHIFT)
            for j in range(1, tl.load(entries_ptr + other)):
                g1 += _entry(r_ptr, index_ptr, weight_ptr, j * size + other, r_lanes, r_col, col, width, shift, SHIFT)
        if MODE == PAIRS:
            pair0 = tl.load(pair_ptr + v)
            pair1 = tl.load(pair_ptr + other)
            g0 = _slope(t_ptr, slope_ptr, pair0, z0, t_lanes, slope_lanes, col, width, scale, base, base_t, REST)
            g1 = _slope(t_ptr, slope_ptr, pair1, z1, t_lanes, slope_lanes, col, width, scale, base, base_t, REST)
        _finish(
            at0, v, z0, slope_coef, g0, prob_coef, prob1_coef, label_coef,
            label, scale, base, base_one, inside, MODE, SCALED,
        )  # fmt: skip
        if v + 1 < size:
            _finish(
                at1, v + 1, z1, slope_coef, g1, prob_coef, prob1_coef, label_coef,
                label, scale, base, base_one, inside, MODE, SCALED,
            )  # fmt: skip


_seen: set[tuple[object, ...]] = set()


def _is_new(*case: object) -> bool:
    """Whether a case of a kernel has not come up before. It is launched then even where there is nothing to do, which
    compiles it: the first block that needs it may come hundreds of steps later, with the device waiting."""
    new = case not in _seen
    _seen.add(case)
    return new


def _launch(
    logits: Tensor, tiles: tuple[int, int], lse: Tensor, lse_one: Tensor, factors: Factors, temperature: float,
    slope: Projected | Paired | None, *, owner: bool = False,
) -> None:  # fmt: skip
    first, last = tiles
    scaled_too = factors.prob1_coef is not None
    new = _is_new("gradient", logits.device, logits.dtype, type(slope), owner, scaled_too)
    if first >= last and not new:
        return
    size, lanes = logits.shape
    unused = lse
    args: dict[str, object] = dict.fromkeys(
        ("r_ptr", "index_ptr", "weight_ptr", "entries_ptr", "owner_ptr", "shift_ptr", "t_ptr", "lse_t_ptr", "pair_ptr",
         "slope_ptr"), unused,
    )  # fmt: skip
    args |= {"r_lanes": lanes, "t_lanes": lanes, "slope_lanes": lanes, "width": lanes}
    mode, shift, rest, direct, floor = NONE, False, False, False, 0.0
    if isinstance(slope, Projected):
        mode, shift = PROJECT, slope.shift is not None
        args |= {"r_ptr": slope.residual, "index_ptr": slope.index, "weight_ptr": slope.tables.weight}
        args |= {"entries_ptr": slope.tables.entries, "owner_ptr": slope.owner, "r_lanes": slope.residual.shape[1]}
        args["width"] = min(lanes, slope.residual.shape[1])
        args["shift_ptr"] = slope.shift if shift else unused
        if slope.direct is not None:
            assert not owner
            assert not shift
            direct, floor = True, slope.direct.floor
            args |= {"t_ptr": slope.direct.logits, "lse_t_ptr": slope.direct.lse, "pair_ptr": slope.direct.token}
    elif slope is not None:
        mode, rest = PAIRS, slope.rest is not None
        args |= {"t_ptr": slope.teacher, "lse_t_ptr": slope.lse, "t_lanes": slope.teacher.shape[1]}
        args |= {"pair_ptr": slope.tables.pair, "width": min(lanes, slope.teacher.shape[1])}
        if slope.rest is not None:
            width = slope.rest.slope.shape[1]
            args |= {"slope_ptr": slope.rest.slope, "slope_lanes": width, "width": min(lanes, width)}
    _gradient_kernel[(max(last - first, 0), -(-size // STEPS))](
        logits, lse, lse_one, factors.slope_coef, factors.prob_coef,
        unused if factors.prob1_coef is None else factors.prob1_coef, factors.label_coef, factors.label,
        size=size, lanes=lanes, first_tile=first, inv_tau=1 / temperature, floor=floor, **args,
        MODE=mode, SCALED=scaled_too, OWNER=owner, SHIFT=shift, REST=rest, DIRECT=direct,
        STEPS=STEPS, BN=LANES, num_warps=WARPS,
    )  # fmt: skip


def write_gradient(
    logits: Tensor,
    lse: Tensor,
    lse_one: Tensor,
    factors: Factors,
    temperature: float = 1.0,
    slope: Projected | Paired | None = None,
    *,
    aligned: int = 0,
    owned: int = 0,
) -> None:
    """Overwrite logits `[V, L]` with their gradient.

    lse, lse_one `[L]`: at the temperature and at 1. Lanes below `aligned` have G at the lane of the same number,
    those from there to `owned` at their owner's, the others have none (and a slope_coef of 0).
    """
    tiles = -(-logits.shape[1] // LANES)
    # where columns of both kinds meet in a tile, all of it goes through owners
    straight = aligned // LANES if owned > aligned else -(-aligned // LANES)
    mixed = max(straight, -(-owned // LANES))
    common = (lse, lse_one, factors, temperature)
    _launch(logits, (0, straight), *common, slope)
    if owned:
        _launch(logits, (straight, mixed), *common, slope, owner=True)
    _launch(logits, (mixed, tiles), *common, None)


@dataclass
class Entries:
    """Single tokens, none twice, whose gradient has a part of its own: id, lane and logit of each, and that part."""

    ids: Tensor
    lane: Tensor
    logits: Tensor
    values: Tensor


# Puts the gradient of one token after another together from its own part and its lane's factors, and stores it over
# what is there. Over a list of tokens, none of which comes twice; their lanes and rows lie anywhere.
@triton.jit(
    do_not_specialize=["number"],
    do_not_specialize_on_alignment=["id_ptr", "lane_ptr", "logit_ptr", "value_ptr"],
)
def _entries_kernel(
    grad_ptr, id_ptr, lane_ptr, logit_ptr, value_ptr, lse_ptr, lse_one_ptr, slope_coef_ptr, prob_coef_ptr,
    prob1_coef_ptr, label_coef_ptr, label_ptr, kept_coef_ptr, r_ptr, index_ptr, owner_ptr, t_ptr, lse_t_ptr, direct_ptr,
    number, lanes, r_lanes, inv_tau, floor,
    SCALED: tl.constexpr, DIRECT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    real = i < number
    token = tl.load(id_ptr + i, mask=real, other=0)
    lane = tl.load(lane_ptr + i, mask=real, other=0)
    z = tl.load(logit_ptr + i, mask=real, other=0.0).to(tl.float32)
    p = tl.exp2(z * (inv_tau * LOG2E) - tl.load(lse_ptr + lane, mask=real, other=0.0) * LOG2E)
    row = tl.load(index_ptr + token, mask=real, other=-1)
    column = tl.load(owner_ptr + lane, mask=real, other=0)
    x = tl.load(r_ptr + row.to(tl.int64) * r_lanes + column, mask=row >= 0, other=0.0)
    r = x.to(tl.float32)
    if DIRECT:
        direct = tl.load(direct_ptr + token, mask=real, other=0)
        base_t = tl.load(lse_t_ptr + column, mask=real, other=0.0) * LOG2E
        r = _ratio(x, direct, p, inv_tau * LOG2E, base_t, floor, t_ptr)
    kept = tl.load(kept_coef_ptr + lane, mask=real, other=0.0)
    kept -= tl.load(slope_coef_ptr + lane, mask=real, other=0.0) * r
    out = tl.load(value_ptr + i, mask=real, other=0.0)
    out += p * (tl.load(prob_coef_ptr + lane, mask=real, other=0.0) + kept)
    label = tl.load(label_ptr + lane, mask=real, other=-1)
    out += tl.where(label == token, tl.load(label_coef_ptr + lane, mask=real, other=0.0), 0.0)
    if SCALED:
        one = tl.exp2((z - tl.load(lse_one_ptr + lane, mask=real, other=0.0)) * LOG2E)
        out += tl.load(prob1_coef_ptr + lane, mask=real, other=0.0) * one
    tl.store(grad_ptr + token * lanes + lane, out.to(grad_ptr.dtype.element_ty), mask=real)


def write_entries(
    grad: Tensor,
    lse: Tensor,
    lse_one: Tensor,
    factors: Factors,
    temperature: float,
    slope: Projected,
    entries: Entries,
    kept_coef: Tensor,
) -> None:
    """Write the gradient of some tokens over what `write_gradient` has left there.

    Added to that, their parts would leave its rounding error, which may be larger than the sum: a part and the lane's
    multiple of p can be far larger than their difference. kept_coef `[L]`: the part of prob_coef that what is written
    there takes away again; `factors` are without it.
    """
    number = entries.ids.numel()
    if not number:
        return
    one, direct = factors.prob1_coef, slope.direct
    theirs = (slope.residual, lse, slope.index) if direct is None else (direct.logits, direct.lse, direct.token)
    _entries_kernel[(-(-number // ENTRIES),)](
        grad, entries.ids, entries.lane, entries.logits, entries.values, lse, lse_one, factors.slope_coef,
        factors.prob_coef,
        lse if one is None else one, factors.label_coef, factors.label, kept_coef, slope.residual, slope.index,
        slope.owner, *theirs, number, grad.shape[1], slope.residual.shape[1], 1 / temperature,
        0.0 if direct is None else direct.floor,
        SCALED=one is not None, DIRECT=direct is not None, BM=ENTRIES, num_warps=4,
    )  # fmt: skip


def gradient_reference(
    logits: Tensor,
    lse: Tensor,
    lse_one: Tensor,
    factors: Factors,
    temperature: float = 1.0,
    slope: Projected | Paired | None = None,
) -> Tensor:
    """The same in plain torch, float32, not in place; every lane has a `slope` (a slope_coef of 0 takes it out)."""
    z = logits.float()
    p = (z / temperature - lse).exp()
    out = factors.prob_coef * p
    if factors.prob1_coef is not None:
        out = out + factors.prob1_coef * (z - lse_one).exp()
    out = out + factors.label_coef * (torch.arange(z.shape[0], device=z.device)[:, None] == factors.label)
    if isinstance(slope, Projected):
        total, direct = torch.zeros_like(z), slope.direct
        for number, (index, weight) in enumerate(zip(slope.index, slope.tables.weight, strict=True)):
            r = slope.residual[index.clamp(min=0).long()][:, slope.owner.long()].float()
            if direct is not None and number == 0:
                log_t = direct.logits[index.clamp(min=0).long()].float() / temperature - direct.lse
                ratio = log_t[:, slope.owner.long()].exp() / (p + direct.floor)
                r = torch.where((direct.token > 0)[:, None], ratio, r)
            r = r if slope.shift is None else r - slope.shift
            total += weight[:, None] * r * (index >= 0)[:, None]
        out = out - factors.slope_coef * p * total
    elif slope is not None:
        pair = slope.tables.pair
        common = (slope.teacher[pair.clamp(min=0).long()].float() / temperature - slope.lse).exp()
        rest = torch.zeros_like(p)
        if slope.rest is not None:
            bins = (-p.log2() * PER_OCTAVE).floor().clamp(0, BINS - 1).long()
            rest = slope.rest.slope.float().gather(0, bins) * p
        out = out + factors.slope_coef * torch.where((pair >= 0)[:, None], -common, rest)
    return out


_BLOCK = 2048
"""Elements that one program of `scaled` handles."""


# Reads the gradient once, writes it once in its final type. Plain torch either makes a copy in the wide type first or,
# with `out=`, converts element by element at a third of the memory's speed.
@triton.jit(do_not_specialize=["numel"])
def _scale_kernel(x_ptr, factor_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < numel, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + offset, (x * factor).to(out_ptr.dtype.element_ty), mask=offset < numel)


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * factor` in `dtype`; grad contiguous, factor a scalar tensor on its device."""
    out = torch.empty_like(grad, dtype=dtype)
    # sums over blocks are float32, the product of a single block has its final type
    cases = [
        grad.new_empty(0, dtype=own) for own in (dtype, torch.float32) if _is_new("scale", grad.device, own, dtype)
    ]
    for x in (*cases, grad):
        _scale_kernel[(-(-x.numel() // _BLOCK),)](x, factor, out, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return out
