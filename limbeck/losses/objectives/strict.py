"""strict (arXiv 2610.08448): only chunks of one token on both sides, over the tokens that both vocabularies have."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from limbeck.losses.divergences import Direction, divergence_entries
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, chunk_log_probs
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.objectives.shared_vocabulary import SharedVocabulary, rest_divergence
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE


class Strict(SharedVocabulary):
    """Divergence over the student's `strict_topk` most likely shared tokens, where a chunk is one token on both sides;
    elsewhere the squared log-ratio of the chunk's probability, times `span_weight`.

    Both sides are normalised over those tokens, or keep what is left in a rest bucket (`strict_rest`).
    """

    measures = (
        "strict_kl",
        "span_loss",
        "shared_mass_student",
        "shared_mass_teacher",
        "kept_mass_student",
        "kept_mass_teacher",
        "proj_accuracy",
    )

    class Config(DivergenceConfig):
        mode: Literal["strict"] = "strict"
        direction: Direction = "reverse"
        """forward: KL(teacher||student); reverse: KL(student||teacher); jsd."""
        strict_topk: int | None = Field(default=16, ge=1)
        """The student's most likely shared tokens; null: all shared."""
        strict_rest: bool = False
        """A rest bucket instead of normalising over those tokens."""
        span_weight: float = Field(default=0.0, ge=0)
        """Factor of the squared log-ratio of all other chunks."""

    cfg: Config

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        multi_C = chunks.multi_C
        single_chunks = (~multi_C).nonzero().squeeze(1)
        log_s, log_t, axis = self.at_equals(student, chunks, teacher, single_chunks, self.temperature)
        with torch.no_grad():
            right = (axis.argmax(log_s) == axis.argmax(log_t)).sum().to(log_s)
            shared_s, shared_t = axis.sum(log_s.exp()).sum(), axis.sum(log_t.exp()).sum()
        k = self.cfg.strict_topk
        if k is not None and k < axis.width(log_s):
            chosen = axis.topk(log_s.detach(), k)[1]
            log_s, log_t, axis = axis.gather(log_s, chosen), axis.gather(log_t, chosen), WHOLE
        with torch.no_grad():
            kept_s, kept_t = axis.sum(log_s.exp()).sum(), axis.sum(log_t.exp()).sum()
        if not self.cfg.strict_rest:
            rows = axis.sum(divergence_entries(axis.log_softmax(log_s), axis.log_softmax(log_t), self.spec))
        else:
            rows = rest_divergence(log_s, log_t, axis, self.spec)
        strict_C = torch.zeros_like(multi_C, dtype=rows.dtype).index_put((single_chunks,), rows)
        span_s, span_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        span_C = (span_s - span_t).square() * multi_C
        few, rest = rows.new_tensor(float(single_chunks.numel())), multi_C.sum().to(rows)
        return self.out(
            strict_C + self.cfg.span_weight * span_C,
            chunks,
            strict_kl=(chunks.weighted(strict_C).sum(), few),
            span_loss=(chunks.weighted(span_C).sum(), rest),
            shared_mass_student=(shared_s, few),
            shared_mass_teacher=(shared_t, few),
            kept_mass_student=(kept_s, few),
            kept_mass_teacher=(kept_t, few),
            proj_accuracy=(right, few),
        )
