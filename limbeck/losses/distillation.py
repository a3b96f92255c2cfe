"""The distillation loss: cross-entropy plus one divergence per teacher, over any pair of vocabularies.

    loss_fn = CrossTokenizerDistillationLossFn({"mode": "tree_kl"}, projections=[projection])
    global_batch = loss_fn.prepare_batch(global_batch)  # chunks, before the batch is split
    counts = loss_fn.denominators(global_batch)  # reduce over data-parallel ranks
    for microbatch in ...:
        inputs = loss_fn.build_layout(microbatch, [teacher_row_start])
        loss, metrics = loss_fn.compute_loss(hidden, head, [signal], inputs, counts)
        loss.backward()
    loss_fn.step_end(reduced_metrics)

Losses are sums divided by counts of the *global* batch, so they add up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.config import resolve
from limbeck.data.layout import (
    ChunkLayout,
    TokenLayout,
    count_tokens,
    padded_row_start,
    teacher_ids_of,
    token_layout,
)
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, LossError
from limbeck.losses import fast
from limbeck.losses.blocks import BlockRun, TeacherTerm, TokenClasses, cut_blocks, verify
from limbeck.losses.chunk_loss import BlockInputs, ChunkLoss
from limbeck.losses.contract import Batch, Counts
from limbeck.losses.distillation_config import CrossTokenizerDistillationLossConfig
from limbeck.losses.divergences import DivergenceSpec, JsdGuard
from limbeck.losses.objectives import Objective, ObjectiveConfig, SameVocabulary, find_objective
from limbeck.losses.objectives.config import DivergenceKeys
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.signals import Head, TeacherLogits, TeacherOutput, TeacherRows
from limbeck.losses.teacher_mix import average_logits, mean_over_teachers, weigh_by_sample
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.losses.weights import DynamicScale
from limbeck.projection import Projection
from limbeck.tokens.classes import TEXT_CLASSES
from limbeck.utils.metrics import Metrics, Pair

__all__ = ["CrossTokenizerDistillationLossConfig", "CrossTokenizerDistillationLossFn", "LossInputs"]

PLAIN_BLOCK_ROWS = 512
"""Rows of a block on the plain path, whose temporaries are float32 and several times the logits."""


@dataclass(kw_only=True)
class LossInputs(BlockInputs):
    """Rows of a micro-batch under cross-entropy and distillation. num_tokens: sum of the cross-entropy weights."""

    num_samples: int
    num_tokens: float


class CrossTokenizerDistillationLossFn(ChunkLoss[LossInputs]):
    """Cross-entropy plus distillation from one or several teachers.

    cfg: a `CrossTokenizerDistillationLossConfig` or a mapping of its fields. projections: one per teacher; None for a
    teacher that shares the student's vocabulary (direct divergence per position). teacher_objectives: of teachers that
    are compared by another objective than `cfg`'s, its settings. ends: per teacher that shares the student's vocabulary
    the tokens that are one event, the end of an answer; none where both end alike. A module: it owns the objectives,
    the running estimate of dynamic scaling and the misalignment guard.
    """

    class_of_id: Tensor | None

    def __init__(
        self,
        cfg: CrossTokenizerDistillationLossConfig | Mapping[str, Any] | None = None,
        *,
        projections: Sequence[ProjectionLike | None] | None = None,
        teacher_objectives: Sequence[ObjectiveConfig | None] | None = None,
        ends: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        cfg = resolve(CrossTokenizerDistillationLossConfig, cfg or {})
        maps = _load_projections(cfg.projection_matrix_path) if projections is None else list(projections)
        # by itself a loss weighs several teachers alike: that they are weighed text by text is chosen for a run
        self.cfg = cfg = cfg.settled(teachers=min(len(maps), 1))
        sizes = cfg.teacher_vocab_size
        per_teacher = list(sizes) if isinstance(sizes, list) else [sizes] * len(maps)
        weights = cfg.teacher_weights or [1 / max(len(maps), 1)] * len(maps)
        if len(per_teacher) != len(maps) or len(weights) != len(maps):
            raise ConfigError(
                f"{len(maps)} teachers but {len(weights)} teacher_weights and {len(per_teacher)} teacher_vocab_size; "
                "give one each"
            )
        if cfg.teacher_combination == "averaged_logits" and len({p and p.teacher_fingerprint for p in maps}) > 1:
            raise ConfigError(
                "teacher_combination 'averaged_logits' needs teachers of one vocabulary, but theirs differ; use 'sum'"
            )
        objective_configs = [choice or cfg.objective for choice in teacher_objectives or [None] * len(maps)]
        self.teachers = nn.ModuleList(
            SameVocabulary(cfg.same_vocabulary, temperature=cfg.temperature, ends=of_teacher)
            if p is None
            else find_objective(choice.mode)(choice, p, size, temperature=cfg.temperature)
            for p, size, choice, of_teacher in zip(
                maps, per_teacher, objective_configs, ends or [()] * len(maps), strict=True
            )
        )
        self.num_teachers = len(maps)
        self.weights = [float(w) for w in weights]
        self.block_rows = cfg.block_rows or PLAIN_BLOCK_ROWS
        self.vocab_shards = 1  # ranks among which the student's vocabulary is divided; its head tells
        self.register_buffer("class_of_id", None, persistent=False)
        self.scale = DynamicScale(cfg.dynamic_scaling_decay)
        self.guard = _guard(self.objectives)

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
        """Whether the loss goes by texts that `count_token_ends` must be shown first."""
        return any(isinstance(objective, TreeKL) and objective.counts_ends for objective in self.objectives)

    def count_token_ends(self, texts: Sequence[Sequence[ChunkLayout]]) -> None:
        """See `TreeKL.count_token_ends`; texts: the chunks of every teacher in each, as `select_chunks` gives them."""
        for i, objective in enumerate(self.objectives):
            if isinstance(objective, TreeKL) and objective.counts_ends:
                objective.count_token_ends(layouts[i] for layouts in texts)

    # ---- counting and layouts (CPU) ----

    def same_vocabulary(self, batch: Batch) -> list[bool]:
        return [objective.vocab is None for objective in self.objectives]

    def keeps_inexact(self, number: int) -> bool:
        return self.objectives[number].cfg.keeps_inexact

    def reads_text_alone(self, number: int) -> bool:
        return self.objectives[number].reads_text_alone

    def denominators(self, batch: Batch) -> Counts:
        """Local denominators of a global batch: `tokens` and `chunks_i` per teacher, float64 scalars to be summed
        over data-parallel ranks before the first micro-batch."""
        tokens = count_tokens(batch["input_lengths"], batch["token_mask"], batch["sample_mask"])
        return {"tokens": tokens, **super().denominators(batch)}

    def build_layout(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None]) -> LossInputs:
        inputs = super().build_layout(mb, row_starts)
        # sent off now, they arrive while the models still work
        device = self.scale.distillation.device
        return inputs.to(device) if device.type == "cuda" else inputs

    def make_inputs(self, batch: Batch, row_start_B: Tensor, layouts: list[ChunkLayout]) -> LossInputs:
        return self._laid_out(token_layout(batch, row_start_B), layouts, int(row_start_B.numel()), Comm.alone())

    def make_share(self, whole: LossInputs, tokens: TokenLayout, layouts: list[ChunkLayout], comm: Comm) -> LossInputs:
        return self._laid_out(tokens, layouts, whole.num_samples, comm)

    def _laid_out(self, tokens: TokenLayout, layouts: list[ChunkLayout], num_samples: int, comm: Comm) -> LossInputs:
        next_rows = any(objective.reads_next_row for objective in self.objectives)
        return LossInputs(
            tokens=tokens,
            layouts=layouts,
            cut=partial(cut_blocks, tokens, layouts, self.block_rows, next_rows=next_rows),
            orders=fast.plan_orders(
                self.cfg.fast_path, self.objectives, tokens, layouts, self.cfg.block_rows, self.vocab_shards
            ),
            comm=comm,
            num_samples=num_samples,
            num_tokens=float(tokens.weight_E.double().sum()),
        )

    # ---- the loss ----

    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: LossInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, already divided by the global `counts`; differentiable with respect to hidden_RH
        and the head's parameters.

        Returns (loss, metrics). `loss`, `tokens` and `chunks` are counted by this micro-batch's part of the batch, so
        sum / count is per batch.
        """
        device = hidden_RH.device
        if self.scale.distillation.device != device:
            self.to(device)
        inputs = inputs.to(device)
        differing = self.check(hidden_RH, head, signals, inputs, defer=device.type != "cpu")
        distil, ce = self._factors()
        signals = [signal.on_shards(head.axis) for signal in signals]
        terms = self._terms(signals, inputs, head)
        for term in terms:
            term.factor = _over(distil * float(term.factor), counts[f"chunks_{term.index}"])
        self.vocab_shards = head.axis.comm.size  # of micro-batches that are planned from now on
        orders = fast.usable_orders(self.cfg.fast_path, inputs.orders, hidden_RH, head, terms)
        if orders is None:
            for term in terms:
                term.teacher.vocab_ids_K = term.objective.choose_ids(term.teacher, self.block_rows, inputs.comm)
        blocks = inputs.blocks if orders is None else orders[0].blocks
        run = BlockRun(head, blocks, _over(ce, counts["tokens"]), terms, comm=inputs.comm)
        if self.class_of_id is not None and not torch.is_grad_enabled():
            run.classes = TokenClasses(TEXT_CLASSES, self.class_of_id)
        run.id_mismatch_flags = differing
        run.raise_mismatch = lambda: self.compare_ids(signals, inputs, defer=False)
        loss = fast.run_blocks(run, hidden_RH, orders)
        metrics = self._metrics(run, loss.detach(), inputs, counts)
        verify(run, loss.detach(), hidden_RH)  # last: it waits for the device
        return loss, metrics

    def _factors(self) -> tuple[float, float]:
        if self.cfg.dynamic_loss_scaling:
            return self.scale.ratio(), 1.0
        assert self.cfg.ce_loss_scale is not None, "settled"
        return self.cfg.kl_loss_weight, self.cfg.ce_loss_scale

    def check(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: LossInputs, *, defer: bool
    ) -> list[Tensor]:
        self.check_vocab_size(head.vocab_size)
        differing = super().check(hidden_RH, head, signals, inputs, defer=defer)
        for i, signal in enumerate(signals):
            if signal.is_topk:
                self.check_topk(i)
        return differing

    def check_vocab_size(self, size: int) -> None:
        """Refuse a student whose head has another number of tokens than the settings say."""
        if self.cfg.student_vocab_size not in (None, size):
            raise LossError(f"student_vocab_size is {self.cfg.student_vocab_size} but the head has {size} tokens")

    def check_topk(self, number: int) -> None:
        """Refuse settings that need whole distributions of teacher ``number``, which gives top-k lists."""
        cfg, objective, name = self.cfg, self.objectives[number], f"teacher_{number}"
        if objective.needs_logits:
            raise LossError(f"{name}: mode {objective.mode!r} needs full logits, not a top-k list; use boundary_kl")
        if cfg.temperature != 1.0:
            raise LossError(
                f"{name}: temperature is {cfg.temperature} but a top-k list is stored at 1; use a live teacher"
            )
        if objective.vocab is None and cfg.topk_by == "student" and cfg.topk is not None:
            raise LossError(f"{name}: topk_by='student' needs full logits, not a top-k list; use topk_by='teacher'")
        if cfg.teacher_combination == "averaged_logits":
            raise LossError("top-k teachers have no logits to average; use live teachers or teacher_combination 'sum'")

    def _terms(self, signals: Sequence[TeacherOutput], inputs: LossInputs, head: Head) -> list[TeacherTerm]:
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
            gated = cfg.gate == "soft"
            terms.append(TeacherTerm(f"teacher_{i}", objective, self.weights[i], i, layout, rows, gated=gated))
        if cfg.teacher_combination == "averaged_logits":
            terms = average_logits(terms, self.weights)
        elif len(terms) > 1 and (cfg.teacher_scoring != "static" or cfg.teacher_combination != "sum"):
            weigh_by_sample(terms, cfg, inputs.num_samples, self.block_rows, inputs.comm)
        for term in terms:
            of_layout, of_term = term.layout.weight_C, term.chunk_weight_C
            term.chunk_weight_C = (
                of_layout if of_term is None else of_term if of_layout is None else of_term * of_layout
            )
        return terms

    # ---- metrics and step ----

    def _metrics(self, run: BlockRun, loss: Tensor, inputs: LossInputs, counts: Counts) -> Metrics:
        zero = torch.zeros((), dtype=torch.float64, device=loss.device)
        raw = dict(run.metrics)
        sizes = [zero + _size(layout) for layout in inputs.layouts]
        chunks = sum(sizes, zero)
        for term in run.terms:
            name = f"{term.name}/kl"
            if name in raw and term.layout.weight_C is not None:
                # the sum holds the chunks' weights, so it is divided by these and not by their number
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
            sums = [raw.get(f"{term.name}/kl", (zero, zero))[0] for term in run.terms]
            numbers = [counts[f"chunks_{term.index}"].to(zero, non_blocking=True) for term in run.terms]
            weighted = [term.weighs_samples for term in run.terms]
            out["kl_loss"] = (mean_over_teachers(sums, numbers, weighted, self.weights), fraction)
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
        kd, ce = self._means(metrics)
        if self.guard.active and kd is not None:
            self.guard.observe(kd)
        if self.cfg.dynamic_loss_scaling and kd is not None and ce is not None:
            self.scale.update(kd, ce)

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
            teachers = range(self.num_teachers)
            sums = torch.tensor([float(metrics[f"teacher_{i}/kl_loss"][0]) for i in teachers], dtype=torch.float64)
            numbers = torch.tensor([counts[f"chunks_{i}"] for i in teachers], dtype=torch.float64)
            weighted = [f"teacher_{i}/weight" in metrics for i in teachers]
            kl = float(mean_over_teachers(sums.unbind(), numbers.unbind(), weighted, self.weights))
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
        teacher. For tests and small use; training calls `compute_loss`. Chunks are counted in `data` unless given;
        global_valid_seqs is accepted and not needed."""
        full = [teacher_full_logits] if isinstance(teacher_full_logits, Tensor) else list(teacher_full_logits)
        sizes = self.cfg.teacher_vocab_size
        per_teacher = list(sizes) if isinstance(sizes, list) else [sizes or 0] * len(full)
        signals: list[TeacherOutput] = [
            TeacherLogits(t.flatten(0, 1), teacher_ids_of(data, i).reshape(-1), size)
            for i, (t, size) in enumerate(zip(full, per_teacher, strict=True))
        ]
        data = self.prepare_batch(data)
        counts = self.denominators(data)
        if global_valid_toks is not None:
            counts["tokens"] = torch.as_tensor(global_valid_toks, dtype=torch.float64)
        for i, value in enumerate(global_valid_chunks or []):
            counts[f"chunks_{i}"] = torch.as_tensor(value, dtype=torch.float64)
        starts = [padded_row_start(teacher_ids_of(data, i)) for i in range(len(full))]
        inputs = self.layout_at(data, padded_row_start(data["input_ids"]), starts)
        head = Head.identity(self.cfg.student_vocab_size or logits.shape[-1])
        return self.compute_loss(logits.flatten(0, 1), head, signals, inputs, counts)


def _guard(objectives: Sequence[Objective]) -> JsdGuard:
    """The guard of a mean JSD, which takes that all teachers are compared by the same one."""
    # the maximum of JSD is the same over fewer buckets
    kinds = {replace(objective.spec, topk=None, chosen_by="teacher") for objective in objectives}
    patience = [o.cfg.jsd_patience for o in objectives if isinstance(o.cfg, DivergenceKeys)]
    return JsdGuard(kinds.pop() if len(kinds) == 1 else DivergenceSpec(), patience=min(patience, default=1))


def _load_projections(path: str | list[str | None] | None) -> list[ProjectionLike | None]:
    paths = path if isinstance(path, list) else [path]
    return [None if p is None else Projection.load(p) for p in paths]


def _size(layout: ChunkLayout) -> float | Tensor:
    """Weight of all chunks of a layout."""
    return float(layout.num_chunks) if layout.weight_C is None else layout.weight_C.sum(dtype=torch.float64)


def _or_one(count: Tensor) -> Tensor:
    return count.where(count > 0, torch.ones_like(count))


def _over(factor: float, count: Tensor) -> float | Tensor:
    """factor / count without waiting for a device; a count of 0 divides by 1, since its sum is 0 too."""
    if count.device.type == "cpu":
        value = float(count)
        return factor / value if value > 0 else factor
    return (factor / _or_one(count)).float()
