"""The objectives on vocabulary-major blocks: what each adds to the loss, and the factors of its gradient.

Work over rows x vocabulary is done by the kernels; what is left here is of the size of the rows, in plain torch and
with the very functions of the plain objectives. Tests hold each against its plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.divergences import DivergenceSpec, divergence_entries
from limbeck.losses.fast.kernels.boundary import boundary_divergence
from limbeck.losses.fast.kernels.cells import (
    FORWARD,
    JSD,
    REVERSE,
    SMALLEST,
    SUMS,
    cell_masses,
    root_sums,
)
from limbeck.losses.fast.kernels.chunks import ChunkTerm, chunk_term
from limbeck.losses.fast.kernels.direct import PairSums, pair_sums
from limbeck.losses.fast.kernels.gradient import Direct, Entries, Paired, Projected
from limbeck.losses.fast.kernels.nodes import below_nodes, node_buckets, student_nodes, teacher_nodes
from limbeck.losses.fast.kernels.p_kl import mean_over_chunks, p_kl_divergence
from limbeck.losses.fast.kernels.pairs import pairs_divergence
from limbeck.losses.fast.kernels.sorted_l1 import sorted_rest
from limbeck.losses.fast.kernels.stats import WIDE, ColumnStats, column_stats, project_columns, token_log_probs
from limbeck.losses.fast.kernels.tables import cell_tables, identity_pairs, pair_tables, projection_tables
from limbeck.losses.fast.order import BlockLanes, SideLanes
from limbeck.losses.fast.trees import TreePlan
from limbeck.losses.objectives.base import Objective, advantage_gate
from limbeck.losses.objectives.corrected import (
    TINY,
    BoundaryKL,
    ChunkLikelihood,
    SameVocabulary,
    rest_floor,
    target_divergence,
)
from limbeck.losses.objectives.published import PKL, CommonKL, Gold, HybridKL
from limbeck.losses.objectives.tree_kl import (
    Barred,
    TreeKL,
    log_target,
)
from limbeck.losses.signals import TopKSignal
from limbeck.losses.vocab.projection import VocabMap

Sums = dict[str, tuple[Tensor, "Tensor | float"]]
"""Metrics of one block: (sum, count); a count that the host knows stays a number."""


class LaneLogits:
    """One side of a block: logits `[V, L]`, and at which of its lanes which token was realised; once it is settled,
    which has to happen before the logits are overwritten, their statistics.

    token_log_probs `[width]`: of the realised tokens at the objective's temperature (0 where a lane has none). whole:
    every token has its row, so realised tokens can be looked up."""

    stats: ColumnStats
    token_log_probs: Tensor

    def __init__(self, side: SideLanes, logits: Tensor, temperature: float = 1.0, *, whole: bool = True) -> None:
        self.side, self.logits, self.temperature, self.whole = side, logits, temperature, whole
        self.settled = False

    def settle(self, stats: ColumnStats | None = None) -> LaneLogits:
        """Find the statistics, where they are not given, and the realised tokens' log-probabilities; once."""
        if self.settled:
            return self
        self.stats, self.settled = column_stats(self.logits, self.temperature) if stats is None else stats, True
        self.token_log_probs = self.stats.lse.new_zeros(0)
        if self.whole:
            ids = self.side.ids[: self.side.width]
            self.token_log_probs = token_log_probs(self.logits, self.stats.lse_tau, ids, self.temperature)
        return self


@dataclass
class FastOut:
    """What an objective adds at one block. rows `[C]`: divergence of each chunk, without its weight; loss: their
    weighted sum, times temperature squared, before the term's factor.
    slope, aligned, owned: G of the gradient kernel; slope_coef, prob_coef, label_coef `[L]`: its factors, the term's
    factor included. entries, kept_coef: tokens whose gradient has a part of its own, and the factor of p that only the
    tokens that are kept have (`write_entries`)."""

    rows: Tensor
    loss: Tensor
    metrics: Sums
    slope_coef: Tensor
    prob_coef: Tensor
    label_coef: Tensor
    slope: Projected | Paired | None = None
    aligned: int = 0
    owned: int = 0
    entries: list[Entries] = field(default_factory=list)
    kept_coef: Tensor | None = None
    lse: Tensor | None = field(default=None)  # in place of the student's own, where lanes stand for means


