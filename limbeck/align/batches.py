"""Many rows at once: ids of a whole batch -> chunks, and chunks -> padded tensors.

A call into numpy costs as much as the work on a short row. So the rows of a batch are laid one after another, on both
sides with the same byte between two rows, and are cut at their shared boundaries in one go. ``TokenAligner`` does the
rows whose two sides do not spell the same text one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from limbeck.align.boundaries import Chunks, all_within, shared_boundaries
from limbeck.errors import AlignmentError
from limbeck.tokens import Tokenizer
from limbeck.tokens.vocab import role_class

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RowChunks:
    """Chunks of many rows, all arrays ``[C]``: the row, half-open spans of columns of both sides, and ``exact``."""

    row: IntArray
    student_start: IntArray
    student_end: IntArray
    teacher_start: IntArray
    teacher_end: IntArray
    exact: BoolArray

    @classmethod
    def of_samples(cls, samples: Sequence[Chunks], rows: Sequence[int] | None = None) -> RowChunks:
        """The chunks of one sample per row; ``rows``: where the samples are not rows 0, 1, ..."""
        counts = [len(chunks) for chunks in samples]
        numbers = np.arange(len(samples)) if rows is None else np.array(rows, dtype=np.int64)
        chunks = Chunks.in_order(samples)
        spans = (chunks.student_start, chunks.student_end, chunks.teacher_start, chunks.teacher_end)
        return cls(np.repeat(numbers, counts), *spans, chunks.exact)

    @classmethod
    def merged(cls, parts: Sequence[RowChunks]) -> RowChunks:
        """Several lists as one, ordered by row and student column."""
        arrays = [np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__]
        order = np.lexsort((arrays[1], arrays[0]))
        return cls(*(array[order] for array in arrays))


@dataclass
class AlignmentBatch:
    """Chunks of a batch as padded tensors. Chunk ids label tokens; a token at ``t`` is predicted at ``t - 1``.

    Attributes:
        pair_valid: ``[B, C]`` bool; False on padding.
        pair_is_correct: ``[B, C]`` bool; both sides' bytes are equal.
        student_exact_partition_mask: ``[B, Ts]`` bool; the token is one half of an exact 1:1 chunk.
        teacher_exact_partition_mask: ``[B, Tt]`` likewise.
        student_chunk_id: ``[B, Ts]`` int64; the chunk of each token, -1 for none.
        teacher_chunk_id: ``[B, Tt]`` likewise.
        num_chunks: ``[B]`` int64.
    """

    pair_valid: torch.Tensor
    pair_is_correct: torch.Tensor
    student_exact_partition_mask: torch.Tensor
    teacher_exact_partition_mask: torch.Tensor
    student_chunk_id: torch.Tensor
    teacher_chunk_id: torch.Tensor
    num_chunks: torch.Tensor

    def as_dict(self, prefix: str = "alignment_") -> dict[str, torch.Tensor]:
        """The tensors under the keys that batches carry them by."""
        return {prefix + name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_chunks(cls, samples: Sequence[Chunks], student_width: int, teacher_width: int) -> AlignmentBatch:
        """Pad the chunks of several samples to the given widths; there is always at least one chunk column."""
        return cls.from_rows(RowChunks.of_samples(samples), len(samples), student_width, teacher_width)

    @classmethod
    def from_rows(cls, chunks: RowChunks, batch: int, student_width: int, teacher_width: int) -> AlignmentBatch:
        """Pad chunks of ``batch`` rows, ordered by row; see ``from_chunks``."""
        import torch

        counts = np.bincount(chunks.row, minlength=batch)
        number = np.arange(len(chunks.row)) - (np.cumsum(counts) - counts)[chunks.row]
        valid = np.arange(max(int(counts.max(initial=0)), 1)) < counts[:, None]
        correct = np.zeros_like(valid)
        correct[chunks.row, number] = chunks.exact
        spans = (chunks.student_start, chunks.student_end), (chunks.teacher_start, chunks.teacher_end)
        single = chunks.exact & (spans[0][1] - spans[0][0] == 1) & (spans[1][1] - spans[1][0] == 1)
        ones, labels = [], []
        for (start, end), width in zip(spans, (student_width, teacher_width), strict=True):
            lengths = end - start
            place = np.arange(int(lengths.sum())) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)
            label = np.full((batch, width), -1, dtype=np.int64)
            label[np.repeat(chunks.row, lengths), place] = np.repeat(number, lengths)
            one = np.zeros((batch, width), dtype=bool)
            one[chunks.row[single], start[single]] = True
            ones.append(one)
            labels.append(label)
        return cls(*map(torch.from_numpy, (valid, correct, *ones, *labels, counts)))


class IdRows:
    """The real tokens of one side of a batch, row after row; padding takes no part.

    Attributes:
        ids, row, column: ``[N]``; each token with its place in the batch.
        first: ``[B + 1]``; where each row's tokens begin.
        special: ``[N]`` bool.
        length: ``[N]``; bytes of each token.
        texts: ``[B]``; what each row spells.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None, tokenizer: Tokenizer, side: str) -> None:
        self.tokenizer = tokenizer
        vocab = tokenizer.vocab
        values = ids.cpu().numpy().astype(np.int64)
        real = np.ones(values.shape, dtype=bool) if mask is None else mask.cpu().numpy() > 0
        if (wrong := real & ((values < 0) | (values >= vocab.size))).any():
            row, at = np.argwhere(wrong)[0].tolist()
            raise AlignmentError(
                f"{side} id {values[row, at]} in row {row} is outside its tokenizer's {vocab.size} ids."
            )
        self.ids = values[real]
        self.row, self.column = np.nonzero(real)
        self.first = np.concatenate([[0], np.cumsum(real.sum(1))])
        self.special = vocab.special[self.ids]
        self.length = vocab.byte_len[self.ids]
        source = vocab.join(self.ids.tolist())
        self.texts = [source[start:end] for start, end in pairwise(self._before[self.first].tolist())]

    def of_row(self, row: int) -> IntArray:
        """Ids of one row."""
        return self.ids[self.first[row] : self.first[row + 1]]

    @cached_property
    def _before(self) -> IntArray:
        """``[N + 1]`` bytes in front of each token."""
        return np.concatenate([[0], np.cumsum(self.length)])

    @cached_property
    def added(self) -> BoolArray:
        """``[N]``; tokens that begin with a space where their tokenizer writes one in front of a text."""
        found = np.zeros(len(self.ids), dtype=bool)
        if self.tokenizer.space_in_front == "never":
            return found
        begins = np.concatenate([[True], self.special[:-1]])[: len(self.ids)]
        begins[self.first[:-1][np.diff(self.first) > 0]] = True
        opens = np.flatnonzero(begins & ~self.special)
        if self.tokenizer.space_in_front == "begin":
            opens = opens[np.diff(self.row[opens], prepend=-1) > 0]
        spelled = self.tokenizer.vocab.token_bytes
        found[[at for at in opens.tolist() if spelled[self.ids[at]].startswith(b" ")]] = True
        return found

    def spellings(self, row: int) -> list[tuple[bool, bytes]]:
        """What a row may spell: without added spaces (True) where its tokenizer adds them, and as it is."""
        text = self.texts[row]
        if self.tokenizer.space_in_front == "never":
            return [(False, text)]
        span = slice(*self.first[row : row + 2])
        spaces = (self._before[:-1][span][self.added[span]] - self._before[self.first[row]]).tolist()
        edges = zip([0, *(at + 1 for at in spaces)], [*spaces, len(text)], strict=True)
        return [(True, b"".join(text[start:end] for start, end in edges)), (False, text)]


