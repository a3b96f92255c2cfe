"""Known truths of real vocabularies."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from limbeck.projection import Audit, Projection, VocabTrees, audit_projection, build_rules, build_trees
from limbeck.tokens import ByteVocab
from tests import zoo

pytestmark = pytest.mark.slow  # tables of whole vocabularies


@functools.cache
def built(student: str, teacher: str) -> Projection:
    return build_rules(zoo.tokenizer(student), zoo.tokenizer(teacher))


@functools.cache
def trees_of(student: str, teacher: str) -> VocabTrees:
    return build_trees(zoo.tokenizer(student), zoo.tokenizer(teacher))


def audited(student: str, teacher: str) -> Audit:
    vocabs = [ByteVocab.from_tokenizer(zoo.tokenizer(name)) for name in (student, teacher)]
    return audit_projection(built(student, teacher), *vocabs)


def coverage(report: Audit, name: str) -> tuple[int, int]:
    return report.classes[name].total, report.classes[name].exact


def test_llama_to_qwen_loses_all_longer_numerals() -> None:
    report = audited("llama3_2", "qwen3")
    assert coverage(report, "digits_1") == (10, 10)
    assert coverage(report, "digits_2") == (100, 0)
    assert coverage(report, "digits_3") == (1000, 0)
    assert 0.85 <= report.overlap <= 0.86
    assert report.student_tokens == 128_000
    assert report.exact_tokens == sum(c.exact for c in report.classes.values()) == 109_566


def test_llama_to_an_o200k_vocabulary_keeps_all_numerals() -> None:
    report = audited("llama3_2", "gptoss")
    assert [coverage(report, f"digits_{n}") for n in (1, 2, 3)] == [(10, 10), (100, 100), (1000, 1000)]


def test_numerals_carry_the_published_weights() -> None:
    projection = built("llama3_2", "qwen3")
    student, teacher = zoo.tokenizer("llama3_2"), zoo.tokenizer("qwen3")
    for numeral, weights in (("42", [0.9091, 0.0909]), ("201", [0.9009, 0.0901, 0.0090])):
        token = student.convert_tokens_to_ids(numeral)
        digits = [teacher.convert_tokens_to_ids(digit) for digit in numeral]
        assert projection.indices[token].tolist() == digits + [-1] * (4 - len(digits))
        np.testing.assert_allclose(projection.weights[token, : len(weights)], weights, atol=5e-5)


def test_ends_meet_and_a_begin_without_partner_stays_empty() -> None:
    projection = built("llama3_2", "qwen3")
    student, teacher = zoo.tokenizer("llama3_2"), zoo.tokenizer("qwen3")
    for mine, theirs in (("<|eot_id|>", "<|im_end|>"), ("<|end_of_text|>", "<|endoftext|>")):
        pair = student.convert_tokens_to_ids(mine), teacher.convert_tokens_to_ids(theirs)
        assert projection.exact[pair[0]] == projection.indices[pair[0], 0] == pair[1]
    assert not projection.mapped[student.convert_tokens_to_ids("<|begin_of_text|>")]


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("llama3_2", "qwen3"),  # byte-level to byte-level with NFC
        ("smollm2", "gemma3"),  # byte-level to SentencePiece with added runs of spaces
        ("smollm2", "llama2"),  # byte-level to SentencePiece with a space in front
        ("llama2", "smollm2"),  # SentencePiece to byte-level
        ("smollm2", "j2"),  # byte-level to unigram with NFKC
    ],
)
def test_every_row_begins_with_the_bytes_of_its_token(student: str, teacher: str) -> None:
    projection = built(student, teacher)
    left, right = (ByteVocab.from_tokenizer(zoo.tokenizer(name)) for name in (student, teacher))
    missing = {byte for byte in range(256) if bytes([byte]) not in right.ids_by_bytes}  # SmolLM2 lacks 21 bytes
    unmapped = 0
    for token, data in enumerate(left.token_bytes):
        if not data:
            continue
        pieces = [right.token_bytes[t] for t in projection.indices[token] if t >= 0]
        if not pieces:
            unmapped += 1
            assert missing.intersection(data), data
        assert not pieces or any(data.startswith(piece) for piece in pieces)
        assert all(piece in data for piece in pieces)
        if projection.exact[token] >= 0:
            assert pieces == [data]
    assert unmapped == int(projection.details["unspelled_tokens"])
    np.testing.assert_allclose(projection.weights.sum(axis=1), projection.mapped, atol=1e-6)


def test_gemma_byte_tokens_are_not_the_common_ones() -> None:
    gemma, smollm = zoo.tokenizer("gemma3"), zoo.tokenizer("smollm2")
    letter, byte = gemma.convert_tokens_to_ids("A"), gemma.convert_tokens_to_ids("<0x41>")
    projection = built("smollm2", "gemma3")
    assert projection.exact[smollm.convert_tokens_to_ids("A")] == letter
    assert byte not in projection.exact


def test_building_stays_small_and_fast() -> None:
    folders = [str(zoo.tokenizer_dir(name)) for name in ("llama3_2", "qwen3")]
    program = (
        "import sys, typer; from limbeck.cli.project import project_command as p;"
        "app = typer.Typer(); app.command()(p); app(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "--student", folders[0], "--teacher", folders[1], "--json"]
    before = os.times()
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    after = os.times()
    assert found["classes"]["digits_3"] == {"total": 1000, "exact": 0}
    assert found["seconds"] > 0
    # time on a processor, start of the interpreter included: what other processes take does not count
    assert after.children_user + after.children_system - before.children_user - before.children_system < 60
    assert found["peak_rss_mb"] < 1000


@pytest.mark.parametrize(
    ("student", "teacher", "cells", "one_to_one"),
    [
        ("llama3_2", "qwen3", 109_831, 0.926),
        ("smollm2", "gemma3", 46_192, 0.689),
        ("llama3_2", "gptoss", 103_518, 0.794),
    ],
)
def test_cells_of_real_pairs(student: str, teacher: str, cells: int, one_to_one: float) -> None:
    trees = trees_of(student, teacher)
    alone = int((trees.student_cell < 0).sum() + (trees.teacher_cell < 0).sum())
    assert abs(trees.num_cells + alone - cells) <= 3  # ends of turns and documents may share a cell
    mine, theirs = trees.cell_sizes
    assert abs(((mine == 1) & (theirs == 1)).sum() / cells - one_to_one) < 5e-4


def test_a_numeral_is_a_leaf_of_the_digits_tree() -> None:
    student, teacher = zoo.tokenizer("llama3_2"), zoo.tokenizer("qwen3")
    trees = trees_of("llama3_2", "qwen3")
    digits = [teacher.convert_tokens_to_ids(digit) for digit in "201"]
    tree = trees.teacher_tree
    assert tree.members(tree.find(digits)).tolist() == [student.convert_tokens_to_ids("201")]
    assert tree.members(tree.find(digits[:1])).size == 111  # 2, 2x and 2xx
