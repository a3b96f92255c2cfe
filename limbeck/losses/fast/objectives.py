"""The objectives on vocabulary-major blocks: what each adds to the loss, and the factors of its gradient.

Work over rows x vocabulary is done by the kernels; what is left here is of the size of the rows, in plain torch and
with the very functions of the plain objectives. Tests hold each against its plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.divergences import binary_divergence
from limbeck.losses.fast.kernels.boundary import boundary_divergence
from limbeck.losses.fast.kernels.gradient import Paired, Projected
from limbeck.losses.fast.kernels.p_kl import mean_over_chunks, p_kl_divergence
from limbeck.losses.fast.kernels.pairs import pairs_divergence
from limbeck.losses.fast.kernels.sorted_l1 import sorted_rest
from limbeck.losses.fast.kernels.stats import ColumnStats, project_columns
from limbeck.losses.fast.kernels.tables import identity_pairs, pair_tables, projection_tables
from limbeck.losses.fast.order import BlockLanes, SideLanes
from limbeck.losses.objectives.base import Objective
from limbeck.losses.objectives.corrected import (
    BoundaryKL,
    ChunkLikelihood,
    SameVocabulary,
    rest_floor,
    target_divergence,
)
from limbeck.losses.objectives.published import PKL, CommonKL, Gold, HybridKL
from limbeck.losses.signals import TopKSignal
from limbeck.losses.vocab.projection import VocabMap

Sums = dict[str, tuple[Tensor, "Tensor | float"]]
"""Metrics of one block: (sum, count); a count that the host knows stays a number."""


@dataclass
class LaneLogits:
    """One side of a block: logits `[V, L]`, their statistics, and at which of its lanes which token was realised.

    token_log_probs `[width]`: of the realised tokens at the objective's temperature (0 where a lane has none)."""

    side: SideLanes
    logits: Tensor
    stats: ColumnStats
    token_log_probs: Tensor


@dataclass
class FastOut:
    """What an objective adds at one block. loss: weighted sum, times temperature squared, before the term's factor.
    source, aligned, owned: G of the gradient kernel; slope_coef, prob_coef, label_coef `[L]`: its factors, the term's
    factor included."""

    loss: Tensor
    metrics: Sums
    slope_coef: Tensor
    prob_coef: Tensor
    label_coef: Tensor
    source: Projected | Paired | None = None
    aligned: int = 0
    owned: int = 0
    lse: Tensor | None = field(default=None)  # in place of the student's own, where lanes stand for means


FastObjective = Callable[[TeacherTerm, BlockLanes, LaneLogits, "LaneLogits | None", Tensor], FastOut]
"""(term, lanes, student, teacher (None: a top-k list), weight of each chunk `[C]`) -> `FastOut`."""


def _segment_sums(values: Tensor, side: SideLanes) -> Tensor:
    """Sums of the further lanes `[extras, ...]` of each chunk of several tokens: float64 `[M, ...]`."""
    running = F.pad(values.double().cumsum(0), (0, 0) * (values.ndim - 1) + (1, 0))
    end = side.extra_first + side.extra_count
    return running.index_select(0, end) - running.index_select(0, side.extra_first)


def chunk_means(values: Tensor, side: SideLanes) -> Tensor:
    """Means `[M, ...]` over the tokens of each chunk of several, from its lanes `[extras, ...]` (kind mean)."""
    count = side.extra_count.reshape(-1, *[1] * (values.ndim - 1))
    return (_segment_sums(values, side) / count).to(values.dtype)


def _mean_lse(block: LaneLogits, lanes: BlockLanes) -> Tensor:
    """Log-sum-exp of each lane, with a chunk's mean in the lanes that stand for means: `[L]`."""
    if not lanes.multi:
        return block.stats.lse_tau
    out, side = block.stats.lse_tau.clone(), block.side
    extra = out[lanes.chunks : lanes.chunks + side.extras]
    out[lanes.single : lanes.chunks] = chunk_means(extra, side)
    return out


def _padded(values: Tensor, num_lanes: int) -> Tensor:
    return F.pad(values, (0, num_lanes - values.shape[0]))


def _chunk_log_probs(block: LaneLogits, lanes: BlockLanes, start: int) -> Tensor:
    """Chain-rule log-probability of the chunks from `start` on (all of several tokens from `single` on)."""
    out = block.token_log_probs[start : lanes.chunks].clone()
    if lanes.multi:
        extra = block.token_log_probs[lanes.chunks : lanes.chunks + block.side.extras]
        out[lanes.single - start :] += _segment_sums(extra, block.side).to(out.dtype)
    return out


def _chunk_term(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, log_t: Tensor, weight: Tensor, start: int, factor: float
) -> tuple[Tensor, Tensor]:
    """(binary divergences of the chunks from `start` on, their gradient with respect to each lane's realised
    token's log-probability `[L]`); factor: of the term in the total, without the chunks' weights."""
    with torch.enable_grad():
        log_s = _chunk_log_probs(student, lanes, start).requires_grad_()
        rows = binary_divergence(log_s, log_t.to(log_s.dtype), term.objective.spec)
        (slope,) = torch.autograd.grad((rows * weight[start:]).sum(), log_s)
    slope = slope * (term.factor * factor)
    out = slope.new_zeros(student.logits.shape[1])
    out[start : lanes.chunks] = slope
    if lanes.multi:
        extras = student.side.extras
        out[lanes.chunks : lanes.chunks + extras] = slope.index_select(0, student.side.owner - start)
    return rows.detach(), out


