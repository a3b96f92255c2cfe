"""A SentencePiece model file as a tokenizer's description.

The file is read with the sentencepiece package; the conversion is ours because it keeps the order in which
SentencePiece merges, by score. transformers 5.22 ranks merges by id: of 3,020 lines of prose and source code it encodes
370 otherwise than SentencePiece does with Mistral's models (v1 and v7), mostly where spaces follow each other; this
conversion none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limbeck.errors import TokenizerError
from limbeck.tokens.vocab import Spec

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its id is its position."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Model:
    """Facts of a model file that decide ids.

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
    proto = _parse(data)
    trainer, normaliser = proto.trainer_spec, proto.normalizer_spec
    ids = {"unk": trainer.unk_id, "bos": trainer.bos_id, "eos": trainer.eos_id, "pad": trainer.pad_id}
    if trainer.treat_whitespace_as_suffix or not normaliser.escape_whitespaces:
        raise TokenizerError("the SentencePiece model writes spaces behind words or not at all; that is not supported.")
    return Model(
        pieces=tuple(Piece(piece.piece, piece.score, piece.type) for piece in proto.pieces),
        kind=trainer.model_type,
        byte_fallback=trainer.byte_fallback,
        # -1 where the model has none; that is the default of pad
        named={f"{key}_token": i for key, i in ids.items() if 0 <= i < len(proto.pieces)},
        charsmap=normaliser.precompiled_charsmap,
        adds_space=normaliser.add_dummy_prefix,
        trims=normaliser.remove_extra_whitespaces,
    )


def _parse(data: bytes) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise TokenizerError(
            "to read a SentencePiece model file takes sentencepiece: pip install 'limbeck[sentencepiece]'"
        ) from None
    messages: Any = sentencepiece_model_pb2  # whose classes are made when it is loaded
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise TokenizerError("the file is no SentencePiece model, or cut off.") from None
    # protobuf takes an empty file for a message without fields
    if not proto.pieces:
        raise TokenizerError("the file is no SentencePiece model.")
    return proto


def describe_model(model: Model) -> Spec:
    """The model as ``tokenizer.json`` would have it."""
    if model.kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"a SentencePiece model of type {model.kind} is not supported, only unigram and BPE.")
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.adds_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": _normaliser(model),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _sequence("decoders", decoders),
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
    # before the sign is put in front: behind it a space at the beginning would not be stripped
    if model.trims:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.adds_space:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    return _sequence("normalizers", [*steps, _replace(" ", _SPACE)])


def _replace(pattern: str, by: str) -> Spec:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": by}


def _sequence(of: str, steps: list[Spec]) -> Spec:
    return {"type": "Sequence", of: steps}
