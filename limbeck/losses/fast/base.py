"""Base of the kernel forms of all objectives: one side's logits with their statistics, what an objective adds to a
block, means and realised tokens by lane.

Work over rows x vocabulary is done by the kernels; what is left in these files is of the size of the rows, in plain
torch and with the very functions of the plain objectives. Tests hold each form against its plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.blocks import TeacherTerm
from limbeck.losses.fast.kernels.chunks import ChunkTerm, chunk_term
from limbeck.losses.fast.kernels.gradient import Entries, Paired, Projected
from limbeck.losses.fast.kernels.stats import ColumnStats, column_stats, token_log_probs
from limbeck.losses.fast.position_order import BlockPositions, SidePositions
from limbeck.losses.objectives.base import advantage_gate
from limbeck.losses.signals import TeacherTopK

Sums = dict[str, tuple[Tensor, "Tensor | float"]]
"""Metrics of one block: (sum, count); a count that the host knows stays a number."""


class SideLogits:
    """One side of a block: logits `[V, L]`, and at which of its lanes which token was realised; after
    `compute_stats`, which has to happen before the logits are overwritten, their statistics.

    token_log_probs `[width]`: of the realised tokens at the objective's temperature (0 where a lane has none). whole:
    every token has its row, so realised tokens can be looked up."""

    stats: ColumnStats
    token_log_probs: Tensor

    def __init__(self, side: SidePositions, logits: Tensor, temperature: float = 1.0, *, whole: bool = True) -> None:
        self.side, self.logits, self.temperature, self.whole = side, logits, temperature, whole
        self.has_stats = False

    def compute_stats(self, stats: ColumnStats | None = None) -> SideLogits:
        """Compute the statistics, where they are not given, and the realised tokens' log-probabilities; once."""
        if self.has_stats:
            return self
        self.stats, self.has_stats = column_stats(self.logits, self.temperature) if stats is None else stats, True
        self.token_log_probs = self.stats.lse.new_zeros(0)
        if self.whole:
            ids = self.side.ids[: self.side.width]
            self.token_log_probs = token_log_probs(self.logits, self.stats.lse_tau, ids, self.temperature)
        return self


@dataclass
class FastOut:
    """Result of an objective at one block. rows `[C]`: divergence of each chunk, without its weight; loss: their
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
    """Weights of each chunk `[C]`: in the metrics of parts, and in the loss, where a gate may lower it."""

    counted: Tensor
    gated: Tensor


FastObjective = Callable[[TeacherTerm, BlockPositions, SideLogits, "SideLogits | None", ChunkWeights], FastOut]
"""(term, block, student, teacher, whose statistics it computes, weights of the chunks) -> `FastOut`. teacher None: a
top-k list."""


def _segment_sums(values: Tensor, side: SidePositions) -> Tensor:
    """Sums of the further lanes `[extras, ...]` of each chunk of several tokens: float64 `[M, ...]`."""
    # float64: a sum that is the difference of two running ones would keep few digits of float32
    running = F.pad(values.double().cumsum(0), (0, 0) * (values.ndim - 1) + (1, 0))
    end = side.extra_first + side.extra_count
    return running.index_select(0, end) - running.index_select(0, side.extra_first)


def chunk_means(values: Tensor, side: SidePositions) -> Tensor:
    """Means `[M, ...]` over the tokens of each chunk of several, from its lanes `[extras, ...]` (kind mean)."""
    count = side.extra_count.reshape(-1, *[1] * (values.ndim - 1))
    return (_segment_sums(values, side) / count).to(values.dtype)


def mean_lse(side_logits: SideLogits, block: BlockPositions) -> Tensor:
    """Log-sum-exp of each lane, with a chunk's mean in the lanes that stand for means: `[L]`."""
    if not block.multi:
        return side_logits.stats.lse_tau
    out, side = side_logits.stats.lse_tau.clone(), side_logits.side
    extra = out[block.chunks : block.chunks + side.extras]
    # a mean of log-softmaxes is the mean logit less the mean log-sum-exp, not less that of the mean logits
    out[block.single : block.chunks] = chunk_means(extra, side)
    return out


def pad_lanes(values: Tensor, num_lanes: int) -> Tensor:
    return F.pad(values, (0, num_lanes - values.shape[0]))


def teacher_tokens(
    term: TeacherTerm, block: BlockPositions, teacher: SideLogits | None
) -> tuple[Tensor, SidePositions]:
    """Log-probabilities of the teacher's realised tokens by lane, and its side."""
    if teacher is not None:
        return teacher.token_log_probs, teacher.side
    (signal,), side = term.teacher.signals, block.teacher
    assert isinstance(signal, TeacherTopK)
    assert side is not None
    return signal.next_logprob.index_select(0, side.rows).float(), side


def chunk_gate(term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher: SideLogits | None) -> Tensor:
    """`Objective.gate` `[C]`, where the temperature is 1 and every token has a lane of its own."""
    sides = (student.token_log_probs, student.side), teacher_tokens(term, block, teacher)
    logs = [log[: block.chunks].index_add(0, side.owner, log[block.chunks :][: side.extras]) for log, side in sides]
    return advantage_gate(logs[1] - logs[0])


def chunk_term_from(
    term: TeacherTerm,
    block: BlockPositions,
    student: SideLogits,
    teacher: SideLogits | None,
    weight: Tensor,
    start: int,
    factor: float,
) -> ChunkTerm:
    """`chunk_term` of the chunks from `start` on; factor: of the term in the total, without the chunks' weights."""
    return chunk_term(
        (student.token_log_probs, student.side), teacher_tokens(term, block, teacher), weight * (term.factor * factor),
        term.objective.spec, start, block.single, student.logits.shape[1],
    )  # fmt: skip