@dataclass(frozen=True)
class ChunkWeights:
    """Of each chunk `[C]`: in the metrics of parts, and in the loss, where a gate may lower it."""

    counted: Tensor
    gated: Tensor


FastObjective = Callable[[TeacherTerm, BlockLanes, LaneLogits, "LaneLogits | None", ChunkWeights], FastOut]
"""(term, lanes, student, teacher, which it settles (None: a top-k list), weights of the chunks) -> `FastOut`."""


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


def _teacher_tokens(term: TeacherTerm, lanes: BlockLanes, teacher: LaneLogits | None) -> tuple[Tensor, SideLanes]:
    """Log-probabilities of the teacher's realised tokens by lane, and its side."""
    if teacher is not None:
        return teacher.token_log_probs, teacher.side
    (signal,), side = term.teacher.signals, lanes.teacher
    assert isinstance(signal, TopKSignal)
    assert side is not None
    return signal.next_logprob.index_select(0, side.rows).float(), side


def chunk_gate(term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None) -> Tensor:
    """`Objective.gate` `[C]`, where the temperature is 1 and every token has a lane of its own."""
    sides = (student.token_log_probs, student.side), _teacher_tokens(term, lanes, teacher)
    logs = [log[: lanes.chunks].index_add(0, side.owner, log[lanes.chunks :][: side.extras]) for log, side in sides]
    return advantage_gate(logs[1] - logs[0], term.objective.options.gate)


def _chunk_term(
    term: TeacherTerm,
    lanes: BlockLanes,
    student: LaneLogits,
    teacher: LaneLogits | None,
    weight: Tensor,
    start: int,
    factor: float,
) -> ChunkTerm:
    """`chunk_term` of the chunks from `start` on; factor: of the term in the total, without the chunks' weights."""
    return chunk_term(
        (student.token_log_probs, student.side), _teacher_tokens(term, lanes, teacher), weight * (term.factor * factor),
        term.objective.spec, start, lanes.single, student.logits.shape[1],
    )  # fmt: skip


def boundary(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weights: ChunkWeights
) -> FastOut:
    """`BoundaryKL`: whole distributions (forward), or a top-k list (any direction)."""
    objective, count, num_lanes = term.objective, lanes.chunks, student.logits.shape[1]
    assert isinstance(objective, BoundaryKL)
    weight, gated = weights.counted, weights.gated
    tau, chunk_weight = objective.temperature, objective.options.chunk_weight
    tables = projection_tables(objective.vocab)
    lse = student.stats.lse_tau
    direct = None
    if teacher is None:
        multi_mass = project_columns(student.logits, lse, tables.multi_source, tables, tau)
        rows, right, unreached, residual, prob_coef = _top_k(term, objective.vocab, lanes, student, multi_mass, gated)
        slope_coef = residual.new_ones(count, dtype=torch.float32) / tau
    else:
        sums = pair_sums(student.logits, teacher.logits, lse, tables, TINY, tau)
        teacher.settle(sums.stats)
        direct = Direct(tables.direct, teacher.logits, sums.stats.lse_tau, TINY)
        out = boundary_divergence(student.logits, teacher.logits, lse, sums, tables, count, tau)
        rows, unreached = out.rows, (1 - out.kept).sum()
        right = (out.argmax == teacher.stats.argmax[:count]).sum()
        slope_coef = gated * (term.factor * tau)
        prob_coef, residual = slope_coef * out.student_term, out.ratio
    owner = torch.arange(num_lanes, dtype=torch.int32, device=lse.device).clamp(max=max(count - 1, 0))
    result = FastOut(
        rows,
        (rows * gated).sum() * tau**2,
        {"boundary_kl": ((rows * weight).sum(), count), "proj_accuracy": (right, count)},
        _padded(slope_coef, num_lanes),
        _padded(prob_coef, num_lanes),
        torch.zeros_like(lse),
        Projected(residual, tables.index, tables, owner, direct=direct),
        aligned=count,
    )
    result.metrics["unreached_mass"] = (unreached, count)
    chunk_kl = rows.new_zeros(())
    if lanes.multi:
        chunk_rows, slope = _chunk_term(term, lanes, student, teacher, gated, lanes.single, chunk_weight * tau)
        chunk_kl = (chunk_rows * weight[lanes.single :]).sum()
        result.rows = rows + F.pad(chunk_rows * chunk_weight, (lanes.single, 0))
        chunk_loss = (chunk_rows * gated[lanes.single :]).sum()
        result.loss = result.loss + chunk_loss * (chunk_weight * tau**2)
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
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weights: ChunkWeights
) -> FastOut:
    """`ChunkLikelihood`."""
    if teacher is not None:
        teacher.settle()
    tau, weight = term.objective.temperature, weights.gated
    rows, slope = _chunk_term(term, lanes, student, teacher, weight, 0, tau)
    return FastOut(rows, (rows * weight).sum() * tau**2, {}, torch.zeros_like(slope), -slope, slope)


