"""Figures that show early when self-distillation collapses, measured on a few rows of a step.

Entropy that falls towards 0, probability that drains into format tokens or early ends, a divergence to the hinted
teacher that grows for one class of tokens, answers that get short or never end: each shows before the loss does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.hint import HintInputs
from limbeck.losses.policy_gradient import PolicyInputs
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import FORM_CLASSES, form_table
from limbeck.utils.metrics import Pair

# Share of its maximum, ln 2, from which JSD says that two sides have nothing in common.
_DISJOINT = 0.95 * math.log(2)


class MonitorConfig(BaseModel):
    """Figures that show a collapse early: entropy, divergence by token class, mass on format tokens, length."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    period: int = Field(default=10, ge=0)
    """Measure every this many steps; 0: never."""
    rows: int = Field(default=256, ge=1)
    """Predictions that are measured per micro-batch and channel, evenly spaced."""
    generate: int = Field(default=2, ge=0)
    """Answers written greedily at each validation, to measure their length."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Most tokens of such an answer."""


class CollapseMonitor:
    """Measures rows of the policy and hint channels, without gradient.

    Token classes are `limbeck.tokens.classes.FORM_CLASSES`.
    """

    def __init__(self, tokenizer: object, vocab_size: int, config: MonitorConfig) -> None:
        self.config = config
        vocab = ByteVocab.from_tokenizer(tokenizer)
        self.classes = torch.from_numpy(form_table(vocab, vocab_size))
        self.is_format = (self.classes == FORM_CLASSES.index("format")) | (
            self.classes == FORM_CLASSES.index("special")
        )
        # a head may be narrower than its tokenizer
        self.end_ids = vocab.end_ids(vocab_size)
        self.is_end = torch.zeros(vocab_size, dtype=torch.bool)
        self.is_end[self.end_ids] = True

    def due(self, step: int) -> bool:
        """Whether a step (counted from 1) is measured; the first one always is."""
        return self.config.period > 0 and (step == 1 or step % self.config.period == 0)

    @torch.no_grad()
    def policy(self, hidden: Tensor, head: Head, inputs: PolicyInputs) -> dict[str, Pair]:
        """Entropy, format mass and early ends at supervised tokens of whole traces."""
        pick = self._pick(len(inputs.tokens.rows_E))
        rows, ids = inputs.tokens.rows_E[pick].to(hidden.device), inputs.tokens.ids_E[pick].to(hidden.device)
        log_s = head.axis.log_softmax(head.logits(hidden.detach().index_select(0, rows)))
        return self._student("monitor/policy", head, log_s, ids)

    @torch.no_grad()
    def hint(
        self, hidden: Tensor, head: Head, signals: Sequence[TeacherOutput], shares: Sequence[float], inputs: HintInputs
    ) -> dict[str, Pair]:
        """The same at target tokens and, where the teacher shares the vocabulary, divergences to it by token class."""
        layout, device = inputs.layout, hidden.device
        same = len(layout.student_ids_M) == len(layout.teacher_ids_Q) and torch.equal(
            layout.student_ids_M.cpu(), layout.teacher_ids_Q.cpu()
        )
        pick = self._pick(len(layout.student_rows_M))
        rows, ids = layout.student_rows_M[pick].to(device), layout.student_ids_M[pick].to(device)
        log_s = head.axis.log_softmax(head.logits(hidden.detach().index_select(0, rows)))
        metrics = self._student("monitor/hint", head, log_s, ids)
        live = [s for s in signals if not s.is_topk and s.vocab_size == head.vocab_size]
        if len(live) < len(signals):
            return metrics
        if not same:
            # The names must be there on every rank, whatever rows it has.
            log_s, ids, pick = log_s[:0], ids[:0], pick[:0]
        where = layout.teacher_rows_Q[pick].to(device)
        scores = [s.on_shards(head.axis).scores(where).logits for s in live]
        parts = [x.to(log_s) * share for x, share in zip(scores, shares, strict=True) if x is not None]
        log_t = head.axis.log_softmax(torch.stack(parts).sum(0))
        return {**metrics, **self._divergences(head.axis, log_s, log_t, ids)}

    def _pick(self, size: int) -> Tensor:
        """Indices of at most ``rows`` of ``size`` rows, evenly spaced."""
        keep = min(size, self.config.rows)
        return torch.arange(keep) * size // max(keep, 1)

    def _student(self, prefix: str, head: Head, log_p: Tensor, ids: Tensor) -> dict[str, Pair]:
        probs, axis = log_p.exp(), head.axis
        count = log_p.new_tensor(float(len(ids)))
        inner = ~self.is_end.to(ids.device)[ids]
        here = slice(*axis.place(head.vocab_size))
        is_format, is_end = (mask[here].to(probs) for mask in (self.is_format, self.is_end))
        return {
            f"{prefix}/entropy": (-axis.sum(probs * log_p).sum(), count),
            f"{prefix}/format_mass": (axis.total(probs @ is_format).sum(), count),
            f"{prefix}/early_end_mass": (axis.total(probs @ is_end)[inner].sum(), inner.sum()),
        }

    def _divergences(self, axis: VocabAxis, log_s: Tensor, log_t: Tensor, ids: Tensor) -> dict[str, Pair]:
        kl = axis.sum(log_s.exp() * (log_s - log_t))
        # in logarithms: a mixture of probabilities that underflow has the logarithm -inf
        log_m = torch.logaddexp(log_s, log_t) - math.log(2)
        jsd = 0.5 * axis.sum(log_s.exp() * (log_s - log_m) + log_t.exp() * (log_t - log_m))
        kind = self.classes.to(ids.device)[ids]
        metrics: dict[str, Pair] = {"monitor/hint/jsd": (jsd.sum(), jsd.new_tensor(float(len(ids))))}
        for number, name in enumerate(FORM_CLASSES):
            mask = kind == number
            metrics[f"monitor/hint/kl_{name}"] = (kl[mask].sum(), mask.sum())
        return metrics


def check_disjoint(metrics: Mapping[str, tuple[Any, Any]]) -> None:
    """Stop where student and hinted teacher have nothing in common, whichever divergence is trained."""
    total, count = (float(x) for x in metrics.get("monitor/hint/jsd", (0.0, 0.0)))
    if count > 0 and total / count > _DISJOINT:
        raise LossError(
            f"the mean JSD between student and hinted teacher is {total / count:.4f}, at or near its maximum "
            f"ln 2 = {math.log(2):.4f}: they read the same target tokens, so their predictions cannot be disjoint; the "
            "rows of one side are shifted, or the teacher's weights are not those of this student"
        )
