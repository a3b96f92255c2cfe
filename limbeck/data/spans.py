"""Where the records of a text file lie, found block by block: lines, paragraphs, or the whole.

However many records a file has, finding them takes the memory of one block.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
Spans = tuple[IntArray, IntArray]
"""Byte offsets at which some records start and end, ``[n]`` each."""

BLOCK = 1 << 20
LINE_BLOCK = 1 << 12
"""Line ends are counted per so many bytes, to tell the line of any byte by reading little."""
_NEWLINE, _RETURN = 10, 13
_NONE: IntArray = np.zeros(0, dtype=np.int64)


class Scanner(ABC):
    """Finds records while the blocks of a file pass by.

    Attributes:
        name: says what it finds, for the name of a stored index.
        skips_mark: whether a byte order mark in front belongs to no record.
    """

    name: str
    skips_mark = True

    def __init__(self) -> None:
        self.begin = 0
        """Where the record that is being read begins."""

    @abstractmethod
    def feed(self, data: ByteArray, offset: int, newlines: IntArray) -> Spans:
        """Records that end in the block ``data``, which lies at ``offset`` and holds the ``newlines``."""

    @abstractmethod
    def end(self, size: int) -> Spans:
        """Records that end with the file."""


def _rest(begin: int, size: int) -> Spans:
    return (np.array([begin]), np.array([size])) if begin < size else (_NONE, _NONE)


class Whole(Scanner):
    """The file as one record."""

    name = "whole"

    def feed(self, data: ByteArray, offset: int, newlines: IntArray) -> Spans:
        return _NONE, _NONE

    def end(self, size: int) -> Spans:
        return _rest(self.begin, size)


class Lines(Scanner):
    """Lines without their ends; empty ones, and those of a carriage return alone, are no records."""

    name = "lines"
    skips_mark = False

    def __init__(self) -> None:
        super().__init__()
        self._last = _NEWLINE

    def feed(self, data: ByteArray, offset: int, newlines: IntArray) -> Spans:
        before, self._last = self._last, int(data[-1])
        if not len(newlines):
            return _NONE, _NONE
        starts = np.concatenate([[self.begin], newlines[:-1] + 1])
        keep = newlines > starts
        single = np.flatnonzero(newlines - starts == 1)
        offsets = starts[single] - offset
        # a line that began in the block before has its only byte there
        keep[single] = np.where(offsets < 0, before, data[offsets]) != _RETURN
        self.begin = int(newlines[-1]) + 1
        return starts[keep], newlines[keep]

    def end(self, size: int) -> Spans:
        return _rest(size if size - self.begin == 1 and self._last == _RETURN else self.begin, size)


class Paragraphs(Scanner):
    """Stretches between blank lines: lines of spaces, tabs and carriage returns."""

    name = "paragraphs"

    def __init__(self) -> None:
        super().__init__()
        self._newline = -1  # the last one so far
        self._return = False  # whether a carriage return stands before it
        self._blank = False  # whether nothing else has come since
        self._open = False  # whether it ends a blank line
        self._last = -1

    def feed(self, data: ByteArray, offset: int, newlines: IntArray) -> Spans:
        last, self._last = self._last, int(data[-1])
        if not len(newlines):
            self._blank = self._blank and _all_blank(data)
            return _NONE, _NONE
        before = np.concatenate([[self._newline], newlines[:-1]])
        returns = np.concatenate([[self._return], _bytes_before(data, newlines - offset, last) == _RETURN])
        blank = self._blank_lines(data, offset, before, newlines)
        was_blank = np.concatenate([[self._open], blank[:-1]])
        opened, closed = np.flatnonzero(blank & ~was_blank), np.flatnonzero(~blank & was_blank)
        ends = before[opened] - returns[opened]
        begins = before[closed] + 1
        starts = (begins if self._open else np.concatenate([[self.begin], begins]))[: len(ends)]
        if len(begins):
            self.begin = int(begins[-1])
        self._newline, self._return, self._open = int(newlines[-1]), bool(returns[-1]), bool(blank[-1])
        self._blank = _all_blank(data[self._newline - offset + 1 :])
        keep = ends > starts
        return starts[keep], ends[keep]

    def _blank_lines(self, data: ByteArray, offset: int, before: IntArray, newlines: IntArray) -> BoolArray:
        """Which of the lines between two line ends are blank."""
        blank: BoolArray = newlines - before == 1
        blank[0] = self._newline >= 0 and self._blank and _all_blank(data[: newlines[0] - offset])
        # most lines that are not empty show by their first byte that they are not blank
        maybe = np.flatnonzero(~blank[1:]) + 1
        maybe = maybe[_is_blank(data[before[maybe] - offset + 1])]
        if len(maybe):
            others = np.concatenate([[0], np.cumsum(~_is_blank(data), dtype=np.int32)])
            blank[maybe] = others[newlines[maybe] - offset] == others[before[maybe] - offset + 1]
        return blank

    def end(self, size: int) -> Spans:
        return _rest(self._newline + 1 if self._open else self.begin, size)


def _is_blank(data: ByteArray) -> BoolArray:
    blank: BoolArray = (data == 32) | (data == 9) | (data == _RETURN)
    return blank


def _all_blank(data: ByteArray) -> bool:
    return bool(_is_blank(data).all())


def _bytes_before(data: ByteArray, offsets: IntArray, last: int) -> npt.NDArray[np.int64]:
    """The byte before each offset; ``last`` stands before the block."""
    before = data[offsets - 1].astype(np.int64)
    return np.where(offsets == 0, last, before)


def find_spans(path: str, scanner: Scanner, limit: int | None = None) -> Iterator[tuple[Spans, IntArray]]:
    """Spans of a file's records, some at a time, each time with the newlines that have been passed.

    ``limit``: records of more bytes are cut, see :func:`split_spans`.
    """
    offset = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            if offset == 0 and scanner.skips_mark and block.startswith(b"\xef\xbb\xbf"):
                scanner.begin = 3
            data = np.frombuffer(block, dtype=np.uint8)
            newlines = np.flatnonzero(data == _NEWLINE) + offset
            yield _cut(path, scanner.feed(data, offset, newlines), limit), newlines
            offset += len(block)
    yield _cut(path, scanner.end(offset), limit), _NONE


def _cut(path: str, spans: Spans, limit: int | None) -> Spans:
    starts, ends = spans
    if limit is None or not len(starts) or int((ends - starts).max()) <= limit:
        return spans
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pieces = [
            piece
            for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
            for piece in split_spans(data, a, b, limit)
        ]
    both = np.array(pieces, dtype=np.int64)
    return both[:, 0], both[:, 1]


def split_spans(data: bytes | mmap.mmap, start: int, end: int, limit: int) -> list[tuple[int, int]]:
    """Cut ``data[start:end]`` into spans of at most ``limit`` bytes, where ``_cut_before`` says."""
    spans: list[tuple[int, int]] = []
    while end - start > limit:
        cut = _cut_before(data, start, start + limit)
        spans.append((start, cut))
        start = cut
    spans.append((start, end))
    return spans


def _cut_before(data: bytes | mmap.mmap, start: int, latest: int) -> int:
    """Where to cut ``data`` between ``start`` and ``latest``, not far before ``latest``: at a line end, else before a
    space, else between two characters; never inside a UTF-8 sequence. Not after ``start`` where no character fits."""
    window = latest - (latest - start) // 4
    if (position := data.rfind(b"\n", window, latest)) >= 0:
        return position + 1
    # a cut at `start` would be no progress
    if (position := data.rfind(b" ", window, latest)) > start:
        return position
    # a character has three continuation bytes at most; text that is no UTF-8 is not searched further
    for _ in range(3):
        if data[latest] & 0xC0 != 0x80:
            break
        latest -= 1
    return latest


def fitting_spans(data: bytes, ends: Sequence[IntArray], rooms: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a text that is too long for a context into spans of similar size, as few as its tokenizations allow.

    Cutting changes tokens near the cut, so a span may still be a token or two too long when it is tokenized by itself.

    Args:
        data: the text in UTF-8.
        ends: the byte at which each token ends, ascending, for every tokenizer.
        rooms: how many tokens a span may have, for every tokenizer.
    """
    spans: list[tuple[int, int]] = []
    start, size = 0, len(data)
    while size - start > 1:
        left = [stops[np.searchsorted(stops, start, side="right") :] for stops in ends]
        needed = max(-(-len(stops) // room) for stops, room in zip(left, rooms, strict=True))
        if needed <= 1:
            break
        # the even share of what is left, as far as every side can hold it
        reach = [
            int(token_ends[room - 1]) for token_ends, room in zip(left, rooms, strict=True) if len(token_ends) >= room
        ]
        cut = _cut_before(data, start, min(*reach, start + -(-(size - start) // needed)))
        # at least one character, or the loop would not end
        cut = cut if cut > start else _next_character(data, start)
        if cut >= size:
            break
        spans.append((start, cut))
        start = cut
    spans.append((start, size))
    return spans


def _next_character(data: bytes, start: int) -> int:
    after = start + 1
    while after < len(data) and data[after] & 0xC0 == 0x80:
        after += 1
    return after
