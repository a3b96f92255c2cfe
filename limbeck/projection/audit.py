"""What two vocabularies have in common, by class of token, and which loss that suits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.projection.counted import PairCounter
from limbeck.projection.events import Conditions
from limbeck.projection.matrix import Projection
from limbeck.projection.rules import refuse_empty_overlap
from limbeck.projection.trees import VocabTrees
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import SCRIPTS, SPELLING_CLASSES, script_of, token_class
from limbeck.tokens.vocab import quoted

CLASSES = SPELLING_CLASSES

# Share of a class's tokens that must be exact for a loss on the common set. Numerals carry arithmetic and have no
# neighbours to stand in for them; of words and signs, the rare long ones may be missing.
CRITICAL: Mapping[str, float] = {
    "digits_1": 0.9,
    "digits_2": 0.9,
    "digits_3": 0.9,
    "punctuation": 0.5,
    "alphabetic": 0.5,
}
# With a corpus: a class with at least this share of its tokens must have half of its occurrences exact.
CORPUS_SHARE, CORPUS_EXACT = 0.01, 0.5
# Below this share of the teacher within reach, a loss that drops the rest is no longer the one to use.
REACHED = 0.9
DEFAULT_LOSS = "tree_kl"
SAME_VOCABULARY = "both sides have the same vocabulary, so losses compare token with token."


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
    """What `audit_projection` found.

    Attributes:
        overlap: shared byte strings / byte strings of the smaller vocabulary.
        exact_tokens: student byte strings that are teacher tokens; `exact_share` is their share.
        classes: coverage by class of token, in the order of `CLASSES`, then "other".
        corpus_share: share of a corpus's student tokens that are exact; None without a corpus.
        recommendation: of the published families of losses "P-KL" or "H-KL", whichever suits the pair, or "none" where
            both vocabularies are the same; `mode` names the loss to use, `reason` says why.
    """

    student_tokens: int
    teacher_tokens: int
    overlap: float
    exact_tokens: int
    exact_share: float
    unmapped_tokens: int
    classes: Mapping[str, ClassCoverage]
    corpus_share: float | None
    recommendation: str
    mode: str
    reason: str
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
            "recommendation": self.recommendation,
            "mode": self.mode,
            "reason": self.reason,
            "examples": [
                {"token": e.token, "class": e.token_class, "exact": e.exact, "pieces": [list(p) for p in e.pieces]}
                for e in self.examples
            ],
        }


@dataclass(frozen=True)
class PairAudit:
    """What both vocabularies can say, seen from both sides.

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
        unreached: of them, those whose teacher token no student token maps to: losses on the projection drop it.
        lost: those whose teacher token lies in no cell, so that `tree_kl` drops it.
        apart: those whose first tokens lie in different cells, so that the realised text has no common name.
        excluded: share of the group's mass on the teacher's side that `condition: cheap` leaves out, because the
            student's last token rules it out; the corpus's tokens stand in for probabilities.
    """

    student_tokens: int
    student_exact: int
    teacher_tokens: int
    teacher_reached: int
    starts: int | None = None
    unreached: int | None = None
    lost: int | None = None
    apart: int | None = None
    excluded: float | None = None


@dataclass(frozen=True)
class LostToken:
    """A teacher token out of reach of losses on the projection (and of `tree_kl`, where it is `lost`), and how often a
    chunk of the corpus begins with it."""

    teacher_id: int
    token: str
    starts: int
    share: float
    lost: bool


@dataclass(frozen=True)
class Masses:
    """Where the teacher's mass goes, by class of token and by script.

    Attributes:
        basis: "tokens": shares are counted over the tokens of a corpus, which stand in for probabilities.
        classes, scripts: groups by name; a chunk counts with its first teacher token.
        excluded_student, excluded_teacher: share of either side's mass that `condition: cheap` leaves out; None
            without a corpus. Measured behind the corpus's most frequent last tokens.
        lost_tokens: the tokens that carry most of what is out of reach, most frequent first.
    """

    basis: str
    classes: Mapping[str, Group]
    scripts: Mapping[str, Group]
    lost_tokens: tuple[LostToken, ...]
    excluded_student: float | None = None
    excluded_teacher: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON: `mass_basis`, `by_class`, `by_script`, `lost_tokens` and the excluded masses."""
        plain = asdict(self)
        return {
            "mass_basis": plain["basis"],
            "by_class": plain["classes"],
            "by_script": plain["scripts"],
            "lost_tokens": list(plain["lost_tokens"]),
            "excluded_mass_student": plain["excluded_student"],
            "excluded_mass_teacher": plain["excluded_teacher"],
        }


