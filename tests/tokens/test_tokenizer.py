"""Tokenizer on real tokenizers: exact byte ends, proof of bytes, no special token from text."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings

from limbeck.errors import TokenizerError
from limbeck.tokens import ByteTokenizer, TokenizedText
from limbeck.tokens.tokenizer import backend_spec
from tests.helpers.tokenizers import byte_level
from tests.texts import TEXTS, unicode_text
from tests.zoo import NAMES, tokenizer

# One of each kind: byte-level, byte-level with NFC, SentencePiece without and with prefix space, unigram, WordPiece.
KINDS = ("llama3_2", "qwen3", "gemma3", "llama2", "j2", "minilm")


def encoder(name: str) -> ByteTokenizer:
    return ByteTokenizer.of(tokenizer(name))


def check(name: str, text: str) -> TokenizedText:
    """The obligations of every rendering."""
    enc = encoder(name)
    r = enc.encode(text)
    assert r.source == text.encode("utf-8")
    assert (np.diff(r.byte_ends, prepend=0) >= 0).all()
    unknown = set(enc.vocab.ids_with_role("unk"))
    assert set(r.ids[r.special].tolist()) <= unknown
    if len(r):
        assert r.byte_ends[-1] <= len(r.source)
        if r.byte_exact.all():
            assert enc.vocab.join(r.ids.tolist()) == r.source
    starts = np.concatenate([[0], r.byte_ends[:-1]]) if len(r) else r.byte_ends
    for i in np.flatnonzero(r.byte_exact & ~r.special).tolist():
        assert r.source[starts[i] : r.byte_ends[i]] == enc.vocab.token_bytes[r.ids[i]]
    assert r.skipped.get("inexact_tokens", 0) == np.count_nonzero(~r.byte_exact)
    return r


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_hard_texts(name: str) -> None:
    for text in TEXTS.values():
        check(name, text)


@pytest.mark.train
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_tokenizer_s_own_where_the_text_names_no_special(name: str) -> None:
    tok = tokenizer(name)
    for key, text in TEXTS.items():
        if key != "specials":
            assert encoder(name).encode(text).ids.tolist() == tok.encode(text, add_special_tokens=False), key


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=unicode_text())
def test_bytes_of_random_unicode(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.parametrize("name", ["llama3_2", "mistral_nemo", "gptoss", "gpt2", "deepseek_v3"])
@settings(max_examples=40, deadline=None)
@given(text=unicode_text())
def test_byte_level_without_normaliser_is_always_exact(name: str, text: str) -> None:
    assert check(name, text).byte_exact.all()


def test_nfc_is_noticed_and_only_there() -> None:
    r = check("qwen3", "a e\u0301 b")
    tokens = [encoder("qwen3").vocab.token_bytes[i] for i in r.ids]
    assert [t for t, ok in zip(tokens, r.byte_exact, strict=True) if not ok] == [" é".encode()]
    assert r.byte_ends[-1] == len(r.source)


def test_a_prefix_space_touches_the_first_token_alone() -> None:
    r = check("llama2", "Hello world again")
    assert r.byte_exact.tolist() == [False, True, True]
    assert r.byte_ends.tolist() == [5, 11, 17]


@pytest.mark.parametrize("name", ["llama3_2", "qwen3", "gemma3", "llama2", "gptoss", "command_r_plus", "minilm"])
def test_no_special_string_of_the_vocabulary_becomes_a_special_token(name: str) -> None:
    enc = encoder(name)
    contents = list(enc.aliases)
    for content in contents[:: max(1, len(contents) // 60)]:
        for text in (content, f"a{content}b", f" {content} {content}"):
            r = check(name, text)
            assert set(r.ids.tolist()) & (set(enc.vocab.roles) - set(enc.vocab.ids_with_role("unk"))) == set()


def test_aliases_are_special_tokens_without_bytes() -> None:
    for name in ("qwen3", "gemma3", "llama2"):
        enc = encoder(name)
        first, second = list(enc.aliases)[:2]
        r = enc.encode_aliased(f"{enc.aliases[first]}hi{enc.aliases[second]}e\u0301 {first}")
        assert r.source == f"hie\u0301 {first}".encode()
        assert r.special.sum() == 2
        assert not r.loss_mask.any()
        assert r.byte_ends[-1] == len(r.source)


def test_begin_and_end_tokens() -> None:
    enc = encoder("llama3_2")
    r = enc.encode("Hi", bos=True, eos=True)
    assert r.ids.tolist() == [enc.bos_id, *enc.encode("Hi").ids.tolist(), enc.eos_id]
    assert r.loss_mask.tolist() == [False, *[True] * (len(r) - 2), True]
    assert [s.kind for s in r.segments] == ["text", "eot"]
    assert enc.adds_bos
    assert not encoder("qwen3").adds_bos
    assert encoder("qwen3").encode("Hi", bos=True).ids.tolist() == encoder("qwen3").encode("Hi").ids.tolist()


def test_batch_neighbours_do_not_matter_and_encoders_pickle() -> None:
    enc = encoder("qwen3")
    texts = list(TEXTS.values())
    alone = [enc.encode(t) for t in texts]
    for a, b in zip(alone, pickle.loads(pickle.dumps(enc)).encode_batch(texts), strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert a.byte_ends.tolist() == b.byte_ends.tolist()
        assert a.byte_exact.tolist() == b.byte_exact.tolist()


def test_spelling_of_raw_bytes_adds_no_space() -> None:
    for name in ("llama3_2", "qwen3", "gemma3", "llama2", "mistral_v1"):
        enc = encoder(name)
        for data in (b"hello", b" hello", b"123", "語".encode(), "語".encode()[:2], b"\n\n", b"  "):
            assert enc.vocab.join(enc.encode_bytes_ids(data)) == data


def test_truncation_cuts_segments() -> None:
    r = encoder("llama3_2").encode("one two three four", bos=True, eos=True)
    cut = r.truncated(3)
    assert len(cut) == 3
    assert [s.kind for s in cut.segments] == ["text"]
    assert cut.segments[0].end == cut.byte_ends[-1]
    assert cut.skipped["truncated_tokens"] == len(r) - 3
    assert r.truncated(99) is r


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TokenizerError, match=r"'\\ud800' at character 1"):
        encoder("gpt2").encode("a\ud800b")


@pytest.mark.parametrize("rule", [r"(a+)+b", r"^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_a_splitting_rule_that_gives_up_is_one_sentence(rule: str) -> None:
    """A regular expression of a stranger's tokenizer panics in its library, which is no Exception."""
    spec = copy.deepcopy(backend_spec(byte_level()))
    split = {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    tokenizer = ByteTokenizer(spec)
    assert tokenizer.encode("plain").ids.tolist()
    for text in ("a" * 3000 + "!", "a" * 3000 + "!\u00e9"):
        with pytest.raises(TokenizerError, match=r"3,00[12] characters"):
            tokenizer.encode(text)
