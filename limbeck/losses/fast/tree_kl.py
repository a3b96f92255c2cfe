"""`TreeKL` on vocabulary-major blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.divergences import DivergenceSpec, divergence_entries
from limbeck.losses.fast.base import ChunkWeights, FastOut, SideLogits, Sums, chunk_term_from, pad_lanes
from limbeck.losses.fast.kernels.cells import FORWARD, JSD, REVERSE, SMALLEST, SUMS, RootSums, cell_masses, root_sums
from limbeck.losses.fast.kernels.direct import PairSums, pair_sums
from limbeck.losses.fast.kernels.gradient import Direct, Entries, Projected
from limbeck.losses.fast.kernels.nodes import below_nodes, node_buckets, student_nodes, teacher_nodes
from limbeck.losses.fast.kernels.stats import WIDE, ColumnStats
from limbeck.losses.fast.kernels.tables import CellTables, cell_tables
from limbeck.losses.fast.position_order import BlockPositions
from limbeck.losses.fast.tree_positions import TreePlan
from limbeck.losses.objectives.distributions import rest_floor
from limbeck.losses.objectives.tree_kl import TreeKL, log_target
from limbeck.losses.signals import TeacherTopK


@dataclass
class _Root:
    """The root part of a block: divergences `[C]`, the factors of its gradient, and metrics."""

    rows: Tensor
    slope_coef: Tensor
    prob_coef: Tensor
    kept_coef: Tensor
    slope: Projected
    metrics: Sums


@dataclass(frozen=True)
class _RestBucket:
    """The bucket of what no cell holds `[C]`: what it adds to the divergence, its R, and R as `root_sums` takes it
    from listed cells. totals: the teacher's mass that is compared, and the student's normaliser."""

    rows: Tensor
    residual: Tensor
    listed: Tensor | None = None
    totals: tuple[Tensor, Tensor] | None = None


def _root(
    objective: TreeKL,
    student: SideLogits,
    teacher: SideLogits,
    factor_C: Tensor,
    tau: float,
    tail: Tensor | None,
    pairs: PairSums | None,
) -> _Root:
    """`TreeKL.root`. factor_C: of each chunk's divergence in the gradient with respect to logits; tail `[C]`: the
    teacher's mass outside its list; pairs: sums over the cells that are pairs, where they are apart. Overwrites the
    teacher's logits of the other cells."""
    spec, count, tables = objective.spec, factor_C.numel(), cell_tables(objective)
    sides = (student.logits, teacher.logits), (student.stats.lse_tau, teacher.stats.lse_tau)
    masses = (
        cell_masses(student.logits, student.stats.lse_tau, tables.student, tau),
        cell_masses(teacher.logits, teacher.stats.lse_tau, tables.teacher, tau),
    )
    outside, uncovered = masses[0][tables.student.rows - 1, :count], masses[1][tables.teacher.rows - 1, :count]
    residual = _residual_memory(teacher.logits)
    tail_C = torch.zeros_like(uncovered) if tail is None else tail
    floor = SMALLEST.value if tail is None else rest_floor(uncovered.dtype)
    common = *sides, masses, tables, count, residual, tau
    # all others need totals before the divergence, and so a pass of their own over the cells
    if spec.kind == "forward" and tail is None:
        rest = _RestBucket(torch.zeros_like(uncovered), torch.zeros_like(uncovered))
        sums = root_sums(FORWARD, *common, pairs=pairs)
    else:
        rest = _rest_bucket(root_sums(SUMS, *common, rest=tail), outside, tail_C, floor, spec, listed=tail is not None)
        kind = {"forward": FORWARD, "reverse": REVERSE}.get(spec.kind, JSD)
        sums = root_sums(kind, *common, totals=rest.totals, rest=rest.listed, beta=spec.beta)
    # nothing is left out where pairs are
    kept_s = sums.mass + outside if pairs is None else torch.ones_like(outside)
    reached = sums.target + tail_C
    total, normaliser = (reached + uncovered).clamp(min=SMALLEST.value), kept_s + floor
    seen = reached > 0
    share = torch.where(seen, reached / total, 0.0)
    slope, dot, index_of = factor_C * share / normaliser, sums.dot, tables.index
    if spec.kind == "forward":
        own_rows = sums.value + sums.target * (normaliser.log() - reached.clamp(min=SMALLEST.value).log())
        rows = own_rows / total + rest.rows * share
        kept_coef, coef = slope * (1 - rest.residual), factor_C * seen / total
    else:
        scale = 1.0 if spec.kind == "reverse" or not spec.rescale else 1 / (spec.beta * (1 - spec.beta))
        rows, coef = (sums.value + rest.rows) * share * scale, slope * scale
        if tail is None:
            _write_rest_row(residual, rest.residual)
            dot, index_of = dot + outside * rest.residual, tables.index_rest
        kept_coef = coef * dot / normaliser
    # the normaliser's part belongs to every token that is left, so what it adds is a multiple of p
    prob_coef = coef * dot - kept_coef * kept_s
    return _Root(
        rows.where(seen, torch.zeros_like(rows)),
        coef,
        prob_coef,
        kept_coef,
        _root_slope(residual, index_of, tables, count, student, teacher, paired=pairs is not None),
        {"uncovered_mass": (uncovered.sum(), count), "proj_accuracy": (sums.right.sum(), count)},
    )


