"""Losses whose targets are distributions: boundary KL (the default), normalised P-KL, chunk likelihoods, ULD, and the
direct divergence for a teacher that shares the student's vocabulary.

Both sides are put on the same buckets: teacher columns and one rest bucket. Student mass without a mapping, or on
columns that are not listed, is in the student's rest. Teacher mass on a column that no student token reaches cannot
be learnt through W: such columns leave the target, which is normalised over the others and weighted by the mass that
stayed. The gradient is that of the KL over the whole vocabulary, without its constant, and the value stays >= 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limbeck.losses.divergences import (
    DivergenceSpec,
    binary_divergence,
    divergence_entries,
    divergence_rows,
    tail_log_prob,
)
from limbeck.losses.objectives.base import BlockLogits, LeafOut, Mode, TeacherBlock, chunk_sum, leaf_out
from limbeck.losses.objectives.published import sorted_l1
from limbeck.losses.vocab.axis import WHOLE, VocabAxis

TINY = 1e-12
"""Added to a bucket's probability before its logarithm."""

ABSENT = -100.0
"""Log-probability of an unused place of a top-k list: nothing, on both sides, with gradients that stay finite."""


def rest_floor(dtype: torch.dtype) -> float:
    """The same for a rest bucket computed as 1 - sum, whose rounding error it must exceed."""
    return TINY if dtype == torch.float64 else 1e-6


def target_divergence(
    target: Tensor,
    member: Tensor,
    q: Tensor,
    rest_t: Tensor | None,
    rest_s: Tensor,
    floor: float,
    spec: DivergenceSpec,
    axis: VocabAxis = WHOLE,
) -> Tensor:
    """Divergence `[n]` between a teacher and a projected student on columns `[n, K]` plus a rest bucket.

    target: teacher probabilities; member: columns that some student token reaches (the others leave the target);
    q: student mass on the columns; rest_t (None: no mass), rest_s `[n]`: mass in the rest bucket; axis: on which the
    columns lie.
    """
    kept = target * member
    kept_sum = axis.sum(kept)
    mass = (kept_sum if rest_t is None else kept_sum + rest_t).clamp(min=TINY)
    normaliser = math.log1p(axis.width(q) * TINY + floor)
    log_s = (q + TINY).log() - normaliser
    if spec.kind == "forward" and spec.entry_clip is None:
        # The same sum with the teacher's part, which has no gradient, taken in one pass.
        negative_entropy = -axis.sum(torch.special.entr(kept))
        rows = (negative_entropy - axis.sum(kept * log_s) - kept_sum * mass.log()) / mass
    else:
        absent = -torch.inf if spec.kind == "forward" else math.log(TINY)
        log_t = (target / mass[:, None]).clamp(min=TINY**2).log().masked_fill(~member, absent)
        rows = axis.sum(divergence_entries(log_s, log_t, spec))
    if rest_t is not None or spec.kind != "forward":
        share = torch.zeros_like(mass) if rest_t is None else rest_t / mass
        log_rest_t = (share + floor).log()
        log_rest_s = (rest_s.clamp(min=0) + floor).log() - normaliser
        rows = rows + divergence_entries(log_rest_s, log_rest_t, spec)
    return rows * mass


def _projected(
    probs_s: Tensor,
    target: Tensor,
    ids: Tensor | None,
    tail_t: Tensor | None,
    mode: Mode,
    axes: tuple[VocabAxis, VocabAxis],
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss rows, right guesses, unreached teacher mass) of student probabilities `[C, V_s]` against `target`.

    ids None: target `[C, V_t]` is the whole distribution. Otherwise target `[C, K]` belongs to columns ids `[C, K]`
    (a target of 0 marks an unused place) and tail_t `[C]` is the teacher's mass elsewhere. axes: the student's and the
    teacher's.
    """
    vocab, axis = mode.map, WHOLE
    if ids is None:
        q = vocab.project_all(probs_s, mode.rest_weight)
        member = vocab.reachable[None].expand_as(target)
        rest_s, floor, axis = axes[0].sum(probs_s * (~vocab.mapped)), TINY, axes[1]
    else:
        member = vocab.reaches(ids) & (target > 0)
        q = vocab.project_at(probs_s, ids, mode.rest_weight) * member
        rest_s, floor = 1 - q.sum(-1), rest_floor(q.dtype)
    rows = target_divergence(target, member, q, tail_t, rest_s, floor, mode.spec, axis)
    with torch.no_grad():
        right = (axis.argmax(q) == axis.argmax(target)).sum().to(q)
        unreached = axis.sum(target.masked_fill(member, 0)).sum()
    return rows, right, unreached


def chunk_log_probs(student: BlockLogits, block: TeacherBlock, temperature: float) -> tuple[Tensor, Tensor]:
    """Chain-rule log-probability of each chunk's realised tokens under student and teacher: `[C]` each."""
    log_s = block.student_tokens(student, temperature)
    log_t = block.scores.log_prob_of(block.teacher_ids, temperature).to(log_s.dtype)
    return (
        chunk_sum(log_s, block.student_chunk, block.num_chunks),
        chunk_sum(log_t, block.teacher_chunk, block.num_chunks),
    )


