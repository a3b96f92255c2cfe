"""Order of a block's rows for the kernels, where every row of the batch is a column of the logits `[V, n]`.

Columns of one side: first one per chunk (chunks of one token on both sides before the others), then the remaining
tokens of the chunks of several tokens, then, on the student's side, rows that belong to no chunk. A loss on means of
logits uses the linearity of the head: the column of a chunk of several tokens then stands for the mean of its hidden
states, and all its tokens follow behind. Built on the CPU together with the block plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.losses.fast.kernels import padded
from limbeck.losses.plan import BlockPlan, BlockSpan, plan_blocks

Kind = Literal["first", "mean"]

# Which columns each mode works on (student, teacher); a same-vocabulary teacher is handled like gold.
KINDS: dict[str, tuple[Kind, Kind]] = {
    "boundary_kl": ("first", "first"),
    "alm": ("first", "first"),
    "p_kl": ("first", "mean"),
    "gold": ("mean", "mean"),
    "h_kl": ("mean", "mean"),
}
LOGIT_BYTES = 5 << 29
"""Memory for the logits of a block, both sides together; sets how many rows it has."""
MIN_ROWS, MAX_ROWS = 2048, 16384


@dataclass(frozen=True)
class SideColumns:
    """One side of a block. rows, ids `[width]`: flat hidden row and realised token of each column (a mean's column has
    its chunk's first token there); owner `[extras]`: chunk of the columns that follow the first C; extra_first,
    extra_count `[M]`: where the further columns of each chunk of several tokens start, and how many they are; count
    `[C]`: tokens of each chunk."""

    width: int
    extras: int
    mean: bool
    rows: Tensor
    ids: Tensor
    owner: Tensor
    extra_first: Tensor
    extra_count: Tensor
    count: Tensor

    @property
    def padded(self) -> int:
        return padded(self.width)


@dataclass(frozen=True)
class BlockColumns:
    """One block. order `[C]`: the chunks of the layout in column order, the first `single` of them one to one;
    ce_weight, label `[student.width]`: of cross-entropy (weight 0: none)."""

    chunks: int
    single: int
    tokens: int
    order: Tensor
    student: SideColumns
    teacher: SideColumns | None
    ce_weight: Tensor
    label: Tensor

    @property
    def multi(self) -> int:
        return self.chunks - self.single


@dataclass(frozen=True)
class ColumnPlan:
    """Column order of every block; `plan` names the same blocks for the plain path."""

    blocks: tuple[BlockColumns, ...]
    plan: BlockPlan


def columns_for(
    mode: str,
    tokens: TokenLayout,
    layouts: list[ChunkLayout],
    sizes: tuple[int, int] | None,
    block_rows: int | None = None,
) -> ColumnPlan | None:
    """Column plan of a micro-batch, or None where the kernels do not know this case.

    sizes: both vocabularies; None without a projection (no teacher, or one with the student's vocabulary). block_rows
    None: as many rows as `LOGIT_BYTES` hold in bfloat16.
    """
    same = bool(layouts) and sizes is None
    default: tuple[Kind, Kind] | None = None if layouts else ("first", "first")
    kinds = KINDS["gold"] if same else KINDS.get(mode, default)
    if kinds is None:
        return None
    if block_rows is None:
        width = sum(sizes) if sizes is not None else 1 << 18
        block_rows = min(max(LOGIT_BYTES // (2 * width) // 1024 * 1024, MIN_ROWS), MAX_ROWS)
    found = plan_columns(tokens, layouts, block_rows, *kinds)
    several = found is not None and any(b.multi for b in found.blocks)
    return None if same and several else found


def plan_columns(
    tokens: TokenLayout, layouts: list[ChunkLayout], block_rows: int, student: Kind, teacher: Kind
) -> ColumnPlan | None:
    """Blocks of about equal size, at most `block_rows` rows each, with their column order.

    None where this order cannot serve: several teachers, or a row whose chunk and cross-entropy name different tokens.
    """
    if len(layouts) > 1:
        return None
    rows = torch.cat([tokens.rows, *(layout.student_rows for layout in layouts)]).unique().numel()
    most = max([rows, *(layout.teacher_rows.numel() for layout in layouts)])
    parts = max(-(-most // block_rows), 1)
    # room for chunks that do not end where an equal share would
    plan = plan_blocks(tokens, layouts, min(-(-most // parts) + 32, block_rows))
    blocks = []
    for span in plan.blocks:
        block = _block(tokens, layouts[0] if layouts else None, plan, span, student, teacher)
        if block is None:
            return None
        blocks.append(block)
    return ColumnPlan(tuple(blocks), plan)


def _block(
    tokens: TokenLayout, layout: ChunkLayout | None, plan: BlockPlan, span: BlockSpan, student: Kind, teacher: Kind
) -> BlockColumns | None:
    (row0, row1), (t0, t1) = span.rows, span.tokens
    weight, label = np.zeros(row1 - row0, np.float32), np.full(row1 - row0, -1, np.int64)
    place = plan.token_place[t0:t1].numpy() - row0
    weight[place], label[place] = tokens.weight[t0:t1].numpy(), tokens.ids[t0:t1].numpy()
    free = np.ones(row1 - row0, bool)
    order, single, sides, chunk_place = np.zeros(0, np.int64), 0, None, np.zeros(0, np.int64)
    if layout is not None:
        chunks = span.chunks[0]
        chunk_place = plan.chunk_place[0].numpy() - row0
        mine = chunk_place[chunks.student[0] : chunks.student[1]]
        ids = layout.student_ids[chunks.student[0] : chunks.student[1]].numpy()
        if bool(((label[mine] != ids) & (label[mine] >= 0)).any()):
            return None
        label[mine], free[mine] = ids, False
        order, single = _order(layout, *chunks.chunks)
        sides = _side(layout, "student", order, single, student), _side(layout, "teacher", order, single, teacher)
    own = np.zeros(0, np.int64) if sides is None else sides[0].rows.numpy()
    at = np.concatenate((chunk_place[own], np.flatnonzero(free)))
    column_weight, column_label = weight[at], label[at]
    if sides is not None and sides[0].mean:
        column_weight[single : order.size], column_label[single : order.size] = 0, -1
    return BlockColumns(
        chunks=int(order.size),
        single=single,
        tokens=t1 - t0,
        order=torch.from_numpy(order),
        student=_student_side(sides[0] if sides else None, plan.rows[row0:row1].numpy()[at], column_label),
        teacher=None if sides is None or layout is None else _teacher_side(sides[1], layout),
        ce_weight=torch.from_numpy(column_weight),
        label=torch.from_numpy(column_label),
    )


def _order(layout: ChunkLayout, start: int, end: int) -> tuple[np.ndarray, int]:
    """Chunks `start:end`, one-to-one ones first, and how many those are."""
    several = (layout.student_count[start:end].numpy() > 1) | (layout.teacher_count[start:end].numpy() > 1)
    return start + np.argsort(several, kind="stable"), int((~several).sum())


def _side(layout: ChunkLayout, side: str, order: np.ndarray, single: int, kind: Kind) -> SideColumns:
    """Columns of one side; `rows` holds indices into the layout's token arrays until the side is finished."""
    first = getattr(layout, f"{side}_first").numpy()[order]
    count = getattr(layout, f"{side}_count").numpy()[order]
    skip = 0 if kind == "mean" else 1
    more = count[single:] - skip
    starts = np.cumsum(more) - more
    extra = np.repeat(first[single:] + skip - starts, more) + np.arange(int(more.sum()))
    owner = np.repeat(np.arange(single, order.size), more)
    index = torch.from_numpy(np.concatenate((first, extra)))
    return SideColumns(
        width=int(index.numel()),
        extras=int(extra.size),
        mean=kind == "mean",
        rows=index,
        ids=index,
        owner=torch.from_numpy(owner),
        extra_first=torch.from_numpy(starts),
        extra_count=torch.from_numpy(more),
        count=torch.from_numpy(count),
    )


def _student_side(side: SideColumns | None, rows: np.ndarray, label: np.ndarray) -> SideColumns:
    none = torch.zeros(0, dtype=torch.int64)
    side = side or SideColumns(0, 0, False, none, none, none.clone(), none.clone(), none.clone(), none.clone())
    return replace(side, width=int(rows.size), rows=torch.from_numpy(rows), ids=torch.from_numpy(label))


def _teacher_side(side: SideColumns, layout: ChunkLayout) -> SideColumns:
    return replace(side, rows=layout.teacher_rows[side.rows], ids=layout.teacher_ids[side.ids])
