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
- **terminal** (student tree, off by default): where s_1..s_n spell t_1 and other spellings go on, the row behind the
  chunk is compared like those inside it: the token could have gone on, and has ended.
- **chunk**: binary divergence of the realised chunk's probability where neither tree spells the chunk to its end.

Along the student tree the expectation of the parts over the teacher's tokens is KL(p_T || Q_S) with Q_S the probability
that the student spells the token and stops there, up to cells that are deeper than one link.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, binary_divergence, divergence_entries
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ObjectiveOptions,
    ProjectedObjective,
    chunk_sum,
)
from limbeck.losses.objectives.corrected import TINY, rest_floor
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection import SpellingTree
from limbeck.projection.pairs import PairRule

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
        }
        for name, array in tables.items():
            self.register_buffer(name, torch.from_numpy(array.astype(np.int64)), persistent=False)

    def walk(self, ids: Tensor, place: Tensor) -> Tensor:
        """Node after each token of runs of fine tokens, -1 off the tree. place: each token's number in its run."""
        node = torch.full_like(ids, -1)
        for depth in range(int(place.max()) + 1):
            at = (place == depth).nonzero().squeeze(1)
            above = node[at - 1] if depth else torch.zeros_like(at)
            key = above * self.fine_size + ids[at]
            found = torch.searchsorted(self.keys, key)
            same = self.keys[found.clamp(max=self.keys.numel() - 1)] == key
            node[at] = (found + 1).where(same & (above >= 0), torch.full_like(at, -1))
        return node

    def holds(self, node: Tensor, coarse: Tensor) -> Tensor:
        """bool: the coarse token lies below the node (-1: no)."""
        place, safe = self.place[coarse], node.clamp(min=0)
        return (node >= 0) & (place >= self.start[safe]) & (place < self.stop[safe])

    def ended(self, node: Tensor, coarse: Tensor) -> Tensor:
        """bool: the coarse token is spelled exactly as the node."""
        safe = node.clamp(min=0)
        return self.holds(node, coarse) & (self.place[coarse] < self.start[safe] + self.ends[safe])


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


