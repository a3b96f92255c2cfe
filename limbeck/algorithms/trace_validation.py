"""How probable a model finds the messages that failed, and those that were preferred, in front of the same state."""

from __future__ import annotations

from typing import Any

import torch

from limbeck.algorithms.trace_data import TraceCollate, TraceDataset
from limbeck.algorithms.trace_monitors import CollapseMonitor, response_lengths
from limbeck.algorithms.trace_step import response_sums
from limbeck.data.rank_counts import sum_over_ranks
from limbeck.distributed.process import rank_and_world
from limbeck.models.policy import Policy
from limbeck.traces import ComposerBatch

Sums = dict[str, tuple[float, float]]

NAMES = (
    "erroneous_logprob",
    "erroneous_logprob_hinted",
    "chosen_logprob",
    "rejected_logprob",
    "margin",
    "preference_accuracy",
    "supervised_logprob",
    "response_length",
)


class TraceValidation:
    """Measures a policy on traces, as (sum, count) over all ranks.

    ``erroneous_logprob``: nats of the messages whose call failed, each over the whole message; ``_hinted``: the same
    where the model reads the hint (a self-teacher's view). ``chosen_logprob``, ``rejected_logprob``, ``margin``,
    ``preference_accuracy``: of the pairs. ``supervised_logprob``: per token, all assistant messages.
    ``response_length``: tokens of greedy answers in front of the first error sites.
    """

    def __init__(
        self, policy: Policy, dataset: TraceDataset, collate: TraceCollate, monitor: CollapseMonitor, *, rows: int = 8
    ) -> None:
        self.policy, self.dataset, self.collate, self.monitor, self.rows = policy, dataset, collate, monitor, rows

    def measure(self) -> Sums:
        """All figures that the traces allow."""
        rank, world = rank_and_world()
        mine = list(range(len(self.dataset)))[rank::world]
        sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in NAMES}
        written = 0
        for start in range(0, len(mine), self.rows):
            batch = self.collate([self.dataset[i] for i in mine[start : start + self.rows]])
            self._add(sums, batch)
            # Answers are compared from one validation to the next, so the same ones are written each time.
            if not written and rank == 0 and self.monitor.config.generate:
                lengths = response_lengths(self.policy, batch, self.monitor)
                written = len(lengths)
                _put(sums, "response_length", float(sum(lengths)), written)
        flat = torch.tensor([sums[name] for name in NAMES], dtype=torch.float64)
        (total,) = sum_over_ranks([flat], self.policy.dp_group)
        return {name: (float(s), float(c)) for name, (s, c) in zip(NAMES, total.tolist(), strict=True)}

    def _add(self, sums: dict[str, list[float]], batch: ComposerBatch) -> None:
        policy = self.policy
        hint = batch.channel("hint")
        if hint.size:
            _put(sums, "erroneous_logprob", float(response_sums(policy, hint).sum()), hint.size)
            if self.collate.collator.teacher is self.collate.collator.student:
                hinted = response_sums(policy, hint, "teacher_")
                _put(sums, "erroneous_logprob_hinted", float(hinted.sum()), hint.size)
        pairs = batch.channel("preference")
        if pairs.size:
            chosen, rejected = response_sums(policy, pairs).reshape(-1, 2).unbind(1)
            for name, values in (
                ("chosen_logprob", chosen),
                ("rejected_logprob", rejected),
                ("margin", chosen - rejected),
                ("preference_accuracy", (chosen > rejected).double()),
            ):
                _put(sums, name, float(values.sum()), len(values))
        whole = batch.channel("policy")
        tokens = float((whole["token_mask"][:, 1:] > 0).sum())
        _put(sums, "supervised_logprob", float(response_sums(policy, whole).sum()), tokens)


def _put(sums: dict[str, list[float]], name: str, total: float, count: Any) -> None:
    sums[name][0] += total
    sums[name][1] += float(count)
