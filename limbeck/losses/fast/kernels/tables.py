"""Vocabulary maps as flat integer tables for the kernels; built once per map and device, on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.vocab.projection import CommonPairs, VocabMap


class ByColumn(Protocol):
    """Lists of student tokens with weights: those of column v are `offsets[v] : offsets[v + 1]`."""

    @property
    def offsets(self) -> Tensor: ...
    @property
    def students(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


class ByRow(Protocol):
    """Weights `[k, V]` of each student token's entries, and how many it has `[V]`."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def entries(self) -> Tensor: ...


@dataclass(frozen=True)
class ProjectionTables:
    """One projection W, by teacher column and by student row.

    By column: the entries of column v are `offsets[v] : offsets[v + 1]` of students and weights. `source` `[U]`: the
    student token of a column with a single entry of weight 1, else -1; `place` `[U]`: the number of any other
    reachable column in `multi_source`, else -1. By row: `index`, `weight` `[k, V]` (-1: none) and `entries` `[V]`: how
    many a row has. All int32 and float32.

    Pairs are columns with a single entry of weight 1 whose student token has no other: `pair_student`, `pair_teacher`
    `[P]`; `others`: the other reachable columns, the longest lists first; `unpaired`: those and the columns that
    none reaches; `direct` `[V]`: 1 for the student tokens of pairs.
    """

    offsets: Tensor
    students: Tensor
    weights: Tensor
    source: Tensor
    place: Tensor
    multi_source: Tensor
    index: Tensor
    weight: Tensor
    entries: Tensor
    pair_student: Tensor
    pair_teacher: Tensor
    others: Tensor
    unpaired: Tensor
    direct: Tensor

    def within(self, columns: Tensor, teacher_size: int) -> Tensor:
        """`index` with teacher ids replaced by their place among `columns` `[K]`, or -1."""
        number = torch.full((teacher_size + 1,), -1, dtype=torch.int32, device=columns.device)
        number[columns] = torch.arange(columns.numel(), dtype=torch.int32, device=columns.device)
        return number[self.index.long()]  # -1 looks up the last place, which holds -1


def projection_tables(vocab: VocabMap) -> ProjectionTables:
    """Tables of a map with fixed weights, on its device; kept on the map until its size or device changes."""
    device = vocab.reachable.device
    key = (vocab.student_size, vocab.teacher_size, device)
    if vocab.kernel_tables is None or vocab.kernel_tables[0] != key:
        vocab.kernel_tables = key, _build(vocab)
    tables: ProjectionTables = vocab.kernel_tables[1]
    return tables


def _build(vocab: VocabMap) -> ProjectionTables:
    source = vocab.source_or_zero.cpu().where(vocab.has_source.cpu() > 0, -1)
    plain = (source >= 0).nonzero().squeeze(1)
    student = torch.cat((vocab.extra_student.cpu(), source[plain]))
    teacher = torch.cat((vocab.extra_teacher.cpu(), plain))
    weight = torch.cat((vocab.extra_weight.cpu(), torch.ones(plain.numel())))

    order = teacher.argsort(stable=True)
    count = torch.bincount(teacher, minlength=vocab.teacher_size)
    several = torch.zeros(vocab.teacher_size, dtype=torch.bool)
    several[vocab.extra_columns.cpu()] = True
    # longest lists first: the last programs of a launch should be short ones
    multi_source = vocab.extra_columns.cpu()
    multi_source = multi_source[count[multi_source].argsort(descending=True, stable=True)]
    place = torch.full((vocab.teacher_size,), -1)
    place[multi_source] = torch.arange(multi_source.numel())
    index, row_weight, entries = _by_row(student, teacher, weight, vocab.student_size)
    source = source.masked_fill(several, -1)
    paired, in_pair = _paired_columns(source, entries)
    reached = count.nonzero().squeeze(1)
    others = reached[~in_pair[reached]]
    tables = {
        "pair_student": source[paired],
        "pair_teacher": paired,
        "others": others[count[others].argsort(descending=True, stable=True)],
        "unpaired": (~in_pair).nonzero().squeeze(1),
        "direct": torch.zeros(vocab.student_size, dtype=torch.long).index_fill(0, source[paired], 1),
        "offsets": torch.cat((torch.zeros(1, dtype=torch.long), count.cumsum(0))),
        "students": student[order],
        "source": source,
        "place": place,
        "multi_source": multi_source,
        "index": index,
        "entries": entries,
    }
    device = vocab.reachable.device
    return ProjectionTables(
        weights=weight[order].float().to(device),
        weight=row_weight.to(device),
        **{name: value.to(torch.int32).contiguous().to(device) for name, value in tables.items()},
    )


