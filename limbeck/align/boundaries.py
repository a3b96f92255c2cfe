"""Shared byte boundaries of two token sequences, as pure array code.

Both sides cut the same bytes. A *boundary* is a byte offset at which both sides have a token edge; a *chunk* is what
lies between two consecutive boundaries. Everything is linear in tokens and bytes, without tables or search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


_SPAN_FIELDS = ("student_start", "student_end", "teacher_start", "teacher_end", "byte_start", "byte_end")


@dataclass(frozen=True, eq=False)
class Chunks:
    """Aligned chunks of one sample, in order.

    All arrays are ``[C]``. Token spans are half open indices into the two sequences; byte spans are offsets in the
    student rendering's source. ``exact``: both sides' token bytes equal the text's. ``role``: a pair of special tokens
    of one role, which has no bytes. ``same_text``: exact, but for a space that a tokenizer writes in front of a text by
    itself; the chunk's probabilities can be compared, the tokens that might stand at its start cannot.
    """

    student_start: IntArray
    student_end: IntArray
    teacher_start: IntArray
    teacher_end: IntArray
    byte_start: IntArray
    byte_end: IntArray
    exact: BoolArray
    role: BoolArray
    same_text: BoolArray

    def __len__(self) -> int:
        return len(self.student_start)

    @property
    def student_pred_pos(self) -> IntArray:
        """``[C]`` position whose logits predict the chunk's first student token; -1 where there is none."""
        return self.student_start - 1

    @property
    def teacher_pred_pos(self) -> IntArray:
        """``[C]`` position whose logits predict the chunk's first teacher token; -1 where there is none."""
        return self.teacher_start - 1

    def kinds(self) -> list[str]:
        """``1:1``, ``1:n``, ``n:1`` or ``n:m`` for each chunk (student first)."""
        one_s = (self.student_end - self.student_start) == 1
        one_t = (self.teacher_end - self.teacher_start) == 1
        names = np.array(["n:m", "n:1", "1:n", "1:1"])
        return [str(k) for k in names[2 * one_s + one_t]]

    def select(self, which: IntArray | BoolArray | slice) -> Chunks:
        return Chunks(*(getattr(self, f.name)[which] for f in fields(self)))

    def mirrored(self) -> Chunks:
        """The same chunks with student and teacher exchanged; byte spans stay."""
        return Chunks(
            self.teacher_start,
            self.teacher_end,
            self.student_start,
            self.student_end,
            self.byte_start,
            self.byte_end,
            self.exact,
            self.role,
            self.same_text,
        )

    @classmethod
    def in_order(cls, parts: Sequence[Chunks]) -> Chunks:
        """Chunks of several lists, one list after another."""
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return cls(none, none, none, none, none, none, *(none.astype(bool) for _ in range(3)))
        if len(parts) == 1:
            return parts[0]
        # as two tables: there are many small parts, and every call into numpy costs as much as one of them
        spans = np.concatenate([np.array([getattr(p, name) for name in _SPAN_FIELDS]) for p in parts], axis=1)
        flags = np.concatenate([np.array([p.exact, p.role, p.same_text]) for p in parts], axis=1)
        return cls(*spans, *flags)

    @classmethod
    def concatenate(cls, parts: Sequence[Chunks]) -> Chunks:
        """Chunks of several stretches as one list, ordered by student token."""
        chunks = cls.in_order(parts)
        return chunks if len(parts) < 2 else chunks.select(np.argsort(chunks.student_start, kind="stable"))


def shared_boundaries(student_edges: IntArray, teacher_edges: IntArray) -> tuple[IntArray, IntArray]:
    """Where the offsets that occur in both non-decreasing lists stand in each of them; the last position of repeats."""
    if not len(student_edges) or not len(teacher_edges):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    low = int(min(student_edges[0], teacher_edges[0]))
    high = int(max(student_edges[-1], teacher_edges[-1]))
    # a table over the bytes: linear, where an intersection of two lists would sort them
    mark = np.zeros(high - low + 1, dtype=np.uint8)
    mark[student_edges - low] = 1
    mark[teacher_edges - low] |= 2
    shared = mark == 3
    return _last_positions(student_edges, shared, low), _last_positions(teacher_edges, shared, low)


def _last_positions(edges: IntArray, shared: BoolArray, low: int) -> IntArray:
    last = np.ones(len(edges), dtype=bool)
    np.not_equal(edges[1:], edges[:-1], out=last[:-1])
    last &= shared[edges - low]
    return np.flatnonzero(last)


def all_within(flag: BoolArray, start: IntArray, end: IntArray) -> BoolArray:
    """Whether ``flag`` holds for all tokens of each half-open span."""
    if flag.all():
        return np.ones(len(start), dtype=bool)
    misses = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(~flag)])
    return np.asarray(misses[start] == misses[end])


def chunk_stretch(
    student_ends: IntArray,
    teacher_ends: IntArray,
    student_exact: BoolArray,
    teacher_exact: BoolArray,
    *,
    student_begin: int = 0,
    teacher_begin: int = 0,
) -> Chunks:
    """Chunks of one stretch of text that both sides cut.

    Args:
        student_ends: ``[n]`` byte end of each student token, in coordinates common to both sides.
        teacher_ends: ``[m]`` likewise.
        student_exact: ``[n]`` whether a token's bytes are the text's.
        teacher_exact: ``[m]`` likewise.
        student_begin: byte at which the first student token begins; ``teacher_begin`` likewise.

    Returns:
        Chunks with token indices relative to the stretch. Tokens before the first or after the last shared boundary
        are in no chunk.
    """
    edges = np.concatenate([[student_begin], student_ends])
    # An edge's position counts the tokens that end at or before it; tokens that share an end stay together.
    s_at, t_at = shared_boundaries(edges, np.concatenate([[teacher_begin], teacher_ends]))
    shared = edges[s_at]
    s_start, s_end, t_start, t_end = s_at[:-1], s_at[1:], t_at[:-1], t_at[1:]
    exact = all_within(student_exact, s_start, s_end) & all_within(teacher_exact, t_start, t_end)
    none = np.zeros(len(exact), dtype=bool)
    return Chunks(s_start, s_end, t_start, t_end, shared[:-1], shared[1:], exact, none, exact)


def role_pairs(student_at: IntArray, teacher_at: IntArray, byte_at: IntArray) -> Chunks:
    """Chunks for special tokens of one role at one byte; always 1:1 and without bytes."""
    true = np.ones(len(student_at), dtype=bool)
    return Chunks(student_at, student_at + 1, teacher_at, teacher_at + 1, byte_at, byte_at, true, true, true)


def last_fitting(chunks: Chunks, student_length: int, teacher_length: int) -> int:
    """Number of leading chunks that end within both lengths."""
    fits = (chunks.student_end <= student_length) & (chunks.teacher_end <= teacher_length)
    # argmin finds the first that does not fit, but says 0 where all do
    return len(fits) if fits.all() else int(np.argmin(fits))
