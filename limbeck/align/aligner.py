"""Two renderings of one text -> chunks: which stretches correspond, and what to do when their bytes do not agree.

``align_renderings`` pairs the target segments of two renderings and nothing else; tool calls that the two sides write
differently are paired field by field (``calls``). ``TokenAligner`` knows the two vocabularies, so it adds a shared
begin token, ids without a text, and batches as tensors.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from limbeck.align.batches import AlignmentBatch, IdRows, RowChunks, align_others, align_rows, one_text
from limbeck.align.boundaries import Chunks, chunk_stretch, role_pairs
from limbeck.align.calls import shared_stretches
from limbeck.errors import AlignmentError
from limbeck.tokens import ByteVocab, Rendering, Segment, Tokenizer
from limbeck.tokens.vocab import role_class

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]


def align_renderings(student: Rendering, teacher: Rendering, counts: Counter[str] | None = None) -> Chunks:
    """Align the target segments of two renderings.

    Segments correspond by message, kind and order; each pair must hold the same bytes. Calls that are written
    differently correspond by their fields. What does not correspond is left out and counted in ``counts``:
    ``segment_missing`` (one side only), ``segment_differs`` (other bytes), ``segment_stripped`` (the same but for outer
    white space, which is left out), ``call_fields_differ`` (names, keys and values of calls), ``inexact_chunks``.
    """
    counts = Counter() if counts is None else counts
    parts: list[Chunks] = []
    by_field = _rewritten_calls(student, teacher)
    theirs = {key: s for key, s in _keyed(teacher.segments).items() if not _is_call(s, by_field)}
    for key, mine in _keyed(student.segments).items():
        if _is_call(mine, by_field):
            continue
        other = theirs.pop(key, None)
        if other is None:
            counts["segment_missing"] += 1
        elif mine.kind in ("eot", "special"):
            if mine.token_end > mine.token_start and other.token_end > other.token_start:
                parts.append(_special_pair(mine, other))
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
    for message in by_field:
        stretches, left_out = shared_stretches(student, teacher, message)
        counts["call_fields_differ"] += left_out
        parts += [_align_segment(student, mine, teacher, other) for mine, other in stretches]
    chunks = Chunks.concatenate(parts)
    counts["inexact_chunks"] += int(np.count_nonzero(~chunks.exact))
    return chunks


def _rewritten_calls(student: Rendering, teacher: Rendering) -> dict[int, None]:
    """Messages whose tool calls both sides write, in other bytes or in another number of parts."""
    written: list[dict[int, list[bytes]]] = [{}, {}]
    for rendering, found in zip((student, teacher), written, strict=True):
        for s in rendering.segments:
            if s.kind == "tool_call":
                found.setdefault(s.message, []).append(rendering.source[s.start : s.end])
    mine, theirs = written
    return {message: None for message, texts in mine.items() if theirs.get(message, texts) != texts}


def _is_call(segment: Segment, messages: Container[int]) -> bool:
    return segment.kind == "tool_call" and segment.message in messages


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


def _special_pair(mine: Segment, other: Segment) -> Chunks:
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


def without_added_spaces(tokenizer: Tokenizer, rendering: Rendering) -> Rendering:
    """A rendering of ids without the spaces that its tokenizer wrote in front.

    A token that loses its space is not exact, for its bytes are not the text's; one that was nothing but the space is
    no target.
    """
    vocab, special, ids = tokenizer.vocab, rendering.special, rendering.ids
    opens = np.flatnonzero(~special & np.concatenate([[True], special[:-1]]))
    if tokenizer.space_in_front == "begin":
        opens = opens[:1]
    held = np.array([at for at in opens.tolist() if vocab.token_bytes[ids[at]].startswith(b" ")], dtype=np.int64)
    lengths = vocab.byte_len[ids[held]]
    spaces = (rendering.ends[held] - lengths).tolist()
    edges = zip([0, *(at + 1 for at in spaces)], [*spaces, len(rendering.source)], strict=True)
    lost = np.zeros(len(ids), dtype=np.int64)
    lost[held] = 1
    target = np.ones(len(ids), dtype=bool)
    target[held[lengths == 1]] = False
    source = b"".join(rendering.source[start:end] for start, end in edges)
    return Rendering(ids, rendering.ends - np.cumsum(lost), source, lost == 0, special, target)


def align_ids(student: Rendering, teacher: Rendering) -> Chunks:
    """Chunks of two renderings that are known by ids alone.

    Where both spell the same bytes this is the plain intersection of byte ends. Where a normaliser made them differ,
    edges are compared in a folded text (case, accents and compatibility forms removed, white space unified or, where
    that is not enough, removed), and a chunk is exact only where both sides' own bytes are equal.
    """
    folded = student.source != teacher.source
    kept_s, kept_t = student.target & ~student.special, teacher.target & ~teacher.special
    if not folded and kept_s.all() and kept_t.all():
        return chunk_stretch(student.ends, teacher.ends, student.exact, teacher.exact)
    keep_s, keep_t = np.flatnonzero(kept_s), np.flatnonzero(kept_t)
    ends_s, ends_t = student.ends[keep_s], teacher.ends[keep_t]
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
        same = [student.source[a:b] == teacher.source[c:d] for a, b, c, d in spans]
        exact = chunks.exact & np.array(same, dtype=bool)
    # Special tokens inside a chunk's span break its chain of predictions, so such a chunk is not exact.
    start_s, end_s = _spread(keep_s, chunks.student_start, chunks.student_end)
    start_t, end_t = _spread(keep_t, chunks.teacher_start, chunks.teacher_end)
    whole = (end_s - start_s == chunks.student_end - chunks.student_start) & (
        end_t - start_t == chunks.teacher_end - chunks.teacher_start
    )
    full = (end_s > start_s) & (end_t > start_t)
    plain = Chunks(start_s, end_s, start_t, end_t, byte_start, byte_end, exact & whole, chunks.role)
    return plain if full.all() and whole.all() else plain.select(full & whole)


def _spread(keep: IntArray, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Spans over the kept tokens -> spans over all tokens."""
    if not len(keep):
        return start, end
    return keep[np.minimum(start, len(keep) - 1)], keep[np.maximum(end, 1) - 1] + 1


