"""Share of tokens that two vocabularies have in common, by class of token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.projection.counted import PairCounter
from limbeck.projection.matrix import Projection
from limbeck.projection.rules import refuse_empty_overlap
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import SCRIPTS, SPELLING_CLASSES, script_of, token_class
from limbeck.tokens.vocab import quoted

CLASSES = SPELLING_CLASSES

# Below this share of the teacher within reach, a loss that drops the rest is no longer the one to use.
REACHED = 0.9


@dataclass(frozen=True)
class ClassCoverage:
    """Distinct byte strings of one class in the student's vocabulary, and how many of them are teacher tokens.

    `corpus_tokens` and `corpus_exact` count occurrences in a corpus, where one was given.
    """

    total: int
    exact: int
    corpus_tokens: int | None = None
    corpus_exact: int | None = None

    @property
    def share(self) -> float:
        """Exact share of the byte strings; 1.0 for an empty class, which lacks nothing."""
        return self.exact / self.total if self.total else 1.0

    @property
    def corpus_share(self) -> float | None:
        """Exact share of the occurrences in the corpus."""
        if self.corpus_tokens is None or self.corpus_exact is None:
            return None
        return self.corpus_exact / self.corpus_tokens if self.corpus_tokens else 1.0


@dataclass(frozen=True)
class Example:
    """One row of W in readable form."""

    token: str
    token_class: str
    exact: bool
    pieces: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Audit:
    """Findings of `audit_projection`.

    Attributes:
        overlap: shared byte strings / byte strings of the smaller vocabulary.
        exact_tokens: student byte strings that are teacher tokens; `exact_share` is their share.
        classes: coverage by class of token, in the order of `CLASSES`, then "other".
        corpus_share: share of a corpus's student tokens that are exact; None without a corpus.
        same_vocabulary: whether both tokenizers are the same, so that no projection is needed.
    """

    student_tokens: int
    teacher_tokens: int
    overlap: float
    exact_tokens: int
    exact_share: float
    unmapped_tokens: int
    classes: Mapping[str, ClassCoverage]
    corpus_share: float | None
    same_vocabulary: bool
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        classes: dict[str, dict[str, int]] = {}
        for name, coverage in self.classes.items():
            classes[name] = {"total": coverage.total, "exact": coverage.exact}
            if coverage.corpus_tokens is not None and coverage.corpus_exact is not None:
                classes[name] |= {"corpus_tokens": coverage.corpus_tokens, "corpus_exact": coverage.corpus_exact}
        return {
            "student_tokens": self.student_tokens,
            "teacher_tokens": self.teacher_tokens,
            "overlap": self.overlap,
            "exact_tokens": self.exact_tokens,
            "exact_share": self.exact_share,
            "unmapped_tokens": self.unmapped_tokens,
            "corpus_share": self.corpus_share,
            "classes": classes,
            "same_vocabulary": self.same_vocabulary,
            "examples": [
                {"token": e.token, "class": e.token_class, "exact": e.exact, "pieces": [list(p) for p in e.pieces]}
                for e in self.examples
            ],
        }


@dataclass(frozen=True)
class PairAudit:
    """Cells that both vocabularies can state, seen from both sides.

    Attributes:
        cells: parts of the two vocabularies that both can name, those that only one side has included.
        one_to_one_cells: share of them that hold one token of either side; largest_cell: tokens in the largest.
        teacher_reached_ids: teacher tokens that some student token maps to; `teacher_reached_share` is their share.
        teacher_reached_mass: their share of the teacher tokens at a corpus's shared boundaries. The rest of the
            teacher's mass leaves the target of losses on the projection.
        cell_agreement: share of the corpus's chunks whose first tokens lie in one cell.
        inner_student_on_tree, inner_teacher_on_tree: share of the tokens inside chunks that `tree_kl` compares on a
            tree. These and the ones above are None without a corpus, or where it has no such token.
        warning: what to do where much of the teacher is out of reach; None otherwise.
    """

    cells: int
    one_to_one_cells: float
    largest_cell: int
    teacher_reached_ids: int
    teacher_reached_share: float
    teacher_reached_mass: float | None
    cell_agreement: float | None
    inner_student_on_tree: float | None
    inner_teacher_on_tree: float | None
    warning: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return asdict(self)


def audit_pair(projection: Projection, teacher: ByteVocab, counter: PairCounter | None = None) -> PairAudit:
    """Measure what the student reaches of the teacher, and what cells and trees add to it.

    The projection must hold trees; counter: `count_pairs` over a corpus with the same trees.
    """
    trees = projection.trees
    if trees is None:
        raise ProjectionError("the projection holds no trees to audit; build it with `load_or_build(..., trees=True)`.")
    mine, theirs = trees.cell_sizes
    cells = trees.num_cells + int((trees.student_cell < 0).sum()) + int((trees.teacher_cell < 0).sum())
    reached = reached_ids(projection)
    text_ids = np.fromiter((bool(data) for data in teacher.token_bytes), dtype=bool, count=teacher.size)
    share = float(reached[text_ids].mean())
    mass = agreement = inner_student = inner_teacher = None
    if counter is not None:
        rows, columns, counts = counter.pairs()
        mass = _share(int(counts[reached[columns]].sum()), int(counts.sum()))
        same = trees.student_cell[rows] == trees.teacher_cell[columns]
        agreement = _share(int(counts[same].sum()), int(counts.sum()))
        # counted as (all, on a tree)
        inner_student = _share(*counter.inner_student[::-1])
        inner_teacher = _share(*counter.inner_teacher[::-1])
    return PairAudit(
        cells=cells,
        one_to_one_cells=float(((mine == 1) & (theirs == 1)).sum() / cells),
        largest_cell=int((mine + theirs).max(initial=0)),
        teacher_reached_ids=int(reached[text_ids].sum()),
        teacher_reached_share=share,
        teacher_reached_mass=mass,
        cell_agreement=agreement,
        inner_student_on_tree=inner_student,
        inner_teacher_on_tree=inner_teacher,
        warning=_reach_warning(share, mass),
    )


@dataclass(frozen=True)
class Group:
    """Tokens of one class or script on both sides, and their part in a corpus.

    Attributes:
        student_tokens, student_exact: student ids with bytes, and those whose bytes are a teacher token.
        teacher_tokens, teacher_reached: teacher ids with bytes, and those that some student token maps to.
        starts: chunks of the corpus whose first teacher token is of this group; None, as the following, without one.
        uncovered_by_projection: of them, those whose teacher token no student token maps to.
        uncovered_by_cells: those whose teacher token lies in no cell, so that `tree_kl` does not cover it.
        apart: those whose first tokens lie in different cells, so that the realised text has no common name.
    """

    student_tokens: int
    student_exact: int
    teacher_tokens: int
    teacher_reached: int
    starts: int | None = None
    uncovered_by_projection: int | None = None
    uncovered_by_cells: int | None = None
    apart: int | None = None


@dataclass(frozen=True)
class UncoveredToken:
    """A teacher token that losses on the projection do not cover (nor `tree_kl`, where it is `in_no_cell`), and how
    often a chunk of the corpus begins with it."""

    teacher_id: int
    token: str
    starts: int
    share: float
    in_no_cell: bool


@dataclass(frozen=True)
class Masses:
    """Where the teacher's mass goes, by class of token and by script.

    Attributes:
        basis: "tokens": shares are counted over the tokens of a corpus, which stand in for probabilities.
        classes, scripts: groups by name; a chunk counts with its first teacher token.
        uncovered_tokens: the tokens that carry most of what is not covered, most frequent first.
    """

    basis: str
    classes: Mapping[str, Group]
    scripts: Mapping[str, Group]
    uncovered_tokens: tuple[UncoveredToken, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON: `mass_basis`, `by_class`, `by_script` and `uncovered_tokens`."""
        plain = asdict(self)
        return {
            "mass_basis": plain["basis"],
            "by_class": plain["classes"],
            "by_script": plain["scripts"],
            "uncovered_tokens": list(plain["uncovered_tokens"]),
        }


