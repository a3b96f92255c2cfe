"""Classes of tokens at their edges: numerals win, then blanks, signs and CJK writing, pieces of it included."""

from __future__ import annotations

import pytest

from limbeck.tokens import ByteTokenizer
from limbeck.tokens.classes import (
    CREDIT_CLASSES,
    FORM_CLASSES,
    TEXT_CLASSES,
    class_table,
    credit_table,
    form_table,
    text_class,
)
from tests.helpers.tokenizers import byte_level


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"x2", "digits"),
        (" 二0".encode(), "digits"),
        (b" \r\n\t", "white_space"),
        (b" {\n", "code"),
        (b"don't", "other"),
        ("é".encode(), "other"),
        ("ひ".encode(), "cjk"),
        ("한".encode(), "cjk"),
        ("Ａ".encode(), "cjk"),
        ("a中".encode(), "cjk"),
        (b"\xe4\xb8", "cjk"),
        (b"\xb8", "cjk"),
        (b" \xd0", "other"),
        (b"", "other"),
    ],
)
def test_classes_at_their_edges(data: bytes, name: str) -> None:
    assert text_class(data) == name


def test_the_table_has_the_class_of_every_id() -> None:
    vocab = ByteTokenizer.of(byte_level(["201", "中", "the"], specials=["<|im_end|>"])).vocab
    assert [TEXT_CLASSES[number] for number in class_table(vocab)] == [text_class(data) for data in vocab.token_bytes]


def test_every_row_of_a_head_has_a_form() -> None:
    vocab = ByteTokenizer.of(byte_level(["the", "201"], specials=["<|im_end|>"])).vocab
    forms = [FORM_CLASSES[i] for i in form_table(vocab, vocab.size + 2)]
    tokens = {data: forms[i] for i, data in enumerate(vocab.token_bytes) if not vocab.special[i]}
    assert (tokens[b"the"], tokens[b"201"], tokens[b"{"], tokens[b"\n"]) == ("word", "number", "format", "format")
    assert forms[: vocab.size].count("special") == int(vocab.special.sum()) > 0
    assert forms[vocab.size :] == ["other", "other"]
    assert len(form_table(vocab, 10)) == 10


def test_ends_and_tags_of_thinking_have_classes_of_their_own() -> None:
    words = ["<think>", "</think>", "[/THINK]", "think", "<thin"]
    vocab = ByteTokenizer.of(byte_level(words, specials=["<|im_end|>", "<|other|>"])).vocab
    classes = [CREDIT_CLASSES[i] for i in credit_table(vocab, vocab.size + 1)]
    found = {data.decode(): classes[i] for i, data in enumerate(vocab.token_bytes) if data.decode("latin-1") in words}
    assert found == {
        "<think>": "thinking",
        "</think>": "thinking",
        "[/THINK]": "thinking",
        "think": "word",
        "<thin": "other",
    }
    ends = [i for i, role in vocab.roles.items() if role in ("eos", "eot")]
    assert ends
    assert {classes[i] for i in ends} == {"end"}
    assert classes.count("special") == int(vocab.special.sum()) - len(ends)
    assert classes[-1] == "other"
    assert len(credit_table(vocab, 10)) == 10
