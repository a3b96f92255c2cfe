"""Which rows carry which loss: index layouts built once per micro-batch, on the CPU, from plain tensors.

Hidden states of a forward pass are viewed as flat rows `[R, h]`; token `t` of sample `b` sits at flat row
`row_start[b] + t`, and the row that *predicts* it is the one before. A layout therefore serves padded, dynamic and
packed batches alike, and only rows named in a layout ever reach a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from limbeck.errors import LossError

_Layout = TypeVar("_Layout", "ChunkLayout", "TokenLayout")


def _moved(layout: _Layout, device: torch.device | str) -> _Layout:
    """Copy of a layout whose tensors live on `device`."""
    values = ((f.name, getattr(layout, f.name)) for f in fields(layout))
    moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in values if isinstance(v, Tensor)}
    return replace(layout, **moved)


def _max(values: Tensor) -> int:
    return int(values.max()) if values.numel() else -1


@dataclass
class TokenLayout:
    """Tokens under cross-entropy: flat predicting row, token id and weight, `[E]` each, rows ascending."""

    rows_E: Tensor
    ids_E: Tensor
    weight_E: Tensor
    max_row: int = -2
    max_id: int = -2

    def __post_init__(self) -> None:
        if self.max_row == -2:
            self.max_row, self.max_id = _max(self.rows_E), _max(self.ids_E)

    @classmethod
    def empty(cls) -> TokenLayout:
        """No tokens."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none, torch.zeros(0))

    def range(self, start: int, end: int) -> TokenLayout:
        """Tokens `start:end`."""
        return TokenLayout(self.rows_E[start:end], self.ids_E[start:end], self.weight_E[start:end])

    def to(self, device: torch.device | str) -> TokenLayout:
        return _moved(self, device)


@dataclass
class ChunkLayout:
    """Aligned chunks of one micro-batch and one teacher, numbered `0..C-1` in the order of their student rows.

    Per token of the student (M) and the teacher (Q), `*_rows`: flat predicting rows; `*_chunk`: chunk number,
    non-decreasing; `*_ids`: the realised token. Per chunk (C), `sample_C`: row of the batch that it belongs to;
    `*_first_C`: index (into the arrays above) of its first token; `*_count_C`: its number of tokens; both are derived
    where they are not given; `*_last_C`: the token before the chunk, -1 where it is not known; `weight_C`: what its
    sample counts; None: all 1.
    `max_*` are plain integers so that range checks cost no device synchronisation.
    """

    student_rows_M: Tensor
    student_chunk_M: Tensor
    student_ids_M: Tensor
    teacher_rows_Q: Tensor
    teacher_chunk_Q: Tensor
    teacher_ids_Q: Tensor
    num_chunks: int
    sample_C: Tensor | None = None
    student_first_C: Tensor = field(default=None)  # type: ignore[assignment]
    student_count_C: Tensor = field(default=None)  # type: ignore[assignment]
    teacher_first_C: Tensor = field(default=None)  # type: ignore[assignment]
    teacher_count_C: Tensor = field(default=None)  # type: ignore[assignment]
    student_last_C: Tensor = field(default=None)  # type: ignore[assignment]
    teacher_last_C: Tensor = field(default=None)  # type: ignore[assignment]
    weight_C: Tensor | None = None
    max_student_row: int = -2
    max_student_id: int = -2
    max_teacher_row: int = -2
    max_teacher_id: int = -2

    def __post_init__(self) -> None:
        chunks = torch.arange(self.num_chunks, device=self.student_chunk_M.device)
        for side, tokens in (("student", "M"), ("teacher", "Q")):
            owner = getattr(self, f"{side}_chunk_{tokens}")
            if getattr(self, f"{side}_first_C") is None:
                setattr(self, f"{side}_first_C", torch.searchsorted(owner, chunks))
                setattr(self, f"{side}_count_C", torch.bincount(owner, minlength=self.num_chunks))
            if getattr(self, f"{side}_last_C") is None:
                setattr(self, f"{side}_last_C", torch.full_like(chunks, -1))
            if getattr(self, f"max_{side}_row") == -2:
                setattr(self, f"max_{side}_row", _max(getattr(self, f"{side}_rows_{tokens}")))
                setattr(self, f"max_{side}_id", _max(getattr(self, f"{side}_ids_{tokens}")))
        if self.sample_C is None:
            self.sample_C = torch.zeros_like(chunks)

    def range(self, start: int, end: int) -> ChunkLayout:
        """Chunks `start:end`."""
        student = slice(*(int(self.student_count_C[:n].sum()) for n in (start, end)))
        teacher = slice(*(int(self.teacher_count_C[:n].sum()) for n in (start, end)))
        return ChunkLayout(
            self.student_rows_M[student],
            self.student_chunk_M[student] - start,
            self.student_ids_M[student],
            self.teacher_rows_Q[teacher],
            self.teacher_chunk_Q[teacher] - start,
            self.teacher_ids_Q[teacher],
            end - start,
            sample_C=None if self.sample_C is None else self.sample_C[start:end],
            student_last_C=self.student_last_C[start:end],
            teacher_last_C=self.teacher_last_C[start:end],
            weight_C=None if self.weight_C is None else self.weight_C[start:end],
        )

    def to(self, device: torch.device | str) -> ChunkLayout:
        return _moved(self, device)


