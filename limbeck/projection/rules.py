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

from limbeck.errors import ConfigError, ProjectionError
from limbeck.projection.matrix import VERSION, Projection, from_triples
from limbeck.projection.trees import VocabTrees
from limbeck.tokens import ByteTokenizer, ByteVocab
from limbeck.tokens.tokenizer import Advance, Spelling
from limbeck.tokens.vocab import role_class
from limbeck.utils import files

logger = logging.getLogger(__name__)

PIECES = 4
"""A token that the teacher lacks stands for so many of the pieces that spell it."""
RULE = "rules"
"""Name that a matrix of this module carries in its header."""
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
    progress: Advance | None = None,
) -> Projection:
    """Build W by rules.

    - A student token whose bytes are a teacher token: weight 1 on it.
    - Any other: its bytes, spelled by the teacher as t_0, t_1, ...; weight 0.9 * 0.1^i on t_i for the first four, row
      normalised (two pieces: .9091 / .0909).
    - A special token: weight 1 on the teacher's token of the same role, or, for ends of turns and documents, on another
      end; without one the row stays empty.

    Raises ProjectionError where the vocabularies share no byte string at all.
    """
    of_student, of_teacher = ByteTokenizer.of(student_tokenizer), ByteTokenizer.of(teacher_tokenizer)
    student, teacher = of_student.vocab, of_teacher.vocab
    # of several ids with equal bytes, the one that the tokenizer writes itself
    student_ids, teacher_ids = of_student.canonical_ids(), of_teacher.canonical_ids()
    refuse_empty_overlap(student_ids, teacher_ids)

    triples = Triples()
    open_rows: list[int] = []
    for row, data in enumerate(student.token_bytes):
        if data in teacher_ids:
            triples.add(row, teacher_ids[data], 1.0)
        elif data:
            open_rows.append(row)
    for row, column in role_partners(student, teacher).items():
        triples.add(row, column, 1.0)

    spellings = of_teacher.spell([student.token_bytes[row] for row in open_rows], progress)
    for row, spelling in zip(open_rows, spellings, strict=True):
        _add_pieces(triples, ((row, piece) for piece in spelling[:PIECES]))
    details = {"unspelled_tokens": str(sum(not s for s in spellings))}

    indices, weights = from_triples(
        triples.rows, triples.columns, triples.weights, shape=(student.size, teacher.size), k=PIECES
    )
    return Projection(
        indices=indices,
        weights=weights,
        exact=exact_partners(student, teacher, student_ids, teacher_ids),
        teacher_size=teacher.size,
        student_fingerprint=student.fingerprint,
        teacher_fingerprint=teacher.fingerprint,
        rule=RULE,
        details=details,
        token_bytes=(student.token_bytes, teacher.token_bytes),
    )


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
        # a partner of the same class alone (another end) counts in W, but is no equal
        if student.roles[token_id] == teacher.roles[partner] and partner not in taken:
            taken.add(partner)
            exact[token_id] = partner
    return exact


def _add_pieces(triples: Triples, pairs: Iterable[tuple[int, int]]) -> None:
    for rank, (row, column) in enumerate(pairs):
        triples.add(row, column, FIRST_WEIGHT * DECAY**rank)


def build_trees(student_tokenizer: object, teacher_tokenizer: object, *, progress: Advance | None = None) -> VocabTrees:
    """Cells, trees and pair rules of two tokenizers."""
    of_student, of_teacher = ByteTokenizer.of(student_tokenizer), ByteTokenizer.of(teacher_tokenizer)
    student, teacher = of_student.vocab, of_teacher.vocab
    total = student.size + teacher.size

    def spelled(speller: ByteTokenizer, vocab: ByteVocab, other: ByteVocab, done: int) -> list[Spelling]:
        ids = [i for i, data in enumerate(vocab.token_bytes) if data]
        report = None if progress is None else lambda count, _: progress(done + count, total)
        out: list[Spelling] = [()] * vocab.size
        for i, spelling in zip(ids, speller.spell([vocab.token_bytes[i] for i in ids], report), strict=True):
            out[i] = spelling
        for i, partner in role_partners(vocab, other).items():
            out[i] = (partner,)
        return out

    sigma = spelled(of_student, teacher, student, 0)
    tau = spelled(of_teacher, student, teacher, teacher.size)
    return VocabTrees.from_spellings(sigma, tau)


# -- from a file, from the cache, or built on the spot -----------------------------------------------------------------


def cache_path(student: ByteVocab, teacher: ByteVocab, cache_dir: Path) -> Path:
    """File of a pair of tokenizers in the cache; everything that decides the content is in its name."""
    pair = f"{student.fingerprint[:20]}_{teacher.fingerprint[:20]}"
    return cache_dir / f"{pair}_{RULE}_k{PIECES}_v{VERSION}.safetensors"


def refuse_missing(path: str | os.PathLike[str] | None, key: str) -> None:
    """Refuse a stored projection that is not there. ``key``: of the run file."""
    if path is not None and not Path(path).exists():
        raise ConfigError(
            f"{key} is {str(path)!r}, which does not exist; correct it, or leave it out: the projection is then made "
            "from the tokenizers"
        )


def load_or_build(
    student_tokenizer: object,
    teacher_tokenizer: object,
    path: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
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
    student, teacher = ByteTokenizer.of(student_tokenizer).vocab, ByteTokenizer.of(teacher_tokenizer).vocab
    projection: Projection | None = None
    if path is not None:
        target = Path(path)
        if target.exists():
            projection = Projection.load(target, student, teacher)
    else:
        folder = files.cache_dir("projections") if cache_dir is None else Path(cache_dir)
        target = cache_path(student, teacher, folder)
        if target.exists():
            try:
                projection = Projection.load(target, student, teacher)
            # the cache may be replaced; a file that was named is refused above instead
            except ProjectionError as error:
                logger.warning("the cached projection is not usable and is built anew: %s", error)
    is_given = path is not None and projection is not None
    if projection is not None and (projection.trees is not None or not trees):
        return projection
    if projection is None:
        projection = build_rules(student_tokenizer, teacher_tokenizer, progress=progress)
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
