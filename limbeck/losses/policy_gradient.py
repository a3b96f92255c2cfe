"""The policy channel: GRPO, Dr. GRPO, and the reward-weighted likelihood that remains where they cannot be had.

Advantages belong to the *global* batch (a group may lie in several micro-batches and on several ranks), so
`PolicyGradientLossFn.prepare_batch` writes them into the batch before it is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from limbeck.config import resolve
from limbeck.data.layout import TokenLayout, supervised_tokens
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.blocks import token_log_probs
from limbeck.losses.contract import Batch, Counts, Loss
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.utils.metrics import Metrics, Pair

PolicyMode = Literal["auto", "grpo", "dr_grpo", "reward_weighted"]
Normalisation = Literal["constant", "sequence", "token"]

_DEFAULT_NORMALISATION: dict[str, Normalisation] = {
    "grpo": "sequence",
    "dr_grpo": "constant",
    "reward_weighted": "token",
}


class PolicyLossConfig(BaseModel):
    """The policy channel: what rewards do.

    `dr_grpo`: advantage = r - mean of the group, no std, divided by a constant; `grpo`: also divided by the group's
    std, mean within each sequence; both need groups and behaviour log-probs. `reward_weighted`: log-likelihood weighted
    by the advantage where there are groups, else by the reward; no ratio, no clipping.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    weight: float = Field(default=1.0, ge=0)
    """Factor of the channel in the total."""
    mode: PolicyMode = "auto"
    """`auto`: dr_grpo where every trace has a group and behaviour log-probs, else reward_weighted."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """A ratio of probabilities is cut to 1 less this at least."""
    clip_high: float = Field(default=0.2, gt=0)
    """A ratio of probabilities is cut to 1 plus this at most."""
    divisor: float = Field(default=1024.0, gt=0)
    """Dr. GRPO: tokens per sequence that sums are divided by."""
    normalisation: Normalisation | None = None
    """Unit that a mean is taken over: tokens, sequences, or the fixed ``divisor``; default: as the mode says."""
    std_eps: float = Field(default=1e-6, gt=0)
    """Added to a group's standard deviation where advantages are divided by it."""

    def resolved(self, batch: Mapping[str, Any]) -> PolicyLossConfig:
        """The mode that a batch allows; an error where a mode was asked for that it does not."""
        counted = batch["sample_mask"] > 0
        grouped = bool((batch["group_index"][counted] >= 0).all()) if bool(counted.any()) else True
        supervised = (batch["token_mask"] > 0) & counted[:, None]
        known = batch.get("behavior_valid")
        scored = known is not None and bool(known[supervised].all())
        if self.mode in ("grpo", "dr_grpo") and not (grouped and scored):
            missing = "groups" if not grouped else "behaviour log-probs"
            raise LossError(
                f"policy mode {self.mode!r} needs {missing}, which some traces of the batch lack; give them, or use "
                "mode 'reward_weighted' (or 'auto')"
            )
        mode = self.mode
        if mode == "auto":
            mode = "dr_grpo" if grouped and scored else "reward_weighted"
        normalisation = self.normalisation or _DEFAULT_NORMALISATION[mode]
        return self.model_copy(update={"mode": mode, "normalisation": normalisation})


def group_advantages(
    rewards: Tensor, groups: Tensor, *, valid: Tensor | None = None, std: bool = False, eps: float = 1e-6
) -> Tensor:
    """`[B]` reward minus the mean of its group; with `std` divided by the group's (population) standard deviation.

    groups `[B]`: group number; -1: no group, the reward itself is returned. valid `[B]`: rows that count; the others
    get 0 and take no part in a mean.
    """
    counted = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid.bool()
    member = counted & (groups >= 0)
    out = torch.where(counted, rewards, torch.zeros_like(rewards))
    if not bool(member.any()):
        return out
    _, number = groups[member].unique(return_inverse=True)
    size = torch.bincount(number).to(rewards)
    values = rewards[member]
    mean = torch.zeros_like(size).index_add(0, number, values) / size
    centred = values - mean[number]
    if std:
        variance = torch.zeros_like(size).index_add(0, number, centred**2) / size
        centred = centred / (variance.sqrt()[number] + eps)
    return out.masked_scatter(member, centred)


def policy_token_losses(
    log_probs: Tensor, advantages: Tensor, behavior: Tensor | None, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Pair]]:
    """Loss `[N]` of each token and metrics; log_probs, advantages, behavior `[N]`.

    behavior: the sampling policy's log-probs; None: the log-likelihood is weighted, without a ratio, which is otherwise
    clipped to [1 - clip_low, 1 + clip_high].
    """
    count = log_probs.new_tensor(float(log_probs.numel()))
    if behavior is None:
        return -log_probs * advantages, {"log_prob": (log_probs.detach().sum(), count)}
    difference = log_probs - behavior
    ratio = difference.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # the lesser of both, not the clipped one: a ratio that has gone the wrong way keeps its gradient back
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        active = (clipped * advantages < ratio * advantages).to(ratio)
        metrics: dict[str, Pair] = {
            "clip_fraction": (active.sum(), count),
            "ratio": (ratio.sum(), count),
            # ratio - 1 - log ratio >= 0 estimates KL(behaviour || policy) without bias
            "behavior_kl": ((ratio - 1 - difference).sum(), count),
        }
    return losses, metrics


