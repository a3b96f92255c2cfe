"""tree_kl: compare what both models can say, at every position of a chunk.

The parts, for a chunk of student tokens s_1..s_n and teacher tokens t_1..t_m (forward KL; every target sums to 1):

- **root**: at the chunk's start, KL over the cells of `limbeck.projection.trees`, P(cell) being the sum of next-token
  probabilities.
- **student tree**: after s_1..s_j inside t_1, the teacher's distribution *at the root*, restricted to tokens whose
  student spelling begins so, says how likely each next student token is, and that the token ends here. The student has
  its own distribution there, with all tokens that are no continuation in one bucket.
- **teacher tree**: the mirror. The teacher's distribution after t_1..t_j inside s_1 is the target for the student's
  distribution at the root, restricted to tokens whose teacher spelling begins so. Where no student token ends, the
  teacher's mass off the tree is left out: the student could not answer it.
- **terminal** (off by default): where s_1..s_n spell t_1, or t_1..t_m spell s_1, and other spellings go on, the row
  behind the chunk is compared like those inside it: the token could have gone on, and has ended.
- **first level** (off by default): where a cell is deeper than one link, which group of its tokens, by the first token
  of their spelling. Not quite the same event on both sides, so not with conditioning.
- **chunk**: binary divergence of the realised chunk's probability where neither tree spells the chunk to its end, or of
  every chunk of several tokens.

Along the student tree the expectation of the parts over the teacher's tokens is KL(p_T || Q_S) with Q_S the probability
that the student spells the token and stops there, up to cells that are deeper than one link.

Conditioning takes out what the sides' last tokens tell one of them only. The cheap form takes from each side, at the
root, the tokens that the other side's last token rules out. The exact form compares outcomes that are the same event
for both (`limbeck.projection.events`): cells none of whose tokens is ruled out by its own side's last token, and inside
tokens the outcomes that `NodeEvents` finds. The student's mass on tokens that its own last token rules out stays in its
denominator, since it should be 0 (forward KL; the other directions leave it out).

The counted form asks no rule but a text (`EndCounts`): where it goes on along a tree, how often has the coarse token
ended all the same (`46` is a token, and `466` still is `4`, `66`)? Inside tokens that share belongs to the end; and at
the root behind a coarse token that has ended, what would have gone on inside it counts by that share.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limbeck.data.layout import ChunkLayout
from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, binary_divergence, divergence_entries
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ObjectiveOptions,
    ProjectedObjective,
    chunk_log_probs,
    chunk_sum,
)
from limbeck.losses.objectives.corrected import TINY, rest_floor
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.losses.vocab.probabilities import Dense, FromLogs, Listed, Probabilities
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection import SpellingTree, VocabTrees
from limbeck.projection.events import Conditions, LastTokens, NodeEvents

logger = logging.getLogger(__name__)


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
            "place": tree.place,
            "end_node": tree.end_node,
        }
        for name, array in tables.items():
            self.register_buffer(name, torch.from_numpy(array.astype(np.int64)), persistent=False)

    def walk(self, ids: Tensor, place: Tensor) -> Tensor:
        """Node after each token of runs of fine tokens, -1 off the tree. place: each token's number in its run."""
        node = torch.full_like(ids, -1)
        for depth in range(int(place.max()) + 1):
            at = (place == depth).nonzero().squeeze(1)
            node[at] = self.child(node[at - 1] if depth else torch.zeros_like(at), ids[at])
        return node

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """The node that a fine token leads to, -1 where none does or the node is -1."""
        key = node * self.fine_size + token
        found = torch.searchsorted(self.keys, key)
        same = self.keys[found.clamp(max=self.keys.numel() - 1)] == key
        return (found + 1).where(same & (node >= 0), torch.full_like(node, -1))

    def holds(self, node: Tensor, coarse: Tensor) -> Tensor:
        """bool: the coarse token lies below the node (-1: no)."""
        place, safe = self.place[coarse], node.clamp(min=0)
        return (node >= 0) & (place >= self.start[safe]) & (place < self.stop[safe])

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
        place = torch.arange(self.ids.numel(), device=self.ids.device) - self.first_C[self.chunk]
        return tree.walk(self.ids, place)


@dataclass(frozen=True)
class Positions:
    """Positions inside chunks at which a tree goes on. node: where the tree stands before the realised token; row: of
    the fine side's distributions; chunk: its number, and the row of the coarse side's root distributions; token: the
    realised one, -1 where it is not known."""

    node: Tensor
    row: Tensor
    chunk: Tensor
    token: Tensor

    @property
    def count(self) -> int:
        return self.node.numel()

    def at(self, chosen: Tensor) -> Positions:
        """Some of them."""
        return Positions(self.node[chosen], self.row[chosen], self.chunk[chosen], self.token[chosen])


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


