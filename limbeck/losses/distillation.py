"""The distillation loss: cross-entropy plus one divergence per teacher, over any pair of vocabularies.

    loss_fn = CrossTokenizerDistillationLossFn({"mode": "tree_kl"}, projections=[projection])
    global_batch = loss_fn.annotate(global_batch)             # chunks, before the batch is split
    counts = loss_fn.counts(global_batch)                     # reduce over data-parallel ranks
    for microbatch in ...:
        inputs = loss_fn.prepare(microbatch, [teacher_row_start])
        loss, metrics = loss_fn.compute(hidden, head, [signal], inputs, counts)
        loss.backward()
    loss_fn.step_end(reduced_metrics)

Losses are sums divided by counts of the *global* batch, so they add up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from limbeck.config import resolve
from limbeck.data.layout import (
    ChunkLayout,
    TokenLayout,
    count_chunks,
    count_tokens,
    padded_row_start,
    teacher_chunks,
    teacher_ids_of,
    token_layout,
    with_chunks,
)
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import ConfigError, LossError
from limbeck.losses import fast
from limbeck.losses.blocks import Block, BlockRun, TeacherTerm, TokenClasses, cut_blocks, shard_layouts, verify
from limbeck.losses.contract import Batch, Counts, Loss
from limbeck.losses.divergences import ChosenBy, Direction, DivergenceSpec, JsdGuard
from limbeck.losses.fast import FastPath
from limbeck.losses.fast.order import Lanes
from limbeck.losses.objectives import OBJECTIVES, Objective, ObjectiveOptions, SameVocabulary
from limbeck.losses.objectives.base import ChunkTerms, Condition, Gate
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.probe import Probe, strict_coverage
from limbeck.losses.signals import Head, LogitsSignal, Signal, TeacherRows, check_scored_ids
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.losses.weights import DynamicScale, Scoring, sample_scores, sample_weights
from limbeck.projection import Projection
from limbeck.tokens.classes import TEXT_CLASSES
from limbeck.utils.metrics import Metrics, Pair

LossMode = Literal[
    "tree_kl",
    "boundary_kl",
    "p_kl_norm",
    "alm",
    "uld",
    "p_kl",
    "gold",
    "h_kl",
    "strict",
    "simct",
    "escd",
    "bpm",
    "partition",
]
Combination = Literal["sum", "averaged_logits", "select_teacher"]
ScalingSource = Literal["running", "first_pass"]

PLAIN_BLOCK_ROWS = 512
"""Rows of a block on the plain path, whose temporaries are float32 and several times the logits."""


class CrossTokenizerDistillationLossConfig(BaseModel):
    """Settings of `CrossTokenizerDistillationLossFn`.

    The published flags `gold_loss` and `xtoken_loss`, where given, select a published objective (false, -: P-KL; true,
    false: gold; true, true: H-KL); otherwise `mode` counts.

    >>> CrossTokenizerDistillationLossConfig(gold_loss=True, xtoken_loss=True).mode
    'h_kl'

    Where no factor of cross-entropy is given, it is the mode's; without distillation it is 1. A run with a pretrained
    student takes `for_pretrained`, one with several teachers `for_several`.

    >>> [CrossTokenizerDistillationLossConfig(mode=mode).ce_loss_scale for mode in ("tree_kl", "boundary_kl")]
    [0.3, 1.0]
    """

    model_config = ConfigDict(extra="forbid")

    mode: LossMode = Field("tree_kl", description="which loss compares the two models")
    projection_matrix_path: str | list[str | None] | None = Field(
        None, description="stored projection, or one per teacher (null: the teacher shares the student's vocabulary)"
    )
    gold_loss: bool | None = Field(None, description="published flag: common-set KL plus sorted L1")
    xtoken_loss: bool | None = Field(None, description="published flag: with gold_loss, the relaxed common set (H-KL)")
    temperature: float = Field(1.0, description="divides both sides' logits; losses are multiplied by its square")
    vocab_topk: int = Field(8192, description="teacher columns of p_kl (per micro-batch) and p_kl_norm (per chunk)")
    uncommon_topk: int = Field(8192, description="probabilities that gold, h_kl and uld sort")
    reverse_kl: bool = Field(False, description="published flag: the same as direction='reverse'")
    exact_token_match_only: bool = Field(False, description="published objectives: leave out chunks whose bytes differ")
    kl_loss_weight: float = Field(1.0, description="factor of the distillation loss")
    ce_loss_scale: float = Field(
        0.3, description="factor of cross-entropy; default: .3 with tree_kl and a student from scratch, else 1"
    )
    dynamic_loss_scaling: bool = Field(False, description="scale distillation to cross-entropy, one ratio per step")
    student_vocab_size: int | None = Field(None, description="student ids; default: as the head says")
    teacher_vocab_size: int | list[int] | None = Field(None, description="teacher ids, or one number per teacher")
    allow_inexact: bool = Field(False, description="other objectives: keep chunks whose bytes differ")
    chunk_weight: float = Field(1.0, description="boundary_kl, tree_kl, partition: factor of the chunk term")
    chunk_terms: ChunkTerms = Field(
        "open",
        description="tree_kl: which chunks have it: open, those that no tree spells to the end; all of several tokens",
    )
    root_weight: float = Field(
        1.0, description="tree_kl: factor of the comparison at a chunk's start; partition: in chunks of several tokens"
    )
    inner_student_weight: float = Field(1.0, description="tree_kl: factor of the parts inside teacher tokens")
    inner_teacher_weight: float = Field(1.0, description="tree_kl: factor of the parts inside student tokens")
    terminal_weight: float = Field(0.0, description="tree_kl: factor of the parts where a spelled token has ended")
    first_weight: float = Field(0.0, description="tree_kl: factor of the first level inside cells deeper than one link")
    condition: Condition = Field(
        "none",
        description="tree_kl: allow for what only one side's last token tells it: counted, as often as in some of the "
        "training data; cheap (at roots) and exact, by the merges of byte-pair tokenizers",
    )
    gate: Gate = Field(
        "none",
        description="count a chunk by the teacher's advantage on the realised text: hard, above 0; soft; default: soft "
        "with tree_kl and a pretrained student where ce_loss_scale is not given either",
    )
    strict_topk: int | None = Field(16, description="strict: the student's most likely shared tokens; null: all shared")
    strict_rest: bool = Field(False, description="strict: a rest bucket instead of normalising over those tokens")
    span_weight: float = Field(0.0, description="strict: factor of the squared log-ratio of all other chunks")
    mask_blanks: bool = Field(True, description="bpm: leave out student tokens that are nothing but spaces and tabs")
    direction: Direction = Field(
        "forward", description="forward: KL(teacher||student); reverse, the default of strict and simct; jsd, of bpm"
    )
    jsd_beta: float = Field(0.5, description="M = (1 - beta) student + beta teacher; 0: forward, 1: reverse")
    jsd_rescale: bool = Field(False, description="divide JSD by beta (1 - beta); needed within .05 of the ends")
    jsd_patience: int = Field(20, description="steps in a row with disjoint models before the run is stopped")
    entry_clip: float | None = Field(None, description="most that one vocabulary entry may add")
    topk: int | None = Field(None, description="same-vocabulary teachers: tokens kept besides a tail bucket")
    topk_by: ChosenBy = Field("teacher", description="whose most likely tokens those are")
    teacher_combination: Combination = Field("sum", description="how several teachers are combined")
    teacher_weights: list[float] | None = Field(None, description="static weights; default: equal, summing to 1")
    teacher_scoring: Scoring = Field(
        "static",
        description="per-sample weights softmax(alpha * score) by this score; a run with several teachers that says "
        "nothing of how they are combined takes ce",
    )
    scoring_alpha: float = Field(1.0, description="sharpness of scored weights")
    dynamic_scaling_source: ScalingSource = Field("running", description="where the step's ratio comes from")
    dynamic_scaling_decay: float = Field(0.9, description="decay of the running estimate")
    learnable_projection: bool = Field(False, description="train the projection's weights with the student")
    block_rows: int | None = Field(
        None, description="rows that pass through the heads at a time; default: 512, with kernels as memory allows"
    )
    probe_every: int = Field(
        0,
        description="every so many steps, in plain torch: one-to-one coverage, shared mass, and cosines between the "
        "gradients of the loss's parts; 0: never",
    )
    fast_path: FastPath = Field("auto", description="auto: kernels on CUDA where they know the mode; off; force")

    @model_validator(mode="after")
    def _consistent(self) -> CrossTokenizerDistillationLossConfig:
        self._settle_mode()
        scale = self._default_ce_scale(taught=self.kl_loss_weight > 0)
        if "ce_loss_scale" not in self.model_fields_set and self.ce_loss_scale != scale:
            self.ce_loss_scale = scale
        for name in ("temperature", "vocab_topk", "uncommon_topk", "strict_topk", "block_rows", "jsd_patience"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        trees = ("root_weight", "inner_student_weight", "inner_teacher_weight", "terminal_weight", "first_weight")
        for name in ("kl_loss_weight", "ce_loss_scale", "chunk_weight", "span_weight", *trees):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.probe_every < 0:
            raise ValueError(f"probe_every is {self.probe_every}; it must be a number of steps, or 0 for never")
        if not 0 <= self.dynamic_scaling_decay < 1:
            raise ValueError(f"dynamic_scaling_decay is {self.dynamic_scaling_decay}; it must lie in [0, 1)")
        if self.reverse_kl:
            if self.direction == "jsd":
                raise ValueError("reverse_kl=true and direction='jsd' contradict each other; give one of them")
            self.direction = "reverse"
        elif "direction" not in self.model_fields_set and OBJECTIVES[self.mode].default_direction != "forward":
            self.direction = OBJECTIVES[self.mode].default_direction
        try:
            kind = self.spec.kind  # building it checks the divergence's own rules
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.as_published and kind == "jsd":
            raise ValueError(f"mode {self.mode!r} has no JSD form; use direction forward or reverse")
        self._check_tree_settings()
        if self.teacher_weights is not None:
            if any(w < 0 for w in self.teacher_weights) or not sum(self.teacher_weights) > 0:
                raise ValueError(f"teacher_weights are {self.teacher_weights}; none may be negative, one must count")
            if self.teacher_scoring != "static" or self.teacher_combination == "select_teacher":
                raise ValueError("teacher_weights are static; leave them out where teachers are scored or selected")
        return self

    def _check_tree_settings(self) -> None:
        if self.mode != "tree_kl" and self.condition != "none":
            raise ValueError(f"condition is {self.condition!r} but mode {self.mode!r} has none; use mode tree_kl")
        if self.mode == "tree_kl" and self.learnable_projection:
            raise ValueError(
                "mode 'tree_kl' does not read the projection's weights; leave learnable_projection out, or use mode "
                "boundary_kl"
            )
        if self.condition == "none":
            return
        if self.first_weight:
            raise ValueError(
                f"first_weight is {self.first_weight}: the first level is no event that both sides share, so it does "
                f"not go with condition {self.condition!r}; set one of them to 0 or none"
            )
        if self.temperature != 1.0:
            raise ValueError(
                f"condition {self.condition!r} needs temperature 1, not {self.temperature}: what one side's last token "
                "tells it holds of the models' own probabilities alone"
            )
        if self.condition != "counted" and self.ce_loss_scale == 0 and not self.dynamic_loss_scaling:
            raise ValueError(
                f"condition {self.condition!r} leaves the excluded tokens free, so it needs cross-entropy beside it; "
                "set ce_loss_scale above 0"
            )

    def _settle_mode(self) -> None:
        """Put the mode that the published flags name, if any, into `mode`."""
        if self.gold_loss is None and self.xtoken_loss is None:
            return
        if self.xtoken_loss and not self.gold_loss:
            raise ValueError("xtoken_loss=true needs gold_loss=true (together they select H-KL); set both or neither")
        flagged: LossMode = "p_kl" if not self.gold_loss else "h_kl" if self.xtoken_loss else "gold"
        if "mode" in self.model_fields_set and self.mode != flagged:
            raise ValueError(f"mode is {self.mode!r} but gold_loss and xtoken_loss select {flagged!r}; give only one")
        self.mode = flagged

    def _default_ce_scale(self, *, taught: bool) -> float:
        """Factor of cross-entropy where none is given."""
        return OBJECTIVES[self.mode].default_ce_scale if taught else 1.0

    def without_teachers(self) -> Self:
        """The same where nobody teaches: the default factor of cross-entropy is 1 then, whatever the mode."""
        if "ce_loss_scale" in self.model_fields_set:
            return self
        return self.model_copy(update={"ce_loss_scale": self._default_ce_scale(taught=False)})

    def for_pretrained(self) -> Self:
        """The same for a student that has learnt from other text before. A teacher of another family is not ahead of it
        on every token, so beside `tree_kl` cross-entropy counts whole, and a soft gate chooses among the chunks, where
        the run file names neither; a factor that it names was chosen without a gate."""
        given = self.model_fields_set
        own = OBJECTIVES[self.mode].gates_pretrained and self.kl_loss_weight > 0 and self.temperature == 1.0
        if not own or self.dynamic_loss_scaling or "ce_loss_scale" in given:
            return self
        update = {"ce_loss_scale": 1.0} if "gate" in given else {"ce_loss_scale": 1.0, "gate": "soft"}
        return self.model_copy(update=update)

    def for_several(self) -> Self:
        """The same for several teachers: each text is weighed towards those that know it, by their cross-entropy, where
        the run file does not say how they are combined."""
        said = {"teacher_combination", "teacher_weights", "teacher_scoring"} & self.model_fields_set
        return self if said else self.model_copy(update={"teacher_scoring": "ce"})

    @property
    def as_published(self) -> bool:
        """Whether the objective is one of those that are kept as they were published."""
        return OBJECTIVES[self.mode].as_published

    @property
    def keeps_inexact(self) -> bool:
        """Whether chunks whose bytes differ take part: the published flag rules the published objectives."""
        return not self.exact_token_match_only if self.as_published else self.allow_inexact

    @property
    def spec(self) -> DivergenceSpec:
        return DivergenceSpec(self.direction, self.jsd_beta, self.jsd_rescale, self.entry_clip, self.topk, self.topk_by)

    @property
    def options(self) -> ObjectiveOptions:
        return ObjectiveOptions(
            temperature=self.temperature,
            spec=self.spec,
            chunk_weight=self.chunk_weight,
            chunk_terms=self.chunk_terms,
            vocab_topk=self.vocab_topk,
            uncommon_topk=self.uncommon_topk,
            learnable=self.learnable_projection,
            root_weight=self.root_weight,
            inner_student_weight=self.inner_student_weight,
            inner_teacher_weight=self.inner_teacher_weight,
            terminal_weight=self.terminal_weight,
            first_weight=self.first_weight,
            condition=self.condition,
            gate=self.gate,
            strict_topk=self.strict_topk,
            strict_rest=self.strict_rest,
            span_weight=self.span_weight,
            mask_blanks=self.mask_blanks,
        )


@dataclass
class LossInputs:
    """Which rows of a micro-batch carry which loss; built on the CPU, moved with `to`."""

    tokens: TokenLayout
    layouts: list[ChunkLayout]
    cut: Callable[[], tuple[Block, ...]]  # their blocks, on the CPU; the kernels have blocks of their own
    num_samples: int
    num_tokens: float  # sum of the cross-entropy weights
    lanes: tuple[Lanes, ...] | None = None  # the same rows in the order of the kernels, where they may be used
    comm: Comm = field(default_factory=Comm.alone)  # ranks that have the rest of the micro-batch

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the plain path, where the layouts are."""
        return to_device(self.cut(), self.tokens.rows_E.device)

    def to(self, device: torch.device | str) -> LossInputs:
        return to_device(self, device)


