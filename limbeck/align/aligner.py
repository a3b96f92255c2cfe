"""Alignment of whole batches: ``TokenAligner`` and its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from limbeck.align.boundaries import Chunks, role_pairs
from limbeck.align.pairing import align_ids, align_renderings, rendering_of_ids
from limbeck.tokens import ByteVocab, Rendering
from limbeck.tokens.roles import role_class
from limbeck.utils.errors import AlignmentError

IntArray = npt.NDArray[np.int64]


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


@dataclass
class AlignmentBatch:
    """Chunks of a batch as padded tensors. Chunk ids label tokens; a token at ``t`` is predicted at ``t - 1``.

    Attributes:
        pair_valid: ``[B, C]`` bool; False on padding.
        pair_is_correct: ``[B, C]`` bool; both sides' bytes are equal.
        student_exact_partition_mask: ``[B, Ts]`` bool; the token is one half of an exact 1:1 chunk.
        teacher_exact_partition_mask: ``[B, Tt]`` likewise.
        student_chunk_id: ``[B, Ts]`` int64; the chunk of each token, -1 for none.
        teacher_chunk_id: ``[B, Tt]`` likewise.
        num_chunks: ``[B]`` int64.
    """

    pair_valid: torch.Tensor
    pair_is_correct: torch.Tensor
    student_exact_partition_mask: torch.Tensor
    teacher_exact_partition_mask: torch.Tensor
    student_chunk_id: torch.Tensor
    teacher_chunk_id: torch.Tensor
    num_chunks: torch.Tensor

    def as_dict(self, prefix: str = "alignment_") -> dict[str, torch.Tensor]:
        """The tensors under the keys that batches carry them by."""
        return {prefix + name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_chunks(cls, samples: Sequence[Chunks], student_width: int, teacher_width: int) -> AlignmentBatch:
        """Pad the chunks of several samples to the given widths; there is always at least one chunk column."""
        batch, width = len(samples), max([len(c) for c in samples] + [1])
        valid = np.zeros((batch, width), dtype=bool)
        correct = np.zeros((batch, width), dtype=bool)
        ids = [np.full((batch, w), -1, dtype=np.int64) for w in (student_width, teacher_width)]
        ones = [np.zeros((batch, w), dtype=bool) for w in (student_width, teacher_width)]
        for row, chunks in enumerate(samples):
            n = len(chunks)
            valid[row, :n] = True
            correct[row, :n] = chunks.exact
            spans = (chunks.student_start, chunks.student_end), (chunks.teacher_start, chunks.teacher_end)
            single = chunks.exact & (spans[0][1] - spans[0][0] == 1) & (spans[1][1] - spans[1][0] == 1)
            for side, (start, end) in enumerate(spans):
                _label(ids[side][row], start, end)
                ones[side][row, start[single]] = True
        counts = np.array([len(c) for c in samples], dtype=np.int64)
        arrays = (valid, correct, ones[0], ones[1], ids[0], ids[1], counts)
        return cls(*map(torch.from_numpy, arrays))


def _label(row: IntArray, start: IntArray, end: IntArray) -> None:
    """Write each chunk's number onto its tokens; chunks are disjoint and ordered on both sides."""
    lengths = end - start
    if not len(lengths):
        return
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(numbers)) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)
    row[places] = numbers


class TokenAligner:
    """Aligns student and teacher tokenizations of the same text on shared byte boundaries.

    Args:
        student_tokenizer, teacher_tokenizer: transformers fast tokenizers.
        projection_matrix_path: kept for the loss, as in the published signature; not used here.
        max_comb_len: accepted for compatibility; byte boundaries need no limit on chunk length.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        projection_matrix_path: str | Path | None = None,
        max_comb_len: int = 4,
    ) -> None:
        self.student_vocab = ByteVocab.from_tokenizer(student_tokenizer)
        self.teacher_vocab = ByteVocab.from_tokenizer(teacher_tokenizer)
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
        samples = []
        for row in range(len(student_ids)):
            student_at, student = _kept(student_ids, student_attention_mask, row, self.student_vocab, "student")
            teacher_at, teacher = _kept(teacher_ids, teacher_attention_mask, row, self.teacher_vocab, "teacher")
            chunks = self.align_id_rows(student, teacher)
            samples.append(_placed(chunks, student_at, teacher_at))
        return AlignmentBatch.from_chunks(samples, student_ids.shape[1], teacher_ids.shape[1])

    def align_id_rows(self, student_ids: IntArray, teacher_ids: IntArray) -> Chunks:
        """Chunks of two unpadded id sequences, special tokens paired by role at equal places."""
        student = rendering_of_ids(self.student_vocab, student_ids)
        teacher = rendering_of_ids(self.teacher_vocab, teacher_ids)
        return Chunks.concatenate([align_ids(student, teacher), self._role_pairs(student, teacher)])

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
                display_tokens(self.student_vocab, student.ids[a:b]),
                display_tokens(self.teacher_vocab, teacher.ids[c:d]),
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


def _kept(
    ids: torch.Tensor, mask: torch.Tensor | None, row: int, vocab: ByteVocab, side: str
) -> tuple[IntArray, IntArray]:
    """Places and ids of a row's real tokens."""
    values = ids[row].cpu().numpy().astype(np.int64)
    places = np.arange(len(values)) if mask is None else np.flatnonzero(mask[row].cpu().numpy())
    values = values[places]
    if len(values) and (values.min() < 0 or values.max() >= vocab.size):
        bad = int(values[(values < 0) | (values >= vocab.size)][0])
        raise AlignmentError(f"{side} id {bad} in row {row} is outside its tokenizer's {vocab.size} ids.")
    return places, values


def _placed(chunks: Chunks, student_at: IntArray, teacher_at: IntArray) -> Chunks:
    """Token indices over the real tokens -> indices over the padded row (left padding moves them)."""
    values = asdict(chunks)
    for side, at in (("student", student_at), ("teacher", teacher_at)):
        if len(at):
            values[f"{side}_start"] = at[values[f"{side}_start"]]
            values[f"{side}_end"] = at[values[f"{side}_end"] - 1] + 1
    return Chunks(**values)


def display_tokens(vocab: ByteVocab, ids: IntArray) -> list[str]:
    """Tokens as strings for people: text where the bytes are text, ``\\xHH`` where they are not, roles in brackets."""
    shown = []
    for i in ids.tolist():
        data = vocab.token_bytes[i]
        shown.append(data.decode("utf-8", "backslashreplace") if data else f"[{vocab.roles.get(i, 'empty')}]")
    return shown
