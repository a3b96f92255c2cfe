"""Prefixes that two vocabularies share in bytes: which token of one begins a token of the other, and which tokens go on
with given bytes. Sorted by their bytes, tokens that begin alike follow each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class SortedTokens:
    """The tokens of a vocabulary that have bytes, in the order of their bytes.

    Attributes:
        ids: int64 [n]; their ids.
        data: their bytes, ascending.
        id_of: bytes -> the lowest id that stands for them.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        # ids break ties, so that `id_of` keeps the lowest of equal bytes
        order = sorted((i for i, data in enumerate(token_bytes) if data), key=lambda i: (token_bytes[i], i))
        self.ids: IntArray = np.array(order, np.int64)
        self.data = [token_bytes[i] for i in order]
        self.id_of: dict[bytes, int] = {}
        for i, data in zip(order, self.data, strict=True):
            self.id_of.setdefault(data, i)
        self.longest = max(map(len, self.data), default=0)

    def going_on(self, prefix: bytes) -> tuple[int, int]:
        """Half-open range of the tokens whose bytes begin with `prefix`."""
        # no token that begins with `prefix` sorts behind this
        last = prefix + b"\xff" * max(self.longest - len(prefix), 0)
        return bisect_left(self.data, prefix), bisect_right(self.data, last)

    def beginning(self, data: bytes) -> int:
        """The longest token that `data` begins with, -1 where there is none."""
        for size in range(min(len(data), self.longest), 0, -1):
            if (token_id := self.id_of.get(data[:size], -1)) >= 0:
                return token_id
        return -1


@dataclass(frozen=True, eq=False)
class Completions:
    """Continuations of a student token inside teacher tokens that the student lacks.

    Events are groups of teacher tokens without an equal in the student's vocabulary, of which one begins all others;
    `group` int64 [V_t] numbers them, -1 elsewhere. Behind student token a, the entries `start[a] : stop[a]` name the
    groups whose shortest token goes on from a's bytes (`event`) and the range `first : last` of the student's sorted
    tokens that begin with what is left of it; groups without such a token are left out.
    """

    num_groups: int
    group: IntArray
    start: IntArray
    stop: IntArray
    event: IntArray
    first: IntArray
    last: IntArray


class BytePrefixes:
    """Prefix tables of a student's and a teacher's tokens.

    student_bytes, teacher_bytes: bytes of each id, empty for special tokens and ids without a token; partners: teacher
    id -> student id of special tokens that stand for each other.
    """

    def __init__(
        self, student_bytes: Sequence[bytes], teacher_bytes: Sequence[bytes], partners: Mapping[int, int]
    ) -> None:
        self.student_bytes, self.teacher_bytes = student_bytes, teacher_bytes
        self.student, self.teacher = SortedTokens(student_bytes), SortedTokens(teacher_bytes)
        self._partners = partners

    @cached_property
    def head(self) -> IntArray:
        """[V_t]; the longest student token that each teacher token begins with, the partner of a special one; -1 where
        there is none."""
        out = np.full(len(self.teacher_bytes), -1, np.int64)
        for i, data in zip(self.teacher.ids, self.teacher.data, strict=True):
            out[i] = self.student.beginning(data)
        for teacher, student in self._partners.items():
            if not self.teacher_bytes[teacher]:
                out[teacher] = student
        return out

    @cached_property
    def completions(self) -> Completions:
        group = np.full(len(self.teacher_bytes), -1, np.int64)
        shortest: list[bytes] = []
        for i, data in zip(self.teacher.ids, self.teacher.data, strict=True):
            if data in self.student.id_of:
                continue
            # in byte order all that a token begins follow it directly, so the last one is the only candidate
            if not shortest or not data.startswith(shortest[-1]):
                shortest.append(data)
            group[i] = len(shortest) - 1
        rows: list[tuple[int, int, int, int]] = []
        for number, data in enumerate(shortest):
            for size in range(1, len(data)):
                token = self.student.id_of.get(data[:size])
                first, last = self.student.going_on(data[size:]) if token is not None else (0, 0)
                if token is not None and first < last:
                    rows.append((token, number, first, last))
        entries = np.array(sorted(rows), np.int64).reshape(-1, 4)
        first_id = np.full(len(self.student_bytes), -1, np.int64)
        for i, data in zip(self.student.ids, self.student.data, strict=True):
            # entries are listed under the lowest id of equal bytes; the others share them
            first_id[i] = self.student.id_of[data]
        start, stop = (np.searchsorted(entries[:, 0], first_id, side=side) for side in ("left", "right"))
        return Completions(len(shortest), group, start, stop, entries[:, 1], entries[:, 2], entries[:, 3])
