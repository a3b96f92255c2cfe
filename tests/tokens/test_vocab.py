"""ByteVocab on real vocabularies: bytes, roles, fingerprints, head widths."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from limbeck.errors import TokenizerError
from limbeck.tokens import ByteVocab, load_tokenizer
from limbeck.tokens.vocab import byte_alphabet, is_end, quoted, readable, role_class, role_of
from tests.helpers.tokenizers import tiny
from tests.zoo import FAMILY, NAMES, QUICK_NAMES, tokenizer


def test_byte_alphabet_is_a_bijection_onto_all_bytes() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == 0x20
    assert byte_alphabet()["Ċ"] == 0x0A
    assert byte_alphabet()["A"] == 0x41


@pytest.mark.parametrize("name", NAMES)
def test_every_id_has_bytes_or_a_role(name: str) -> None:
    vocab = ByteVocab.from_tokenizer(tokenizer(name))
    assert vocab.family == FAMILY[name]
    assert vocab.size == len(tokenizer(name)) or not vocab.present.all()
    empty = vocab.byte_len == 0
    plain = vocab.present & ~vocab.special
    # A piece such as a bare "##" or a metaspace alone may be empty; real vocabularies have at most a handful.
    assert np.count_nonzero(empty & plain) <= 2
    assert not vocab.byte_len[vocab.special].any()
    assert set(vocab.roles) == set(np.flatnonzero(vocab.special).tolist())
    assert ByteVocab.from_tokenizer(tokenizer(name)) is vocab


def test_roles_of_known_families() -> None:
    llama, qwen, gemma = (ByteVocab.from_tokenizer(tokenizer(n)) for n in ("llama3_2", "qwen3", "gemma3"))
    assert llama.ids_with_role("bos") == (128000,)
    assert llama.ids_with_role("eot") == (128009,)
    assert qwen.ids_with_role("eot") == (151645,)
    assert qwen.ids_with_role("bos") == ()
    assert gemma.ids_with_role("eot") == (106,)
    assert role_class("eos") == role_class("eot")
    assert is_end("eot")
    assert not is_end("bos")
    assert role_of("<my_end>", {"eos_token": "<my_end>"}) == "eos"
    assert role_of("<what>", {}) == "special:<what>"


def test_gemma_runs_of_spaces_are_spaces_and_byte_tokens_are_bytes() -> None:
    vocab = ByteVocab.from_tokenizer(tokenizer("gemma3"))
    assert {b" " * n for n in range(2, 32)} <= set(vocab.token_bytes)
    assert all(bytes([b]) in vocab.ids_by_bytes for b in range(256))


def test_non_special_added_tokens_are_their_text() -> None:
    qwen = tokenizer("qwen3")
    vocab = ByteVocab.from_tokenizer(qwen)
    think = qwen.convert_tokens_to_ids("<think>")
    assert vocab.token_bytes[think] == b"<think>"
    assert not vocab.special[think]


def test_head_wider_and_narrower_than_the_tokenizer() -> None:
    qwen = ByteVocab.from_tokenizer(tokenizer("qwen3"))
    assert qwen.head_report(151936) == {"width": 151936, "tokens": 151669, "extra_rows": 267, "missing_ids": 0}
    gemma = ByteVocab.from_tokenizer(tokenizer("gemma3"))
    assert gemma.head_report(262144)["missing_ids"] == 1


@pytest.mark.parametrize("names", [QUICK_NAMES, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_fingerprints_tell_tokenizers_apart(names: tuple[str, ...]) -> None:
    # The package named llama2 ships the vocabulary of Mistral v1: equality is decided by bytes, never by name.
    names = tuple(n for n in names if n != "llama2")
    prints = {ByteVocab.from_tokenizer(tokenizer(n)).fingerprint for n in names}
    assert len(prints) == len(names)
    twins = (ByteVocab.from_tokenizer(tokenizer(n)) for n in ("llama2", "mistral_v1"))
    assert next(twins).same_tokens(next(twins))


def _changed(base: PreTrainedTokenizerFast, change) -> str:
    spec = json.loads(base.backend_tokenizer.to_str())
    change(spec)
    from tokenizers import Tokenizer

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))
    return ByteVocab.from_tokenizer(other).fingerprint


def test_fingerprint_follows_every_part_that_decides_ids() -> None:
    base = tiny(300)
    same = _changed(base, lambda spec: spec.update(post_processor=None, padding=None))
    assert same == ByteVocab.from_tokenizer(base).fingerprint
    changes = [
        lambda s: s.update(normalizer={"type": "NFC"}),
        lambda s: s["model"]["merges"].pop(),
        lambda s: s["added_tokens"].append({**s["added_tokens"][0], "id": 300, "content": "<new>"}),
        lambda s: s["model"]["vocab"].update({"zzzzzz": 300}),
        lambda s: s["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True),
    ]
    prints = [_changed(base, c) for c in changes]
    assert len({same, *prints}) == len(changes) + 1


def _unigram(**model: object) -> str:
    pieces = [["<unk>", 0.0], ["\u2581a", -1.0], ["a", -2.0]]
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    spec = {"model": {"type": "Unigram", "vocab": pieces, **model}, "added_tokens": [], "decoder": space}
    return ByteVocab.from_spec(spec, {}).fingerprint


def test_an_id_of_zero_is_not_the_absence_of_one() -> None:
    prints = [_unigram(unk_id=unk_id, byte_fallback=False) for unk_id in (None, 0, 1)]
    assert len(set(prints)) == 3
    assert prints[0] == _unigram() == _unigram(dropout=0.0) == _unigram(dropout=None)


def test_tokens_are_shown_on_one_line() -> None:
    assert quoted(b" a\n\t") == r"' a\n\t'"
    assert quoted("水".encode()[:2]) == r"'\xe6\xb0'"
    assert quoted("水".encode()) == "'水'"


def test_tokens_are_readable_beside_others() -> None:
    assert readable(" a\n\t\u00a0") == "·a⏎⇥⍽"
    # a text must not speak to the terminal
    assert readable("\x1b[31m\u202e水") == "\\x1b[31m\\u202e水"


def test_vocab_survives_pickling() -> None:
    vocab = ByteVocab.from_tokenizer(tokenizer("gpt2"))
    again = pickle.loads(pickle.dumps(vocab))
    assert again.token_bytes == vocab.token_bytes
    assert again.same_tokens(vocab)


def test_tokenizers_without_a_backend_and_bad_paths_are_refused(tmp_path) -> None:
    with pytest.raises(TokenizerError, match=r"Slow .*backend"):
        ByteVocab.from_tokenizer(type("Slow", (), {"special_tokens_map": {}, "__hash__": object.__hash__})())
    with pytest.raises(TokenizerError, match=r"nowhere/tokenizer\.json.*exist"):
        load_tokenizer(tmp_path / "nowhere" / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(TokenizerError, match=r"read from .*tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(TokenizerError, match=r"notes\.txt .*tekken\.json"):
        load_tokenizer(tmp_path / "notes.txt")


@pytest.mark.parametrize("number", [400_000_000, 2**40, -1])
def test_ids_without_measure_cost_no_memory(number: int) -> None:
    spec = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [], "pre_tokenizer": None}
    token = {"id": number, "content": "<x>", "special": True}
    for odd in (
        {**spec, "added_tokens": [token]},
        {**spec, "model": {**spec["model"], "vocab": {"a": 0, "b": number}}},
    ):
        with pytest.raises(TokenizerError):
            ByteVocab.from_spec(odd, {})