def _residual_memory(logits: Tensor) -> Tensor:
    """R `[U + 1, L]` where the teacher's logits `[U, L]` lie: their memory has one more row."""
    # R reaches 1 / SMALLEST: float16 would make it infinite, bfloat16 has the same size and holds it
    memory = logits.view(torch.bfloat16) if logits.dtype == torch.float16 else logits
    return memory.as_strided((logits.shape[0] + 1, memory.shape[1]), memory.stride())


def _rest_bucket(
    before: RootSums, outside: Tensor, tail_C: Tensor, floor: float, spec: DivergenceSpec, *, listed: bool
) -> _RestBucket:
    """The rest's bucket, whose R the cells' kernel needs beforehand. before: the masses alone; outside: the student's
    mass in no cell; tail_C: the teacher's mass outside its list, where it is `listed`."""
    kept_s, reached = before.mass + outside, before.target + tail_C
    rest_s = kept_s - before.compared if listed else outside
    share_t = tail_C / reached.clamp(min=SMALLEST.value)
    rows, residual = rest_divergence(rest_s, kept_s + floor, share_t, floor, spec)
    by_cell = None
    if listed:
        # forward: R is that of the teacher's mass before it is normalised
        by_cell = residual * reached / (kept_s + floor) if spec.kind == "forward" else residual
    return _RestBucket(rows, residual, by_cell, (reached, kept_s + floor))


