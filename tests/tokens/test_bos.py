"""The BOS token in front of a text: switched on and off, kept in saved copies, read from GGUF files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from limbeck.errors import TokenizerError
from limbeck.tokens import ByteTokenizer, load_tokenizer
from limbeck.tokens.bos import adds_bos, gguf_adds_bos, set_bos
from tests.helpers.tokenizers import TEXTS, trained_bpe
from tests.zoo import tokenizer_dir


@pytest.mark.parametrize("prefix", [False, True])
def test_a_switched_tokenizer_keeps_its_ids_and_its_setting(tmp_path: Path, prefix: bool) -> None:
    tokenizer = trained_bpe(TEXTS, 300, specials=["<s>"], bos_token="<s>")
    plain = tokenizer("two words", add_special_tokens=False)["input_ids"]
    if not prefix:
        set_bos(tokenizer, True)
    set_bos(tokenizer, prefix)
    assert adds_bos(tokenizer) is prefix
    tokenizer.save_pretrained(tmp_path)
    for copy in (tokenizer, load_tokenizer(tmp_path)):
        assert copy("two words")["input_ids"] == [copy.bos_token_id] * prefix + plain
        assert ByteTokenizer.of(copy).adds_bos is prefix


@pytest.mark.parametrize("name", ["llama3_2", "gemma3", "deepseek_v3", "gpt2"])
def test_real_tokenizers_switch_both_ways(name: str) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(name))
    own, plain = adds_bos(tokenizer), tokenizer("a 12", add_special_tokens=False)["input_ids"]
    for wanted in (not own, own):
        set_bos(tokenizer, wanted)
        assert tokenizer("a 12")["input_ids"] == [tokenizer.bos_token_id] * wanted + plain


def test_a_tokenizer_without_a_bos_token_says_so() -> None:
    with pytest.raises(TokenizerError, match="BOS"):
        set_bos(trained_bpe(TEXTS, 300, specials=["<e>"], eos_token="<e>"), True)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize("flag", [True, False, None])
def test_what_a_gguf_file_says(tmp_path: Path, flag: bool | None) -> None:
    tokens = [b"a", b"long token"]
    entries = [
        _text(b"general.name") + struct.pack("<I", 8) + _text(b"some model"),
        _text(b"tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, len(tokens))
        + b"".join(map(_text, tokens)),
        _text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3),
        _text(b"llama.block_count") + struct.pack("<II", 4, 12),
    ]  # fmt: skip
    if flag is not None:
        entries.append(_text(b"tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, flag))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    assert gguf_adds_bos(path) is flag
