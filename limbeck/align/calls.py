"""Tool calls that two templates write differently: which stretches of them are the same text.

A call is a name, and keys and values of its arguments; templates put other syntax around them. Two fields correspond
when they are the same field of the same call and both sides wrote the same bytes for it, in the same order. Around
corresponding fields the syntax takes part as far as both sides wrote the same: up to the next field where all of it is
the same, else from both ends. What stands in front of a call's first field never does: one side may have announced the
call already when the other has yet to decide on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from limbeck.tokens import Segment, TokenizedText
from limbeck.tokens.tokenized_text import CallField

Span = tuple[int, int]


@dataclass(frozen=True)
class _Side:
    """One side's calls of one message: its fields in order, and the segment of each."""

    rendering: TokenizedText
    fields: list[CallField]
    segments: list[Segment]

    @classmethod
    def of(cls, rendering: TokenizedText, message: int) -> _Side:
        segments = [s for s in rendering.segments if s.kind == "tool_call" and s.message == message]
        fields, homes = [], []
        for field in sorted((f for f in rendering.fields if f.message == message), key=lambda f: f.start):
            home = next((s for s in segments if s.start <= field.start and field.end <= s.end), None)
            if home is not None:
                fields.append(field)
                homes.append(home)
        return cls(rendering, fields, homes)

    def text(self, number: int) -> bytes:
        return self.rendering.source[self.fields[number].start : self.fields[number].end]

    def first_of_call(self, number: int) -> bool:
        return number == 0 or self.fields[number - 1].call != self.fields[number].call

    def before(self, number: int) -> bytes:
        """Text between a field and the one before it, or the beginning of its segment."""
        home = self.segments[number]
        start = home.start if number == 0 else max(home.start, self.fields[number - 1].end)
        return self.rendering.source[start : self.fields[number].start]

    def after(self, number: int) -> bytes:
        """Text between a field and the next one, or the end of its segment."""
        home = self.segments[number]
        last = number + 1 == len(self.fields)
        end = home.end if last else min(home.end, self.fields[number + 1].start)
        return self.rendering.source[self.fields[number].end : end]

    def tokens(self, start: int, end: int, home: Segment) -> Segment:
        """The stretch ``start:end`` of bytes with the tokens that lie wholly inside it."""
        ends, special = self.rendering.byte_ends, self.rendering.special
        begins = np.concatenate([[0], ends[:-1]])
        first = max(home.token_start, int(np.searchsorted(begins, start, side="left")))
        last = min(home.token_end, int(np.searchsorted(ends, end, side="right")))
        # special tokens have no bytes, so byte offsets do not tell on which side of an edge they stand
        while first < last and special[first]:
            first += 1
        while last > first and special[last - 1]:
            last -= 1
        return Segment(home.message, home.kind, start, end, first, max(first, last))

    def breaks(self, start: int, end: int) -> list[int]:
        """Bytes from ``start`` on at which special tokens part the stretch."""
        special_ends = self.rendering.byte_ends[np.flatnonzero(self.rendering.special)]
        return [int(byte) - start for byte in special_ends[(special_ends > start) & (special_ends < end)]]


def shared_stretches(
    student: TokenizedText, teacher: TokenizedText, message: int
) -> tuple[list[tuple[Segment, Segment]], int]:
    """Pairs of stretches with equal bytes in the calls of a message, and how many of the student's fields have none."""
    mine, theirs = _Side.of(student, message), _Side.of(teacher, message)
    pairs = _corresponding(mine, theirs)
    stretches: list[tuple[Segment, Segment]] = []
    first = 0
    while first < len(pairs):
        stop = first + 1
        while stop < len(pairs) and _joined(mine, theirs, pairs[stop - 1], pairs[stop]):
            stop += 1
        before = 0 if first == 0 else _common(mine.after(pairs[first - 1][0]), theirs.after(pairs[first - 1][1]))
        stretches += _stretch(mine, theirs, pairs[first], pairs[stop - 1], before)
        first = stop
    return stretches, len(mine.fields) - len(pairs)


def _corresponding(mine: _Side, theirs: _Side) -> list[tuple[int, int]]:
    """Numbers of fields that are the same field with the same bytes; the most that stand in one order on both sides."""
    known = Counter((f.call, f.path) for f in theirs.fields)
    # a key that a call writes twice has no one partner
    index_of = {(f.call, f.path): j for j, f in enumerate(theirs.fields) if known[f.call, f.path] == 1}
    count_of = Counter((f.call, f.path) for f in mine.fields)
    pairs = []
    for i, field in enumerate(mine.fields):
        j = index_of.get((field.call, field.path))
        if j is not None and count_of[field.call, field.path] == 1 and mine.text(i) == theirs.text(j):
            pairs.append((i, j))
    return _ascending(pairs)


def _ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of the pairs in which both numbers ascend."""
    tails: list[int] = []
    last: list[int] = []
    previous: list[int] = []
    for number, (_, j) in enumerate(pairs):
        length = bisect_left(tails, j)
        previous.append(last[length - 1] if length else -1)
        if length == len(tails):
            tails.append(j)
            last.append(number)
        else:
            tails[length], last[length] = j, number
    chain = []
    link = last[-1] if last else -1
    while link >= 0:
        chain.append(pairs[link])
        link = previous[link]
    return chain[::-1]


def _joined(mine: _Side, theirs: _Side, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two pairs are neighbours in one call on both sides, with the same syntax between them."""
    if second != (first[0] + 1, first[1] + 1) or mine.first_of_call(second[0]):
        return False
    one_part = (
        mine.segments[first[0]] is mine.segments[second[0]]
        and theirs.segments[first[1]] is (theirs.segments[second[1]])
    )
    return one_part and mine.after(first[0]) == theirs.after(first[1])


def _stretch(
    mine: _Side, theirs: _Side, first: tuple[int, int], last: tuple[int, int], taken: int
) -> list[tuple[Segment, Segment]]:
    """The stretch from one pair of fields to another with the syntax around them, parted at special tokens.

    ``taken``: bytes behind the field in front that belong to the stretch before.
    """
    lead = 0
    if not mine.first_of_call(first[0]) and not theirs.first_of_call(first[1]):
        texts = mine.before(first[0]), theirs.before(first[1])
        room = min(map(len, texts)) - taken
        lead = max(0, min(room, _common(texts[0][::-1], texts[1][::-1])))
    trail = _common(mine.after(last[0]), theirs.after(last[1]))
    spans: list[Span] = []
    for side, (a, b) in ((mine, (first[0], last[0])), (theirs, (first[1], last[1]))):
        spans.append((side.fields[a].start - lead, side.fields[b].end + trail))
    cuts = sorted({0, spans[0][1] - spans[0][0], *mine.breaks(*spans[0]), *theirs.breaks(*spans[1])})
    stretches = []
    for a, b in pairwise(cuts):
        ours = mine.tokens(spans[0][0] + a, spans[0][0] + b, mine.segments[first[0]])
        other = theirs.tokens(spans[1][0] + a, spans[1][0] + b, theirs.segments[first[1]])
        stretches.append((ours, other))
    return stretches


def _common(left: Any, right: Any) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)