@dataclass
class PolicyInputs:
    """Supervised tokens of one micro-batch. advantage, behavior `[N]`; behavior is None in reward-weighted mode. count:
    this micro-batch's share of the global count."""

    tokens: TokenLayout
    advantage: Tensor
    behavior: Tensor | None
    count: float


class PolicyGradientLossFn(Loss[PolicyInputs]):
    """Policy-gradient loss over the assistant tokens of traces.

    loss_fn = PolicyGradientLossFn({"mode": "dr_grpo"})
    loss_fn.prepare_batch(global_batch)  # advantages, before the batch is split
    counts = loss_fn.denominators(global_batch)  # reduce over data-parallel ranks
    loss, metrics = loss_fn.compute_loss(hidden, head, (), loss_fn.build_layout(microbatch), counts)
    """

    tensor_parallel = True
    context_parallel = True

    def __init__(self, cfg: PolicyLossConfig | Mapping[str, Any] | None = None, *, block_rows: int = 512) -> None:
        super().__init__()
        self.cfg = resolve(PolicyLossConfig, cfg or {})
        self.active, self.block_rows = self.cfg, block_rows

    def prepare_batch(self, batch: Batch) -> Batch:
        """Write `advantages` `[B]` into a global batch and settle the mode (`active`). A batch that has advantages, of
        groups that reach beyond it, keeps them."""
        if "advantages" in batch:
            return batch
        self.active = self.cfg.resolved(batch)
        rewards, groups = batch["rewards"], batch["group_index"]
        valid = batch["sample_mask"] > 0
        std, eps = self.active.mode == "grpo", self.active.std_eps
        batch["advantages"] = group_advantages(rewards, groups, valid=valid, std=std, eps=eps)
        return batch

    def _weights(self, batch: Mapping[str, Any], sample: Tensor, token: Tensor) -> Tensor:
        weight: Tensor = batch["sample_mask"].cpu()[sample].double()
        if "response_weights" in batch:
            weight = weight * batch["response_weights"].cpu()[sample, token].double()
        if self.active.normalisation == "sequence":
            size = torch.bincount(sample, minlength=len(batch["sample_mask"]))
            weight = weight / size[sample]
        return weight

    def denominators(self, batch: Batch) -> Counts:
        """Local denominator `policy` of a global batch, a float64 scalar to be summed over ranks."""
        start = torch.zeros(len(batch["sample_mask"]), dtype=torch.int64)
        sample, token, _ = supervised_tokens(batch["input_lengths"], batch["token_mask"], batch["sample_mask"], start)
        sequences = float(sample.unique().numel())
        if self.active.normalisation == "token":
            total = self._weights(batch, sample, token).sum()
        else:
            factor = self.active.divisor if self.active.normalisation == "constant" else 1.0
            total = torch.tensor(sequences * factor, dtype=torch.float64)
        return {"policy": total}

    def build_layout(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None] = ()) -> PolicyInputs:
        """Supervised tokens of a micro-batch, on the CPU."""
        batch, start = mb.data_dict, mb.processed_inputs.row_start
        assert start is not None
        if "advantages" not in batch:
            raise LossError(
                "the batch has no advantages; call prepare_batch(batch) on the global batch before it is split"
            )
        sample, token, rows = supervised_tokens(
            batch["input_lengths"], batch["token_mask"], batch["sample_mask"], start
        )
        weight = self._weights(batch, sample, token).float()
        tokens = TokenLayout(rows, batch["input_ids"].cpu()[sample, token], weight)
        behavior = None
        if self.active.mode != "reward_weighted":
            behavior = batch["behavior_logprobs"].cpu()[sample, token]
        count = float(self.denominators(batch)["policy"])
        return PolicyInputs(tokens, batch["advantages"].cpu()[sample], behavior, count)

    def shard(self, inputs: PolicyInputs, comm: Comm) -> PolicyInputs:
        """One rank's share of the tokens. Ratios and clipping work token by token and every weight is known
        beforehand, so shares simply add up; the count goes with the first."""
        size = len(inputs.tokens.rows_E)
        share = slice(comm.rank * size // comm.size, (comm.rank + 1) * size // comm.size)
        tokens = inputs.tokens.range(share.start, share.stop)
        behavior = None if inputs.behavior is None else inputs.behavior[share]
        return PolicyInputs(tokens, inputs.advantage[share], behavior, inputs.count if comm.rank == 0 else 0.0)

    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: PolicyInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, already divided by the global count, and metrics as (sum, count)."""
        log_probs = token_log_probs(hidden_RH, head, inputs.tokens, block_rows=self.block_rows)
        behavior = None if inputs.behavior is None else inputs.behavior.to(log_probs)
        clip_low, clip_high = self.active.clip_low, self.active.clip_high
        losses, token_metrics = policy_token_losses(
            log_probs, inputs.advantage.to(log_probs), behavior, clip_low=clip_low, clip_high=clip_high
        )
        total = (losses * inputs.tokens.weight_E.to(log_probs)).sum()
        count = counts["policy"].to(total.device, torch.float64)
        loss = total / count.clamp(min=1e-9).to(total.dtype)
        metrics = Metrics({"policy/loss": (total.detach(), inputs.count)})
        return loss, metrics.add(token_metrics, "policy/")
