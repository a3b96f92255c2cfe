"""From a batch to what the loss needs: layouts for cross-entropy and for every teacher, and the block plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from limbeck.data.layout import (
    AlignmentTensors,
    ChunkLayout,
    TokenLayout,
    build_chunk_layout,
    build_identity_layout,
    build_token_layout,
    count_tokens,
    usable_chunks,
)
from limbeck.losses.peers import ALONE, Peers
from limbeck.losses.plan import BlockPlan, plan_blocks
from limbeck.losses.transfer import moved
from limbeck.utils.errors import LossError

if TYPE_CHECKING:
    from limbeck.losses.fast.order import ColumnPlan


class MicrobatchLike(Protocol):
    """What the loss reads of a `ProcessedMicrobatch`: the raw batch, and where each sample's rows start."""

    data_dict: Any
    processed_inputs: Any


@dataclass
class LossInputs:
    """Layouts and block plan of one micro-batch; built on the CPU, moved with `to`."""

    tokens: TokenLayout
    layouts: list[ChunkLayout]
    plan: BlockPlan
    num_samples: int
    num_tokens: float  # sum of the cross-entropy weights
    columns: ColumnPlan | None = None  # the same rows in the order of the kernels, where they may be used
    peers: Peers = ALONE  # ranks that have the rest of the micro-batch

    def to(self, device: torch.device | str) -> LossInputs:
        if self.tokens.rows.device == torch.device(device):
            return self
        return moved(self, device)


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
    if same_vocabulary and not torch.equal(layout.student_ids, layout.teacher_ids):
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
    """Number of chunks that `teacher_layout` would hold, float64, without building it."""
    prefix = _aligned_prefix(batch, teacher, same_vocabulary)
    mask = _sample_mask(batch, teacher)
    if prefix is None:
        return count_tokens(batch["input_lengths"], batch["token_mask"], (mask > 0).double())
    lengths = (batch["input_lengths"], batch[prefix[0] + "input_lengths"])
    alignment = AlignmentTensors.from_batch(batch, prefix[1])
    return usable_chunks(alignment, *lengths, mask, allow_inexact=allow_inexact)[0].sum(dtype=torch.float64)


def padded_row_start(ids: Tensor) -> Tensor:
    """Row starts of a right-padded batch `[B, T]` viewed as flat rows."""
    return torch.arange(ids.shape[0]) * ids.shape[1]


def teacher_ids_of(batch: Mapping[str, Any], teacher: int) -> Tensor:
    """The ids `[B, T]` that a teacher reads."""
    prefix = teacher_prefix(batch, teacher)
    ids: Tensor = batch["input_ids" if prefix is None else prefix[0] + "input_ids"]
    return ids


def build_inputs(
    batch: Mapping[str, Any],
    row_start: Tensor,
    teacher_row_starts: Sequence[Tensor | None],
    same_vocabulary: Sequence[bool],
    *,
    allow_inexact: bool,
    block_rows: int,
) -> LossInputs:
    """Layouts of a micro-batch. teacher_row_starts: one `[B]` per teacher; None: the student's own."""
    if len(teacher_row_starts) != len(same_vocabulary):
        raise LossError(
            f"{len(teacher_row_starts)} teacher row starts for {len(same_vocabulary)} teachers; give one each"
        )
    tokens = build_token_layout(
        batch["input_ids"], batch["input_lengths"], batch["token_mask"], batch["sample_mask"], row_start
    )
    layouts = [
        teacher_layout(
            batch,
            i,
            same_vocabulary=same,
            student_row_start=row_start,
            teacher_row_start=row_start if start is None else start,
            allow_inexact=allow_inexact,
        )
        for i, (start, same) in enumerate(zip(teacher_row_starts, same_vocabulary, strict=True))
    ]
    plan = plan_blocks(tokens, layouts, block_rows)
    return LossInputs(tokens, layouts, plan, int(row_start.numel()), float(tokens.weight.double().sum()))
