"""`CommonKL` (gold, H-KL) and `SameVocabulary` on vocabulary-major blocks: both compare tokens in pairs."""

from __future__ import annotations

import torch

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.fast.base import ChunkWeights, FastOut, SideLogits, Sums, mean_lse, pad_lanes
from limbeck.losses.fast.kernels.gradient import Paired
from limbeck.losses.fast.kernels.pairs import pairs_divergence
from limbeck.losses.fast.kernels.sorted_l1 import sorted_rest
from limbeck.losses.fast.kernels.tables import identity_pairs, pair_tables
from limbeck.losses.fast.position_order import BlockPositions
from limbeck.losses.objectives.common_kl import CommonKL


def common_kl(
    term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher: SideLogits | None, weights: ChunkWeights
) -> FastOut:
    """`CommonKL` (gold, H-KL), forward, and `SameVocabulary`, forward."""
    objective, count, single, num_lanes = term.objective, block.chunks, block.single, student.logits.shape[1]
    assert teacher is not None
    teacher.compute_stats()
    weight = weights.gated
    common = objective if isinstance(objective, CommonKL) else None
    if common is None:
        tables = identity_pairs(student.logits.shape[0], student.logits.device)
    else:
        tables = pair_tables(common.pairs, student.logits.shape[0], teacher.logits.shape[0])
    tau = objective.temperature
    lse_s, lse_t = mean_lse(student, block), mean_lse(teacher, block)
    out = pairs_divergence(student.logits, teacher.logits, lse_s, lse_t, tables, count, tau)
    rows, mass, rest = out.rows, -out.kept, None
    metrics: Sums = {"proj_accuracy": (out.right.sum(), count)}
    if common is not None and tables.unpaired_student.numel() + tables.unpaired_teacher.numel():
        rest = sorted_rest(
            student.logits, teacher.logits, lse_s, lse_t, tables.unpaired_student, tables.unpaired_teacher, count,
            common.cfg.uncommon_topk, tau,
        )  # fmt: skip
        rows, mass = rows + rest.rows, mass + rest.mass
    if common is not None:
        l1 = rows.new_zeros(()) if rest is None else (rest.rows * weight).sum()
        metrics["common_kl"], metrics["uncommon_l1"] = ((out.rows * weight).sum(), count), (l1, count)
    slope_coef = weight * (term.factor * tau)
    mass_coef = -slope_coef * mass
    prob_coef = rows.new_zeros(num_lanes)
    prob_coef[:single] = mass_coef[:single]
    if block.multi:
        shared = (mass_coef / student.side.count_C).index_select(0, student.side.owner)
        prob_coef[count : count + student.side.extras] = shared
    return FastOut(
        rows, (rows * weight).sum() * tau**2, metrics, pad_lanes(slope_coef, num_lanes), prob_coef,
        torch.zeros_like(prob_coef), Paired(teacher.logits, lse_t, tables, rest), aligned=count, lse=lse_s,
    )  # fmt: skip