def _ranges(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """All integers of half-open ranges, one range after another, and the range that each belongs to."""
    size = stop - start
    owner = torch.repeat_interleave(torch.arange(size.numel(), device=size.device), size)
    within = torch.arange(owner.numel(), device=size.device) - (size.cumsum(0) - size)[owner]
    return start[owner] + within, owner


def pick_pairs(axis: VocabAxis, values: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """values[rows, ids] for lists of any order and length."""
    place, inside = axis.columns(ids)
    if inside is None:
        return values[rows, place]
    own = values.new_zeros(ids.shape) if not values.shape[1] else values[rows, place] * inside
    return axis.total(own)


def tree_buckets(
    tree: TreeTables, at: Positions, coarse: tuple[Tensor, VocabAxis], fine: tuple[Tensor, VocabAxis]
) -> Buckets:
    """Masses of both sides at the children of nodes. coarse: probabilities `[C, .]` at the chunks' roots; fine: at the
    rows that the positions name. Masses are segment sums: differences of running sums would lose small ones."""
    child, owner = _ranges(tree.child_start[at.node], tree.child_start[at.node + 1])
    member, bucket = _ranges(tree.start[child], tree.stop[child])
    mass = pick_pairs(coarse[1], coarse[0], at.chunk[owner[bucket]], tree.order[member])
    start, ends = tree.start[at.node], tree.ends[at.node]
    last, last_owner = _ranges(start, start + ends)
    end_mass = pick_pairs(coarse[1], coarse[0], at.chunk[last_owner], tree.order[last])
    return Buckets(
        owner,
        chunk_sum(mass, bucket, child.numel()),
        pick_pairs(fine[1], fine[0], at.row[owner], tree.token[child]),
        chunk_sum(end_mass, last_owner, at.count),
        ends > 0,
    )


def _log(values: Tensor) -> Tensor:
    """Logarithm of a mass, finite at 0 with a gradient of 0 there."""
    return (values + torch.finfo(values.dtype).tiny).log()


def _log_target(values: Tensor, spec: DivergenceSpec) -> Tensor:
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
    log_t = _log_target(b.coarse / target_total[b.owner], spec)
    entries = divergence_entries(log_s, log_t, spec)
    if listed:
        entries = entries.masked_fill(b.coarse == 0, 0)
    ends = divergence_entries(rest.log() - log_kept, _log_target(b.coarse_end / target_total, spec), spec)
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
    entries = divergence_entries(log_s, _log_target(fine / fine_total[b.owner], spec), spec)
    ends = divergence_entries(_log(coarse_end) - log_total, _log_target(fine_end / fine_total, spec), spec)
    seen = (b.total(fine) + fine_end > 0) & (coarse_total > 0)
    total = b.total(entries.masked_fill(~named, 0)) + ends.masked_fill(~b.has_end, 0)
    return total.where(seen, torch.zeros_like(total))


class Conditioner:
    """Which tokens each side's last token rules out at a root, in the cheap form.

    The student, whose last token is u, cannot go on as the first token of `sigma(t)` where its rule forbids that pair,
    so it gives such a teacher token no chance: those leave the teacher's side. The student's side loses the tokens that
    the teacher's last token rules out likewise. Both are normalised anew.
    """

    def __init__(self, rule: PairRule | None, first: np.ndarray) -> None:
        self.rule, self.found = rule, dict[int, Tensor]()
        # ids without a spelling point at a column behind the last, which nothing forbids
        self.first = torch.from_numpy(np.where(first >= 0, first, 0 if rule is None else rule.size).astype(np.int64))

    def _forbidden(self, last: int) -> Tensor:
        assert self.rule is not None
        if last not in self.found:
            self.found[last] = torch.from_numpy(self.rule.forbidden(last).astype(np.int64))
        return self.found[last]

    def keeps(self, last_C: Tensor, realised_C: Tensor) -> tuple[Tensor, Tensor] | None:
        """(bool `[C, V]` of the other side's tokens that may come, bool `[C]`: the rule contradicts the text).

        realised_C: this side's token that came. The text proves a pair that the rule forbids, so that row keeps all.
        """
        if self.rule is None:
            return None
        lasts, row = last_C.unique(return_inverse=True)
        bad = torch.zeros(lasts.numel(), self.rule.size + 1, dtype=torch.bool, device=last_C.device)
        for i, last in enumerate(lasts.tolist()):
            bad[i, self._forbidden(last).to(last_C.device)] = True
        wrong_C = bad[row, realised_C]
        keep = ~bad.index_select(1, self.first.to(last_C.device)).index_select(0, row)
        return keep | wrong_C[:, None], wrong_C


class TreeKL(ProjectedObjective):
    """Root over cells, student tree, teacher tree, chunk term; see the module's text."""

    mode = "tree_kl"
    needs_trees = True

    student_cell: Tensor
    teacher_cell: Tensor

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        trees = projection.trees
        if trees is None:
            raise LossError(
                "mode 'tree_kl' needs the trees of the two vocabularies, which this projection does not hold; build it "
                "anew with `limbeck project -o`, or leave projection_matrix_path out"
            )
        self.num_cells = trees.num_cells
        for name in ("student_cell", "teacher_cell"):
            cells = torch.from_numpy(getattr(trees, name).astype(np.int64))
            # tokens that only one side has are put into one more column
            self.register_buffer(name, cells.where(cells >= 0, torch.tensor(self.num_cells)), persistent=False)
        self.student_tree, self.teacher_tree = TreeTables(trees.student_tree), TreeTables(trees.teacher_tree)
        self.conditioners = (
            Conditioner(trees.student_pairs, trees.student_tree.first),
            Conditioner(trees.teacher_pairs, trees.teacher_tree.first),
        )
        without = [
            side for side, own in zip(("student", "teacher"), self.conditioners, strict=True) if own.rule is None
        ]
        if options.condition != "none" and without:
            logger.warning(
                "condition %r: the %s tokenizer has no merges, so its last token rules nothing out",
                options.condition,
                " and ".join(without),
            )

    def fit(self, student_size: int, teacher_size: int) -> None:
        super().fit(student_size, teacher_size)
        sides = (
            ("student", student_size, self.student_cell, self.teacher_tree),
            ("teacher", teacher_size, self.teacher_cell, self.student_tree),
        )
        for side, size, cells, tree in sides:
            used = (cells[size:] < self.num_cells) | (tree.place[size : cells.numel()] >= 0)
            if size > cells.numel() or bool(used.any()):
                raise LossError(
                    f"the trees are those of {cells.numel()} {side} tokens but the {side} scores {size}; tree_kl needs "
                    "heads that have a row for every token of a text"
                )
        self.student_cell, self.teacher_cell = self.student_cell[:student_size], self.teacher_cell[:teacher_size]
        for conditioner, size in zip(self.conditioners, (teacher_size, student_size), strict=True):
            conditioner.first = conditioner.first[:size]

    @property
    def reads_next_row(self) -> bool:
        return self.options.terminal_weight > 0

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
        conditioned: bool = False,
    ) -> Roots:
        """Divergence over cells. tail_C: the teacher's mass outside a list of tokens; cells without a token of the list
        share one bucket with it. conditioned: the masses are parts; cells of which the student has nothing left leave
        the teacher's side too."""
        spec = self.spec
        mass_s = self.cells(probs_CV, self.student_cell, axes[0])
        mass_t = self.cells(probs_CU, self.teacher_cell, axes[1])
        kept_s, sum_t = mass_s.sum(-1), mass_t.sum(-1)
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
        normaliser = (kept_s + floor).log()
        share_t = target / _safe(reached)[:, None]
        log_s = _log(q) - normaliser[:, None]
        entries = divergence_entries(log_s, _log_target(share_t, spec), spec)
        if named is not None:
            entries = entries.masked_fill(~named, 0)
        log_rest_t = _log_target(rest_t / _safe(reached), spec)
        ends = divergence_entries((rest_s.clamp(min=0) + floor).log() - normaliser, log_rest_t, spec)
        total = _safe(reached + lost_C)
        rows_C = (entries.sum(-1) + ends) * reached / total
        with torch.no_grad():
            right = (q.argmax(-1) == target.argmax(-1)).sum().to(q)
        return Roots(rows_C.where(reached > 0, torch.zeros_like(rows_C)), lost_C, right, kept_s, sum_t)

    # ---- the sum ----

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        tau, options = self.temperature, self.options
        probs_NV = student.log_probs(tau).exp()
        probs_CV = chunks.student_boundary(probs_NV)
        probs_QU = self._teacher_probs(chunks, teacher, probs_NV.dtype)
        probs_CU = probs_QU.index_select(0, chunks.teacher_first_C)
        axes, listed = (student.axis, teacher.axis), teacher.is_topk
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        count = chunks.count(probs_NV)
        tail_C = (1 - probs_CU.sum(-1)).clamp(min=0) if listed else None
        if options.condition == "none":
            root = self.root(probs_CV, probs_CU, axes, tail_C=tail_C)
        else:
            root = self._conditioned(probs_CV, probs_CU, axes, chunks, tail_C, metrics)

        inner_s, done_s = self._inside_student(chunks)
        inner_t, done_t = self._inside_teacher(chunks)
        zero_C = torch.zeros_like(root.rows_C)
        student_C, teacher_C = zero_C, zero_C
        if inner_s.count:
            found = tree_buckets(self.student_tree, inner_s, (probs_CU, teacher.axis), (probs_NV, student.axis))
            parts = student_node_divergence(found, self.spec, listed=listed)
            student_C = chunk_sum(parts, inner_s.chunk, chunks.num_chunks)
        if inner_t.count:
            found = tree_buckets(self.teacher_tree, inner_t, (probs_CV, student.axis), (probs_QU, teacher.axis))
            parts = teacher_node_divergence(found, self.spec, listed=listed)
            teacher_C = chunk_sum(parts, inner_t.chunk, chunks.num_chunks)

        terminal_C = zero_C
        if chunks.next_row_C is not None:
            ended = self._ended(chunks, chunks.next_row_C)
            found = tree_buckets(self.student_tree, ended, (probs_CU, teacher.axis), (probs_NV, student.axis))
            parts = student_node_divergence(found, self.spec, listed=listed)
            terminal_C = chunk_sum(parts, ended.chunk, chunks.num_chunks)
            metrics["terminal_kl"] = (chunks.weighted(terminal_C).sum(), count.new_tensor(float(ended.count)))

        log_s = chunk_sum(chunks.student_tokens(student, tau), chunks.student_chunk_M, chunks.num_chunks)
        log_t = teacher.log_prob_of(chunks.teacher_ids_Q, tau).to(log_s.dtype)
        log_t = chunk_sum(log_t, chunks.teacher_chunk_Q, chunks.num_chunks)
        open_C = (chunks.multi_C & ~done_s & ~done_t).to(log_s.dtype)
        chunk_C = binary_divergence(log_s, log_t, self.spec) * open_C
        rows_C = (
            options.root_weight * root.rows_C
            + options.inner_student_weight * student_C
            + options.inner_teacher_weight * teacher_C
            + options.terminal_weight * terminal_C
            + options.chunk_weight * chunk_C
        )
        if options.gate != "none":
            gate_C = advantage_gate(log_t - log_s, options.gate)
            rows_C = rows_C * gate_C
            metrics["gate"] = (gate_C.sum(), count)
        number = count.new_tensor
        return self.out(
            rows_C,
            chunks,
            root_kl=(chunks.weighted(root.rows_C).sum(), count),
            inner_student_kl=(chunks.weighted(student_C).sum(), number(float(inner_s.count))),
            inner_teacher_kl=(chunks.weighted(teacher_C).sum(), number(float(inner_t.count))),
            chunk_kl=(chunks.weighted(chunk_C).sum(), open_C.sum()),
            lost_mass=(root.lost_C.sum(), count),
            proj_accuracy=(root.right, count),
            **metrics,
        )

    def _conditioned(
        self,
        probs_CV: Tensor,
        probs_CU: Tensor,
        axes: tuple[VocabAxis, VocabAxis],
        chunks: ChunkBlock,
        tail_C: Tensor | None,
        metrics: dict[str, tuple[Tensor, Tensor]],
    ) -> Roots:
        if axes[0].sharded or axes[1].sharded:
            raise LossError("condition 'cheap' needs whole vocabularies; use condition none or one rank per model")
        first_s = chunks.student_ids_M.index_select(0, chunks.student_first_C)
        first_t = chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)
        by_student = self.conditioners[0].keeps(chunks.student_last_C, first_s)
        by_teacher = self.conditioners[1].keeps(chunks.teacher_last_C, first_t)
        wrong_C = torch.zeros_like(first_s, dtype=torch.bool)
        for found in (by_student, by_teacher):
            wrong_C = wrong_C if found is None else wrong_C | found[1]
        whole_t = probs_CU.sum(-1)
        if by_student is not None:
            probs_CU = probs_CU * (by_student[0] | wrong_C[:, None])
        if by_teacher is not None:
            probs_CV = probs_CV * (by_teacher[0] | wrong_C[:, None])
        root = self.root(probs_CV, probs_CU, axes, tail_C=tail_C, conditioned=True)
        count = chunks.count(probs_CV)
        metrics["excluded_mass_student"] = ((1 - root.kept_s).sum(), count)
        metrics["excluded_mass_teacher"] = ((whole_t - root.sum_t).sum(), count)
        metrics["unconditioned"] = (wrong_C.to(count).sum(), count)
        return root

    def _teacher_probs(self, chunks: ChunkBlock, teacher: TeacherScores, dtype: torch.dtype) -> Tensor:
        """Next-token probabilities `[Q, U]`; of a list those that it names, and the token that came."""
        if not teacher.is_topk:
            return teacher.log_probs(self.temperature).to(dtype).exp()
        ids, log_t = teacher.topk()
        came = teacher.log_prob_of(chunks.teacher_ids_Q).to(dtype).exp()
        probs = log_t.to(dtype).exp()
        dense = probs.new_zeros(ids.shape[0], self.teacher_cell.numel()).scatter_add(1, ids, probs)
        return dense.scatter(1, chunks.teacher_ids_Q[:, None], came[:, None])

    def _inside_student(self, chunks: ChunkBlock) -> tuple[Positions, Tensor]:
        first_t = chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)
        return _inside(
            self.student_tree,
            (chunks.student_ids_M, chunks.student_chunk_M, chunks.student_first_C),
            first_t,
            chunks.student_row_M,
            chunks.teacher_count_C,
        )

    def _ended(self, chunks: ChunkBlock, next_row_C: Tensor) -> Positions:
        """Chunks of one teacher token that the student spells to its end, where the tree goes on."""
        place = torch.arange(chunks.student_ids_M.numel(), device=next_row_C.device)
        node = self.student_tree.walk(chunks.student_ids_M, place - chunks.student_first_C[chunks.student_chunk_M])
        node_C = node[chunks.student_first_C + chunks.student_count_C - 1]
        first_t = chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)
        inner = self.student_tree.child_start[node_C + 1] > self.student_tree.child_start[node_C.clamp(min=0)]
        at = (self.student_tree.ended(node_C, first_t) & (chunks.teacher_count_C == 1) & inner).nonzero().squeeze(1)
        return Positions(node_C[at], next_row_C[at], at)

    def _inside_teacher(self, chunks: ChunkBlock) -> tuple[Positions, Tensor]:
        first_s = chunks.student_ids_M.index_select(0, chunks.student_first_C)
        rows = torch.arange(chunks.teacher_ids_Q.numel(), device=first_s.device)
        return _inside(
            self.teacher_tree,
            (chunks.teacher_ids_Q, chunks.teacher_chunk_Q, chunks.teacher_first_C),
            first_s,
            rows,
            chunks.student_count_C,
        )