def ranges(start: Tensor, stop: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """All integers of half-open ranges, one range after another, and the range that each belongs to. total: how many
    they are, where the host knows it: then it does not wait for a device."""
    size = stop - start
    owner = torch.repeat_interleave(torch.arange(size.numel(), device=size.device), size, output_size=total)
    within = torch.arange(owner.numel(), device=size.device) - (size.cumsum(0) - size)[owner]
    return start[owner] + within, owner


def tree_buckets(tree: TreeTables, at: Positions, coarse: Probabilities, fine: Probabilities) -> Buckets:
    """Masses of both sides at the children of nodes. coarse: at the chunks' roots; fine: at the rows that the positions
    name. Masses are segment sums: differences of running sums would lose small ones."""
    child, owner = ranges(tree.child_start[at.node], tree.child_start[at.node + 1])
    member, bucket = ranges(tree.start[child], tree.stop[child])
    mass = coarse.at(at.chunk[owner[bucket]], tree.order[member])
    start, ends = tree.start[at.node], tree.ends[at.node]
    last, last_owner = ranges(start, start + ends)
    end_mass = coarse.at(at.chunk[last_owner], tree.order[last])
    return Buckets(
        owner,
        chunk_sum(mass, bucket, child.numel()),
        fine.at(at.row[owner], tree.token[child]),
        chunk_sum(end_mass, last_owner, at.count),
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
        own, nodes = FineTokens.of(layout, fine), tree.start.numel()
        last_C = own.first_C + own.count_C - 1
        node_C = own.walked(tree)[last_C]
        ended_C = tree.ended(node_C, own.coarse_C) & (own.coarse_count_C == 1)
        rows = layout.student_rows_M if fine == "student" else layout.teacher_rows_Q
        follows = rows[own.first_C[1:]] == rows[last_C[:-1]] + 1
        follows &= layout.sample_C[1:] == layout.sample_C[:-1]
        went_on = tree.child(node_C[:-1], own.ids[own.first_C[1:]]) >= 0
        at = (ended_C[:-1] & follows & went_on).nonzero().squeeze(1)
        inside, _ = _inside(tree, own)
        return cls(torch.bincount(inside.node, minlength=nodes), torch.bincount(node_C[at], minlength=nodes))

    def __add__(self, other: EndCounts) -> EndCounts:
        return EndCounts(self.inside + other.inside, self.behind + other.behind)

    @property
    def share(self) -> float:
        """Of all those, how many were behind a token that had ended."""
        behind = int(self.behind.sum())
        return behind / max(int(self.inside.sum()) + behind, 1)

    def ended(self) -> Tensor:
        """float32: that share at every node, nearer to the share of all nodes the less was seen of it."""
        return (self.behind + self.share) / (self.inside + self.behind + 1).float()


def _log(values: Tensor) -> Tensor:
    """Logarithm of a mass, finite at 0 with a gradient of 0 there."""
    return (values + torch.finfo(values.dtype).tiny).log()


def log_target(values: Tensor, spec: DivergenceSpec) -> Tensor:
    """Logarithm of a target: exactly -inf at 0 where it is the weight, floored where it is the denominator."""
    return values.log() if spec.kind == "forward" else values.clamp(min=TINY).log()


def _safe(total: Tensor) -> Tensor:
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def student_node_divergence(b: Buckets, spec: DivergenceSpec, *, listed: bool) -> Tensor:
    """Divergence at each position of the student tree: the teacher's masses below a node, normalised, against the
    student's next token there. listed: the teacher's tokens are a top-k list; children that it does not name leave
    both sides."""
    target_total = _safe(b.total(b.coarse) + b.coarse_end)
    floor = rest_floor(b.fine.dtype)
    rest = (1 - b.total(b.fine)).clamp(min=0) + floor
    kept = torch.ones_like(rest) if not listed else 1 - b.total(b.fine * (b.coarse == 0))
    log_kept = _log(kept)
    log_s = _log(b.fine) - log_kept[b.owner]
    log_t = log_target(b.coarse / target_total[b.owner], spec)
    entries = divergence_entries(log_s, log_t, spec)
    if listed:
        entries = entries.masked_fill(b.coarse == 0, 0)
    ends = divergence_entries(rest.log() - log_kept, log_target(b.coarse_end / target_total, spec), spec)
    seen = b.total(b.coarse) + b.coarse_end > 0
    return (b.total(entries) + ends).where(seen, torch.zeros_like(ends))


def teacher_node_divergence(b: Buckets, spec: DivergenceSpec, *, listed: bool) -> Tensor:
    """Divergence at each position of the teacher tree: the teacher's next token at a node against the student's masses
    below it. listed: children that the teacher's list does not name share the bucket of the end, or leave with it."""
    named = b.fine > 0 if listed else torch.ones_like(b.fine, dtype=torch.bool)
    fine, coarse = b.fine * named, b.coarse * named
    floor = rest_floor(b.fine.dtype)
    fine_end = ((1 - b.total(fine)).clamp(min=0) + floor) * b.has_end
    coarse_end = (b.coarse_end + b.total(b.coarse * ~named)) * b.has_end
    fine_total, coarse_total = _safe(b.total(fine) + fine_end), b.total(coarse) + coarse_end
    log_total = _log(coarse_total)
    log_s = _log(coarse) - log_total[b.owner]
    entries = divergence_entries(log_s, log_target(fine / fine_total[b.owner], spec), spec)
    ends = divergence_entries(_log(coarse_end) - log_total, log_target(fine_end / fine_total, spec), spec)
    seen = (b.total(fine) + fine_end > 0) & (coarse_total > 0)
    total = b.total(entries.masked_fill(~named, 0)) + ends.masked_fill(~b.has_end, 0)
    return total.where(seen, torch.zeros_like(total))


@dataclass(frozen=True)
class Barred:
    """Tokens of one side that are ruled out at the roots of a block's chunks: chunk and id of each, sorted; wrong_C:
    bool, the text has the pair that the rule forbids, so nothing is ruled out there."""

    chunk: Tensor
    ids: Tensor
    wrong_C: Tensor

    def holds(self, chunk: Tensor, ids: Tensor, size: int) -> Tensor:
        """bool: the id, of a vocabulary of `size`, is ruled out at the chunk's root."""
        keys, wanted = self.chunk * size + self.ids, chunk * size + ids
        at = torch.searchsorted(keys, wanted)
        return (at < keys.numel()) & (F.pad(keys, (0, 1), value=-1)[at] == wanted)


@dataclass(frozen=True)
class BarredLists:
    """`Barred` before it is written out: the lists of distinct last tokens, one after another in `flat`; those of chunk
    c are `flat[start_C[c] : stop_C[c]]`."""

    flat: Tensor
    start_C: Tensor
    stop_C: Tensor
    wrong_C: Tensor

    def without(self, wrong_C: Tensor) -> BarredLists:
        """Nothing is ruled out at these chunks."""
        return replace(self, stop_C=self.stop_C.where(~wrong_C, self.start_C), wrong_C=wrong_C)

    def written_out(self, total: int | None = None) -> Barred:
        """total: number of pairs, see `ranges`."""
        at, chunk = ranges(self.start_C, self.stop_C, total)
        return Barred(chunk, self.flat[at].long(), self.wrong_C)


def barred_lists(table: LastTokens, last_C: Tensor, realised_C: Tensor, size: int) -> BarredLists:
    """What is ruled out at roots whose last token and realised token, of the table's side, are these; only ids below
    `size`."""
    lasts, row = last_C.unique(return_inverse=True)
    lists = [table[last] for last in lasts.tolist()]
    lists = [ids[: np.searchsorted(ids, size)] for ids in lists]
    flat = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *lists])).to(last_C.device)
    ends = torch.tensor([0, *np.cumsum([ids.size for ids in lists]).tolist()], device=last_C.device)
    wrong_C = torch.zeros_like(row, dtype=torch.bool)
    if table.rule is not None:
        pairs, which = torch.stack((last_C, realised_C), 1).unique(dim=0, return_inverse=True)
        answers = [last >= 0 and not table.rule.allowed(last, token) for last, token in pairs.tolist()]
        wrong_C = torch.tensor(answers, dtype=torch.bool, device=row.device)[which]
    return BarredLists(flat, ends[row], ends[row + 1], wrong_C)


