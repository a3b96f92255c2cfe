"""W from the two vocabularies alone: equal bytes, else the teacher's spelling of the student token's bytes.

``load_or_build`` gives it when one is needed: from a file, from the cache, or built on the spot and cached.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.projection.matrix import VERSION, Projection, from_triples
from limbeck.projection.pairs import PairRule
from limbeck.projection.trees import VocabTrees
from limbeck.tokens import ByteVocab, Tokenizer
from limbeck.tokens.tokenizer import Advance, Spelling
from limbeck.tokens.vocab import role_class
from limbeck.utils import files

logger = logging.getLogger(__name__)

DEFAULT_K = 4
FIRST_WEIGHT = 0.9
DECAY = 0.1


class Triples:
    """Growing lists of (student id, teacher id, weight)."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.weights: list[float] = []

    def add(self, row: int, column: int, weight: float) -> None:
        """Append one entry."""
        self.rows.append(row)
        self.columns.append(column)
        self.weights.append(weight)


def build_rules(
    student_tokenizer: object,
    teacher_tokenizer: object,
    *,
    k: int = DEFAULT_K,
    reverse: bool = False,
    progress: Advance | None = None,
) -> Projection:
    """Build W by rules.

    - A student token whose bytes are a teacher token: weight 1 on it.
    - Any other: its bytes, spelled by the teacher as t_0, t_1, ...; weight 0.9 * 0.1^i on t_i for the first k, row
      normalised (two pieces: .9091 / .0909).
    - A special token: weight 1 on the teacher's token of the same role, or, for ends of turns and documents, on another
      end; without one the row stays empty.
    - `reverse`: teacher tokens that have no equal in the student's vocabulary are spelled by the student, and each
      piece s_i gains 0.9 * 0.1^i towards that teacher token. Rows with equal bytes keep their weight of 1.

    Raises ProjectionError where the vocabularies share no byte string at all.
    """
    of_student, of_teacher = Tokenizer.of(student_tokenizer), Tokenizer.of(teacher_tokenizer)
    student, teacher = of_student.vocab, of_teacher.vocab
    student_ids, teacher_ids = of_student.canonical_ids(), of_teacher.canonical_ids()
    refuse_empty_overlap(student_ids, teacher_ids)

    triples = Triples()
    settled = np.zeros(student.size, dtype=bool)
    open_rows: list[int] = []
    for row, data in enumerate(student.token_bytes):
        if data in teacher_ids:
            triples.add(row, teacher_ids[data], 1.0)
            settled[row] = True
        elif data:
            open_rows.append(row)
    for row, column in role_partners(student, teacher).items():
        triples.add(row, column, 1.0)
        settled[row] = True

    spellings = of_teacher.spell([student.token_bytes[row] for row in open_rows], progress)
    for row, spelling in zip(open_rows, spellings, strict=True):
        _add_pieces(triples, ((row, piece) for piece in spelling[:k]))
    details = {"reverse": str(reverse).lower(), "unspelled_tokens": str(sum(not s for s in spellings))}
    if reverse:
        _add_reverse(triples, of_student, teacher, set(student_ids), settled, k, progress)

    indices, weights = from_triples(
        triples.rows, triples.columns, triples.weights, shape=(student.size, teacher.size), k=k
    )
    return Projection(
        indices=indices,
        weights=weights,
        exact=exact_partners(student, teacher, student_ids, teacher_ids),
        teacher_size=teacher.size,
        student_fingerprint=student.fingerprint,
        teacher_fingerprint=teacher.fingerprint,
        rule=rule_name(reverse),
        details=details,
        token_bytes=(student.token_bytes, teacher.token_bytes),
    )


def rule_name(reverse: bool) -> str:
    """Name that a matrix of this module carries in its header."""
    return "rules+reverse" if reverse else "rules"


def refuse_empty_overlap(student_ids: Mapping[bytes, int], teacher_ids: Mapping[bytes, int]) -> None:
    """Raise ProjectionError where two vocabularies share no byte string."""
    if student_ids.keys().isdisjoint(teacher_ids):
        raise ProjectionError(
            f"the vocabularies share no token: none of the student's {len(student_ids)} byte strings is among the "
            f"teacher's {len(teacher_ids)}; check that both are tokenizers for text."
        )


def role_partners(student: ByteVocab, teacher: ByteVocab) -> dict[int, int]:
    """Special student id -> special teacher id of the same role, or of the same class of roles (ends)."""
    by_role: dict[str, int] = {}
    by_class: dict[str, int] = {}
    for token_id, role in sorted(teacher.roles.items()):
        by_role.setdefault(role, token_id)
    # Of a teacher's several ends, the end of a document is the one that every model has learnt.
    for role, token_id in sorted(by_role.items(), key=lambda item: (item[0] != "eos", item[1])):
        by_class.setdefault(role_class(role), token_id)
    partners: dict[int, int] = {}
    for token_id, role in student.roles.items():
        partner = by_role.get(role, by_class.get(role_class(role)))
        if partner is not None:
            partners[token_id] = partner
    return partners


