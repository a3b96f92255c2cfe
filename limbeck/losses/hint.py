"""The hint channel: the student moves towards what a teacher that reads a hint says about the same target tokens.

Batches come from `ComposerBatch.channel("hint")`: one row per error site, target tokens as aligned chunks. The
divergence is averaged within a site, then over sites by their weights; a site is never split by its length.

The teacher is usually the student itself, frozen (its start or an average of its past, `ema_update`) and hinted. Two of
them mixed in log space (`trust_region_mix`) keep it near to the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from limbeck.config import resolve
from limbeck.data.layout import ChunkLayout, TokenLayout, teacher_chunks, with_chunks
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import ConfigError, LossError
from limbeck.losses import fast
from limbeck.losses.blocks import Block, BlockRun, TeacherTerm, cut_blocks, shard_layouts, verify
from limbeck.losses.contract import Batch, Counts, Loss
from limbeck.losses.divergences import ChosenBy, Direction, DivergenceSpec, JsdGuard, divergence_rows
from limbeck.losses.fast import FastPath
from limbeck.losses.fast.order import Lanes
from limbeck.losses.objectives.base import Objective, ObjectiveOptions
from limbeck.losses.objectives.corrected import BoundaryKL, SameVocabulary
from limbeck.losses.signals import Head, Signal, TeacherRows, check_scored_ids
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.utils.metrics import Metrics, Pair

SelfTeacherKind = Literal["frozen", "ema", "trust_region", "live"]

_SHIFTED = (
    "hinted teacher and student read the same target tokens, so their predictions cannot be disjoint; the rows of one "
    "side are shifted: gather logits at *_pred_pos (one before the token), not at *_response_idx"
)


class HintLossConfig(BaseModel):
    """The hint channel: how the student follows a teacher that reads the hint."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    divergence: Direction = "reverse"
    """reverse: KL(student||teacher); forward; jsd."""
    jsd_beta: float = 0.5
    """With ``divergence: jsd``: M = (1 - beta) student + beta teacher; 0: forward, 1: reverse."""
    jsd_rescale: bool = False
    """Divide JSD by beta (1 - beta); needed within .05 of the ends."""
    jsd_patience: int = Field(default=1, ge=1)
    """Steps in a row near the maximum of JSD that stop the run."""
    topk: int | None = Field(default=None, ge=1)
    """Tokens kept besides a tail bucket; default: the whole vocabulary."""
    topk_by: ChosenBy = "student"
    """Whose most likely tokens those are."""
    entry_clip: float | None = Field(default=None, gt=0)
    """Most that one vocabulary entry may add."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides both sides' logits."""
    self_teacher: SelfTeacherKind = "frozen"
    """The hinted teacher, unless `teacher` names another model: the student's start, a moving average of its weights,
    start and present mixed, or the present itself."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """With ``self_teacher: ema``: share of the average that stays at each step."""
    trust_region: float = Field(default=0.05, gt=0, lt=1)
    """Share of the present student in the mixture (in log space) with its start."""
    projection_matrix_path: str | None = None
    """Stored projection to the vocabulary of `teacher`; default: built and cached."""

    fast_path: FastPath = "auto"
    """auto: kernels on CUDA where they know the divergence; off; force."""

    @model_validator(mode="after")
    def _consistent(self) -> HintLossConfig:
        try:
            _ = self.spec  # building it checks the divergence's own rules
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def spec(self) -> DivergenceSpec:
        """The divergence."""
        return DivergenceSpec(
            self.divergence, self.jsd_beta, self.jsd_rescale, self.entry_clip, self.topk, self.topk_by
        )


# -- pure pieces -------------------------------------------------------------------------------------------------------


def hint_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    valid: Tensor,
    cfg: HintLossConfig | None = None,
    *,
    site_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum over sites of weight x mean divergence, sum of weights) from gathered logits.

    student_logits, teacher_logits `[N, K, V]` at `student_pred_pos` and `teacher_pred_pos`; valid `[N, K]`. For tests
    and small use; `HintDistillationLossFn` works from hidden states. Raises where JSD is near its maximum.
    """
    cfg = HintLossConfig() if cfg is None else cfg
    if student_logits.shape != teacher_logits.shape:
        raise LossError(
            f"student logits {tuple(student_logits.shape)} and teacher logits {tuple(teacher_logits.shape)} differ; "
            "gather both at the same targets"
        )
    weight = valid.sum(1).clamp(max=1).to(student_logits) if site_weight is None else site_weight.to(student_logits)
    site, _ = valid.nonzero(as_tuple=True)
    log_s, log_t = (torch.log_softmax(x[valid] / cfg.temperature, -1) for x in (student_logits, teacher_logits))
    rows = divergence_rows(log_s, log_t, cfg.spec) * cfg.temperature**2
    share = weight / valid.sum(1).clamp(min=1)
    total = (rows * share[site]).sum()
    counted = (weight * (valid.sum(1) > 0)).sum()
    guard = JsdGuard(cfg.spec, patience=1)
    if guard.active and float(counted) > 0:
        _observe(guard, float(total.detach() / counted) / cfg.temperature**2)
    return total, counted


