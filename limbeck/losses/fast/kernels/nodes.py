"""tree_kl's kernels inside tokens: divergences at the nodes of a tree, and their gradient.

A position stands at a node. Its buckets are the node's children, each with the coarse side's mass below it (at the
chunk's root) and the fine side's probability of the token that leads there, and the end: coarse tokens that are spelled
when the node is reached. Whatever needs rows or vocabulary is read once, into two numbers per bucket; the rest is work
on these.

References: `limbeck.losses.objectives.tree_kl`: `tree_buckets`, `student_node_divergence`, `teacher_node_divergence`.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.divergences import DivergenceSpec
from limbeck.losses.fast.kernels.cells import FORWARD, SMALLEST, TINY
from limbeck.losses.fast.kernels.chunks import bucket_terms, direction
from limbeck.losses.fast.kernels.stats import LOG2E
from limbeck.losses.fast.tree_positions import TreePositions
from limbeck.losses.objectives.distributions import rest_floor
from limbeck.losses.objectives.tree_tables import TreeTables

SEGMENTS, MEMBERS = 4, 64
"""Buckets that one program sums side by side, and members of each that it reads at a time."""
BUCKETS = 64
"""Buckets of a position that one program works on at a time."""
ENTRIES = 128
"""Tokens that one program of `below_nodes` finds the slope of."""
FLOOR = tl.constexpr(rest_floor(torch.float32))


class NodeBuckets(NamedTuple):
    """Buckets of some positions, float32 unless said. mass `[B + P]`: the coarse side's, of every bucket and then of
    every end; fine `[B]`: the fine side's probability; ids, lane `[B]` int64, logits `[B]`: its token, where it is
    read, and the logit there."""

    mass: Tensor
    fine: Tensor
    ids: Tensor
    lane: Tensor
    logits: Tensor


# Reads the logits of the coarse tokens below each bucket, and of those that end at each position's node, at the
# chunk's lane; and the fine side's logit of each bucket's token. SEGMENTS at a time, since most have a token or two;
# neighbours read neighbouring lanes or the same, so what one of them reads is often in the cache for the next.
@triton.jit(
    do_not_specialize=["buckets", "positions"],
    do_not_specialize_on_alignment=["mass_ptr", "prob_ptr", "id_ptr", "lane_ptr", "logit_ptr"],
)
def _bucket_kernel(
    coarse_ptr, coarse_lse_ptr, fine_ptr, fine_lse_ptr, order_ptr, start_ptr, stop_ptr, ends_ptr, child_ptr, token_ptr,
    node_ptr, offset_ptr, owner_ptr, coarse_lane_ptr, fine_lane_ptr, mass_ptr, prob_ptr, id_ptr, lane_ptr, logit_ptr,
    buckets, positions, coarse_lanes, fine_lanes, inv_tau, BS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    inner = i < buckets
    real = i < buckets + positions
    position = tl.where(inner, tl.load(owner_ptr + i, mask=inner, other=0), i - buckets)
    node = tl.load(node_ptr + position, mask=real, other=0)
    child = tl.load(child_ptr + node, mask=inner, other=0) + i - tl.load(offset_ptr + position, mask=inner, other=0)
    bucket_node = tl.where(inner, child, node)
    start = tl.load(start_ptr + bucket_node, mask=real, other=0)
    length = tl.load(ends_ptr + node, mask=real, other=0)
    stop = tl.where(inner, tl.load(stop_ptr + bucket_node, mask=real, other=0), start + length)
    lane = tl.load(coarse_lane_ptr + position, mask=real, other=0)
    base = tl.load(coarse_lse_ptr + lane, mask=real, other=0.0)[:, None] * LOG2E
    total = tl.zeros([BS, BM], tl.float32)
    for done in range(0, tl.max(stop - start, 0), BM):
        members = start[:, None] + done + tl.arange(0, BM)[None, :]
        inside = members < stop[:, None]
        member = tl.load(order_ptr + members, mask=inside, other=0)
        x = tl.load(coarse_ptr + member * coarse_lanes + lane[:, None], mask=inside, other=float("-inf"))
        total += tl.exp2(x.to(tl.float32) * (inv_tau * LOG2E) - base)
    tl.store(mass_ptr + i, tl.sum(total, 1), mask=real)
    token = tl.load(token_ptr + bucket_node, mask=inner, other=0)
    lane = tl.load(fine_lane_ptr + position, mask=inner, other=0)
    z = tl.load(fine_ptr + token * fine_lanes + lane, mask=inner, other=0.0).to(tl.float32)
    base_fine = tl.load(fine_lse_ptr + lane, mask=inner, other=0.0) * LOG2E
    tl.store(prob_ptr + i, tl.exp2(z * (inv_tau * LOG2E) - base_fine), mask=inner)
    tl.store(id_ptr + i, token, mask=inner)
    tl.store(lane_ptr + i, lane, mask=inner)
    tl.store(logit_ptr + i, z, mask=inner)


def node_buckets(
    tree: TreeTables,
    positions: TreePositions,
    coarse: tuple[Tensor, Tensor],
    fine: tuple[Tensor, Tensor],
    temperature: float = 1.0,
) -> NodeBuckets:
    """Buckets of the positions of one tree. coarse, fine: logits `[V, L]` and log-sum-exp `[L]` of the sides."""
    device, number = coarse[0].device, positions.buckets
    wide = torch.empty(3 * number + positions.count, dtype=torch.float32, device=device)
    mass, prob, logits = wide.split((number + positions.count, number, number))
    ids, lane = torch.empty(2, number, dtype=torch.int64, device=device)
    if positions.count:
        _bucket_kernel[(-(-(number + positions.count) // SEGMENTS),)](
            *coarse, *fine, tree.order, tree.start, tree.stop, tree.ends, tree.child_start, tree.token,
            positions.node, positions.offset, positions.owner(), positions.coarse_lane, positions.fine_lane,
            mass, prob, ids, lane, logits,
            number, positions.count, coarse[0].shape[1], fine[0].shape[1], 1 / temperature,
            BS=SEGMENTS, BM=MEMBERS, num_warps=4,
        )  # fmt: skip
    return NodeBuckets(mass, prob, ids, lane, logits)


# `bucket_terms` of a target that is a mass: exactly 0 where it is the weight, floored where it is the denominator.
@triton.jit
def _mass_terms(log_s, t, beta, rescale, KIND: tl.constexpr):
    if KIND != FORWARD:
        t = tl.maximum(t, TINY)
    return bucket_terms(log_s, t, tl.log(tl.maximum(t, SMALLEST)), beta, rescale, KIND)


# Divergence at one position of the student's tree, and its gradient by the student's logits there. Three passes over
# the position's buckets, whose numbers stay in the cache: totals, the divergence, its slopes. LISTED: children that
# the teacher's list does not name leave both sides.
@triton.jit(
    do_not_specialize=["buckets"], do_not_specialize_on_alignment=["mass_ptr", "fine_ptr", "row_ptr", "value_ptr"]
)
def _student_kernel(
    mass_ptr, fine_ptr, offset_ptr, slot_ptr, coarse_lane_ptr, fine_lane_ptr, weight_ptr, row_ptr, value_ptr,
    prob_coef_ptr, buckets, beta, rescale, KIND: tl.constexpr, LISTED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    first = tl.load(offset_ptr + i)
    last = tl.load(offset_ptr + i + 1)
    end = tl.load(mass_ptr + buckets + i)
    slot = tl.arange(0, BM)
    mass, fine, gone = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for b in range(first, last, BM):
        inside = b + slot < last
        m = tl.load(mass_ptr + b + slot, mask=inside, other=0.0)
        f = tl.load(fine_ptr + b + slot, mask=inside, other=0.0)
        mass += m
        fine += f
        if LISTED:
            gone += tl.where(m == 0, f, 0.0)
    target = tl.sum(mass, 0) + end
    inv_target = tl.where(target > 0, 1.0 / tl.maximum(target, SMALLEST), 0.0)
    left = 1.0 - tl.sum(fine, 0)
    rest = tl.maximum(left, 0.0) + FLOOR
    kept = 1.0
    log_kept = 0.0
    if LISTED:
        kept = 1.0 - tl.sum(gone, 0) + SMALLEST
        log_kept = tl.log(kept)
    value, rest_slope = _mass_terms(tl.log(rest) - log_kept, end * inv_target, beta, rescale, KIND)
    values, slopes = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for b in range(first, last, BM):
        inside = b + slot < last
        m = tl.load(mass_ptr + b + slot, mask=inside, other=0.0)
        f = tl.load(fine_ptr + b + slot, mask=inside, other=0.0)
        v, g = _mass_terms(tl.log(f + SMALLEST) - log_kept, m * inv_target, beta, rescale, KIND)
        if LISTED:
            inside = inside & (m > 0)
        values += tl.where(inside, v, 0.0)
        slopes += tl.where(inside, g, 0.0)
    seen = target > 0
    tl.store(row_ptr + tl.load(slot_ptr + i), tl.where(seen, value + tl.sum(values, 0), 0.0))
    # the student's rest is what all of its named tokens leave; tokens that are gone leave the normaliser
    by_rest = tl.where(left >= 0, rest_slope / rest, 0.0)
    by_kept = (tl.sum(slopes, 0) + rest_slope) / kept
    weight = tl.where(seen, tl.load(weight_ptr + tl.load(coarse_lane_ptr + i)), 0.0)
    total = tl.zeros([BM], tl.float32)
    for b in range(first, last, BM):
        inside = b + slot < last
        m = tl.load(mass_ptr + b + slot, mask=inside, other=0.0)
        f = tl.load(fine_ptr + b + slot, mask=inside, other=0.0)
        v, g = _mass_terms(tl.log(f + SMALLEST) - log_kept, m * inv_target, beta, rescale, KIND)
        slope = g / (f + SMALLEST) - by_rest
        if LISTED:
            slope = tl.where(m > 0, slope, by_kept - by_rest)
        out = tl.where(inside, slope * f * weight, 0.0)
        total += out
        tl.store(value_ptr + b + slot, out, mask=inside)
    tl.store(prob_coef_ptr + tl.load(fine_lane_ptr + i), -tl.sum(total, 0))


# Divergence at one position of the teacher's tree, and its slope by each of the student's masses there; in three
# passes as above. LISTED: children that the teacher's list does not name share the bucket of the end, or leave with it.
@triton.jit(
    do_not_specialize=["buckets"],
    do_not_specialize_on_alignment=["mass_ptr", "fine_ptr", "row_ptr", "slope_ptr", "dense_ptr"],
)
def _teacher_kernel(
    mass_ptr, fine_ptr, offset_ptr, slot_ptr, node_ptr, ends_ptr, coarse_lane_ptr, weight_ptr, row_ptr, slope_ptr,
    dense_ptr, buckets, beta, rescale, KIND: tl.constexpr, LISTED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    first = tl.load(offset_ptr + i)
    last = tl.load(offset_ptr + i + 1)
    has_end = tl.load(ends_ptr + tl.load(node_ptr + i)) > 0
    own_end = tl.load(mass_ptr + buckets + i)
    bucket = tl.arange(0, BM)
    mass, fine, gone = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for b in range(first, last, BM):
        inside = b + bucket < last
        m = tl.load(mass_ptr + b + bucket, mask=inside, other=0.0)
        f = tl.load(fine_ptr + b + bucket, mask=inside, other=0.0)
        fine += f
        if LISTED:
            gone += tl.where(f > 0, 0.0, m)
            m = tl.where(f > 0, m, 0.0)
        mass += m
    fine_sum = tl.sum(fine, 0)
    fine_end = tl.where(has_end, tl.maximum(1.0 - fine_sum, 0.0) + FLOOR, 0.0)
    end = tl.where(has_end, own_end + tl.sum(gone, 0), 0.0)
    target, total = fine_sum + fine_end, tl.sum(mass, 0) + end
    inv_target = tl.where(target > 0, 1.0 / tl.maximum(target, SMALLEST), 0.0)
    log_total = tl.log(total + SMALLEST)
    value, end_slope = _mass_terms(tl.log(end + SMALLEST) - log_total, fine_end * inv_target, beta, rescale, KIND)
    value = tl.where(has_end, value, 0.0)
    end_slope = tl.where(has_end, end_slope, 0.0)
    values, slopes = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for b in range(first, last, BM):
        inside = b + bucket < last
        m = tl.load(mass_ptr + b + bucket, mask=inside, other=0.0)
        f = tl.load(fine_ptr + b + bucket, mask=inside, other=0.0)
        v, g = _mass_terms(tl.log(m + SMALLEST) - log_total, f * inv_target, beta, rescale, KIND)
        if LISTED:
            inside = inside & (f > 0)
        values += tl.where(inside, v, 0.0)
        slopes += tl.where(inside, g, 0.0)
    seen = (target > 0) & (total > 0)
    slot = tl.load(slot_ptr + i)
    tl.store(row_ptr + slot, tl.where(seen, value + tl.sum(values, 0), 0.0))
    weight = tl.where(seen, tl.load(weight_ptr + tl.load(coarse_lane_ptr + i)), 0.0)
    by_total = (tl.sum(slopes, 0) + end_slope) / (total + SMALLEST)
    by_end = tl.where(has_end, end_slope / (end + SMALLEST) - by_total, 0.0) * weight
    dense = tl.zeros([BM], tl.float32)
    for b in range(first, last, BM):
        inside = b + bucket < last
        m = tl.load(mass_ptr + b + bucket, mask=inside, other=0.0)
        f = tl.load(fine_ptr + b + bucket, mask=inside, other=0.0)
        v, g = _mass_terms(tl.log(m + SMALLEST) - log_total, f * inv_target, beta, rescale, KIND)
        slope = (g / (m + SMALLEST) - by_total) * weight
        if LISTED:
            slope = tl.where(f > 0, slope, by_end)
        dense += tl.where(inside, slope * m, 0.0)
        tl.store(slope_ptr + b + bucket, slope, mask=inside)
    tl.store(slope_ptr + buckets + i, by_end)
    tl.store(dense_ptr + slot, tl.sum(dense, 0) + by_end * own_end)


class StudentNodes(NamedTuple):
    """rows `[C]`: divergences at the positions of the student's tree, summed by chunk; values `[B]`: what each bucket's
    token adds to its logit's gradient; prob_coef `[L]`: the factor of p there."""

    rows: Tensor
    values: Tensor
    prob_coef: Tensor


