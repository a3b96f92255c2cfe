"""The order in which the kernels take the positions of a block: each has a lane, a column of the logits `[V, L]`.

Lanes of one side: first one per chunk (chunks of one token on both sides before the others), then the remaining tokens
of the chunks of several tokens, then, on the student's side, rows that belong to no chunk. A loss on means of logits
uses the linearity of the head: the lane of a chunk of several tokens then stands for the mean of its hidden states,
and all its tokens follow behind. Built on the CPU together with the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.losses.blocks import Block, cut_blocks, used_rows
from limbeck.losses.fast.kernels import padded
from limbeck.losses.fast.tree_positions import TreePlan
from limbeck.losses.objectives.base import ChunkBlock, LaneKind

LOGIT_BYTES = 5 << 29
"""Memory for the logits of a block, both sides together; sets how many rows it has."""
MIN_ROWS, MAX_ROWS = 2048, 16384


@dataclass(frozen=True)
class SidePositions:
    """One side of a block. rows, ids `[width]`: flat hidden row and realised token of each lane (a mean's lane has its
    chunk's first token there); owner `[extras]`: chunk of the lanes that follow the first C; extra_first, extra_count:
    where the further lanes of each chunk of several tokens start, and how many they are; count_C: tokens of each
    chunk."""

    width: int
    extras: int
    mean: bool
    rows: Tensor
    ids: Tensor
    owner: Tensor
    extra_first: Tensor
    extra_count: Tensor
    count_C: Tensor

    @property
    def padded(self) -> int:
        return padded(self.width)


@dataclass(frozen=True)
class BlockPositions:
    """One block. order_C: the layout's chunks in the order of the lanes, the first `single` of them one to one;
    ce_weight, label `[student.width]`: of cross-entropy (weight 0: none); trees: where tree_kl's trees go on."""

    chunks: int
    single: int
    tokens: int
    order_C: Tensor
    student: SidePositions
    teacher: SidePositions | None
    ce_weight: Tensor
    label: Tensor
    trees: TreePlan | None = None

    @property
    def multi(self) -> int:
        return self.chunks - self.single


@dataclass(frozen=True)
class PositionOrder:
    """A micro-batch in the kernels' order; `blocks`: the same blocks as the plain path takes them."""

    positions: tuple[BlockPositions, ...]
    blocks: tuple[Block, ...]


def order_positions(
    kinds: tuple[LaneKind, LaneKind] | None,
    tokens: TokenLayout,
    layouts: Sequence[ChunkLayout],
    sizes: tuple[int, int] | None,
    block_rows: int | None = None,
    shards: int = 1,
) -> PositionOrder | None:
    """Lanes of a micro-batch, or None where the kernels do not know this case.

    kinds: what stands for a chunk on either side; None: no kernels. sizes: both vocabularies; None without a projection
    (no teacher, or one with the student's vocabulary). block_rows None: as many rows as `LOGIT_BYTES` hold in bfloat16.
    shards: the number of blocks is a multiple of it, where there are rows enough.
    """
    if kinds is None:
        return None
    if block_rows is None:
        width = sum(sizes) if sizes is not None else 1 << 18
        block_rows = min(max(LOGIT_BYTES // (2 * width) // 1024 * 1024, MIN_ROWS), MAX_ROWS)
    order = order_blocks(tokens, layouts, block_rows, *kinds, shards=shards)
    same = bool(layouts) and sizes is None
    several = order is not None and any(block.multi for block in order.positions)
    return None if same and several else order


def order_blocks(
    tokens: TokenLayout,
    layouts: Sequence[ChunkLayout],
    block_rows: int,
    student: LaneKind,
    teacher: LaneKind,
    *,
    shards: int = 1,
) -> PositionOrder | None:
    """Blocks of about equal size, at most `block_rows` rows each, with their lanes.

    layouts: of one teacher at most. None where this order cannot serve: a row whose chunk and cross-entropy name
    different tokens.
    """
    rows = int(used_rows(tokens, layouts).sum())
    most = max([rows, *(layout.teacher_rows_Q.numel() for layout in layouts)])
    parts = max(-(-most // (block_rows * shards)), 1) * shards
    # room for chunks that do not end where an equal share would
    blocks = cut_blocks(tokens, layouts, min(-(-most // parts) + 32, block_rows))
    positions = []
    for block in blocks:
        ordered = _block_positions(block, student, teacher)
        if ordered is None:
            return None
        positions.append(ordered)
    return PositionOrder(tuple(positions), blocks)


def _block_positions(block: Block, student: LaneKind, teacher: LaneKind) -> BlockPositions | None:
    rows = block.rows_N.numpy()
    weight, label = np.zeros(rows.size, np.float32), np.full(rows.size, -1, np.int64)
    token_row = block.token_row_E.numpy()
    weight[token_row], label[token_row] = block.token_weight_E.numpy(), block.token_ids_E.numpy()
    free = np.ones(rows.size, bool)
    order, single, chunk_rows, sides = np.zeros(0, np.int64), 0, np.zeros(0, np.int64), None
    if block.chunks:
        (chunks,) = block.chunks
        mine, ids = chunks.student_row_M.numpy(), chunks.student_ids_M.numpy()
        if bool(((label[mine] != ids) & (label[mine] >= 0)).any()):
            return None
        label[mine], free[mine] = ids, False
        several = chunks.multi_C.numpy()
        order, single = np.argsort(several, kind="stable"), int((~several).sum())
        sides = (
            _side(chunks.student_first_C, chunks.student_count_C, order, single, student),
            _side(chunks.teacher_first_C, chunks.teacher_count_C, order, single, teacher),
        )
        chunk_rows = mine[sides[0].rows.numpy()]
    lane_rows = np.concatenate((chunk_rows, np.flatnonzero(free)))
    lane_weight, lane_label = weight[lane_rows], label[lane_rows]
    if sides is not None and sides[0].mean:
        # a mean is no position: its tokens have lanes of their own behind, with their cross-entropy
        lane_weight[single : order.size], lane_label[single : order.size] = 0, -1
    return BlockPositions(
        chunks=int(order.size),
        single=single,
        tokens=int(token_row.size),
        order_C=torch.from_numpy(order + (block.chunks[0].chunks[0] if block.chunks else 0)),
        student=_student_side(sides[0] if sides else None, rows[lane_rows], lane_label),
        teacher=None if sides is None else _teacher_side(sides[1], block.chunks[0]),
        ce_weight=torch.from_numpy(lane_weight),
        label=torch.from_numpy(lane_label),
    )


def _side(first_C: Tensor, count_C: Tensor, order: np.ndarray, single: int, kind: LaneKind) -> SidePositions:
    """Lanes of one side; `rows` and `ids` hold indices into the block's token arrays until the side is finished."""
    first, count = first_C.numpy()[order], count_C.numpy()[order]
    skip = 0 if kind == "mean" else 1
    more = count[single:] - skip
    starts = np.cumsum(more) - more
    extra = np.repeat(first[single:] + skip - starts, more) + np.arange(int(more.sum()))
    owner = np.repeat(np.arange(single, order.size), more)
    index = torch.from_numpy(np.concatenate((first, extra)))
    return SidePositions(
        width=int(index.numel()),
        extras=int(extra.size),
        mean=kind == "mean",
        rows=index,
        ids=index,
        owner=torch.from_numpy(owner),
        extra_first=torch.from_numpy(starts),
        extra_count=torch.from_numpy(more),
        count_C=torch.from_numpy(count),
    )


def _student_side(side: SidePositions | None, rows: np.ndarray, label: np.ndarray) -> SidePositions:
    none = torch.zeros(0, dtype=torch.int64)
    side = side or SidePositions(0, 0, False, none, none, none.clone(), none.clone(), none.clone(), none.clone())
    return replace(side, width=int(rows.size), rows=torch.from_numpy(rows), ids=torch.from_numpy(label))


def _teacher_side(side: SidePositions, chunks: ChunkBlock) -> SidePositions:
    return replace(side, rows=chunks.teacher_row_Q[side.rows], ids=chunks.teacher_ids_Q[side.ids])
