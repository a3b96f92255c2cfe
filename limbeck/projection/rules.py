"""W from the two vocabularies alone: equal bytes, else the teacher's spelling of the student token's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.projection.matrix import Projection, from_triples
from limbeck.tokens import ByteVocab, Tokenizer
from limbeck.tokens.tokenizer import Advance, Spelling
from limbeck.tokens.vocab import role_class

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
