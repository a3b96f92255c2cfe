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

_EXPANSION = 200
_EXPANSION_FREE = 64 << 20
_BLOCK = 1 << 18

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
            packed = Path(name).suffix.lower() in openers
            yield io.BufferedReader(_Unpacking(stream, Path(name)), _BLOCK) if packed else stream
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # decoders raise OSError without a number; one with a number is the disk's
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
        raise DataError(f"{name} is not a whole compressed file: {error}; fetch it again.") from error


def check_expansion(path: str | Path, size: int) -> None:
    """Refuse a packed file of which so many bytes were unpacked: text becomes some ten times as long, repeated text
    some hundred times, and only what is made to fill memory or a disk more than that."""
    packed = Path(path).stat().st_size
    if size > _EXPANSION_FREE + _EXPANSION * packed:
        raise DataError(
            f"{path} unpacks to more than {_EXPANSION} times its {packed:,} bytes; unpack it yourself if that is meant"
        )


class _Unpacking(io.RawIOBase):
    """A stream of unpacked bytes that ends with an error where there are too many for the packed file."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._size = stream, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._stream.read(len(buffer))
        self._size += len(part)
        check_expansion(self._path, self._size)
        buffer[: len(part)] = part
        return len(part)


def _open_zst(name: str, mode: str) -> Any:
    with suppress(ModuleNotFoundError):
        pyarrow = importlib.import_module("pyarrow")
        return io.BufferedReader(pyarrow.input_stream(name, compression="zstd"))
    # of the standard library from Python 3.14 on
    for module in ("compression.zstd", "zstandard"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(module).open(name, mode)
    raise DataError(f"{name} is packed with zstd: unpack it, or `pip install zstandard`.")


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
        raise DataError(f"{path}:{line} is not JSON ({why}); correct or remove the line.")

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
            # only the first line can begin a document
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
        rest = self._stream.read(MAX_BYTES) + self._stream.readline(MAX_BYTES)
        self._ahead = io.BytesIO(rest)
        return rest


def parse(raw: bytes) -> Any:
    """A JSON value from UTF-8 bytes; ValueError or RecursionError where it is none."""
    # bytes would have their encoding guessed by json.loads, which also lets surrogates in UTF-8 pass
    value = json.loads(raw.decode("utf-8-sig"))
    # strict UTF-8 holds none: without an escape there is nothing to walk through
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
