"""Cuts the rows that carry loss into blocks whose borders never cut a chunk. Runs on the CPU, once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout


@dataclass(frozen=True)
class ChunkSpan:
    """One teacher's share of a block: half-open ranges of its chunks, student tokens and teacher tokens."""

    chunks: tuple[int, int]
    student: tuple[int, int]
    teacher: tuple[int, int]


@dataclass(frozen=True)
class BlockSpan:
    """One block: half-open ranges of the planned rows and of the cross-entropy tokens; one span per teacher."""

    rows: tuple[int, int]
    tokens: tuple[int, int]
    chunks: tuple[ChunkSpan, ...]


@dataclass(frozen=True)
class BlockPlan:
    """rows `[U]`: flat student rows that carry any loss, ascending; token_place `[N]` and chunk_place[i] `[Ns_i]`: the
    place of each cross-entropy token and each chunk token among them; blocks: plain integers, so that looping over
    them never waits for a device."""

    rows: Tensor
    token_place: Tensor
    chunk_place: tuple[Tensor, ...]
    blocks: tuple[BlockSpan, ...]

    def to(self, device: torch.device | str) -> BlockPlan:
        return replace(
            self,
            rows=self.rows.to(device, non_blocking=True),
            token_place=self.token_place.to(device, non_blocking=True),
            chunk_place=tuple(p.to(device, non_blocking=True) for p in self.chunk_place),
        )


def plan_blocks(tokens: TokenLayout, layouts: list[ChunkLayout], block_rows: int) -> BlockPlan:
    """Blocks of at most `block_rows` student rows and as many teacher rows per teacher; a chunk larger than that
    gets a block of its own size."""
    rows = torch.cat([tokens.rows, *(layout.student_rows for layout in layouts)]).unique()
    token_place = torch.searchsorted(rows, tokens.rows)
    chunk_place = tuple(torch.searchsorted(rows, layout.student_rows) for layout in layouts)
    cuts = _cuts(rows.numel(), layouts, chunk_place, block_rows)

    token_cut = np.searchsorted(token_place.numpy(), cuts)
    spans: list[list[ChunkSpan]] = [[] for _ in cuts[1:]]
    for layout, place in zip(layouts, chunk_place, strict=True):
        first_place = place[layout.student_first].numpy()
        chunk_cut = np.searchsorted(first_place, cuts)
        student_cut = np.searchsorted(layout.student_chunk.numpy(), chunk_cut)
        teacher_cut = np.searchsorted(layout.teacher_chunk.numpy(), chunk_cut)
        for i, span in enumerate(spans):
            span.append(
                ChunkSpan(
                    (int(chunk_cut[i]), int(chunk_cut[i + 1])),
                    (int(student_cut[i]), int(student_cut[i + 1])),
                    (int(teacher_cut[i]), int(teacher_cut[i + 1])),
                )
            )
    blocks = tuple(
        BlockSpan((int(cuts[i]), int(cuts[i + 1])), (int(token_cut[i]), int(token_cut[i + 1])), tuple(span))
        for i, span in enumerate(spans)
    )
    return BlockPlan(rows, token_place, chunk_place, blocks)


def _cuts(num_rows: int, layouts: list[ChunkLayout], places: tuple[Tensor, ...], block_rows: int) -> np.ndarray:
    """Borders `0 = c_0 < c_1 < ... = num_rows`, none inside a chunk."""
    open_chunks = np.zeros(num_rows + 1, np.int64)
    teacher_rows = []
    for layout, place in zip(layouts, places, strict=True):
        first = place[layout.student_first].numpy()
        last = place[layout.student_first + layout.student_count - 1].numpy()
        np.add.at(open_chunks, first + 1, 1)
        np.add.at(open_chunks, last + 1, -1)
        ends = np.zeros(num_rows + 1, np.int64)
        np.add.at(ends, last + 1, layout.teacher_count.numpy())
        teacher_rows.append(np.cumsum(ends))
    allowed = np.flatnonzero(np.cumsum(open_chunks) == 0)  # always holds 0 and num_rows
    cuts = [0]
    while cuts[-1] < num_rows:
        here = cuts[-1]
        best = int(np.searchsorted(allowed, here + block_rows, side="right")) - 1
        for total in teacher_rows:
            best = min(best, int(np.searchsorted(total[allowed], total[here] + block_rows, side="right")) - 1)
        following = int(np.searchsorted(allowed, here, side="right"))
        cuts.append(int(allowed[max(best, following)]))
    return np.asarray(cuts, np.int64)