def _observe(guard: JsdGuard, mean: float) -> None:
    try:
        guard.observe(mean)
    except LossError as error:
        raise LossError(f"{error}; {_SHIFTED}") from error


@torch.no_grad()
def ema_update(params: Iterable[Tensor], ema: Iterable[Tensor], decay: float) -> None:
    """ema <- decay x ema + (1 - decay) x params, in place, tensor by tensor; decay 1 keeps a frozen teacher."""
    if not 0 <= decay <= 1:
        raise ConfigError(f"the teacher's EMA decay is {decay}; it must lie in [0, 1]")
    for new, old in zip(params, ema, strict=True):
        if new.shape != old.shape:
            raise LossError(f"an averaged weight {tuple(old.shape)} does not fit its parameter {tuple(new.shape)}")
        old.lerp_(new.detach().to(old), 1 - decay)


def trust_region_mix(teacher_logprobs: Tensor, other_logprobs: Tensor, share: float) -> Tensor:
    """log of the normalised teacher^(1 - share) x other^share over the last dimension.

    It is the distribution that minimises (1 - share) KL(q || teacher) + share KL(q || other): a teacher that may move
    away from `other` (the frozen start, or the student) only so far. `HintDistillationLossFn(trust_region=share)` does
    the same with two signals.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the trust region's share is {share}; it must lie in [0, 1]")
    return torch.log_softmax((1 - share) * teacher_logprobs + share * other_logprobs, -1)


# -- the loss ----------------------------------------------------------------------------------------------------------


@dataclass
class HintInputs:
    """Chunks of one micro-batch. site_weight `[B]`: what each chunk of a site counts, its weight divided by its number
    of chunks; count: the sum of the weights of sites that have any; unhinted: number of sites whose teacher reads the
    student's own ids."""

    layout: ChunkLayout
    site_weight: Tensor
    blocks: tuple[Block, ...]
    count: float
    sites: int
    unhinted: int
    lanes: tuple[Lanes, ...] | None = None

    def to(self, device: torch.device | str) -> HintInputs:
        return to_device(self, device)