class CrossTokenizerDistillationLossFn(Loss[LossInputs]):
    """Cross-entropy plus distillation from one or several teachers.

    cfg: a `CrossTokenizerDistillationLossConfig` or a mapping of its fields. projections: one per teacher; None for a
    teacher that shares the student's vocabulary (direct divergence per position). A module: it owns the objectives with
    their learnable projections (parameters), the running estimate of dynamic scaling and the misalignment guard.
    """

    tensor_parallel = True
    context_parallel = True
    class_of_id: Tensor | None

    def __init__(
        self,
        cfg: CrossTokenizerDistillationLossConfig | Mapping[str, Any] | None = None,
        *,
        projections: Sequence[ProjectionLike | None] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(cfg, CrossTokenizerDistillationLossConfig):
            cfg = resolve(CrossTokenizerDistillationLossConfig, cfg or {})
        found = _load_projections(cfg.projection_matrix_path) if projections is None else list(projections)
        self.cfg = cfg = cfg if found else cfg.without_teachers()
        sizes = cfg.teacher_vocab_size
        per_teacher = list(sizes) if isinstance(sizes, list) else [sizes] * len(found)
        weights = cfg.teacher_weights or [1 / max(len(found), 1)] * len(found)
        if len(per_teacher) != len(found) or len(weights) != len(found):
            raise ConfigError(
                f"{len(found)} teachers but {len(weights)} teacher_weights and {len(per_teacher)} teacher_vocab_size; "
                "give one each"
            )
        if cfg.teacher_combination == "averaged_logits" and len({p and p.teacher_fingerprint for p in found}) > 1:
            raise ConfigError(
                "teacher_combination 'averaged_logits' needs teachers of one vocabulary, but theirs differ; use 'sum'"
            )
        self.teachers = nn.ModuleList(
            SameVocabulary(cfg.options) if p is None else OBJECTIVES[cfg.mode](cfg.options, p, size)
            for p, size in zip(found, per_teacher, strict=True)
        )
        self.num_teachers = len(found)
        self.needs_first_pass = cfg.dynamic_loss_scaling and cfg.dynamic_scaling_source == "first_pass"
        self.weights = [float(w) for w in weights]
        self.block_rows = cfg.block_rows or PLAIN_BLOCK_ROWS
        self._steps = 0  # of this process
        self.vocab_shards = 1  # ranks among which the student's vocabulary is divided; its head tells
        self.register_buffer("class_of_id", None, persistent=False)
        self.scale = DynamicScale(cfg.dynamic_scaling_decay)
        self.guard = JsdGuard(cfg.spec, patience=cfg.jsd_patience)

    def count_by_class(self, class_of_id: np.ndarray) -> None:
        """Passes without gradient count cross-entropy and distillation by class of token, too (`ce_loss/digits`,
        `teacher_0/kl_loss/digits`; a chunk by its first token), and distillation by kind of chunk
        (`teacher_0/kl_loss/one_to_many`). class_of_id: `limbeck.tokens.classes.class_table`."""
        self.class_of_id = torch.from_numpy(class_of_id.astype(np.int64))

    @property
    def objectives(self) -> list[Objective]:
        """One per teacher."""
        return list(self.teachers)  # type: ignore[arg-type]

    @property
    def counts_ends(self) -> bool:
        """Whether the loss goes by texts that `count_ends` must be shown first."""
        return self.cfg.condition == "counted" and any(objective.vocab is not None for objective in self.objectives)

    def count_ends(self, texts: Sequence[Sequence[ChunkLayout]]) -> None:
        """See `TreeKL.count_ends`; texts: each with the chunks of every teacher, as `chunks` gives them."""
        for i, objective in enumerate(self.objectives):
            if isinstance(objective, TreeKL):
                objective.count_ends(own[i] for own in texts)

    @property
    def _reads_next_row(self) -> bool:
        return any(objective.reads_next_row for objective in self.objectives)

    # ---- counting and layouts (CPU) ----

    def annotate(self, batch: Batch) -> Batch:
        """The batch with each teacher's chunks that carry loss, which its counts and micro-batches then read. What its
        collator found out about conditions is learnt and taken out."""
        out = with_chunks(batch, self.chunks(batch))
        for i, objective in enumerate(self.objectives):
            for facts in out.pop(f"conditions_{i}", ()):
                if objective.conditions is not None:
                    objective.conditions.learn(facts)
        return out

    def chunks(self, batch: Batch) -> list[ChunkLayout]:
        """Of each teacher, those that carry loss."""
        inexact = self.cfg.keeps_inexact
        return [
            teacher_chunks(batch, i, same_vocabulary=objective.vocab is None, allow_inexact=inexact)
            for i, objective in enumerate(self.objectives)
        ]

    def counts(self, batch: Batch) -> Counts:
        """Local denominators of a global batch: `tokens` and `chunks_i` per teacher, float64 scalars to be summed
        over data-parallel ranks before the first micro-batch."""
        out = {"tokens": count_tokens(batch["input_lengths"], batch["token_mask"], batch["sample_mask"])}
        return out | {f"chunks_{i}": count_chunks(batch, i, own) for i, own in enumerate(self.chunks(batch))}

    def prepare(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None]) -> LossInputs:
        """Layouts and blocks of one micro-batch, on the CPU. row_starts: per teacher the flat row at which each sample
        starts in that teacher's forward pass, `[B]`; None: as in the student's."""
        assert mb.processed_inputs.row_start is not None
        inputs = self._inputs(mb.data_dict, mb.processed_inputs.row_start, row_starts)
        # sent off now, they arrive while the models still work
        device = self.scale.distillation.device
        return inputs.to(device) if device.type == "cuda" else inputs

    def _inputs(self, batch: Batch, start: Tensor, row_starts: Sequence[Tensor | None]) -> LossInputs:
        if len(row_starts) != self.num_teachers:
            raise LossError(f"{len(row_starts)} teacher row starts for {self.num_teachers} teachers; give one each")
        layouts = [
            layout.placed(start, start if theirs is None else theirs)
            for layout, theirs in zip(self.chunks(batch), row_starts, strict=True)
        ]
        return self._laid_out(token_layout(batch, start), layouts, int(start.numel()))

    def shard(self, inputs: LossInputs, comm: Comm) -> LossInputs:
        """One rank's share of a micro-batch that all ranks of `comm` have prepared: whole chunks, about as many rows as
        any other's. The row behind a chunk may be another rank's, too: all hidden states are here, and their gradients
        are summed over the ranks."""
        here = inputs.to("cpu")
        tokens, layouts = shard_layouts(here.tokens, here.layouts, comm.rank, comm.size)
        return replace(self._laid_out(tokens, layouts, inputs.num_samples), comm=comm)

    def _laid_out(self, tokens: TokenLayout, layouts: list[ChunkLayout], num_samples: int) -> LossInputs:
        return LossInputs(
            tokens,
            layouts,
            partial(cut_blocks, tokens, layouts, self.block_rows, next_rows=self._reads_next_row),
            num_samples,
            float(tokens.weight_E.double().sum()),
            fast.plan_lanes(
                self.cfg.fast_path, self.objectives, tokens, layouts, self.cfg.block_rows, self.vocab_shards
            ),
        )

    # ---- the loss ----

    def compute(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[Signal], inputs: LossInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, already divided by the global `counts`; differentiable with respect to hidden_RH,
        the head's parameters and learnable projections.

        Returns (loss, metrics). `loss`, `tokens` and `chunks` are counted by this micro-batch's part of the batch, so
        sum / count is per batch.
        """
        device = hidden_RH.device
        if self.scale.distillation.device != device:
            self.to(device)
        inputs = inputs.to(device)
        differing = self._check(hidden_RH, head, signals, inputs)
        distil, ce = self._factors()
        signals = [signal.on_shards(head.axis) for signal in signals]
        terms = self._terms(signals, inputs, head)
        for term in terms:
            term.factor = _over(distil * float(term.factor), counts[f"chunks_{term.index}"])
        self.vocab_shards = head.axis.comm.size  # of micro-batches that are planned from now on
        probing = self._probing
        lanes = None if probing else fast.usable_lanes(self.cfg.fast_path, inputs.lanes, hidden_RH, head, terms)
        if lanes is None:
            for term in terms:
                term.teacher.vocab_ids_K = term.objective.choose_ids(term.teacher, self.block_rows, inputs.comm)
        blocks = inputs.blocks if lanes is None else lanes[0].blocks
        run = BlockRun(head, blocks, _over(ce, counts["tokens"]), terms, comm=inputs.comm)
        if self.class_of_id is not None and not torch.is_grad_enabled():
            run.classes = TokenClasses(TEXT_CLASSES, self.class_of_id)
        run.probe = Probe() if probing else None
        run.id_mismatch_flags = differing
        run.raise_mismatch = lambda: self._compare_ids(signals, inputs, defer=False)
        loss = fast.run_blocks(run, hidden_RH, lanes)
        if run.probe is not None:
            run.add("", run.probe.cosines())
            for i, layout in enumerate(inputs.layouts):
                run.add(f"teacher_{i}/", strict_coverage(layout))
        metrics = self._metrics(run, loss.detach(), inputs, counts)
        verify(run, loss.detach(), hidden_RH)  # last: it waits for the device
        return loss, metrics

    @property
    def _probing(self) -> bool:
        """Whether this step's passes with gradients are measured."""
        every = self.cfg.probe_every
        return every > 0 and self._steps % every == 0 and torch.is_grad_enabled()

    def _factors(self) -> tuple[float, float]:
        """Of distillation and of cross-entropy."""
        if self.cfg.dynamic_loss_scaling:
            return self.scale.ratio(), 1.0
        return self.cfg.kl_loss_weight, self.cfg.ce_loss_scale

    def _compare_ids(self, signals: Sequence[Signal], inputs: LossInputs, *, defer: bool) -> list[Tensor]:
        """Hold the ids that each signal scored against the layout's: an error, or flags where the answer can wait."""
        pairs = enumerate(zip(signals, inputs.layouts, strict=True))
        flags = [check_scored_ids(s, layout, f"teacher_{i}", defer=defer) for i, (s, layout) in pairs]
        return [flag for flag in flags if flag is not None]

    def _check(self, hidden_RH: Tensor, head: Head, signals: Sequence[Signal], inputs: LossInputs) -> list[Tensor]:
        """Everything that can be wrong with ids and sizes, before any logit is computed. On an accelerator the ids'
        comparison is read together with the finished loss, so that it costs no wait of its own."""
        cfg = self.cfg
        if len(signals) != self.num_teachers or len(inputs.layouts) != self.num_teachers:
            raise LossError(f"{len(signals)} teacher signals for {self.num_teachers} teachers; give one each")
        rows = [inputs.tokens.max_row, *(layout.max_student_row for layout in inputs.layouts)]
        if max(rows) >= hidden_RH.shape[0]:
            raise LossError(f"student: the layout needs row {max(rows)} but there are {hidden_RH.shape[0]} hidden rows")
        ids = [inputs.tokens.max_id, *(layout.max_student_id for layout in inputs.layouts)]
        if max(ids) >= head.vocab_size:
            raise LossError(
                f"student: token id {max(ids)} is out of range for a head of {head.vocab_size} tokens; the batch was "
                "tokenized with another tokenizer"
            )
        if cfg.student_vocab_size not in (None, head.vocab_size):
            raise LossError(f"student_vocab_size is {cfg.student_vocab_size} but the head has {head.vocab_size} tokens")
        differing = self._compare_ids(signals, inputs, defer=hidden_RH.device.type != "cpu")
        for i, (signal, objective) in enumerate(zip(signals, self.objectives, strict=True)):
            name = f"teacher_{i}"
            if not signal.is_topk:
                continue
            if objective.needs_logits:
                raise LossError(f"{name}: mode {cfg.mode!r} needs full logits, not a top-k list; use boundary_kl")
            if cfg.temperature != 1.0:
                raise LossError(
                    f"{name}: temperature is {cfg.temperature} but a top-k list is stored at 1; use a live teacher"
                )
            if objective.vocab is None and cfg.topk_by == "student" and cfg.topk is not None:
                raise LossError(f"{name}: topk_by='student' needs full logits, not a top-k list; use topk_by='teacher'")
        return differing

    def _terms(self, signals: Sequence[Signal], inputs: LossInputs, head: Head) -> list[TeacherTerm]:
        """One term per teacher, or one for all where logits are averaged; `factor` still without denominators."""
        cfg, student_size = self.cfg, head.vocab_size
        terms = []
        for i, (signal, objective, layout) in enumerate(zip(signals, self.objectives, inputs.layouts, strict=True)):
            same = objective.vocab is None
            size = signal.vocab_size or (student_size if objective.vocab is None else objective.vocab.teacher_size)
            if same and size != student_size:
                raise LossError(
                    f"teacher_{i} shares the student's vocabulary but scores {size} tokens against {student_size}; "
                    "pass the tokenizer's size as both heads' vocab_size"
                )
            objective.fit(student_size, size)
            rows = TeacherRows([signal], [layout.teacher_rows_Q])
            learned = objective.learned()
            terms.append(TeacherTerm(f"teacher_{i}", objective, self.weights[i], i, layout, rows, learned=learned))
        if cfg.teacher_combination == "averaged_logits":
            terms = self._averaged(terms)
        elif len(terms) > 1 and (cfg.teacher_scoring != "static" or cfg.teacher_combination != "sum"):
            self._weigh(terms, inputs.num_samples, inputs.comm)
        for term in terms:
            own, given = term.layout.weight_C, term.chunk_weight_C
            term.chunk_weight_C = own if given is None else given if own is None else given * own
        return terms

    def _averaged(self, terms: list[TeacherTerm]) -> list[TeacherTerm]:
        first = terms[0]
        for term in terms[1:]:
            if not torch.equal(term.layout.teacher_ids_Q, first.layout.teacher_ids_Q):
                raise LossError(f"{term.name} reads other tokens than {first.name}; their logits cannot be averaged")
        signals = [term.teacher.signals[0] for term in terms]
        if any(signal.is_topk for signal in signals):
            raise LossError("top-k teachers have no logits to average; use live teachers or teacher_combination 'sum'")
        total = sum(self.weights)
        rows = [term.layout.teacher_rows_Q for term in terms]
        first.teacher = TeacherRows(signals, rows, [weight / total for weight in self.weights])
        first.factor = 1.0
        return [first]

    def _weigh(self, terms: list[TeacherTerm], num_samples: int, comm: Comm) -> None:
        cfg = self.cfg
        select = cfg.teacher_combination == "select_teacher"
        kind: Scoring = "ce" if select or cfg.teacher_scoring == "static" else cfg.teacher_scoring
        scores = [sample_scores(t.teacher, t.layout, kind, num_samples, self.block_rows, comm) for t in terms]
        weights = sample_weights(torch.stack(scores), cfg.scoring_alpha, select=select)
        for term, weight_B in zip(terms, weights, strict=True):
            term.chunk_weight_C, term.factor, term.weighs_samples = weight_B[term.layout.sample_C], 1.0, True

    # ---- metrics and step ----

    def _metrics(self, run: BlockRun, loss: Tensor, inputs: LossInputs, counts: Counts) -> Metrics:
        zero = torch.zeros((), dtype=torch.float64, device=loss.device)
        raw = dict(run.metrics)
        sizes = [zero + _size(layout) for layout in inputs.layouts]
        chunks = sum(sizes, zero)
        for term in run.terms:
            name = f"{term.name}/kl"
            if name in raw and term.layout.weight_C is not None:
                raw[name] = (raw[name][0], sizes[term.index])
        total_tokens = counts["tokens"].to(zero, non_blocking=True)
        total_chunks = sum((counts[f"chunks_{i}"].to(zero, non_blocking=True) for i in range(self.num_teachers)), zero)
        by_tokens = (zero + inputs.num_tokens) / total_tokens.clamp(min=1e-9)
        fraction = torch.where(total_tokens > 0, by_tokens, chunks / _or_one(total_chunks))
        out = {
            "loss": (loss.double(), fraction),
            "tokens": (zero + inputs.num_tokens, fraction),
            "chunks": (chunks, fraction),
            "ce_loss": raw.pop("ce", (zero, zero)),
            "accuracy": raw.pop("accuracy", (zero, zero)),
        }
        if len(run.terms) == 1:
            out["kl_loss"] = raw.get(f"{run.terms[0].name}/kl", (zero, zero))
        elif run.terms:
            kd = zero
            for term, weight in zip(run.terms, self.weights, strict=True):
                value = raw.get(f"{term.name}/kl", (zero, zero))[0]
                static = 1.0 if term.weighs_samples else weight
                chunks_of = counts[f"chunks_{term.index}"].to(zero, non_blocking=True)
                kd = kd + value * static / _or_one(chunks_of)
            out["kl_loss"] = (kd, fraction)
        for term in run.terms:
            if term.weighs_samples:
                assert term.chunk_weight_C is not None
                raw[f"{term.name}/weight"] = (term.chunk_weight_C.sum().to(zero), sizes[term.index])
        right = [raw[f"{t.name}/proj_accuracy"] for t in run.terms if f"{t.name}/proj_accuracy" in raw]
        if right:
            out["proj_accuracy"] = (sum((r[0] for r in right), zero), sum((r[1] for r in right), zero))
        for name in sorted(raw):
            out[name.replace("/kl", "/kl_loss") if name.endswith("/kl") else name] = raw[name]
        return Metrics(out)

    def step_end(self, metrics: Mapping[str, Pair]) -> None:
        """Once per training step, with metrics summed over all micro-batches and ranks: moves the running estimate
        of dynamic scaling and lets the misalignment guard look at the mean JSD."""
        self._steps += 1
        kd, ce = self._means(metrics)
        if self.guard.active and kd is not None:
            self.guard.observe(kd)
        running = self.cfg.dynamic_loss_scaling and self.cfg.dynamic_scaling_source == "running"
        if running and kd is not None and ce is not None:
            self.scale.update(kd, ce)

    def first_pass(self, metrics: Mapping[str, Pair]) -> None:
        """For `dynamic_scaling_source: first_pass`: fix this step's ratio from the reduced metrics of a pass over the
        step's whole batch without gradient."""
        kd, ce = self._means(metrics)
        if kd is not None and ce is not None:
            self.scale.set(kd, ce)

    @staticmethod
    def _means(metrics: Mapping[str, Pair]) -> tuple[float | None, float | None]:
        both = Metrics({name: metrics[name] for name in ("kl_loss", "ce_loss") if name in metrics})
        return both.mean("kl_loss"), both.mean("ce_loss")

    def summarize(self, metrics: Metrics, counts: Mapping[str, float]) -> Metrics:
        """Metrics that are stated per batch, as they would be if the whole set were one batch: the mean of batches
        would weigh a token of a short last batch more than the others."""
        out: dict[str, Pair] = dict(metrics)
        out |= {name: (metrics[name][0], 1.0) for name in ("tokens", "chunks") if name in metrics}
        kl, ce = metrics.mean("kl_loss") or 0.0, metrics.mean("ce_loss") or 0.0
        if sum(f"teacher_{i}/kl_loss" in metrics for i in range(self.num_teachers)) > 1:
            kl = 0.0
            for i, weight in enumerate(self.weights):
                # where samples have weights of their own, the sum holds them already
                own = 1.0 if f"teacher_{i}/weight" in metrics else weight
                kl += own * float(metrics[f"teacher_{i}/kl_loss"][0]) / (counts[f"chunks_{i}"] or 1.0)
            out["kl_loss"] = (kl, 1.0)
        distil, plain = self._factors()
        out["loss"] = (distil * kl + plain * ce, 1.0)
        return Metrics(out)

    # ---- the published form ----

    def forward(
        self,
        data: Batch,
        global_valid_seqs: Tensor | float | None,
        global_valid_toks: Tensor | float | None,
        logits: Tensor,
        teacher_full_logits: Tensor | Sequence[Tensor],
        *,
        global_valid_chunks: Sequence[Tensor | float] | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The published call on full logits: logits `[B, T_s, V_s]`, teacher_full_logits `[B, T_t, V_t]` or one per
        teacher. For tests and small use; training goes through `compute`. Chunks are counted in `data` unless given;
        global_valid_seqs is accepted and not needed."""
        full = [teacher_full_logits] if isinstance(teacher_full_logits, Tensor) else list(teacher_full_logits)
        sizes = self.cfg.teacher_vocab_size
        per_teacher = list(sizes) if isinstance(sizes, list) else [sizes or 0] * len(full)
        signals: list[Signal] = [
            LogitsSignal(t.flatten(0, 1), teacher_ids_of(data, i).reshape(-1), size)
            for i, (t, size) in enumerate(zip(full, per_teacher, strict=True))
        ]
        data = self.annotate(data)
        counts = self.counts(data)
        if global_valid_toks is not None:
            counts["tokens"] = torch.as_tensor(global_valid_toks, dtype=torch.float64)
        for i, value in enumerate(global_valid_chunks or []):
            counts[f"chunks_{i}"] = torch.as_tensor(value, dtype=torch.float64)
        starts = [padded_row_start(teacher_ids_of(data, i)) for i in range(len(full))]
        inputs = self._inputs(data, padded_row_start(data["input_ids"]), starts)
        head = Head.identity(self.cfg.student_vocab_size or logits.shape[-1])
        return self.compute(logits.flatten(0, 1), head, signals, inputs, counts)


def _load_projections(path: str | list[str | None] | None) -> list[ProjectionLike | None]:
    paths = path if isinstance(path, list) else [path]
    return [None if p is None else Projection.load(p) for p in paths]


def _size(layout: ChunkLayout) -> float | Tensor:
    """What the chunks of a layout count together."""
    return float(layout.num_chunks) if layout.weight_C is None else layout.weight_C.sum(dtype=torch.float64)


def _or_one(count: Tensor) -> Tensor:
    return count.where(count > 0, torch.ones_like(count))


def _over(factor: float, count: Tensor) -> float | Tensor:
    """factor / count without waiting for a device; a count of 0 divides by 1, since its sum is 0 too."""
    if count.device.type == "cpu":
        value = float(count)
        return factor / value if value > 0 else factor
    return (factor / _or_one(count)).float()