def barred_at(table: LastTokens, last_C: Tensor, realised_C: Tensor, size: int) -> Barred:
    """`barred_lists`, written out."""
    return barred_lists(table, last_C, realised_C, size).written_out()


@dataclass(frozen=True)
class Outcomes:
    """Outcomes at some positions: the position of each, and its mass on either side; own: mass, by position, that the
    student gives to tokens of its own that its last token rules out; kept: share of the coarse mass that is left."""

    owner: Tensor
    coarse: Tensor
    fine: Tensor
    own: Tensor
    kept: Tensor


def node_outcomes(
    events: NodeEvents,
    tree: TreeTables,
    at: Positions,
    coarse: Probabilities,
    fine: Probabilities,
    barred: Barred,
    *,
    student_is_fine: bool,
) -> Outcomes:
    """Masses of both sides on the outcomes that are the same events for both; see `tree_buckets` for the sides. barred:
    coarse tokens that the coarse side's last token rules out at the root; outcomes that hold one leave."""
    device, size = at.node.device, events.coarse.size
    found = [events[node] for node in at.node.tolist()]
    counts = torch.tensor([b.count for b in found], device=device)
    first, total = counts.cumsum(0) - counts, int(counts.sum())
    owner = torch.repeat_interleave(torch.arange(at.count, device=device), counts)

    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device).long()

    def owners(arrays: list[np.ndarray]) -> Tensor:
        sizes = torch.tensor([a.size for a in arrays], device=device)
        return torch.repeat_interleave(torch.arange(len(arrays), device=device), sizes)

    def fine_mass_of(arrays: list[np.ndarray], by: Tensor | None = None) -> Tensor:
        """Fine mass of ids, summed by position, or by these outcomes of their position."""
        position = owners(arrays)
        mass = fine.at(at.row[position], joined(arrays))
        return chunk_sum(mass, position, at.count) if by is None else chunk_sum(mass, by + first[position], total)

    ids, position = joined([b.coarse for b in found]), owners([b.coarse for b in found])
    bucket = joined([b.coarse_bucket for b in found]) + first[position]
    leaving = barred.holds(at.chunk[position], ids, size)
    left = torch.ones(total, dtype=torch.bool, device=device).index_fill(0, bucket[leaving], False)
    coarse_mass = chunk_sum(coarse.at(at.chunk[position], ids), bucket, total)
    fine_mass = fine_mass_of([b.fine for b in found], joined([b.fine_bucket for b in found]))
    rest = torch.tensor([b.rest for b in found], device=device)
    with_rest = (rest >= 0).nonzero().squeeze(1)
    if with_rest.numel():
        # most of a vocabulary: what its complement leaves
        whole = fine.totals()[at.row]
        most = (whole - fine_mass_of([b.outside for b in found])).clamp(min=0) + rest_floor(whole.dtype)
        fine_mass = fine_mass.index_add(0, (first + rest)[with_rest], most[with_rest])
    member, below = ranges(tree.start[at.node], tree.stop[at.node])
    below_mass = coarse.at(at.chunk[below], tree.order[member])
    if student_is_fine:
        own = fine_mass_of([b.own for b in found])
    else:
        ruled_out = barred.holds(at.chunk[below], tree.order[member], size)
        own = chunk_sum(below_mass * ruled_out, below, at.count)
    kept = chunk_sum(coarse_mass.detach() * left, owner, at.count)
    kept = kept / _safe(chunk_sum(below_mass.detach(), below, at.count))
    return Outcomes(owner[left], coarse_mass[left], fine_mass[left], own, kept)


def outcome_divergence(
    target: Tensor, student: Tensor, owner: Tensor, own: Tensor, spec: DivergenceSpec, *, listed: bool
) -> Tensor:
    """Divergence at each position over outcomes, both sides normalised over them. listed: outcomes of which the
    teacher's list names nothing leave."""
    if listed:
        student = student * (target > 0)
    count = own.numel()
    target_total = chunk_sum(target, owner, count)
    total = chunk_sum(student, owner, count)
    if spec.kind == "forward":
        total = total + own
    log_s = _log(student) - _log(total)[owner]
    entries = divergence_entries(log_s, log_target(target / _safe(target_total)[owner], spec), spec)
    if listed:
        entries = entries.masked_fill(target == 0, 0)
    rows = chunk_sum(entries, owner, count)
    return rows.where((target_total > 0) & (total > 0), torch.zeros_like(rows))