@dataclass(frozen=True)
class Roots:
    """The root part of each chunk: divergences, teacher mass that no student token shares a cell with, right guesses,
    and what conditioning has left of both sides' mass."""

    rows_C: Tensor
    lost_C: Tensor
    right: Tensor
    kept_s: Tensor
    sum_t: Tensor


def _inside(
    tree: TreeTables,
    fine: tuple[Tensor, Tensor, Tensor],
    coarse_first_C: Tensor,
    rows: Tensor,
    coarse_count_C: Tensor,
) -> tuple[Positions, Tensor]:
    """Positions inside chunks where the fine side's tokens spell the coarse side's first one, and bool `[C]`: they
    spell it to its end and it is the whole chunk. fine: ids, chunk of each, first of each chunk."""
    ids, chunk, first_C = fine
    none = ids.new_zeros(0)
    if ids.numel() == first_C.numel():  # every chunk has one token on the fine side
        return Positions(none, none, none), torch.zeros_like(first_C, dtype=torch.bool)
    place = torch.arange(ids.numel(), device=ids.device) - first_C[chunk]
    node = tree.walk(ids, place)
    coarse = coarse_first_C[chunk]
    at = (tree.holds(node, coarse) & (place > 0)).nonzero().squeeze(1)
    ended = tree.ended(node, coarse)
    last = torch.cat((first_C[1:], first_C.new_tensor([ids.numel()]))) - 1
    return Positions(node[at - 1], rows[at], chunk[at]), ended[last] & (coarse_count_C == 1)


def advantage_gate(advantage_C: Tensor, kind: str) -> Tensor:
    """What a chunk counts by the teacher's advantage, log p_T - log p_S of the realised text: hard: 1 above 0, else 0;
    soft: a ramp from 0 at -1/2 to 1 at 1/2. Without gradient."""
    advantage_C = advantage_C.detach()
    if kind == "hard":
        return (advantage_C > 0).to(advantage_C.dtype)
    return (advantage_C + 0.5).clamp(0, 1)
