"""The distillation loss: cross-entropy plus one divergence per teacher, over any pair of vocabularies.

    loss_fn = CrossTokenizerDistillationLossFn({"mode": "boundary_kl"}, projections=[projection])
    counts = loss_fn.counts(global_batch)                     # reduce over data-parallel ranks
    for microbatch in ...:
        inputs = loss_fn.prepare(microbatch, [teacher_row_start])
        loss, metrics = loss_fn.compute(hidden, head, [signal], inputs, counts)
        loss.backward()
    loss_fn.end_step(reduced_metrics)

Losses are sums divided by counts of the *global* batch, so they add up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from limbeck.data.layout import count_tokens
from limbeck.losses import fast
from limbeck.losses.blocks import Job, Term, row_block_loss, verify
from limbeck.losses.divergences import JsdGuard
from limbeck.losses.fast.order import ColumnPlan
from limbeck.losses.inputs import (
    LossInputs,
    MicrobatchLike,
    build_inputs,
    padded_row_start,
    teacher_chunks,
    teacher_ids_of,
)
from limbeck.losses.objectives import corrected, published
from limbeck.losses.objectives.base import Leaf, Metrics, Mode
from limbeck.losses.peers import ALONE, Peers
from limbeck.losses.scaling import DynamicScale
from limbeck.losses.settings import LossSettings
from limbeck.losses.share import share_of
from limbeck.losses.signals import Head, LogitsSignal, Signal, check_scored_ids
from limbeck.losses.teacher_scores import sample_scores, sample_weights, top_columns
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.losses.vocab.projection import ProjectionLike, VocabMap, common_pairs
from limbeck.utils.errors import ConfigError, LossError

if TYPE_CHECKING:
    from limbeck.losses.config import CrossTokenizerDistillationLossConfig

LEAVES: dict[str, Leaf] = {
    "boundary_kl": corrected.boundary_kl,
    "p_kl_norm": corrected.p_kl_norm,
    "alm": corrected.alm,
    "uld": corrected.uld,
    "p_kl": published.p_kl,
    "gold": published.common_kl,
    "h_kl": published.common_kl,
}
PLAIN_BLOCK_ROWS = 512
"""Rows of a block on the plain path, whose temporaries are float32 and several times the logits."""
COMMON_THRESHOLD = {"gold": 1 - 1e-6, "h_kl": 0.6}


def __getattr__(name: str) -> Any:
    # The pydantic model is looked up on demand: machines without pydantic can still compute losses.
    if name == "CrossTokenizerDistillationLossConfig":
        from limbeck.losses.config import CrossTokenizerDistillationLossConfig

        return CrossTokenizerDistillationLossConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load_projections(path: str | list[str | None] | None) -> list[ProjectionLike | None]:
    from limbeck.projection import Projection

    paths = path if isinstance(path, list) else [path]
    return [None if p is None else Projection.load(p) for p in paths]


def common_set(projection: ProjectionLike, mode: str) -> tuple[Tensor, Tensor]:
    """Paired (student ids, teacher ids) of gold (an exact mapping) or H-KL (largest weight at least .6)."""
    if mode == "gold" and hasattr(projection, "exact_pairs"):
        student, teacher = projection.exact_pairs()
        return torch.as_tensor(student), torch.as_tensor(teacher)
    return common_pairs(projection, COMMON_THRESHOLD[mode])


class _Teacher(nn.Module):
    """What the loss keeps of one teacher: its projection, and the common pairs of gold and H-KL."""

    common_student: Tensor | None
    common_teacher: Tensor | None

    def __init__(self, projection: ProjectionLike | None, size: int | None, settings: LossSettings) -> None:
        super().__init__()
        self.fingerprint = getattr(projection, "teacher_fingerprint", None)
        self.vocab: VocabMap | None = None
        self._pairs: tuple[Any, dict[str, tuple[Tensor, Tensor]]] | None = None
        pairs: tuple[Tensor | None, Tensor | None] = (None, None)
        if projection is not None:
            size = size or getattr(projection, "teacher_size", None) or int(projection.indices.max()) + 1
            self.vocab = VocabMap(projection, int(size), learnable=settings.learnable_projection)
            if settings.mode in COMMON_THRESHOLD:
                pairs = common_set(projection, settings.mode)
                if not pairs[0].numel():
                    raise LossError(
                        f"mode {settings.mode!r} found no common token in the projection; use boundary_kl or p_kl_norm"
                    )
        self.register_buffer("common_student", pairs[0], persistent=False)
        self.register_buffer("common_teacher", pairs[1], persistent=False)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Common pairs and their complements as `Mode` takes them; computed once per device and size."""
        if self.common_student is None or self.common_teacher is None or self.vocab is None:
            return {}
        sizes = (self.vocab.student_size, self.vocab.teacher_size)
        key = (self.common_student.device, *sizes)
        if self._pairs is None or self._pairs[0] != key:
            rest = []
            for used, size in zip((self.common_student, self.common_teacher), sizes, strict=True):
                free = torch.ones(size, dtype=torch.bool, device=used.device)
                free[used] = False
                rest.append(free.nonzero().squeeze(1))
            found = {"common": (self.common_student, self.common_teacher), "uncommon": (rest[0], rest[1])}
            self._pairs = (key, found)
        return self._pairs[1]