def student_nodes(
    buckets: NodeBuckets, positions: TreePositions, spec: DivergenceSpec, weight: Tensor, lanes: int, *, listed: bool
) -> StudentNodes:
    """The student's next tokens inside teacher tokens. weight `[C]`: of each chunk's divergence in the gradient; lanes:
    of the student; listed: the teacher's tokens are a top-k list."""
    rows, values = torch.zeros(positions.path.shape, device=weight.device), torch.empty_like(buckets.fine)
    prob_coef = torch.zeros(lanes, device=weight.device)
    if positions.count:
        _student_kernel[(positions.count,)](
            buckets.mass, buckets.fine, positions.offset, positions.slot, positions.coarse_lane, positions.fine_lane,
            weight, rows, values, prob_coef, positions.buckets,
            **direction(spec), LISTED=listed, BM=BUCKETS, num_warps=2,
        )  # fmt: skip
    return StudentNodes(positions.by_chunk(rows, weight.numel()), values, prob_coef)


class TeacherNodes(NamedTuple):
    """rows `[C]`: divergences at the positions of the teacher's tree, summed by chunk; slopes `[B + P]`: by the
    student's mass in each bucket and at each end; dense `[C]`: slopes times masses, summed by chunk."""

    rows: Tensor
    slopes: Tensor
    dense: Tensor


