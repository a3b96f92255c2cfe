"""Base of objectives on the tokens that both vocabularies have."""

from __future__ import annotations

from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, divergence_entries, log1mexp, tail_log_prob
from limbeck.losses.objectives.base import ProjectedObjective, Settings
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.losses.vocab.projection import ProjectionLike


class SharedVocabulary(ProjectedObjective):
    """An objective that reads both sides at the tokens that both vocabularies have."""

    needs_logits = True

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        if not self.equals.student.numel():
            raise LossError(f"mode {self.mode!r} found no common token in the projection; use boundary_kl")


def rest_divergence(log_s: Tensor, log_t: Tensor, axis: VocabAxis, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` over columns `[n, K]` of probabilities and one bucket of all others."""
    outside = divergence_entries(_rest(log_s, axis), _rest(log_t, axis), spec)
    return axis.sum(divergence_entries(log_s, log_t, spec)) + outside


def _rest(log_probs: Tensor, axis: VocabAxis) -> Tensor:
    """log of the probability outside the columns `[n]`."""
    # a sharded axis has no logsumexp with a gradient
    if axis.sharded:
        return log1mexp(axis.sum(log_probs.exp()).log())
    return tail_log_prob(log_probs).squeeze(-1)