def one_text(student: IdRows, teacher: IdRows) -> tuple[BoolArray, BoolArray, list[int]]:
    """Which rows spell the same text only without added spaces, per side, and those that do not even then.

    Ids do not tell an added space from one of the text, but the other side does.
    """
    bare = np.zeros((2, len(student.texts)), dtype=bool)
    others = []
    for row, (mine, theirs) in enumerate(zip(student.texts, teacher.texts, strict=True)):
        if mine == theirs:
            continue
        ways = [(a, b) for a in student.spellings(row) for b in teacher.spellings(row)]
        equal = next(((a, b) for a, b in ways if a[1] == b[1]), None)
        if equal is None:
            others.append(row)
        else:
            bare[:, row] = equal[0][0], equal[1][0]
    return bare[0], bare[1], others


class _Laid:
    """One side of the rows that both sides spell alike, in coordinates that both share: bytes, and one between rows."""

    def __init__(self, rows: IdRows, bare: BoolArray, fast: BoolArray) -> None:
        lost = rows.added & bare[rows.row] if bare.any() else np.zeros(len(rows.ids), dtype=bool)
        taken = fast[rows.row]
        length = np.where(taken, rows.length - lost, 0)
        self.rows = rows
        self.end = np.cumsum(length) + rows.row
        """``[N]`` where each token ends."""
        kept = taken & ~rows.special & ~(lost & (length == 0))
        self.keep = np.flatnonzero(kept)
        """Tokens that are compared: neither special nor nothing but an added space."""
        self.exact = ~lost[self.keep]
        before = np.concatenate([[0], np.cumsum(length)])[rows.first]
        self.begin = before[:-1] + np.arange(len(before) - 1)
        """``[B]`` where each row begins."""
        self.stop = before[1:] + np.arange(len(before) - 1)
        at = np.searchsorted(self.keep, rows.first[:-1])
        self.edges = np.insert(self.end[self.keep], at, self.begin)
        """The begin of every row, then the ends of its compared tokens."""

    def spread(self, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
        """Spans over the compared tokens -> spans over all."""
        if not len(self.keep):
            return start, end
        return self.keep[np.minimum(start, len(self.keep) - 1)], self.keep[np.maximum(end, 1) - 1] + 1

    def specials(self, fast: BoolArray) -> dict[tuple[int, str, str, int], int]:
        """Special tokens of these rows by (row, place, role, occurrence)."""
        found: dict[tuple[int, str, str, int], int] = {}
        seen: Counter[tuple[int, str, str]] = Counter()
        roles = self.rows.tokenizer.vocab.roles
        at = np.flatnonzero(self.rows.special & fast[self.rows.row])
        row = self.rows.row[at]
        table = (at, row, self.rows.ids[at], self.end[at], self.begin[row], self.stop[row])
        for place, number, token, end, begin, stop in zip(*(values.tolist() for values in table), strict=True):
            role = role_class(roles[token])
            if role in ("pad", "unk"):
                continue
            key = (number, "begin" if end == begin else "end" if end == stop else str(end - begin), role)
            found[(*key, seen[key])] = place
            seen[key] += 1
        return found


def align_rows(student: IdRows, teacher: IdRows, bare_s: BoolArray, bare_t: BoolArray, fast: BoolArray) -> RowChunks:
    """Chunks of the rows of ``fast``, whose two sides spell the same text (``bare_*``: without their added spaces)."""
    s, t = _Laid(student, bare_s, fast), _Laid(teacher, bare_t, fast)
    at_s, at_t = shared_boundaries(s.edges, t.edges)
    # Every row has put one begin among the edges, so that an edge of row r counts r more than the tokens before it.
    row_s = np.searchsorted(s.begin, s.edges[at_s], side="right") - 1
    start_s, end_s = (at_s - row_s)[:-1], (at_s - row_s)[1:]
    start_t, end_t = (at_t - row_s)[:-1], (at_t - row_s)[1:]
    exact = all_within(s.exact, start_s, end_s) & all_within(t.exact, start_t, end_t)
    full_s, full_t = s.spread(start_s, end_s), t.spread(start_t, end_t)
    # Special tokens inside a chunk's span break its chain of predictions, so there is no such chunk.
    whole = (full_s[1] - full_s[0] == end_s - start_s) & (full_t[1] - full_t[0] == end_t - start_t)
    whole &= (row_s[:-1] == row_s[1:]) & (end_s > start_s) & (end_t > start_t) & fast[row_s[:-1]]
    spans_s, spans_t = [array[whole] for array in full_s], [array[whole] for array in full_t]
    chunks = RowChunks(row_s[:-1][whole], spans_s[0], spans_s[1], spans_t[0], spans_t[1], exact[whole])
    row, at_s, at_t = _special_pairs(s, t, fast)
    if len(row):
        pairs = RowChunks(row, at_s, at_s + 1, at_t, at_t + 1, np.ones(len(row), dtype=bool))
        chunks = RowChunks.merged([chunks, pairs])
    return _in_columns(student, teacher, chunks)


def align_others(student: IdRows, teacher: IdRows, rows: Sequence[int], samples: Sequence[Chunks]) -> RowChunks:
    """Chunks that were found row by row, as those of the batch."""
    found = RowChunks.of_samples(samples, rows)
    s, t = student.first[found.row], teacher.first[found.row]
    spans = (found.student_start + s, found.student_end + s, found.teacher_start + t, found.teacher_end + t)
    return _in_columns(student, teacher, RowChunks(found.row, *spans, found.exact))


def _special_pairs(s: _Laid, t: _Laid, fast: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
    """Rows and tokens of the special tokens that both sides have at one place; none crosses another."""
    theirs = t.specials(fast)
    kept: list[tuple[int, int, int]] = []
    for key, at in s.specials(fast).items():
        if key in theirs and (not kept or theirs[key] > kept[-1][2]):
            kept.append((key[0], at, theirs[key]))
    row, at_s, at_t = np.array(kept, dtype=np.int64).reshape(-1, 3).T
    return row, at_s, at_t


def _in_columns(student: IdRows, teacher: IdRows, chunks: RowChunks) -> RowChunks:
    """Spans over the batch's real tokens -> spans over the columns of its rows (padding on the left moves them)."""
    s, t = student.column, teacher.column
    ends = s[chunks.student_end - 1] + 1, t[chunks.teacher_end - 1] + 1
    return RowChunks(chunks.row, s[chunks.student_start], ends[0], t[chunks.teacher_start], ends[1], chunks.exact)
