"""Two renderings of one text -> chunks: which stretches correspond, and what to do when their bytes do not agree.

``align_renderings`` pairs the target segments of two renderings and nothing else; tool calls that the two sides write
differently are paired field by field (``calls``). ``TokenAligner`` knows the two vocabularies, so it adds a shared
BOS token, ids without a text, and batches as tensors.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from limbeck.align.batches import AlignmentBatch
from limbeck.align.boundaries import Chunks, chunk_stretch, role_pairs
from limbeck.align.calls import shared_stretches
from limbeck.errors import AlignmentError
from limbeck.tokens import ByteTokenizer, ByteVocab, Segment, TokenizedText
from limbeck.tokens.vocab import role_class

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]


def align_renderings(student: TokenizedText, teacher: TokenizedText, counts: Counter[str] | None = None) -> Chunks:
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


def _rewritten_calls(student: TokenizedText, teacher: TokenizedText) -> dict[int, None]:
    """Messages whose tool calls both sides write, in other bytes or in another number of parts."""
    written: list[dict[int, list[bytes]]] = [{}, {}]
    for rendering, texts_of in zip((student, teacher), written, strict=True):
        for s in rendering.segments:
            if s.kind == "tool_call":
                texts_of.setdefault(s.message, []).append(rendering.source[s.start : s.end])
    mine, theirs = written
    # a message that the other side does not write is no rewritten one: it counts as segment_missing
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


def _stripped(rendering: TokenizedText, segment: Segment) -> Segment:
    """The segment without its outer white space, and the tokens that lie wholly inside what is left."""
    text = rendering.source[segment.start : segment.end]
    start = segment.start + len(text) - len(text.lstrip())
    end = start + len(text.strip())
    ends = rendering.byte_ends[segment.token_start : segment.token_end]
    begins = np.concatenate([[_first_byte(rendering, segment)], ends])[:-1]
    first = segment.token_start + int(np.searchsorted(begins, start, side="left"))
    last = segment.token_start + int(np.searchsorted(ends, end, side="right"))
    # a token that straddles both edges leaves none, and `last` before `first`
    return replace(segment, start=start, end=end, token_start=first, token_end=max(first, last))


def _special_pair(mine: Segment, other: Segment) -> Chunks:
    positions = (np.array([v], dtype=np.int64) for v in (mine.token_start, other.token_start, mine.start))
    return role_pairs(*positions)


def _align_segment(student: TokenizedText, mine: Segment, teacher: TokenizedText, other: Segment) -> Chunks:
    s, t = slice(mine.token_start, mine.token_end), slice(other.token_start, other.token_end)
    # the two sources may hold the segment at different bytes; chunk_stretch compares offsets of one text
    shift = mine.start - other.start
    chunks = chunk_stretch(
        student.byte_ends[s],
        teacher.byte_ends[t] + shift if shift else teacher.byte_ends[t],
        # a special token inside a chunk breaks its chain of predictions, so the chunk is not exact
        student.byte_exact[s] & ~student.special[s],
        teacher.byte_exact[t] & ~teacher.special[t],
        student_begin=_first_byte(student, mine),
        teacher_begin=_first_byte(teacher, other) + shift,
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
        chunks.same_text,
    )


def _first_byte(rendering: TokenizedText, segment: Segment) -> int:
    """Byte at which the segment's first whole token begins: later than the segment where a token straddles its edge."""
    before = int(rendering.byte_ends[segment.token_start - 1]) if segment.token_start else 0
    return max(before, segment.start)


def count_added_spaces(chunks: Chunks, counts: Counter[str]) -> None:
    """Count chunks that only an added space keeps from being exact as ``added_space_chunks``, apart from the
    ``inexact_chunks``."""
    added = int(np.count_nonzero(chunks.same_text & ~chunks.exact))
    counts["inexact_chunks"] -= added
    counts["added_space_chunks"] += added


def rendering_of_ids(vocab: ByteVocab, ids: IntArray) -> TokenizedText:
    """A rendering known by its ids alone: its source is what the ids spell, and all of it is target."""
    special = vocab.special[ids]
    source = vocab.join(ids.tolist())
    true = np.ones(len(ids), dtype=bool)
    return TokenizedText(ids, np.cumsum(vocab.byte_len[ids]), source, true, special, true)