class FirstLevel(nn.Module):
    """Groups of tokens inside the cells that have several: by the first token of their spelling in the fine side's
    tokens; a fine token that begins no spelling belongs to the group of the coarse token that it lies in.

    `*_member`: tokens of each side in the order of cells, `*_start` `[cells + 1]` where those of each cell begin,
    `*_group`: number of each member's group within its cell; `groups` `[cells]`: how many there are.
    """

    student_member: Tensor
    student_start: Tensor
    student_group: Tensor
    teacher_member: Tensor
    teacher_start: Tensor
    teacher_group: Tensor
    groups: Tensor

    def __init__(self, trees: VocabTrees, *, student_is_fine: bool) -> None:
        super().__init__()
        firsts = trees.student_tree.first, trees.teacher_tree.first  # by teacher id, by student id
        coarse, fine = firsts if student_is_fine else firsts[::-1]
        begins = np.zeros(fine.size, dtype=bool)
        begins[coarse[coarse >= 0]] = True
        own = np.arange(fine.size)
        by_fine = np.where(begins | (fine < 0), own, coarse[fine])
        names = (by_fine, coarse) if student_is_fine else (coarse, by_fine)
        cells = trees.student_cell, trees.teacher_cell
        keys = [cell.astype(np.int64) * (fine.size + 1) + name for cell, name in zip(cells, names, strict=True)]
        known = np.unique(np.concatenate([key[cell >= 0] for key, cell in zip(keys, cells, strict=True)]))
        first_group = np.searchsorted(known, np.arange(trees.num_cells + 1) * (fine.size + 1))
        tables = {"groups": np.diff(first_group)}
        for side, key, cell in zip(("student", "teacher"), keys, cells, strict=True):
            member = np.argsort(cell, kind="stable")
            member = member[cell[member] >= 0]
            tables[f"{side}_member"] = member
            tables[f"{side}_start"] = np.searchsorted(cell[member], np.arange(trees.num_cells + 1))
            tables[f"{side}_group"] = np.searchsorted(known, key[member]) - first_group[cell[member]]
        for name, array in tables.items():
            self.register_buffer(name, torch.from_numpy(array.astype(np.int64)), persistent=False)

    def masses(self, side: str, probs: Probabilities, chunk: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """(mass of each group, its number among `chunk`) of the cells at these chunks' roots."""
        start, group = getattr(self, f"{side}_start"), getattr(self, f"{side}_group")
        member, owner = ranges(start[cell], start[cell + 1])
        count = self.groups[cell]
        mass = probs.at(chunk[owner], getattr(self, f"{side}_member")[member])
        bucket = (count.cumsum(0) - count)[owner] + group[member]
        groups = torch.repeat_interleave(torch.arange(cell.numel(), device=cell.device), count)
        return chunk_sum(mass, bucket, groups.numel()), groups


class TreeKL(ProjectedObjective):
    """Root over cells, student tree, teacher tree, chunk term; see the module's text."""

    mode = "tree_kl"
    default_ce_scale = 0.3
    gates_pretrained = True
    needs_trees = True
    lanes = ("first", "first")

    student_cell: Tensor
    teacher_cell: Tensor
    student_member: Tensor
    member_start: Tensor
    ended_student_tree: Tensor | None
    ended_teacher_tree: Tensor | None

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        trees = projection.trees
        if trees is None:
            raise LossError(
                "mode 'tree_kl' needs the trees of the two vocabularies, which this projection does not hold; build it "
                "anew with `limbeck project -o` or `load_or_build(..., trees=True)`, leave projection_matrix_path out, "
                "or use mode boundary_kl"
            )
        self.trees, self.num_cells = trees, trees.num_cells
        self.kernel_tables: tuple[object, Any] | None = None
        for name in ("student_cell", "teacher_cell"):
            cells = torch.from_numpy(getattr(trees, name).astype(np.int64))
            # tokens that only one side has are put into one more column
            self.register_buffer(name, cells.where(cells >= 0, torch.tensor(self.num_cells)), persistent=False)
        # the student's tokens in the order of their cells, and where each cell's begin
        member = np.argsort(trees.student_cell, kind="stable")
        start = np.searchsorted(trees.student_cell[member], np.arange(self.num_cells + 1))
        for name, array in (("student_member", member), ("member_start", start)):
            self.register_buffer(name, torch.from_numpy(array.astype(np.int64)), persistent=False)
        self.student_tree, self.teacher_tree = TreeTables(trees.student_tree), TreeTables(trees.teacher_tree)
        self.first_levels = nn.ModuleList(
            FirstLevel(trees, student_is_fine=fine) for fine in (True, False) if options.first_weight
        )
        for name in ("ended_student_tree", "ended_teacher_tree"):
            self.register_buffer(name, None, persistent=False)
        if options.condition in ("none", "counted"):
            return
        exact = options.condition == "exact"
        self.conditions = Conditions(trees, exact=exact)
        rules = {"student": trees.student_pairs, "teacher": trees.teacher_pairs}
        if without := [side for side, rule in rules.items() if rule is None]:
            logger.warning(
                "condition %r: the %s tokenizer has no merges, so its last token rules nothing out%s",
                options.condition,
                " and ".join(without),
                " and positions inside tokens are not conditioned" if exact else "",
            )

    def fit(self, student_size: int, teacher_size: int) -> None:
        super().fit(student_size, teacher_size)
        sides = (
            ("student", student_size, self.student_cell, self.teacher_tree),
            ("teacher", teacher_size, self.teacher_cell, self.student_tree),
        )
        for side, size, cells, tree in sides:
            if size == cells.numel():
                continue  # as it is after the first batch: the check below waits for the device
            used = (cells[size:] < self.num_cells) | (tree.place[size : cells.numel()] >= 0)
            if size > cells.numel() or bool(used.any()):
                raise LossError(
                    f"the trees are those of {cells.numel()} {side} tokens but the {side} scores {size}; tree_kl needs "
                    "heads that have a row for every token of a text"
                )
        self.student_cell, self.teacher_cell = self.student_cell[:student_size], self.teacher_cell[:teacher_size]

    def has_kernels(self, *, topk: bool) -> bool:
        options = self.options
        plain = options.condition in ("exact", "counted") or options.terminal_weight > 0 or options.first_weight > 0
        return not plain and self.spec.entry_clip is None

    @cached_property
    def host_trees(self) -> tuple[TreeTables, TreeTables]:
        """Both trees in main memory, wherever the objective is: what the kernels read is planned there."""
        return TreeTables(self.trees.student_tree), TreeTables(self.trees.teacher_tree)

    def count_ends(self, texts: Iterable[ChunkLayout]) -> tuple[EndCounts, EndCounts]:
        """Learn from texts, on the CPU, how often tokens end where they go on along the student tree and the teacher
        tree: what `condition: counted` goes by."""
        texts = [layout for layout in texts if layout.num_chunks]
        found = []
        for tree, fine in zip(self.host_trees, get_args(FineSide), strict=True):
            none = torch.zeros_like(tree.start)
            found.append(sum((EndCounts.of(tree, layout, fine) for layout in texts), EndCounts(none, none)))
        device = self.student_cell.device
        self.ended_student_tree, self.ended_teacher_tree = (counts.ended().to(device) for counts in found)
        return found[0], found[1]

    @property
    def reads_next_row(self) -> bool:
        return self.options.terminal_weight > 0

    def behind(self, chunks: ChunkBlock) -> Tensor | None:
        return self._ended(chunks, fine="teacher").chunk if self.reads_next_row else None

    # ---- root ----

    def cells(self, probs: Tensor, cell: Tensor, axis: VocabAxis) -> Tensor:
        """Mass of each cell, and of tokens in none, `[C, cells + 1]`."""
        start, end = axis.place(cell.numel())
        index = cell[start:end].expand(probs.shape[0], -1)
        own = probs.new_zeros(probs.shape[0], self.num_cells + 1).scatter_add(1, index, probs)
        return axis.total(own)

    def root(
        self,
        probs_CV: Tensor,
        probs_CU: Tensor,
        axes: tuple[VocabAxis, VocabAxis],
        *,
        tail_C: Tensor | None = None,
        leaving: Tensor | None = None,
        own_C: Tensor | None = None,
        conditioned: bool = False,
    ) -> Roots:
        """Divergence over cells. tail_C: the teacher's mass outside a list of tokens; cells without a token of the list
        share one bucket with it. leaving: bool `[C, cells]`, cells that are not compared; own_C: student mass that
        stays in its denominator. conditioned: the masses are parts; cells of which the student has nothing left leave
        the teacher's side too."""
        spec = self.spec
        mass_s = self.cells(probs_CV, self.student_cell, axes[0])
        mass_t = self.cells(probs_CU, self.teacher_cell, axes[1])
        if leaving is not None:
            mass_s, mass_t = (mass.masked_fill(F.pad(leaving, (0, 1)), 0) for mass in (mass_s, mass_t))
        kept_s = mass_s.sum(-1)
        target, lost_C = mass_t[:, :-1], mass_t[:, -1]
        if conditioned:
            target = target * (mass_s[:, :-1] > 0)
        sum_t = target.sum(-1) + lost_C
        rest_t = torch.zeros_like(lost_C) if tail_C is None else tail_C
        named = None if tail_C is None else target > 0
        q = mass_s[:, :-1] if named is None else mass_s[:, :-1] * named
        floor = torch.finfo(q.dtype).tiny if tail_C is None else rest_floor(q.dtype)
        rest_s = mass_s[:, -1] if named is None else kept_s - q.sum(-1)
        reached = target.sum(-1) + rest_t
        normaliser = (kept_s + floor if own_C is None or spec.kind != "forward" else kept_s + own_C + floor).log()
        share_t = target / _safe(reached)[:, None]
        log_s = _log(q) - normaliser[:, None]
        entries = divergence_entries(log_s, log_target(share_t, spec), spec)
        gone = leaving if named is None else ~named
        if gone is not None:
            entries = entries.masked_fill(gone, 0)
        log_rest_t = log_target(rest_t / _safe(reached), spec)
        ends = divergence_entries((rest_s.clamp(min=0) + floor).log() - normaliser, log_rest_t, spec)
        total = _safe(reached + lost_C)
        rows_C = (entries.sum(-1) + ends) * reached / total
        with torch.no_grad():
            right = (q.argmax(-1) == target.argmax(-1)).sum().to(q)
        return Roots(rows_C.where(reached > 0, torch.zeros_like(rows_C)), lost_C, right, kept_s, sum_t)

    def named_root(self, student: Probabilities, teacher: Listed) -> Roots:
        """`root` against a list, over the cells that it names; all others are one bucket with the list's tail."""
        spec, count = self.spec, teacher.count
        tail_C = teacher.tail()
        cell, said = self.teacher_cell[teacher.ids], teacher.values > 0
        lost = said & (cell == self.num_cells)
        lost_C = chunk_sum(teacher.values * lost, teacher.rows, count)
        at = (said & ~lost).nonzero().squeeze(1)
        named, place = (teacher.rows[at] * self.num_cells + cell[at]).unique(return_inverse=True)
        chunk, cell = named // self.num_cells, named % self.num_cells
        target = chunk_sum(teacher.values[at], place, named.numel())
        member, owner = ranges(self.member_start[cell], self.member_start[cell + 1])
        q = chunk_sum(student.at(chunk[owner], self.student_member[member]), owner, named.numel())
        floor = rest_floor(q.dtype)
        normaliser = math.log1p(floor)
        reached = chunk_sum(target, chunk, count) + tail_C
        share_t = target / _safe(reached)[chunk]
        entries = divergence_entries(_log(q) - normaliser, log_target(share_t, spec), spec)
        rest_s = (1 - chunk_sum(q, chunk, count)).clamp(min=0) + floor
        ends = divergence_entries(rest_s.log() - normaliser, log_target(tail_C / _safe(reached), spec), spec)
        rows_C = (chunk_sum(entries, chunk, count) + ends) * reached / _safe(reached + lost_C)
        with torch.no_grad():
            right = (_first_largest(q, chunk, count) == _first_largest(target, chunk, count)).sum().to(q)
        rows_C = rows_C.where(reached > 0, torch.zeros_like(rows_C))
        return Roots(rows_C, lost_C, right, torch.ones_like(rows_C), teacher.totals())

    # ---- the sum ----

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        tau, options, listed = self.temperature, self.options, teacher.is_topk
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        count = chunks.count(student.logits)
        lists = None if self.conditions is None else self.barred(chunks)
        barred = None if lists is None else (lists[0].written_out(), lists[1].written_out())
        events = None if self.conditions is None else self.conditions.events
        if options.condition == "counted" and self.ended_student_tree is None:
            raise LossError("condition 'counted' goes by a text: call `count_ends` before the first step")
        if listed and options.condition == "none":
            sides, root = self._named_sides(student, chunks, teacher)
        else:
            sides, root = self._whole_sides(student, chunks, teacher, barred)
        if options.condition != "none":
            metrics["excluded_mass_student"] = ((1 - root.kept_s).sum(), count)
            metrics["excluded_mass_teacher"] = ((sides.teacher_roots.totals() - root.sum_t).sum(), count)
        if barred is not None:
            metrics["unconditioned"] = (barred[0].wrong_C.to(count).sum(), count)

        inner_s, done_s = inside_student(self.student_tree, chunks)
        inner_s = replace(inner_s, row=chunks.student_row_M[inner_s.row])
        inner_t, done_t = inside_teacher(self.teacher_tree, chunks)
        student_parts = _InsideStudent(
            self.student_tree,
            sides.teacher_roots,
            sides.student_rows,
            None if barred is None or events is None else (events[0], barred[1]),
            self.ended_student_tree if options.condition == "counted" else None,
        )
        teacher_parts = _InsideTeacher(
            self.teacher_tree,
            sides.student_roots,
            sides.teacher_rows,
            None if barred is None or events is None else (events[1], barred[0]),
            self.ended_teacher_tree if options.condition == "counted" else None,
        )
        zero_C = torch.zeros_like(root.rows_C)
        student_C = student_parts.sums(inner_s, zero_C, self.spec, metrics, listed=listed)
        teacher_C = teacher_parts.sums(inner_t, zero_C, self.spec, metrics, listed=listed)
        terminal_C, ended_count = zero_C, 0
        if chunks.next_row_C is not None:
            ended = self._ended(chunks, fine="student")
            ended = replace(ended, row=chunks.next_row_C[ended.chunk])
            terminal_C = student_parts.sums(ended, zero_C, self.spec, metrics, listed=listed)
            ended_count = ended.count
        if teacher.behind is not None:
            at = self._ended(chunks, fine="teacher")
            after = replace(teacher_parts, fine=self._behind(teacher.behind, zero_C.dtype))
            terminal_C = terminal_C + after.sums(at, zero_C, self.spec, metrics, listed=listed)
            ended_count += at.count
        first_C, deep_count = self._first_level(chunks, sides, zero_C)

        log_s, log_t = chunk_log_probs(student, chunks, teacher, tau)
        has_term_C = self.has_chunk_term(chunks, done_s, done_t).to(log_s.dtype)
        chunk_C = binary_divergence(log_s, log_t, self.spec) * has_term_C
        rows_C = (
            options.root_weight * root.rows_C
            + options.inner_student_weight * student_C
            + options.inner_teacher_weight * teacher_C
            + options.terminal_weight * terminal_C
            + options.first_weight * first_C
            + options.chunk_weight * chunk_C
        )
        number = count.new_tensor
        first_s = self.student_cell[chunks.student_ids_M.index_select(0, chunks.student_first_C)]
        first_t = self.teacher_cell[chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)]
        metrics["cell_error"] = ((first_s != first_t).to(count).sum(), count)
        return self.out(
            rows_C,
            chunks,
            {"root": root.rows_C, "inner_student": student_C, "inner_teacher": teacher_C, "chunk": chunk_C},
            root_kl=(chunks.weighted(root.rows_C).sum(), count),
            inner_student_kl=(chunks.weighted(student_C).sum(), number(float(inner_s.count))),
            inner_teacher_kl=(chunks.weighted(teacher_C).sum(), number(float(inner_t.count))),
            terminal_kl=(chunks.weighted(terminal_C).sum(), number(float(ended_count))),
            first_kl=(chunks.weighted(first_C).sum(), number(float(deep_count))),
            chunk_kl=(chunks.weighted(chunk_C).sum(), has_term_C.sum()),
            lost_mass=(root.lost_C.sum(), count),
            proj_accuracy=(root.right, count),
            **metrics,
        )

    def has_chunk_term(self, chunks: ChunkBlock, done_s: Tensor, done_t: Tensor) -> Tensor:
        """bool `[C]`. done_s, done_t: the student's and the teacher's tree spell the chunk to its end."""
        return chunks.multi_C if self.options.chunk_terms == "all" else chunks.multi_C & ~done_s & ~done_t

    def barred(self, chunks: ChunkBlock) -> tuple[BarredLists, BarredLists]:
        """What the student's and the teacher's last tokens rule out at the roots: the sides' own tokens, or in the
        cheap form the other side's."""
        first_s = chunks.student_ids_M.index_select(0, chunks.student_first_C)
        first_t = chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)
        sizes = self.student_cell.numel(), self.teacher_cell.numel()
        mine, theirs = sizes if self.options.condition == "exact" else sizes[::-1]
        assert self.conditions is not None
        by_student = barred_lists(self.conditions.student, chunks.student_last_C, first_s, mine)
        by_teacher = barred_lists(self.conditions.teacher, chunks.teacher_last_C, first_t, theirs)
        wrong_C = by_student.wrong_C | by_teacher.wrong_C
        return by_student.without(wrong_C), by_teacher.without(wrong_C)

    def _conditioned(
        self,
        probs_CV: Tensor,
        probs_CU: Tensor,
        axes: tuple[VocabAxis, VocabAxis],
        barred: tuple[Barred, Barred],
        tail_C: Tensor | None,
    ) -> Roots:
        by_student, by_teacher = barred
        if self.options.condition == "cheap":
            probs_CU = _without(probs_CU, by_student, axes[1])
            probs_CV = _without(probs_CV, by_teacher, axes[0])
            return self.root(probs_CV, probs_CU, axes, tail_C=tail_C, conditioned=True)
        leaving = torch.zeros(probs_CV.shape[0], self.num_cells + 1, dtype=torch.bool, device=probs_CV.device)
        leaving[by_student.chunk, self.student_cell[by_student.ids]] = True
        leaving[by_teacher.chunk, self.teacher_cell[by_teacher.ids]] = True
        own = Dense(probs_CV, axes[0]).at(by_student.chunk, by_student.ids)
        own_C = chunk_sum(own, by_student.chunk, probs_CV.shape[0])
        return self.root(probs_CV, probs_CU, axes, tail_C=tail_C, leaving=leaving[:, :-1], own_C=own_C)

    def _first_level(self, chunks: ChunkBlock, sides: Sides, zero_C: Tensor) -> tuple[Tensor, int]:
        """Divergence `[C]` over the groups inside the realised cell, where it has several, and at how many chunks: by
        student tokens in chunks of one teacher token, by teacher tokens in other chunks of one student token."""
        total, count = zero_C, 0
        if not self.first_levels:
            return total, count
        cell_C = self.student_cell[chunks.student_ids_M.index_select(0, chunks.student_first_C)]
        theirs_C = self.teacher_cell[chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)]
        one_C = chunks.teacher_count_C == 1
        for own, tables in zip((one_C, ~one_C & (chunks.student_count_C == 1)), self.first_levels, strict=True):
            assert isinstance(tables, FirstLevel)
            shared = own & (cell_C == theirs_C) & (cell_C < self.num_cells)
            deep = tables.groups[cell_C.clamp(max=self.num_cells - 1)] > 1
            at = (shared & deep).nonzero().squeeze(1)
            if not at.numel():
                continue
            mass_s, owner = tables.masses("student", sides.student_roots, at, cell_C[at])
            mass_t, _ = tables.masses("teacher", sides.teacher_roots, at, cell_C[at])
            none = mass_s.new_zeros(at.numel())
            total = total.index_add(0, at, outcome_divergence(mass_t, mass_s, owner, none, self.spec, listed=False))
            count += at.numel()
        return total, count

    def _whole_sides(
        self,
        student: BlockLogits,
        chunks: ChunkBlock,
        teacher: TeacherScores,
        barred: tuple[Barred, Barred] | None,
    ) -> tuple[Sides, Roots]:
        """Both sides over their whole vocabularies, and the root."""
        probs_NV, tail_C = student.log_probs(self.temperature).exp(), None
        probs_CV = chunks.student_boundary(probs_NV)
        if teacher.is_topk:
            named = self._named(chunks, teacher, probs_NV.dtype)
            probs_QU, tail_C = named.written_out(), named.select(chunks.teacher_first_C).tail()
        else:
            probs_QU = teacher.log_probs(self.temperature).to(probs_NV.dtype).exp()
        probs_CU, axes = probs_QU.index_select(0, chunks.teacher_first_C), (student.axis, teacher.axis)
        if self.options.condition == "counted":
            counted_CV = self._behind_ended(probs_CV, axes[0], chunks.teacher_last_C, fine="student")
            counted_CU = self._behind_ended(probs_CU, axes[1], chunks.student_last_C, fine="teacher")
            root = self.root(counted_CV, counted_CU, axes, tail_C=tail_C, conditioned=True)
        elif barred is None:
            root = self.root(probs_CV, probs_CU, axes, tail_C=tail_C)
        else:
            root = self._conditioned(probs_CV, probs_CU, axes, barred, tail_C)
        mine = Dense(probs_CV, axes[0]), Dense(probs_NV, axes[0])
        return Sides(*mine, Dense(probs_CU, axes[1]), Dense(probs_QU, axes[1])), root

    def _behind_ended(self, probs: Tensor, axis: VocabAxis, last_C: Tensor, *, fine: FineSide) -> Tensor:
        """The fine side's probabilities `[C, V]` at roots behind coarse tokens (-1: unknown) that are known to have
        ended: those of tokens that go on along the tree count as often as a token has ended there."""
        tree = self.student_tree if fine == "student" else self.teacher_tree
        ended = self.ended_student_tree if fine == "student" else self.ended_teacher_tree
        assert ended is not None
        node_C = tree.end_node[last_C.clamp(min=0)].where(last_C >= 0, -1)
        at = (node_C >= 0).nonzero().squeeze(1)
        child, owner = ranges(tree.child_start[node_C[at]], tree.child_start[node_C[at] + 1])
        chunk, share = at[owner], ended[node_C[at]][owner]
        place, inside = axis.columns(tree.token[child])
        if inside is not None:
            place, chunk, share = place[inside], chunk[inside], share[inside]
        return probs * torch.ones_like(probs).index_put((chunk, place), share.to(probs))

    def _named_sides(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> tuple[Sides, Roots]:
        """The same where the teacher is a list: only tokens that it names, and those that share a cell with them, are
        read of either vocabulary."""
        log_NV = student.log_probs(self.temperature)
        roots = FromLogs(log_NV, student.axis, chunks.student_row_M.index_select(0, chunks.student_first_C))
        rows = self._named(chunks, teacher, log_NV.dtype)
        named = rows.select(chunks.teacher_first_C)
        return Sides(roots, FromLogs(log_NV, student.axis), named, rows), self.named_root(roots, named)

    def _named(self, chunks: ChunkBlock, teacher: TeacherScores, dtype: torch.dtype) -> Listed:
        """What a list names at the rows of the chunks' tokens, and the token that came."""
        (ids, log_t), realised = teacher.topk(), chunks.teacher_ids_Q[:, None]
        values = log_t.to(dtype).exp().masked_fill(ids == realised, 0)
        came = teacher.log_prob_of(chunks.teacher_ids_Q).to(dtype).exp()
        return Listed.of(
            torch.cat((ids, realised), 1), torch.cat((values, came[:, None]), 1), self.teacher_cell.numel()
        )

    def _behind(self, teacher: TeacherScores, dtype: torch.dtype) -> Probabilities:
        """What the teacher says behind chunks; of a list what it names."""
        if not teacher.is_topk:
            return Dense(teacher.log_probs(self.temperature).to(dtype).exp(), teacher.axis)
        ids, log_t = teacher.topk()
        return Listed.of(ids, log_t.to(dtype).exp(), self.teacher_cell.numel())

    def _ended(self, chunks: ChunkBlock, *, fine: FineSide) -> Positions:
        """Chunks of one coarse token that the fine side spells to its end, where the tree goes on; their rows are
        numbered from 0."""
        tree, own = self.student_tree if fine == "student" else self.teacher_tree, FineTokens.of(chunks, fine)
        node_C = own.walked(tree)[own.first_C + own.count_C - 1]
        inner = tree.child_start[node_C + 1] > tree.child_start[node_C.clamp(min=0)]
        ended = tree.ended(node_C, own.coarse_C) & (own.coarse_count_C == 1) & inner
        if fine == "teacher":
            ended = ended & (own.count_C > 1)  # a pair of equal bytes has its terminal in the student tree
        at = ended.nonzero().squeeze(1)
        return Positions(node_C[at], torch.arange(at.numel(), device=at.device), at, torch.full_like(at, -1))


@dataclass(frozen=True)
class Sides:
    """What both sides say at the roots of a block's chunks, and at all its rows."""

    student_roots: Probabilities
    student_rows: Probabilities
    teacher_roots: Probabilities
    teacher_rows: Probabilities


@dataclass(frozen=True)
class Roots:
    """The root part of each chunk: divergences, teacher mass that no student token shares a cell with, right guesses,
    and what conditioning has left of both sides' mass."""

    rows_C: Tensor
    lost_C: Tensor
    right: Tensor
    kept_s: Tensor
    sum_t: Tensor


def _first_largest(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Number of the first largest of each owner's values, as many as there are values where it has none."""
    top = values.new_zeros(count).scatter_reduce(0, owner, values, "amax")
    number = torch.arange(values.numel(), device=values.device)
    number = number.where(values == top[owner], values.numel())
    return number.new_full((count,), values.numel()).scatter_reduce(0, owner, number, "amin")


def _without(probs: Tensor, barred: Barred, axis: VocabAxis) -> Tensor:
    """Probabilities without those of barred tokens."""
    place, inside = axis.columns(barred.ids)
    chunk = barred.chunk
    if inside is not None:
        place, chunk = place[inside], chunk[inside]
    return probs.index_put((chunk, place), probs.new_zeros(()))


@dataclass
class _Inside(ABC):
    """The parts of one tree's positions. coarse, fine: what the sides say; exact: the tree's events and what the coarse
    side's last tokens rule out, None where positions are not conditioned; ended: by node, how often coarse tokens end
    where the text goes on, None where that was not counted."""

    tree: TreeTables
    coarse: Probabilities
    fine: Probabilities
    exact: tuple[NodeEvents, Barred] | None
    ended: Tensor | None

    @abstractmethod
    def plain(self, at: Positions, spec: DivergenceSpec, *, listed: bool) -> Tensor: ...

    @abstractmethod
    def conditioned(self, at: Positions, spec: DivergenceSpec, *, listed: bool) -> tuple[Tensor, Tensor]:
        """Divergence at each position, and the share of the coarse mass that was compared."""

    def sums(
        self,
        at: Positions,
        zero_C: Tensor,
        spec: DivergenceSpec,
        metrics: dict[str, tuple[Tensor, Tensor]],
        *,
        listed: bool,
    ) -> Tensor:
        """Sums `[C]` over each chunk's positions. zero_C: zeros of their type."""
        if not at.count:
            return zero_C
        if self.exact is None:
            return chunk_sum(self.plain(at, spec, listed=listed), at.chunk, zero_C.numel())
        total = zero_C
        events, barred = self.exact
        pairs = zip(at.node.tolist(), at.token.tolist(), strict=True)
        # the text has a pair that the rule forbids: it is wrong there
        wrong = torch.tensor([token in events[node].own for node, token in pairs], device=at.node.device)
        wrong |= barred.wrong_C[at.chunk]
        plain, exact = at.at(wrong.nonzero().squeeze(1)), at.at((~wrong).nonzero().squeeze(1))
        if plain.count:
            total = total.index_add(0, plain.chunk, self.plain(plain, spec, listed=listed))
        left_out = total.new_zeros(())
        if exact.count:
            parts, kept = self.conditioned(exact, spec, listed=listed)
            total = total.index_add(0, exact.chunk, parts)
            left_out = (1 - kept).sum()
        for name, value, count in (
            ("excluded_mass_inner", left_out, exact.count),
            ("unconditioned_inner", wrong.sum().to(left_out), at.count),
        ):
            old = metrics.get(name, (torch.zeros_like(left_out), torch.zeros_like(left_out)))
            metrics[name] = (old[0] + value, old[1] + count)
        return total


class _InsideStudent(_Inside):
    def plain(self, at: Positions, spec: DivergenceSpec, *, listed: bool) -> Tensor:
        buckets = tree_buckets(self.tree, at, self.coarse, self.fine)
        if self.ended is not None:
            # a teacher token that has ended is followed by one of these, too: it takes their share from the end
            inside = 1 - self.ended[at.node].to(buckets.coarse)
            going_on = buckets.total(buckets.coarse)
            total = going_on + buckets.coarse_end
            factor = torch.minimum(1 / inside, total / _safe(going_on)).where(buckets.has_end, 1.0)
            coarse_end = (total - factor * going_on).clamp(min=0)
            buckets = replace(buckets, coarse=buckets.coarse * factor[buckets.owner], coarse_end=coarse_end)
        return student_node_divergence(buckets, spec, listed=listed)

    def conditioned(self, at: Positions, spec: DivergenceSpec, *, listed: bool) -> tuple[Tensor, Tensor]:
        assert self.exact is not None
        out = node_outcomes(self.exact[0], self.tree, at, self.coarse, self.fine, self.exact[1], student_is_fine=True)
        return outcome_divergence(out.coarse, out.fine, out.owner, out.own, spec, listed=listed), out.kept


class _InsideTeacher(_Inside):
    def plain(self, at: Positions, spec: DivergenceSpec, *, listed: bool) -> Tensor:
        buckets = tree_buckets(self.tree, at, self.coarse, self.fine)
        if self.ended is not None:
            inside = (1 - self.ended[at.node].to(buckets.fine)).where(buckets.has_end, 1.0)
            buckets = replace(buckets, fine=buckets.fine * inside[buckets.owner])
        return teacher_node_divergence(buckets, spec, listed=listed)

    def conditioned(self, at: Positions, spec: DivergenceSpec, *, listed: bool) -> tuple[Tensor, Tensor]:
        assert self.exact is not None
        out = node_outcomes(self.exact[0], self.tree, at, self.coarse, self.fine, self.exact[1], student_is_fine=False)
        return outcome_divergence(out.fine, out.coarse, out.owner, out.own, spec, listed=listed), out.kept


def inside_student(tree: TreeTables, chunks: ChunkBlock) -> tuple[Positions, Tensor]:
    """`_inside` of the student tree; rows number the chunks' student tokens."""
    return _inside(tree, FineTokens.of(chunks, "student"))


def inside_teacher(tree: TreeTables, chunks: ChunkBlock) -> tuple[Positions, Tensor]:
    """`_inside` of the teacher tree; rows number the chunks' teacher tokens."""
    return _inside(tree, FineTokens.of(chunks, "teacher"))


def _inside(tree: TreeTables, own: FineTokens) -> tuple[Positions, Tensor]:
    """Positions inside chunks where the fine side's tokens spell the coarse side's first one, and bool `[C]`: they
    spell it to its end and it is the whole chunk."""
    ids, chunk, first_C = own.ids, own.chunk, own.first_C
    none = ids.new_zeros(0)
    if ids.numel() == first_C.numel():  # every chunk has one token on the fine side
        return Positions(none, none, none, none), torch.zeros_like(first_C, dtype=torch.bool)
    node, coarse = own.walked(tree), own.coarse_C[chunk]
    first = torch.zeros_like(chunk, dtype=torch.bool).index_fill_(0, first_C, True)
    at = (tree.holds(node, coarse) & ~first).nonzero().squeeze(1)
    ended = tree.ended(node, coarse)
    last = torch.cat((first_C[1:], first_C.new_tensor([ids.numel()]))) - 1
    return Positions(node[at - 1], at, chunk[at], ids[at]), ended[last] & (own.coarse_count_C == 1)