def exact_partners(
    student: ByteVocab, teacher: ByteVocab, student_ids: Mapping[bytes, int], teacher_ids: Mapping[bytes, int]
) -> npt.NDArray[np.int32]:
    """int32 [V_s]: the teacher id with equal bytes or equal role, one to one, -1 elsewhere."""
    exact = np.full(student.size, -1, dtype=np.int32)
    for data, token_id in student_ids.items():
        exact[token_id] = teacher_ids.get(data, -1)
    taken: set[int] = set()
    for token_id, partner in sorted(role_partners(student, teacher).items()):
        if student.roles[token_id] == teacher.roles[partner] and partner not in taken:
            taken.add(partner)
            exact[token_id] = partner
    return exact


def _add_pieces(triples: Triples, pairs: Iterable[tuple[int, int]]) -> None:
    for place, (row, column) in enumerate(pairs):
        triples.add(row, column, FIRST_WEIGHT * DECAY**place)


def _add_reverse(
    triples: Triples,
    of_student: Tokenizer,
    teacher: ByteVocab,
    known: set[bytes],
    settled: npt.NDArray[np.bool_],
    k: int,
    progress: Advance | None,
) -> None:
    columns = [column for column, data in enumerate(teacher.token_bytes) if data and data not in known]
    spellings: list[Spelling] = of_student.spell([teacher.token_bytes[column] for column in columns], progress)
    for column, spelling in zip(columns, spellings, strict=True):
        for place, row in enumerate(spelling[:k]):
            if not settled[row]:
                triples.add(row, column, FIRST_WEIGHT * DECAY**place)


def build_trees(student_tokenizer: object, teacher_tokenizer: object, *, progress: Advance | None = None) -> VocabTrees:
    """Cells, trees and pair rules of two tokenizers."""
    of_student, of_teacher = Tokenizer.of(student_tokenizer), Tokenizer.of(teacher_tokenizer)
    student, teacher = of_student.vocab, of_teacher.vocab
    total = student.size + teacher.size

    def spelled(speller: Tokenizer, own: ByteVocab, other: ByteVocab, done: int) -> list[Spelling]:
        ids = [i for i, data in enumerate(own.token_bytes) if data]
        report = None if progress is None else lambda count, _: progress(done + count, total)
        out: list[Spelling] = [()] * own.size
        for i, spelling in zip(ids, speller.spell([own.token_bytes[i] for i in ids], report), strict=True):
            out[i] = spelling
        for i, partner in role_partners(own, other).items():
            out[i] = (partner,)
        return out

    sigma = spelled(of_student, teacher, student, 0)
    tau = spelled(of_teacher, student, teacher, teacher.size)
    rules = (
        PairRule.from_tokenizer(tokenizer, vocab.token_bytes)
        for tokenizer, vocab in ((student_tokenizer, student), (teacher_tokenizer, teacher))
    )
    return VocabTrees.from_spellings(sigma, tau, *rules)


# -- from a file, from the cache, or built on the spot -----------------------------------------------------------------


def cache_path(student: ByteVocab, teacher: ByteVocab, cache_dir: Path, *, k: int, reverse: bool) -> Path:
    """File of a pair of tokenizers in the cache; everything that decides the content is in its name.

    A file that an earlier release stored under the fingerprints of version 1 goes on being used.
    """
    current, earlier = (
        cache_dir / f"{of_student[:20]}_{of_teacher[:20]}_{rule_name(reverse)}_k{k}_v{VERSION}.safetensors"
        for of_student, of_teacher in (
            (student.fingerprint, teacher.fingerprint),
            (student.first_fingerprint, teacher.first_fingerprint),
        )
    )
    return earlier if earlier.exists() and not current.exists() else current


def load_or_build(
    student_tokenizer: object,
    teacher_tokenizer: object,
    path: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    k: int = DEFAULT_K,
    reverse: bool = False,
    trees: bool = False,
    progress: Advance | None = None,
) -> Projection:
    """The projection of two tokenizers.

    With `path`, that file: it must fit the tokenizers if it exists, and is written if it does not. Without, the cache
    is searched by fingerprints, and a matrix that is missing or unreadable there is built by `rules` and stored.
    Several processes may do this at once: files appear whole, and all builders write the same content.

    trees: with cells and trees. A cached matrix without them gets them; a file at `path` is left as it is, and its
    trees are built for this process only.
    """
    student, teacher = Tokenizer.of(student_tokenizer).vocab, Tokenizer.of(teacher_tokenizer).vocab
    projection: Projection | None = None
    if path is not None:
        target = Path(path)
        if target.exists():
            projection = Projection.load(target, student, teacher)
    else:
        folder = files.cache_dir("projections") if cache_dir is None else Path(cache_dir)
        target = cache_path(student, teacher, folder, k=k, reverse=reverse)
        if target.exists():
            try:
                projection = Projection.load(target, student, teacher)
            except ProjectionError as error:
                logger.warning("the cached projection is not usable and is built anew: %s", error)
    is_given = path is not None and projection is not None
    if projection is not None and (projection.trees is not None or not trees):
        return projection
    if projection is None:
        projection = build_rules(student_tokenizer, teacher_tokenizer, k=k, reverse=reverse, progress=progress)
    if trees:
        if is_given:
            logger.info("%s holds no trees: they are built now; `limbeck project -o` stores them", target)
        projection = replace(projection, trees=build_trees(student_tokenizer, teacher_tokenizer, progress=progress))
    if is_given:
        return projection
    try:
        projection.save(target)
    except OSError as error:
        if path is not None:
            raise ProjectionError(f"the projection cannot be written to {target}: {error}.") from error
        logger.warning("the projection cannot be cached at %s (%s); it will be built again next time", target, error)
    return projection
