"""Chunks of many rows as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from limbeck.align.boundaries import Chunks
from limbeck.errors import AlignmentError
from limbeck.tokens.tokenized_text import TokenizedText

if TYPE_CHECKING:
    import torch


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
        pair_same_text: ``[B, C]`` bool; correct, but for a space that a tokenizer writes in front by itself. None, of
            an aligner that does not tell: where ``pair_is_correct``.
    """

    pair_valid: torch.Tensor
    pair_is_correct: torch.Tensor
    student_exact_partition_mask: torch.Tensor
    teacher_exact_partition_mask: torch.Tensor
    student_chunk_id: torch.Tensor
    teacher_chunk_id: torch.Tensor
    num_chunks: torch.Tensor
    pair_same_text: torch.Tensor | None = None

    def as_dict(self, prefix: str = "alignment_") -> dict[str, torch.Tensor]:
        """The tensors under the keys that batches carry them by."""
        every = {prefix + name: getattr(self, name) for name in self.__dataclass_fields__}
        return {key: value for key, value in every.items() if value is not None}

    @classmethod
    def from_chunks(cls, samples: Sequence[Chunks], student_width: int, teacher_width: int) -> AlignmentBatch:
        """Pad the chunks of several samples to the given widths; there is always at least one chunk column."""
        import torch

        chunks, batch = Chunks.in_order(samples), len(samples)
        counts = np.array([len(sample) for sample in samples], dtype=np.int64)
        row = np.repeat(np.arange(batch), counts)
        number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        valid = np.arange(max(int(counts.max(initial=0)), 1)) < counts[:, None]
        correct, same = np.zeros_like(valid), np.zeros_like(valid)
        correct[row, number], same[row, number] = chunks.exact, chunks.same_text
        spans = (chunks.student_start, chunks.student_end), (chunks.teacher_start, chunks.teacher_end)
        single = chunks.exact & (spans[0][1] - spans[0][0] == 1) & (spans[1][1] - spans[1][0] == 1)
        ones, labels = [], []
        for (start, end), width in zip(spans, (student_width, teacher_width), strict=True):
            lengths = end - start
            position = np.arange(int(lengths.sum())) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)
            label = np.full((batch, width), -1, dtype=np.int64)
            label[np.repeat(row, lengths), position] = np.repeat(number, lengths)
            one = np.zeros((batch, width), dtype=bool)
            one[row[single], start[single]] = True
            ones.append(one)
            labels.append(label)
        return cls(*map(torch.from_numpy, (valid, correct, *ones, *labels, counts, same)))

    def chunks(self, row: int, student: TokenizedText, teacher: TokenizedText) -> Chunks:
        """A row's chunks with the bytes that they span, of the two texts that were aligned."""
        number = int(self.num_chunks[row])
        spans = []
        for side, label in (("student", self.student_chunk_id[row]), ("teacher", self.teacher_chunk_id[row])):
            ids = label.cpu().numpy()
            index = np.flatnonzero(ids >= 0)
            size = np.bincount(ids[index], minlength=number)
            if len(size) > number or (size == 0).any() or (np.diff(ids[index]) < 0).any():
                raise AlignmentError(
                    f"row {row}: the {side}'s chunk ids are {ids[index].tolist()[:12]}...; expected every chunk below "
                    f"{number}, in the order of its tokens"
                )
            first = index[np.searchsorted(ids[index], np.arange(number))]
            last = index[np.searchsorted(ids[index], np.arange(number), side="right") - 1]
            if (last - first + 1 != size).any():
                raise AlignmentError(f"row {row}: a {side} chunk's tokens do not lie side by side")
            spans.append((first.astype(np.int64), (last + 1).astype(np.int64)))
        (start_s, end_s), (start_t, end_t) = spans
        edges = np.concatenate([[0], student.byte_ends]).astype(np.int64)
        exact = self.pair_is_correct[row, :number].cpu().numpy().astype(bool)
        role = student.special[start_s] & teacher.special[start_t]
        same = exact
        if self.pair_same_text is not None:
            same = self.pair_same_text[row, :number].cpu().numpy().astype(bool)
        bytes_of = edges[start_s], edges[end_s]
        return Chunks(start_s, end_s, start_t, end_t, *bytes_of, exact & ~role, role, same & ~role)
