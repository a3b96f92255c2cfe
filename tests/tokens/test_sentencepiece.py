"""SentencePiece model files give the ids that the sentencepiece library gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece as library
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from limbeck.errors import TokenizerError
from limbeck.tokens import ByteTokenizer, load_tokenizer, read_tokenizer
from limbeck.tokens.sentencepiece import describe_model, read_model
from tests import zoo
from tests.texts import TEXTS

# Where the `tokenizers` library departs from SentencePiece, for transformers as well: it replaces characters by whole
# graphemes, and reads the name of a byte as that byte.
DEPARTS = {"j2": {"combining", "crlf", "hangul", "specials"}}


@pytest.mark.parametrize("name", ["mistral_v1", "mistral_v7", pytest.param("j2", marks=pytest.mark.slow)])
def test_ids_are_those_of_the_library(name: str) -> None:
    theirs = library.SentencePieceProcessor(model_file=str(zoo.sentencepiece_file(name)))
    own = read_tokenizer(zoo.sentencepiece_file(name))
    texts = [text for key, text in TEXTS.items() if key not in DEPARTS.get(name, ())]
    for text, rendering in zip(texts, own.encode_batch(texts), strict=True):
        assert rendering.ids.tolist() == theirs.encode(text)
    assert (own.bos_id, own.eos_id) == (theirs.bos_id(), theirs.eos_id())


def test_the_description_is_the_published_one() -> None:
    """The package named llama2 ships Mistral's vocabulary as a ``tokenizer.json``."""
    own, published = (read_tokenizer(p) for p in (zoo.sentencepiece_file("mistral_v1"), zoo.tokenizer_dir("llama2")))
    assert own.vocab.same_tokens(published.vocab)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as it was usual before ``tokenizer.json``."""
    shutil.copy(zoo.sentencepiece_file("mistral_v1"), tmp_path / "tokenizer.model")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "pad_token": "</s>",
        "chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_are_those_of_transformers(folder: Path) -> None:
    own, theirs = read_tokenizer(folder / "tokenizer.model"), ByteTokenizer.of(load_tokenizer(folder))
    # transformers ranks merges by id, not by score, and so writes runs of spaces otherwise than SentencePiece does
    texts = [text for key, text in TEXTS.items() if key not in ("spaces", "leading_space", "code")]
    for mine, other in zip(own.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert np.array_equal(mine.ids, other.ids)
        assert np.array_equal(mine.byte_ends, other.byte_ends)
    assert own.vocab.token_bytes == theirs.vocab.token_bytes
    assert own.vocab.roles == theirs.vocab.roles
    for attribute in ("named", "templates", "adds_bos", "bos_id", "eos_id", "pad_id", "special_ids"):
        assert getattr(own, attribute) == getattr(theirs, attribute), attribute


def test_a_file_is_one_tokenizer_with_and_without_transformers(folder: Path) -> None:
    file = folder / "tokenizer.model"
    made = load_tokenizer(file)
    assert ByteTokenizer.of(made).vocab.same_tokens(read_tokenizer(file).vocab)
    assert made("In 2011.")["input_ids"] == read_tokenizer(file).encode("In 2011.", bos=True).ids.tolist()
    assert made.decode(made("In 2011.")["input_ids"], skip_special_tokens=True) == "In 2011."


# -- models by hand ----------------------------------------------------------------------------------------------------


def model(*pieces: tuple[str, int], kind: int = 2, trainer: Any = (), spaces: Any = ()) -> bytes:
    """A model of unknown, begin and end tokens, letters, the sign for a space, and ``pieces`` with their kinds."""
    letters = [(c, 1) for c in "\u2581abc"]
    entries = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *pieces, *letters]
    rows = [{"piece": text, "score": -float(place), "type": kind} for place, (text, kind) in enumerate(entries)]
    made = ModelProto(pieces=rows, trainer_spec={"model_type": kind, **dict(trainer)}, normalizer_spec=dict(spaces))
    return bytes(made.SerializeToString())


WORDS = (("ab", 1), ("\u2581ab", 1), ("\u2581a", 1), ("bc", 1), ("\u2581c", 1))
LINES = ["ab", "abc abc", "  ab   c ", "", " ", "cab\u2581a", "a<s>b</s>", "xyz ab x", "abcabcbcbab"]


@pytest.mark.parametrize("adds_space", [0, 1])
@pytest.mark.parametrize("trims", [0, 1])
@pytest.mark.parametrize("kind", [1, 2])
def test_every_treatment_of_spaces(tmp_path: Path, adds_space: int, trims: int, kind: int) -> None:
    data = model(*WORDS, kind=kind, spaces={"add_dummy_prefix": adds_space, "remove_extra_whitespaces": trims})
    (tmp_path / "small.model").write_bytes(data)
    own, theirs = read_tokenizer(tmp_path / "small.model"), library.SentencePieceProcessor(model_proto=data)
    assert [own.encode(line).ids.tolist() for line in LINES] == [theirs.encode(line) for line in LINES]


def test_pieces_of_a_user_are_always_one_token(tmp_path: Path) -> None:
    data = model(*WORDS, ("cab", 4), ("\u2581\u2581", 4), spaces={"add_dummy_prefix": 0, "remove_extra_whitespaces": 0})
    (tmp_path / "small.model").write_bytes(data)
    own, theirs = read_tokenizer(tmp_path / "small.model"), library.SentencePieceProcessor(model_proto=data)
    for line in ("acab", "a  b", "   ab", "cabcab ab"):
        assert own.encode(line).ids.tolist() == theirs.encode(line)
    with pytest.raises(TokenizerError, match="'\u2581\u2581'"):
        describe_model(read_model(model(("\u2581\u2581", 4))))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", "no SentencePiece model"),
        (model()[:-3], "no SentencePiece model, or cut off"),
        (model(kind=3), "of type 3 is not supported"),
        (model(trainer={"treat_whitespace_as_suffix": True}), "spaces behind words"),
        (model(("a", 1)), "holds a piece twice"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=told) as caught:
        read_tokenizer(tmp_path / "tokenizer.model")
    assert "\n" not in str(caught.value)
