"""Plain text out of corpus files, a block at a time, for counting."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from limbeck.errors import DataError
from limbeck.utils.jsonl import COMPRESSED, open_bytes, read_records

BLOCK_CHARS = 16_384


def iter_texts(paths: Iterable[str | Path], *, block_chars: int = BLOCK_CHARS) -> Iterator[str]:
    """Texts of corpus files, in order, with memory bounded by one record.

    A `.jsonl` file gives the `text` (or the messages' `content`) of each line; any other file is read as UTF-8 text in
    blocks of whole lines. Both may be packed (`.jsonl.gz`, `.txt.zst`, ...).
    """
    for name in paths:
        path = Path(name)
        if not path.is_file():
            raise DataError(f"there is no corpus file {path}; give text or .jsonl files.")
        plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
        yield from _jsonl_texts(path) if plain.suffix == ".jsonl" else _text_blocks(path, block_chars)


def batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of up to `size` texts."""
    source = iter(texts)
    while batch := list(islice(source, size)):
        yield batch


def _text_blocks(path: Path, block_chars: int) -> Iterator[str]:
    lines: list[str] = []
    length = 0
    try:
        with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as stream:
            while line := stream.readline(block_chars):
                lines.append(line)
                length += len(line)
                if length >= block_chars:
                    yield "".join(lines)
                    lines, length = [], 0
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); convert it or leave it out.") from None
    if lines:
        yield "".join(lines)


def _jsonl_texts(path: Path) -> Iterator[str]:
    for line, record in read_records(path):
        yield from _record_texts(record, f"{path}:{line}")


def _record_texts(record: object, where: str) -> list[str]:
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return [record["text"]]
        messages = record.get("messages")
        if isinstance(messages, list):
            return [m["content"] for m in messages if isinstance(m, dict) and isinstance(m.get("content"), str)]
    raise DataError(f"{where} has neither `text` nor `messages`; expected one of them in every record.")
