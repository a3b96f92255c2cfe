"""`PKL` on vocabulary-major blocks."""

from __future__ import annotations

import torch

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.fast.base import ChunkWeights, FastOut, SideLogits, mean_lse, pad_lanes
from limbeck.losses.fast.kernels.gradient import Projected
from limbeck.losses.fast.kernels.p_kl import mean_over_chunks, p_kl_divergence
from limbeck.losses.fast.kernels.stats import project_columns
from limbeck.losses.fast.kernels.tables import projection_tables
from limbeck.losses.fast.position_order import BlockPositions
from limbeck.losses.objectives.p_kl import PKL


def p_kl(
    term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher: SideLogits | None, weights: ChunkWeights
) -> FastOut:
    """`PKL`, forward; the teacher's logits hold only its ids K."""
    objective, count, single, num_lanes = term.objective, block.chunks, block.single, student.logits.shape[1]
    assert isinstance(objective, PKL)
    assert teacher is not None
    teacher.compute_stats()
    weight = weights.gated
    ids_K = term.teacher.vocab_ids_K
    assert ids_K is not None
    tau, tables, side = objective.temperature, projection_tables(objective.vocab), student.side
    mass = project_columns(student.logits, student.stats.lse_tau, ids_K, tables, tau)
    # a copy: means, and then R, are written over what lies there
    token_mass = mass[:, single : count + side.extras].clone()
    mean_over_chunks(mass, single, count, side.extra_first.int(), side.extra_count.int())
    total = mass.sum(0)
    out = p_kl_divergence(mass, teacher.logits, mean_lse(teacher, block), total, count, tau)
    owner = torch.cat((torch.arange(count, device=mass.device), side.owner))
    slope_coef = (weight * (term.factor * tau) / side.count_C).index_select(0, owner)
    shift = out.shift.index_select(0, owner)
    own_term = pad_lanes(out.student_term, owner.numel())
    if block.multi:
        chosen = mass.index_select(1, owner[single:])
        own_term[single:] = (token_mass * chosen).sum(0) - shift[single:] * token_mass.sum(0)
    return FastOut(
        out.rows,
        (out.rows * weight).sum() * tau**2,
        {"proj_accuracy": (out.right.sum(), count)},
        pad_lanes(slope_coef, num_lanes),
        pad_lanes(slope_coef * own_term, num_lanes),
        mass.new_zeros(num_lanes),
        Projected(mass, tables.within(ids_K, objective.vocab.teacher_size), tables, pad_lanes(owner, num_lanes).int(),
                  pad_lanes(shift, num_lanes)),
        aligned=count,
        owned=count + side.extras,
    )  # fmt: skip
