"""Two renderings of one text -> chunks: which stretches correspond, and what to do when their bytes do not agree."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from limbeck.align.boundaries import Chunks, chunk_stretch, role_pairs
from limbeck.tokens import ByteVocab, Rendering, Segment

IntArray = npt.NDArray[np.int64]


def align_renderings(student: Rendering, teacher: Rendering, counts: Counter[str] | None = None) -> Chunks:
    """Align the target segments of two renderings.

    Segments correspond by message, kind and order; each pair must hold the same bytes. What does not correspond is
    left out and counted in ``counts``: ``segment_missing`` (one side only), ``segment_differs`` (other bytes),
    ``segment_stripped`` (the same but for outer white space, which is left out), ``inexact_chunks``.
    """
    counts = Counter() if counts is None else counts
    parts: list[Chunks] = []
    theirs = _keyed(teacher.segments)
    for key, mine in _keyed(student.segments).items():
        other = theirs.pop(key, None)
        if other is None:
            counts["segment_missing"] += 1
        elif mine.kind == "eot":
            if mine.token_end > mine.token_start and other.token_end > other.token_start:
                parts.append(_end_pair(mine, other))
        elif student.source[mine.start : mine.end] == teacher.source[other.start : other.end]:
            parts.append(_align_segment(student, mine, teacher, other))
        else:
            # Many templates strip a message's outer white space; what is left is still the same text.
            mine, other = _stripped(student, mine), _stripped(teacher, other)
            same = student.source[mine.start : mine.end] == teacher.source[other.start : other.end]
            counts["segment_stripped" if same else "segment_differs"] += 1
            if same:
                parts.append(_align_segment(student, mine, teacher, other))
    counts["segment_missing"] += len(theirs)
    chunks = Chunks.concatenate(parts)
    counts["inexact_chunks"] += int(np.count_nonzero(~chunks.exact))
    return chunks


def _keyed(segments: tuple[Segment, ...]) -> dict[tuple[int, str, int], Segment]:
    seen: Counter[tuple[int, str]] = Counter()
    keyed = {}
    for segment in segments:
        name = (segment.message, segment.kind)
        keyed[(*name, seen[name])] = segment
        seen[name] += 1
    return keyed


def _stripped(rendering: Rendering, segment: Segment) -> Segment:
    """The segment without its outer white space, and the tokens that lie wholly inside what is left."""
    text = rendering.source[segment.start : segment.end]
    start = segment.start + len(text) - len(text.lstrip())
    end = start + len(text.strip())
    ends = rendering.ends[segment.token_start : segment.token_end]
    begins = np.concatenate([[_begin(rendering, segment)], ends])[:-1]
    first = segment.token_start + int(np.searchsorted(begins, start, side="left"))
    last = segment.token_start + int(np.searchsorted(ends, end, side="right"))
    return replace(segment, start=start, end=end, token_start=first, token_end=max(first, last))


def _end_pair(mine: Segment, other: Segment) -> Chunks:
    places = (np.array([v], dtype=np.int64) for v in (mine.token_start, other.token_start, mine.start))
    return role_pairs(*places)


def _align_segment(student: Rendering, mine: Segment, teacher: Rendering, other: Segment) -> Chunks:
    s, t = slice(mine.token_start, mine.token_end), slice(other.token_start, other.token_end)
    shift = mine.start - other.start
    chunks = chunk_stretch(
        student.ends[s],
        teacher.ends[t] + shift if shift else teacher.ends[t],
        student.exact[s] & ~student.special[s],
        teacher.exact[t] & ~teacher.special[t],
        student_begin=_begin(student, mine),
        teacher_begin=_begin(teacher, other) + shift,
    )
    if not s.start and not t.start:
        return chunks
    return Chunks(
        chunks.student_start + mine.token_start,
        chunks.student_end + mine.token_start,
        chunks.teacher_start + other.token_start,
        chunks.teacher_end + other.token_start,
        chunks.byte_start,
        chunks.byte_end,
        chunks.exact,
        chunks.role,
    )


def _begin(rendering: Rendering, segment: Segment) -> int:
    """Byte at which the segment's first whole token begins: later than the segment where a token straddles its edge."""
    before = int(rendering.ends[segment.token_start - 1]) if segment.token_start else 0
    return max(before, segment.start)


def rendering_of_ids(vocab: ByteVocab, ids: IntArray) -> Rendering:
    """A rendering known by its ids alone: its source is what the ids spell, and all of it is target."""
    special = vocab.special[ids]
    source = vocab.join(ids.tolist())
    true = np.ones(len(ids), dtype=bool)
    return Rendering(ids, np.cumsum(vocab.byte_len[ids]), source, true, special, true)


