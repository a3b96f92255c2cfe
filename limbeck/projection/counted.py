"""A corpus seen through two tokenizers: which teacher token begins where a student token begins, and how often."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from limbeck.align import Chunks, align_renderings
from limbeck.projection.trees import VocabTrees
from limbeck.tokens import ByteTokenizer

_BATCH_TEXTS = 32
_MERGE_KEYS = 1 << 20

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class PairCounter:
    """Counts of (first student token, first teacher token) over the chunks of a stream of texts.

    Memory grows with the number of distinct pairs, not with the corpus.

    Attributes:
        student_tokens: int64 [V_s]; how often each student token occurs in the corpus.
        inner_student, inner_teacher: tokens inside chunks (not the first of theirs), and how many of them lie on a
            tree; counted where `trees` are given.
        boundaries: chunks that were counted; `inexact`: chunks left out because a normaliser changed their bytes.
    """

    def __init__(self, student_tokenizer: object, teacher_tokenizer: object, trees: VocabTrees | None = None) -> None:
        self._trees = trees
        self.inner_student = self.inner_teacher = (0, 0)
        self._student = ByteTokenizer.of(student_tokenizer)
        self._teacher = ByteTokenizer.of(teacher_tokenizer)
        self.student, self.teacher = self._student.vocab, self._teacher.vocab
        self.shape = (self.student.size, self.teacher.size)
        self.student_tokens: IntArray = np.zeros(self.shape[0], dtype=np.int64)
        self.boundaries = self.inexact = 0
        self._keys: IntArray = np.zeros(0, dtype=np.int64)
        self._counts: IntArray = np.zeros(0, dtype=np.int64)
        self._pending: list[IntArray] = []
        self._pending_size = 0

    def add(self, texts: list[str]) -> None:
        """Count the pairs of some texts."""
        students, teachers = self._student.encode_batch(texts), self._teacher.encode_batch(texts)
        for student, teacher in zip(students, teachers, strict=True):
            chunks = align_renderings(student, teacher)
            counted = chunks.exact & ~chunks.role
            first_student = student.ids[chunks.student_start[counted]]
            first_teacher = teacher.ids[chunks.teacher_start[counted]]
            self.student_tokens += np.bincount(student.ids, minlength=self.shape[0])
            if self._trees is not None:
                self._follow(self._trees, student.ids, teacher.ids, chunks, counted)
            self.boundaries += first_student.size
            self.inexact += int((~chunks.exact).sum())
            self._pending.append(first_student * self.shape[1] + first_teacher)
            self._pending_size += first_student.size
        # merged as they come in: memory must not grow with the corpus
        if self._pending_size >= _MERGE_KEYS:
            self._merge()

    def _follow(
        self, trees: VocabTrees, student_ids: IntArray, teacher_ids: IntArray, chunks: Chunks, counted: BoolArray
    ) -> None:
        students = chunks.student_start[counted], chunks.student_end[counted]
        teachers = chunks.teacher_start[counted], chunks.teacher_end[counted]
        mine = trees.student_tree.followed(student_ids, *students, teacher_ids[teachers[0]])
        theirs = trees.teacher_tree.followed(teacher_ids, *teachers, student_ids[students[0]])
        self.inner_student = self.inner_student[0] + mine[0], self.inner_student[1] + mine[1]
        self.inner_teacher = self.inner_teacher[0] + theirs[0], self.inner_teacher[1] + theirs[1]

    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Student ids, teacher ids and counts of all pairs seen (each int64 [P], sorted by student then teacher)."""
        self._merge()
        rows, columns = np.divmod(self._keys, self.shape[1])
        return rows, columns, self._counts

    def _merge(self) -> None:
        if not self._pending:
            return
        fresh = np.concatenate(self._pending)
        keys, inverse = np.unique(np.concatenate([self._keys, fresh]), return_inverse=True)
        ones = np.ones(fresh.size, dtype=np.int64)
        counts = np.zeros(keys.size, dtype=np.int64)
        # `+=` at an index that repeats would add once
        np.add.at(counts, inverse, np.concatenate([self._counts, ones]))
        self._keys, self._counts = keys, counts
        self._pending, self._pending_size = [], 0


def count_pairs(
    student_tokenizer: object,
    teacher_tokenizer: object,
    texts: Iterable[str],
    *,
    trees: VocabTrees | None = None,
) -> PairCounter:
    """Count first-token pairs over a stream of texts; ``trees``: count what lies on them, too."""
    counter = PairCounter(student_tokenizer, teacher_tokenizer, trees)
    source = iter(texts)
    while batch := list(islice(source, _BATCH_TEXTS)):
        counter.add(batch)
    return counter
