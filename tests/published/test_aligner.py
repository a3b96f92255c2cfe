"""What is published of the aligner: its arguments, and every field of what it returns."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from limbeck.align import AlignmentBatch, AlignmentPair, TokenAligner
from limbeck.tokens import ByteTokenizer
from tests.helpers import tiny

STUDENT, TEACHER = tiny.tokenizer(300), tiny.tokenizer(340)
TEXTS = ["the alembic is a still", "a vessel in which spirits are distilled, again"]
FIELDS = (
    "pair_valid pair_is_correct student_exact_partition_mask teacher_exact_partition_mask student_chunk_id "
    "teacher_chunk_id num_chunks"
)


def padded(tokenizer: Any, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    width = max(map(len, rows)) + extra
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def aligned(extra: int = 0) -> tuple[AlignmentBatch, torch.Tensor, torch.Tensor]:
    (mine, my_mask), (theirs, their_mask) = padded(STUDENT, extra), padded(TEACHER, extra)
    found = TokenAligner(STUDENT, TEACHER).align(
        mine, theirs, student_attention_mask=my_mask, teacher_attention_mask=their_mask
    )
    return found, mine, theirs


def test_the_constructors_defaults() -> None:
    parameters = inspect.signature(TokenAligner).parameters
    assert list(parameters)[:4] == ["student_tokenizer", "teacher_tokenizer", "projection_matrix_path", "max_comb_len"]
    assert (parameters["projection_matrix_path"].default, parameters["max_comb_len"].default) == (None, 4)


def test_masks_go_by_name_and_may_be_left_out() -> None:
    parameters = inspect.signature(TokenAligner.align).parameters
    for name in ("student_attention_mask", "teacher_attention_mask"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None
    ids = [torch.tensor([t(TEXTS[0], add_special_tokens=False)["input_ids"]]) for t in (STUDENT, TEACHER)]
    found = TokenAligner(STUDENT, TEACHER).align(*ids)
    assert bool((found.student_chunk_id >= 0).all())
    assert bool(found.pair_is_correct[found.pair_valid].all())


def test_the_batch_has_the_published_fields() -> None:
    published = FIELDS.split()
    assert [f.name for f in fields(AlignmentBatch)][: len(published)] == published
    assert all(f.default is None for f in fields(AlignmentBatch)[len(published) :]), "what is ours may be left out"
    assert set(AlignmentBatch.as_dict(aligned()[0])) >= {f"alignment_{name}" for name in published}


def test_pair_valid_marks_as_many_chunks_as_there_are() -> None:
    found, _, _ = aligned()
    assert found.pair_valid.dtype == torch.bool
    assert torch.equal(found.pair_valid.sum(1), found.num_chunks)
    assert bool((found.pair_valid.int().diff(dim=1) <= 0).all()), "first the chunks, then padding"


def test_pair_is_correct_where_both_sides_spell_the_same() -> None:
    found, mine, theirs = aligned()
    assert found.pair_is_correct.shape == found.pair_valid.shape
    assert not found.pair_is_correct[~found.pair_valid].any()
    for row in range(2):
        for chunk in range(int(found.num_chunks[row])):
            texts = [
                tokenizer.decode(ids[row][label[row] == chunk])
                for tokenizer, ids, label in (
                    (STUDENT, mine, found.student_chunk_id),
                    (TEACHER, theirs, found.teacher_chunk_id),
                )
            ]
            assert bool(found.pair_is_correct[row, chunk]) == (texts[0] == texts[1])


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_chunk_ids_label_every_token_in_order_and_padding_with_minus_one(side: str) -> None:
    found, _, _ = aligned(extra=3)
    label, (ids, mask) = getattr(found, f"{side}_chunk_id"), padded(STUDENT if side == "student" else TEACHER, 3)
    assert label.shape == ids.shape
    assert label.dtype == torch.int64
    assert bool((label[mask == 0] == -1).all())
    for row in range(2):
        own = label[row][mask[row] == 1]
        assert own.unique().tolist() == list(range(int(found.num_chunks[row])))
        assert bool((own.diff() >= 0).all())


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_the_exact_partition_is_the_one_to_one_chunks(side: str) -> None:
    found, _, _ = aligned()
    label, exact = getattr(found, f"{side}_chunk_id"), getattr(found, f"{side}_exact_partition_mask")
    assert (exact.dtype, exact.shape) == (torch.bool, label.shape)
    for row in range(2):
        single = {
            chunk
            for chunk in range(int(found.num_chunks[row]))
            if found.pair_is_correct[row, chunk]
            and int((found.student_chunk_id[row] == chunk).sum()) == 1
            and int((found.teacher_chunk_id[row] == chunk).sum()) == 1
        }
        assert {int(c) for c in label[row][exact[row]]} == single
    assert bool(exact.any())


def test_padding_changes_nothing() -> None:
    plain, more = aligned()[0], aligned(extra=5)[0]
    assert torch.equal(plain.num_chunks, more.num_chunks)
    assert torch.equal(plain.pair_is_correct, more.pair_is_correct)
    assert torch.equal(plain.student_chunk_id, more.student_chunk_id[:, : plain.student_chunk_id.shape[1]])


def test_pairs_are_the_readable_form() -> None:
    aligner = TokenAligner(STUDENT, TEACHER)
    student, teacher = (ByteTokenizer.of(tokenizer).encode(TEXTS[0]) for tokenizer in (STUDENT, TEACHER))
    pairs = aligner.pairs(student, teacher, aligner.align_renderings(student, teacher))
    assert {type(pair) for pair in pairs} == {AlignmentPair}
    assert [pair.s_start for pair in pairs[1:]] == [pair.s_end for pair in pairs[:-1]]
    assert all(pair.is_correct for pair in pairs)