@lru_cache(maxsize=65536)
def _fold_char(char: str) -> str:
    plain = unicodedata.normalize("NFKD", char).casefold()
    return "".join(c for c in plain if unicodedata.category(c) not in ("Mn", "Cf", "Zs", "Cc"))


def _fold(source: bytes, *, spaced: bool) -> tuple[str, IntArray]:
    """The folded text, and for every byte offset its place in it; -1 inside a character.

    ``spaced``: a run of white space between two words stays as one space.
    """
    text = source.decode("utf-8", "surrogateescape")
    place = np.full(len(source) + 1, -1, dtype=np.int64)
    folded: list[str] = []
    at_byte = at_fold = 0
    end = len(text.rstrip())
    for number, char in enumerate(text):
        place[at_byte] = at_fold
        if spaced and char.isspace():
            piece = " " if folded and folded[-1] != " " and number < end else ""
        else:
            piece = _fold_char(char)
        if piece:
            folded.append(piece)
        at_byte += len(char.encode("utf-8", "surrogateescape"))
        at_fold += len(piece)
    place[at_byte] = at_fold
    return "".join(folded), place


def _folded_ends(student: bytes, teacher: bytes, ends_s: IntArray, ends_t: IntArray) -> tuple[IntArray, IntArray]:
    """Token ends as places in a common folded text."""
    (fold_s, place_s), (fold_t, place_t) = (_fold(source, spaced=True) for source in (student, teacher))
    if fold_s != fold_t:
        (fold_s, place_s), (fold_t, place_t) = (_fold(source, spaced=False) for source in (student, teacher))
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


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass
class AlignmentPair:
    """One chunk, for people: the tokens of both sides as display strings and their half-open spans."""

    s_tokens: list[str]
    t_tokens: list[str]
    s_start: int
    s_end: int
    t_start: int
    t_end: int
    is_correct: bool = False


