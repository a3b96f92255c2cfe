"""For a teacher that shares the student's vocabulary, whatever the mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from limbeck.losses.divergences import ChosenBy, DivergenceSpec, divergence_entries, divergence_rows, tail_log_prob
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, Objective, Settings
from limbeck.losses.objectives.config import DivergenceKeys, ObjectiveConfig
from limbeck.losses.objectives.distributions import ABSENT
from limbeck.losses.signals import TeacherScores, is_one_of, log_prob_of_any
from limbeck.losses.vocab.axis import VocabAxis


class SameVocabulary(Objective):
    """Direct divergence per position for a teacher with the student's own vocabulary; no projection.

    Where both end an answer with different tokens, these are `ends` and count as one event at every position: an end is
    an end, so that a student is not taught to leave out its own because the teacher has another.
    """

    measures = ("proj_accuracy",)
    kernel = "limbeck.losses.fast.common_kl:common_kl"
    lane_kinds = ("mean", "mean")

    class Config(DivergenceKeys, ObjectiveConfig):
        mode: Literal["same_vocabulary"] = "same_vocabulary"
        topk: int | None = Field(default=None, ge=1)
        """Tokens kept besides a tail bucket."""
        topk_by: ChosenBy = "teacher"
        """Whose most likely tokens those are."""

        @property
        def spec(self) -> DivergenceSpec:
            return replace(super().spec, topk=self.topk, chosen_by=self.topk_by)

    def __init__(self, cfg: Settings = None, *, temperature: float = 1.0, ends: Sequence[int] = ()) -> None:
        super().__init__(cfg, temperature=temperature)
        self.ends = tuple(ends)

    def has_kernels(self, *, topk: bool) -> bool:
        return super().has_kernels(topk=topk) and self.spec.topk is None and not self.ends

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        tau = self.temperature
        axis, log_s = student.axis, chunks.student_boundary(student.log_probs(tau))
        if teacher.is_topk:
            ids_CK, log_t = teacher.topk()
            empty = torch.isneginf(log_t)
            log_t = log_t.to(log_s.dtype).masked_fill(empty, ABSENT)
            guess, best = axis.argmax(log_s), ids_CK.gather(1, log_t.argmax(-1, keepdim=True)).squeeze(1)
            any_end_C1 = log_prob_of_any(log_s, self.ends, axis) if self.ends else None
            log_s = axis.gather(log_s, ids_CK).masked_fill(empty, ABSENT)
            if any_end_C1 is not None:
                listed = is_one_of(ids_CK, self.ends) & ~empty
                end_t = log_t.masked_fill(~listed, -torch.inf).logsumexp(-1, keepdim=True)
                # of a list without an end nothing is known but that all of them are in its tail, on both sides
                unlisted = torch.isneginf(end_t)
                log_s = _with_end(log_s.masked_fill(listed, ABSENT), any_end_C1.masked_fill(unlisted, ABSENT))
                log_t = _with_end(log_t.masked_fill(listed, ABSENT), end_t.masked_fill(unlisted, ABSENT))
            log_s = torch.cat((log_s, tail_log_prob(log_s)), -1)
            log_t = torch.cat((log_t, tail_log_prob(log_t)), -1)
            rows_C = divergence_entries(log_s, log_t, self.spec).sum(-1)
        else:
            log_t = teacher.log_probs(tau)
            guess, best = axis.argmax(log_s), axis.argmax(log_t)
            rows_C = self._rows(log_s, log_t, axis)
        right = guess == best
        if self.ends:
            right |= is_one_of(guess, self.ends) & is_one_of(best, self.ends)
        right = right.sum().to(rows_C)
        return self.out(rows_C, chunks, proj_accuracy=(right, chunks.count(rows_C)))

    def _rows(self, log_s: Tensor, log_t: Tensor, axis: VocabAxis) -> Tensor:
        """The divergence over all tokens; over all others and the event that one of `ends` follows, where there are."""
        if not self.ends:
            return divergence_rows(log_s, log_t, self.spec, axis)
        spec, ends = self.spec, torch.tensor(self.ends, device=log_s.device)
        end_s, end_t = (log_prob_of_any(log_p, self.ends, axis) for log_p in (log_s, log_t))
        places, here = axis.columns(ends)
        places = places if here is None else places[here]
        # the columns of the ends would count beside their event
        log_s, log_t = (log_p.index_fill(-1, places, ABSENT) for log_p in (log_s, log_t))
        if spec.topk is not None and spec.topk < axis.width(log_s):
            chosen = axis.topk((log_t if spec.chosen_by == "teacher" else log_s).detach(), spec.topk)[1]
            log_s, log_t = (
                _with_end(axis.gather(log_p, chosen), end) for log_p, end in ((log_s, end_s), (log_t, end_t))
            )
            log_s, log_t = (torch.cat((log_p, tail_log_prob(log_p)), -1) for log_p in (log_s, log_t))
            return divergence_entries(log_s, log_t, spec).sum(-1)
        # the event is a bucket beside the columns, the same on every shard of the vocabulary
        return axis.sum(divergence_entries(log_s, log_t, spec)) + divergence_entries(end_s, end_t, spec).squeeze(-1)


def _with_end(log_probs: Tensor, end: Tensor) -> Tensor:
    return torch.cat((log_probs, end), -1)
