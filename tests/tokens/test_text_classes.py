"""Classes of tokens at their edges: numerals win, then blanks, signs and CJK writing, pieces of it included."""

from __future__ import annotations

import pytest

from limbeck.tokens import Tokenizer
from limbeck.tokens.classes import TEXT_CLASSES, class_table, text_class
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
    vocab = Tokenizer.of(byte_level(["201", "中", "the"], specials=["<|im_end|>"])).vocab
    assert [TEXT_CLASSES[number] for number in class_table(vocab)] == [text_class(data) for data in vocab.token_bytes]
