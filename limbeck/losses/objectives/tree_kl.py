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
- **chunk**: binary divergence of the realised chunk's probability where neither tree spells the chunk to its end.

Along the student tree the expectation of the parts over the teacher's tokens is KL(p_T || Q_S) with Q_S the probability
that the student spells the token and stops there, up to cells that are deeper than one link.

`condition: counted` goes by a text (`EndCounts`): where it goes on along a tree, how often has the coarse token
ended all the same (`46` is a token, and `466` still is `4`, `66`)? Inside tokens that share belongs to the end; and at
the root behind a coarse token that has ended, what would have gone on inside it counts by that share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from limbeck.data.layout import ChunkLayout
from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, binary_divergence, divergence_entries
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ProjectedObjective,
    Settings,
    chunk_log_probs,
    chunk_sum,
)
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.objectives.distributions import TINY, rest_floor
from limbeck.losses.objectives.tree_tables import (
    Buckets,
    EndCounts,
    FineSide,
    Positions,
    TreeTables,
    inside_student,
    inside_teacher,
    ranges,
    tree_buckets,
    trees_of,
)
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.losses.vocab.probabilities import Dense, FromLogs, Listed, Probabilities
from limbeck.losses.vocab.projection import ProjectionLike


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


class TreeKL(ProjectedObjective):
    """Root over cells, student tree, teacher tree, chunk term; see the module's text."""

    measures = (
        "root_kl",
        "inner_student_kl",
        "inner_teacher_kl",
        "chunk_kl",
        "uncovered_mass",
        "proj_accuracy",
        "cell_error",
        "uncovered_root_student",
        "uncovered_root_teacher",
    )

    default_ce_scale = 0.3
    gates_pretrained = True
    needs_trees = True
    kernel = "limbeck.losses.fast.tree_kl:tree_kl"
    lane_kinds = ("first", "first")

    class Config(DivergenceConfig):
        mode: Literal["tree_kl"] = "tree_kl"
        chunk_weight: float = Field(default=1.0, ge=0)
        """Factor of the chunk term."""
        root_weight: float = Field(default=1.0, ge=0)
        """Factor of the comparison at a chunk's start."""
        inner_student_weight: float = Field(default=1.0, ge=0)
        """Factor of the parts inside teacher tokens."""
        inner_teacher_weight: float = Field(default=1.0, ge=0)
        """Factor of the parts inside student tokens."""
        condition: Literal["none", "counted"] = "none"
        """Allow for what only one side's last token tells it, as often as in some of the training data: counted."""

        def check_temperature(self, temperature: float) -> None:
            if self.condition != "none" and temperature != 1.0:
                raise ValueError(
                    f"condition {self.condition!r} needs temperature 1, not {temperature}: what one side's last token "
                    "tells it holds of the models' own probabilities alone"
                )

    cfg: Config

    student_cell: Tensor
    teacher_cell: Tensor
    student_member: Tensor
    member_start: Tensor
    ended_student_tree: Tensor | None
    ended_teacher_tree: Tensor | None

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        trees = trees_of(self.mode, projection)
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
        for name in ("ended_student_tree", "ended_teacher_tree"):
            self.register_buffer(name, None, persistent=False)

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

    @property
    def counts_ends(self) -> bool:
        """Whether it goes by texts that `count_token_ends` must be shown first."""
        return self.cfg.condition == "counted"

    def has_kernels(self, *, topk: bool) -> bool:
        return self.cfg.condition == "none" and self.spec.entry_clip is None

    @cached_property
    def host_trees(self) -> tuple[TreeTables, TreeTables]:
        """Both trees in main memory, wherever the objective is: what the kernels read is planned there."""
        return TreeTables(self.trees.student_tree), TreeTables(self.trees.teacher_tree)

    def count_token_ends(self, texts: Iterable[ChunkLayout]) -> tuple[EndCounts, EndCounts]:
        """Learn from texts, on the CPU, how often tokens end where they go on along the student tree and the teacher
        tree: what `condition: counted` goes by."""
        # a list: both trees go through the texts, and an iterator would be empty for the second
        texts = [layout for layout in texts if layout.num_chunks]
        side_counts = []
        for tree, fine in zip(self.host_trees, get_args(FineSide), strict=True):
            none = torch.zeros_like(tree.start)
            side_counts.append(sum((EndCounts.of(tree, layout, fine) for layout in texts), EndCounts(none, none)))
        device = self.student_cell.device
        self.ended_student_tree, self.ended_teacher_tree = (counts.ended().to(device) for counts in side_counts)
        return side_counts[0], side_counts[1]

    # ---- root ----

    def cells(self, probs: Tensor, cell: Tensor, axis: VocabAxis) -> Tensor:
        """Mass of each cell, and of tokens in none, `[C, cells + 1]`."""
        start, end = axis.place(cell.numel())
        index = cell[start:end].expand(probs.shape[0], -1)
        masses = probs.new_zeros(probs.shape[0], self.num_cells + 1).scatter_add(1, index, probs)
        return axis.total(masses)

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
        kept_s = mass_s.sum(-1)
        target, uncovered_C = mass_t[:, :-1], mass_t[:, -1]
        if conditioned:
            target = target * (mass_s[:, :-1] > 0)
        sum_t = target.sum(-1) + uncovered_C
        rest_t = torch.zeros_like(uncovered_C) if tail_C is None else tail_C
        named = None if tail_C is None else target > 0
        q = mass_s[:, :-1] if named is None else mass_s[:, :-1] * named
        # against a list the rest is a difference, whose rounding error the floor must exceed
        floor = torch.finfo(q.dtype).tiny if tail_C is None else rest_floor(q.dtype)
        rest_s = mass_s[:, -1] if named is None else kept_s - q.sum(-1)
        reached = target.sum(-1) + rest_t
        normaliser = (kept_s + floor).log()
        share_t = target / _safe(reached)[:, None]
        log_s = _log(q) - normaliser[:, None]
        entries = divergence_entries(log_s, log_target(share_t, spec), spec)
        if named is not None:
            entries = entries.masked_fill(~named, 0)
        log_rest_t = log_target(rest_t / _safe(reached), spec)
        ends = divergence_entries((rest_s.clamp(min=0) + floor).log() - normaliser, log_rest_t, spec)
        total = _safe(reached + uncovered_C)
        rows_C = (entries.sum(-1) + ends) * reached / total
        with torch.no_grad():
            right = (q.argmax(-1) == target.argmax(-1)).sum().to(q)
        return Roots(rows_C.where(reached > 0, torch.zeros_like(rows_C)), uncovered_C, right, kept_s, sum_t)

    def named_root(self, student: Probabilities, teacher: Listed) -> Roots:
        """`root` against a list, over the cells that it names; all others are one bucket with the list's tail."""
        spec, count = self.spec, teacher.count
        tail_C = teacher.tail()
        cell, said = self.teacher_cell[teacher.ids], teacher.values > 0
        uncovered = said & (cell == self.num_cells)
        uncovered_C = chunk_sum(teacher.values * uncovered, teacher.rows, count)
        index = (said & ~uncovered).nonzero().squeeze(1)
        named, cell_index = (teacher.rows[index] * self.num_cells + cell[index]).unique(return_inverse=True)
        chunk, cell = named // self.num_cells, named % self.num_cells
        target = chunk_sum(teacher.values[index], cell_index, named.numel())
        member, owner = ranges(self.member_start[cell], self.member_start[cell + 1])
        q = chunk_sum(student.at(chunk[owner], self.student_member[member]), owner, named.numel())
        floor = rest_floor(q.dtype)
        # the student's named masses and its rest sum to 1 before the rest's floor is added
        normaliser = math.log1p(floor)
        reached = chunk_sum(target, chunk, count) + tail_C
        share_t = target / _safe(reached)[chunk]
        entries = divergence_entries(_log(q) - normaliser, log_target(share_t, spec), spec)
        rest_s = (1 - chunk_sum(q, chunk, count)).clamp(min=0) + floor
        ends = divergence_entries(rest_s.log() - normaliser, log_target(tail_C / _safe(reached), spec), spec)
        rows_C = (chunk_sum(entries, chunk, count) + ends) * reached / _safe(reached + uncovered_C)
        with torch.no_grad():
            right = (_first_largest(q, chunk, count) == _first_largest(target, chunk, count)).sum().to(q)
        rows_C = rows_C.where(reached > 0, torch.zeros_like(rows_C))
        return Roots(rows_C, uncovered_C, right, torch.ones_like(rows_C), teacher.totals())

    # ---- the sum ----

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        cfg, listed = self.cfg, teacher.is_topk
        if cfg.condition == "counted" and self.ended_student_tree is None:
            raise LossError("condition 'counted' goes by a text: call `count_token_ends` before the first step")
        if listed and cfg.condition == "none":
            sides, root = self._named_sides(student, chunks, teacher)
        else:
            sides, root = self._whole_sides(student, chunks, teacher)
        inside = self._inside(sides, chunks, root.rows_C, listed=listed)
        chunk_C, has_term_C = self._chunk_term(student, chunks, teacher, inside.done_s, inside.done_t)
        rows_C = (
            cfg.root_weight * root.rows_C
            + cfg.inner_student_weight * inside.student_C
            + cfg.inner_teacher_weight * inside.teacher_C
            + cfg.chunk_weight * chunk_C
        )
        count = chunks.count(student.logits)
        return self.out(
            rows_C,
            chunks,
            root_kl=(chunks.weighted(root.rows_C).sum(), count),
            inner_student_kl=(chunks.weighted(inside.student_C).sum(), count.new_tensor(float(inside.student_count))),
            inner_teacher_kl=(chunks.weighted(inside.teacher_C).sum(), count.new_tensor(float(inside.teacher_count))),
            chunk_kl=(chunks.weighted(chunk_C).sum(), has_term_C.sum()),
            uncovered_mass=(root.uncovered_C.sum(), count),
            proj_accuracy=(root.right, count),
            **self._root_metrics(sides, root, chunks, count),
        )

    def _inside(self, sides: Sides, chunks: ChunkBlock, zero_like: Tensor, *, listed: bool) -> Inside:
        """The parts of both trees. zero_like `[C]`: of the type and on the device of a block's sums."""
        student, done_s = inside_student(self.student_tree, chunks)
        student = replace(student, row=chunks.student_row_M[student.row])
        teacher, done_t = inside_teacher(self.teacher_tree, chunks)
        counted, zero_C = self.cfg.condition == "counted", torch.zeros_like(zero_like)
        student_parts = _InsideStudent(
            self.student_tree, sides.teacher_roots, sides.student_rows, self.ended_student_tree if counted else None
        )
        teacher_parts = _InsideTeacher(
            self.teacher_tree, sides.student_roots, sides.teacher_rows, self.ended_teacher_tree if counted else None
        )
        return Inside(
            student_parts.sums(student, zero_C, self.spec, listed=listed),
            teacher_parts.sums(teacher, zero_C, self.spec, listed=listed),
            student.count,
            teacher.count,
            done_s,
            done_t,
        )

    def _chunk_term(
        self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, done_s: Tensor, done_t: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(binary divergence `[C]` of the realised chunks, 0 where a chunk has no such term; 1 where it has one)."""
        log_s, log_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        has_term_C = self.has_chunk_term(chunks, done_s, done_t).to(log_s.dtype)
        return binary_divergence(log_s, log_t, self.spec) * has_term_C, has_term_C

    def _root_metrics(
        self, sides: Sides, root: Roots, chunks: ChunkBlock, count: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """How often both sides' realised first tokens lie in different cells, and what conditioning took from either
        root."""
        first_s = self.student_cell[chunks.student_ids_M.index_select(0, chunks.student_first_C)]
        first_t = self.teacher_cell[chunks.teacher_ids_Q.index_select(0, chunks.teacher_first_C)]
        metrics = {"cell_error": ((first_s != first_t).to(count).sum(), count)}
        if self.cfg.condition != "none":
            metrics["uncovered_root_student"] = ((1 - root.kept_s).sum(), count)
            metrics["uncovered_root_teacher"] = ((sides.teacher_roots.totals() - root.sum_t).sum(), count)
        return metrics

    def has_chunk_term(self, chunks: ChunkBlock, done_s: Tensor, done_t: Tensor) -> Tensor:
        """bool `[C]`. done_s, done_t: the student's and the teacher's tree spell the chunk to its end."""
        return chunks.multi_C & ~done_s & ~done_t

    def _whole_sides(
        self,
        student: BlockLogits,
        chunks: ChunkBlock,
        teacher: TeacherScores,
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
        if self.cfg.condition == "counted":
            counted_CV = self._behind_ended(probs_CV, axes[0], chunks.teacher_last_C, fine="student")
            counted_CU = self._behind_ended(probs_CU, axes[1], chunks.student_last_C, fine="teacher")
            root = self.root(counted_CV, counted_CU, axes, tail_C=tail_C, conditioned=True)
        else:
            root = self.root(probs_CV, probs_CU, axes, tail_C=tail_C)
        mine = Dense(probs_CV, axes[0]), Dense(probs_NV, axes[0])
        return Sides(*mine, Dense(probs_CU, axes[1]), Dense(probs_QU, axes[1])), root

    def _behind_ended(self, probs: Tensor, axis: VocabAxis, last_C: Tensor, *, fine: FineSide) -> Tensor:
        """The fine side's probabilities `[C, V]` at roots behind coarse tokens (-1: unknown) that are known to have
        ended: those of tokens that go on along the tree count as often as a token has ended there."""
        tree = self.student_tree if fine == "student" else self.teacher_tree
        ended = self.ended_student_tree if fine == "student" else self.ended_teacher_tree
        assert ended is not None
        node_C = tree.end_node[last_C.clamp(min=0)].where(last_C >= 0, -1)
        index = (node_C >= 0).nonzero().squeeze(1)
        child, owner = ranges(tree.child_start[node_C[index]], tree.child_start[node_C[index] + 1])
        chunk, share = index[owner], ended[node_C[index]][owner]
        column, inside = axis.columns(tree.token[child])
        if inside is not None:
            column, chunk, share = column[inside], chunk[inside], share[inside]
        # not in place: the parts inside tokens read the same probabilities as they are
        return probs * torch.ones_like(probs).index_put((chunk, column), share.to(probs))

    def _named_sides(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> tuple[Sides, Roots]:
        """The same where the teacher is a list: only tokens that it names, and those that share a cell with them, are
        read of either vocabulary."""
        log_NV = student.log_probs(self.temperature)
        roots = FromLogs(log_NV, student.axis, chunks.student_row_M.index_select(0, chunks.student_first_C))
        rows = self._named(chunks, teacher, log_NV.dtype)
        named = rows.select(chunks.teacher_first_C)
        return Sides(roots, FromLogs(log_NV, student.axis), named, rows), self.named_root(roots, named)

    def _named(self, chunks: ChunkBlock, teacher: TeacherScores, dtype: torch.dtype) -> Listed:
        """Tokens that a list names at the rows of the chunks' tokens, and the token that came."""
        (ids, log_t), realised = teacher.topk(), chunks.teacher_ids_Q[:, None]
        # a list may name the token that came, which is added on its own
        values = log_t.to(dtype).exp().masked_fill(ids == realised, 0)
        came = teacher.log_prob_of(chunks.teacher_ids_Q).to(dtype).exp()
        return Listed.of(
            torch.cat((ids, realised), 1), torch.cat((values, came[:, None]), 1), self.teacher_cell.numel()
        )


@dataclass(frozen=True)
class Sides:
    """Probabilities of both sides at the roots of a block's chunks, and at all its rows."""

    student_roots: Probabilities
    student_rows: Probabilities
    teacher_roots: Probabilities
    teacher_rows: Probabilities


@dataclass(frozen=True)
class Roots:
    """The root part of each chunk: divergences, teacher mass that no student token shares a cell with, right guesses,
    and what conditioning has left of both sides' mass."""

    rows_C: Tensor
    uncovered_C: Tensor
    right: Tensor
    kept_s: Tensor
    sum_t: Tensor


@dataclass(frozen=True)
class Inside:
    """The parts of both trees `[C]`, how many positions each has, and the chunks that a tree spells to their end."""

    student_C: Tensor
    teacher_C: Tensor
    student_count: int
    teacher_count: int
    done_s: Tensor
    done_t: Tensor


def _first_largest(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Number of the first largest of each owner's values, as many as there are values where it has none."""
    top = values.new_zeros(count).scatter_reduce(0, owner, values, "amax")
    number = torch.arange(values.numel(), device=values.device)
    number = number.where(values == top[owner], values.numel())
    return number.new_full((count,), values.numel()).scatter_reduce(0, owner, number, "amin")


@dataclass
class _Inside(ABC):
    """The parts of one tree's positions. coarse, fine: what the sides say; ended: by node, how often coarse tokens end
    where the text goes on, None where that was not counted."""

    tree: TreeTables
    coarse: Probabilities
    fine: Probabilities
    ended: Tensor | None

    @abstractmethod
    def plain(self, positions: Positions, spec: DivergenceSpec, *, listed: bool) -> Tensor:
        """Divergence at each position."""

    def sums(self, positions: Positions, zero_C: Tensor, spec: DivergenceSpec, *, listed: bool) -> Tensor:
        """Sums `[C]` over each chunk's positions. zero_C: zeros of their type."""
        if not positions.count:
            return zero_C
        return chunk_sum(self.plain(positions, spec, listed=listed), positions.chunk, zero_C.numel())


class _InsideStudent(_Inside):
    def plain(self, positions: Positions, spec: DivergenceSpec, *, listed: bool) -> Tensor:
        buckets = tree_buckets(self.tree, positions, self.coarse, self.fine)
        if self.ended is not None:
            # a teacher token that has ended is followed by one of these, too: it takes their share from the end
            inside = 1 - self.ended[positions.node].to(buckets.coarse)
            going_on = buckets.total(buckets.coarse)
            total = going_on + buckets.coarse_end
            # the end gives at most all that it has
            factor = torch.minimum(1 / inside, total / _safe(going_on)).where(buckets.has_end, 1.0)
            coarse_end = (total - factor * going_on).clamp(min=0)
            buckets = replace(buckets, coarse=buckets.coarse * factor[buckets.owner], coarse_end=coarse_end)
        return student_node_divergence(buckets, spec, listed=listed)


class _InsideTeacher(_Inside):
    def plain(self, positions: Positions, spec: DivergenceSpec, *, listed: bool) -> Tensor:
        buckets = tree_buckets(self.tree, positions, self.coarse, self.fine)
        if self.ended is not None:
            inside = (1 - self.ended[positions.node].to(buckets.fine)).where(buckets.has_end, 1.0)
            buckets = replace(buckets, fine=buckets.fine * inside[buckets.owner])
        return teacher_node_divergence(buckets, spec, listed=listed)
