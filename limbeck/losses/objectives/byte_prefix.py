"""Objectives on the bytes of tokens: what the teacher says, in terms of the student tokens that its tokens begin with.

- **escd** (arXiv 2609.34738): at chunk starts the student tokens that teacher tokens begin with; on the row behind,
  sets of student tokens that go on like the teacher tokens that the student lacks.
- **bpm** (arXiv 2607.22334): the same starts, and every row inside chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, divergence_entries
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ObjectiveOptions,
    ProjectedObjective,
    chunk_sum,
)
from limbeck.losses.objectives.corrected import TINY
from limbeck.losses.objectives.recent import refuse_shards
from limbeck.losses.objectives.tree_kl import log_target, ranges
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection.prefixes import BytePrefixes


class PrefixObjective(ProjectedObjective):
    """An objective on the bytes of both vocabularies: a teacher token counts for the longest student token that it
    begins with."""

    needs_logits = True

    head: Tensor  # [V_t] that student token; V_s: none
    reached: Tensor  # [V_s] bool: some teacher token counts for it

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        if projection.token_bytes is None:
            raise LossError(
                f"mode {self.mode!r} needs the bytes of both vocabularies, which a stored projection does not hold; "
                "pass projections=[load_or_build(student_tokenizer, teacher_tokenizer)]"
            )
        self.prefixes = BytePrefixes(*projection.token_bytes, special_partners(projection))
        head = torch.from_numpy(self.prefixes.head)
        size = len(self.prefixes.student_bytes)
        reached = torch.zeros(size + 1, dtype=torch.bool).index_fill(0, head, True)
        self.register_buffer("head", head.where(head >= 0, size), persistent=False)
        self.register_buffer("reached", reached[:size], persistent=False)

    def fit(self, student_size: int, teacher_size: int) -> None:
        super().fit(student_size, teacher_size)
        sides = (
            ("student", student_size, self.prefixes.student, self.reached.numel()),
            ("teacher", teacher_size, self.prefixes.teacher, self.head.numel()),
        )
        for side, size, tokens, own in sides:
            if size > own or tokens.ids.max(initial=-1) >= size:
                raise LossError(
                    f"the bytes are those of {own} {side} tokens but the {side} scores {size}; mode {self.mode!r} "
                    "needs heads that have a row for every token of a text"
                )
        if student_size < self.reached.numel():
            # what follows are ids without bytes, whose column would be the rest's
            self.head = self.head.clamp(max=student_size)
            self.reached = self.reached[:student_size]
        self.head = self.head[:teacher_size]

    def at_heads(self, probs_nU: Tensor) -> Tensor:
        """Teacher probabilities summed by student token, and in the last column those that begin with none:
        `[n, V_s + 1]`."""
        out = probs_nU.new_zeros(probs_nU.shape[0], self.reached.numel() + 1)
        return out.index_add(1, self.head, probs_nU)


def special_partners(projection: ProjectionLike) -> dict[int, int]:
    """Teacher id -> student id of tokens that stand for each other, those of equal role first."""
    student, teacher = projection.exact_pairs()
    found = dict(zip(np.asarray(teacher).tolist(), np.asarray(student).tolist(), strict=True))
    whole = np.flatnonzero((np.asarray(projection.weights)[:, 0] == 1) & (np.asarray(projection.indices)[:, 0] >= 0))
    for own, other in zip(whole.tolist(), np.asarray(projection.indices)[whole, 0].tolist(), strict=True):
        found.setdefault(other, own)
    return found


def token_divergence(target: Tensor, member: Tensor, log_s: Tensor, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` over the student's tokens of `member` and one rest bucket. target: `[n, V_s + 1]`, the rest
    last; log_s: the student's log-probabilities `[n, V_s]`."""
    entries = divergence_entries(log_s, log_target(target[:, :-1], spec), spec)
    rest_s = (log_s.exp() * ~member).sum(-1)
    rest = divergence_entries((rest_s + TINY).log(), log_target(target[:, -1], spec), spec)
    return entries.masked_fill(~member, 0).sum(-1) + rest


