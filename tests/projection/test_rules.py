from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from limbeck.errors import ProjectionError
from limbeck.projection import Projection, build_rules
from limbeck.tokens import ByteVocab
from tests.helpers.tokenizers import byte_level, sentencepiece
from tests.projection.rows import decomposed, dense, row


def by_bytes(tokenizer: object, data: bytes) -> int:
    return ByteVocab.from_tokenizer(tokenizer).ids_by_bytes[data]


def spelled(projection: Projection, student: object, teacher: object, data: bytes) -> list[tuple[bytes, float]]:
    """The row of a student token as (teacher bytes, weight), largest weight first."""
    vocab = ByteVocab.from_tokenizer(teacher)
    entries = row(projection, by_bytes(student, data))
    return [(vocab.token_bytes[t], w) for t, w in sorted(entries.items(), key=lambda item: -item[1])]


def assert_row(found: list[tuple[bytes, float]], expected: list[tuple[bytes, float]]) -> None:
    assert [data for data, _ in found] == [data for data, _ in expected]
    np.testing.assert_allclose([w for _, w in found], [w for _, w in expected], atol=5e-5)


def test_equal_bytes_have_weight_one_and_numerals_the_published_weights() -> None:
    student, teacher = byte_level(["201", "the"]), byte_level(["the"], split_digits=True, order_from=100)
    projection = build_rules(student, teacher)
    assert_row(spelled(projection, student, teacher, b"the"), [(b"the", 1.0)])
    assert_row(spelled(projection, student, teacher, b"20"), [(b"2", 0.9091), (b"0", 0.0909)])
    assert_row(spelled(projection, student, teacher, b"201"), [(b"2", 0.9009), (b"0", 0.0901), (b"1", 0.0090)])
    np.testing.assert_allclose(projection.weights.sum(axis=1), projection.mapped, atol=1e-6)
    assert projection.exact[by_bytes(student, b"the")] == by_bytes(teacher, b"the")
    assert projection.exact[by_bytes(student, b"20")] == -1
    assert projection.rule == "rules"
    assert projection.details == {"unspelled_tokens": "0"}


def test_pieces_past_k_are_cut_and_repeated_pieces_add_up() -> None:
    student, teacher = byte_level(["abcdefgh", "xxyx"]), byte_level()
    projection = build_rules(student, teacher)
    weights = np.array([0.9, 0.09, 0.009, 0.0009]) / 0.9999
    expected = list(zip([b"a", b"b", b"c", b"d"], weights, strict=True))
    assert_row(spelled(projection, student, teacher, b"abcdefgh"), expected)
    assert_row(spelled(projection, student, teacher, b"xxyx"), [(b"x", 0.9909 / 0.9999), (b"y", 0.009 / 0.9999)])


def test_a_tokenizer_projected_on_itself_is_the_identity() -> None:
    tokenizer = byte_level(["the cat", "201"], specials=["<|endoftext|>", "<|im_end|>", "<|odd|>"])
    projection = build_rules(tokenizer, tokenizer)
    np.testing.assert_array_equal(dense(projection), np.eye(projection.student_size))
    np.testing.assert_array_equal(projection.exact, np.arange(projection.student_size))


@pytest.mark.parametrize("prefix", [False, True])
def test_a_leading_space_stays_and_none_is_gained(prefix: bool) -> None:
    teacher = sentencepiece([" the", " cat", "the", "cat"], prefix=prefix)
    student = byte_level([" the", "the", " cats", "cats", " "])
    projection = build_rules(student, teacher)
    assert_row(spelled(projection, student, teacher, b" the"), [(b" the", 1.0)])
    assert_row(spelled(projection, student, teacher, b"the"), [(b"the", 1.0)])
    assert_row(spelled(projection, student, teacher, b" cats"), [(b" cat", 0.9091), (b"s", 0.0909)])
    assert_row(spelled(projection, student, teacher, b"cats"), [(b"cat", 0.9091), (b"s", 0.0909)])
    assert_row(spelled(projection, student, teacher, b" "), [(b" ", 1.0)])


