"""A teacher's distribution against a projected student's.

Both sides are put on the same buckets: teacher columns and one rest bucket. Student mass without a mapping, or on
columns that are not listed, is in the student's rest. Teacher mass on a column that no student token reaches cannot
be learnt through W: such columns leave the target, which is normalised over the others and weighted by the mass that
stayed. The gradient is that of the KL over the whole vocabulary, without its constant, and the value stays >= 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limbeck.losses.divergences import DivergenceSpec, divergence_entries
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
    # the floors were added to all buckets: divided by what they sum to, the student's are probabilities again
    normaliser = math.log1p(axis.width(q) * TINY + floor)
    log_s = (q + TINY).log() - normaliser
    if spec.kind == "forward" and spec.entry_clip is None:
        # The same sum with the teacher's part, which has no gradient, taken in one pass.
        negative_entropy = -axis.sum(torch.special.entr(kept))
        rows = (negative_entropy - axis.sum(kept * log_s) - kept_sum * mass.log()) / mass
    else:
        # forward: weight of exactly 0; elsewhere it is the denominator, and stays finite
        absent = -torch.inf if spec.kind == "forward" else math.log(TINY)
        log_t = (target / mass[:, None]).clamp(min=TINY**2).log().masked_fill(~member, absent)
        rows = axis.sum(divergence_entries(log_s, log_t, spec))
    if rest_t is not None or spec.kind != "forward" or spec.entry_clip is not None:
        share = torch.zeros_like(mass) if rest_t is None else rest_t / mass
        log_rest_t = (share + floor).log()
        log_rest_s = (rest_s.clamp(min=0) + floor).log() - normaliser
        rows = rows + divergence_entries(log_rest_s, log_rest_t, spec)
    return rows * mass