def reached_ids(projection: Projection) -> npt.NDArray[np.bool_]:
    """[V_t]; teacher ids that some student token maps to."""
    reached = np.zeros(projection.teacher_size, dtype=bool)
    reached[projection.indices[projection.indices >= 0]] = True
    return reached


def audit_masses(
    projection: Projection, student: ByteVocab, teacher: ByteVocab, counter: PairCounter | None = None, most: int = 50
) -> Masses:
    """What of the teacher is within reach, by class and script; with a corpus, how much of its text that is.

    The projection must hold trees; counter: `count_pairs` over a corpus; most: how many lost tokens are listed.
    """
    trees = projection.trees
    if trees is None:
        raise ProjectionError("the projection holds no trees to audit; build it with `load_or_build(..., trees=True)`.")
    reached = reached_ids(projection)
    exact = np.fromiter((bool(b) and b in teacher.ids_by_bytes for b in student.token_bytes), bool, student.size)
    rows, columns, counts = counter.pairs() if counter is not None else (np.zeros(0, np.int64),) * 3
    apart = trees.student_cell[rows] != trees.teacher_cell[columns]
    lost = trees.teacher_cell < 0
    left_out = _excluded(trees, counter) if counter is not None else None
    share_t = _shares(columns, counts, projection.teacher_size)
    groups: list[dict[str, Group]] = []
    for names, of in (((*CLASSES, "other"), token_class), (SCRIPTS, script_of)):
        number = {name: i for i, name in enumerate(names)}
        mine, theirs = (
            np.fromiter((number[of(b)] if b else -1 for b in side.token_bytes), np.int64, side.size)
            for side in (student, teacher)
        )
        found = {}
        for name, i in number.items():
            here = theirs[columns] == i
            parts = {"starts": True, "unreached": ~reached[columns], "lost": lost[columns], "apart": apart}
            seen = {part: int(counts[here & which].sum()) for part, which in parts.items()}
            sizes = (mine == i).sum(), exact[mine == i].sum(), (theirs == i).sum(), reached[theirs == i].sum()
            group = Group(*map(int, sizes))
            if left_out is not None:
                excluded = _part(left_out[1][theirs == i], share_t[theirs == i])
                group = replace(group, **seen, excluded=excluded)
            if group.student_tokens or group.teacher_tokens:
                found[name] = group
        groups.append(found)
    starts = np.bincount(columns, counts, projection.teacher_size).astype(np.int64)
    out_of_reach = np.flatnonzero((starts > 0) & (~reached | lost))
    listed = out_of_reach[np.argsort(-starts[out_of_reach], kind="stable")][:most].tolist()
    total = max(int(counts.sum()), 1)
    tokens = tuple(
        LostToken(i, quoted(teacher.token_bytes[i]), int(starts[i]), int(starts[i]) / total, bool(lost[i]))
        for i in listed
    )
    totals = (None, None) if left_out is None else (float(left_out[0].sum()), float(left_out[1].sum()))
    return Masses("tokens", groups[0], groups[1], tokens, *totals)


_LAST_TOKENS = 400
"""So many of the most frequent last tokens are looked at, and as many of the others stand for all of those."""
FloatArray = npt.NDArray[np.float64]


def _shares(ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], size: int) -> FloatArray:
    total = np.bincount(ids, counts, size)
    shares: FloatArray = total / max(total.sum(), 1)
    return shares


def _part(part: FloatArray, whole: FloatArray) -> float | None:
    return float(part.sum() / whole.sum()) if whole.sum() else None