@dataclass(frozen=True)
class AlignmentTensors:
    """The fields of an alignment that decide which tokens form a chunk (see `limbeck.align.AlignmentBatch`)."""

    pair_valid: Tensor  # [B, C] bool
    pair_is_correct: Tensor  # [B, C] bool: the bytes of both sides are equal
    student_chunk_id: Tensor  # [B, Ts] int64, -1: none
    teacher_chunk_id: Tensor  # [B, Tt] int64, -1: none

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any], prefix: str) -> AlignmentTensors:
        names = [f.name for f in fields(cls)]
        missing = [prefix + n for n in names if prefix + n not in batch]
        if missing:
            raise LossError(f"the batch lacks {missing}; collate it with an aligner for this teacher")
        return cls(**{n: batch[prefix + n].cpu() for n in names})


def _chunk_weight(sample_mask: Tensor, sample: Tensor) -> Tensor | None:
    """What the samples of chunks count; None where it is 1 for every one that counts at all."""
    mask = sample_mask.cpu().float()
    return mask[sample] if bool(((mask > 0) & (mask != 1)).any()) else None


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


def _tokens_of_chunks(chunk_id: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sample, token, key) of all chunk tokens, and per key `sample * width + chunk`: token count, tokens that have
    no predictor or lie in the padding."""
    sample, token = (chunk_id >= 0).nonzero(as_tuple=True)
    chunk = chunk_id[sample, token]
    if chunk.numel() and int(chunk.max()) >= width:
        raise LossError(
            f"chunk id {int(chunk.max())} is out of range for an alignment of {width} chunks; align this batch again"
        )
    key = sample * width + chunk
    total = chunk_id.shape[0] * width
    count = torch.bincount(key, minlength=total)
    unusable = (token == 0) | (token >= lengths[sample])
    return sample, token, key, count, torch.bincount(key[unusable], minlength=total)


def usable_chunks(
    alignment: AlignmentTensors,
    student_lengths: Tensor,
    teacher_lengths: Tensor,
    sample_mask: Tensor,
    *,
    allow_inexact: bool,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """bool `[B * C]`: which chunks are valid, and both sides' (sample, token, key).

    A chunk is valid when its pair is, both sides are non-empty, every token on both sides has a predictor and lies
    inside its sample, the bytes agree (unless `allow_inexact`) and the sample counts (`sample_mask > 0`).
    """
    width = alignment.pair_valid.shape[1]
    student = _tokens_of_chunks(alignment.student_chunk_id, student_lengths.cpu(), width)
    teacher = _tokens_of_chunks(alignment.teacher_chunk_id, teacher_lengths.cpu(), width)
    valid = alignment.pair_valid.bool() & (sample_mask.cpu() > 0)[:, None]
    if not allow_inexact:
        valid = valid & alignment.pair_is_correct.bool()
    valid = valid.reshape(-1)
    for *_, count, unusable in (student, teacher):
        valid = valid & (count > 0) & (unusable == 0)
    return valid, student[:3], teacher[:3]


def build_chunk_layout(
    alignment: AlignmentTensors,
    *,
    student_ids: Tensor,
    student_lengths: Tensor,
    student_row_start: Tensor,
    teacher_ids: Tensor,
    teacher_lengths: Tensor,
    teacher_row_start: Tensor,
    sample_mask: Tensor,
    allow_inexact: bool = False,
) -> ChunkLayout:
    """Layout of the valid chunks of a micro-batch, see `usable_chunks`."""
    batch, width = alignment.pair_valid.shape
    valid, student, teacher = usable_chunks(
        alignment, student_lengths, teacher_lengths, sample_mask, allow_inexact=allow_inexact
    )
    rows = student_row_start.cpu()[student[0]] + student[1] - 1
    first_row = torch.full((batch * width,), torch.iinfo(torch.int64).max).scatter_reduce(0, student[2], rows, "amin")
    kept = valid.nonzero().squeeze(1)
    kept = kept[first_row[kept].argsort()]
    number = torch.full((batch * width,), -1)
    number[kept] = torch.arange(kept.numel())

    def side(tokens: tuple[Tensor, ...], ids: Tensor, row_start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sample, token, key = tokens[:3]
        chunk = number[key]
        order = chunk.argsort(stable=True)
        order = order[chunk[order] >= 0]
        sample, token, chunk, own = sample[order], token[order], chunk[order], ids.cpu()
        first = torch.searchsorted(chunk, torch.arange(kept.numel()))
        last = own[sample[first], token[first] - 1]
        return row_start.cpu()[sample] + token - 1, chunk, own[sample, token], last

    s_rows, s_chunk, s_ids, s_last = side(student, student_ids, student_row_start)
    t_rows, t_chunk, t_ids, t_last = side(teacher, teacher_ids, teacher_row_start)
    if bool((s_rows.diff() <= 0).any()):
        raise LossError("chunks overlap on the student side; chunk ids must not decrease along a sample")
    return ChunkLayout(
        s_rows,
        s_chunk,
        s_ids,
        t_rows,
        t_chunk,
        t_ids,
        int(kept.numel()),
        sample_C=kept // width,
        student_last_C=s_last,
        teacher_last_C=t_last,
        weight_C=_chunk_weight(sample_mask, kept // width),
    )


def build_identity_layout(
    ids: Tensor,
    lengths: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    student_row_start: Tensor,
    teacher_row_start: Tensor,
) -> ChunkLayout:
    """Layout for a teacher that reads the student's own ids: every supervised token is a chunk of one token."""
    sample, token, rows = supervised_tokens(lengths, token_mask, sample_mask, student_row_start)
    teacher_rows = teacher_row_start.cpu()[sample] + token - 1
    target = ids.cpu()[sample, token]
    chunk = torch.arange(rows.numel())
    weight = _chunk_weight(sample_mask, sample)
    return ChunkLayout(
        rows, chunk, target, teacher_rows, chunk, target, chunk.numel(), sample_C=sample, weight_C=weight
    )


