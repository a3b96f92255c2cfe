"""SentencePiece model files, read without the sentencepiece library, give the ids that it gives."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import TokenizerError
from limbeck.tokens import Tokenizer, load_tokenizer, read_tokenizer
from limbeck.tokens.sentencepiece import describe_model, read_model
from tests import zoo
from tests.texts import TEXTS

# Where the `tokenizers` library departs from SentencePiece, for transformers as well: it replaces characters by whole
# graphemes, and reads the name of a byte as that byte.
DEPARTS = {"j2": {"combining", "crlf", "hangul", "specials"}}


@pytest.mark.parametrize("name", ["mistral_v1", "mistral_v7", pytest.param("j2", marks=pytest.mark.slow)])
def test_ids_are_those_of_the_library(name: str) -> None:
    library = pytest.importorskip("sentencepiece")
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


@pytest.mark.train
def test_ids_are_those_of_transformers(folder: Path) -> None:
    pytest.importorskip("sentencepiece")
    own, theirs = read_tokenizer(folder / "tokenizer.model"), Tokenizer.of(load_tokenizer(folder))
    # transformers ranks merges by id, not by score, and so writes runs of spaces otherwise than SentencePiece does
    texts = [text for key, text in TEXTS.items() if key not in ("spaces", "leading_space", "code")]
    for mine, other in zip(own.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert np.array_equal(mine.ids, other.ids)
        assert np.array_equal(mine.ends, other.ends)
    assert own.vocab.token_bytes == theirs.vocab.token_bytes
    assert own.vocab.roles == theirs.vocab.roles
    for attribute in ("named", "templates", "adds_bos", "bos_id", "eos_id", "pad_id", "special_ids"):
        assert getattr(own, attribute) == getattr(theirs, attribute), attribute


@pytest.mark.train
def test_a_file_is_one_tokenizer_with_and_without_transformers(folder: Path) -> None:
    file = folder / "tokenizer.model"
    made = load_tokenizer(file)
    assert Tokenizer.of(made).vocab.same_tokens(read_tokenizer(file).vocab)
    assert made("In 2011.")["input_ids"] == read_tokenizer(file).encode("In 2011.", bos=True).ids.tolist()
    assert made.decode(made("In 2011.")["input_ids"], skip_special_tokens=True) == "In 2011."


# -- models by hand ----------------------------------------------------------------------------------------------------


def field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value % (1 << 64))


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def model(
    *pieces: tuple[str, int], trainer: dict[int, int] | None = None, spaces: dict[int, int] | None = None
) -> bytes:
    """A model of unknown, begin and end tokens, letters, the sign for a space, and ``pieces`` with their kinds."""
    letters = [(c, 1) for c in "\u2581abc"]
    entries = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *pieces, *letters]
    made = b""
    for place, (text, kind) in enumerate(entries):
        made += field(1, field(1, text.encode()) + field(2, float(-place)) + field(3, kind))
    told = {3: 2, **(trainer or {})}
    made += field(2, b"".join(field(n, v) for n, v in told.items()))
    return made + field(3, b"".join(field(n, v) for n, v in (spaces or {}).items()))


WORDS = (("ab", 1), ("\u2581ab", 1), ("\u2581a", 1), ("bc", 1), ("\u2581c", 1))
LINES = ["ab", "abc abc", "  ab   c ", "", " ", "cab\u2581a", "a<s>b</s>", "xyz ab x", "abcabcbcbab"]


@pytest.mark.parametrize("adds_space", [0, 1])
@pytest.mark.parametrize("trims", [0, 1])
@pytest.mark.parametrize("kind", [1, 2])
def test_every_treatment_of_spaces(tmp_path: Path, adds_space: int, trims: int, kind: int) -> None:
    library = pytest.importorskip("sentencepiece")
    data = model(*WORDS, trainer={3: kind}, spaces={3: adds_space, 4: trims})
    (tmp_path / "small.model").write_bytes(data)
    own, theirs = read_tokenizer(tmp_path / "small.model"), library.SentencePieceProcessor(model_proto=data)
    assert [own.encode(line).ids.tolist() for line in LINES] == [theirs.encode(line) for line in LINES]


def test_pieces_of_a_user_are_always_one_token(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    data = model(*WORDS, ("cab", 4), ("\u2581\u2581", 4), spaces={3: 0, 4: 0})
    (tmp_path / "small.model").write_bytes(data)
    own, theirs = read_tokenizer(tmp_path / "small.model"), library.SentencePieceProcessor(model_proto=data)
    for line in ("acab", "a  b", "   ab", "cabcab ab"):
        assert own.encode(line).ids.tolist() == theirs.encode(line)
    with pytest.raises(TokenizerError, match="changes the spaces"):
        describe_model(read_model(model(("\u2581\u2581", 4))))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", "no SentencePiece model"),
        (model()[:-3], "no SentencePiece model, or cut off"),
        (field(1, field(3, 1)), "a piece that is none"),
        (model(trainer={3: 3}), "of type 3 is not supported"),
        (model(trainer={24: 1}), "spaces behind words"),
        (model(("a", 1)), "holds a piece twice"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=told) as caught:
        read_tokenizer(tmp_path / "tokenizer.model")
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_damage_stops_the_reader(junk: bytes, at: int) -> None:
    whole = model(*WORDS)
    for data in (junk, whole[:at] + junk + whole[at:]):
        try:
            describe_model(read_model(data))
        except TokenizerError:
            continue
