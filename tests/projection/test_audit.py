from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from limbeck.errors import ProjectionError
from limbeck.projection import ClassCoverage, audit_pair, audit_projection, build_rules, build_trees, count_pairs
from limbeck.projection.audit import CLASSES, audit_masses
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import token_class
from tests.helpers.tokenizers import byte_level

FULL = ClassCoverage(10, 10)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"7", "digits_1"),
        (b" 7", "digits_1"),
        (b"42", "digits_2"),
        (b"201", "digits_3"),
        (b"2019", "other"),
        (b"  7", "other"),
        ("\u0663".encode(), "non_ascii"),
        (b"!", "punctuation"),
        (b" ::", "punctuation"),
        (b"the", "alphabetic"),
        (b" The", "alphabetic"),
        (b"don't", "other"),
        (b"x1", "other"),
        (b" ", "whitespace"),
        (b" \r\n\t", "whitespace"),
        ("é".encode(), "non_ascii"),
        (b" \xe6", "non_ascii"),
        (b"\x00", "other"),
        (b"", "other"),
    ],
)
def test_classes_of_tokens(data: bytes, name: str) -> None:
    assert token_class(data) == name


def test_coverage_by_hand() -> None:
    student, teacher = byte_level(["201", " the", "::"]), byte_level([" the", "20"], split_digits=False)
    vocabs = ByteVocab.from_tokenizer(student), ByteVocab.from_tokenizer(teacher)
    report = audit_projection(build_rules(student, teacher), *vocabs)
    # The student: 256 bytes, 20, 201, " t", " th", " the", "::"; the teacher lacks 201 and "::".
    assert (report.student_tokens, report.teacher_tokens, report.exact_tokens) == (262, 260, 260)
    assert report.overlap == 1.0
    assert report.exact_share == pytest.approx(260 / 262)
    found = {name: (c.total, c.exact) for name, c in report.classes.items()}
    assert found == {
        "digits_1": (10, 10),
        "digits_2": (1, 1),
        "digits_3": (1, 0),
        "punctuation": (33, 32),
        "alphabetic": (55, 55),
        "non_ascii": (128, 128),
        "whitespace": (6, 6),
        "other": (28, 28),
    }
    assert report.corpus_share is None
    assert report.unmapped_tokens == 0
    assert not report.same_vocabulary
    shown = {example.token: example for example in report.examples}
    assert shown["'201'"].pieces == (("'20'", 0.9091), ("'1'", 0.0909))
    assert not shown["'201'"].exact
    assert len({e.token for e in report.examples if e.exact}) == 6  # no exact numeral of three digits
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["classes"]["digits_3"] == {"total": 1, "exact": 0}
    assert set(CLASSES) <= plain["classes"].keys()


def test_corpus_mass() -> None:
    student, teacher = byte_level(["201", "abc"]), byte_level(["abc"])
    vocabs = ByteVocab.from_tokenizer(student), ByteVocab.from_tokenizer(teacher)
    counter = count_pairs(student, teacher, ["201abc", "abc", "20"])
    report = audit_projection(build_rules(student, teacher), *vocabs, corpus_tokens=counter.student_tokens)
    assert report.corpus_share == pytest.approx(2 / 4)
    assert report.classes["digits_3"].corpus_share == 0.0
    assert report.to_dict()["classes"]["alphabetic"]["corpus_tokens"] == 2


def test_the_audit_refuses_other_vocabularies() -> None:
    student, teacher = byte_level(["201"]), byte_level(["abc"])
    one, two = ByteVocab.from_tokenizer(student), ByteVocab.from_tokenizer(teacher)
    projection = build_rules(student, teacher)
    with pytest.raises(ProjectionError, match=f"this student: {two.fingerprint[:12]}"):
        audit_projection(projection, two, two)
    with pytest.raises(ProjectionError, match=r"\(3,\)"):
        audit_projection(projection, one, two, corpus_tokens=np.zeros(3, dtype=np.int64))


def test_the_pair_is_seen_from_both_sides() -> None:
    student, teacher = byte_level(["201", "the"]), byte_level(["then", "and"])
    projection = replace(build_rules(student, teacher), trees=build_trees(student, teacher))
    vocab = ByteVocab.from_tokenizer(teacher)
    report = audit_pair(projection, vocab)
    # 256 bytes, th and the are tokens of both; the teacher's then, an and and, the student's 20 and 201 hang on them
    assert (report.cells, report.teacher_reached_ids) == (258, 258)
    assert report.one_to_one_cells == pytest.approx(255 / 258)
    assert report.largest_cell == 4  # a with an and and; 2 with 20 and 201
    assert report.teacher_reached_share == pytest.approx(258 / 261)
    assert (report.cell_agreement, report.inner_student_on_tree, report.warning) == (None, None, None)
    # the|n - then, a|n|d - and, 201 - 2|0|1, and two spaces
    counter = count_pairs(student, teacher, ["then and 201"], trees=projection.trees)
    report = audit_pair(projection, vocab, counter)
    assert (counter.inner_student, counter.inner_teacher) == ((3, 3), (2, 2))
    assert (report.cell_agreement, report.inner_student_on_tree, report.inner_teacher_on_tree) == (1.0, 1.0, 1.0)
    assert report.teacher_reached_mass == pytest.approx(3 / 5)
    assert report.warning is not None
    assert "60.0%" in report.warning
    assert "tree_kl" in report.warning
    assert json.loads(json.dumps(report.to_dict()))["cells"] == 258
    with pytest.raises(ProjectionError, match="no trees"):
        audit_pair(replace(projection, trees=None), vocab)


def test_masses_by_hand() -> None:
    """A coarser teacher: what it begins with is out of reach of W where the student has no such token."""
    student, teacher = byte_level(["中", " the"]), byte_level(["中国", " the"], specials=["<|odd|>"])
    vocabs = ByteVocab.from_tokenizer(student), ByteVocab.from_tokenizer(teacher)
    projection = replace(build_rules(student, teacher), trees=build_trees(student, teacher))
    bare = audit_masses(projection, *vocabs)
    assert bare.scripts["han"].student_tokens == 1
    assert (bare.scripts["han"].teacher_tokens, bare.scripts["han"].teacher_reached) == (2, 1)
    assert bare.scripts["latin"].starts is None
    assert bare.uncovered_tokens == ()

    counter = count_pairs(student, teacher, ["中国 the", "中国", "中 the"], trees=projection.trees)
    found = audit_masses(projection, *vocabs, counter)
    # chunks: 中国, the | 中国 | 中, the
    han = found.scripts["han"]
    assert (han.starts, han.uncovered_by_projection, han.uncovered_by_cells, han.apart) == (3, 2, 0, 0)
    assert (found.scripts["latin"].starts, found.scripts["latin"].uncovered_by_projection) == (2, 0)
    assert sum(group.starts or 0 for group in found.classes.values()) == counter.boundaries
    (token,) = found.uncovered_tokens
    assert (token.token, token.starts, token.in_no_cell) == ("'中国'", 2, False)
    assert token.share == pytest.approx(2 / 5)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["mass_basis"] == "tokens"
    assert plain["by_script"]["han"]["uncovered_by_projection"] == 2