def teacher_nodes(
    buckets: NodeBuckets,
    tree: TreeTables,
    positions: TreePositions,
    spec: DivergenceSpec,
    weight: Tensor,
    *,
    listed: bool,
) -> TeacherNodes:
    """The student's tokens at the root by the teacher's next tokens inside them; arguments as of `student_nodes`."""
    slopes = torch.empty_like(buckets.mass)
    sums = torch.zeros(2, *positions.path.shape, device=weight.device)
    if positions.count:
        _teacher_kernel[(positions.count,)](
            buckets.mass, buckets.fine, positions.offset, positions.slot, positions.node, tree.ends,
            positions.coarse_lane, weight, sums[0], slopes, sums[1], positions.buckets,
            **direction(spec), LISTED=listed, BM=BUCKETS, num_warps=2,
        )  # fmt: skip
    rows, dense = positions.by_chunk(sums, weight.numel())
    return TeacherNodes(rows, slopes, dense)


# One program finds the slopes of ENTRIES coarse tokens below chunks' first nodes. A token goes down its chunk's
# positions; at each it lies in a bucket, found by halving among children, whose ranges follow each other, or at the
# end, or in another branch: then no later position has it.
@triton.jit(
    do_not_specialize=["number", "buckets", "depths"],
    do_not_specialize_on_alignment=["slope_ptr", "id_ptr", "lane_ptr", "logit_ptr", "value_ptr"],
)
def _below_kernel(
    x_ptr, lse_ptr, slope_ptr, order_ptr, start_ptr, stop_ptr, ends_ptr, child_ptr, node_ptr, offset_ptr, path_ptr,
    top_ptr, first_ptr, coarse_lane_ptr, id_ptr, lane_ptr, logit_ptr, value_ptr,
    number, buckets, depths, lanes, inv_tau, HALVES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    real = i < number
    chunk = tl.load(top_ptr + i, mask=real, other=0)
    node = tl.load(node_ptr + chunk, mask=real, other=0)
    member = tl.load(start_ptr + node, mask=real, other=0) + i - tl.load(first_ptr + chunk, mask=real, other=0)
    total = tl.zeros([BM], tl.float32)
    for depth in range(depths):
        position = tl.load(path_ptr + chunk * depths + depth, mask=real, other=-1)
        some = real & (position >= 0)
        node = tl.load(node_ptr + position, mask=some, other=0)
        start = tl.load(start_ptr + node, mask=some, other=0)
        below = some & (member >= start) & (member < tl.load(stop_ptr + node, mask=some, other=0))
        ended = below & (member < start + tl.load(ends_ptr + node, mask=some, other=0))
        low = tl.load(child_ptr + node, mask=some, other=0)
        begin = low
        high = tl.load(child_ptr + node + 1, mask=some, other=1)
        for _ in range(HALVES):
            middle = (low + high) // 2
            right = (high - low > 1) & (tl.load(start_ptr + middle, mask=below, other=0) <= member)
            left = (high - low > 1) & (tl.load(start_ptr + middle, mask=below, other=0) > member)
            low = tl.where(right, middle, low)
            high = tl.where(left, middle, high)
        bucket = tl.load(offset_ptr + position, mask=some, other=0) + low - begin
        total += tl.load(slope_ptr + tl.where(ended, buckets + position, bucket), mask=below, other=0.0)
    token = tl.load(order_ptr + member, mask=real, other=0)
    lane = tl.load(coarse_lane_ptr + chunk, mask=real, other=0)
    z = tl.load(x_ptr + token * lanes + lane, mask=real, other=0.0).to(tl.float32)
    base = tl.load(lse_ptr + lane, mask=real, other=0.0) * LOG2E
    tl.store(id_ptr + i, token, mask=real)
    tl.store(lane_ptr + i, lane, mask=real)
    tl.store(logit_ptr + i, z, mask=real)
    tl.store(value_ptr + i, total * tl.exp2(z * (inv_tau * LOG2E) - base), mask=real)


class Below(NamedTuple):
    """Coarse tokens below the first nodes of chunks: ids, lane int64, logits, and slope times probability."""

    ids: Tensor
    lane: Tensor
    logits: Tensor
    values: Tensor


def below_nodes(
    tree: TreeTables, positions: TreePositions, coarse: tuple[Tensor, Tensor], slopes: Tensor, temperature: float = 1.0
) -> Below:
    """Sum of what a chunk's positions add to the gradient of each coarse token: every token that one of them names
    lies below the chunk's first node."""
    logits, lse = coarse
    ids, lane = torch.empty(2, positions.members, dtype=torch.int64, device=logits.device)
    logits_below, values = torch.empty(2, positions.members, dtype=torch.float32, device=logits.device)
    # HALVES: so many halvings leave one of the most children that a node has
    if positions.members:
        _below_kernel[(-(-positions.members // ENTRIES),)](
            logits, lse, slopes, tree.order, tree.start, tree.stop, tree.ends, tree.child_start, positions.node,
            positions.offset, positions.path, positions.top(), positions.first,
            positions.coarse_lane, ids, lane, logits_below, values,
            positions.members, positions.buckets, positions.path.shape[1], logits.shape[1], 1 / temperature,
            HALVES=positions.most_children.bit_length(), BM=ENTRIES, num_warps=4,
        )  # fmt: skip
    return Below(ids, lane, logits_below, values)
