"""bpm (arXiv 2607.22334): the student tokens that teacher tokens begin with, at every row of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.divergences import Direction
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, Settings, chunk_sum, refuse_shards
from limbeck.losses.objectives.byte_prefix import PrefixObjective, token_divergence
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.projection import ProjectionLike


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

    def add_chunk(self, number: int, student_bytes: Sequence[bytes], theirs: Sequence[bytes]) -> None:
        """Rows inside teacher tokens, and what goes on behind them, by the bytes of both sides' tokens."""
        first_s, first_t = self.token[number], self.base[number]
        ends = np.cumsum([len(data) for data in theirs])
        start = 0
        for offset, data in enumerate(student_bytes):
            teacher_token = int(np.searchsorted(ends, start, side="right"))
            written = start - int(ends[teacher_token]) + len(theirs[teacher_token])
            row = number if offset == 0 else len(self.token)
            if offset:
                self.token.append(first_s + offset)
                self.base.append(first_t + teacher_token)
                self.written.append(theirs[teacher_token][:written])
            since = theirs[teacher_token][written:]
            for following in range(teacher_token + 1, len(theirs)):
                self.spans.append((row, first_t + following, since))
                since += theirs[following]
            start += len(data)


class BPM(PrefixObjective):
    """BPM: at every row of a chunk, the teacher's tokens by the longest student token that they begin with.

    At the chunk's start that is the teacher's distribution itself. Inside a teacher token, it is that of its tokens
    that begin with what the student has already written, by the rest of their bytes. Student tokens that go past the
    realised teacher token get their share of its mass from the teacher's next rows, as far as the chunk goes.
    """

    measures = ("root_kl", "inner_student_kl", "blank_rows", "uncovered_mass", "proj_accuracy")

    class Config(DivergenceConfig):
        mode: Literal["bpm"] = "bpm"
        direction: Direction = "jsd"
        """forward: KL(teacher||student); reverse: KL(student||teacher); jsd."""
        mask_blanks: bool = True
        """Leave out student tokens that are nothing but spaces and tabs."""

    cfg: Config
    blank: Tensor  # [V_s] bool: left out, nothing but spaces and tabs
    sorted_ids: Tensor  # teacher ids in the order of their bytes

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        blank = [self.cfg.mask_blanks and bool(data) and not data.strip(b" \t") for data in self.prefixes.student_bytes]
        self.register_buffer("blank", torch.tensor(blank), persistent=False)
        self.register_buffer("sorted_ids", torch.from_numpy(self.prefixes.teacher.ids), persistent=False)
        self._going_on: dict[bytes, tuple[Tensor, ...]] = {}
        self._going_past: dict[bytes, tuple[Tensor, ...]] = {}

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        refuse_shards(self.mode, student)
        log_NV = student.log_probs(self.temperature)
        rows = self._rows(chunks)
        every = torch.tensor(rows.token, device=log_NV.device)
        kept = (~self.blank[chunks.student_ids_M[every]]).nonzero().squeeze(1)
        with torch.no_grad():
            target = self._targets(rows, chunks, teacher.log_probs(self.temperature).to(log_NV.dtype))[kept]
        token = every[kept]
        log_s = log_NV.index_select(0, chunks.student_row_M[token])
        named = ~(target[:, :-1] <= 0)  # what is no number is named too, or it would be left out of the sum
        values = token_divergence(target, named, log_s, self.spec)
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
            root_kl=(chunks.weighted(root_C).sum(), roots),
            inner_student_kl=(chunks.weighted(inner_C).sum(), (~root).sum().to(values)),
            blank_rows=(number(float(every.numel() - kept.numel())), number(float(every.numel()))),
            uncovered_mass=((target[:, -1] * root).sum(), roots),
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
            student_bytes, theirs = (
                [table[i] for i in side[first[c] : first[c] + count[c]]]
                for table, side, first, count in zip(tables, ids, firsts, counts, strict=True)
            )
            # special tokens have no bytes, and inexact chunks different ones: of these only the start is compared
            if all(student_bytes) and all(theirs) and b"".join(student_bytes) == b"".join(theirs):
                rows.add_chunk(c, student_bytes, theirs)
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
            # running sums are float64: a difference of two would keep few digits of float32
            before = F.pad(log_Q.double().cumsum(0), (1, 0))  # of all teacher tokens before each
            path = log_Q[base[row]] - log_total[row] + (before[level_of] - before[base[row] + 1]).to(log_Q)
            used, level_index = level_of.unique(return_inverse=True)
            sums = F.pad(probs.index_select(0, used)[:, self.sorted_ids].double().cumsum(1), (1, 0))
            mass = (sums[level_index[span], last] - sums[level_index[span], first]).to(probs) * path[span].exp()
            flat = target.view(-1)
            flat.index_add_(0, row[span] * width + gaining, mass)
            flat.index_add_(0, row[span] * width + losing, -mass)
        # what was taken from shorter tokens may leave a rounding error below 0
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
            past: list[tuple[int, int, int, int]] = []
            above = [(since, student.beginning(since))]
            for token_index in range(*student.going_on(since)):
                data, token = student.data[token_index], int(student.ids[token_index])
                first, last = teacher.going_on(data[len(since) :])
                if data == since or student.id_of[data] != token or first == last:
                    continue
                while not data.startswith(above[-1][0]):
                    above.pop()
                past.append((token, above[-1][1], first, last))
                above.append((data, token))
            tokens, shorter, firsts, lasts = torch.tensor(past, dtype=torch.int64).view(-1, 4).unbind(1)
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
