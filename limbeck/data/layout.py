"""Which rows carry which loss: index layouts on the CPU.

Hidden states of a forward pass are viewed as flat rows `[R, h]`; token `t` of sample `b` sits at flat row
`row_start[b] + t`, and the row that *predicts* it is the one before. A layout therefore serves padded, dynamic and
packed batches alike, and only rows named in a layout ever reach a head.

An alignment has three shapes. An aligner gives `Chunks` of one sample; a batch holds the chunks of all its samples as
one `ChunkLayout` per teacher, under `chunks_<i>`, which is cut with its rows; a loss cuts what a micro-batch has of it
into the `ChunkBlock`s of its row blocks. Batches may hold the published `alignment_*` keys instead, never both: the
first one to ask (`Loss.prepare_batch`) makes the layout of them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from limbeck.align import Chunks
from limbeck.errors import LossError

BatchT = TypeVar("BatchT", bound=MutableMapping[str, Any])


def _max(values: Tensor) -> int:
    return int(values.max()) if values.numel() else -1


@dataclass
class TokenLayout:
    """Tokens under cross-entropy: flat predicting row, token id and weight, `[E]` each, rows ascending."""

    rows_E: Tensor
    ids_E: Tensor
    weight_E: Tensor
    # -2: to be found; -1 is what no tokens give
    max_row: int = -2
    max_id: int = -2

    def __post_init__(self) -> None:
        if self.max_row == -2:
            self.max_row, self.max_id = _max(self.rows_E), _max(self.ids_E)

    @classmethod
    def empty(cls) -> TokenLayout:
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none, torch.zeros(0))

    def range(self, start: int, end: int) -> TokenLayout:
        return TokenLayout(self.rows_E[start:end], self.ids_E[start:end], self.weight_E[start:end])


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Aligned chunks of B samples with one teacher: sample after sample, in the order of their first student tokens.

    Built once per batch, cut by the batch like its other entries (`slice`), and `placed` on the rows of a forward pass
    once they are known. A chunk lists its tokens, `student_count_C[c]` of them from `student_first_C[c]` on, along the
    sample; they need not be neighbours there.

    Attributes:
        sample_C: row of the batch that a chunk belongs to.
        student_rows_M, teacher_rows_Q: the row that predicts each token: within its sample (-1: none) or, once placed,
            among the flat rows of the forward pass.
        student_ids_M, teacher_ids_Q: the tokens.
        student_count_C, teacher_count_C: tokens of each chunk, at least 1.
        student_last_C, teacher_last_C: the token before each chunk; -1 where it begins its sample.
        exact_C: both sides' bytes are the text's; None once `usable` has chosen.
        same_text_C: exact, but for a space that a tokenizer writes in front by itself; None once `usable` has chosen.
        weight_C: what the chunk's sample counts; None: all 1.
        max_student_row, max_student_id, max_teacher_row, max_teacher_id: of a placed layout, as plain integers, so that
            range checks do not wait for a device.
    """

    num_samples: int
    sample_C: Tensor
    student_rows_M: Tensor
    student_ids_M: Tensor
    student_count_C: Tensor
    student_last_C: Tensor
    teacher_rows_Q: Tensor
    teacher_ids_Q: Tensor
    teacher_count_C: Tensor
    teacher_last_C: Tensor
    exact_C: Tensor | None = None
    same_text_C: Tensor | None = None
    weight_C: Tensor | None = None
    max_student_row: int = -1
    max_student_id: int = -1
    max_teacher_row: int = -1
    max_teacher_id: int = -1

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_chunks(self) -> int:
        return self.sample_C.numel()

    @cached_property
    def chunks_B(self) -> Tensor:
        """Number of chunks of each sample."""
        return torch.bincount(self.sample_C, minlength=self.num_samples)

    @cached_property
    def student_first_C(self) -> Tensor:
        """Where each chunk's tokens begin in the student's token arrays."""
        return _starts(self.student_count_C)

    @cached_property
    def teacher_first_C(self) -> Tensor:
        """Where each chunk's tokens begin in the teacher's token arrays."""
        return _starts(self.teacher_count_C)

    @cached_property
    def student_chunk_M(self) -> Tensor:
        """The chunk of each student token, non-decreasing."""
        # output_size: without it the host waits for a device to tell the sum
        return torch.repeat_interleave(self.student_count_C, output_size=self.student_rows_M.numel())

    @cached_property
    def teacher_chunk_Q(self) -> Tensor:
        """The chunk of each teacher token, non-decreasing."""
        return torch.repeat_interleave(self.teacher_count_C, output_size=self.teacher_rows_Q.numel())

    # ---- building ----

    @classmethod
    def of_chunks(cls, samples: Sequence[Chunks], student_ids_BT: Tensor, teacher_ids_BT: Tensor) -> ChunkLayout:
        """Chunks that an aligner found in each sample of a batch with these ids."""
        # an empty one in front, for a batch may have no samples, and numpy joins no empty list
        parts = [Chunks.concatenate([]), *samples]
        every = Chunks(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Chunks)))
        sample_C = torch.repeat_interleave(torch.tensor([len(chunks) for chunks in samples], dtype=torch.int64))
        student, teacher = (
            (torch.from_numpy(start), torch.from_numpy(end - start))
            for start, end in ((every.student_start, every.student_end), (every.teacher_start, every.teacher_end))
        )
        return cls._gathered(
            sample_C,
            (torch.from_numpy(every.exact), torch.from_numpy(every.same_text)),
            (_members(*student), student[1], student_ids_BT),
            (_members(*teacher), teacher[1], teacher_ids_BT),
        )

    @classmethod
    def of_alignment(
        cls, batch: Mapping[str, Any], prefix: str, student_ids_BT: Tensor, teacher_ids_BT: Tensor
    ) -> ChunkLayout:
        """Chunks by the published keys, see `limbeck.align.AlignmentBatch`: all tokens of one label are a chunk,
        wherever they stand. Pairs that are not valid or have no token on one side are none."""
        names = ("pair_valid", "pair_is_correct", "student_chunk_id", "teacher_chunk_id")
        missing = [prefix + name for name in names if prefix + name not in batch]
        if missing:
            raise LossError(f"the batch lacks {missing}; collate it with an aligner for this teacher")
        valid_BP, exact_BP, *labels = (batch[prefix + name].cpu() for name in names)
        samples, pairs = valid_BP.shape
        student, teacher = (_labelled(label_BT, pairs) for label_BT in labels)
        same_BP = batch[f"{prefix}pair_same_text"].cpu() if f"{prefix}pair_same_text" in batch else exact_BP
        keep = valid_BP.reshape(-1).bool()
        for pair, _ in (student, teacher):
            keep = keep & (torch.bincount(pair, minlength=samples * pairs) > 0)
        first = torch.zeros(samples * pairs, dtype=torch.int64)
        first = first.scatter_reduce(0, student[0], student[1], "amin", include_self=False)
        kept = keep.nonzero().squeeze(1)
        sample_C = kept // max(pairs, 1)
        kept = kept[(sample_C * labels[0].shape[1] + first[kept]).argsort()]
        number = torch.full((samples * pairs,), -1)
        number[kept] = torch.arange(kept.numel())

        def side(pair: Tensor, position: Tensor, ids_BT: Tensor) -> _Side:
            order = number[pair].argsort(stable=True)
            order = order[number[pair[order]] >= 0]
            return position[order], torch.bincount(number[pair[order]], minlength=kept.numel()), ids_BT

        exact_C, same_C = (flag_BP.reshape(-1).bool()[kept] for flag_BP in (exact_BP, same_BP))
        sides = side(*student, student_ids_BT), side(*teacher, teacher_ids_BT)
        return cls._gathered(sample_C, (exact_C, same_C), *sides)

    @classmethod
    def of_positions(cls, ids_BT: Tensor, token_mask_BT: Tensor) -> ChunkLayout:
        """For a teacher that reads the student's own ids: every supervised token is a chunk of one token."""
        sample_C, at_C = (token_mask_BT.cpu() > 0).nonzero(as_tuple=True)
        side = (at_C, torch.ones_like(at_C), ids_BT)
        exact_C = torch.ones_like(at_C, dtype=torch.bool)
        return cls._gathered(sample_C, (exact_C, exact_C), side, side)

    @classmethod
    def _gathered(cls, sample_C: Tensor, agree_C: tuple[Tensor, Tensor], student: _Side, teacher: _Side) -> ChunkLayout:
        """From `exact_C` and `same_text_C`, and both sides' (position of each token in its sample, tokens of each
        chunk, ids `[B, T]`)."""

        def side(position: Tensor, count_C: Tensor, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            ids_BT = ids_BT.cpu()
            sample = sample_C[torch.repeat_interleave(count_C, output_size=position.numel())]
            before_C = position[_starts(count_C)] - 1
            last_C = ids_BT[sample_C, before_C.clamp(min=0)].masked_fill(before_C < 0, -1)
            return position - 1, ids_BT[sample, position], count_C, last_C

        return cls(student[2].shape[0], sample_C, *side(*student), *side(*teacher), *agree_C)

    def names(self, student_ids_BT: Tensor, teacher_ids_BT: Tensor) -> bool:
        """Whether a layout that is not placed names the tokens of these ids."""
        for rows, ids, chunk, ids_BT in (
            (self.student_rows_M, self.student_ids_M, self.student_chunk_M, student_ids_BT.cpu()),
            (self.teacher_rows_Q, self.teacher_ids_Q, self.teacher_chunk_Q, teacher_ids_BT.cpu()),
        ):
            if _max(rows) + 1 >= ids_BT.shape[1] or not torch.equal(ids_BT[self.sample_C[chunk], rows + 1], ids):
                return False
        return True

    # ---- choosing and cutting ----

    def usable(
        self,
        student_lengths_B: Tensor,
        teacher_lengths_B: Tensor,
        sample_mask_B: Tensor,
        *,
        allow_inexact: bool,
        by_text: bool = False,
    ) -> ChunkLayout:
        """The chunks that carry loss: every token on both sides has a predictor and lies inside its sample, the bytes
        agree (unless `allow_inexact`; with `by_text` the text alone), and the sample counts (mask above 0), by as much
        as its mask says."""
        if self.exact_C is None:
            return self
        mask_B = sample_mask_B.cpu().float()
        keep_C = _pick(mask_B > 0, self.sample_C)
        ends = []
        for rows, first_C, count_C, lengths_B in (
            (self.student_rows_M, self.student_first_C, self.student_count_C, student_lengths_B),
            (self.teacher_rows_Q, self.teacher_first_C, self.teacher_count_C, teacher_lengths_B),
        ):
            low_C, high_C = _pick(rows, first_C), _pick(rows, first_C + count_C - 1)  # rows ascend within a chunk
            keep_C = keep_C & (low_C >= 0) & (high_C + 1 < _pick(lengths_B.cpu(), self.sample_C))
            ends.append((low_C, high_C))
        if not allow_inexact:
            keep_C = keep_C & (self.same_text_C if by_text and self.same_text_C is not None else self.exact_C)
        chunks = keep_C.nonzero().squeeze(1)
        sample_C, low_C, high_C = (_pick(values_C, chunks) for values_C in (self.sample_C, *ends[0]))
        if bool(((low_C[1:] <= high_C[:-1]) & (sample_C.diff() == 0)).any()):
            raise LossError("chunks overlap on the student side; chunk ids must not decrease along a sample")
        weighted = bool(((mask_B > 0) & (mask_B != 1)).any())
        weight_C = _pick(mask_B, sample_C) if weighted else None
        return replace(self.take(chunks), exact_C=None, same_text_C=None, weight_C=weight_C)

    def slice(self, rows: Sequence[int]) -> ChunkLayout:
        """The samples at these rows of the batch, in that order; repeats are allowed. Neighbours are a view."""
        row, end_B = torch.as_tensor(rows, dtype=torch.int64), self.chunks_B.cumsum(0)
        if row.numel() and bool((row >= 0).all() & (row.diff() == 1).all()):
            first, last = int(row[0]), int(row[-1])
            layout = self.range(int(end_B[first] - self.chunks_B[first]), int(end_B[last]))
            return replace(layout, num_samples=row.numel(), sample_C=layout.sample_C - first)
        counts = self.chunks_B[row]
        layout = self.take(_members((end_B - self.chunks_B)[row], counts))
        return replace(layout, num_samples=row.numel(), sample_C=torch.repeat_interleave(counts))

    def range(self, start: int, end: int) -> ChunkLayout:
        """Chunks `start:end`, as a view; the samples keep their numbers."""
        sides = ((self.student_first_C, self.student_rows_M), (self.teacher_first_C, self.teacher_rows_Q))
        m, q = (
            slice(*(int(first_C[c]) if c < self.num_chunks else rows.numel() for c in (start, end)))
            for first_C, rows in sides
        )
        return self._parts(slice(start, end), m, q)

    def take(self, chunks: Tensor) -> ChunkLayout:
        """The chunks with these numbers, in that order."""
        m = _members(self.student_first_C[chunks], self.student_count_C[chunks])
        q = _members(self.teacher_first_C[chunks], self.teacher_count_C[chunks])
        return self._parts(chunks, m, q)

    def _parts(self, chunks: Tensor | _Range, m: Tensor | _Range, q: Tensor | _Range) -> ChunkLayout:
        """Some chunks, with their tokens on both sides."""
        return replace(
            self,
            sample_C=_pick(self.sample_C, chunks),
            student_rows_M=_pick(self.student_rows_M, m),
            student_ids_M=_pick(self.student_ids_M, m),
            student_count_C=_pick(self.student_count_C, chunks),
            student_last_C=_pick(self.student_last_C, chunks),
            teacher_rows_Q=_pick(self.teacher_rows_Q, q),
            teacher_ids_Q=_pick(self.teacher_ids_Q, q),
            teacher_count_C=_pick(self.teacher_count_C, chunks),
            teacher_last_C=_pick(self.teacher_last_C, chunks),
            exact_C=None if self.exact_C is None else _pick(self.exact_C, chunks),
            same_text_C=None if self.same_text_C is None else _pick(self.same_text_C, chunks),
            weight_C=None if self.weight_C is None else _pick(self.weight_C, chunks),
        )

    def blank(self, num_samples: int) -> ChunkLayout:
        """So many samples without a chunk."""
        return replace(self.range(0, 0), num_samples=num_samples)

    @classmethod
    def concat(cls, parts: Sequence[ChunkLayout]) -> ChunkLayout:
        """The samples of several layouts, one after the other."""
        names = [f.name for f in fields(cls) if f.name.startswith(("student_", "teacher_"))]
        names += [name for name in ("exact_C", "same_text_C") if all(getattr(p, name) is not None for p in parts)]
        joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        if any(part.weight_C is not None for part in parts):
            every = [torch.ones(part.num_chunks) if part.weight_C is None else part.weight_C for part in parts]
            joined["weight_C"] = torch.cat(every)
        sizes = torch.tensor([part.num_samples for part in parts])
        samples = zip(parts, _starts(sizes).tolist(), strict=True)
        return cls(
            num_samples=int(sizes.sum()),
            sample_C=torch.cat([part.sample_C + before for part, before in samples]),
            **joined,
        )

    def placed(self, student_row_start_B: Tensor, teacher_row_start_B: Tensor) -> ChunkLayout:
        """The same chunks on the flat rows of the two forward passes, in the order of their student rows; samples may
        lie in any order there."""
        starts = student_row_start_B.cpu()
        if bool((starts.diff() < 0).any()):
            order = starts.argsort(stable=True)
            layout = self.slice(order.tolist())
            layout = replace(layout, sample_C=order[layout.sample_C])
        else:
            layout = self
        student_rows_M = layout.student_rows_M + _pick(_pick(starts, layout.sample_C), layout.student_chunk_M)
        teacher_start_C = _pick(teacher_row_start_B.cpu(), layout.sample_C)
        teacher_rows_Q = layout.teacher_rows_Q + _pick(teacher_start_C, layout.teacher_chunk_Q)
        return replace(
            layout,
            student_rows_M=student_rows_M,
            teacher_rows_Q=teacher_rows_Q,
            max_student_row=_max(student_rows_M),
            max_student_id=_max(layout.student_ids_M),
            max_teacher_row=_max(teacher_rows_Q),
            max_teacher_id=_max(layout.teacher_ids_Q),
        )


_Range = slice
_Side = tuple[Tensor, Tensor, Tensor]
"""One side: position of each token in its sample, tokens of each chunk, ids `[B, T]`."""


def _starts(count: Tensor) -> Tensor:
    """Where each of several groups of these sizes begins when they follow each other."""
    return count.cumsum(0) - count


def _members(first: Tensor, count: Tensor) -> Tensor:
    """`first, first + 1, ...`, `count` of them, group after group."""
    group = torch.repeat_interleave(count)
    return _pick(first - _starts(count), group) + torch.arange(group.numel(), device=group.device)


def _pick(values: Tensor, index: Tensor | _Range) -> Tensor:
    """`values[at]`; by the operator that is four times as fast where `at` is a list."""
    return values[index] if isinstance(index, _Range) else values.index_select(0, index)


def _labelled(label_BT: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """(`sample * pairs + label`, position) of all tokens that have a label, along each sample."""
    sample, position = (label_BT >= 0).nonzero(as_tuple=True)
    label = label_BT[sample, position]
    if label.numel() and int(label.max()) >= pairs:
        raise LossError(
            f"chunk id {int(label.max())} is out of range for an alignment of {pairs} chunks; align this batch again"
        )
    return sample * pairs + label, position


def _supervised(lengths: Tensor, token_mask: Tensor) -> Tensor:
    """bool `[B, T]`: tokens under cross-entropy that have a predictor and lie inside their sample."""
    position = torch.arange(token_mask.shape[1])
    return (token_mask.cpu() > 0) & (position >= 1) & (position < lengths.cpu()[:, None])


def count_tokens(lengths: Tensor, token_mask: Tensor, sample_mask: Tensor) -> Tensor:
    """Sum of the weights that `build_token_layout` gives, float64."""
    per_sample = _supervised(lengths, token_mask).sum(1)
    return (per_sample * sample_mask.cpu().double().clamp(min=0)).sum()


def supervised_tokens(
    lengths: Tensor, token_mask: Tensor, sample_mask: Tensor, row_start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(sample, token, predicting row) of all tokens under cross-entropy, rows ascending."""
    keep = _supervised(lengths, token_mask)
    sample, token = (keep & (sample_mask.cpu() > 0)[:, None]).nonzero(as_tuple=True)
    rows = row_start.cpu()[sample] + token - 1
    order = rows.argsort()
    return sample[order], token[order], rows[order]


def build_token_layout(
    ids: Tensor, lengths: Tensor, token_mask: Tensor, sample_mask: Tensor, row_start: Tensor
) -> TokenLayout:
    """Cross-entropy rows of a micro-batch: supervised tokens that have a predictor, lie inside their sample and whose
    sample counts. ids, token_mask `[B, T]`; lengths, sample_mask, row_start `[B]`. Weight: the sample's mask."""
    sample, token, rows = supervised_tokens(lengths, token_mask, sample_mask, row_start)
    return TokenLayout(rows, ids.cpu()[sample, token], sample_mask.cpu()[sample].float())


# ---- the keys of a batch ----


def teacher_prefix(batch: Mapping[str, Any], teacher: int) -> tuple[str, str] | None:
    """Key prefixes (ids, alignment) of a teacher; None where it reads the student's own ids."""
    if f"teacher_{teacher}_input_ids" in batch:
        return f"teacher_{teacher}_", f"alignment_{teacher}_"
    if teacher == 0 and "teacher_input_ids" in batch:
        return "teacher_", "alignment_"
    return None


def aligned_chunks(batch: Mapping[str, Any], teacher: int) -> ChunkLayout | None:
    """All chunks of a batch with one teacher, from `chunks_<i>` or the published keys; None for a teacher that reads
    the student's own ids."""
    prefix = teacher_prefix(batch, teacher)
    stored: ChunkLayout | None = batch.get(f"chunks_{teacher}")
    if prefix is None or (stored is not None and stored.exact_C is None):
        return stored
    ids = batch["input_ids"], batch[prefix[0] + "input_ids"]
    if stored is None:
        return ChunkLayout.of_alignment(batch, prefix[1], *ids)
    published = prefix[1] + "student_chunk_id"
    if published in batch:
        raise LossError(f"the batch has both chunks_{teacher} and {published}; leave one of them out")
    if not stored.names(*ids):
        raise LossError(f"chunks_{teacher} was made for other tokens than the batch holds; collate it again")
    return stored


def teacher_chunks(
    batch: Mapping[str, Any], teacher: int, *, same_vocabulary: bool, allow_inexact: bool, by_text: bool = False
) -> ChunkLayout:
    """The chunks of one teacher that carry loss, see `ChunkLayout.usable`; positions, each a chunk of one token, for a
    teacher that reads the student's own ids.

    Rows for which ``teacher_<i>_sample_mask`` is 0 have no signal of this teacher and give no chunk.
    """
    layout = aligned_chunks(batch, teacher)
    if layout is not None and layout.exact_C is None:
        return layout
    prefix = _aligned_prefix(batch, teacher, same_vocabulary)
    ids_prefix = "" if prefix is None else prefix[0]
    if layout is None:
        layout = ChunkLayout.of_positions(batch["input_ids"], batch["token_mask"])
    layout = layout.usable(
        batch["input_lengths"],
        batch[f"{ids_prefix}input_lengths"],
        _sample_mask(batch, teacher),
        allow_inexact=allow_inexact,
        by_text=by_text,
    )
    if same_vocabulary and not torch.equal(layout.student_ids_M, layout.teacher_ids_Q):
        raise LossError(
            f"teacher {teacher} has no projection, so it must read the student's own tokens, but their ids differ; "
            "give it a projection or copy the ids"
        )
    return layout


def with_chunks(batch: BatchT, layouts: Sequence[ChunkLayout]) -> BatchT:
    """The batch with these layouts in place of the alignments that they were made of."""
    out = copy(batch)
    for key in [key for key in out if key.startswith("alignment_")]:
        del out[key]
    out.update({f"chunks_{i}": layout for i, layout in enumerate(layouts)})
    return out


def _aligned_prefix(batch: Mapping[str, Any], teacher: int, same_vocabulary: bool) -> tuple[str, str] | None:
    """`teacher_prefix`, which only a teacher of the student's vocabulary may lack."""
    prefix = teacher_prefix(batch, teacher)
    if prefix is None and not same_vocabulary:
        raise LossError(
            f"teacher {teacher} has a projection but the batch has no teacher_{teacher}_input_ids; collate the "
            "batch with this teacher's tokenizer"
        )
    return prefix


def _sample_mask(batch: Mapping[str, Any], teacher: int) -> Tensor:
    """`[B]`: rows that count and of which this teacher has a signal."""
    mask: Tensor = batch["sample_mask"]
    key = f"teacher_{teacher}_sample_mask"
    return mask * batch[key] if key in batch else mask


def count_chunks(batch: Mapping[str, Any], teacher: int, layout: ChunkLayout) -> Tensor:
    """Weight of all chunks of a batch, float64; their number where every sample counts 1."""
    return (layout.chunks_B * _sample_mask(batch, teacher).cpu().double().clamp(min=0)).sum()


def padded_row_start(ids: Tensor) -> Tensor:
    """Row starts of a right-padded batch `[B, T]` viewed as flat rows."""
    return torch.arange(ids.shape[0]) * ids.shape[1]


def teacher_ids_of(batch: Mapping[str, Any], teacher: int) -> Tensor:
    """The ids `[B, T]` that a teacher reads."""
    prefix = teacher_prefix(batch, teacher)
    ids: Tensor = batch["input_ids" if prefix is None else prefix[0] + "input_ids"]
    return ids


def token_layout(batch: Mapping[str, Any], row_start: Tensor) -> TokenLayout:
    """Cross-entropy rows of a micro-batch whose samples start at these flat rows."""
    return build_token_layout(
        batch["input_ids"], batch["input_lengths"], batch["token_mask"], batch["sample_mask"], row_start
    )