def without_added_spaces(tokenizer: ByteTokenizer, rendering: TokenizedText) -> TokenizedText:
    """A rendering of ids without the spaces that its tokenizer wrote in front.

    A token that loses its space is not exact, for its bytes are not the text's; one that was nothing but the space is
    no target.
    """
    vocab, special, ids = tokenizer.vocab, rendering.special, rendering.ids
    opens = np.flatnonzero(~special & np.concatenate([[True], special[:-1]]))
    if tokenizer.space_in_front == "begin":
        opens = opens[:1]
    held = np.array([i for i in opens.tolist() if vocab.token_bytes[ids[i]].startswith(b" ")], dtype=np.int64)
    lengths = vocab.byte_len[ids[held]]
    spaces = (rendering.byte_ends[held] - lengths).tolist()
    edges = zip([0, *(offset + 1 for offset in spaces)], [*spaces, len(rendering.source)], strict=True)
    lost = np.zeros(len(ids), dtype=np.int64)
    lost[held] = 1
    target = np.ones(len(ids), dtype=bool)
    target[held[lengths == 1]] = False
    source = b"".join(rendering.source[start:end] for start, end in edges)
    return TokenizedText(ids, rendering.byte_ends - np.cumsum(lost), source, lost == 0, special, target)


def align_ids(student: TokenizedText, teacher: TokenizedText) -> Chunks:
    """Chunks of two renderings that are known by ids alone.

    Where both spell the same bytes this is the plain intersection of byte ends. Where a normaliser made them differ,
    edges are compared in a folded text (case, accents and compatibility forms removed, white space unified or, where
    that is not enough, removed), and a chunk is exact only where both sides' own bytes are equal.
    """
    folded = student.source != teacher.source
    kept_s, kept_t = student.loss_mask & ~student.special, teacher.loss_mask & ~teacher.special
    if not folded and kept_s.all() and kept_t.all():
        return chunk_stretch(student.byte_ends, teacher.byte_ends, student.byte_exact, teacher.byte_exact)
    keep_s, keep_t = np.flatnonzero(kept_s), np.flatnonzero(kept_t)
    ends_s, ends_t = student.byte_ends[keep_s], teacher.byte_ends[keep_t]
    if folded:
        ends_s, ends_t = _folded_ends(student.source, teacher.source, ends_s, ends_t)
    chunks = chunk_stretch(ends_s, ends_t, student.byte_exact[keep_s], teacher.byte_exact[keep_t])
    exact, byte_start, byte_end = chunks.exact, chunks.byte_start, chunks.byte_end
    if folded:
        edges_s = np.concatenate([[0], student.byte_ends[keep_s]])
        edges_t = np.concatenate([[0], teacher.byte_ends[keep_t]])
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
    exact = exact & whole
    plain = Chunks(start_s, end_s, start_t, end_t, byte_start, byte_end, exact, chunks.role, exact)
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
    """The folded text, and for every byte offset the one in it; -1 inside a character.

    ``spaced``: a run of white space between two words stays as one space.
    """
    # bytes that are no UTF-8 must keep their offsets
    text = source.decode("utf-8", "surrogateescape")
    folded_offset = np.full(len(source) + 1, -1, dtype=np.int64)
    folded: list[str] = []
    at_byte = at_fold = 0
    end = len(text.rstrip())
    for number, char in enumerate(text):
        folded_offset[at_byte] = at_fold
        if spaced and char.isspace():
            piece = " " if folded and folded[-1] != " " and number < end else ""
        else:
            piece = _fold_char(char)
        if piece:
            folded.append(piece)
        at_byte += len(char.encode("utf-8", "surrogateescape"))
        at_fold += len(piece)
    folded_offset[at_byte] = at_fold
    return "".join(folded), folded_offset


