"""The hint channel: the student moves towards what a teacher that reads a hint says about the same target tokens.

Batches come from `ComposerBatch.channel("hint")`: one row per failed call, target tokens as aligned chunks. The
divergence is averaged within a target message, then over targets by their weights; a target is never split by its
length.

The teacher is usually the student itself, frozen (its start or an average of its past, `ema_update`) and hinted. Two of
them mixed in log space (`trust_region`) keep it near to the start: what is in proportion to teacher^(1 - share) x
other^share minimises (1 - share) KL(q || teacher) + share KL(q || other).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from limbeck.config import resolve
from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, LossError
from limbeck.losses import fast
from limbeck.losses.blocks import BlockRun, TeacherTerm, cut_blocks, verify
from limbeck.losses.chunk_loss import BlockInputs, ChunkLoss
from limbeck.losses.contract import Batch, Counts
from limbeck.losses.divergences import ChosenBy, Direction, DivergenceSpec, JsdGuard
from limbeck.losses.fast import FastPath
from limbeck.losses.objectives.base import Objective
from limbeck.losses.objectives.boundary_kl import BoundaryKL
from limbeck.losses.objectives.config import ComparesBySpec
from limbeck.losses.objectives.same_vocabulary import SameVocabulary
from limbeck.losses.signals import Head, TeacherOutput, TeacherRows
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.utils.metrics import Metrics, Pair

SelfTeacherKind = Literal["frozen", "ema", "trust_region", "live"]

_SHIFTED = (
    "hinted teacher and student read the same target tokens, so their predictions cannot be disjoint; the rows of one "
    "side are shifted: gather logits at *_pred_pos (one before the token), not at *_response_idx"
)


class HintLossConfig(ComparesBySpec):
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

    @property
    def spec(self) -> DivergenceSpec:
        return DivergenceSpec(
            self.divergence, self.jsd_beta, self.jsd_rescale, self.entry_clip, self.topk, self.topk_by
        )


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


@dataclass(kw_only=True)
class HintInputs(BlockInputs):
    """Chunks of one micro-batch. chunk_weight_B: what each chunk of a target counts, its weight divided by its number
    of chunks; count: the sum of the weights of targets that have any; unhinted: number of targets whose teacher reads
    the student's own ids."""

    chunk_weight_B: Tensor
    count: float
    targets: int
    unhinted: int

    @property
    def layout(self) -> ChunkLayout:
        return self.layouts[0]