def _count(block: TeacherBlock, like: Tensor) -> Tensor:
    return like.new_full((), float(block.num_chunks))


def boundary_kl(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """KL of the teacher's next-token distribution to the projected student at each chunk's start, where both have
    read the same text; plus, for chunks of several tokens on a side, the binary KL of the chunk's probability."""
    tau, axes = mode.temperature, (student.axis, block.scores.axis)
    probs_s = block.student_boundary(student.log_probs(tau)).exp()
    if block.scores.is_topk:
        ids, log_t = (x.index_select(0, block.teacher_first) for x in block.scores.topk())
        target = log_t.to(probs_s.dtype).exp()
        rows, right, unreached = _projected(probs_s, target, ids, (1 - target.sum(-1)).clamp(min=0), mode, axes)
    else:
        target = block.scores.log_probs(tau).index_select(0, block.teacher_first).exp()
        rows, right, unreached = _projected(probs_s, target, None, None, mode, axes)
    log_s, log_t = chunk_log_probs(student, block, tau)
    multi = block.multi.to(rows.dtype)
    chunk_rows = binary_divergence(log_s, log_t, mode.spec) * multi
    count = _count(block, rows)
    return leaf_out(
        rows + mode.chunk_weight * chunk_rows,
        block,
        mode,
        boundary_kl=((rows * block.weight).sum(), count),
        chunk_kl=((chunk_rows * block.weight).sum(), multi.sum()),
        proj_accuracy=(right, count),
        unreached_mass=(unreached, count),
    )


def p_kl_norm(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """P-KL with distributions on both sides: mean probabilities over the chunk, the chunk's own top `vocab_topk`
    teacher columns, everything else in the rest bucket. Independent of batch neighbours."""
    tau, axes = mode.temperature, (student.axis, block.scores.axis)
    probs_s = block.student_mean(student.log_probs(tau).exp())
    size = mode.map.teacher_size
    if block.scores.is_topk:
        ids, log_t = block.scores.topk()
        dense = probs_s.new_zeros(ids.shape[0], size).scatter_add_(1, ids, log_t.to(probs_s.dtype).exp())
        target = block.teacher_mean(dense)
    else:
        target = block.teacher_mean(block.scores.log_probs(tau).exp())
    if mode.vocab_topk < size or block.scores.is_topk:
        target, chosen = block.scores.axis.topk(target, mode.vocab_topk)
        tail = (1 - target.sum(-1)).clamp(min=0)
        rows, right, unreached = _projected(probs_s, target, chosen, tail, mode, axes)
    else:
        rows, right, unreached = _projected(probs_s, target, None, None, mode, axes)
    count = _count(block, rows)
    return leaf_out(rows, block, mode, proj_accuracy=(right, count), unreached_mass=(unreached, count))


def alm(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """Chunk likelihoods only: binary divergence between both models' probability of each chunk."""
    log_s, log_t = chunk_log_probs(student, block, mode.temperature)
    return leaf_out(binary_divergence(log_s, log_t, mode.spec), block, mode)


def uld(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """L1 distance of the sorted probabilities at each chunk's start: the `uncommon_topk` largest, then both tails."""
    tau = mode.temperature
    probs_s = block.student_boundary(student.log_probs(tau)).exp()
    if block.scores.is_topk:
        target = block.scores.topk()[1].index_select(0, block.teacher_first).to(probs_s.dtype).exp()
        k = min(mode.uncommon_topk, target.shape[1])
    else:
        target = block.scores.log_probs(tau).index_select(0, block.teacher_first).exp()
        k = min(mode.uncommon_topk, max(block.scores.axis.width(target), student.axis.width(probs_s)))
    top_s, top_t = student.axis.topk(probs_s, k)[0], block.scores.axis.topk(target, k)[0]
    tails = (top_s.sum(-1) - top_t.sum(-1)).abs()
    return leaf_out(sorted_l1(top_s, top_t, k) + tails, block, mode)


def same_vocabulary(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """Direct divergence per position for a teacher with the student's own vocabulary; no projection."""
    tau = mode.temperature
    axis, log_s = student.axis, block.student_boundary(student.log_probs(tau))
    if block.scores.is_topk:
        ids, log_t = block.scores.topk()
        empty = torch.isneginf(log_t)
        log_t = log_t.to(log_s.dtype).masked_fill(empty, ABSENT)
        guess, best = axis.argmax(log_s), ids.gather(1, log_t.argmax(-1, keepdim=True)).squeeze(1)
        log_s = axis.gather(log_s, ids).masked_fill(empty, ABSENT)
        log_s = torch.cat((log_s, tail_log_prob(log_s)), -1)
        log_t = torch.cat((log_t, tail_log_prob(log_t)), -1)
        rows = divergence_entries(log_s, log_t, mode.spec).sum(-1)
    else:
        log_t = block.scores.log_probs(tau)
        guess, best = axis.argmax(log_s), axis.argmax(log_t)
        rows = divergence_rows(log_s, log_t, mode.spec, axis)
    return leaf_out(rows, block, mode, proj_accuracy=((guess == best).sum().to(rows), _count(block, rows)))
