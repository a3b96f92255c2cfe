"""W from a corpus: which teacher token begins where a student token begins.

At a shared boundary both models have read the same text, and the next student token and the next teacher token begin at
the same byte. Counting such pairs estimates P(teacher token | student token); rare tokens lean on `rules`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from limbeck.align import Chunks, align_renderings
from limbeck.errors import DataError, ProjectionError
from limbeck.projection.matrix import Projection, from_triples
from limbeck.projection.trees import VocabTrees
from limbeck.tokens import Tokenizer
from limbeck.utils.jsonl import COMPRESSED, open_bytes, read_records

DEFAULT_K = 16
DEFAULT_SMOOTHING = 10.0
_BATCH_TEXTS = 32
_MERGE_KEYS = 1 << 20
_BLOCK_CHARS = 16_384

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class PairCounter:
    """Counts of (first student token, first teacher token) over the chunks of a stream of texts.

    Memory grows with the number of distinct pairs, not with the corpus.

    Attributes:
        student_tokens: int64 [V_s]; how often each student token occurs in the corpus.
        student_last, teacher_last: int64 [V_s], [V_t]; how many of the chunks each token stands before.
        inner_student, inner_teacher: tokens inside chunks (not the first of theirs), and how many of them lie on a
            tree; counted where `trees` are given.
        boundaries: chunks that were counted; `inexact`: chunks left out because a normaliser changed their bytes.
    """

    def __init__(self, student_tokenizer: object, teacher_tokenizer: object, trees: VocabTrees | None = None) -> None:
        self._trees = trees
        self.inner_student = self.inner_teacher = (0, 0)
        self._student = Tokenizer.of(student_tokenizer)
        self._teacher = Tokenizer.of(teacher_tokenizer)
        self.student, self.teacher = self._student.vocab, self._teacher.vocab
        self.shape = (self.student.size, self.teacher.size)
        self.student_tokens: IntArray = np.zeros(self.shape[0], dtype=np.int64)
        self.student_last, self.teacher_last = (np.zeros(size, dtype=np.int64) for size in self.shape)
        self.texts = self.bytes = self.boundaries = self.inexact = 0
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
            # before a text's first chunk stands nothing
            self.student_last += np.bincount(
                _before(student.ids, chunks.student_start[counted]), minlength=self.shape[0]
            )
            self.teacher_last += np.bincount(
                _before(teacher.ids, chunks.teacher_start[counted]), minlength=self.shape[1]
            )
            self.texts += 1
            self.bytes += len(student.source)
            if self._trees is not None:
                self._follow(self._trees, student.ids, teacher.ids, chunks, counted)
            self.boundaries += first_student.size
            self.inexact += int((~chunks.exact).sum())
            self._pending.append(first_student * self.shape[1] + first_teacher)
            self._pending_size += first_student.size
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
        np.add.at(counts, inverse, np.concatenate([self._counts, ones]))
        self._keys, self._counts = keys, counts
        self._pending, self._pending_size = [], 0


def _before(ids: IntArray, start: IntArray) -> IntArray:
    before: IntArray = ids[start[start > 0] - 1]
    return before


def count_pairs(
    student_tokenizer: object,
    teacher_tokenizer: object,
    texts: Iterable[str],
    *,
    trees: VocabTrees | None = None,
    progress: Callable[[int], None] | None = None,
) -> PairCounter:
    """Count first-token pairs over a stream of texts; `progress(bytes_read)` is called after each batch.

    trees: count what lies on them, too.
    """
    counter = PairCounter(student_tokenizer, teacher_tokenizer, trees)
    source = iter(texts)
    while batch := list(islice(source, _BATCH_TEXTS)):
        counter.add(batch)
        if progress is not None:
            progress(counter.bytes)
    return counter


def build_counted(
    counter: PairCounter, rules: Projection, *, k: int = DEFAULT_K, smoothing: float = DEFAULT_SMOOTHING
) -> Projection:
    """Turn counts into W, smoothed towards `rules`.

    W[s, t] = (count(s, t) + smoothing * rules[s, t]) / (count(s) + smoothing), then the k largest of a row, normalised.
    A token that the corpus does not hold keeps its row of `rules`.
    """
    if counter.shape != (rules.student_size, rules.teacher_size):
        raise ProjectionError(
            f"counts over {counter.shape} ids do not fit rules over {(rules.student_size, rules.teacher_size)} ids; "
            "build both from the same tokenizers."
        )
    rules.check_vocabularies(counter.student, counter.teacher)
    if not (np.isfinite(smoothing) and smoothing > 0):
        raise ProjectionError(f"smoothing={smoothing} is not usable: expected a positive pseudo-count, such as 10.")
    rows, columns, counts = counter.pairs()
    if not rows.size:
        raise ProjectionError(
            "the corpus holds no shared boundary of the two tokenizers; give a corpus with text in it."
        )
    rule_rows, slots = np.nonzero(rules.indices >= 0)
    indices, weights = from_triples(
        np.concatenate([rows, rule_rows]),
        np.concatenate([columns, rules.indices[rule_rows, slots].astype(np.int64)]),
        np.concatenate([counts.astype(np.float64), smoothing * rules.weights[rule_rows, slots].astype(np.float64)]),
        shape=counter.shape,
        k=k,
    )
    return Projection(
        indices=indices,
        weights=weights,
        exact=rules.exact.copy(),
        teacher_size=rules.teacher_size,
        student_fingerprint=rules.student_fingerprint,
        teacher_fingerprint=rules.teacher_fingerprint,
        rule="counted",
        token_bytes=rules.token_bytes,
        details={
            "smoothed_towards": rules.rule,
            "smoothing": repr(float(smoothing)),
            "corpus_bytes": str(counter.bytes),
            "boundaries": str(counter.boundaries),
            "inexact_chunks_left_out": str(counter.inexact),
        },
    )


# -- texts of corpus files ---------------------------------------------------------------------------------------------


def iter_texts(paths: Iterable[str | Path], *, block_chars: int = _BLOCK_CHARS) -> Iterator[str]:
    """Texts of corpus files, in order, with memory bounded by one record.

    A `.jsonl` file gives the `text` (or the messages' `content`) of each line; any other file is read as UTF-8 text in
    blocks of whole lines. Both may be packed (`.jsonl.gz`, `.txt.zst`, ...).
    """
    for name in paths:
        path = Path(name)
        if not path.is_file():
            raise DataError(f"there is no corpus file {path}; give text or .jsonl files.")
        plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
        yield from _jsonl_texts(path) if plain.suffix == ".jsonl" else _text_blocks(path, block_chars)


def _text_blocks(path: Path, block_chars: int) -> Iterator[str]:
    lines: list[str] = []
    length = 0
    try:
        with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as stream:
            while line := stream.readline(block_chars):
                lines.append(line)
                length += len(line)
                if length >= block_chars:
                    yield "".join(lines)
                    lines, length = [], 0
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); convert it or leave it out.") from None
    if lines:
        yield "".join(lines)


def _jsonl_texts(path: Path) -> Iterator[str]:
    for line, record in read_records(path):
        yield from _record_texts(record, f"{path}:{line}")


def _record_texts(record: object, where: str) -> list[str]:
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return [record["text"]]
        messages = record.get("messages")
        if isinstance(messages, list):
            return [m["content"] for m in messages if isinstance(m, dict) and isinstance(m.get("content"), str)]
    raise DataError(f"{where} has neither `text` nor `messages`; expected one of them in every record.")
