"""`BoundaryKL` on vocabulary-major blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.fast.base import ChunkWeights, FastOut, SideLogits, chunk_term_from, pad_lanes
from limbeck.losses.fast.kernels.boundary import boundary_divergence
from limbeck.losses.fast.kernels.direct import pair_sums
from limbeck.losses.fast.kernels.gradient import Direct, Projected
from limbeck.losses.fast.kernels.stats import project_columns
from limbeck.losses.fast.kernels.tables import projection_tables
from limbeck.losses.fast.position_order import BlockPositions
from limbeck.losses.objectives.boundary_kl import BoundaryKL
from limbeck.losses.objectives.distributions import TINY, rest_floor, target_divergence
from limbeck.losses.signals import TeacherTopK
from limbeck.losses.vocab.projection import VocabMap


def boundary_kl(
    term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher: SideLogits | None, weights: ChunkWeights
) -> FastOut:
    """`BoundaryKL`: whole distributions (forward), or a top-k list (any direction)."""
    objective, count, num_lanes = term.objective, block.chunks, student.logits.shape[1]
    assert isinstance(objective, BoundaryKL)
    weight, gated = weights.counted, weights.gated
    tau, chunk_weight = objective.temperature, objective.cfg.chunk_weight
    tables = projection_tables(objective.vocab)
    lse = student.stats.lse_tau
    direct = None
    if teacher is None:
        multi_mass = project_columns(student.logits, lse, tables.multi_source, tables, tau)
        rows, right, uncovered, residual, prob_coef = _top_k(term, objective.vocab, block, student, multi_mass, gated)
        slope_coef = residual.new_ones(count, dtype=torch.float32) / tau
    else:
        sums = pair_sums(student.logits, teacher.logits, lse, tables, TINY, tau)
        teacher.compute_stats(sums.stats)
        direct = Direct(tables.direct, teacher.logits, sums.stats.lse_tau, TINY)
        out = boundary_divergence(student.logits, teacher.logits, lse, sums, tables, count, tau)
        rows, uncovered = out.rows, (1 - out.kept).sum()
        right = (out.argmax == teacher.stats.argmax[:count]).sum()
        slope_coef = gated * (term.factor * tau)
        prob_coef, residual = slope_coef * out.student_term, out.ratio
    owner = torch.arange(num_lanes, dtype=torch.int32, device=lse.device).clamp(max=max(count - 1, 0))
    result = FastOut(
        rows,
        (rows * gated).sum() * tau**2,
        {"boundary_kl": ((rows * weight).sum(), count), "proj_accuracy": (right, count)},
        pad_lanes(slope_coef, num_lanes),
        pad_lanes(prob_coef, num_lanes),
        torch.zeros_like(lse),
        Projected(residual, tables.index, tables, owner, direct=direct),
        aligned=count,
    )
    result.metrics["uncovered_mass"] = (uncovered, count)
    chunk_kl = rows.new_zeros(())
    if block.multi:
        chunk_rows, slope = chunk_term_from(term, block, student, teacher, gated, block.single, chunk_weight * tau)
        chunk_kl = (chunk_rows * weight[block.single :]).sum()
        result.rows = rows + F.pad(chunk_rows * chunk_weight, (block.single, 0))
        chunk_loss = (chunk_rows * gated[block.single :]).sum()
        result.loss = result.loss + chunk_loss * (chunk_weight * tau**2)
        result.prob_coef -= slope
        result.label_coef += slope
    result.metrics["chunk_kl"] = (chunk_kl, float(block.multi))
    return result


def _top_k(
    term: TeacherTerm, vocab: VocabMap, block: BlockPositions, student: SideLogits, multi_mass: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, right guesses, uncovered mass, R `[U + 1, L]`, `sum q R` `[C]`) against a top-k list."""
    count, num_lanes = block.chunks, student.logits.shape[1]
    tables, tau = projection_tables(vocab), term.objective.temperature
    (signal,), side = term.teacher.signals, block.teacher
    assert isinstance(signal, TeacherTopK)
    assert side is not None
    first = side.rows[:count]
    ids = signal.topk_ids.index_select(0, first).long()
    empty = ids < 0
    target = signal.topk_logprobs.index_select(0, first).float().masked_fill(empty, -torch.inf).exp()
    ids = ids.masked_fill(empty, 0)
    member = vocab.reachable[ids] & (target > 0)
    lane = torch.arange(count, device=ids.device)[:, None]
    source, slot = tables.source[ids].long(), tables.place[ids].long()
    picked = student.logits.reshape(-1)[source.clamp(min=0) * num_lanes + lane].float() / tau
    mass = (picked - student.stats.lse_tau[:count, None]).exp().masked_fill(source < 0, 0)
    if multi_mass.numel():
        mass = mass + multi_mass.reshape(-1)[slot.clamp(min=0) * num_lanes + lane].masked_fill(slot < 0, 0)
    # the forward pass of an autograd function runs without gradients
    with torch.enable_grad():
        q = (mass * member).requires_grad_()
        tail, floor = (1 - target.sum(-1)).clamp(min=0), rest_floor(q.dtype)
        rows = target_divergence(target, member, q, tail, 1 - q.sum(-1), floor, term.objective.spec)
        (slope,) = torch.autograd.grad((rows * weight).sum(), q)
    slope = slope * member * (-term.factor * tau**2)
    # empty places and uncovered tokens have no slope; they are sent to a row of their own, behind the vocabulary
    residual = torch.zeros(vocab.teacher_size + 1, num_lanes, dtype=student.logits.dtype, device=ids.device)
    residual[ids.masked_fill(~member, vocab.teacher_size), lane] = slope.to(residual.dtype)
    right = (q.argmax(-1) == target.argmax(-1)).sum()
    return rows.detach(), right, target.masked_fill(member, 0).sum(), residual, (slope * q.detach()).sum(-1) / tau