def p_kl(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weights: ChunkWeights
) -> FastOut:
    """`PKL`, forward; the teacher's logits hold only its ids K."""
    objective, count, single, num_lanes = term.objective, lanes.chunks, lanes.single, student.logits.shape[1]
    assert isinstance(objective, PKL)
    assert teacher is not None
    teacher.settle()
    weight = weights.gated
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
        out.rows,
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
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weights: ChunkWeights
) -> FastOut:
    """`CommonKL` (gold, H-KL), forward, and `SameVocabulary`, forward."""
    objective, count, single, num_lanes = term.objective, lanes.chunks, lanes.single, student.logits.shape[1]
    assert teacher is not None
    teacher.settle()
    weight = weights.gated
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
    if tables.unpaired_student.numel() + tables.unpaired_teacher.numel():
        rest = sorted_rest(
            student.logits, teacher.logits, lse_s, lse_t, tables.unpaired_student, tables.unpaired_teacher, count,
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
        rows, (rows * weight).sum() * tau**2, metrics, _padded(slope_coef, num_lanes), prob_coef,
        torch.zeros_like(prob_coef), Paired(teacher.logits, lse_t, tables, rest), aligned=count, lse=lse_s,
    )  # fmt: skip


# ---- tree_kl ----


@dataclass
class _Root:
    """The root part of a block: divergences `[C]`, the factors of its gradient, student tokens that are left out, and
    metrics."""

    rows: Tensor
    slope_coef: Tensor
    prob_coef: Tensor
    kept_coef: Tensor
    slope: Projected
    barred: Barred | None
    entries: list[Entries]
    metrics: Sums