# ---- the keys of a batch ----


def teacher_prefix(batch: Mapping[str, Any], teacher: int) -> tuple[str, str] | None:
    """Key prefixes (ids, alignment) of a teacher; None where it reads the student's own ids."""
    if f"teacher_{teacher}_input_ids" in batch:
        return f"teacher_{teacher}_", f"alignment_{teacher}_"
    if teacher == 0 and "teacher_input_ids" in batch:
        return "teacher_", "alignment_"
    return None


def teacher_layout(
    batch: Mapping[str, Any],
    teacher: int,
    *,
    same_vocabulary: bool,
    student_row_start: Tensor,
    teacher_row_start: Tensor,
    allow_inexact: bool,
) -> ChunkLayout:
    """Chunks of one teacher in a batch; positions, each a chunk of one token, for a same-vocabulary teacher.

    Rows for which ``teacher_<i>_sample_mask`` is 0 have no signal of this teacher and give no chunk.
    """
    prefix = _aligned_prefix(batch, teacher, same_vocabulary)
    sample_mask = _sample_mask(batch, teacher)
    if prefix is None:
        return build_identity_layout(
            batch["input_ids"],
            batch["input_lengths"],
            batch["token_mask"],
            sample_mask,
            student_row_start,
            teacher_row_start,
        )
    layout = build_chunk_layout(
        AlignmentTensors.from_batch(batch, prefix[1]),
        student_ids=batch["input_ids"],
        student_lengths=batch["input_lengths"],
        student_row_start=student_row_start,
        teacher_ids=batch[prefix[0] + "input_ids"],
        teacher_lengths=batch[prefix[0] + "input_lengths"],
        teacher_row_start=teacher_row_start,
        sample_mask=sample_mask,
        allow_inexact=allow_inexact,
    )
    if same_vocabulary and not torch.equal(layout.student_ids_M, layout.teacher_ids_Q):
        raise LossError(
            f"teacher {teacher} has no projection, so it must read the student's own tokens, but their ids differ; "
            "give it a projection or copy the ids"
        )
    return layout


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
    own = f"teacher_{teacher}_sample_mask"
    return mask * batch[own] if own in batch else mask


def teacher_chunks(batch: Mapping[str, Any], teacher: int, *, same_vocabulary: bool, allow_inexact: bool) -> Tensor:
    """What the chunks of `teacher_layout` count together, float64, without building it; their number where every
    sample counts 1."""
    prefix = _aligned_prefix(batch, teacher, same_vocabulary)
    mask = _sample_mask(batch, teacher)
    if prefix is None:
        return count_tokens(batch["input_lengths"], batch["token_mask"], mask)
    lengths = (batch["input_lengths"], batch[prefix[0] + "input_lengths"])
    alignment = AlignmentTensors.from_batch(batch, prefix[1])
    usable = usable_chunks(alignment, *lengths, mask, allow_inexact=allow_inexact)[0]
    return (usable.view(alignment.pair_valid.shape).sum(1) * mask.cpu().double().clamp(min=0)).sum()


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
