"""The projection W between two vocabularies: a sparse row-stochastic map, its file, and the views that losses need.

W has one row per student token and at most ``k`` entries per row. ``W[s, t]`` says how much of student token ``s``
counts as teacher token ``t``, so ``W^T p_S`` is the student's distribution written in the teacher's vocabulary. Nothing
here is ever dense in both vocabularies.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import is_zipfile

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.projection.trees import VocabTrees
from limbeck.utils.files import write_atomic

if TYPE_CHECKING:
    from limbeck.tokens import ByteVocab

FORMAT = "limbeck.projection"
VERSION = 1
MAX_WIDTH = 1024
MAX_VOCAB = 1 << 24
ROW_SUM_TOLERANCE = 1e-4

IntArray = npt.NDArray[np.int64]
_TENSORS = {"indices": "I32", "weights": "F32", "exact": "I32"}
_TREES = "trees."


class Pairs(NamedTuple):
    """Student and teacher ids that stand for each other, one to one, sorted by student id (both int64 [P])."""

    student_ids: IntArray
    teacher_ids: IntArray


class TeacherView(NamedTuple):
    """W grouped by teacher token: the entries of teacher id ``t`` are ``offsets[t] : offsets[t + 1]``."""

    offsets: IntArray  # [V_t + 1]
    student_ids: IntArray  # [nnz], ascending within a teacher id
    weights: npt.NDArray[np.float32]  # [nnz]


class Columns(NamedTuple):
    """The entries of chosen teacher columns, flat, ready for `index_add(1, column, p[:, student_ids] * weights)`."""

    student_ids: IntArray  # [nnz]
    column: IntArray  # [nnz], position in the list of teacher ids that was asked for
    weights: npt.NDArray[np.float32]  # [nnz]


@dataclass(frozen=True, eq=False)
class Projection:
    """A sparse map from a student vocabulary onto a teacher vocabulary; checked when made, immutable afterwards.

    Attributes:
        indices: int32 [V_s, k]; teacher ids, largest weight first, -1 where a row has fewer than k entries.
        weights: float32 [V_s, k]; each row sums to 1, or is all zero for a student token without a mapping.
        exact: int32 [V_s]; the teacher token with the same bytes (or, for special tokens, the same role), else -1. One
            to one: of several student tokens with the same bytes, only the one that its tokenizer writes is listed.
        teacher_size: number of teacher ids, V_t.
        student_fingerprint, teacher_fingerprint: fingerprints of the two tokenizers.
        rule: how the weights were made ("rules", "rules+reverse", "counted", "converted").
        details: further facts about the making, text to text; stored in the file's header.
        trees: cells and trees of the two vocabularies, where they have been built.
        token_bytes: bytes of every student id and every teacher id, empty for special ones, where the tokenizers are at
            hand; not stored.
    """

    indices: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    exact: npt.NDArray[np.int32]
    teacher_size: int
    student_fingerprint: str
    teacher_fingerprint: str
    rule: str
    details: Mapping[str, str] = field(default_factory=dict)
    trees: VocabTrees | None = None
    token_bytes: tuple[tuple[bytes, ...], tuple[bytes, ...]] | None = None

    def __post_init__(self) -> None:
        _check_layout(self)
        _check_entries(self)
        _check_exact(self)
        sizes = self.student_size, self.teacher_size
        if self.trees is not None and (self.trees.student_cell.size, self.trees.teacher_cell.size) != sizes:
            raise ProjectionError(f"the trees are not those of vocabularies of {sizes[0]} and {sizes[1]} ids")
        # views of them are computed once; a write would leave those behind
        for array in (self.indices, self.weights, self.exact):
            array.setflags(write=False)

    @property
    def student_size(self) -> int:
        """Number of student ids, V_s."""
        return int(self.indices.shape[0])

    @property
    def k(self) -> int:
        """Entries that a row can hold."""
        return int(self.indices.shape[1])

    @property
    def mapped(self) -> npt.NDArray[np.bool_]:
        """bool [V_s]: rows with a mapping; the mass of the others belongs to a loss's rest bucket."""
        return np.asarray(self.indices[:, 0] >= 0)

    def exact_pairs(self) -> Pairs:
        """Pairs with equal bytes or equal role: the common set of the `gold` loss."""
        student_ids = np.flatnonzero(self.exact >= 0)
        return Pairs(student_ids.astype(np.int64), self.exact[student_ids].astype(np.int64))

    @cached_property
    def _teacher_view(self) -> TeacherView:
        rows, slots = np.nonzero(self.indices >= 0)
        teachers = self.indices[rows, slots]
        order = np.lexsort((rows, teachers))
        offsets = np.zeros(self.teacher_size + 1, dtype=np.int64)
        np.cumsum(np.bincount(teachers, minlength=self.teacher_size), out=offsets[1:])
        return TeacherView(offsets, rows[order].astype(np.int64), self.weights[rows, slots][order])

    def by_teacher(self) -> TeacherView:
        """W transposed, as offsets into flat lists (the form for gathers at a teacher's ids); computed once."""
        return self._teacher_view

    def columns(self, teacher_ids: npt.ArrayLike) -> Columns:
        """Entries of the columns `teacher_ids` [K], for the student's mass at a teacher's top-k ids.

        >>> c = projection.columns([17, 4])                                   # doctest: +SKIP
        >>> q = np.zeros(2); np.add.at(q, c.column, p[c.student_ids] * c.weights)   # doctest: +SKIP
        """
        wanted = np.asarray(teacher_ids, dtype=np.int64).reshape(-1)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.teacher_size):
            bad = wanted[(wanted < 0) | (wanted >= self.teacher_size)][0]
            raise ProjectionError(
                f"teacher id {bad} is outside the projection's teacher vocabulary of {self.teacher_size} ids; "
                "use the projection built for this teacher's tokenizer."
            )
        view = self.by_teacher()
        starts = view.offsets[wanted]
        counts = view.offsets[wanted + 1] - starts
        column = np.repeat(np.arange(wanted.size, dtype=np.int64), counts)
        within = np.arange(column.size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        entry = within + np.repeat(starts, counts)
        return Columns(view.student_ids[entry], column, view.weights[entry])

    def check_vocabularies(self, student: ByteVocab | None = None, teacher: ByteVocab | None = None) -> None:
        """Raise ProjectionError unless the given vocabularies are the ones this projection was built for."""
        for side, vocab, fingerprint, size in (
            ("student", student, self.student_fingerprint, self.student_size),
            ("teacher", teacher, self.teacher_fingerprint, self.teacher_size),
        ):
            if vocab is not None and (vocab.fingerprint != fingerprint or vocab.size != size):
                raise ProjectionError(
                    f"the projection belongs to another {side} tokenizer (fingerprint {fingerprint[:12]}, {size} ids; "
                    f"this {side}: {vocab.fingerprint[:12]}, {vocab.size} ids); build it anew with `limbeck project`."
                )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path` (safetensors) in one step: a reader sees the old file or the whole new one."""
        from safetensors.numpy import save as to_bytes

        header = {
            "format": FORMAT,
            "version": str(VERSION),
            "rule": self.rule,
            "k": str(self.k),
            "student_size": str(self.student_size),
            "teacher_size": str(self.teacher_size),
            "student_fingerprint": self.student_fingerprint,
            "teacher_fingerprint": self.teacher_fingerprint,
            "details": json.dumps(dict(self.details), sort_keys=True),
        }
        tensors: dict[str, npt.NDArray[Any]] = {"indices": self.indices, "weights": self.weights, "exact": self.exact}
        if self.trees is not None:
            tensors |= {_TREES + name: array for name, array in self.trees.tensors().items()}
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        data = to_bytes(tensors, metadata={**header, "checksum": _checksum(header, tensors)})
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, data)
        return target

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], student: ByteVocab | None = None, teacher: ByteVocab | None = None
    ) -> Projection:
        """Read and check a stored projection; with `student` or `teacher`, check that it was built for them."""
        target = Path(path)
        if not target.is_file():
            raise ProjectionError(f"there is no projection at {target}; build one with `limbeck project -o {target}`.")
        header, tensors = _read(target)
        checksum = header.pop("checksum", None)
        # files of earlier versions have none
        if checksum is not None and checksum != _checksum(header, tensors):
            raise ProjectionError(
                f"{target}: the contents do not fit their checksum; the file is damaged: build it anew."
            )
        trees = {name.removeprefix(_TREES): array for name, array in tensors.items() if name.startswith(_TREES)}
        try:
            projection = cls(
                indices=tensors["indices"],
                weights=tensors["weights"],
                exact=tensors["exact"],
                teacher_size=_header_int(header, "teacher_size"),
                student_fingerprint=header["student_fingerprint"],
                teacher_fingerprint=header["teacher_fingerprint"],
                rule=header["rule"],
                details=_header_details(header),
                trees=VocabTrees.from_tensors(trees) if trees else None,
                token_bytes=None if student is None or teacher is None else (student.token_bytes, teacher.token_bytes),
            )
            for name, stored in (("student_size", projection.student_size), ("k", projection.k)):
                if _header_int(header, name) != stored:
                    raise ProjectionError(f"the header says {name}={header[name]}, the arrays say {stored}")
            projection.check_vocabularies(student, teacher)
        except ProjectionError as error:
            raise ProjectionError(f"{target}: {error}") from None
        return projection


def from_triples(
    rows: npt.ArrayLike,
    columns: npt.ArrayLike,
    weights: npt.ArrayLike,
    *,
    shape: tuple[int, int],
    k: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Rows of W from (student id, teacher id, weight) triples: equal pairs add up, the k largest stay, rows sum to 1.

    Equal weights in a row go to the lower teacher id. `shape` is (V_s, V_t). Returns indices int32 [V_s, k] and weights
    float32 [V_s, k].
    """
    if not 1 <= k <= MAX_WIDTH:
        raise ProjectionError(f"k={k} is not usable: a row holds 1 to {MAX_WIDTH} entries; the usual value is 4.")
    row_ids = np.asarray(rows, dtype=np.int64)
    column_ids = np.asarray(columns, dtype=np.int64)
    keys, inverse = np.unique(row_ids * shape[1] + column_ids, return_inverse=True)
    totals = np.bincount(inverse, weights=np.asarray(weights, dtype=np.float64), minlength=keys.size)
    keys, totals = keys[totals > 0], totals[totals > 0]
    row_ids, column_ids = np.divmod(keys, shape[1])
    # the last key counts first
    order = np.lexsort((column_ids, -totals, row_ids))
    row_ids, column_ids, totals = row_ids[order], column_ids[order], totals[order]
    slots = np.arange(row_ids.size) - np.searchsorted(row_ids, row_ids)
    kept = slots < k
    row_ids, column_ids, totals, slots = row_ids[kept], column_ids[kept], totals[kept], slots[kept]
    # after the cut to k, so that what stays sums to 1
    sums = np.bincount(row_ids, weights=totals, minlength=shape[0])
    out_indices = np.full((shape[0], k), -1, dtype=np.int32)
    out_weights = np.zeros((shape[0], k), dtype=np.float32)
    out_indices[row_ids, slots] = column_ids
    out_weights[row_ids, slots] = totals / sums[row_ids]
    return drop_vanished(out_indices, out_weights)


def drop_vanished(
    indices: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Mark entries whose weight rounds to zero in float32 as empty, in place."""
    indices[weights <= 0] = -1
    weights[indices < 0] = 0
    return indices, weights


def _read(target: Path) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """Header and arrays of a projection file; types and names are checked before any array is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(target), framework="numpy") as reader:
            header = reader.metadata() or {}
            _check_header(target, header)
            names = set(reader.keys())
            arrays = {name for name in names if not name.startswith(_TREES)}
            if arrays != set(_TENSORS):
                raise ProjectionError(f"{target}: holds the arrays {sorted(arrays)}, expected {sorted(_TENSORS)}.")
            for name in names:
                stored, expected = reader.get_slice(name).get_dtype(), _TENSORS.get(name, "I32")
                if stored != expected:
                    raise ProjectionError(f"{target}: `{name}` has dtype {stored}, expected {expected}; build it anew.")
            return header, {name: reader.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        if target.is_file() and is_zipfile(target):
            raise ProjectionError(
                f"{target} is no safetensors file but one that torch saved; a published matrix is converted by limbeck "
                f"project --student S --teacher T --convert {target} -o W.safetensors"
            ) from None
        raise ProjectionError(
            f"{target} is not a readable safetensors file ({error}); it may be truncated: build it anew."
        ) from None


def _checksum(header: Mapping[str, str], tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """Checksum of everything that a file says: one flipped bit can leave a matrix that is as valid as the right one."""
    digest = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _check_header(target: Path, header: Mapping[str, str]) -> None:
    if header.get("format") != FORMAT:
        raise ProjectionError(
            f"{target}: the header's format is {header.get('format')!r}, expected {FORMAT!r}; a published `.pt` matrix "
            "must be converted first, and any other file is no projection."
        )
    if header.get("version") != str(VERSION):
        raise ProjectionError(
            f"{target}: version {header.get('version')!r} of the format, expected {VERSION}; build it anew."
        )
    needed = ("rule", "k", "student_size", "teacher_size", "student_fingerprint", "teacher_fingerprint", "details")
    missing = [name for name in needed if name not in header]
    if missing:
        raise ProjectionError(f"{target}: the header lacks {', '.join(missing)}; build it anew.")


def _header_int(header: Mapping[str, str], name: str) -> int:
    text = header[name]
    # isdigit alone holds for `²`, which int() refuses, as it does thousands of digits
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ProjectionError(f"the header's {name} is {text[:40]!r}, expected a count")
    return int(text)


def _header_details(header: Mapping[str, str]) -> dict[str, str]:
    try:
        details = json.loads(header["details"])
    # deep nesting is a RecursionError
    except (json.JSONDecodeError, RecursionError):
        details = None
    if not isinstance(details, dict) or not all(isinstance(value, str) for value in details.values()):
        raise ProjectionError("the header's details are not a JSON object of texts")
    return details


def _check_layout(projection: Projection) -> None:
    indices, weights, exact = projection.indices, projection.weights, projection.exact
    for name, array, dtype in (
        ("indices", indices, np.int32),
        ("weights", weights, np.float32),
        ("exact", exact, np.int32),
    ):
        if array.dtype != dtype:
            raise ProjectionError(f"`{name}` has dtype {array.dtype}, expected {np.dtype(dtype).name}")
    if indices.ndim != 2 or indices.shape != weights.shape or exact.shape != indices.shape[:1]:
        raise ProjectionError(
            f"shapes do not fit: indices {indices.shape}, weights {weights.shape}, exact {exact.shape}; "
            "expected [V_s, k], [V_s, k], [V_s]"
        )
    if not 1 <= indices.shape[1] <= MAX_WIDTH:
        raise ProjectionError(f"k={indices.shape[1]} entries per row, expected 1 to {MAX_WIDTH}")
    if not (1 <= indices.shape[0] <= MAX_VOCAB and 1 <= projection.teacher_size <= MAX_VOCAB):
        raise ProjectionError(
            f"vocabulary sizes {indices.shape[0]} and {projection.teacher_size}, expected 1 to {MAX_VOCAB}"
        )


def _check_entries(projection: Projection) -> None:
    indices, weights = projection.indices, projection.weights
    _refuse_rows(~np.isfinite(weights), "has a weight that is NaN or infinite")
    _refuse_rows((weights < 0) | (weights > 1 + ROW_SUM_TOLERANCE), "has a weight outside 0..1")
    _refuse_rows(
        (indices < -1) | (indices >= projection.teacher_size),
        f"has a teacher id outside -1..{projection.teacher_size - 1}",
    )
    _refuse_rows((indices < 0) != (weights == 0), "has a weight without a teacher id, or a teacher id without a weight")
    _refuse_rows(np.diff(weights, axis=1) > 0, "is not sorted by falling weight")
    ordered = np.sort(indices, axis=1)
    _refuse_rows((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0), "names a teacher id twice")
    sums = weights.sum(axis=1, dtype=np.float64)
    _refuse_rows((np.abs(sums - 1) > ROW_SUM_TOLERANCE) & (sums != 0), "sums neither to 1 nor to 0")


def _check_exact(projection: Projection) -> None:
    exact = projection.exact
    _refuse_rows(
        (exact < -1) | (exact >= projection.teacher_size),
        f"has an exact teacher id outside -1..{projection.teacher_size - 1}",
    )
    paired = exact[exact >= 0]
    if paired.size and np.bincount(paired).max() > 1:
        raise ProjectionError(f"teacher id {np.bincount(paired).argmax()} is the exact partner of several student ids")


def _refuse_rows(bad: npt.NDArray[np.bool_], what: str) -> None:
    rows = np.flatnonzero(bad.any(axis=1) if bad.ndim == 2 else bad)
    if rows.size:
        raise ProjectionError(f"row {rows[0]} {what} ({rows.size} such rows)")