class EventTables(nn.Module):
    """`Completions` as tensors that travel with the objective; a group of `num_groups` is no event."""

    group: Tensor
    start: Tensor
    stop: Tensor
    event: Tensor
    first: Tensor
    last: Tensor
    sorted_ids: Tensor

    def __init__(self, prefixes: BytePrefixes) -> None:
        super().__init__()
        found = prefixes.completions
        self.num_groups = found.num_groups
        arrays = {
            "group": np.where(found.group < 0, found.num_groups, found.group),
            "start": found.start,
            "stop": found.stop,
            "event": found.event,
            "first": found.first,
            "last": found.last,
            "sorted_ids": prefixes.student.ids,
        }
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)), persistent=False)


class EventSets(PrefixObjective):
    """ESCD: at a chunk's start, each teacher token at the longest student token that it begins with; on the row behind
    the chunk's first student token, the mass of teacher events that go on from it, each against all student tokens that
    go on so."""

    mode = "escd"

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        self.sets = EventTables(self.prefixes)

    @property
    def reads_next_row(self) -> bool:
        return True

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        refuse_shards(self.mode, student)
        log_NV = student.log_probs(self.temperature)
        log_CV = chunks.student_boundary(log_NV)
        probs_CU = teacher.log_probs(self.temperature).index_select(0, chunks.teacher_first_C).to(log_CV.dtype).exp()
        target = self.at_heads(probs_CU)
        root_C = token_divergence(target, self.reached.expand_as(log_CV), log_CV, self.spec)
        child_C, least_C = self._children(log_NV, chunks, probs_CU)
        count = chunks.count(root_C)
        with torch.no_grad():
            right = (log_CV.argmax(-1) == target.argmax(-1)).sum().to(root_C)
        entered = (least_C >= 0).to(root_C).sum()
        least_C = least_C.clamp(min=0)
        return self.out(
            root_C + child_C,
            chunks,
            {"root": root_C, "child": child_C},
            root_kl=(chunks.weighted(root_C).sum(), count),
            child_loss=(chunks.weighted(child_C).sum(), entered),
            child_kl=(chunks.weighted(child_C - least_C).sum(), entered),
            lost_mass=(target[:, -1].sum(), count),
            proj_accuracy=(right, count),
        )

    def _children(self, log_NV: Tensor, chunks: ChunkBlock, probs_CU: Tensor) -> tuple[Tensor, Tensor]:
        """(loss of the sets `[C]`, the least that it can be, -1 where no event goes on)."""
        sets, size = self.sets, chunks.num_chunks
        assert chunks.next_row_C is not None
        second = (chunks.student_first_C + 1).clamp(max=chunks.student_row_M.numel() - 1)
        row_C = chunks.student_row_M[second].where(chunks.student_count_C > 1, chunks.next_row_C)
        first_C = chunks.student_ids_M.index_select(0, chunks.student_first_C)
        entry, chunk = ranges(sets.start[first_C], sets.stop[first_C])
        member, owner = ranges(sets.first[entry], sets.last[entry])
        probs = log_NV[row_C[chunk[owner]], sets.sorted_ids[member]].exp()
        inside = chunk_sum(probs, owner, entry.numel())
        groups = probs_CU.new_zeros(size, sets.num_groups + 1)
        groups = groups.index_add(1, sets.group[: probs_CU.shape[1]], probs_CU)
        mass = groups[chunk, sets.event[entry]]
        loss_C = chunk_sum(-mass * (inside + torch.finfo(inside.dtype).tiny).log(), chunk, size)
        total_C = chunk_sum(mass, chunk, size)
        share = mass / total_C[chunk].clamp(min=torch.finfo(mass.dtype).tiny)
        least_C = chunk_sum(-torch.special.xlogy(mass, share), chunk, size)
        return loss_C, least_C.where(total_C > 0, torch.full_like(least_C, -1.0))