def reached_ids(projection: Projection) -> npt.NDArray[np.bool_]:
    """[V_t]; teacher ids that some student token maps to."""
    reached = np.zeros(projection.teacher_size, dtype=bool)
    reached[projection.indices[projection.indices >= 0]] = True
    return reached


def audit_masses(
    projection: Projection, student: ByteVocab, teacher: ByteVocab, counter: PairCounter | None = None, most: int = 50
) -> Masses:
    """Part of the teacher's vocabulary within reach, by class and script; with a corpus, how much of its text that is.

    The projection must hold trees; counter: `count_pairs` over a corpus; most: how many uncovered tokens are listed.
    """
    trees = projection.trees
    if trees is None:
        raise ProjectionError("the projection holds no trees to audit; build it with `load_or_build(..., trees=True)`.")
    reached = reached_ids(projection)
    exact = np.fromiter((bool(b) and b in teacher.ids_by_bytes for b in student.token_bytes), bool, student.size)
    rows, columns, counts = counter.pairs() if counter is not None else (np.zeros(0, np.int64),) * 3
    apart = trees.student_cell[rows] != trees.teacher_cell[columns]
    in_no_cell = trees.teacher_cell < 0
    groups: list[dict[str, Group]] = []
    for names, of in (((*CLASSES, "other"), token_class), (SCRIPTS, script_of)):
        number = {name: i for i, name in enumerate(names)}
        mine, theirs = (
            np.fromiter((number[of(b)] if b else -1 for b in side.token_bytes), np.int64, side.size)
            for side in (student, teacher)
        )
        by_name = {}
        for name, i in number.items():
            here = theirs[columns] == i
            parts = {
                "starts": True,
                "uncovered_by_projection": ~reached[columns],
                "uncovered_by_cells": in_no_cell[columns],
                "apart": apart,
            }
            seen = {part: int(counts[here & which].sum()) for part, which in parts.items()}
            sizes = (mine == i).sum(), exact[mine == i].sum(), (theirs == i).sum(), reached[theirs == i].sum()
            group = Group(*map(int, sizes))
            if counter is not None:
                group = replace(group, **seen)
            if group.student_tokens or group.teacher_tokens:
                by_name[name] = group
        groups.append(by_name)
    # with weights, bincount counts in float64
    starts = np.bincount(columns, counts, projection.teacher_size).astype(np.int64)
    uncovered = np.flatnonzero((starts > 0) & (~reached | in_no_cell))
    listed = uncovered[np.argsort(-starts[uncovered], kind="stable")][:most].tolist()
    total = max(int(counts.sum()), 1)
    tokens = tuple(
        UncoveredToken(i, quoted(teacher.token_bytes[i]), int(starts[i]), int(starts[i]) / total, bool(in_no_cell[i]))
        for i in listed
    )
    return Masses("tokens", groups[0], groups[1], tokens)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _reach_warning(share: float, mass: float | None) -> str | None:
    reached = share if mass is None else mass
    if reached >= REACHED:
        return None
    what = "tokens" if mass is None else "tokens in the corpus"
    return (
        f"the student reaches {reached:.1%} of the teacher's {what}: losses on the projection (boundary_kl and others) "
        "drop the rest of its distribution; use mode tree_kl, which compares cells of tokens."
    )


