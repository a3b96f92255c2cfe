"""The begin token in front of a text: some models are lost without it, some are worse with it, and none complains."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import processors

from limbeck.errors import TokenizerError

_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the fixed-size types of a GGUF header."""
_STRING, _ARRAY, _BOOL = 8, 9, 7


def adds_begin(tokenizer: Any) -> bool:
    """Whether a transformers tokenizer puts its begin token in front of a text by itself."""
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("a")["input_ids"][:1] == [begin]


def set_begin(tokenizer: Any, wanted: bool) -> None:
    """Make a transformers tokenizer put its begin token in front of every text, or none; saved copies do the same."""
    if adds_begin(tokenizer) == wanted:
        return
    begin = tokenizer.bos_token
    if begin is None:
        raise TokenizerError(f"the tokenizer {tokenizer.name_or_path!r} has no begin token; leave bos at auto")
    backend = tokenizer.backend_tokenizer
    if wanted:
        template = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, tokenizer.bos_token_id)]
        )
        before = [backend.post_processor] if backend.post_processor is not None else []
        backend.post_processor = processors.Sequence([*before, template])
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)


def gguf_adds_begin(path: Path) -> bool | None:
    """What a GGUF file says about the begin token (``tokenizer.ggml.add_bos_token``); None: nothing."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return None
        _, _, entries = struct.unpack("<IQQ", file.read(20))
        for _ in range(entries):
            key = _text(file)
            (kind,) = struct.unpack("<I", file.read(4))
            if key == b"tokenizer.ggml.add_bos_token" and kind == _BOOL:
                return file.read(1) != b"\0"
            _skip(file, kind)
    return None


def _text(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _text(file)
    elif kind == _ARRAY:
        inner, length = struct.unpack("<IQ", file.read(12))
        if inner in _GGUF_SIZES:
            file.seek(_GGUF_SIZES[inner] * length, 1)
        else:
            for _ in range(length):
                _skip(file, inner)
    elif kind in _GGUF_SIZES:
        file.seek(_GGUF_SIZES[kind], 1)
    else:
        raise TokenizerError(f"{file.name} has a header entry of unknown type {kind}; it is damaged or too new")
