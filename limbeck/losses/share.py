"""One rank's share of a micro-batch's loss: whole chunks, about as many rows as any other rank's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.losses.inputs import LossInputs
from limbeck.losses.peers import ALONE, Peers
from limbeck.losses.plan import BlockSpan, plan_blocks


def share_of(inputs: LossInputs, part: int, parts: int, block_rows: int, peers: Peers = ALONE) -> LossInputs:
    """The `part`-th of `parts` shares of `inputs` (on the CPU); together they hold every token and chunk once.

    peers: the ranks that take the other shares.
    """
    rows = int(inputs.plan.rows.numel())
    fine = plan_blocks(inputs.tokens, inputs.layouts, max(1, -(-rows // (4 * parts)))).blocks
    owner = np.array([block.rows[0] * parts // max(rows, 1) for block in fine], np.int64)
    mine = [fine[i] for i in np.flatnonzero(owner == part)]
    tokens = _tokens(inputs.tokens, mine)
    layouts = [_chunks(layout, mine, i) for i, layout in enumerate(inputs.layouts)]
    return replace(
        inputs,
        tokens=tokens,
        layouts=layouts,
        plan=plan_blocks(tokens, layouts, block_rows),
        num_tokens=float(tokens.weight.double().sum()),
        columns=None,
        peers=peers,
    )


def _tokens(tokens: TokenLayout, blocks: list[BlockSpan]) -> TokenLayout:
    start, end = (blocks[0].tokens[0], blocks[-1].tokens[1]) if blocks else (0, 0)
    return TokenLayout(tokens.rows[start:end], tokens.ids[start:end], tokens.weight[start:end])


def _chunks(layout: ChunkLayout, blocks: list[BlockSpan], teacher: int) -> ChunkLayout:
    spans = [block.chunks[teacher] for block in blocks]

    def ends(name: str) -> tuple[int, int]:
        return (getattr(spans[0], name)[0], getattr(spans[-1], name)[1]) if spans else (0, 0)

    (c0, c1), (s0, s1), (t0, t1) = ends("chunks"), ends("student"), ends("teacher")
    return ChunkLayout(
        layout.student_rows[s0:s1],
        layout.student_chunk[s0:s1] - c0,
        layout.student_ids[s0:s1],
        layout.teacher_rows[t0:t1],
        layout.teacher_chunk[t0:t1] - c0,
        layout.teacher_ids[t0:t1],
        c1 - c0,
        sample=None if layout.sample is None else layout.sample[c0:c1],
    )