def audit_projection(
    projection: Projection,
    student: ByteVocab,
    teacher: ByteVocab,
    *,
    corpus_tokens: npt.NDArray[np.int64] | None = None,
) -> Audit:
    """Measure what the vocabularies share.

    `corpus_tokens` [V_s]: how often each student token occurs in a corpus (`PairCounter.student_tokens`). Raises
    ProjectionError where the vocabularies share no byte string, or where the projection belongs to others.
    """
    projection.check_vocabularies(student, teacher)
    refuse_empty_overlap(student.ids_by_bytes, teacher.ids_by_bytes)
    if corpus_tokens is not None and corpus_tokens.shape != (student.size,):
        raise ProjectionError(
            f"corpus counts have shape {corpus_tokens.shape}, expected ({student.size},), one per id."
        )
    classes = class_coverage(student, teacher, corpus_tokens)
    tokens, teacher_tokens = len(student.ids_by_bytes), len(teacher.ids_by_bytes)
    exact = sum(coverage.exact for coverage in classes.values())
    text_ids = np.fromiter((bool(data) for data in student.token_bytes), dtype=bool, count=student.size)
    return Audit(
        student_tokens=tokens,
        teacher_tokens=teacher_tokens,
        overlap=exact / min(tokens, teacher_tokens),
        exact_tokens=exact,
        exact_share=exact / tokens,
        unmapped_tokens=int((text_ids & ~projection.mapped).sum()),
        classes=classes,
        corpus_share=_corpus_share(classes),
        same_vocabulary=student.same_tokens(teacher),
        examples=examples(projection, student, teacher),
    )