def _teacher_tokens(term: TeacherTerm, lanes: BlockLanes, teacher: LaneLogits | None, start: int) -> Tensor:
    if teacher is None:
        (signal,), side = term.teacher.signals, lanes.teacher
        assert isinstance(signal, TopKSignal)
        assert side is not None
        tokens = signal.next_logprob.index_select(0, side.rows).float()
        teacher = LaneLogits(side, tokens, ColumnStats(tokens, tokens, tokens), tokens)
    return _chunk_log_probs(teacher, lanes, start)


def boundary(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weight: Tensor
) -> FastOut:
    """`BoundaryKL`: whole distributions (forward), or a top-k list (any direction)."""
    objective, count, num_lanes = term.objective, lanes.chunks, student.logits.shape[1]
    assert isinstance(objective, BoundaryKL)
    tau, chunk_weight = objective.temperature, objective.options.chunk_weight
    # the realised tokens' teacher logits are read before the divergence overwrites them
    log_t = _teacher_tokens(term, lanes, teacher, lanes.single) if lanes.multi else weight[:0]
    tables = projection_tables(objective.vocab)
    lse = student.stats.lse_tau
    multi_mass = project_columns(student.logits, lse, tables.multi_source, tables, tau)
    if teacher is None:
        rows, right, unreached, residual, prob_coef = _top_k(term, objective.vocab, lanes, student, multi_mass, weight)
        slope_coef = residual.new_ones(count, dtype=torch.float32) / tau
    else:
        out = boundary_divergence(
            student.logits, teacher.logits, lse, teacher.stats.lse_tau, multi_mass, tables, count, tau
        )
        rows, unreached = out.rows, (1 - out.kept).sum()
        right = (out.argmax == teacher.stats.argmax[:count]).sum()
        slope_coef = weight * (term.factor * tau)
        prob_coef, residual = slope_coef * out.student_term, out.ratio
    owner = torch.arange(num_lanes, dtype=torch.int32, device=lse.device).clamp(max=max(count - 1, 0))
    result = FastOut(
        (rows * weight).sum() * tau**2,
        {"boundary_kl": ((rows * weight).sum(), count), "proj_accuracy": (right, count)},
        _padded(slope_coef, num_lanes),
        _padded(prob_coef, num_lanes),
        torch.zeros_like(lse),
        Projected(residual, tables.index, tables, owner),
        aligned=count,
    )
    result.metrics["unreached_mass"] = (unreached, count)
    chunk_kl = rows.new_zeros(())
    if lanes.multi:
        chunk_rows, slope = _chunk_term(term, lanes, student, log_t, weight, lanes.single, chunk_weight * tau)
        chunk_kl = (chunk_rows * weight[lanes.single :]).sum()
        result.loss = result.loss + chunk_kl * (chunk_weight * tau**2)
        result.prob_coef -= slope
        result.label_coef += slope
    result.metrics["chunk_kl"] = (chunk_kl, float(lanes.multi))
    return result


