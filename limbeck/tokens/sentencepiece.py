"""A SentencePiece model file as a tokenizer's description: what its own header says, without the sentencepiece library.

The file is a protocol buffer with three messages: the pieces, what the trainer was told, how text is normalised. Only
the fields named here are read; nothing in the file is executed.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limbeck.errors import TokenizerError
from limbeck.tokens.vocab import Spec

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Model:
    """What a model file says that decides ids.

    Attributes:
        kind: 1 unigram, 2 byte-pair merges.
        named: ``unk_token``, ``bos_token``, ``eos_token``, ``pad_token`` -> id, where there is one.
        charsmap: the compiled table of characters that are replaced; empty where none is.
        adds_space: whether a space is put in front of a text; trims: whether runs of spaces become one.
    """

    pieces: tuple[Piece, ...]
    kind: int
    byte_fallback: bool
    named: Mapping[str, int]
    charsmap: bytes
    adds_space: bool
    trims: bool


def read_model(data: bytes) -> Model:
    """Parse a model file; ``TokenizerError`` where it is none, or asks for what its description cannot say."""
    messages: dict[int, list[Any]] = {1: [], 2: [b""], 3: [b""]}
    for number, value in _fields(data):
        messages.setdefault(number, []).append(value)
    if not messages[1] or not all(isinstance(value, bytes) for n in (1, 2, 3) for value in messages[n]):
        raise TokenizerError("the file is no SentencePiece model.")
    trainer, normaliser = (dict(_fields(messages[number][-1])) for number in (2, 3))
    ids = {"unk": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
    pieces = tuple(map(_piece, messages[1]))
    if trainer.get(24) or not normaliser.get(5, 1):
        raise TokenizerError("the SentencePiece model writes spaces behind words or not at all; that is not supported.")
    return Model(
        pieces=pieces,
        kind=trainer.get(3, _UNIGRAM),
        byte_fallback=bool(trainer.get(35)),
        named={f"{key}_token": i for key, i in ids.items() if 0 <= i < len(pieces)},
        charsmap=normaliser.get(2, b""),
        adds_space=bool(normaliser.get(3, 1)),
        trims=bool(normaliser.get(4, 1)),
    )


def describe_model(model: Model) -> Spec:
    """The model as ``tokenizer.json`` would have it."""
    if model.kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"a SentencePiece model of type {model.kind} is not supported, only unigram and BPE.")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": _normaliser(model),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _sequence(
            "decoders", [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *_strip_front(model)]
        ),
        "model": _unigram(model) if model.kind == _UNIGRAM else _bpe(model),
    }


def _unigram(model: Model) -> Spec:
    return {
        "type": "Unigram",
        "unk_id": model.named.get("unk_token"),
        "vocab": [[piece.text, piece.score] for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: Model) -> Spec:
    ids = {piece.text: i for i, piece in enumerate(model.pieces)}
    if len(ids) < len(model.pieces):
        raise TokenizerError("the SentencePiece model holds a piece twice.")
    unknown = model.named.get("unk_token")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else model.pieces[unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": ids,
        "merges": _merges(model.pieces, ids),
    }


def _merges(pieces: Sequence[Piece], ids: Mapping[str, int]) -> list[list[str]]:
    """Every way to join two pieces into a third, best-scored result first: how SentencePiece merges."""
    merges: list[list[str]] = []
    for piece in sorted((p for p in pieces if p.kind == _NORMAL), key=lambda p: -p.score):
        cuts = ((piece.text[:i], piece.text[i:]) for i in range(1, len(piece.text)))
        known = [(ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
        merges += [[a, b] for _, _, a, b in sorted(known)]
    return merges


def _added_tokens(model: Model) -> list[Spec]:
    """Pieces that never come out of the model: unknown and control ones are special, a user's are always one token."""
    added = []
    for i, piece in enumerate(model.pieces):
        if piece.kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        # a run of spaces is met in the text only after it has been written with the sign that stands for spaces
        spaced = _SPACE in piece.text and piece.kind == _USER_DEFINED
        if spaced and (model.adds_space or model.trims):
            raise TokenizerError(
                f"the SentencePiece model has the piece {piece.text!r} and changes the spaces of a text; that is not "
                "supported: give a tokenizer.json."
            )
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": spaced}
        added.append({"id": i, "content": piece.text, **flags, "special": piece.kind != _USER_DEFINED})
    return added


def _normaliser(model: Model) -> Spec:
    steps: list[Spec] = []
    if model.charsmap:
        table = base64.b64encode(model.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if model.trims:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.adds_space:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    return _sequence("normalizers", [*steps, _replace(" ", _SPACE)])


def _strip_front(model: Model) -> list[Spec]:
    return [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.adds_space else []


def _replace(found: str, by: str) -> Spec:
    return {"type": "Replace", "pattern": {"String": found}, "content": by}


def _sequence(of: str, steps: list[Spec]) -> Spec:
    return {"type": "Sequence", of: steps}


# -- protocol buffers --------------------------------------------------------------------------------------------------


def _piece(message: bytes) -> Piece:
    values = dict(_fields(message))
    try:
        (score,) = struct.unpack("<f", values.get(2, b"\0\0\0\0"))
        return Piece(values[1].decode("utf-8"), score, values.get(3, _NORMAL))
    except (KeyError, AttributeError, TypeError, UnicodeDecodeError, struct.error):
        raise TokenizerError("the SentencePiece model holds a piece that is none; the file is damaged.") from None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: integers as such, everything else as its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise TokenizerError("the file is no SentencePiece model, or cut off.")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise TokenizerError("the file is no SentencePiece model, or cut off.")