def class_coverage(
    student: ByteVocab, teacher: ByteVocab, corpus_tokens: npt.NDArray[np.int64] | None = None
) -> dict[str, ClassCoverage]:
    """Coverage of the student's distinct byte strings by the teacher's, by class."""
    names = (*CLASSES, "other")
    total, exact = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    seen, seen_exact = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    counts = [0] * student.size if corpus_tokens is None else corpus_tokens.tolist()
    for token_id, data in enumerate(student.token_bytes):
        if not data:
            continue
        name = token_class(data)
        is_exact = data in teacher.ids_by_bytes
        # ids of equal bytes are one string of the vocabulary, but each has its own occurrences in a corpus
        if student.ids_by_bytes[data] == token_id:
            total[name] += 1
            exact[name] += is_exact
        seen[name] += counts[token_id]
        seen_exact[name] += counts[token_id] * is_exact
    if corpus_tokens is None:
        return {name: ClassCoverage(total[name], exact[name]) for name in names}
    return {name: ClassCoverage(total[name], exact[name], seen[name], seen_exact[name]) for name in names}


def examples(projection: Projection, student: ByteVocab, teacher: ByteVocab, per_class: int = 2) -> tuple[Example, ...]:
    """A few rows of W: the first exact token of each class and the first ones that are not."""
    chosen: list[Example] = []
    room = {(name, kind): (1 if kind else per_class) for name in CLASSES for kind in (True, False)}
    left = sum(room.values())
    for token_id in np.flatnonzero(projection.mapped).tolist():
        data = student.token_bytes[token_id]
        key = (token_class(data), data in teacher.ids_by_bytes)
        if not data or not room.get(key):
            continue
        room[key] -= 1
        left -= 1
        filled = projection.indices[token_id] >= 0
        # not strict: weights of empty slots stand behind the filled ones
        pieces = zip(projection.indices[token_id][filled].tolist(), projection.weights[token_id].tolist(), strict=False)
        readable = tuple((quoted(teacher.token_bytes[piece]), round(weight, 4)) for piece, weight in pieces)
        chosen.append(Example(quoted(data), key[0], key[1], readable))
        if not left:
            break
    return tuple(sorted(chosen, key=lambda e: (CLASSES.index(e.token_class), not e.exact)))


def _corpus_share(classes: Mapping[str, ClassCoverage]) -> float | None:
    if any(coverage.corpus_tokens is None for coverage in classes.values()):
        return None
    occurrences = sum(coverage.corpus_tokens or 0 for coverage in classes.values())
    return sum(coverage.corpus_exact or 0 for coverage in classes.values()) / occurrences if occurrences else 0.0
