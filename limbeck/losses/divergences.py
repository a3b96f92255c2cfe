"""Divergences between two distributions given as log-probabilities, and the two-outcome form used for chunks.

T is the teacher, S the student. Every function works on any bucketing of the vocabulary (all tokens, or top-k and a
tail) as long as both sides use the same one. Leaf losses return `(sum, count)`, never a mean.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from limbeck.errors import ConfigError, LossError
from limbeck.losses.vocab.axis import WHOLE, VocabAxis

Direction = Literal["forward", "reverse", "jsd"]
ChosenBy = Literal["teacher", "student"]

JSD_MARGIN = 0.05
"""JSD(beta) shrinks like beta (1 - beta): closer to the ends than this it must be rescaled."""


@dataclass(frozen=True)
class DivergenceSpec:
    """Which divergence, and how.

    forward: KL(T||S); reverse: KL(S||T); jsd: beta KL(T||M) + (1 - beta) KL(S||M) with M = (1 - beta) S + beta T.
    beta 0 and 1 *are* forward and reverse. `rescale` divides JSD by beta (1 - beta), which makes it continuous with
    them. `entry_clip` caps what one vocabulary entry may add, in a form of which no entry is negative. `topk` keeps
    that many tokens, chosen by `chosen_by`, and puts the others into one tail bucket (same-vocabulary teachers).
    """

    direction: Direction = "forward"
    beta: float = 0.5
    rescale: bool = False
    entry_clip: float | None = None
    topk: int | None = None
    chosen_by: ChosenBy = "teacher"

    def __post_init__(self) -> None:
        if self.direction not in get_args(Direction):
            raise ConfigError(f"direction is {self.direction!r}; expected one of {list(get_args(Direction))}")
        if self.chosen_by not in get_args(ChosenBy):
            raise ConfigError(f"the top-k is chosen by {self.chosen_by!r}; expected one of {list(get_args(ChosenBy))}")
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"jsd_beta is {self.beta}; it must lie in [0, 1]")
        if self.entry_clip is not None and self.entry_clip <= 0:
            raise ConfigError(f"entry_clip is {self.entry_clip}; it must be positive, or left out")
        if self.topk is not None and self.topk < 1:
            raise ConfigError(f"topk is {self.topk}; it must be at least 1, or left out")
        near_end = 0 < self.beta < JSD_MARGIN or 1 - JSD_MARGIN < self.beta < 1
        if self.direction == "jsd" and near_end and not self.rescale:
            raise ConfigError(
                f"jsd_beta is {self.beta}: JSD almost vanishes that near to 0 or 1; set jsd_rescale, or use 0 "
                "(forward KL), 1 (reverse KL) or a value between .05 and .95"
            )

    @property
    def kind(self) -> Direction:
        """The direction after the ends of JSD are taken for what they are."""
        if self.direction == "jsd" and self.beta in (0.0, 1.0):
            return "forward" if self.beta == 0.0 else "reverse"
        return self.direction


def divergence_entries(log_s: Tensor, log_t: Tensor, spec: DivergenceSpec) -> Tensor:
    """Addend of each bucket to the divergence; same shape as the inputs. A bucket of probability 0 adds 0."""
    if spec.kind == "forward":
        entries = _weighted(log_t, log_s)
    elif spec.kind == "reverse":
        entries = _weighted(log_s, log_t)
    else:
        beta = spec.beta
        log_m = _log_mixture(log_s, log_t, beta)
        entries = beta * _weighted(log_t, log_m) + (1 - beta) * _weighted(log_s, log_m)
        if spec.rescale:
            # so that the ends of beta are the forward and the reverse KL, and not 0
            entries = entries / (beta * (1 - beta))
    if spec.entry_clip is None:
        return entries
    if spec.kind != "jsd":
        # p (log p - log q) is negative where p < q: with the large ones capped, the sum would fall below 0 and reward
        # distance. p log(p / q) - p + q adds up to the same, and no entry of it is negative.
        less, more = (log_t, log_s) if spec.kind == "forward" else (log_s, log_t)
        entries = entries - less.exp() + more.exp()
    return entries.clamp(max=spec.entry_clip)


def _log_mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """log((1 - beta) S + beta T); exactly log S where both sides are equal, so that their divergence is exactly 0."""
    difference = log_t - log_s
    near = difference.abs() < 1
    # large differences are zeroed first: an overflow would be NaN in the gradient of the branch that is not taken
    close = log_s + torch.log1p(beta * torch.expm1(difference.where(near, torch.zeros_like(difference))))
    return close.where(near, torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta)))


def _weighted(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (log p - log q), with 0 log 0 = 0 in value and gradient."""
    absent = torch.isneginf(log_p)
    # masked before the product: 0 times an infinite difference is NaN, and stays NaN in a gradient that is masked later
    difference = (log_p - log_q).masked_fill(absent, 0.0)
    return log_p.exp() * difference


def tail_log_prob(log_probs: Tensor) -> Tensor:
    """log of the probability outside the given entries: `[n, K]` -> `[n, 1]`; never below `log1mexp`'s floor."""
    return log1mexp(torch.logsumexp(log_probs, -1, keepdim=True))