@dataclass
class ByteRows:
    """Student rows of a block that are compared, the first of every chunk before all others.

    token: student token (its number in the block) that a row predicts; base: teacher token whose distribution it reads;
    written: the bytes of that token that the student has already written. spans: (row, teacher token, bytes from the
    row up to that token), where the teacher goes on inside the chunk.
    """

    token: list[int]
    base: list[int]
    written: list[bytes]
    spans: list[tuple[int, int, bytes]]

    def add_chunk(self, number: int, own: Sequence[bytes], theirs: Sequence[bytes]) -> None:
        """Rows inside teacher tokens, and what goes on behind them; own, theirs: bytes of the chunk's tokens."""
        first_s, first_t = self.token[number], self.base[number]
        ends = np.cumsum([len(data) for data in theirs])
        start = 0
        for place, data in enumerate(own):
            at = int(np.searchsorted(ends, start, side="right"))
            written = start - int(ends[at]) + len(theirs[at])
            row = number if place == 0 else len(self.token)
            if place:
                self.token.append(first_s + place)
                self.base.append(first_t + at)
                self.written.append(theirs[at][:written])
            since = theirs[at][written:]
            for following in range(at + 1, len(theirs)):
                self.spans.append((row, first_t + following, since))
                since += theirs[following]
            start += len(data)