def test_parts_of_characters_are_spelled_as_bytes() -> None:
    han = "水".encode()
    student = byte_level([han[:2], b" " + han[:1], han[2:] + b"a"])
    teacher = byte_level([han], order_from=7)
    projection = build_rules(student, teacher)
    assert_row(spelled(projection, student, teacher, han[:2]), [(han[:2], 1.0)])
    pieces = sentencepiece()
    mixed = build_rules(student, pieces)
    assert_row(spelled(mixed, student, pieces, han[:2]), [(han[:1], 0.9091), (han[1:2], 0.0909)])
    assert_row(spelled(mixed, student, pieces, b" " + han[:1]), [(b" ", 0.9091), (han[:1], 0.0909)])
    assert_row(spelled(mixed, student, pieces, han[2:] + b"a"), [(han[2:], 0.9091), (b"a", 0.0909)])
    space, letter = pieces.convert_tokens_to_ids(["\u2581", "a"])
    assert space in row(mixed, by_bytes(student, b" " + han[:1]))
    assert letter in row(mixed, by_bytes(student, han[2:] + b"a"))


def test_a_normalising_teacher_does_not_change_the_students_bytes() -> None:
    word = decomposed("é").encode()
    student, teacher = byte_level([word]), byte_level(["é", word[:2]], nfc=True)
    projection = build_rules(student, teacher)
    assert_row(spelled(projection, student, teacher, word), [(b"e\xcc", 0.9091), (b"\x81", 0.0909)])


def test_bytes_that_a_vocabulary_holds_twice_meet_at_the_token_its_tokenizer_writes() -> None:
    left, right = sentencepiece(["ab"]), byte_level(["ab"])
    letter, byte = left.convert_tokens_to_ids(["A", "<0x41>"])
    assert byte < letter
    to_right = build_rules(left, right)
    target = by_bytes(right, b"A")
    assert row(to_right, letter) == row(to_right, byte) == {target: 1.0}
    assert (to_right.exact[letter], to_right.exact[byte]) == (target, -1)
    to_left = build_rules(right, left)
    assert row(to_left, target) == {letter: 1.0}
    assert to_left.exact[target] == letter


def test_special_tokens_meet_by_role() -> None:
    student = byte_level(specials=["<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>", "<|same|>", "<|mine|>"])
    teacher = byte_level(specials=["<|im_start|>", "<|endoftext|>", "<|im_end|>", "<|same|>"])
    projection = build_rules(student, teacher)
    mine = dict(student.get_added_vocab())
    theirs = dict(teacher.get_added_vocab())
    assert row(projection, mine["<|end_of_text|>"]) == {theirs["<|endoftext|>"]: 1.0}
    assert row(projection, mine["<|eot_id|>"]) == {theirs["<|im_end|>"]: 1.0}
    assert row(projection, mine["<|same|>"]) == {theirs["<|same|>"]: 1.0}
    assert row(projection, mine["<|begin_of_text|>"]) == row(projection, mine["<|mine|>"]) == {}
    assert projection.exact[mine["<|eot_id|>"]] == theirs["<|im_end|>"]


def test_an_end_of_turn_falls_back_to_the_end_of_document_without_being_exact() -> None:
    student = byte_level(specials=["<|eot_id|>", "<|end_of_text|>"])
    teacher = byte_level(specials=["</s>"])
    projection = build_rules(student, teacher)
    end, turn = student.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])
    target = teacher.convert_tokens_to_ids("</s>")
    assert row(projection, turn) == row(projection, end) == {target: 1.0}
    assert (projection.exact[end], projection.exact[turn]) == (target, -1)


def test_special_tokens_never_meet_text() -> None:
    student = byte_level(["</s>"])
    teacher = byte_level(specials=["</s>"])
    projection = build_rules(student, teacher)
    assert teacher.convert_tokens_to_ids("</s>") not in projection.indices


def test_vocabularies_without_a_common_token_are_an_error() -> None:
    def only(tokens: list[str]) -> PreTrainedTokenizerFast:
        backend = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    with pytest.raises(ProjectionError, match=r"student's 2 .* teacher's 3"):
        build_rules(only(["a", "b"]), only(["c", "d", "e"]))