def log1mexp(log_p: Tensor) -> Tensor:
    """log(1 - exp(log_p)) for log_p <= 0, accurate at both ends.

    Values that rounding has pushed to 0 or above count as just below it, and keep their gradient: a student that is
    wrongly certain can still be moved.
    """
    limit = 1e-6 if log_p.dtype != torch.float64 else 1e-12
    safe = log_p - (log_p.detach() + limit).clamp(min=0)
    # Two branches, each fed with harmless values where the other one is used, so that no gradient becomes NaN.
    near = safe > -math.log(2)
    from_expm1 = torch.log(-torch.expm1(safe.where(near, torch.full_like(safe, -0.5))))
    from_log1p = torch.log1p(-torch.exp(safe.where(~near, torch.full_like(safe, -1.0))))
    return from_expm1.where(near, from_log1p)


def bucketed(log_s: Tensor, log_t: Tensor, k: int, by: ChosenBy, axis: VocabAxis = WHOLE) -> tuple[Tensor, Tensor]:
    """Both sides at one side's k most likely tokens, plus a tail bucket: `[n, V]` -> `[n, k + 1]`."""
    if k >= axis.width(log_s):
        return log_s, log_t
    chosen = axis.topk((log_t if by == "teacher" else log_s).detach(), k)[1]
    kept_s, kept_t = axis.gather(log_s, chosen), axis.gather(log_t, chosen)
    return (
        torch.cat((kept_s, tail_log_prob(kept_s)), -1),
        torch.cat((kept_t, tail_log_prob(kept_t)), -1),
    )


def divergence_rows(log_s: Tensor, log_t: Tensor, spec: DivergenceSpec, axis: VocabAxis = WHOLE) -> Tensor:
    """Divergence of each row: log-probabilities `[n, V]` of both sides -> `[n]`. axis: on which their columns lie."""
    if spec.topk is not None and spec.topk < axis.width(log_s):
        log_s, log_t = bucketed(log_s, log_t, spec.topk, spec.chosen_by, axis)
        axis = WHOLE  # every rank holds the buckets
    return axis.sum(divergence_entries(log_s, log_t, spec))


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    spec: DivergenceSpec = DivergenceSpec(),
    *,
    weight: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Same-vocabulary leaf: logits `[n, V]` of both sides -> (weighted sum times temperature squared, weight).

    >>> kl_sum, count = divergence(student_logits, teacher_logits, DivergenceSpec("reverse"))
    """
    if student_logits.shape != teacher_logits.shape:
        raise LossError(
            f"student logits {tuple(student_logits.shape)} and teacher logits {tuple(teacher_logits.shape)} differ in "
            "shape; a same-vocabulary loss needs the same rows and the same vocabulary"
        )
    log_s = torch.log_softmax(student_logits / temperature, -1)
    log_t = torch.log_softmax(teacher_logits / temperature, -1)
    # a gradient through softened logits is smaller by about this factor, and would lose against cross-entropy
    rows = divergence_rows(log_s, log_t, spec) * temperature**2
    weight = torch.ones_like(rows) if weight is None else weight
    return (rows * weight).sum(), weight.sum()


def cross_entropy(logits: Tensor, ids: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of ids `[n]` under logits `[n, V]` -> (weighted sum, weight)."""
    log_p = torch.log_softmax(logits, -1).gather(1, ids[:, None]).squeeze(1)
    weight = torch.ones_like(log_p) if weight is None else weight
    return -(log_p * weight).sum(), weight.sum()


def binary_divergence(log_s: Tensor, log_t: Tensor, spec: DivergenceSpec) -> Tensor:
    """Divergence between the events of log-probability log_t and log_s `[n]`, each against its complement: `[n]`."""
    limit = -1e-6 if log_s.dtype != torch.float64 else -1e-12
    two_s = torch.stack((log_s, log1mexp(log_s)), -1)
    # the same floor as in log1mexp, so that both halves add up to 1; the student's is left out to keep its gradient
    two_t = torch.stack((log_t.clamp(max=limit), log1mexp(log_t)), -1)
    return divergence_entries(two_s, two_t, spec).sum(-1)


class JsdGuard(nn.Module):
    """Watches the mean JSD of each step: near its maximum the two sides are disjoint, almost surely misaligned.

    The maximum of JSD(beta) is the entropy of beta; for 1/2 that is ln 2. The first such step warns; `patience` such
    steps in a row stop the run. (An untrained student may start there, so one step alone stops nothing.) `seen`, the
    number of such steps so far, goes into checkpoints.
    """

    def __init__(self, spec: DivergenceSpec, *, share: float = 0.95, patience: int = 20) -> None:
        super().__init__()
        beta = spec.beta
        # clipped entries have another maximum
        self.active = spec.kind == "jsd" and spec.entry_clip is None
        self.limit = math.inf
        if self.active:
            self.limit = -share * (beta * math.log(beta) + (1 - beta) * math.log1p(-beta))
            self.limit /= beta * (1 - beta) if spec.rescale else 1.0
        self.patience = patience
        self.seen = 0

    def observe(self, mean_jsd: float) -> None:
        """Take one step's mean JSD; warn at the first one over the limit, raise `LossError` after `patience`."""
        self.seen = self.seen + 1 if mean_jsd > self.limit else 0
        text = f"the mean JSD is {mean_jsd:.4f}, at or near its maximum (limit {self.limit:.4f})"
        if self.seen >= self.patience:
            raise LossError(
                f"{text} for {self.seen} steps: student and teacher rows do not belong together; check the alignment "
                "and the teacher's tokenizer"
            )
        if self.seen == 1:
            warnings.warn(f"{text}: student and teacher may be misaligned", stacklevel=2)

    # a number of the host in the state: a buffer would travel with the loss to a device and be waited for
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}seen"] = torch.tensor(self.seen)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        # checkpoints of earlier versions have none
        self.seen = int(state_dict.get(f"{prefix}seen", 0))
