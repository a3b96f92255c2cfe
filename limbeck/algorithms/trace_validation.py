"""How probable a model finds the messages that failed, and those that were preferred, in front of the same state."""

from __future__ import annotations

from torch import Tensor

from limbeck.algorithms.trace_data import TraceCollate, TraceDataset
from limbeck.algorithms.trace_monitors import CollapseMonitor, response_lengths
from limbeck.algorithms.trace_step import rank_batches
from limbeck.models.policy import Policy
from limbeck.models.scoring import response_sums
from limbeck.traces import ComposerBatch
from limbeck.utils.metrics import Metrics

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
        self._prompts: list[Tensor] | None = None

    def measure(self) -> dict[str, tuple[float, float]]:
        """All figures that the traces allow."""
        ranks = self.policy.dims.data
        sums = Metrics(dict.fromkeys(NAMES, (0.0, 0.0)))
        for mine in rank_batches(range(len(self.dataset)), rank=ranks.rank, world=ranks.size, rows=self.rows):
            self._add(sums, self.collate([self.dataset[i] for i in mine]))
        # the ranks of a sharded model can only write together
        if self.monitor.config.generate and (ranks.rank == 0 or self.policy.sharding.is_sharded):
            lengths = response_lengths(self.policy, self.prompts(), self.monitor)
            if ranks.rank == 0:
                sums.add({"response_length": (float(sum(lengths)), len(lengths))})
        return sums.reduced(ranks)[0].pairs()

    def prompts(self) -> list[Tensor]:
        """What stands in front of the first error sites, ``[T]`` each; the same on all ranks and every time."""
        if self._prompts is None:
            self._prompts = []
            for mine in rank_batches(range(len(self.dataset)), rank=0, world=1, rows=self.rows):
                batch = self.collate([self.dataset[i] for i in mine])
                for row in range(min(self.monitor.config.generate, len(batch["student_response_idx"]))):
                    first = int(batch["student_response_idx"][row, 0])
                    self._prompts.append(batch["sdpo_student_input_ids"][row, :first])
                if self._prompts:
                    break
        return self._prompts

    def _add(self, sums: Metrics, batch: ComposerBatch) -> None:
        # a channel without rows is scored too: the ranks of a sharded model must make the same calls
        policy = self.policy
        hint = batch.channel("hint")
        sums.add({"erroneous_logprob": (response_sums(policy, hint).sum(), hint.size)})
        if self.collate.collator.teacher is self.collate.collator.student:
            hinted = response_sums(policy, hint, "teacher_")
            sums.add({"erroneous_logprob_hinted": (hinted.sum(), hint.size)})
        chosen, rejected = response_sums(policy, batch.channel("preference")).reshape(-1, 2).unbind(1)
        for name, values in (
            ("chosen_logprob", chosen),
            ("rejected_logprob", rejected),
            ("margin", chosen - rejected),
            ("preference_accuracy", (chosen > rejected).double()),
        ):
            sums.add({name: (values.sum(), len(values))})
        whole = batch.channel("policy")
        tokens = (whole["token_mask"][:, 1:] > 0).sum()
        sums.add({"supervised_logprob": (response_sums(policy, whole).sum(), tokens)})