def _paired_columns(source: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """(columns of pairs, in groups that are whole; whether a column is one of them)."""
    alone = (source >= 0) & (entries[source.clamp(min=0)] == 1)
    paired = alone.nonzero().squeeze(1)
    paired = paired[: paired.numel() // GROUP * GROUP]
    return paired, torch.zeros_like(alone).index_fill(0, paired, value=True)


def _by_row(student: Tensor, teacher: Tensor, weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    order = student.argsort(stable=True)
    student, teacher, weight = student[order], teacher[order], weight[order]
    count = torch.bincount(student, minlength=size)
    slot = torch.arange(student.numel()) - (count.cumsum(0) - count)[student]
    width = int(count.max())
    index = torch.full((width, size), -1)
    row_weight = torch.zeros(width, size)
    index[slot, student], row_weight[slot, student] = teacher, weight.float()
    return index, row_weight, count


@dataclass(frozen=True)
class PairTables:
    """Common pairs of gold and H-KL: `student`, `teacher` `[P]`, the uncommon rest of each side, and `pair` `[V]`:
    the teacher token of a student token, or -1. int32."""

    student: Tensor
    teacher: Tensor
    unpaired_student: Tensor
    unpaired_teacher: Tensor
    pair: Tensor


def pair_tables(pairs: CommonPairs, student_size: int, teacher_size: int) -> PairTables:
    """Tables of common pairs and their complements, on their device; kept on them until size or device change."""
    key = (student_size, teacher_size, pairs.student.device)
    if pairs.kernel_tables is None or pairs.kernel_tables[0] != key:
        student, teacher = pairs.student.to(torch.int32), pairs.teacher.to(torch.int32)
        rest = [ids.to(torch.int32) for ids in pairs.rest(student_size, teacher_size)]
        pair = torch.full((student_size,), -1, dtype=torch.int32, device=student.device)
        pair[pairs.student] = teacher
        pairs.kernel_tables = key, PairTables(student, teacher, rest[0], rest[1], pair)
    tables: PairTables = pairs.kernel_tables[1]
    return tables


@functools.lru_cache(maxsize=8)
def identity_pairs(size: int, device: torch.device) -> PairTables:
    """Pairs of a teacher that shares the student's vocabulary."""
    ids = torch.arange(size, dtype=torch.int32, device=device)
    return PairTables(ids, ids, ids[:0], ids[:0], ids)


GROUP = 4
"""Pairs come in groups of so many, which are under way together."""

PIECE = 256
"""Tokens of a cell that are summed by one program; longer lists are cut, since one program would keep all waiting."""


@dataclass(frozen=True)
class SideCells:
    """One side's tokens by cell. `source` `[cells]`: the token of a cell that has one, else -1; `place` `[cells]`: the
    row of a cell's sum where it has several, else -1. Of `rows` sums the last is of tokens in no cell.

    Lists are pieces of at most `PIECE` tokens: piece i is `offsets[i] : offsets[i + 1]` of students, weights are 1. The
    first `rows` pieces begin the rows' lists; row `long_row[i]` goes on with the pieces `rows + long_offset[i]` to
    `rows + long_offset[i + 1]`. All int32 and float32.
    """

    source: Tensor
    place: Tensor
    offsets: Tensor
    students: Tensor
    weights: Tensor
    pieces: Tensor
    rows: int
    long_row: Tensor
    long_offset: Tensor

    def in_order(self, cells: Tensor) -> SideCells:
        """The same with the cells in another order."""
        return replace(self, source=self.source[cells], place=self.place[cells])


@dataclass(frozen=True)
class CellTables:
    """Both sides' cells, the first `simple` of them with one token on either side. `row` `[cells]`: the teacher token
    over whose logits a cell's R is written; `index` `[1, V]`: that row for each student token, -1 for tokens in no
    cell, `index_rest`: the row behind the teacher's vocabulary for those; one entry of weight 1 for each student
    token. The first cells are pairs: `pair_student`, `pair_teacher` `[P]`; `unpaired`: the teacher's other tokens;
    `direct` `[V]`: 1 for the student tokens of pairs."""

    student: SideCells
    teacher: SideCells
    simple: int
    pair_student: Tensor
    pair_teacher: Tensor
    unpaired: Tensor
    direct: Tensor
    row: Tensor
    index: Tensor
    index_rest: Tensor
    weight: Tensor
    entries: Tensor


def cell_tables(objective: TreeKL) -> CellTables:
    """Tables of an objective's cells, on its device; kept on it until sizes or device change."""
    student, teacher = objective.student_cell, objective.teacher_cell
    key = (student.numel(), teacher.numel(), student.device)
    if objective.kernel_tables is None or objective.kernel_tables[0] != key:
        objective.kernel_tables = key, _cell_tables(student.cpu(), teacher.cpu(), objective.num_cells, student.device)
    tables: CellTables = objective.kernel_tables[1]
    return tables


def _cell_tables(student: Tensor, teacher: Tensor, cells: int, device: torch.device) -> CellTables:
    order = teacher.argsort(stable=True)
    first = torch.searchsorted(teacher[order], torch.arange(cells))
    row = order[first]
    index = torch.cat((row, torch.tensor([-1])))[student]
    index_rest = index.masked_fill(index < 0, teacher.numel())
    sides = _side_cells(student, cells, device), _side_cells(teacher, cells, device)
    simple = (sides[0].source.cpu() >= 0) & (sides[1].source.cpu() >= 0)
    cell_order = simple.int().argsort(descending=True, stable=True)
    number = int(simple.sum()) // GROUP * GROUP
    pairs = [side.source.cpu()[cell_order[:number]].long() for side in sides]
    none = torch.zeros_like(student)
    tables = {
        "pair_student": pairs[0],
        "pair_teacher": pairs[1],
        "unpaired": (torch.zeros_like(teacher).index_fill(0, pairs[1], 1) == 0).nonzero().squeeze(1),
        "direct": none.index_fill(0, pairs[0], 1),
        "row": row[cell_order],
        "index": index[None],
        "index_rest": index_rest[None],
        "entries": torch.ones_like(student),
    }
    tensors = {name: value.to(device, torch.int32).contiguous() for name, value in tables.items()}
    student_cells, teacher_cells = (side.in_order(cell_order.to(device)) for side in sides)
    weight = torch.ones(1, student.numel(), device=device)
    return CellTables(student_cells, teacher_cells, simple=int(simple.sum()), weight=weight, **tensors)


def _side_cells(cell: Tensor, cells: int, device: torch.device) -> SideCells:
    count = torch.bincount(cell, minlength=cells + 1)
    order = cell.argsort(stable=True)
    begin = count.cumsum(0) - count
    # an empty last cell begins behind the last token
    source = order[begin[:-1].clamp(max=cell.numel() - 1)].masked_fill(count[:-1] != 1, -1)
    several = (count[:-1] > 1).nonzero().squeeze(1)
    # longest lists first: the last programs of a launch should be short ones
    several = several[count[several].argsort(descending=True, stable=True)]
    place = torch.full((cells,), -1)
    place[several] = torch.arange(several.numel())
    lists = torch.cat((several, torch.tensor([cells])))
    pieces = (count[lists] + PIECE - 1) // PIECE
    long_row = (pieces > 1).nonzero().squeeze(1)
    further = pieces[long_row] - 1
    owner = torch.cat((torch.arange(lists.numel()), torch.repeat_interleave(long_row, further)))
    within = torch.arange(int(further.sum())) - torch.repeat_interleave(further.cumsum(0) - further, further)
    number = torch.cat((torch.zeros_like(lists), within + 1))  # of the piece in its list
    start = begin[lists][owner] + number * PIECE
    length = (count[lists][owner] - number * PIECE).clamp(max=PIECE)
    students = [order[a : a + n] for a, n in zip(start.tolist(), length.tolist(), strict=True)]
    none = torch.zeros(1, dtype=torch.int64)
    tables = {
        "source": source,
        "place": place,
        "offsets": torch.cat((none, length.cumsum(0))),
        "students": torch.cat(students),
        "pieces": torch.arange(owner.numel()),
        "long_row": long_row,
        "long_offset": torch.cat((none, further.cumsum(0))),
    }
    return SideCells(
        weights=torch.ones(int(length.sum()), device=device),
        rows=lists.numel(),
        **{name: value.to(device, torch.int32).contiguous() for name, value in tables.items()},
    )
