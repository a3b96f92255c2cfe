from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from limbeck.tokens import ByteTokenizer
from limbeck.tokens.tokenizer import _utf8_runs
from tests import zoo
from tests.helpers.tokenizers import byte_level, sentencepiece

SPELLERS = {
    "byte_level": ByteTokenizer.of(
        byte_level(["the cat", "水", "201", "\r\n\r\n"], split_digits=True, specials=["<|end|>"])
    ),
    "nfc": ByteTokenizer.of(byte_level(["é", "the"], nfc=True)),
    "sentencepiece": ByteTokenizer.of(sentencepiece([" the", "水", "cat"], specials=["</s>"])),
    "prefix": ByteTokenizer.of(sentencepiece([" the", "水", "cat"], prefix=True)),
}


@pytest.mark.parametrize("name", SPELLERS)
@given(items=st.lists(st.one_of(st.binary(max_size=12), st.text(max_size=8).map(str.encode)), max_size=6))
@example(items=["\u2581".encode(), "a\u2581 b".encode()])
@settings(max_examples=80)
def test_a_spelling_always_joins_to_the_bytes_it_spells(name: str, items: list[bytes]) -> None:
    speller = SPELLERS[name]
    for data, ids in zip(items, speller.spell(items), strict=True):
        assert speller.vocab.join(ids) == data
        assert not any(speller.vocab.special[i] for i in ids)


@given(st.binary(max_size=40))
def test_utf8_runs_partition_the_bytes_and_keep_characters_whole(data: bytes) -> None:
    runs = _utf8_runs(data)
    assert b"".join(runs) == data
    assert all(runs)
    characters = data.decode("utf-8", "ignore")
    kept = "".join(run.decode("utf-8") for run in runs if _is_text(run))
    assert kept == characters


def _is_text(run: bytes) -> bool:
    try:
        run.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def test_text_that_spells_a_special_token_is_text() -> None:
    speller = SPELLERS["byte_level"]
    assert len(speller.spell([b"<|end|>"])[0]) == len("<|end|>")


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    SPELLERS["byte_level"].spell([b"a"] * 5000, lambda done, total: seen.append((done, total)))
    assert seen == [(4096, 5000), (5000, 5000)]


def test_wordpiece_words_are_the_same_with_and_without_a_space() -> None:
    speller = ByteTokenizer.of(zoo.tokenizer("minilm"))
    with_space, without, unknown = speller.spell([b" walking", b"walking", "\u0f00".encode() * 3])
    assert with_space == without
    assert speller.vocab.join(without) == b"walking"
    assert unknown == ()
