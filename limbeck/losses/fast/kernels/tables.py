"""Vocabulary maps as flat integer tables for the kernels; built once per map and device, on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from limbeck.losses.vocab.projection import CommonPairs, VocabMap


@dataclass(frozen=True)
class ProjectionTables:
    """One projection W, by teacher column and by student row.

    By column: the entries of column v are `offsets[v] : offsets[v + 1]` of students and weights. `source` `[U]`: the
    student token of a column with a single entry of weight 1, else -1; `place` `[U]`: the number of any other
    reachable column in `multi_source`, else -1; `reached`: all columns of either kind, ascending. By row: `index`,
    `weight` `[k, V]` (-1: none) and `entries` `[V]`: how many a row has. All int32 and float32.
    """

    offsets: Tensor
    students: Tensor
    weights: Tensor
    source: Tensor
    place: Tensor
    multi_source: Tensor
    reached: Tensor
    index: Tensor
    weight: Tensor
    entries: Tensor

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
    student = torch.cat((vocab.rest_student.cpu(), source[plain]))
    teacher = torch.cat((vocab.rest_teacher.cpu(), plain))
    weight = torch.cat((vocab.fixed_weight.cpu(), torch.ones(plain.numel())))

    order = teacher.argsort(stable=True)
    count = torch.bincount(teacher, minlength=vocab.teacher_size)
    several = torch.zeros(vocab.teacher_size, dtype=torch.bool)
    several[vocab.rest_columns.cpu()] = True
    # longest lists first: the last programs of a launch should be short ones
    multi_source = vocab.rest_columns.cpu()
    multi_source = multi_source[count[multi_source].argsort(descending=True, stable=True)]
    place = torch.full((vocab.teacher_size,), -1)
    place[multi_source] = torch.arange(multi_source.numel())
    index, row_weight, entries = _by_row(student, teacher, weight, vocab.student_size)
    tables = {
        "offsets": torch.cat((torch.zeros(1, dtype=torch.long), count.cumsum(0))),
        "students": student[order],
        "source": source.masked_fill(several, -1),
        "place": place,
        "multi_source": multi_source,
        "reached": count.nonzero().squeeze(1),
        "index": index,
        "entries": entries,
    }
    device = vocab.reachable.device
    return ProjectionTables(
        weights=weight[order].float().to(device),
        weight=row_weight.to(device),
        **{name: value.to(torch.int32).contiguous().to(device) for name, value in tables.items()},
    )


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
    rest_student: Tensor
    rest_teacher: Tensor
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