class TokenAligner:
    """Aligns student and teacher tokenizations of the same text on shared byte boundaries.

    Args:
        student_tokenizer, teacher_tokenizer: tokenizers, in any form that ``Tokenizer.of`` takes.
        projection_matrix_path: kept for the loss, as in the published signature; not used here.
        max_comb_len: accepted for compatibility; byte boundaries need no limit on chunk length.
    """

    def __init__(
        self,
        student_tokenizer: object,
        teacher_tokenizer: object,
        projection_matrix_path: str | Path | None = None,
        max_comb_len: int = 4,
    ) -> None:
        self._tokenizers = Tokenizer.of(student_tokenizer), Tokenizer.of(teacher_tokenizer)
        self.student_vocab, self.teacher_vocab = (tokenizer.vocab for tokenizer in self._tokenizers)
        self.projection_matrix_path = projection_matrix_path
        self.max_comb_len = max_comb_len

    @property
    def same_tokenizer(self) -> bool:
        """Whether both sides tokenize alike, by fingerprint."""
        return self.student_vocab.same_tokens(self.teacher_vocab)

    def align_renderings(self, student: Rendering, teacher: Rendering, counts: Counter[str] | None = None) -> Chunks:
        """Chunks of two renderings of the same target text; a shared begin token forms a pair too."""
        chunks = align_renderings(student, teacher, counts)
        begin = self._begin_pair(student, teacher)
        return Chunks.concatenate([begin, chunks]) if begin is not None else chunks

    def align(
        self,
        student_ids: torch.Tensor,
        teacher_ids: torch.Tensor,
        *,
        student_attention_mask: torch.Tensor | None = None,
        teacher_attention_mask: torch.Tensor | None = None,
    ) -> AlignmentBatch:
        """Align ``[B, Ts]`` and ``[B, Tt]`` ids by the bytes they spell; padding takes no part.

        Give attention masks wherever there is padding: an id alone does not tell whether it is padding.
        """
        if student_ids.dim() != 2 or teacher_ids.dim() != 2 or len(student_ids) != len(teacher_ids):
            raise AlignmentError(
                f"expected ids [B, Ts] and [B, Tt] of one batch size, got {tuple(student_ids.shape)} and "
                f"{tuple(teacher_ids.shape)}."
            )
        student = IdRows(student_ids, student_attention_mask, self._tokenizers[0], "student")
        teacher = IdRows(teacher_ids, teacher_attention_mask, self._tokenizers[1], "teacher")
        bare_s, bare_t, others = one_text(student, teacher)
        fast = np.ones(len(student_ids), dtype=bool)
        fast[others] = False
        chunks = align_rows(student, teacher, bare_s, bare_t, fast)
        if others:
            alone = [self.align_id_rows(student.of_row(row), teacher.of_row(row)) for row in others]
            chunks = RowChunks.merged([chunks, align_others(student, teacher, others, alone)])
        return AlignmentBatch.from_rows(chunks, len(student_ids), student_ids.shape[1], teacher_ids.shape[1])

    def align_id_rows(self, student_ids: IntArray, teacher_ids: IntArray) -> Chunks:
        """Chunks of two unpadded id sequences, special tokens paired by role at equal places."""
        student, teacher = self._of_one_text(
            rendering_of_ids(self.student_vocab, student_ids), rendering_of_ids(self.teacher_vocab, teacher_ids)
        )
        chunks = align_ids(student, teacher)
        if not (student.special.any() and teacher.special.any()):
            return chunks
        pairs = self._role_pairs(student, teacher)
        return Chunks.concatenate([chunks, pairs]) if len(pairs) else chunks

    def _of_one_text(self, student: Rendering, teacher: Rendering) -> tuple[Rendering, Rendering]:
        """The renderings without added spaces, on the sides where that makes both spell the same text.

        Ids do not tell an added space from one of the text, but the other side does.
        """
        if student.source == teacher.source:
            return student, teacher
        sides = [
            [without_added_spaces(tokenizer, side), side] if tokenizer.space_in_front != "never" else [side]
            for tokenizer, side in zip(self._tokenizers, (student, teacher), strict=True)
        ]
        both = [(mine, theirs) for mine in sides[0] for theirs in sides[1]]
        return next((pair for pair in both if pair[0].source == pair[1].source), both[0])

    def pairs(self, student: Rendering, teacher: Rendering, chunks: Chunks) -> list[AlignmentPair]:
        """Chunks as records with display strings."""
        spans = zip(
            chunks.student_start.tolist(),
            chunks.student_end.tolist(),
            chunks.teacher_start.tolist(),
            chunks.teacher_end.tolist(),
            chunks.exact.tolist(),
            strict=True,
        )
        return [
            AlignmentPair(
                self.student_vocab.display(student.ids[a:b].tolist()),
                self.teacher_vocab.display(teacher.ids[c:d].tolist()),
                a,
                b,
                c,
                d,
                ok,
            )
            for a, b, c, d, ok in spans
        ]

    def _begin_pair(self, student: Rendering, teacher: Rendering) -> Chunks | None:
        if not len(student) or not len(teacher) or not student.special[0] or not teacher.special[0]:
            return None
        roles = self.student_vocab.roles.get(int(student.ids[0])), self.teacher_vocab.roles.get(int(teacher.ids[0]))
        if roles != ("bos", "bos"):
            return None
        zero = np.zeros(1, dtype=np.int64)
        return role_pairs(zero, zero, zero)

    def _role_pairs(self, student: Rendering, teacher: Rendering) -> Chunks:
        """Pair the k-th special token of a role at a place with the other side's k-th there."""
        same_text = student.source == teacher.source
        theirs = dict(_special_places(teacher, self.teacher_vocab, inner=same_text))
        mine = _special_places(student, self.student_vocab, inner=same_text)
        found = _monotone([(at, theirs[key], int(student.ends[at])) for key, at in mine if key in theirs])
        arrays = np.array(found, dtype=np.int64).reshape(-1, 3)
        return role_pairs(arrays[:, 0], arrays[:, 1], arrays[:, 2])


def _special_places(rendering: Rendering, vocab: ByteVocab, *, inner: bool) -> list[tuple[tuple[str, str, int], int]]:
    """Special tokens as ((place, role, occurrence), index); places inside the text only if both texts are the same."""
    seen: Counter[tuple[str, str]] = Counter()
    places = []
    for at in np.flatnonzero(rendering.special).tolist():
        end, role = int(rendering.ends[at]), role_class(vocab.roles[int(rendering.ids[at])])
        edge = "begin" if end == 0 else "end" if end == len(rendering.source) else ""
        if role in ("pad", "unk") or not (edge or inner):
            continue
        key = (edge or str(end), role)
        places.append(((*key, seen[key]), at))
        seen[key] += 1
    return places


def _monotone(found: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Drop pairs that would cross an earlier one."""
    kept: list[tuple[int, int, int]] = []
    for pair in found:
        if not kept or pair[1] > kept[-1][1]:
            kept.append(pair)
    return kept