def _folded_ends(student: bytes, teacher: bytes, ends_s: IntArray, ends_t: IntArray) -> tuple[IntArray, IntArray]:
    """Token ends as offsets in a common folded text."""
    (fold_s, offset_s), (fold_t, offset_t) = (_fold(source, spaced=True) for source in (student, teacher))
    if fold_s != fold_t:
        (fold_s, offset_s), (fold_t, offset_t) = (_fold(source, spaced=False) for source in (student, teacher))
    out_s, out_t = _next_known(offset_s[ends_s]), _next_known(offset_t[ends_t])
    if fold_s != fold_t:
        # Only the common head and tail are comparable; what lies between them becomes one chunk.
        head = _common(fold_s, fold_t)
        # head and tail must not overlap: of `aa` and `aaa` both would claim the same characters
        tail = min(_common(fold_s[::-1], fold_t[::-1]), min(len(fold_s), len(fold_t)) - head)
        out_s = np.where((out_s > head) & (out_s < len(fold_s) - tail), len(fold_s) - tail, out_s)
        out_t = np.where((out_t > head) & (out_t < len(fold_t) - tail), len(fold_t) - tail, out_t)
        # behind the head the teacher's offsets move by the difference in length, so that the tails meet
        out_t = np.where(out_t > head, out_t + len(fold_s) - len(fold_t), out_t)
    return out_s, out_t


def _next_known(offsets: IntArray) -> IntArray:
    """Replace -1 by the next known offset: a token that ends inside a character ends with that character."""
    high = np.iinfo(np.int64).max
    known = np.where(offsets < 0, high, offsets)
    return np.minimum.accumulate(known[::-1])[::-1]


def _common(a: str, b: str) -> int:
    """Length of the common prefix, by bisection on string comparison."""
    # slices are compared in C, where a loop over characters would run in Python
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
        student_tokenizer, teacher_tokenizer: tokenizers, in any form that ``ByteTokenizer.of`` takes.
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
        self._tokenizers = ByteTokenizer.of(student_tokenizer), ByteTokenizer.of(teacher_tokenizer)
        self.student_vocab, self.teacher_vocab = (tokenizer.vocab for tokenizer in self._tokenizers)
        self.projection_matrix_path = projection_matrix_path
        self.max_comb_len = max_comb_len

    def align_renderings(
        self, student: TokenizedText, teacher: TokenizedText, counts: Counter[str] | None = None
    ) -> Chunks:
        """Chunks of two renderings of the same target text; a shared BOS token forms a pair too."""
        chunks = self._with_added_spaces(student, teacher, align_renderings(student, teacher, counts))
        bos = self._bos_pair(student, teacher)
        return Chunks.concatenate([bos, chunks]) if bos is not None else chunks

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
        student = _real_tokens(student_ids, student_attention_mask, self.student_vocab, "student")
        teacher = _real_tokens(teacher_ids, teacher_attention_mask, self.teacher_vocab, "teacher")
        rows = []
        for (mine, at_s), (theirs, at_t) in zip(student, teacher, strict=True):
            chunks = self.align_id_rows(mine, theirs)
            rows.append(
                replace(
                    chunks,
                    student_start=at_s[chunks.student_start],
                    student_end=at_s[chunks.student_end - 1] + 1,
                    teacher_start=at_t[chunks.teacher_start],
                    teacher_end=at_t[chunks.teacher_end - 1] + 1,
                )
            )
        return AlignmentBatch.from_chunks(rows, student_ids.shape[1], teacher_ids.shape[1])

    def align_id_rows(self, student_ids: IntArray, teacher_ids: IntArray) -> Chunks:
        """Chunks of two unpadded id sequences, special tokens paired by role at equal bytes."""
        student, teacher = self._of_one_text(
            rendering_of_ids(self.student_vocab, student_ids), rendering_of_ids(self.teacher_vocab, teacher_ids)
        )
        chunks = self._with_added_spaces(student, teacher, align_ids(student, teacher))
        if not (student.special.any() and teacher.special.any()):
            return chunks
        pairs = self._role_pairs(student, teacher)
        return Chunks.concatenate([chunks, pairs]) if len(pairs) else chunks

    def _of_one_text(self, student: TokenizedText, teacher: TokenizedText) -> tuple[TokenizedText, TokenizedText]:
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

    def _with_added_spaces(self, student: TokenizedText, teacher: TokenizedText, chunks: Chunks) -> Chunks:
        """The chunks with ``same_text`` also where nothing but an added space keeps them from being exact."""
        if all(tokenizer.space_in_front == "never" for tokenizer in self._tokenizers):
            return chunks
        same = chunks.exact.copy()
        for k in np.flatnonzero(~chunks.exact).tolist():
            mine = _own_text(self._tokenizers[0], student, int(chunks.student_start[k]), int(chunks.student_end[k]))
            theirs = _own_text(self._tokenizers[1], teacher, int(chunks.teacher_start[k]), int(chunks.teacher_end[k]))
            same[k] = mine is not None and mine == theirs
        return replace(chunks, same_text=same)

    def pairs(self, student: TokenizedText, teacher: TokenizedText, chunks: Chunks) -> list[AlignmentPair]:
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

    def _bos_pair(self, student: TokenizedText, teacher: TokenizedText) -> Chunks | None:
        if not len(student) or not len(teacher) or not student.special[0] or not teacher.special[0]:
            return None
        roles = self.student_vocab.roles.get(int(student.ids[0])), self.teacher_vocab.roles.get(int(teacher.ids[0]))
        if roles != ("bos", "bos"):
            return None
        zero = np.zeros(1, dtype=np.int64)
        return role_pairs(zero, zero, zero)

    def _role_pairs(self, student: TokenizedText, teacher: TokenizedText) -> Chunks:
        """Pair the k-th special token of a role at a byte with the other side's k-th there."""
        same_text = student.source == teacher.source
        theirs = dict(_special_positions(teacher, self.teacher_vocab, inner=same_text))
        mine = _special_positions(student, self.student_vocab, inner=same_text)
        pairs = _monotone([(token, theirs[key], int(student.byte_ends[token])) for key, token in mine if key in theirs])
        arrays = np.array(pairs, dtype=np.int64).reshape(-1, 3)
        return role_pairs(arrays[:, 0], arrays[:, 1], arrays[:, 2])