def align_ids(student: Rendering, teacher: Rendering) -> Chunks:
    """Chunks of two renderings that are known by ids alone.

    Where both spell the same bytes this is the plain intersection of byte ends. Where a normaliser made them differ,
    edges are compared in a folded text (case, accents, white space and compatibility forms removed), and a chunk is
    exact only where both sides' own bytes are equal.
    """
    keep_s, keep_t = np.flatnonzero(~student.special), np.flatnonzero(~teacher.special)
    ends_s, ends_t = student.ends[keep_s], teacher.ends[keep_t]
    folded = student.source != teacher.source
    if folded:
        ends_s, ends_t = _folded_ends(student.source, teacher.source, ends_s, ends_t)
    chunks = chunk_stretch(ends_s, ends_t, student.exact[keep_s], teacher.exact[keep_t])
    exact, byte_start, byte_end = chunks.exact, chunks.byte_start, chunks.byte_end
    if folded:
        edges_s = np.concatenate([[0], student.ends[keep_s]])
        edges_t = np.concatenate([[0], teacher.ends[keep_t]])
        byte_start, byte_end = edges_s[chunks.student_start], edges_s[chunks.student_end]
        t_bytes = edges_t[chunks.teacher_start], edges_t[chunks.teacher_end]
        spans = zip(byte_start.tolist(), byte_end.tolist(), t_bytes[0].tolist(), t_bytes[1].tolist(), strict=True)
        exact = np.array([student.source[a:b] == teacher.source[c:d] for a, b, c, d in spans], dtype=bool)
    # Special tokens inside a chunk's span break its chain of predictions, so such a chunk is not exact.
    start_s, end_s = _spread(keep_s, chunks.student_start, chunks.student_end)
    start_t, end_t = _spread(keep_t, chunks.teacher_start, chunks.teacher_end)
    whole = (end_s - start_s == chunks.student_end - chunks.student_start) & (
        end_t - start_t == chunks.teacher_end - chunks.teacher_start
    )
    full = (end_s > start_s) & (end_t > start_t)
    plain = Chunks(start_s, end_s, start_t, end_t, byte_start, byte_end, exact & whole, chunks.role)
    return plain.select(full & whole)


def _spread(keep: IntArray, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Spans over the kept tokens -> spans over all tokens."""
    if not len(keep):
        return start, end
    return keep[np.minimum(start, len(keep) - 1)], keep[np.maximum(end, 1) - 1] + 1


@lru_cache(maxsize=65536)
def _fold_char(char: str) -> str:
    plain = unicodedata.normalize("NFKD", char).casefold()
    return "".join(c for c in plain if unicodedata.category(c) not in ("Mn", "Cf", "Zs", "Cc"))


def _fold(source: bytes) -> tuple[str, IntArray]:
    """The folded text, and for every byte offset its place in it; -1 inside a character."""
    text = source.decode("utf-8", "surrogateescape")
    place = np.full(len(source) + 1, -1, dtype=np.int64)
    folded: list[str] = []
    at_byte = at_fold = 0
    for char in text:
        place[at_byte] = at_fold
        piece = _fold_char(char)
        folded.append(piece)
        at_byte += len(char.encode("utf-8", "surrogateescape"))
        at_fold += len(piece)
    place[at_byte] = at_fold
    return "".join(folded), place


def _folded_ends(student: bytes, teacher: bytes, ends_s: IntArray, ends_t: IntArray) -> tuple[IntArray, IntArray]:
    """Token ends as places in a common folded text."""
    fold_s, place_s = _fold(student)
    fold_t, place_t = _fold(teacher)
    out_s, out_t = _next_known(place_s[ends_s]), _next_known(place_t[ends_t])
    if fold_s != fold_t:
        # Only the common head and tail are comparable; what lies between them becomes one chunk.
        head = _common(fold_s, fold_t)
        tail = min(_common(fold_s[::-1], fold_t[::-1]), min(len(fold_s), len(fold_t)) - head)
        out_s = np.where((out_s > head) & (out_s < len(fold_s) - tail), len(fold_s) - tail, out_s)
        out_t = np.where((out_t > head) & (out_t < len(fold_t) - tail), len(fold_t) - tail, out_t)
        out_t = np.where(out_t > head, out_t + len(fold_s) - len(fold_t), out_t)
    return out_s, out_t


def _next_known(places: IntArray) -> IntArray:
    """Replace -1 by the next known place: a token that ends inside a character ends with that character."""
    high = np.iinfo(np.int64).max
    known = np.where(places < 0, high, places)
    return np.minimum.accumulate(known[::-1])[::-1]


def _common(a: str, b: str) -> int:
    """Length of the common prefix, by bisection on string comparison."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