class BytePrefixKL(PrefixObjective):
    """BPM: at every row of a chunk, the teacher's tokens by the longest student token that they begin with.

    At the chunk's start that is the teacher's distribution itself. Inside a teacher token, it is that of its tokens
    that begin with what the student has already written, by the rest of their bytes. Student tokens that go past the
    realised teacher token get their share of its mass from the teacher's next rows, as far as the chunk goes.
    """

    mode = "bpm"
    default_direction = "jsd"

    blank: Tensor  # [V_s] bool: left out, nothing but spaces and tabs
    sorted_ids: Tensor  # teacher ids in the order of their bytes

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        blank = [options.mask_blanks and bool(own) and not own.strip(b" \t") for own in self.prefixes.student_bytes]
        self.register_buffer("blank", torch.tensor(blank), persistent=False)
        self.register_buffer("sorted_ids", torch.from_numpy(self.prefixes.teacher.ids), persistent=False)
        self._going_on: dict[bytes, tuple[Tensor, ...]] = {}
        self._going_past: dict[bytes, tuple[Tensor, ...]] = {}

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        refuse_shards(self.mode, student)
        log_NV = student.log_probs(self.temperature)
        rows = self._rows(chunks)
        every = torch.tensor(rows.token, device=log_NV.device)
        kept = (~self.blank[chunks.student_ids_M[every]]).nonzero().squeeze(1)
        with torch.no_grad():
            target = self._targets(rows, chunks, teacher.log_probs(self.temperature).to(log_NV.dtype))[kept]
        token = every[kept]
        log_s = log_NV.index_select(0, chunks.student_row_M[token])
        values = token_divergence(target, target[:, :-1] > 0, log_s, self.spec)
        root = kept < chunks.num_chunks
        chunk = chunks.student_chunk_M[token]
        root_C = chunk_sum(values * root, chunk, chunks.num_chunks)
        inner_C = chunk_sum(values * ~root, chunk, chunks.num_chunks)
        roots, number = root.sum().to(values), values.new_tensor
        with torch.no_grad():
            right = ((log_s.argmax(-1) == target.argmax(-1)) & root).sum().to(values)
        return self.out(
            root_C + inner_C,
            chunks,
            {"root": root_C, "inner": inner_C},
            root_kl=(chunks.weighted(root_C).sum(), roots),
            inner_student_kl=(chunks.weighted(inner_C).sum(), (~root).sum().to(values)),
            blank_rows=(number(float(every.numel() - kept.numel())), number(float(every.numel()))),
            lost_mass=((target[:, -1] * root).sum(), roots),
            proj_accuracy=(right, roots),
        )

    def _rows(self, chunks: ChunkBlock) -> ByteRows:
        firsts = chunks.student_first_C.tolist(), chunks.teacher_first_C.tolist()
        rows = ByteRows(*firsts, [b""] * chunks.num_chunks, [])
        multi = chunks.multi_C.nonzero().squeeze(1).tolist()
        if not multi:
            return rows
        ids = chunks.student_ids_M.tolist(), chunks.teacher_ids_Q.tolist()
        counts = chunks.student_count_C.tolist(), chunks.teacher_count_C.tolist()
        tables = self.prefixes.student_bytes, self.prefixes.teacher_bytes
        for c in multi:
            own, theirs = (
                [table[i] for i in side[first[c] : first[c] + count[c]]]
                for table, side, first, count in zip(tables, ids, firsts, counts, strict=True)
            )
            if all(own) and all(theirs) and b"".join(own) == b"".join(theirs):
                rows.add_chunk(c, own, theirs)
        return rows

    def _targets(self, rows: ByteRows, chunks: ChunkBlock, log_QU: Tensor) -> Tensor:
        """Target `[rows, V_s + 1]` of every row; the last column is what no student token stands for."""
        device, width = log_QU.device, self.reached.numel() + 1
        probs, base = log_QU.exp(), torch.tensor(rows.base, device=device)
        roots = chunks.num_chunks
        target = probs.new_zeros(len(rows.base), width)
        target[:roots] = self.at_heads(probs.index_select(0, base[:roots]))
        log_total = probs.new_zeros(len(rows.base))
        if len(rows.base) > roots:
            row, ids, heads = _joined([self._inside(written) for written in rows.written[roots:]], device)
            row = row + roots
            mass = probs[base[row], ids]
            total = chunk_sum(mass, row, len(rows.base)).clamp(min=torch.finfo(mass.dtype).tiny)
            target.view(-1).index_add_(0, row * width + heads, mass / total[row])
            log_total[roots:] = total[roots:].log()
        if rows.spans:
            at, level, since = zip(*rows.spans, strict=True)
            span, gaining, losing, first, last = _joined([self._past(data) for data in since], device)
            row, level_of = torch.tensor(at, device=device), torch.tensor(level, device=device)
            log_Q = log_QU.gather(1, chunks.teacher_ids_Q[:, None]).squeeze(1)
            before = F.pad(log_Q.double().cumsum(0), (1, 0))  # of all teacher tokens before each
            path = log_Q[base[row]] - log_total[row] + (before[level_of] - before[base[row] + 1]).to(log_Q)
            used, place = level_of.unique(return_inverse=True)
            sums = F.pad(probs.index_select(0, used)[:, self.sorted_ids].double().cumsum(1), (1, 0))
            mass = (sums[place[span], last] - sums[place[span], first]).to(probs) * path[span].exp()
            flat = target.view(-1)
            flat.index_add_(0, row[span] * width + gaining, mass)
            flat.index_add_(0, row[span] * width + losing, -mass)
        return target.clamp(min=0)

    def _inside(self, written: bytes) -> tuple[Tensor, ...]:
        """Teacher tokens that begin with `written`, and the student token that what is left of each begins with."""
        if written not in self._going_on:
            teacher, student = self.prefixes.teacher, self.prefixes.student
            first, last = teacher.going_on(written)
            heads = [student.beginning(data[len(written) :]) for data in teacher.data[first:last]]
            self._going_on[written] = torch.from_numpy(teacher.ids[first:last]), self._columns(torch.tensor(heads))
        return self._going_on[written]

    def _past(self, since: bytes) -> tuple[Tensor, ...]:
        """Student tokens that begin with `since` and go on: the token, the one that had its mass before, and the range
        of the teacher's sorted tokens that begin with what it adds."""
        if since not in self._going_past:
            student, teacher = self.prefixes.student, self.prefixes.teacher
            found: list[tuple[int, int, int, int]] = []
            above = [(since, student.beginning(since))]
            for place in range(*student.going_on(since)):
                data, token = student.data[place], int(student.ids[place])
                first, last = teacher.going_on(data[len(since) :])
                if data == since or student.id_of[data] != token or first == last:
                    continue
                while not data.startswith(above[-1][0]):
                    above.pop()
                found.append((token, above[-1][1], first, last))
                above.append((data, token))
            tokens, shorter, firsts, lasts = torch.tensor(found, dtype=torch.int64).view(-1, 4).unbind(1)
            self._going_past[since] = tokens, self._columns(shorter), firsts, lasts
        return self._going_past[since]

    def _columns(self, tokens: Tensor) -> Tensor:
        """Columns of a target for student tokens, -1 being none."""
        return tokens.where(tokens >= 0, self.reached.numel())


def _joined(tables: Sequence[tuple[Tensor, ...]], device: torch.device) -> list[Tensor]:
    """The rows of some tables, one table after another: the table of each, and its columns."""
    sizes = torch.tensor([table[0].numel() for table in tables])
    owner = torch.repeat_interleave(torch.arange(len(tables)), sizes)
    return [owner.to(device), *(torch.cat(column).to(device) for column in zip(*tables, strict=True))]