def _own_text(tokenizer: ByteTokenizer, rendering: TokenizedText, start: int, end: int) -> bytes | None:
    """The text of a chunk's tokens, where they spell it but for a space in front that the tokenizer has added; else
    None."""
    if rendering.special[start:end].any():
        return None
    text = rendering.source[int(rendering.byte_ends[start - 1]) if start else 0 : int(rendering.byte_ends[end - 1])]
    spelled = tokenizer.vocab.join(rendering.ids[start:end].tolist())
    before = rendering.special[:start]
    if tokenizer.space_in_front == "begin":
        opens = bool(before.all())
    else:
        opens = tokenizer.space_in_front == "stretch" and bool(before[-1:].all())
    return text if spelled == text or (opens and spelled == b" " + text) else None


def _real_tokens(
    ids: torch.Tensor, mask: torch.Tensor | None, vocab: ByteVocab, side: str
) -> Iterator[tuple[IntArray, IntArray]]:
    """Ids of each row and the columns that they stand in; padding takes no part."""
    values = ids.cpu().numpy().astype(np.int64)
    real = np.ones(values.shape, dtype=bool) if mask is None else mask.cpu().numpy() > 0
    if (wrong := real & ((values < 0) | (values >= vocab.size))).any():
        row, column = np.argwhere(wrong)[0].tolist()
        raise AlignmentError(
            f"{side} id {values[row, column]} in row {row} is outside its tokenizer's {vocab.size} ids."
        )
    for row, kept in zip(values, real, strict=True):
        columns = np.flatnonzero(kept)
        yield row[columns], columns


def _special_positions(
    rendering: TokenizedText, vocab: ByteVocab, *, inner: bool
) -> list[tuple[tuple[str, str, int], int]]:
    """Special tokens as ((edge or byte, role, occurrence), index); ``inner``: those inside the text, too, whose bytes
    mean the same on both sides only where both texts are the same."""
    seen: Counter[tuple[str, str]] = Counter()
    keyed = []
    for token in np.flatnonzero(rendering.special).tolist():
        end, role = int(rendering.byte_ends[token]), role_class(vocab.roles[int(rendering.ids[token])])
        edge = "begin" if end == 0 else "end" if end == len(rendering.source) else ""
        if role in ("pad", "unk") or not (edge or inner):
            continue
        key = (edge or str(end), role)
        keyed.append(((*key, seen[key]), token))
        seen[key] += 1
    return keyed


def _monotone(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Drop pairs that would cross an earlier one."""
    kept: list[tuple[int, int, int]] = []
    for pair in pairs:
        if not kept or pair[1] > kept[-1][1]:
            kept.append(pair)
    return kept
