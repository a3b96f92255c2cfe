"""What the kernels of tree_kl read at a block's chunks, found in main memory before the device needs it: where the
trees go on inside chunks, which chunks neither tree spells, and what last tokens rule out. So the host, which has to
know how many there are, never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.objectives.base import ChunkBlock
from limbeck.losses.objectives.tree_kl import (
    BarredLists,
    Positions,
    TreeKL,
    TreeTables,
    inside_student,
    inside_teacher,
)


@dataclass(frozen=True)
class TreePositions:
    """Positions of one tree, by depth and then by node. node: where the tree stands; fine_lane: of the fine side's
    distribution there; coarse_lane: of the coarse side's at the chunk's start, which is the chunk's number, too;
    depths: how many positions, children of their nodes, coarse tokens below the children, and coarse tokens that end at
    the nodes each depth has. No lane is named twice within one depth."""

    node: Tensor
    fine_lane: Tensor
    coarse_lane: Tensor
    depths: tuple[tuple[int, int, int, int], ...]

    @property
    def count(self) -> int:
        return self.node.numel()

    @property
    def buckets(self) -> int:
        """Children of all nodes."""
        return sum(depth[1] for depth in self.depths)


@dataclass(frozen=True)
class BarredTokens:
    """`BarredLists` in the order of lanes, and how many pairs they are."""

    lists: BarredLists
    pairs: int


@dataclass(frozen=True)
class TreePlan:
    """A block's chunks in the order of their lanes. open_C: float, 1 where neither tree spells the chunk to its end;
    barred: teacher tokens and student tokens that leave the roots, None without a condition."""

    student: TreePositions
    teacher: TreePositions
    open_C: Tensor
    barred: tuple[BarredTokens, BarredTokens] | None


def plan_trees(
    objective: TreeKL, chunks: ChunkBlock, order: Tensor, single: int, extra_first: tuple[Tensor, Tensor]
) -> TreePlan:
    """Plan of a block on the CPU. order: its chunks in the order of their lanes, the first `single` of them one to one;
    extra_first: of the student's and the teacher's `SideLanes`."""
    lane_C = torch.empty_like(order)
    lane_C[order] = torch.arange(order.numel())
    student_tree, teacher_tree = objective.host_trees
    inner_s, done_s = inside_student(student_tree, chunks)
    inner_t, done_t = inside_teacher(teacher_tree, chunks)
    open_C = chunks.multi_C & ~done_s & ~done_t
    barred = None
    if objective.conditions is not None:
        by_student, by_teacher = objective.barred(chunks)
        barred = _in_lanes(by_student, order), _in_lanes(by_teacher, order)
    # tokens behind the first of a chunk have lanes behind those of all chunks
    starts = [order.numel() + F.pad(first, (single, 0)) for first in extra_first]
    return TreePlan(
        _positions(student_tree, inner_s, chunks.student_first_C, lane_C, starts[0]),
        _positions(teacher_tree, inner_t, chunks.teacher_first_C, lane_C, starts[1]),
        open_C[order].float(),
        barred,
    )


def _positions(tree: TreeTables, at: Positions, first_C: Tensor, lane_C: Tensor, starts: Tensor) -> TreePositions:
    depth = at.row - first_C[at.chunk]
    order = (depth * tree.start.numel() + at.node).argsort(stable=True)
    node, depth, coarse = at.node[order], depth[order], lane_C[at.chunk[order]]
    buckets = tree.child_start[node + 1] - tree.child_start[node]
    members = tree.stop[node] - tree.start[node] - tree.ends[node]
    each = torch.stack((torch.ones_like(node), buckets, members, tree.ends[node]), 1)
    deepest = int(depth.max()) if depth.numel() else 0
    sums = torch.zeros(deepest + 1, 4, dtype=torch.int64).index_add(0, depth, each)
    depths = tuple((a, b, c, d) for a, b, c, d in sums.tolist() if a)
    return TreePositions(node, starts[coarse] + depth - 1, coarse, depths)


def _in_lanes(lists: BarredLists, order: Tensor) -> BarredTokens:
    own = BarredLists(lists.flat, lists.start_C[order], lists.stop_C[order], lists.wrong_C[order])
    return BarredTokens(own, int((own.stop_C - own.start_C).sum()))
