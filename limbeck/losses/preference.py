"""The preference channel: DPO, IPO and SimPO on pairs of responses.

A batch has two rows per pair, the chosen one first. Losses are sums over pairs by weight; reference log-probs are sums
over a response, computed once by the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from limbeck.config import resolve
from limbeck.data.layout import TokenLayout, build_token_layout, supervised_tokens
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.blocks import token_log_probs
from limbeck.losses.contract import Batch, Counts, Loss
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.utils.metrics import Metrics

PreferenceKind = Literal["dpo", "ipo", "simpo"]


class PreferenceLossConfig(BaseModel):
    """The preference channel.

    dpo: -log sigmoid(beta x margin), margin = how much more the policy prefers the chosen response than the reference
    does, in nats over whole responses. ipo: (margin per token - 1 / (2 beta))^2. simpo: no reference; margin per token,
    less `gamma`.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    kind: PreferenceKind = "dpo"
    """Which preference loss."""
    beta: float = Field(default=0.1, gt=0)
    """Sharpness of the preference, not the channel's weight (that is `loss.beta`)."""
    gamma: float = 0.5
    """SimPO: the margin between a chosen and a rejected answer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """DPO: share of pairs that are taken to be the wrong way round."""

    @model_validator(mode="after")
    def _consistent(self) -> PreferenceLossConfig:
        if self.label_smoothing and self.kind != "dpo":
            raise ValueError(f"label_smoothing belongs to dpo, not to {self.kind}; leave it out")
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kind != "simpo"


def preference_pair_losses(
    chosen: Tensor,
    rejected: Tensor,
    cfg: PreferenceLossConfig,
    *,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, margin) `[P]` of each pair from log-probs of whole responses `[P]`; `*_tokens` `[P]`: their lengths."""
    if cfg.needs_reference:
        if reference_chosen is None or reference_rejected is None:
            raise LossError(f"{cfg.kind} needs reference log-probs of both responses; compute them before training")
        chosen, rejected = chosen - reference_chosen, rejected - reference_rejected
    if cfg.kind != "dpo":
        if chosen_tokens is None or rejected_tokens is None:
            raise LossError(f"{cfg.kind} works per token and needs both responses' lengths")
        chosen, rejected = chosen / chosen_tokens, rejected / rejected_tokens
    margin = chosen - rejected
    if cfg.kind == "ipo":
        return (margin - 1 / (2 * cfg.beta)) ** 2, margin
    scaled = cfg.beta * margin - (cfg.gamma if cfg.kind == "simpo" else 0.0)
    losses = -F.logsigmoid(scaled)
    if cfg.label_smoothing:
        losses = (1 - cfg.label_smoothing) * losses - cfg.label_smoothing * F.logsigmoid(-scaled)
    return losses, margin


@dataclass
class PreferenceInputs:
    """Response tokens of one micro-batch: `row` `[N]`: the batch row of each. chosen, rejected `[P]`: rows of each
    pair; weight `[P]`; reference `[B]` or None; lengths `[B]` in response tokens. comm: ranks that have the other
    tokens; counted: whether this one speaks for the pairs."""

    tokens: TokenLayout
    row: Tensor
    chosen: Tensor
    rejected: Tensor
    weight: Tensor
    lengths: Tensor
    reference: Tensor | None
    comm: Comm = field(default_factory=Comm.alone)
    counted: bool = True


