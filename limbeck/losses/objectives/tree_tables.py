"""Spelling trees as tables on a device: where the tokens of a chunk walk along a tree, the masses of both sides at the
children of a node, and how often tokens end where a text goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.data.layout import ChunkLayout
from limbeck.errors import LossError
from limbeck.losses.objectives.base import ChunkBlock, chunk_sum
from limbeck.losses.vocab.probabilities import Probabilities
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection import SpellingTree, VocabTrees


def trees_of(mode: str, projection: ProjectionLike) -> VocabTrees:
    """The trees that an objective works on, which a stored projection may lack."""
    if projection.trees is None:
        raise LossError(
            f"mode {mode!r} needs the trees of the two vocabularies, which this projection does not hold; build it "
            "anew with `limbeck project -o` or `load_or_build(..., trees=True)`, leave projection_matrix_path out, "
            "or use mode boundary_kl"
        )
    return projection.trees


class TreeTables(nn.Module):
    """A `SpellingTree` as tensors that travel with the objective."""

    order: Tensor
    keys: Tensor
    token: Tensor
    start: Tensor
    stop: Tensor
    ends: Tensor
    child_start: Tensor
    place: Tensor
    end_node: Tensor

    def __init__(self, tree: SpellingTree) -> None:
        super().__init__()
        self.fine_size = tree.fine_size
        tables: dict[str, np.ndarray] = {
            "order": tree.order,
            "keys": tree.child_keys,
            "token": tree.token,
            "start": tree.start,
            "stop": tree.stop,
            "ends": tree.ends,
            "child_start": tree.child_offsets,
            "place": tree.position,
            "end_node": tree.end_node,
        }
        for name, array in tables.items():
            self.register_buffer(name, torch.from_numpy(array.astype(np.int64)), persistent=False)

    def walk(self, ids: Tensor, depths: Tensor) -> Tensor:
        """Node after each token of runs of fine tokens, -1 off the tree. place: each token's number in its run."""
        node = torch.full_like(ids, -1)
        for depth in range(int(depths.max()) + 1):
            index = (depths == depth).nonzero().squeeze(1)
            # tokens of a run follow each other, so the node before is one place to the left
            node[index] = self.child(node[index - 1] if depth else torch.zeros_like(index), ids[index])
        return node

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """The node that a fine token leads to, -1 where none does or the node is -1."""
        key = node * self.fine_size + token
        key_index = torch.searchsorted(self.keys, key)
        same = self.keys[key_index.clamp(max=self.keys.numel() - 1)] == key
        return (key_index + 1).where(same & (node >= 0), torch.full_like(node, -1))

    def holds(self, node: Tensor, coarse: Tensor) -> Tensor:
        """bool: the coarse token lies below the node (-1: no)."""
        order_index, safe = self.place[coarse], node.clamp(min=0)
        return (node >= 0) & (order_index >= self.start[safe]) & (order_index < self.stop[safe])

    def ended(self, node: Tensor, coarse: Tensor) -> Tensor:
        """bool: the coarse token is spelled exactly as the node."""
        safe = node.clamp(min=0)
        return self.holds(node, coarse) & (self.place[coarse] < self.start[safe] + self.ends[safe])


FineSide = Literal["student", "teacher"]
"""The side in whose tokens a tree spells the other's."""


@dataclass(frozen=True)
class FineTokens:
    """The tokens of some chunks as a tree reads them: the fine side's ids, with the chunk of each, and of every chunk
    the first of them and how many there are; the coarse side's first token of each chunk, and how many it has."""

    ids: Tensor
    chunk: Tensor
    first_C: Tensor
    count_C: Tensor
    coarse_C: Tensor
    coarse_count_C: Tensor

    @classmethod
    def of(cls, chunks: ChunkBlock | ChunkLayout, fine: FineSide) -> FineTokens:
        student = chunks.student_ids_M, chunks.student_chunk_M, chunks.student_first_C, chunks.student_count_C
        teacher = chunks.teacher_ids_Q, chunks.teacher_chunk_Q, chunks.teacher_first_C, chunks.teacher_count_C
        mine, other = (student, teacher) if fine == "student" else (teacher, student)
        return cls(*mine, other[0].index_select(0, other[2]), other[3])

    def walked(self, tree: TreeTables) -> Tensor:
        """Node behind each token, -1 off the tree."""
        depths = torch.arange(self.ids.numel(), device=self.ids.device) - self.first_C[self.chunk]
        return tree.walk(self.ids, depths)


@dataclass(frozen=True)
class Positions:
    """Positions inside chunks at which a tree goes on. node: where the tree stands before the realised token; row: of
    the fine side's distributions; chunk: its number, and the row of the coarse side's root distributions."""

    node: Tensor
    row: Tensor
    chunk: Tensor

    @property
    def count(self) -> int:
        return self.node.numel()

    def at(self, chosen: Tensor) -> Positions:
        """Some of them."""
        return Positions(self.node[chosen], self.row[chosen], self.chunk[chosen])