class HintDistillationLossFn(ChunkLoss[HintInputs]):
    """Divergence to a hinted teacher from hidden states, in row blocks.

    projection: of a teacher with another vocabulary (boundary KL and chunk likelihoods instead of a direct divergence).
    trust_region: weight of a second signal that is mixed into the teacher's in log space.

        global_batch = loss_fn.prepare_batch(global_batch)  # chunks, before the batch is split
        counts = loss_fn.denominators(global_batch)  # reduce over data-parallel ranks
        inputs = loss_fn.build_layout(microbatch, [teacher_row_start])
        loss, metrics = loss_fn.compute_loss(hidden, head, [teacher_signal], inputs, counts)
    """

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
        if projection is not None and self.cfg.spec.topk is not None:
            raise ConfigError("topk of the hint loss is for a teacher with the student's vocabulary; leave it out")
        self.objective = self._objective(projection)
        self.guard = JsdGuard(self.cfg.spec, patience=self.cfg.jsd_patience)
        if projection is not None:
            # boundary and chunk terms add up, so their sum has not the maximum of one JSD
            self.guard.active = False

    def _objective(self, projection: ProjectionLike | None) -> Objective:
        cfg = self.cfg
        keys = {name: getattr(cfg, name) for name in ("jsd_beta", "jsd_rescale", "entry_clip")}
        keys["direction"] = cfg.divergence
        if projection is not None:
            return BoundaryKL(keys, projection, temperature=cfg.temperature)
        keys |= {"topk": cfg.topk, "topk_by": cfg.topk_by}
        return SameVocabulary(keys, temperature=cfg.temperature)

    def same_vocabulary(self, batch: Batch) -> list[bool]:
        return [self.objective.vocab is None]

    def denominators(self, batch: Batch) -> Counts:
        """Local denominator `sites` of a global batch: the weights of the targets that have chunks, float64."""
        (layout,) = self.select_chunks(batch)
        return {"sites": _target_weights(batch, layout)[1]}

    def build_layout(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None]) -> HintInputs:
        """See `ChunkLoss.build_layout`; several signals read the same rows, so the first's row starts count."""
        if not row_starts or row_starts[0] is None:
            raise LossError("the hint loss needs the teacher's own row starts; its sequences are longer by the hint")
        return super().build_layout(mb, row_starts)

    def make_inputs(self, batch: Batch, row_start_B: Tensor, layouts: list[ChunkLayout]) -> HintInputs:
        weight, count = _target_weights(batch, layouts[0])
        counted = batch["sample_mask"].cpu() > 0
        return HintInputs(
            **self._rows(layouts),
            chunk_weight_B=weight,
            count=float(count),
            targets=int(counted.sum()),
            unhinted=int((_unhinted(batch) & counted).sum()),
        )

    def make_share(self, whole: HintInputs, tokens: TokenLayout, layouts: list[ChunkLayout], comm: Comm) -> HintInputs:
        """Each chunk keeps its weight in the whole target; counts go with the first rank."""
        mine = replace(whole, **self._rows(layouts))
        return mine if comm.rank == 0 else replace(mine, count=0.0, targets=0, unhinted=0)

    def _rows(self, layouts: list[ChunkLayout]) -> dict[str, Any]:
        tokens = TokenLayout.empty()
        return {
            "tokens": tokens,
            "layouts": layouts,
            "cut": partial(cut_blocks, tokens, layouts, self.block_rows),
            "orders": fast.plan_orders(self.cfg.fast_path, [self.objective], tokens, layouts, None),
        }

    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: HintInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, already divided by the global count, and metrics as (sum, count).

        signals: the hinted teacher; with a trust region also the model that it must stay near to, on the same rows.
        """
        device = hidden_RH.device
        inputs = inputs.to(device)
        differing = self.check(hidden_RH, head, signals, inputs, defer=device.type != "cpu")
        signals = [signal.on_shards(head.axis) for signal in signals]
        objective = self.objective.to(device)
        if objective.vocab is not None:
            objective.fit(head.vocab_size, signals[0].vocab_size or objective.vocab.teacher_size)
        count = counts["sites"].to(device, torch.float64).clamp(min=1e-9)
        mix = (1.0,) if len(signals) == 1 else (1 - self.trust_region, self.trust_region)
        teacher = TeacherRows(signals, [inputs.layout.teacher_rows_Q] * len(signals), mix)
        weight_C = inputs.chunk_weight_B[inputs.layout.sample_C]
        term = TeacherTerm("hint", objective, (1 / count).float(), 0, inputs.layout, teacher, weight_C)
        orders = fast.usable_orders(self.cfg.fast_path, inputs.orders, hidden_RH, head, [term])
        run = BlockRun(head, inputs.blocks if orders is None else orders[0].blocks, 0.0, [term])
        run.id_mismatch_flags = differing
        run.raise_mismatch = lambda: self.compare_ids(signals, inputs, defer=False)
        loss = fast.run_blocks(run, hidden_RH, orders)
        zero = torch.zeros_like(count)
        metrics = Metrics({name: value for name, value in run.metrics.items() if name != "hint/kl"})
        total = run.metrics.get("hint/kl", (zero, zero))[0]
        metrics.add({"hint/loss": (total, zero + inputs.count), "hint/unhinted": (inputs.unhinted, inputs.targets)})
        verify(run, loss.detach(), hidden_RH)  # last: it waits for the device
        return loss, metrics

    def step_end(self, metrics: Mapping[str, Pair]) -> None:
        """Once per step, with metrics summed over micro-batches and ranks: stops the run where JSD says that the two
        sides do not belong together."""
        total, count = (float(x) for x in metrics.get("hint/loss", (0.0, 0.0)))
        if self.guard.active and count > 0:
            _observe(self.guard, total / count / self.cfg.temperature**2)

    def check(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: HintInputs, *, defer: bool
    ) -> list[Tensor]:
        differing = super().check(hidden_RH, head, signals, inputs, defer=defer)
        divergence = self.cfg.spec
        by_student = divergence.topk is not None and divergence.chosen_by == "student"
        unserved = len(signals) > 1 or by_student or self.cfg.temperature != 1.0
        if unserved and any(signal.is_topk for signal in signals):
            raise LossError(
                "a top-k list serves neither a trust region nor a student-chosen top-k nor a temperature; use a "
                "live teacher"
            )
        return differing


def _target_weights(batch: Mapping[str, Any], layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """Weight `[B]` of each chunk of a target, so that its chunks add up to the target's weight; and the sum of all.

    A teacher that reads the student's own sequence, without any hint, has nothing to teach: such a target counts, and
    its loss is exactly 0, however the two forward passes round.
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