class PreferenceLossFn(Loss[PreferenceInputs]):
    """Preference loss over a batch of `ComposerBatch.channel("preference")`.

    The batch needs `reference_logprobs` `[B]` (see `response_log_probs`) unless the loss has no reference. Both rows of
    a pair must be in one micro-batch: use micro-batches of an even number of rows.
    """

    tensor_parallel = True
    context_parallel = True

    def __init__(self, cfg: PreferenceLossConfig | Mapping[str, Any] | None = None, *, block_rows: int = 512) -> None:
        super().__init__()
        self.cfg, self.block_rows = resolve(PreferenceLossConfig, cfg or {}), block_rows

    def denominators(self, batch: Batch) -> Counts:
        """Local denominator `pairs` of a global batch: the sum of the pairs' weights, float64."""
        chosen = (batch["pair_side"] > 0) & (batch["sample_mask"] > 0)
        return {"pairs": batch["pair_weight"][chosen].double().sum()}

    def build_layout(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None] = ()) -> PreferenceInputs:
        """Response tokens and pairs of a micro-batch, on the CPU."""
        batch, start = mb.data_dict, mb.processed_inputs.row_start
        assert start is not None
        masks = batch["input_lengths"], batch["token_mask"], batch["sample_mask"]
        tokens = build_token_layout(batch["input_ids"], *masks, start)
        row, _, _ = supervised_tokens(*masks, start)
        chosen, rejected = _pairs(batch)
        reference = batch.get("reference_logprobs")
        if reference is None and self.cfg.needs_reference and len(chosen):
            raise LossError(f"{self.cfg.kind} needs reference_logprobs in the batch; compute them before training")
        lengths = torch.bincount(row, minlength=len(batch["sample_mask"]))
        if len(chosen) and int(lengths[torch.cat((chosen, rejected))].min()) == 0:
            raise LossError("a preference pair has a response without tokens; drop such pairs when collating")
        weight = batch["pair_weight"].cpu()[chosen]
        return PreferenceInputs(tokens, row, chosen, rejected, weight, lengths, reference)

    def shard(self, inputs: PreferenceInputs, comm: Comm) -> PreferenceInputs:
        """One rank's share of the tokens. A pair's loss bends with the sum over both responses, so ranks
        add up their log-probs first; each then follows the gradient to its own tokens, and the first counts."""
        size = len(inputs.row)
        share = slice(comm.rank * size // comm.size, (comm.rank + 1) * size // comm.size)
        tokens = inputs.tokens.range(share.start, share.stop)
        return replace(inputs, tokens=tokens, row=inputs.row[share], comm=comm, counted=comm.rank == 0)

    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: PreferenceInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        sums = response_log_probs(hidden_RH, head, inputs, block_rows=self.block_rows)
        device, dtype = sums.device, sums.dtype
        chosen, rejected = inputs.chosen.to(device), inputs.rejected.to(device)
        lengths = inputs.lengths.to(device, dtype)
        reference = None if inputs.reference is None else inputs.reference.to(device, dtype)
        losses, margin = preference_pair_losses(
            sums[chosen],
            sums[rejected],
            self.cfg,
            reference_chosen=None if reference is None else reference[chosen],
            reference_rejected=None if reference is None else reference[rejected],
            chosen_tokens=lengths[chosen],
            rejected_tokens=lengths[rejected],
        )
        weight = inputs.weight.to(device, dtype)
        total = (losses * weight).sum()
        # weights may be below 1, so a clamp at 1 would change them; without a pair the total is 0, too
        loss = total / counts["pairs"].to(device, torch.float64).clamp(min=1e-9).to(dtype)
        if not inputs.counted:
            # the gradient alone: the value is the first rank's
            loss, weight = loss - loss.detach(), torch.zeros_like(weight)
        with torch.no_grad():
            total = weight.sum()
            values = {"loss": losses, "margin": margin, "accuracy": margin > 0}
            metrics = Metrics({f"preference/{name}": ((x * weight).sum(), total) for name, x in values.items()})
        return loss, metrics


def response_log_probs(hidden: Tensor, head: Head, inputs: PreferenceInputs, *, block_rows: int = 512) -> Tensor:
    """Log-probability `[B]` of each row's whole response, with gradient with respect to the tokens that are here.

    In float64 (where the device has it): a margin is a small difference of sums over many tokens.
    """
    values = token_log_probs(hidden, head, inputs.tokens, block_rows=block_rows)
    values = values if values.device.type == "mps" else values.double()
    sums = values.new_zeros(len(inputs.lengths)).index_add(0, inputs.row.to(values.device), values)
    # one number per response: all ranks compute the same loss from it
    return inputs.comm.sum_same_loss(sums)


def _pairs(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Rows of the chosen and of the rejected side of each pair that counts."""
    side, counted = batch["pair_side"].cpu(), batch["sample_mask"].cpu() > 0
    chosen = ((side > 0) & counted).nonzero().squeeze(1)
    rejected = ((side < 0) & counted).nonzero().squeeze(1)
    whole = len(chosen) == len(rejected)
    if whole and len(chosen):
        number = torch.as_tensor([int(i) for i in batch["idx"]])
        # Rows 2 i and 2 i + 1 of the collated channel are the two sides of pair i.
        order_c, order_r = number[chosen].argsort(), number[rejected].argsort()
        chosen, rejected = chosen[order_c], rejected[order_r]
        whole = bool((number[chosen] + 1 == number[rejected]).all())
    if not whole:
        raise LossError(
            f"the micro-batch holds {len(chosen)} chosen and {len(rejected)} rejected responses that do not pair up; "
            "use micro-batches of an even number of rows, without reordering"
        )
    return chosen, rejected