class CrossTokenizerDistillationLossFn(nn.Module):
    """Cross-entropy plus distillation from one or several teachers.

    cfg: a `CrossTokenizerDistillationLossConfig`, a mapping or any object with its attributes. projections: one per
    teacher; None for a teacher that shares the student's vocabulary (direct divergence per position). A module: it
    owns the learnable projections (parameters) and the running estimate of dynamic scaling (buffers).
    """

    def __init__(
        self,
        cfg: CrossTokenizerDistillationLossConfig | Mapping[str, Any] | None = None,
        *,
        projections: Sequence[ProjectionLike | None] | None = None,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.settings = settings = LossSettings.from_any(cfg)
        found = _load_projections(settings.projection_matrix_path) if projections is None else list(projections)
        sizes = settings.teacher_vocab_size
        per_teacher = list(sizes) if isinstance(sizes, list) else [sizes] * len(found)
        weights = settings.teacher_weights or [1 / max(len(found), 1)] * len(found)
        if len(per_teacher) != len(found) or len(weights) != len(found):
            raise ConfigError(
                f"{len(found)} teachers but {len(weights)} teacher_weights and {len(per_teacher)} teacher_vocab_size; "
                "give one each"
            )
        self.teachers = nn.ModuleList(_Teacher(p, n, settings) for p, n in zip(found, per_teacher, strict=True))
        self.weights = [float(w) for w in weights]
        self.block_rows = settings.block_rows or PLAIN_BLOCK_ROWS
        if settings.teacher_combination == "averaged_logits":
            self._require_one_vocabulary()
        self.scale = DynamicScale(settings.dynamic_scaling_decay)
        self.guard = JsdGuard(settings.spec, patience=settings.jsd_patience)

    def _require_one_vocabulary(self) -> None:
        kinds = {(t.vocab is None, t.fingerprint) for t in self._list()}
        if len(kinds) > 1:
            raise ConfigError(
                "teacher_combination 'averaged_logits' needs teachers of one vocabulary, but theirs differ; use 'sum'"
            )

    def _list(self) -> list[Any]:
        return list(self.teachers)

    @property
    def num_teachers(self) -> int:
        return len(self.teachers)

    # ---- counting and layouts (CPU) ----

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Local denominators of a global batch: `tokens` and `chunks_i` per teacher, float64 scalars to be summed
        over data-parallel ranks before the first micro-batch."""
        out = {"tokens": count_tokens(batch["input_lengths"], batch["token_mask"], batch["sample_mask"])}
        for i, teacher in enumerate(self._list()):
            out[f"chunks_{i}"] = teacher_chunks(
                batch, i, same_vocabulary=teacher.vocab is None, allow_inexact=self.settings.keeps_inexact
            )
        return out

    def prepare(self, microbatch: MicrobatchLike, teacher_row_starts: Sequence[Tensor | None]) -> LossInputs:
        """Layouts and block plan of one micro-batch, on the CPU. teacher_row_starts: per teacher the flat row at
        which each sample starts in that teacher's forward pass, `[B]`; None: as in the student's."""
        inputs = build_inputs(
            microbatch.data_dict,
            microbatch.processed_inputs.row_start,
            teacher_row_starts,
            [t.vocab is None for t in self._list()],
            allow_inexact=self.settings.keeps_inexact,
            block_rows=self.block_rows,
        )
        inputs.columns = self._plan_columns(inputs)
        # sent off now, they arrive while the models still work
        device = self.scale.distillation.device
        return inputs.to(device) if device.type == "cuda" else inputs

    def share(self, inputs: LossInputs, part: int, parts: int, peers: Peers = ALONE) -> LossInputs:
        """One of `parts` ranks' share of a micro-batch that all of them have prepared; peers: all of these ranks."""
        own = share_of(inputs.to("cpu"), part, parts, self.block_rows, peers)
        own.columns = self._plan_columns(own)
        return own

    def check_layout(self, *, context: int, tensor: int) -> None:
        """Split sequences and vocabularies are both understood, whatever the settings."""

    def _plan_columns(self, inputs: LossInputs) -> ColumnPlan | None:
        """Column order for the kernels, where they may come to be used."""
        return fast.plan(self.settings, [t.vocab for t in self._list()], inputs)

    # ---- the loss ----

    def compute(
        self,
        student_hidden: Tensor,
        student_head: Head,
        signals: Sequence[Signal],
        inputs: LossInputs,
        counts: Mapping[str, Tensor],
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, already divided by the global `counts`; differentiable with respect to
        student_hidden `[R, h]`, the head's parameters and learnable projections.

        Returns (loss, metrics); metrics are (sum, count) pairs that add up over micro-batches and ranks. `loss`,
        `tokens` and `chunks` are counted by this micro-batch's share of the batch, so sum / count is per batch.
        """
        device = student_hidden.device
        if self.num_teachers and self.scale.distillation.device != device:
            self.to(device)
        inputs = inputs.to(device)
        suspects = self._check(student_hidden, student_head, signals, inputs)
        kd_factor, ce_factor = self.settings.kl_loss_weight, self.settings.ce_loss_scale
        if self.settings.dynamic_loss_scaling:
            kd_factor, ce_factor = self.scale.ratio(), 1.0
        signals = [signal.on_shards(student_head.axis) for signal in signals]
        terms = self._terms(signals, inputs, student_head)
        for term in terms:
            term.factor = _over(kd_factor * float(term.factor), counts[f"chunks_{term.index}"])
        columns = fast.usable_columns(self.settings, inputs, student_hidden, student_head, signals, terms)
        if columns is None:
            self._choose_columns(terms, inputs.peers)
        plan = inputs.plan if columns is None else columns.plan
        job = Job(student_head, plan, inputs.tokens, _over(ce_factor, counts["tokens"]), terms, columns=columns)
        job.peers = inputs.peers
        job.suspects, job.explain = suspects, lambda: self._compare_ids(signals, inputs, defer=False)
        loss = row_block_loss(job, student_hidden, check=False)
        metrics = self._metrics(job, loss.detach(), inputs, counts)
        verify(job, loss.detach(), student_hidden)  # last: it waits for the device
        return loss, metrics

    def _compare_ids(self, signals: Sequence[Signal], inputs: LossInputs, *, defer: bool) -> list[Tensor]:
        """Hold the ids that each signal scored against the layout's: an error, or flags where the answer can wait."""
        pairs = enumerate(zip(signals, inputs.layouts, strict=True))
        flags = [check_scored_ids(s, layout, f"teacher_{i}", defer=defer) for i, (s, layout) in pairs]
        return [flag for flag in flags if flag is not None]

    def _check(self, hidden: Tensor, head: Head, signals: Sequence[Signal], inputs: LossInputs) -> list[Tensor]:
        """Everything that can be wrong with ids and sizes, before any logit is computed. On an accelerator the ids'
        comparison is read together with the finished loss, so that it costs no wait of its own."""
        settings = self.settings
        if len(signals) != self.num_teachers or len(inputs.layouts) != self.num_teachers:
            raise LossError(f"{len(signals)} teacher signals for {self.num_teachers} teachers; give one each")
        rows = [inputs.tokens.max_row, *(layout.max_student_row for layout in inputs.layouts)]
        if max(rows) >= hidden.shape[0]:
            raise LossError(f"student: the layout needs row {max(rows)} but there are {hidden.shape[0]} hidden rows")
        ids = [inputs.tokens.max_id, *(layout.max_student_id for layout in inputs.layouts)]
        if max(ids) >= head.vocab_size:
            raise LossError(
                f"student: token id {max(ids)} is out of range for a head of {head.vocab_size} tokens; the batch was "
                "tokenized with another tokenizer"
            )
        if settings.student_vocab_size not in (None, head.vocab_size):
            raise LossError(
                f"student_vocab_size is {settings.student_vocab_size} but the head has {head.vocab_size} tokens"
            )
        suspects = self._compare_ids(signals, inputs, defer=hidden.device.type != "cpu")
        for i, signal in enumerate(signals):
            name = f"teacher_{i}"
            if not signal.is_topk:
                continue
            if settings.is_reference and self._list()[i].vocab is not None:
                raise LossError(f"{name}: mode {settings.mode!r} needs full logits, not a top-k list; use boundary_kl")
            if settings.temperature != 1.0:
                raise LossError(
                    f"{name}: temperature is {settings.temperature} but a top-k list is stored at 1; use a live teacher"
                )
            if self._list()[i].vocab is None and settings.topk_by == "student" and settings.topk is not None:
                raise LossError(f"{name}: topk_by='student' needs full logits, not a top-k list; use topk_by='teacher'")
        return suspects

    def _terms(self, signals: Sequence[Signal], inputs: LossInputs, head: Head) -> list[Term]:
        """One term per teacher, or one for all where logits are averaged; `factor` still without denominators."""
        settings, student_size = self.settings, head.vocab_size
        terms = []
        for i, signal in enumerate(signals):
            teacher = self._list()[i]
            same = teacher.vocab is None
            size = signal.vocab_size or (student_size if same else teacher.vocab.teacher_size)
            if same and size != student_size:
                raise LossError(
                    f"teacher_{i} shares the student's vocabulary but scores {size} tokens against {student_size}; "
                    "pass the tokenizer's size as both heads' vocab_size"
                )
            if not same:
                teacher.vocab.fit(student_size, size)
            mode = Mode(
                temperature=settings.temperature,
                spec=settings.spec,
                chunk_weight=settings.chunk_weight,
                vocab=None if same else head.axis.split(teacher.vocab, _map_axis(signal, head, size), teacher.pairs()),
                rest_weight=None if same else teacher.vocab.rest_weight(),
                vocab_topk=settings.vocab_topk,
                uncommon_topk=settings.uncommon_topk,
                **teacher.pairs(),
            )
            leaf = corrected.same_vocabulary if same else LEAVES[settings.mode]
            layout = inputs.layouts[i]
            terms.append(Term(f"teacher_{i}", leaf, mode, self.weights[i], i, layout, [signal], [layout]))
        if settings.teacher_combination == "averaged_logits":
            terms = self._averaged(terms)
        elif len(terms) > 1 and (settings.teacher_scoring != "static" or settings.teacher_combination != "sum"):
            self._weigh(terms, inputs.num_samples, inputs.peers)
        return terms

    def _choose_columns(self, terms: list[Term], peers: Peers) -> None:
        """P-KL's columns K, before the first block."""
        for term in terms:
            if self.settings.mode == "p_kl" and term.mode.vocab is not None:
                term.mode.columns = top_columns(term, self.settings.vocab_topk, self.block_rows, peers)

    def _averaged(self, terms: list[Term]) -> list[Term]:
        first = terms[0]
        for term in terms[1:]:
            if not torch.equal(term.layout.teacher_ids, first.layout.teacher_ids):
                raise LossError(f"{term.name} reads other tokens than {first.name}; their logits cannot be averaged")
        total = sum(self.weights)
        first.signals = [t.signals[0] for t in terms]
        first.layouts = [t.layout for t in terms]
        first.shares = [w / total for w in self.weights]
        first.factor = 1.0
        if any(s.is_topk for s in first.signals):
            raise LossError("top-k teachers have no logits to average; use live teachers or teacher_combination 'sum'")
        return [first]

    def _weigh(self, terms: list[Term], num_samples: int, peers: Peers) -> None:
        settings = self.settings
        select = settings.teacher_combination == "select_teacher"
        kind = "ce" if select or settings.teacher_scoring == "static" else settings.teacher_scoring
        scores = torch.stack([sample_scores(t, kind, num_samples, self.block_rows, peers) for t in terms])
        weights = sample_weights(scores, settings.scoring_alpha, select=select)
        for term, weight in zip(terms, weights, strict=True):
            assert term.layout.sample is not None
            term.chunk_weight, term.factor = weight[term.layout.sample], 1.0

    # ---- metrics and step ----

    def _metrics(self, job: Job, loss: Tensor, inputs: LossInputs, counts: Mapping[str, Tensor]) -> Metrics:
        zero = torch.zeros((), dtype=torch.float64, device=loss.device)
        raw = dict(job.metrics)
        chunks = sum(layout.num_chunks for layout in inputs.layouts)
        total_tokens = counts["tokens"].to(zero, non_blocking=True)
        total_chunks = sum((counts[f"chunks_{i}"].to(zero, non_blocking=True) for i in range(self.num_teachers)), zero)
        by_tokens = (zero + inputs.num_tokens) / total_tokens.clamp(min=1e-9)
        share = torch.where(total_tokens > 0, by_tokens, (zero + chunks) / total_chunks.clamp(min=1))
        out: Metrics = {
            "loss": (loss.double(), share),
            "tokens": (zero + inputs.num_tokens, share),
            "chunks": (zero + chunks, share),
            "ce_loss": raw.pop("ce", (zero, zero)),
            "accuracy": raw.pop("accuracy", (zero, zero)),
        }
        if len(job.terms) == 1:
            out["kl_loss"] = raw.get(f"{job.terms[0].name}/kl", (zero, zero))
        elif job.terms:
            kd = zero
            for term, weight in zip(job.terms, self.weights, strict=True):
                value = raw.get(f"{term.name}/kl", (zero, zero))[0]
                static = weight if term.chunk_weight is None else 1.0
                chunks_of = counts[f"chunks_{term.index}"].to(zero, non_blocking=True)
                kd = kd + value * static / chunks_of.clamp(min=1)
            out["kl_loss"] = (kd, share)
        for term in job.terms:
            if term.chunk_weight is not None:
                given = term.chunk_weight
                raw[f"{term.name}/weight"] = (given.sum().to(zero), zero + given.numel())
        right = [raw[f"{t.name}/proj_accuracy"] for t in job.terms if f"{t.name}/proj_accuracy" in raw]
        if right:
            out["proj_accuracy"] = (sum((r[0] for r in right), zero), sum((r[1] for r in right), zero))
        for name in sorted(raw):
            out[name.replace("/kl", "/kl_loss") if name.endswith("/kl") else name] = raw[name]
        return out

    def end_step(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """Once per training step, with metrics summed over all micro-batches and ranks: moves the running estimate
        of dynamic scaling and lets the misalignment guard look at the mean JSD."""
        kd, ce = (_mean(metrics, name) for name in ("kl_loss", "ce_loss"))
        if self.guard.active and kd is not None:
            self.guard.observe(kd)
        running = self.settings.dynamic_loss_scaling and self.settings.dynamic_scaling_source == "running"
        if running and kd is not None and ce is not None:
            self.scale.update(kd, ce)

    def start_step(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """For `dynamic_scaling_source: first_pass`: fix this step's ratio from the reduced metrics of a pass over the
        step's whole batch without gradient."""
        kd, ce = (_mean(metrics, name) for name in ("kl_loss", "ce_loss"))
        if kd is not None and ce is not None:
            self.scale.set(kd, ce)

    # ---- the published form ----

    def forward(
        self,
        data: Mapping[str, Any],
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
        sizes = self.settings.teacher_vocab_size
        per_teacher = list(sizes) if isinstance(sizes, list) else [sizes or 0] * len(full)
        signals: list[Signal] = [
            LogitsSignal(t.flatten(0, 1), teacher_ids_of(data, i).reshape(-1), size)
            for i, (t, size) in enumerate(zip(full, per_teacher, strict=True))
        ]
        counts = self.counts(data)
        if global_valid_toks is not None:
            counts["tokens"] = torch.as_tensor(global_valid_toks, dtype=torch.float64)
        for i, value in enumerate(global_valid_chunks or []):
            counts[f"chunks_{i}"] = torch.as_tensor(value, dtype=torch.float64)
        starts = [padded_row_start(teacher_ids_of(data, i)) for i in range(len(full))]
        rows = SimpleNamespace(row_start=padded_row_start(data["input_ids"]))
        inputs = self.prepare(SimpleNamespace(data_dict=data, processed_inputs=rows), starts)
        head = Head.identity(self.settings.student_vocab_size or logits.shape[-1])
        return self.compute(logits.flatten(0, 1), head, signals, inputs, counts)


def _map_axis(signal: Signal, head: Head, size: int) -> VocabAxis:
    """Where a map's teacher columns lie; a top-k list has none, so any split will do."""
    return head.axis.like(size) if signal.is_topk else signal.axis


def _over(factor: float, count: Tensor) -> float | Tensor:
    """factor / count without waiting for a device; a count of 0 divides by 1, since its sum is 0 too."""
    if count.device.type == "cpu":
        value = float(count)
        return factor / value if value > 0 else factor
    return (factor / count.where(count > 0, torch.ones_like(count))).float()


def _mean(metrics: Mapping[str, tuple[Any, Any]], name: str) -> float | None:
    if name not in metrics:
        return None
    total, count = (float(x) for x in metrics[name])
    return total / count if count > 0 else None
