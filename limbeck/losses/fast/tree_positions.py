"""Positions that the kernels of tree_kl read at a block's chunks, found in main memory before the device needs it:
where the trees go on inside chunks, and which chunks neither tree spells. So the host, which has to know how many there
are, never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.objectives.base import ChunkBlock
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.objectives.tree_tables import Positions, TreeTables, inside_student, inside_teacher


@dataclass(frozen=True)
class TreePositions:
    """Positions `[P]` of one tree, by depth and then by node; the first T of them begin the chunks that have some.

    node: where the tree stands; fine_lane: of the fine side's distribution there; coarse_lane: of the coarse side's at
    the chunk's start, which is the chunk's number, too. offset `[P + 1]`: where a position's buckets, the children of
    its node, begin among all of them; first `[T + 1]`: where the coarse tokens below a chunk's first node begin among
    all of them; path `[T, depths]`: a chunk's positions, -1 behind the last; slot `[P]`: a position's place in `path`.
    most_children: of one node.
    """

    node: Tensor
    fine_lane: Tensor
    coarse_lane: Tensor
    offset: Tensor
    first: Tensor
    path: Tensor
    slot: Tensor
    buckets: int
    members: int
    most_children: int

    @property
    def count(self) -> int:
        return self.node.numel()

    def owner(self) -> Tensor:
        """Position of every bucket."""
        return torch.repeat_interleave(self.offset.diff(), output_size=self.buckets)

    def top(self) -> Tensor:
        """Which of the T chunks each coarse token below a first node belongs to."""
        return torch.repeat_interleave(self.first.diff(), output_size=self.members)

    def by_chunk(self, values: Tensor, chunks: int) -> Tensor:
        """Sums over a chunk's positions: `[..., T, depths]` -> `[..., chunks]`, 0 where a chunk has none."""
        out = values.new_zeros(*values.shape[:-2], chunks)
        return out.index_copy_(-1, self.coarse_lane[: self.path.shape[0]], values.sum(-1))


@dataclass(frozen=True)
class TreePlan:
    """A block's chunks in the order of their lanes. has_term_C: float, 1 where the chunk has a chunk term."""

    student: TreePositions
    teacher: TreePositions
    has_term_C: Tensor


def plan_trees(
    objective: TreeKL, chunks: ChunkBlock, order: Tensor, single: int, extra_first: tuple[Tensor, Tensor]
) -> TreePlan:
    """Plan of a block on the CPU. order: its chunks in the order of their lanes, the first `single` of them one to one;
    extra_first: of the student's and the teacher's `SidePositions`."""
    lane_C = torch.empty_like(order)
    lane_C[order] = torch.arange(order.numel())
    student_tree, teacher_tree = objective.host_trees
    inner_s, done_s = inside_student(student_tree, chunks)
    inner_t, done_t = inside_teacher(teacher_tree, chunks)
    has_term_C = objective.has_chunk_term(chunks, done_s, done_t)
    # tokens behind the first of a chunk have lanes behind those of all chunks
    starts = [order.numel() + F.pad(first, (single, 0)) for first in extra_first]
    return TreePlan(
        _positions(student_tree, inner_s, chunks.student_first_C, lane_C, starts[0]),
        _positions(teacher_tree, inner_t, chunks.teacher_first_C, lane_C, starts[1]),
        has_term_C[order].float(),
    )


def _positions(tree: TreeTables, inside: Positions, first_C: Tensor, lane_C: Tensor, starts: Tensor) -> TreePositions:
    depth = inside.row - first_C[inside.chunk] - 1
    order = (depth * tree.start.numel() + inside.node).argsort(stable=True)
    node, depth, coarse = inside.node[order], depth[order], lane_C[inside.chunk[order]]
    number, chunks = node.numel(), int((depth == 0).sum())
    children = tree.child_start[node + 1] - tree.child_start[node]
    below = tree.stop[node[:chunks]] - tree.start[node[:chunks]]
    chunk_of = torch.empty_like(lane_C)
    chunk_of[coarse[:chunks]] = torch.arange(chunks)
    path = torch.full((chunks, int(depth.max()) + 1 if number else 0), -1, dtype=torch.int32)
    slot = chunk_of[coarse] * path.shape[1] + depth
    path.view(-1)[slot] = torch.arange(number, dtype=torch.int32)
    return TreePositions(
        node,
        starts[coarse] + depth,
        coarse,
        F.pad(children.cumsum(0), (1, 0)),
        F.pad(below.cumsum(0), (1, 0)),
        path,
        slot,
        buckets=int(children.sum()),
        members=int(below.sum()),
        most_children=int(children.max()) if number else 0,
    )