class HintDistillationLossFn(Loss[HintInputs]):
    """Divergence to a hinted teacher from hidden states, in row blocks.

    projection: of a teacher with another vocabulary (boundary KL and chunk likelihoods instead of a direct divergence).
    trust_region: weight of a second signal that is mixed into the teacher's in log space.

        global_batch = loss_fn.annotate(global_batch)         # chunks, before the batch is split
        counts = loss_fn.counts(global_batch)                 # reduce over data-parallel ranks
        inputs = loss_fn.prepare(microbatch, [teacher_row_start])
        loss, metrics = loss_fn.compute(hidden, head, [teacher_signal], inputs, counts)
    """

    tensor_parallel = True
    context_parallel = True

    def __init__(
        self,
        cfg: HintLossConfig | Mapping[str, Any] | None = None,
        *,
        projection: ProjectionLike | None = None,
        trust_region: float = 0.0,
        block_rows: int = 512,
    ) -> None:
        super().__init__()
        self.cfg, self.block_rows = resolve(HintLossConfig, cfg or {}), block_rows
        if not 0 <= trust_region <= 1:
            raise ConfigError(f"the trust region's share is {trust_region}; it must lie in [0, 1]")
        self.trust_region = trust_region
        self.num_teachers = 2 if trust_region else 1
        options = ObjectiveOptions(temperature=self.cfg.temperature, spec=self.cfg.spec)
        if projection is not None and self.cfg.spec.topk is not None:
            raise ConfigError("topk of the hint loss is for a teacher with the student's vocabulary; leave it out")
        self.objective: Objective = SameVocabulary(options) if projection is None else BoundaryKL(options, projection)
        self.guard = JsdGuard(self.cfg.spec, patience=self.cfg.jsd_patience)
        if projection is not None:
            self.guard.active = False

    def annotate(self, batch: Batch) -> Batch:
        """The batch with the chunks that carry loss, which its count and micro-batches then read."""
        return with_chunks(batch, [self._chunks(batch)])

    def _chunks(self, batch: Batch) -> ChunkLayout:
        return teacher_chunks(batch, 0, same_vocabulary=self.objective.vocab is None, allow_inexact=False)

    def counts(self, batch: Batch) -> Counts:
        """Local denominator `sites` of a global batch: the weights of the sites that have targets, float64."""
        return {"sites": _site_weights(batch, self._chunks(batch))[1]}

    def prepare(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None]) -> HintInputs:
        """Layout of one micro-batch, on the CPU. row_starts: where each row starts in the teacher's forward pass; of
        several signals only the first counts, since all read the same rows."""
        if not row_starts or row_starts[0] is None:
            raise LossError("the hint loss needs the teacher's own row starts; its sequences are longer by the hint")
        batch, start = mb.data_dict, mb.processed_inputs.row_start
        assert start is not None
        layout = self._chunks(batch).placed(start, row_starts[0])
        weight, count = _site_weights(batch, layout)
        counted = batch["sample_mask"].cpu() > 0
        unhinted = int((_unhinted(batch) & counted).sum())
        return self._laid_out(HintInputs(layout, weight, (), float(count), int(counted.sum()), unhinted))

    def shard(self, inputs: HintInputs, comm: Comm) -> HintInputs:
        """One rank's share of the chunks, each with its weight in the whole site; counts go with the first."""
        here = inputs.to("cpu")
        _, (layout,) = shard_layouts(TokenLayout.empty(), [here.layout], comm.rank, comm.size)
        mine = self._laid_out(replace(here, layout=layout))
        return mine if comm.rank == 0 else replace(mine, count=0.0, sites=0, unhinted=0)

    def _laid_out(self, inputs: HintInputs) -> HintInputs:
        tokens, layouts = TokenLayout.empty(), [inputs.layout]
        return replace(
            inputs,
            blocks=cut_blocks(tokens, layouts, self.block_rows),
            lanes=fast.plan_lanes(self.cfg.fast_path, [self.objective], tokens, layouts, None),
        )

    def compute(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[Signal], inputs: HintInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, already divided by the global count, and metrics as (sum, count).

        signals: the hinted teacher; with a trust region also the model that it must stay near to, on the same rows.
        """
        device = hidden_RH.device
        inputs = inputs.to(device)
        differing = self._check(hidden_RH, head, signals, inputs.layout)
        signals = [signal.on_shards(head.axis) for signal in signals]
        objective = self.objective.to(device)
        if objective.vocab is not None:
            objective.fit(head.vocab_size, signals[0].vocab_size or objective.vocab.teacher_size)
        count = counts["sites"].to(device, torch.float64).clamp(min=1e-9)
        mix = (1.0,) if len(signals) == 1 else (1 - self.trust_region, self.trust_region)
        teacher = TeacherRows(signals, [inputs.layout.teacher_rows_Q] * len(signals), mix)
        weight_C = inputs.site_weight[inputs.layout.sample_C]
        term = TeacherTerm("hint", objective, (1 / count).float(), 0, inputs.layout, teacher, weight_C)
        lanes = fast.usable_lanes(self.cfg.fast_path, inputs.lanes, hidden_RH, head, [term])
        run = BlockRun(head, inputs.blocks if lanes is None else lanes[0].blocks, 0.0, [term])
        run.id_mismatch_flags = differing
        run.raise_mismatch = lambda: self._compare_ids(signals, inputs.layout, defer=False)
        loss = fast.run_blocks(run, hidden_RH, lanes)
        zero = torch.zeros_like(count)
        metrics = Metrics({name: value for name, value in run.metrics.items() if name != "hint/kl"})
        total = run.metrics.get("hint/kl", (zero, zero))[0]
        metrics.add({"hint/loss": (total, zero + inputs.count), "hint/unhinted": (inputs.unhinted, inputs.sites)})
        verify(run, loss.detach(), hidden_RH)  # last: it waits for the device
        return loss, metrics

    def step_end(self, metrics: Mapping[str, Pair]) -> None:
        """Once per step, with metrics summed over micro-batches and ranks: stops the run where JSD says that the two
        sides do not belong together."""
        total, count = (float(x) for x in metrics.get("hint/loss", (0.0, 0.0)))
        if self.guard.active and count > 0:
            _observe(self.guard, total / count / self.cfg.temperature**2)

    def _compare_ids(self, signals: Sequence[Signal], layout: ChunkLayout, *, defer: bool) -> list[Tensor]:
        """Hold the ids that each signal scored against the layout's: an error, or flags where the answer can wait."""
        flags = [check_scored_ids(signal, layout, "hinted teacher", defer=defer) for signal in signals]
        return [flag for flag in flags if flag is not None]

    def _check(self, hidden_RH: Tensor, head: Head, signals: Sequence[Signal], layout: ChunkLayout) -> list[Tensor]:
        """What can be wrong with ids and sizes. On an accelerator the ids' comparison is read together with the
        finished loss, so that it costs no wait of its own."""
        expected = self.num_teachers
        if len(signals) != expected:
            raise LossError(
                f"the hint loss got {len(signals)} signals, expected {expected}: the hinted teacher"
                + (" and the model it must stay near to" if expected == 2 else "")
            )
        if layout.max_student_row >= hidden_RH.shape[0] or layout.max_student_id >= head.vocab_size:
            raise LossError(
                f"the layout needs row {layout.max_student_row} and id {layout.max_student_id}, but there are "
                f"{hidden_RH.shape[0]} hidden rows and {head.vocab_size} tokens; hidden states and batch do not fit"
            )
        differing = self._compare_ids(signals, layout, defer=hidden_RH.device.type != "cpu")
        divergence = self.cfg.spec
        by_student = divergence.topk is not None and divergence.chosen_by == "student"
        unserved = len(signals) > 1 or by_student or self.cfg.temperature != 1.0
        if unserved and any(signal.is_topk for signal in signals):
            raise LossError(
                "a top-k list serves neither a trust region nor a student-chosen top-k nor a temperature; use a "
                "live teacher"
            )
        return differing


def _site_weights(batch: Mapping[str, Any], layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """Weight `[B]` of each chunk of a site, so that its chunks add up to the site's weight; and the sum of all of them.

    A teacher that reads the student's own sequence, without any hint, has nothing to teach: such a site counts, and its
    loss is exactly 0, however the two forward passes round.
    """
    weight = batch["site_weight"].cpu().double() * (batch["sample_mask"].cpu() > 0)
    size = layout.chunks_B
    chunk = weight * ~_unhinted(batch) / size.clamp(min=1)
    return chunk.float(), (weight * (size > 0)).sum()


def _unhinted(batch: Mapping[str, Any]) -> Tensor:
    """bool `[B]`: both sides read the same ids."""
    student, teacher = batch["input_ids"].cpu(), batch["teacher_input_ids"].cpu()
    lengths, theirs = batch["input_lengths"].cpu(), batch["teacher_input_lengths"].cpu()
    width = min(student.shape[1], teacher.shape[1])
    differ = (student[:, :width] != teacher[:, :width]) & (torch.arange(width) < lengths[:, None])
    same: Tensor = (lengths == theirs) & ~differ.any(1)
    return same
