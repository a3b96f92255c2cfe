"""JSON values out of files, a line at a time: plain, ``.gz``, ``.bz2``, ``.xz``, ``.zst``, or standard input as ``-``.

Only training data, which need random access, have a reader of their own (``limbeck.data.readers``).
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from limbeck.errors import DataError, one_line

MAX_BYTES = 1 << 29
"""A line, or a file that is one JSON document, must be parsed whole; beyond this size it counts as unreadable."""

STDIN = "-"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SURROGATE = re.compile("[\ud800-\udfff]")

Bad = Callable[[int, str], None]
"""Told of a line that is no JSON: its number (from 1) and why."""


class Record(NamedTuple):
    """A JSON value and the line (from 1) where it starts."""

    line: int
    value: Any


@contextmanager
def open_bytes(path: str | Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name says it is packed; ``-`` is standard input.

    Raises:
        DataError: the file cannot be opened, or ends in the middle of its packing.
    """
    name = str(path)
    if name == STDIN:
        yield sys.stdin.buffer
        return
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
    try:
        with openers.get(Path(name).suffix.lower(), open)(name, "rb") as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{name} is not a whole compressed file: {error}; fetch it again.") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error


def _open_zst(name: str, mode: str) -> Any:
    for module in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(module).open(name, mode)
        except ModuleNotFoundError:
            continue
    try:
        pyarrow = importlib.import_module("pyarrow")
    except ModuleNotFoundError:
        raise DataError(f"{name} is packed with zstd: unpack it, or `pip install zstandard`.") from None
    return io.BufferedReader(pyarrow.input_stream(name, compression="zstd"))


def read_records(
    path: str | Path, *, bad: Bad | None = None, document: bool = False, finished: bool = False
) -> Iterator[Record]:
    """The JSON values of a file, one per line that is not blank; memory is bounded by one line.

    Lone surrogates, which JSON can spell and UTF-8 cannot, become U+FFFD.

    Args:
        bad: Called for each line that is no JSON, which is then left out; by default such a line is a ``DataError``.
        document: The file may also be one JSON value over many lines, which is then the only record.
        finished: Leave out a last line without its line end: a writer was killed, or is at work.
    """

    def refuse(line: int, why: str) -> None:
        raise DataError(f"{path}:{line} is not JSON ({why}); mend or remove the line.")

    bad = bad or refuse
    with open_bytes(path) as stream:
        lines = _Lines(stream)
        for raw in lines:
            if not raw.strip() or (finished and not raw.endswith(b"\n")):
                continue
            try:
                yield Record(lines.number, parse(raw))
            except (ValueError, RecursionError) as error:
                if document and raw.lstrip(b"\xef\xbb\xbf \t")[:1] in (b"{", b"["):
                    with suppress(ValueError, RecursionError):
                        yield Record(lines.number, parse(raw + lines.rest()))
                        return
                too_long = len(raw) > MAX_BYTES
                bad(lines.number, f"longer than {MAX_BYTES >> 20} MiB" if too_long else one_line(error, 120))
            document = False


class _Lines:
    """The lines of a stream; ``number`` is that of the last one, ``rest`` what follows it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.number = 0
        self._stream = stream
        self._ahead: IO[bytes] = io.BytesIO()

    def __iter__(self) -> Iterator[bytes]:
        while raw := self._read(MAX_BYTES + 1):
            self.number += 1
            if len(raw) > MAX_BYTES and not raw.endswith(b"\n"):
                while (part := self._read(1 << 20)) and not part.endswith(b"\n"):
                    pass
            yield raw

    def _read(self, limit: int) -> bytes:
        return self._ahead.readline(limit) or self._stream.readline(limit)

    def rest(self) -> bytes:
        """Up to ``MAX_BYTES`` of what follows, in whole lines; they are still iterated over afterwards."""
        found = self._stream.read(MAX_BYTES) + self._stream.readline(MAX_BYTES)
        self._ahead = io.BytesIO(found)
        return found


def parse(raw: bytes) -> Any:
    """A JSON value from UTF-8 bytes; ValueError or RecursionError where it is none."""
    value = json.loads(raw.decode("utf-8-sig"))
    return replace_surrogates(value) if b"\\ud" in raw or b"\\uD" in raw else value


def replace_surrogates(value: Any) -> Any:
    """A JSON value without lone surrogates, which JSON can spell and UTF-8 cannot: each becomes U+FFFD."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_SURROGATE.sub("\ufffd", key): replace_surrogates(item) for key, item in value.items()}
    return value
