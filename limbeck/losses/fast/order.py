"""Lanes: the order in which the kernels take a block's rows, where every row of the batch is a lane of the logits
`[V, L]`.

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
from limbeck.losses.fast.trees import TreePlan
from limbeck.losses.objectives.base import ChunkBlock, Lane

LOGIT_BYTES = 5 << 29
"""Memory for the logits of a block, both sides together; sets how many rows it has."""
MIN_ROWS, MAX_ROWS = 2048, 16384


@dataclass(frozen=True)
class SideLanes:
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
class BlockLanes:
    """One block. order_C: the layout's chunks in the order of the lanes, the first `single` of them one to one;
    ce_weight, label `[student.width]`: of cross-entropy (weight 0: none); trees: where tree_kl's trees go on."""

    chunks: int
    single: int
    tokens: int
    order_C: Tensor
    student: SideLanes
    teacher: SideLanes | None
    ce_weight: Tensor
    label: Tensor
    trees: TreePlan | None = None

    @property
    def multi(self) -> int:
        return self.chunks - self.single


@dataclass(frozen=True)
class Lanes:
    """A micro-batch in the kernels' order; `blocks`: the same blocks as the plain path takes them."""

    lanes: tuple[BlockLanes, ...]
    blocks: tuple[Block, ...]


def lanes_for(
    kinds: tuple[Lane, Lane] | None,
    tokens: TokenLayout,
    layouts: Sequence[ChunkLayout],
    sizes: tuple[int, int] | None,
    block_rows: int | None = None,
    shards: int = 1,
) -> Lanes | None:
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
    found = cut_lanes(tokens, layouts, block_rows, *kinds, shards=shards)
    same = bool(layouts) and sizes is None
    several = found is not None and any(lanes.multi for lanes in found.lanes)
    return None if same and several else found


def cut_lanes(
    tokens: TokenLayout,
    layouts: Sequence[ChunkLayout],
    block_rows: int,
    student: Lane,
    teacher: Lane,
    *,
    shards: int = 1,
) -> Lanes | None:
    """Blocks of about equal size, at most `block_rows` rows each, with their lanes.

    layouts: of one teacher at most. None where this order cannot serve: a row whose chunk and cross-entropy name
    different tokens.
    """
    rows = int(used_rows(tokens, layouts).sum())
    most = max([rows, *(layout.teacher_rows_Q.numel() for layout in layouts)])
    parts = max(-(-most // (block_rows * shards)), 1) * shards
    # room for chunks that do not end where an equal share would
    blocks = cut_blocks(tokens, layouts, min(-(-most // parts) + 32, block_rows))
    found = []
    for block in blocks:
        lanes = _block_lanes(block, student, teacher)
        if lanes is None:
            return None
        found.append(lanes)
    return Lanes(tuple(found), blocks)


def _block_lanes(block: Block, student: Lane, teacher: Lane) -> BlockLanes | None:
    rows = block.rows_N.numpy()
    weight, label = np.zeros(rows.size, np.float32), np.full(rows.size, -1, np.int64)
    place = block.token_row_E.numpy()
    weight[place], label[place] = block.token_weight_E.numpy(), block.token_ids_E.numpy()
    free = np.ones(rows.size, bool)
    order, single, own, sides = np.zeros(0, np.int64), 0, np.zeros(0, np.int64), None
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
        own = mine[sides[0].rows.numpy()]
    at = np.concatenate((own, np.flatnonzero(free)))
    lane_weight, lane_label = weight[at], label[at]
    if sides is not None and sides[0].mean:
        lane_weight[single : order.size], lane_label[single : order.size] = 0, -1
    return BlockLanes(
        chunks=int(order.size),
        single=single,
        tokens=int(place.size),
        order_C=torch.from_numpy(order + (block.chunks[0].chunks[0] if block.chunks else 0)),
        student=_student_side(sides[0] if sides else None, rows[at], lane_label),
        teacher=None if sides is None else _teacher_side(sides[1], block.chunks[0]),
        ce_weight=torch.from_numpy(lane_weight),
        label=torch.from_numpy(lane_label),
    )


def _side(first_C: Tensor, count_C: Tensor, order: np.ndarray, single: int, kind: Lane) -> SideLanes:
    """Lanes of one side; `rows` and `ids` hold indices into the block's token arrays until the side is finished."""
    first, count = first_C.numpy()[order], count_C.numpy()[order]
    skip = 0 if kind == "mean" else 1
    more = count[single:] - skip
    starts = np.cumsum(more) - more
    extra = np.repeat(first[single:] + skip - starts, more) + np.arange(int(more.sum()))
    owner = np.repeat(np.arange(single, order.size), more)
    index = torch.from_numpy(np.concatenate((first, extra)))
    return SideLanes(
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


def _student_side(side: SideLanes | None, rows: np.ndarray, label: np.ndarray) -> SideLanes:
    none = torch.zeros(0, dtype=torch.int64)
    side = side or SideLanes(0, 0, False, none, none, none.clone(), none.clone(), none.clone(), none.clone())
    return replace(side, width=int(rows.size), rows=torch.from_numpy(rows), ids=torch.from_numpy(label))


def _teacher_side(side: SideLanes, chunks: ChunkBlock) -> SideLanes:
    return replace(side, rows=chunks.teacher_row_Q[side.rows], ids=chunks.teacher_ids_Q[side.ids])
