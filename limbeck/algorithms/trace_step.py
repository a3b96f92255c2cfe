"""One optimizer step over the three channels, and what it needs beside the batch: reference log-probs, factors.

Each channel is a batch of its own with a denominator of its own, counted over all ranks before its first micro-batch.
Their gradients add up, each times its channel's factor. A channel with factor 0 is not touched, so alpha = beta = 0 is
the plain objective, bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from limbeck.algorithms.self_teacher import HintTeacher
from limbeck.algorithms.trace_data import TraceCollate, TraceDataset
from limbeck.algorithms.trace_monitors import CollapseMonitor, check_disjoint
from limbeck.data.batched_data_dict import BatchedDataDict, SlicedDataDict
from limbeck.data.microbatch import option, packing_enabled
from limbeck.data.packing import Bins
from limbeck.losses.hint import HintDistillationLossFn
from limbeck.losses.leaf import Metrics
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.preference import PreferenceLossFn
from limbeck.losses.signals import Head, Signal
from limbeck.models.policy import Policy
from limbeck.models.scoring import response_sums
from limbeck.models.trainer import Step, announce
from limbeck.traces import ComposerBatch
from limbeck.utils.errors import LossError
from limbeck.utils.timer import Timer

# Every rank must report the same names, also where it has no row to compute them from.
_HINT_NAMES = ("hint/loss", "hint/proj_accuracy")


class ChannelLoss:
    """A channel's loss as a step sees it: times the channel's factor, measured where the step is monitored."""

    def __init__(self, loss_fn: Any, factor: float, monitor: Any = None, names: Sequence[str] = ()) -> None:
        self.loss_fn, self.factor, self.monitor, self.names = loss_fn, factor, monitor, names

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The channel's own denominator."""
        counts: dict[str, Tensor] = self.loss_fn.counts(batch)
        return counts

    def prepare(self, microbatch: Any, teacher_row_starts: Sequence[Tensor | None]) -> Any:
        """See the channel's loss."""
        return self.loss_fn.prepare(microbatch, teacher_row_starts)

    def share(self, *args: Any) -> Any:
        """See the channel's loss."""
        return self.loss_fn.share(*args)

    def check_layout(self, *, context: int, tensor: int) -> None:
        """See the channel's loss."""
        self.loss_fn.check_layout(context=context, tensor=tensor)

    def compute(
        self, hidden: Tensor, head: Head, signals: Sequence[Signal], inputs: Any, counts: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        """Loss times factor, and the channel's metrics."""
        loss, metrics = self.loss_fn.compute(hidden, head, signals, inputs, counts)
        if self.names:
            zero = torch.zeros((), dtype=torch.float64)
            metrics = {name: metrics.get(name, (zero, zero)) for name in self.names}
        if self.monitor is not None:
            metrics = {**metrics, **self.monitor(hidden, head, signals, inputs)}
        return loss if self.factor == 1 else loss * self.factor, metrics


class ReferenceLogProbs:
    """Log-probability of both responses of every pair under the start of the run; computed once, kept in checkpoints.

    Attributes:
        values: ``[pairs, 2]`` float64, chosen and rejected, in nats over the response.
        checks: ``[pairs, 2]`` checksums of the token ids that were scored.
    """

    def __init__(self, dataset: TraceDataset) -> None:
        sizes = torch.tensor([len(trace.preference_pairs) for trace in dataset.traces], dtype=torch.int64)
        self.offsets = sizes.cumsum(0) - sizes
        self.values = torch.zeros(int(sizes.sum()), 2, dtype=torch.float64)
        self.checks = torch.zeros(int(sizes.sum()), 2, dtype=torch.int64)

    def _places(self, batch: ComposerBatch) -> Tensor:
        """``[P]`` places of a batch's pairs: the n-th usable pair of a trace, wherever the trace is collated."""
        seen: dict[int, int] = {}
        places = []
        for row in batch["dpo_row"].tolist():
            trace = int(batch["trace_index"][row])
            places.append(int(self.offsets[trace]) + seen.get(trace, 0))
            seen[trace] = seen.get(trace, 0) + 1
        return torch.tensor(places, dtype=torch.int64)

    def fill(
        self, policy: Policy, dataset: TraceDataset, collate: TraceCollate, *, rank: int, world: int, rows: int
    ) -> None:
        """Score all pairs, each data-parallel rank its share; those of a sharded model must do so in step."""
        with_pairs = [i for i, trace in enumerate(dataset.traces) if trace.preference_pairs]
        for mine in rank_batches(with_pairs, rank=rank, world=world, rows=rows):
            batch = collate([dataset[i] for i in mine])
            channel = batch.channel("preference")
            places = self._places(batch)
            self.values[places] = response_sums(policy, channel).reshape(-1, 2)
            self.checks[places] = _checksums(channel).reshape(-1, 2)
        # data-parallel ranks, once per run: two numbers and two checksums per pair, zeros but for those scored here
        ranks = policy.dims.data
        self.values, self.checks = ranks.sum(self.values), ranks.sum(self.checks)

    def attach(self, batch: ComposerBatch, channel: BatchedDataDict) -> None:
        """Write ``reference_logprobs`` ``[2 pairs]`` into a preference channel."""
        places = self._places(batch)
        if not torch.equal(self.checks[places].reshape(-1), _checksums(channel)):
            raise LossError(
                "the reference log-probs were computed for other tokens than the batch holds; the chat template or the "
                "traces changed since the run began, so start a new run folder"
            )
        channel["reference_logprobs"] = self.values[places].reshape(-1)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"values": self.values, "checks": self.checks}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over stored values; they belong to the start of the run, which its weights have left behind."""
        if state["values"].shape != self.values.shape:
            raise LossError(
                f"the checkpoint has reference log-probs of {len(state['values'])} pairs, the traces have "
                f"{len(self.values)}; resume with the traces that the run began with"
            )
        self.values, self.checks = state["values"], state["checks"]


def rank_batches(items: Sequence[int], *, rank: int, world: int, rows: int) -> Iterator[Sequence[int]]:
    """This rank's share of ``items``, ``rows`` at a time; as many batches for every rank, the last may be empty."""
    mine = items[rank::world]
    for start in range(0, -(-len(items) // world), rows):
        yield mine[start : start + rows]


def _checksums(channel: BatchedDataDict) -> Tensor:
    rows = zip(channel["input_ids"], channel["token_mask"], channel["input_lengths"].tolist(), strict=True)
    sums = [zlib.crc32(torch.stack((ids[:n], mask[:n])).numpy().tobytes()) for ids, mask, n in rows]
    return torch.tensor(sums, dtype=torch.int64)


class TraceStep:
    """Takes steps on collated batches.

    Args:
        policy_loss, hint_loss, preference_loss: the channels' losses; ``policy_loss.active`` is settled.
        teacher: of the hint channel; None where that channel is off.
        reference: None where no loss needs it.
    """

    def __init__(
        self,
        student: Policy,
        *,
        policy_loss: PolicyGradientLossFn,
        hint_loss: HintDistillationLossFn,
        preference_loss: PreferenceLossFn,
        teacher: HintTeacher | None,
        reference: ReferenceLogProbs | None,
        monitor: CollapseMonitor,
    ) -> None:
        self.student, self.teacher, self.reference, self.monitor = student, teacher, reference, monitor
        self.policy_loss, self.hint_loss, self.preference_loss = policy_loss, hint_loss, preference_loss

    def __call__(
        self, batch: ComposerBatch, factors: Mapping[str, float], *, monitored: bool = False, timer: Timer | None = None
    ) -> dict[str, Any]:
        """One optimizer step; the result is that of ``Policy.train``.

        Raises:
            LossError: a loss is not finite (the step was not taken), or the two sides of the hint channel are disjoint.
        """
        student, mbs = self.student, int(self.student.cfg["train_micro_batch_size"])
        student.model.train()
        try:
            step = Step(student, timer or Timer())
            if factors["policy"]:
                step.add(*self._policy(batch, factors["policy"], monitored), mbs=mbs)
            if factors["hint"]:
                channel, loss, sources = self._hint(batch, factors["hint"], monitored)
                with step.timer.time("teacher"):
                    channel, sums = announce(channel, sources, student)
                step.add(channel, loss, sources, mbs=mbs)
                step.add_metrics(sums)
            if factors["preference"]:
                step.add(*self._preference(batch, factors["preference"], mbs), mbs=2 * mbs)
            result = step.finish()
        finally:
            student.model.eval()
        if factors["hint"]:
            check_disjoint(result["metrics"])
            self.hint_loss.end_step(result["metrics"])
        if self.teacher is not None:
            self.teacher.after_step()
        return result

    def _policy(self, batch: ComposerBatch, factor: float, monitored: bool) -> tuple[BatchedDataDict, ChannelLoss]:
        channel = batch.channel("policy")
        channel["advantages"] = batch["advantages"]
        measure = (lambda hidden, head, _, inputs: self.monitor.policy(hidden, head, inputs)) if monitored else None
        return channel, ChannelLoss(self.policy_loss, factor, measure)

    def _hint(
        self, batch: ComposerBatch, factor: float, monitored: bool
    ) -> tuple[BatchedDataDict, ChannelLoss, Sequence[Any]]:
        assert self.teacher is not None, "a hint channel without a teacher"
        share = self.teacher.trust_region
        shares = (1 - share, share) if share else (1.0,)

        def measure(hidden: Tensor, head: Head, signals: Sequence[Signal], inputs: Any) -> Metrics:
            return self.monitor.hint(hidden, head, signals, shares, inputs)

        loss = ChannelLoss(self.hint_loss, factor, measure if monitored else None, _HINT_NAMES)
        return batch.channel("hint"), loss, self.teacher.sources

    def _preference(self, batch: ComposerBatch, factor: float, mbs: int) -> tuple[BatchedDataDict, ChannelLoss]:
        channel = batch.channel("preference")
        if self.reference is not None:
            self.reference.attach(batch, channel)
        return with_whole_pairs(channel, self.student.cfg), ChannelLoss(self.preference_loss, factor)


def with_whole_pairs(channel: BatchedDataDict, cfg: Any) -> BatchedDataDict:
    """A preference channel whose token-budget or packed micro-batches never part the two rows of a pair."""
    packed = packing_enabled(cfg)
    section = "sequence_packing" if packed else "dynamic_batching"
    if not channel.size or not (packed or option(cfg, section, "enabled", False)):
        return channel
    lengths = channel["input_lengths"].reshape(-1, 2)
    room = lengths.sum(1) if packed else 2 * lengths.max(1).values
    pairs: BatchedDataDict = BatchedDataDict({"input_lengths": room})
    budget = int(option(cfg, section, "train_mb_tokens"))
    plan: Bins
    if packed:
        algorithm = option(cfg, section, "algorithm", "modified_first_fit_decreasing")
        plan = pairs.plan_packed_batches({"max_tokens_per_microbatch": budget, "algorithm": algorithm})
    else:
        rounding = int(option(cfg, section, "sequence_length_round", 1))
        plan = pairs.plan_dynamic_batches({"max_tokens_per_microbatch": budget, "sequence_length_round": rounding})
    rows = SlicedDataDict(channel.data)
    rows.microbatch_plan = [[[row for pair in items for row in (2 * pair, 2 * pair + 1)] for items in plan]]
    return rows