def _write_rest_row(residual: Tensor, rest: Tensor) -> None:
    """R of tokens in no cell, which read the row behind the vocabulary."""
    # as many lanes as the kernels read: a multiple of their width
    width = min(-(-rest.numel() // WIDE) * WIDE, residual.shape[1])
    residual[-1, :width] = F.pad(rest, (0, width - rest.numel())).to(residual.dtype)


def _root_slope(
    residual: Tensor,
    index: Tensor,
    tables: CellTables,
    count: int,
    student: SideLogits,
    teacher: SideLogits,
    *,
    paired: bool,
) -> Projected:
    """Where the gradient kernel finds R of each student token. paired: of cells that are pairs it computes R itself,
    from the teacher's logits, which those cells keep."""
    direct = Direct(tables.direct, teacher.logits, teacher.stats.lse_tau, SMALLEST.value) if paired else None
    lane = torch.arange(student.logits.shape[1], dtype=torch.int32, device=residual.device)
    return Projected(residual, index, tables, lane.clamp(max=max(count - 1, 0)), direct=direct)


def rest_divergence(
    rest_s: Tensor, normaliser: Tensor, share_t: Tensor, floor: float, spec: DivergenceSpec
) -> tuple[Tensor, Tensor]:
    """(what the rest's bucket adds to the divergence, its R), from the student's mass there and the teacher's share."""
    # the forward pass of an autograd function runs without gradients
    with torch.enable_grad():
        share_s = ((rest_s.clamp(min=0) + floor) / normaliser).requires_grad_()
        # not rescaled here: `_root` does it to the whole sum
        rows = divergence_entries(share_s.log(), log_target(share_t, spec), replace(spec, rescale=False))
        (slope,) = torch.autograd.grad(rows.sum(), share_s)
    # reverse: the others are without the constant 1, too
    slope = slope - 1 if spec.kind == "reverse" else slope
    return rows.detach(), -slope


def _listed(term: TeacherTerm, block: BlockPositions, size: int) -> tuple[SideLogits, Tensor]:
    """(a top-k list, and the token that came, as logits of which all others are -inf; mass outside of them `[C]`)."""
    (signal,), side = term.teacher.signals, block.teacher
    assert isinstance(signal, TeacherTopK)
    assert side is not None
    # one more row: for empty places, and what `_root` writes there
    logits = torch.full((size + 1, side.padded), -torch.inf, device=side.rows.device)
    lane = torch.arange(side.width, device=side.rows.device)
    ids = signal.topk_ids.index_select(0, side.rows).long()
    log_t = signal.topk_logprobs.index_select(0, side.rows).float().masked_fill(ids < 0, -torch.inf)
    next_logprob = signal.next_logprob.index_select(0, side.rows).float()
    logits[ids.where(ids >= 0, size), lane[:, None]] = log_t
    logits[side.ids, lane] = next_logprob
    # the list may name the token that came, which is added on its own
    named = log_t.exp().masked_fill(ids == side.ids[:, None], 0).sum(-1) + next_logprob.exp()
    none = torch.zeros(side.padded, device=logits.device)
    named_logits = SideLogits(side, logits[:size], whole=False).compute_stats(ColumnStats(none, none, none))
    named_logits.token_log_probs = next_logprob
    return named_logits, (1 - named[: block.chunks]).clamp(min=0)


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
    student: SideLogits,
    teacher: SideLogits,
    weight: Tensor,
    scale: float | Tensor,
    *,
    listed: bool,
) -> dict[str, _TreePart]:
    """Positions inside tokens, by the name of their metric, where there are some. scale: of a divergence in the
    gradient with respect to logits."""
    cfg, spec, tau, num_lanes = objective.cfg, objective.spec, objective.temperature, student.logits.shape[1]
    sides = (student.logits, student.stats.lse_tau), (teacher.logits, teacher.stats.lse_tau)
    mine, theirs, scaled_C = cfg.inner_student_weight, cfg.inner_teacher_weight, weight * scale
    parts = {}
    if (positions := plan.student).count:
        tree = objective.student_tree
        buckets = node_buckets(tree, positions, sides[1], sides[0], tau)
        by_student = student_nodes(buckets, positions, spec, scaled_C * mine, num_lanes, listed=listed)
        entries = Entries(buckets.ids, buckets.lane, buckets.logits, by_student.values)
        parts["inner_student_kl"] = _TreePart(by_student.rows, positions.count, mine, by_student.prob_coef, entries)
    if (positions := plan.teacher).count:
        tree = objective.teacher_tree
        buckets = node_buckets(tree, positions, sides[0], sides[1], tau)
        by_teacher = teacher_nodes(buckets, tree, positions, spec, scaled_C * theirs, listed=listed)
        entries = Entries(*below_nodes(tree, positions, sides[0], by_teacher.slopes, tau))
        parts["inner_teacher_kl"] = _TreePart(
            by_teacher.rows, positions.count, theirs, pad_lanes(-by_teacher.dense, num_lanes), entries
        )
    return parts


def tree_kl(
    term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher: SideLogits | None, weights: ChunkWeights
) -> FastOut:
    """`TreeKL`, unconditioned: any direction; whole distributions, or a top-k list."""
    objective, count, plan, tail, sums = term.objective, block.chunks, block.trees, None, None
    assert isinstance(objective, TreeKL)
    assert plan is not None
    root_weight, tau = objective.cfg.root_weight, objective.temperature
    if teacher is None:
        teacher, tail = _listed(term, block, objective.teacher_cell.numel())
    elif objective.spec.kind == "forward":
        tables = cell_tables(objective)
        sums = pair_sums(student.logits, teacher.logits, student.stats.lse_tau, tables, SMALLEST.value, tau)
    teacher.compute_stats(None if sums is None else sums.stats)
    num_lanes = student.logits.shape[1]
    scale, weight, gated = term.factor * tau, weights.counted, weights.gated
    # both trees are read before the root overwrites the teacher's logits
    parts = _inside(objective, plan, student, teacher, gated, scale, listed=tail is not None)
    root = _root(objective, student, teacher, gated * scale * root_weight, tau, tail, sums)
    root_kl = (root.rows * weight).sum()
    first_s = objective.student_cell[block.student.ids[:count]]
    first_t = objective.teacher_cell[teacher.side.ids[:count]]
    zero = torch.zeros_like(root_kl)
    metrics: Sums = {
        **root.metrics,
        "cell_error": ((first_s != first_t).sum(), count),
        "root_kl": (root_kl, count),
        "inner_student_kl": (zero, 0.0),
        "inner_teacher_kl": (zero, 0.0),
        "chunk_kl": (zero, plan.has_term_C.sum()),
    }
    result = FastOut(
        root.rows * root_weight,
        (root.rows * gated).sum() * root_weight,
        metrics,
        pad_lanes(root.slope_coef, num_lanes),
        pad_lanes(root.prob_coef, num_lanes),
        torch.zeros_like(student.stats.lse_tau),
        root.slope,
        aligned=count,
        kept_coef=pad_lanes(root.kept_coef, num_lanes),
    )
    for name, part in parts.items():
        _add_tree(result, name, part, weights)
    if block.multi:
        _add_chunk_term(result, term, block, student, teacher, weights)
    result.loss = result.loss * tau**2
    return result


def _add_tree(result: FastOut, name: str, part: _TreePart, weights: ChunkWeights) -> None:
    """Adds one tree's part to a block's result. name: of its metric."""
    result.rows = result.rows + part.rows * part.weight
    result.loss = result.loss + (part.rows * weights.gated).sum() * part.weight
    result.prob_coef += part.prob_coef
    result.entries.append(part.entries)
    result.metrics[name] = ((part.rows * weights.counted).sum(), part.count)


def _add_chunk_term(
    result: FastOut,
    term: TeacherTerm,
    block: BlockPositions,
    student: SideLogits,
    teacher: SideLogits,
    weights: ChunkWeights,
) -> None:
    """Adds the binary divergence of the chunks that neither tree spells to their end."""
    assert block.trees is not None
    assert isinstance(term.objective, TreeKL)
    single, has_term_C, chunk_weight = block.single, block.trees.has_term_C, term.objective.cfg.chunk_weight
    counted, gated = weights.counted * has_term_C, weights.gated * has_term_C
    factor = chunk_weight * term.objective.temperature
    rows, slope = chunk_term_from(term, block, student, teacher, gated, single, factor)
    result.metrics["chunk_kl"] = ((rows * counted[single:]).sum(), has_term_C.sum())
    result.rows = result.rows + F.pad(rows * has_term_C[single:] * chunk_weight, (single, 0))
    result.loss = result.loss + (rows * gated[single:]).sum() * chunk_weight
    result.prob_coef = result.prob_coef - slope
    result.label_coef = result.label_coef + slope