def _root(
    objective: TreeKL,
    plan: TreePlan,
    student: LaneLogits,
    teacher: LaneLogits,
    factor_C: Tensor,
    tau: float,
    tail: Tensor | None,
    pairs: PairSums | None,
) -> _Root:
    """`TreeKL.root`. factor_C: of each chunk's divergence in the gradient with respect to logits; tail `[C]`: the
    teacher's mass outside its list; pairs: sums over the cells that are pairs, where they are apart. Overwrites the
    teacher's logits of the other cells; barred tokens' logits are taken out on both sides, and the student's put
    back."""
    spec, count, tables = objective.spec, factor_C.numel(), cell_tables(objective)
    lanes, size = student.logits.shape[1], teacher.logits.shape[0]
    flat_s = student.logits.view(-1)
    index = kept_logits = flat_s.new_zeros(0, dtype=torch.int64)
    barred_s = None
    if plan.barred is not None:
        theirs, own = (side.lists.written_out(side.pairs) for side in plan.barred)
        teacher.logits.view(-1).index_fill_(0, theirs.ids * teacher.logits.shape[1] + theirs.chunk, -torch.inf)
        barred_s, index = own, own.ids * lanes + own.chunk
        kept_logits = flat_s[index]
        flat_s.index_fill_(0, index, -torch.inf)
    sides = (student.logits, teacher.logits), (student.stats.lse_tau, teacher.stats.lse_tau)
    masses = (
        cell_masses(student.logits, student.stats.lse_tau, tables.student, tau),
        cell_masses(teacher.logits, teacher.stats.lse_tau, tables.teacher, tau),
    )
    outside, lost = masses[0][tables.student.rows - 1, :count], masses[1][tables.teacher.rows - 1, :count]
    # R reaches 1 / SMALLEST: float16 would make it infinite, bfloat16 has the same size and holds it
    memory = teacher.logits.view(torch.bfloat16) if teacher.logits.dtype == torch.float16 else teacher.logits
    residual = memory.as_strided((size + 1, memory.shape[1]), memory.stride())
    smallest, forward = SMALLEST.value, spec.kind == "forward"
    floor, rest_t = (smallest, torch.zeros_like(lost)) if tail is None else (rest_floor(lost.dtype), tail)
    common, conditioned = (*sides, masses, tables, count, residual, tau), plan.barred is not None
    rest, rest_r, listed = torch.zeros_like(lost), torch.zeros_like(lost), None
    if not forward or tail is not None:
        before = root_sums(SUMS, *common, conditioned=conditioned, rest=tail)
        kept_s, reached = before.mass + outside, before.target + rest_t
        rest_s = outside if tail is None else kept_s - before.compared
        rest, rest_r = rest_divergence(rest_s, kept_s + floor, rest_t / reached.clamp(min=smallest), floor, spec)
        if tail is not None:
            # forward: R is that of the teacher's mass before it is normalised
            listed = rest_r * reached / (kept_s + floor) if forward else rest_r
        totals = reached, kept_s + floor
        kind = FORWARD if forward else REVERSE if spec.kind == "reverse" else JSD
        sums = root_sums(kind, *common, conditioned=conditioned, totals=totals, rest=listed, beta=spec.beta)
    else:
        sums = root_sums(FORWARD, *common, conditioned=conditioned, pairs=pairs)
    # nothing is left out where pairs are
    kept_s = sums.mass + outside if pairs is None else torch.ones_like(outside)
    reached = sums.target + rest_t
    total, normaliser = (reached + lost).clamp(min=smallest), kept_s + floor
    seen = reached > 0
    share = torch.where(seen, reached / total, 0.0)
    slope, dot, index_of = factor_C * share / normaliser, sums.dot, tables.index
    if forward:
        own_rows = sums.value + sums.target * (normaliser.log() - reached.clamp(min=smallest).log())
        rows = own_rows / total + rest * share
        shift, coef = slope * (1 - rest_r), factor_C * seen / total
    else:
        scale = 1.0 if spec.kind == "reverse" or not spec.rescale else 1 / (spec.beta * (1 - spec.beta))
        rows, coef = (sums.value + rest) * share * scale, slope * scale
        if tail is None:
            # tokens in no cell read the row behind the vocabulary
            width = min(-(-count // WIDE) * WIDE, memory.shape[1])
            residual[size, :width] = F.pad(rest_r, (0, width - count)).to(residual.dtype)
            dot, index_of = dot + outside * rest_r, tables.index_rest
        shift = coef * dot / normaliser
    rows = rows.where(seen, torch.zeros_like(rows))
    # the normaliser's part belongs to every token that is left, so what it adds is a multiple of p
    prob_coef = coef * dot - shift * kept_s
    owner = torch.arange(lanes, dtype=torch.int32, device=coef.device).clamp(max=max(count - 1, 0))
    entries = []
    metrics: Sums = {"lost_mass": (lost.sum(), count), "proj_accuracy": (sums.right.sum(), count)}
    if barred_s is not None:
        flat_s[index] = kept_logits
        gone = torch.zeros_like(index, dtype=torch.bool)
        nothing = torch.zeros_like(kept_logits, dtype=torch.float32)
        entries = [Entries(barred_s.ids, barred_s.chunk, kept_logits, nothing, gone)]
        metrics["excluded_mass_student"] = ((1 - kept_s).sum(), count)
        metrics["excluded_mass_teacher"] = ((1 - reached - lost).sum(), count)
        metrics["unconditioned"] = (barred_s.wrong_C.sum(), count)
    direct = None
    if pairs is not None:
        direct = Direct(tables.direct, teacher.logits, teacher.stats.lse_tau, smallest)
    projected = Projected(residual, index_of, tables, owner, direct=direct)
    return _Root(rows, coef, prob_coef, shift, projected, barred_s, entries, metrics)


def rest_divergence(
    rest_s: Tensor, normaliser: Tensor, share_t: Tensor, floor: float, spec: DivergenceSpec
) -> tuple[Tensor, Tensor]:
    """(what the rest's bucket adds to the divergence, its R), from the student's mass there and the teacher's share."""
    with torch.enable_grad():
        share_s = ((rest_s.clamp(min=0) + floor) / normaliser).requires_grad_()
        rows = divergence_entries(share_s.log(), log_target(share_t, spec), replace(spec, rescale=False))
        (slope,) = torch.autograd.grad(rows.sum(), share_s)
    # reverse: the others are without the constant 1, too
    slope = slope - 1 if spec.kind == "reverse" else slope
    return rows.detach(), -slope


def _listed(term: TeacherTerm, lanes: BlockLanes, size: int) -> tuple[LaneLogits, Tensor]:
    """(a top-k list, and the token that came, as logits of which all others are -inf; mass outside of them `[C]`)."""
    (signal,), side = term.teacher.signals, lanes.teacher
    assert isinstance(signal, TopKSignal)
    assert side is not None
    # one more row: for empty places, and what `_root` writes there
    logits = torch.full((size + 1, side.padded), -torch.inf, device=side.rows.device)
    lane = torch.arange(side.width, device=side.rows.device)
    ids = signal.topk_ids.index_select(0, side.rows).long()
    log_t = signal.topk_logprobs.index_select(0, side.rows).float().masked_fill(ids < 0, -torch.inf)
    next_logprob = signal.next_logprob.index_select(0, side.rows).float()
    logits[ids.where(ids >= 0, size), lane[:, None]] = log_t
    logits[side.ids, lane] = next_logprob
    named = log_t.exp().masked_fill(ids == side.ids[:, None], 0).sum(-1) + next_logprob.exp()
    none = torch.zeros(side.padded, device=logits.device)
    block = LaneLogits(side, logits[:size], whole=False).settle(ColumnStats(none, none, none))
    block.token_log_probs = next_logprob
    return block, (1 - named[: lanes.chunks]).clamp(min=0)


@dataclass
class _TreePart:
    """One tree's part of a block: divergences `[C]`, at how many positions, their weight in the loss, and the gradient
    with respect to the student's distributions. prob_coef `[L]`, entries: as in `FastOut`."""

    rows: Tensor
    count: int
    weight: float
    prob_coef: Tensor
    entries: Entries


def _inside(
    objective: TreeKL,
    plan: TreePlan,
    student: LaneLogits,
    teacher: LaneLogits,
    weight: Tensor,
    scale: float | Tensor,
    *,
    listed: bool,
) -> dict[str, _TreePart]:
    """Positions inside tokens, by the name of their metric, where there are some. scale: of a divergence in the
    gradient with respect to logits."""
    options, spec, tau, lanes = objective.options, objective.spec, objective.temperature, student.logits.shape[1]
    sides = (student.logits, student.stats.lse_tau), (teacher.logits, teacher.stats.lse_tau)
    mine, theirs, scaled_C = options.inner_student_weight, options.inner_teacher_weight, weight * scale
    parts = {}
    if (at := plan.student).count:
        tree = objective.student_tree
        found = node_buckets(tree, at, sides[1], sides[0], tau)
        own = student_nodes(found, at, spec, scaled_C * mine, lanes, listed=listed)
        entries = Entries(found.ids, found.lane, found.logits, own.values)
        parts["inner_student_kl"] = _TreePart(own.rows, at.count, mine, own.prob_coef, entries)
    if (at := plan.teacher).count:
        tree = objective.teacher_tree
        found = node_buckets(tree, at, sides[0], sides[1], tau)
        other = teacher_nodes(found, tree, at, spec, scaled_C * theirs, listed=listed)
        entries = Entries(*below_nodes(tree, at, sides[0], other.slopes, tau))
        parts["inner_teacher_kl"] = _TreePart(other.rows, at.count, theirs, _padded(-other.dense, lanes), entries)
    return parts


def trees(
    term: TeacherTerm, lanes: BlockLanes, student: LaneLogits, teacher: LaneLogits | None, weights: ChunkWeights
) -> FastOut:
    """`TreeKL`: any direction; unconditioned, or the cheap form; whole distributions, or a top-k list."""
    objective, count, plan, tail, sums = term.objective, lanes.chunks, lanes.trees, None, None
    assert isinstance(objective, TreeKL)
    assert plan is not None
    options, tau = objective.options, objective.temperature
    if teacher is None:
        teacher, tail = _listed(term, lanes, objective.teacher_cell.numel())
    elif objective.spec.kind == "forward" and plan.barred is None:
        tables = cell_tables(objective)
        sums = pair_sums(student.logits, teacher.logits, student.stats.lse_tau, tables, SMALLEST.value, tau)
    teacher.settle(None if sums is None else sums.stats)
    num_lanes = student.logits.shape[1]
    scale, weight, gated = term.factor * tau, weights.counted, weights.gated
    # both trees are read before the root overwrites the teacher's logits
    parts = _inside(objective, plan, student, teacher, gated, scale, listed=tail is not None)
    root = _root(objective, plan, student, teacher, gated * scale * options.root_weight, tau, tail, sums)
    root_kl = (root.rows * weight).sum()
    first_s = objective.student_cell[lanes.student.ids[:count]]
    first_t = objective.teacher_cell[teacher.side.ids[:count]]
    zero = torch.zeros_like(root_kl)
    metrics: Sums = {
        **root.metrics,
        "cell_error": ((first_s != first_t).sum(), count),
        "root_kl": (root_kl, count),
        "terminal_kl": (zero, 0.0),
        "first_kl": (zero, 0.0),
        "inner_student_kl": (zero, 0.0),
        "inner_teacher_kl": (zero, 0.0),
        "chunk_kl": (zero, plan.has_term_C.sum()),
    }
    result = FastOut(
        root.rows * options.root_weight,
        (root.rows * gated).sum() * options.root_weight,
        metrics,
        _padded(root.slope_coef, num_lanes),
        _padded(root.prob_coef, num_lanes),
        torch.zeros_like(student.stats.lse_tau),
        root.slope,
        aligned=count,
        entries=root.entries,
        kept_coef=_padded(root.kept_coef, num_lanes),
    )
    for name, part in parts.items():
        part_kl = (part.rows * weight).sum()
        result.rows = result.rows + part.rows * part.weight
        result.loss = result.loss + (part.rows * gated).sum() * part.weight
        result.prob_coef += part.prob_coef
        if root.barred is not None and name == "inner_teacher_kl":
            own = part.entries
            own.kept = ~root.barred.holds(own.lane, own.ids, objective.student_cell.numel())
        result.entries.append(part.entries)
        metrics[name] = (part_kl, part.count)
    if lanes.multi:
        term_weight, term_gated = weight * plan.has_term_C, gated * plan.has_term_C
        rows, slope = _chunk_term(term, lanes, student, teacher, term_gated, lanes.single, options.chunk_weight * tau)
        chunk_kl = (rows * term_weight[lanes.single :]).sum()
        metrics["chunk_kl"] = (chunk_kl, plan.has_term_C.sum())
        term_rows = rows * plan.has_term_C[lanes.single :] * options.chunk_weight
        result.rows = result.rows + F.pad(term_rows, (lanes.single, 0))
        result.loss = result.loss + (rows * term_gated[lanes.single :]).sum() * options.chunk_weight
        result.prob_coef = result.prob_coef - slope
        result.label_coef = result.label_coef + slope
    result.loss = result.loss * tau**2
    return result


FAST_OBJECTIVES: dict[type[Objective], FastObjective] = {
    BoundaryKL: boundary,
    ChunkLikelihood: chunks_only,
    SameVocabulary: pairs,
    PKL: p_kl,
    Gold: pairs,
    HybridKL: pairs,
    TreeKL: trees,
}
"""Fast form of each objective that has one."""
