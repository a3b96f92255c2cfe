"""The base of losses over chunks: distillation, the hint channel, and the policy gradient on sampled text.

It knows which chunks carry loss, where their rows lie in a micro-batch, which of them a context-parallel rank has,
and whether student, signals and layouts fit together. A loss adds what it counts and what it computes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from limbeck.data.layout import ChunkLayout, TokenLayout, count_chunks, teacher_chunks, with_chunks
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import LossError
from limbeck.losses.blocks import Block, shard_layouts
from limbeck.losses.contract import Batch, Counts, Loss
from limbeck.losses.fast.position_order import PositionOrder
from limbeck.losses.signals import Head, TeacherOutput, check_scored_ids


@dataclass(kw_only=True)
class ChunkInputs:
    """Which rows of a micro-batch carry which loss; built on the CPU, moved with `to`. tokens: the student's that carry
    a loss of their own; layouts: each teacher's chunks."""

    tokens: TokenLayout
    layouts: list[ChunkLayout]

    def to(self, device: torch.device | str) -> Self:
        return to_device(self, device)


@dataclass(kw_only=True)
class BlockInputs(ChunkInputs):
    """Rows that pass through the heads in blocks. cut: makes the blocks of the plain path, on the CPU; orders: the same
    rows in the order of the kernels, one for each teacher, where they may be used; comm: ranks that have the rest of
    the micro-batch."""

    cut: Callable[[], tuple[Block, ...]]
    orders: tuple[PositionOrder, ...] | None = None
    comm: Comm = field(default_factory=Comm.alone)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the plain path, where the layouts are. Cut when they are asked for: the kernels have their own."""
        return to_device(self.cut(), self.tokens.rows_E.device)


ChunkInputsT = TypeVar("ChunkInputsT", bound=ChunkInputs)


class ChunkLoss(Loss[ChunkInputsT]):
    """A loss over the chunks of each teacher. Chunks lie in the batch as `chunks_<i>` after `prepare_batch`."""

    tensor_parallel = True
    context_parallel = True

    @abstractmethod
    def same_vocabulary(self, batch: Batch) -> list[bool]:
        """Whether each teacher that has chunks reads the student's ids."""

    def keeps_inexact(self, number: int) -> bool:
        """Whether chunks of teacher ``number`` whose bytes differ take part."""
        return False

    def reads_text_alone(self, number: int) -> bool:
        """Whether it asks teacher ``number`` for probabilities of realised text alone, so that a chunk may begin with
        a space that one tokenizer writes by itself."""
        return False

    def prepare_batch(self, batch: Batch) -> Batch:
        """The batch with each teacher's chunks that carry loss, which its counts and micro-batches then read."""
        return with_chunks(batch, self.select_chunks(batch))

    def select_chunks(self, batch: Batch) -> list[ChunkLayout]:
        """Chunks of each teacher that carry loss."""
        return [
            teacher_chunks(
                batch,
                i,
                same_vocabulary=same,
                allow_inexact=self.keeps_inexact(i),
                by_text=self.reads_text_alone(i),
            )
            for i, same in enumerate(self.same_vocabulary(batch))
        ]

    def denominators(self, batch: Batch) -> Counts:
        """Local denominators `chunks_i`, one per teacher, float64 scalars."""
        return {f"chunks_{i}": count_chunks(batch, i, layout) for i, layout in enumerate(self.select_chunks(batch))}

    def build_layout(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None]) -> ChunkInputsT:
        """Rows of one micro-batch, on the CPU. row_starts: per teacher the flat row `[B]` at which each sample starts
        in that teacher's forward pass; None: as in the student's."""
        assert mb.processed_inputs.row_start is not None
        return self.layout_at(mb.data_dict, mb.processed_inputs.row_start.cpu(), row_starts)

    def layout_at(self, batch: Batch, row_start_B: Tensor, row_starts: Sequence[Tensor | None]) -> ChunkInputsT:
        """`build_layout`, of a batch whose samples start at these rows of the student's forward pass."""
        if len(row_starts) != self.num_teachers:
            raise LossError(f"{len(row_starts)} teacher row starts for {self.num_teachers} teachers; give one each")
        # not strict: signals that are mixed into one teacher read the same rows, and have one layout
        layouts = [
            layout.placed(row_start_B, row_start_B if theirs is None else theirs)
            for layout, theirs in zip(self.select_chunks(batch), row_starts, strict=False)
        ]
        return self.make_inputs(batch, row_start_B, layouts)

    @abstractmethod
    def make_inputs(self, batch: Batch, row_start_B: Tensor, layouts: list[ChunkLayout]) -> ChunkInputsT:
        """Inputs of `compute_loss` from each teacher's chunks on the flat rows of the forward passes."""

    def shard(self, inputs: ChunkInputsT, comm: Comm) -> ChunkInputsT:
        """One rank's share of a micro-batch that all ranks of `comm` have prepared. All hidden states are here, and
        their gradients are summed over the ranks; so a row behind a chunk may be another rank's, too."""
        whole = inputs.to("cpu")
        return self.make_share(whole, *self.share_of(whole, comm), comm)

    def share_of(self, whole: ChunkInputsT, comm: Comm) -> tuple[TokenLayout, list[ChunkLayout]]:
        """One rank's tokens and chunks: whole chunks, about as many rows as any other's."""
        return shard_layouts(whole.tokens, whole.layouts, comm.rank, comm.size)

    @abstractmethod
    def make_share(
        self, whole: ChunkInputsT, tokens: TokenLayout, layouts: list[ChunkLayout], comm: Comm
    ) -> ChunkInputsT:
        """Inputs of the tokens and chunks that `share_of` gave to this rank."""

    def check(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: ChunkInputsT, *, defer: bool
    ) -> list[Tensor]:
        """Refuse ids and sizes that do not fit together, before any logit is computed. defer: whether the ids differ
        comes back as flags, to be read together with the finished loss, so that it costs no wait of its own."""
        if len(signals) != self.num_teachers:
            raise LossError(f"{len(signals)} teacher signals for {self.num_teachers} teachers; give one each")
        row = max(inputs.tokens.max_row, *(layout.max_student_row for layout in inputs.layouts), -1)
        if row >= hidden_RH.shape[0]:
            raise LossError(f"student: the layout needs row {row} but there are {hidden_RH.shape[0]} hidden rows")
        token = max(inputs.tokens.max_id, *(layout.max_student_id for layout in inputs.layouts), -1)
        if token >= head.vocab_size:
            raise LossError(
                f"student: token id {token} is out of range for a head of {head.vocab_size} tokens; the batch was "
                "tokenized with another tokenizer"
            )
        return self.compare_ids(signals, inputs, defer=defer)

    def compare_ids(self, signals: Sequence[TeacherOutput], inputs: ChunkInputsT, *, defer: bool) -> list[Tensor]:
        """Hold the ids that each signal scored against its layout's: an error, or flags where the answer can wait."""
        layouts = inputs.layouts if len(inputs.layouts) > 1 else inputs.layouts * len(signals)
        pairs = enumerate(zip(signals, layouts, strict=True))
        flags = [check_scored_ids(signal, layout, f"teacher_{i}", defer=defer) for i, (signal, layout) in pairs]
        return [flag for flag in flags if flag is not None]
