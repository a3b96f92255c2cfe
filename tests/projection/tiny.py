"""Small tokenizers whose every spelling can be worked out by hand."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from limbeck.projection import Projection

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _merges(words: Iterable[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that build each word from the left; every prefix becomes a token."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for cut in range(1, len(word)):
            pair = (word[:cut], word[cut])
            vocab.setdefault(word[: cut + 1], len(vocab))
            if pair not in merges:
                merges.append(pair)
    return merges


def display(data: bytes) -> str:
    """Bytes in the GPT-2 display alphabet, through the library's own byte-level splitter."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in keep)}
    return "".join(table[b] for b in data)


def byte_level(
    words: Iterable[str | bytes] = (),
    *,
    specials: Iterable[str] = (),
    split_digits: bool = False,
    nfc: bool = False,
    order_from: int = 0,
) -> Any:
    """Byte-level BPE of all 256 bytes plus `words` and their prefixes; `order_from` rotates the ids of the bytes."""
    alphabet = _ALPHABET[order_from:] + _ALPHABET[:order_from]
    vocab = {c: i for i, c in enumerate(alphabet)}
    shown = [display(w.encode() if isinstance(w, str) else w) for w in words]
    merges = _merges(shown, vocab)
    tok = Tokenizer(BPE(vocab=vocab, merges=merges))
    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    tok.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    if nfc:
        tok.normalizer = normalizers.NFC()
    return _wrap(tok, specials)


def sentencepiece(words: Iterable[str] = (), *, specials: Iterable[str] = (), prefix: bool = False) -> Any:
    """SentencePiece-style BPE with byte tokens, letters, `words` (spaces as U+2581); `prefix` puts a space in front."""
    vocab: dict[str, int] = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    shown = [w.replace(" ", "\u2581") for w in words]
    for char in sorted({*"\u2581abcdefghijklmnopqrstuvwxyzABC0123456789", *"".join(shown)}):
        vocab.setdefault(char, len(vocab))
    merges = _merges(shown, vocab)
    tok = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    tok.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrap(tok, specials)


def _wrap(tok: Tokenizer, specials: Iterable[str]) -> Any:
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tok)


def row(projection: Projection, student_id: int) -> dict[int, float]:
    """One row of W as {teacher id: weight}."""
    filled = projection.indices[student_id] >= 0
    ids, weights = projection.indices[student_id][filled], projection.weights[student_id][filled]
    return {int(t): float(w) for t, w in zip(ids, weights, strict=True)}


def dense(projection: Projection) -> np.ndarray:
    """W as a full matrix, for small vocabularies only."""
    full = np.zeros((projection.student_size, projection.teacher_size))
    rows, slots = np.nonzero(projection.indices >= 0)
    full[rows, projection.indices[rows, slots]] = projection.weights[rows, slots]
    return full


def decomposed(text: str) -> str:
    """Text with its accents as separate characters."""
    return unicodedata.normalize("NFD", text)
