"""`ALM` on vocabulary-major blocks."""

from __future__ import annotations

import torch

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.fast.base import ChunkWeights, FastOut, SideLogits, chunk_term_from
from limbeck.losses.fast.position_order import BlockPositions


def alm(
    term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher: SideLogits | None, weights: ChunkWeights
) -> FastOut:
    """`ALM`."""
    if teacher is not None:
        teacher.compute_stats()
    tau, weight = term.objective.temperature, weights.gated
    rows, slope = chunk_term_from(term, block, student, teacher, weight, 0, tau)
    return FastOut(rows, (rows * weight).sum() * tau**2, {}, torch.zeros_like(slope), -slope, slope)