@dataclass(frozen=True)
class Buckets:
    """Outcomes at some positions, one after another: the children of each node, and beside them the end.

    owner: position of each child; coarse, fine: mass of the child on either side; coarse_end, has_end: mass of coarse
    tokens that end at the node, and whether there are any.
    """

    owner: Tensor
    coarse: Tensor
    fine: Tensor
    coarse_end: Tensor
    has_end: Tensor

    def total(self, values: Tensor) -> Tensor:
        """Sums by position."""
        return chunk_sum(values, self.owner, self.coarse_end.numel())


def ranges(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """All integers of half-open ranges, one range after another, and the range that each belongs to."""
    size = stop - start
    owner = torch.repeat_interleave(torch.arange(size.numel(), device=size.device), size)
    within = torch.arange(owner.numel(), device=size.device) - (size.cumsum(0) - size)[owner]
    return start[owner] + within, owner


def tree_buckets(tree: TreeTables, positions: Positions, coarse: Probabilities, fine: Probabilities) -> Buckets:
    """Masses of both sides at the children of nodes. coarse: at the chunks' roots; fine: at the rows that the positions
    name. Masses are segment sums: differences of running sums would lose small ones."""
    child, owner = ranges(tree.child_start[positions.node], tree.child_start[positions.node + 1])
    member, bucket = ranges(tree.start[child], tree.stop[child])
    mass = coarse.at(positions.chunk[owner[bucket]], tree.order[member])
    start, ends = tree.start[positions.node], tree.ends[positions.node]
    last, last_owner = ranges(start, start + ends)
    end_mass = coarse.at(positions.chunk[last_owner], tree.order[last])
    return Buckets(
        owner,
        chunk_sum(mass, bucket, child.numel()),
        fine.at(positions.row[owner], tree.token[child]),
        chunk_sum(end_mass, last_owner, positions.count),
        ends > 0,
    )


@dataclass(frozen=True)
class EndCounts:
    """At every node of a tree, how often a text went on along it inside a coarse token, and how often behind one that
    had ended there."""

    inside: Tensor
    behind: Tensor

    @classmethod
    def of(cls, tree: TreeTables, layout: ChunkLayout, fine: FineSide) -> EndCounts:
        """In the texts of a layout, on the CPU."""
        tokens, nodes = FineTokens.of(layout, fine), tree.start.numel()
        last_C = tokens.first_C + tokens.count_C - 1
        node_C = tokens.walked(tree)[last_C]
        ended_C = tree.ended(node_C, tokens.coarse_C) & (tokens.coarse_count_C == 1)
        rows = layout.student_rows_M if fine == "student" else layout.teacher_rows_Q
        follows = rows[tokens.first_C[1:]] == rows[last_C[:-1]] + 1
        # rows of different texts may follow each other, too
        follows &= layout.sample_C[1:] == layout.sample_C[:-1]
        went_on = tree.child(node_C[:-1], tokens.ids[tokens.first_C[1:]]) >= 0
        index = (ended_C[:-1] & follows & went_on).nonzero().squeeze(1)
        inside, _ = _inside(tree, tokens)
        return cls(torch.bincount(inside.node, minlength=nodes), torch.bincount(node_C[index], minlength=nodes))

    def __add__(self, other: EndCounts) -> EndCounts:
        return EndCounts(self.inside + other.inside, self.behind + other.behind)

    @property
    def share(self) -> float:
        """Share of those that stood behind a token that had ended."""
        behind = int(self.behind.sum())
        return behind / max(int(self.inside.sum()) + behind, 1)

    def ended(self) -> Tensor:
        """float32: that share at every node, nearer to the share of all nodes the less was seen of it."""
        return (self.behind + self.share) / (self.inside + self.behind + 1).float()


def inside_student(tree: TreeTables, chunks: ChunkBlock) -> tuple[Positions, Tensor]:
    """`_inside` of the student tree; rows number the chunks' student tokens."""
    return _inside(tree, FineTokens.of(chunks, "student"))


def inside_teacher(tree: TreeTables, chunks: ChunkBlock) -> tuple[Positions, Tensor]:
    """`_inside` of the teacher tree; rows number the chunks' teacher tokens."""
    return _inside(tree, FineTokens.of(chunks, "teacher"))


def _inside(tree: TreeTables, tokens: FineTokens) -> tuple[Positions, Tensor]:
    """Positions inside chunks where the fine side's tokens spell the coarse side's first one, and bool `[C]`: they
    spell it to its end and it is the whole chunk."""
    ids, chunk, first_C = tokens.ids, tokens.chunk, tokens.first_C
    none = ids.new_zeros(0)
    if ids.numel() == first_C.numel():  # every chunk has one token on the fine side
        return Positions(none, none, none), torch.zeros_like(first_C, dtype=torch.bool)
    node, coarse = tokens.walked(tree), tokens.coarse_C[chunk]
    first = torch.zeros_like(chunk, dtype=torch.bool).index_fill_(0, first_C, True)
    index = (tree.holds(node, coarse) & ~first).nonzero().squeeze(1)
    ended = tree.ended(node, coarse)
    last = torch.cat((first_C[1:], first_C.new_tensor([ids.numel()]))) - 1
    done_C = ended[last] & (tokens.coarse_count_C == 1)
    return Positions(node[index - 1], index, chunk[index]), done_C
