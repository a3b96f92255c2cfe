"""Base of objectives on the bytes of tokens: the teacher's probabilities, in terms of the student tokens that its
tokens begin with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, divergence_entries
from limbeck.losses.objectives.base import ProjectedObjective, Settings
from limbeck.losses.objectives.distributions import TINY
from limbeck.losses.objectives.tree_kl import log_target
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection.prefixes import BytePrefixes


class PrefixObjective(ProjectedObjective):
    """An objective on the bytes of both vocabularies: a teacher token counts for the longest student token that it
    begins with."""

    needs_logits = True
    needs_bytes = True

    head: Tensor  # [V_t] that student token; V_s: none
    reached: Tensor  # [V_s] bool: some teacher token counts for it

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        if projection.token_bytes is None:
            raise LossError(
                f"mode {self.mode!r} needs the bytes of both vocabularies, which a stored projection does not hold; "
                "pass projections=[load_or_build(student_tokenizer, teacher_tokenizer)]"
            )
        self.prefixes = BytePrefixes(*projection.token_bytes, special_partners(projection))
        head = torch.from_numpy(self.prefixes.head)
        size = len(self.prefixes.student_bytes)
        # a head of -1 marks the last place, which is cut off below
        reached = torch.zeros(size + 1, dtype=torch.bool).index_fill(0, head, True)
        self.register_buffer("head", head.where(head >= 0, size), persistent=False)
        self.register_buffer("reached", reached[:size], persistent=False)

    def fit(self, student_size: int, teacher_size: int) -> None:
        super().fit(student_size, teacher_size)
        sides = (
            ("student", student_size, self.prefixes.student, self.reached.numel()),
            ("teacher", teacher_size, self.prefixes.teacher, self.head.numel()),
        )
        for side, size, tokens, rows in sides:
            if size > rows or tokens.ids.max(initial=-1) >= size:
                raise LossError(
                    f"the bytes are those of {rows} {side} tokens but the {side} scores {size}; mode {self.mode!r} "
                    "needs heads that have a row for every token of a text"
                )
        if student_size < self.reached.numel():
            # what follows are ids without bytes, whose column would be the rest's
            self.head = self.head.clamp(max=student_size)
            self.reached = self.reached[:student_size]
        self.head = self.head[:teacher_size]

    def at_heads(self, probs_nU: Tensor) -> Tensor:
        """Teacher probabilities summed by student token, and in the last column those that begin with none:
        `[n, V_s + 1]`."""
        out = probs_nU.new_zeros(probs_nU.shape[0], self.reached.numel() + 1)
        return out.index_add(1, self.head, probs_nU)


def special_partners(projection: ProjectionLike) -> dict[int, int]:
    """Teacher id -> student id of tokens that stand for each other, those of equal role first."""
    student, teacher = projection.exact_pairs()
    partner_of = dict(zip(np.asarray(teacher).tolist(), np.asarray(student).tolist(), strict=True))
    whole = np.flatnonzero((np.asarray(projection.weights)[:, 0] == 1) & (np.asarray(projection.indices)[:, 0] >= 0))
    for student_id, teacher_id in zip(whole.tolist(), np.asarray(projection.indices)[whole, 0].tolist(), strict=True):
        partner_of.setdefault(teacher_id, student_id)
    return partner_of


def token_divergence(target: Tensor, member: Tensor, log_s: Tensor, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` over the student's tokens of `member` and one rest bucket. target: `[n, V_s + 1]`, the rest
    last; log_s: the student's log-probabilities `[n, V_s]`."""
    entries = divergence_entries(log_s, log_target(target[:, :-1], spec), spec)
    rest_s = (log_s.exp() * ~member).sum(-1)
    rest = divergence_entries((rest_s + TINY).log(), log_target(target[:, -1], spec), spec)
    return entries.masked_fill(~member, 0).sum(-1) + rest