def _top_k(
    term: TeacherTerm, vocab: VocabMap, lanes: BlockLanes, student: LaneLogits, multi_mass: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, right guesses, unreached mass, R `[U + 1, L]`, `sum q R` `[C]`) against a top-k list."""
    count, num_lanes = lanes.chunks, student.logits.shape[1]
    tables, tau = projection_tables(vocab), term.objective.temperature
    (signal,), side = term.teacher.signals, lanes.teacher
    assert isinstance(signal, TopKSignal)
    assert side is not None
    first = side.rows[:count]
    ids = signal.topk_ids.index_select(0, first).long()
    empty = ids < 0
    target = signal.topk_logprobs.index_select(0, first).float().masked_fill(empty, -torch.inf).exp()
    ids = ids.masked_fill(empty, 0)
    member = vocab.reachable[ids] & (target > 0)
    at = torch.arange(count, device=ids.device)[:, None]
    source, place = tables.source[ids].long(), tables.place[ids].long()
    picked = student.logits.reshape(-1)[source.clamp(min=0) * num_lanes + at].float() / tau
    mass = (picked - student.stats.lse_tau[:count, None]).exp().masked_fill(source < 0, 0)
    if multi_mass.numel():
        mass = mass + multi_mass.reshape(-1)[place.clamp(min=0) * num_lanes + at].masked_fill(place < 0, 0)
    with torch.enable_grad():
        q = (mass * member).requires_grad_()
        tail, floor = (1 - target.sum(-1)).clamp(min=0), rest_floor(q.dtype)
        rows = target_divergence(target, member, q, tail, 1 - q.sum(-1), floor, term.objective.spec)
        (slope,) = torch.autograd.grad((rows * weight).sum(), q)
    slope = slope * member * (-term.factor * tau**2)
    # empty places and unreached tokens have no slope; they are sent to a row of their own, behind the vocabulary
    residual = torch.zeros(vocab.teacher_size + 1, num_lanes, dtype=student.logits.dtype, device=ids.device)
    residual[ids.masked_fill(~member, vocab.teacher_size), at] = slope.to(residual.dtype)
    right = (q.argmax(-1) == target.argmax(-1)).sum()
    return rows.detach(), right, target.masked_fill(member, 0).sum(), residual, (slope * q.detach()).sum(-1) / tau


def chunks_only(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weight: Tensor
) -> FastOut:
    """`ChunkLikelihood`."""
    log_t, tau = _teacher_tokens(term, lanes, teacher, 0), term.objective.temperature
    rows, slope = _chunk_term(term, lanes, student, log_t, weight, 0, tau)
    return FastOut((rows * weight).sum() * tau**2, {}, torch.zeros_like(slope), -slope, slope)


def p_kl(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weight: Tensor
) -> FastOut:
    """`PKL`, forward; the teacher's logits hold only its ids K."""
    objective, count, single, num_lanes = term.objective, lanes.chunks, lanes.single, student.logits.shape[1]
    assert isinstance(objective, PKL)
    assert teacher is not None
    ids_K = term.teacher.vocab_ids_K
    assert ids_K is not None
    tau, tables, side = objective.temperature, projection_tables(objective.vocab), student.side
    mass = project_columns(student.logits, student.stats.lse_tau, ids_K, tables, tau)
    own = mass[:, single : count + side.extras].clone()
    mean_over_chunks(mass, single, count, side.extra_first.int(), side.extra_count.int())
    total = mass.sum(0)
    out = p_kl_divergence(mass, teacher.logits, _mean_lse(teacher, lanes), total, count, tau)
    owner = torch.cat((torch.arange(count, device=mass.device), side.owner))
    slope_coef = (weight * (term.factor * tau) / side.count_C).index_select(0, owner)
    shift = out.shift.index_select(0, owner)
    own_term = _padded(out.student_term, owner.numel())
    if lanes.multi:
        chosen = mass.index_select(1, owner[single:])
        own_term[single:] = (own * chosen).sum(0) - shift[single:] * own.sum(0)
    return FastOut(
        (out.rows * weight).sum() * tau**2,
        {"proj_accuracy": (out.right.sum(), count)},
        _padded(slope_coef, num_lanes),
        _padded(slope_coef * own_term, num_lanes),
        mass.new_zeros(num_lanes),
        Projected(mass, tables.within(ids_K, objective.vocab.teacher_size), tables, _padded(owner, num_lanes).int(),
                  _padded(shift, num_lanes)),
        aligned=count,
        owned=count + side.extras,
    )  # fmt: skip


def pairs(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weight: Tensor
) -> FastOut:
    """`CommonKL` (gold, H-KL), forward, and `SameVocabulary`, forward."""
    objective, count, single, num_lanes = term.objective, lanes.chunks, lanes.single, student.logits.shape[1]
    assert teacher is not None
    common = objective.pairs if isinstance(objective, CommonKL) else None
    if common is None:
        tables = identity_pairs(student.logits.shape[0], student.logits.device)
    else:
        tables = pair_tables(common, student.logits.shape[0], teacher.logits.shape[0])
    tau = objective.temperature
    lse_s, lse_t = _mean_lse(student, lanes), _mean_lse(teacher, lanes)
    out = pairs_divergence(student.logits, teacher.logits, lse_s, lse_t, tables, count, tau)
    rows, mass, rest = out.rows, -out.kept, None
    metrics: Sums = {"proj_accuracy": (out.right.sum(), count)}
    if tables.rest_student.numel() + tables.rest_teacher.numel():
        rest = sorted_rest(
            student.logits, teacher.logits, lse_s, lse_t, tables.rest_student, tables.rest_teacher, count,
            objective.options.uncommon_topk, tau,
        )  # fmt: skip
        rows, mass = rows + rest.rows, mass + rest.mass
    if common is not None:
        l1 = rows.new_zeros(()) if rest is None else (rest.rows * weight).sum()
        metrics["common_kl"], metrics["uncommon_l1"] = ((out.rows * weight).sum(), count), (l1, count)
    slope_coef = weight * (term.factor * tau)
    own = -slope_coef * mass
    prob_coef = rows.new_zeros(num_lanes)
    prob_coef[:single] = own[:single]
    if lanes.multi:
        shared = (own / student.side.count_C).index_select(0, student.side.owner)
        prob_coef[count : count + student.side.extras] = shared
    return FastOut(
        (rows * weight).sum() * tau**2, metrics, _padded(slope_coef, num_lanes), prob_coef, torch.zeros_like(prob_coef),
        Paired(teacher.logits, lse_t, tables, rest), aligned=count, lse=lse_s,
    )  # fmt: skip


FAST_OBJECTIVES: dict[type[Objective], FastObjective] = {
    BoundaryKL: boundary,
    ChunkLikelihood: chunks_only,
    SameVocabulary: pairs,
    PKL: p_kl,
    Gold: pairs,
    HybridKL: pairs,
}
"""Fast form of each objective that has one."""