def _excluded(trees: VocabTrees, counter: PairCounter) -> tuple[FloatArray, FloatArray]:
    """[V_s], [V_t]: mass of each token that the other side's last token rules out, in the cheap form, with the shares
    of first tokens as both models' distribution everywhere."""
    rows, columns, counts = counter.pairs()
    known = Conditions(trees, exact=False)
    out = []
    for ids, size, tables, last in (
        (rows, counter.shape[0], known.teacher, counter.teacher_last),
        (columns, counter.shape[1], known.student, counter.student_last),
    ):
        share, barred = _shares(ids, counts, size), np.zeros(size)
        by_count = np.argsort(-last, kind="stable")[: np.count_nonzero(last)]
        total = max(int(last.sum()), 1)
        for tokens in (by_count[:_LAST_TOKENS], by_count[_LAST_TOKENS:]):
            # evenly over the sorted counts: every range of frequencies is there, whatever the text
            drawn = tokens[np.linspace(0, tokens.size - 1, min(tokens.size, _LAST_TOKENS)).round().astype(np.int64)]
            scale = last[tokens].sum() / max(int(last[drawn].sum()), 1) / total
            for token in drawn.tolist():
                barred[tables[token]] += last[token] * scale
        out.append(share * barred)
    return out[0], out[1]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _reach_warning(share: float, mass: float | None) -> str | None:
    found = share if mass is None else mass
    if found >= REACHED:
        return None
    what = "tokens" if mass is None else "tokens in the corpus"
    return (
        f"the student reaches {found:.1%} of the teacher's {what}: losses on the projection (boundary_kl and others) "
        "drop the rest of its distribution; use mode tree_kl, which compares cells of tokens."
    )


def audit_projection(
    projection: Projection,
    student: ByteVocab,
    teacher: ByteVocab,
    *,
    corpus_tokens: npt.NDArray[np.int64] | None = None,
) -> Audit:
    """Measure what the vocabularies share and recommend a family of losses.

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
    recommendation, mode, reason = recommend(classes)
    if student.fingerprint == teacher.fingerprint:
        recommendation, reason = "none", SAME_VOCABULARY
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
        recommendation=recommendation,
        mode=mode,
        reason=reason,
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
        if student.ids_by_bytes[data] == token_id:
            total[name] += 1
            exact[name] += is_exact
        seen[name] += counts[token_id]
        seen_exact[name] += counts[token_id] * is_exact
    if corpus_tokens is None:
        return {name: ClassCoverage(total[name], exact[name]) for name in names}
    return {name: ClassCoverage(total[name], exact[name], seen[name], seen_exact[name]) for name in names}


def recommend(classes: Mapping[str, ClassCoverage]) -> tuple[str, str, str]:
    """Published family of losses, the mode to use, and the reason for the family, from the coverage of the classes.

    The mode is the default loss whatever the coverage: it needs no common tokens.

    A loss on common tokens (H-KL) pushes tokens outside the common set down; that is harmless while every class that
    matters is inside. Where one is outside, the whole distribution must be compared (P-KL family; of ours, tree_kl).
    """
    for name, needed in CRITICAL.items():
        coverage = classes[name]
        if coverage.share < needed:
            found = f"{coverage.exact} of {coverage.total} {name} tokens of the student are teacher tokens"
            return "P-KL", DEFAULT_LOSS, f"{found}; a loss on common tokens would push the others down."
    occurrences = sum(coverage.corpus_tokens or 0 for coverage in classes.values())
    for name, coverage in classes.items():
        share = coverage.corpus_share
        if share is None or (coverage.corpus_tokens or 0) < CORPUS_SHARE * occurrences:
            continue
        if share < CORPUS_EXACT:
            found = f"only {share:.0%} of the corpus's {name} tokens are teacher tokens"
            return "P-KL", DEFAULT_LOSS, f"{found}; a loss on common tokens would push the others down."
    return "H-KL", DEFAULT_LOSS, "every critical class (numerals, punctuation, words) is covered by common tokens."


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
        pieces = zip(projection.indices[token_id][filled].tolist(), projection.weights[token_id].tolist(), strict=False)
        shown = tuple((quoted(teacher.token_bytes[piece]), round(weight, 4)) for piece, weight in pieces)
        chosen.append(Example(quoted(data), key[0], key[1], shown))
        if not left:
            break
    return tuple(sorted(chosen, key=lambda e: (CLASSES.index(e.token_class), not e.exact)))


def _corpus_share(classes: Mapping[str, ClassCoverage]) -> float | None:
    if any(coverage.corpus_tokens is None for coverage in classes.values()):
        return None
    occurrences = sum(coverage.corpus_tokens or 0 for coverage in classes.values())
    return sum(coverage.corpus_exact or 0 for coverage in classes.values()) / occurrences if occurrences else 0.0
