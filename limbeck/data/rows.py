"""A few rows of data files, spread over them, for people and audits to look at. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from limbeck.data.forms import chat_form
from limbeck.data.readers import BadRecord, Reader, expand, open_reader
from limbeck.errors import DataError

MOST_BYTES = 4096
"""Longest text of a row; conversations stay whole."""


@dataclass(frozen=True)
class Row:
    """One text or one conversation; ``source`` is ``file:line``."""

    source: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: Any = None


def sample_rows(
    paths: str | Sequence[str],
    limit: int,
    *,
    text_key: str = "text",
    messages_key: str = "messages",
    max_bytes: int = MOST_BYTES,
) -> list[Row]:
    """At most ``limit`` rows of files, globs, folders or ``hf:`` ids, taken at even distances from each file.

    A record is a text (``text_key``), a conversation (``messages_key``, with ``tools`` where it has them), or a
    question with its answer in two columns, which is a conversation too. Plain text gives pieces of ``max_bytes``, and
    longer texts of records are cut there.
    """
    files = expand(paths if isinstance(paths, str) else list(paths))
    shares = np.diff(np.linspace(0, limit, len(files) + 1).round().astype(int))
    rows: list[Row] = []
    for path, share in zip(files, shares.tolist(), strict=True):
        reader = open_reader(path, format="auto", columns=list, text_key=text_key, cache_dir=None, text_limit=max_bytes)
        numbers = np.unique(np.linspace(0, len(reader) - 1, min(share, len(reader))).round().astype(int))
        rows += [_row(reader, int(number), text_key, messages_key, max_bytes) for number in numbers]
    if not rows:
        raise DataError(f"{files[0]} has no record; give a file with texts or conversations.")
    return rows


def _row(reader: Reader, number: int, text_key: str, messages_key: str, max_bytes: int) -> Row:
    source = reader.location(number)
    try:
        record = reader.row(number)
    except BadRecord as error:
        raise DataError(f"{source}: {error}; correct the file.") from None
    if isinstance(record.get(text_key), str):
        return Row(source, text=first_bytes(record[text_key], max_bytes))
    messages = record.get(messages_key)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Row(source, messages=tuple(messages), tools=record.get("tools"))
    form = chat_form(record, source)
    if form is not None:
        try:
            return Row(source, messages=tuple(form.convert(record)), tools=record.get("tools"))
        except BadRecord as error:
            raise DataError(f"{source}: {error}; correct the file.") from None
    raise DataError(
        f"{source} has neither a text under {text_key!r} nor a conversation under {messages_key!r}, but "
        f"{', '.join(map(repr, list(record)[:8])) or 'nothing'}; name the column with --text-key."
    )


def first_bytes(text: str, limit: int) -> str:
    """At most ``limit`` bytes of a text, whole characters only."""
    # no character has more than four bytes
    if len(text) * 4 <= limit:
        return text
    # replace: half a surrogate pair; ignore: a character that the cut goes through
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
