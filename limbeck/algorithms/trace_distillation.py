"""Training on agent traces: rewards, hints and preferences in one objective.

Per step: a collated batch of traces -> the policy, hint and preference channels, each with its own rows and denominator
-> one optimizer step on policy + alpha x hint + beta x preference. Around it, as in distillation: validation,
checkpoints, logging, resume.

    limbeck train traces_cpu
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms.build import chat_tokenizer_of, fit_models
from limbeck.algorithms.config import TraceMasterConfig
from limbeck.algorithms.loop import TrainingLoop
from limbeck.algorithms.monitors import CollapseMonitor, check_disjoint
from limbeck.algorithms.observers.skipped import SkippedCounts
from limbeck.algorithms.origins import check_origins, model_origins, tokenizer_origins
from limbeck.algorithms.run import Run, RunState
from limbeck.algorithms.start import (
    find_checkpoint,
    is_finished,
    join_ranks,
    load_student,
    log_start,
    open_folder,
    whole_run,
)
from limbeck.algorithms.validation import NAMES, TraceValidation, logged_name, unmeasured
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.loader import make_loader, rank_batches
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import data_rank_and_world
from limbeck.errors import DataError, LossError
from limbeck.losses.contract import State, Teacher
from limbeck.losses.hint import HintDistillationLossFn
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.preference import PreferenceLossFn
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.loading import ModelConfig, check_length, check_settings
from limbeck.models.policy import Policy
from limbeck.models.trainer import StepInput
from limbeck.projection import load_or_build, refuse_missing
from limbeck.teachers.build import TeacherConfig, load_states, make_teacher, same_rows, stored_states
from limbeck.teachers.self_teacher import hint_teachers
from limbeck.tokens import ByteVocab
from limbeck.traces.collate.batch import ComposerBatch
from limbeck.traces.dataset import (
    Advantages,
    TraceCollate,
    TraceDataset,
    compute_advantages,
    load_traces,
    make_collator,
    row_lengths,
)
from limbeck.utils.files import Stamp, stamp_files
from limbeck.utils.metrics import Pair
from limbeck.utils.progress import stage
from limbeck.utils.timer import Timer

__all__ = ["TraceMasterConfig", "TraceRun", "run", "setup", "train"]


class ChannelLosses(NamedTuple):
    """The losses of the three channels; ``policy.active`` is settled."""

    policy: PolicyGradientLossFn
    hint: HintDistillationLossFn
    preference: PreferenceLossFn


@dataclass
class TraceRun(Run):
    """A run on traces."""

    config: TraceMasterConfig
    loss_fn: ChannelLosses
    step: TraceStep
    validation: TraceValidation

    def own_state(self) -> State:
        return {"guard_seen": self.loss_fn.hint.guard.seen}

    def load_own_state(self, stored: State) -> None:
        self.loss_fn.hint.guard.seen = int(stored["guard_seen"])

    def shared_state(self) -> State:
        reference = self.step.reference
        return {
            **stored_states(self.teachers),
            "traces": self.loader.dataset.fingerprint,
            "reference": {} if reference is None else reference.state_dict(),
        }

    def load_shared_state(self, checkpoint: Checkpoint) -> None:
        reference, shared = self.step.reference, load_states(self.teachers, checkpoint)
        if shared["traces"] != self.loader.dataset.fingerprint:
            raise DataError(
                "traces.train is no longer what this run began with (files, pairs or their order have changed); put "
                "the old traces back, or give another logger.log_dir"
            )
        if reference is not None:
            reference.load_state_dict(shared["reference"])

    def nothing_learned(self, skipped: str) -> str:
        state, limits, weights = self.state, self.config.distillation, self.config.weights()
        waiting = [
            f"loss.{key} (warmup_steps: {getattr(self.config.loss, key).warmup_steps})"
            for key, channel in (("alpha", "hint"), ("beta", "preference"))
            if self.config.uses(channel) and not any(weights.at(step)[channel] for step in range(state.total_steps))
        ]
        if waiting and state.current_epoch < limits.max_num_epochs and state.total_steps < limits.max_num_steps:
            return ""
        if waiting:
            return (
                f"no step has learnt anything: in the {state.total_steps} steps of this run {' and '.join(waiting)} "
                "stayed 0; give more steps (fewer traces in distillation.num_prompts_per_step, or more "
                "distillation.max_num_epochs) or a shorter warm-up"
            )
        return (
            f"traces.train holds nothing to learn from: in {self.state.consumed_samples} traces no reward, failed "
            f"call or pair counts for the channels that are on (skipped: {skipped})"
        )


# ---- set-up ----------------------------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """The tokenizers of a run. ``foreign``: the teacher's where it is another one than the student's."""

    student: Any
    teacher: Any | None
    foreign: Any | None


def setup(config: TraceMasterConfig) -> TraceRun:
    """Models, data and losses of a run file, resumed from the latest checkpoint if there is one."""
    join_ranks(config)
    inputs = make_inputs(config, load_sides(config), *load_data(config))
    sides, dataset, advantages, loader = inputs.sides, inputs.dataset, inputs.advantages, inputs.loader
    checkpointer, latest = find_checkpoint(config)
    others = [] if sides.teacher is None else [sides.teacher]
    open_folder(config, latest, sides.student, others, traces_fingerprint=dataset.fingerprint)
    with Comm.world().fail_together():
        if Comm.world().rank == 0:
            check_trace_origins(config, sides, has_checkpoint=latest is not None)
    log_start(config, checkpointer, latest, loader)
    student = load_student(config, fit_models(config.policy)[0], sides.student, latest)
    with stage("the teacher of hints"):
        teachers = _teachers(config, student, sides, inputs.ready)
    losses = inputs.losses
    needs_reference = config.uses("preference") and config.loss.preference.needs_reference
    reference = ReferenceLogProbs(dataset) if needs_reference else None
    monitor = CollapseMonitor(sides.student, student.vocab_size, config.distillation.monitor)
    run = TraceRun(
        config,
        student,
        teachers,
        loader,
        None,
        losses,
        checkpointer,
        TraceStep(student, losses, teachers=teachers, reference=reference, monitor=monitor),
        TraceValidation(student, inputs.held_out, inputs.measured, monitor, rows=config.distillation.val_rows),
        state=RunState(observers={SkippedCounts.name: dict(dataset.skipped)}),
    )
    if latest is None and reference is not None:
        _fill(reference, run, inputs.collate)
    run.begin(latest)
    run.logger.print(f"{len(dataset)} traces, {_policy_line(advantages)}")
    return run


@dataclass(frozen=True)
class TraceInputs:
    """Parts that a run has before it loads a model; ``limbeck train --dry-run`` comes as far. ``ready``: a teacher that
    loads no weights; ``measured``: makes rows of all channels, for validation."""

    sides: Sides
    ready: Teacher | None
    dataset: TraceDataset
    held_out: TraceDataset
    advantages: Advantages
    losses: ChannelLosses
    collate: TraceCollate
    measured: TraceCollate
    loader: StatefulDataLoader


def make_inputs(config: TraceMasterConfig, sides: Sides, dataset: TraceDataset, held_out: TraceDataset) -> TraceInputs:
    """All that a run on traces refuses before it loads a model, and what it has then. Collective."""
    _check_lengths(config, foreign=sides.foreign is not None)
    metric = logged_name(config.checkpointing.metric_name)
    if metric is not None and (error := unmeasured(metric, NAMES)):
        raise error
    ready = _teacher_without_model(config, sides)
    advantages = compute_advantages(dataset.traces, config.loss.policy, config.traces)
    losses = _losses(config, advantages, sides)
    collator = partial(make_collator, config.traces, config.policy, config.teacher, sides.student, sides.foreign)
    collate = TraceCollate(collator(hint=config.uses("hint"), preference=config.uses("preference")), advantages)
    measured = TraceCollate(collator(hint=True, preference=True))
    loader = _loader(config, dataset, collate)
    return TraceInputs(sides, ready, dataset, held_out, advantages, losses, collate, measured, loader)


def check_trace_origins(config: TraceMasterConfig, sides: Sides, *, has_checkpoint: bool, store: bool = True) -> None:
    """Refuse to go on with other sites, tokenizers or models than the run began with; for one rank."""
    read: dict[str, tuple[ModelConfig, object]] = {"policy": (config.policy, sides.student)}
    if config.teacher is not None:
        read["teacher"] = (config.teacher, sides.teacher)
    origins = _files(config), None, tokenizer_origins(read)
    check_origins(config.logger.log_dir, *origins, has_checkpoint=has_checkpoint, store=store)


def load_sides(config: TraceMasterConfig) -> Sides:
    """The tokenizers of a run, and its models' settings looked at."""
    with stage("tokenizers"):
        tokenizer = chat_tokenizer_of(config.policy)
        teacher_tokenizer = None if config.teacher is None else chat_tokenizer_of(config.teacher)
    check_settings(config.policy, tokenizer, name="student", trained=True)
    if config.teacher is not None and config.teacher.kind.loads_model:
        check_settings(config.teacher, teacher_tokenizer, name="teacher", trained=False)
    foreign = teacher_tokenizer
    if foreign is not None and ByteVocab.from_tokenizer(foreign).same_tokens(ByteVocab.from_tokenizer(tokenizer)):
        foreign = None
    return Sides(tokenizer, teacher_tokenizer, foreign)


def load_data(config: TraceMasterConfig) -> tuple[TraceDataset, TraceDataset]:
    """Traces to train and to validate on, which may be the same ones."""
    with stage("traces") as progress:
        dataset = load_traces(config.traces)
        held_out = dataset if config.traces.validation is None else load_traces(config.traces, "validation")
        progress.note = f"{len(dataset):,}, {len(held_out):,} to validate"
    return dataset, held_out


def _loader(config: TraceMasterConfig, dataset: TraceDataset, collate: TraceCollate) -> StatefulDataLoader:
    return make_loader(
        dataset,
        collate,
        records=config.distillation.num_prompts_per_step,
        layout=config.policy.dtensor_cfg,
        seed=config.distillation.seed,
        shuffle=config.traces.shuffle,
        num_workers=config.traces.num_workers,
    )


def _losses(config: TraceMasterConfig, advantages: Advantages, sides: Sides) -> ChannelLosses:
    rows, hint, projection, share = config.loss.block_rows, config.loss.hint, None, 0.0
    if sides.foreign is not None and config.uses("hint"):
        refuse_missing(hint.projection_matrix_path, "loss.hint.projection_matrix_path")
        projection = load_or_build(sides.student, sides.foreign, hint.projection_matrix_path)
    if config.teacher is None and config.uses("hint") and hint.self_teacher == "trust_region":
        share = hint.trust_region
    return ChannelLosses(
        PolicyGradientLossFn(advantages.cfg, block_rows=rows),
        HintDistillationLossFn(hint, projection=projection, trust_region=share, block_rows=rows),
        PreferenceLossFn(config.loss.preference, block_rows=rows),
    )


def _fill(reference: ReferenceLogProbs, run: TraceRun, collate: TraceCollate) -> None:
    rank, world = data_rank_and_world(run.config.policy.dtensor_cfg)
    rows = run.config.distillation.val_rows
    with stage("the start's probabilities of preferred messages"):
        reference.fill(run.student, run.loader.dataset, collate, rank=rank, world=world, rows=rows)


def _policy_line(advantages: Advantages) -> str:
    """Outcome of the policy channel; without rewards it has nothing to learn from."""
    if bool(advantages.counted.any()):
        return f"policy mode {advantages.cfg.mode}"
    return "the policy channel is off: no trace has a reward (limbeck traces ingest --judge MODEL@URL scores them)"


def _files(config: TraceMasterConfig) -> dict[str, list[Stamp]]:
    """Stamps of what every start reads: sites, a live teacher's weights, and the student's below adapters or as its own
    first teacher. The traces themselves have a fingerprint."""
    models: dict[str, ModelConfig] = {}
    teacher, hinted = config.teacher, config.uses("hint")
    if teacher is not None and teacher.kind.loads_model and hinted:
        models["teacher"] = teacher
    starts = teacher is None and hinted and config.loss.hint.self_teacher in ("frozen", "trust_region")
    if starts or config.policy.adapters is not None:
        models["policy"] = config.policy
    sites = [] if config.traces.sites is None else [config.traces.sites]
    return {"traces.sites": stamp_files(sites), **model_origins(models)}


def _check_lengths(config: TraceMasterConfig, *, foreign: bool) -> None:
    """Refuse rows that are longer than the positions of the models that read them.

    ``foreign``: the hinted teacher has another tokenizer; otherwise validation lets the student read hinted rows too.
    """
    rows = row_lengths(config.traces, config.policy, config.teacher)
    keys = "traces.max_seq_length, traces.max_pair_seq_length and traces.max_teacher_seq_length"
    longest = max(rows.student, rows.pair, 0 if foreign else rows.teacher)
    check_length(config.policy, longest, name="student", keys=keys)
    if config.uses("hint") and config.teacher is not None and config.teacher.kind.loads_model:
        check_length(config.teacher, rows.teacher, name="teacher", keys="traces.max_teacher_seq_length")


def _teacher_without_model(config: TraceMasterConfig, sides: Sides) -> Teacher | None:
    """A hinted teacher that loads no weights here, made before any model is loaded. Collective."""
    section = config.teacher
    if section is None or section.kind.loads_model or not config.uses("hint"):
        return None
    readers = same_rows(config.policy.dtensor_cfg)
    with Comm.world().fail_together():
        teacher = _hinted(config, section, sides, readers)
    teacher.verify()
    return teacher


def _hinted(config: TraceMasterConfig, section: TeacherConfig, sides: Sides, readers: Comm | None = None) -> Teacher:
    longest, vocab = row_lengths(config.traces, config.policy, section).teacher, ByteVocab.from_tokenizer(sides.student)
    seed = config.distillation.seed + 1
    return make_teacher(section, 0, sides.teacher, vocab, seed=seed, longest=longest, readers=readers)


def _teachers(config: TraceMasterConfig, student: Policy, sides: Sides, ready: Teacher | None) -> list[Teacher]:
    """Who reads the hints; nobody where that channel is off."""
    if not config.uses("hint"):
        return []
    if ready is not None:
        return [ready]
    if config.teacher is not None:
        teacher = _hinted(config, fit_models(config.teacher)[0], sides)
        teacher.verify()
        return [teacher]
    hint, seed = config.loss.hint, config.distillation.seed
    return hint_teachers(student, hint.self_teacher, student.cfg, seed=seed, ema_decay=hint.ema_decay)


# ---- a step ----------------------------------------------------------------------------------------------------------


# The figures of a hint channel that a run logs, also where no rank has a hinted message.
_HINT_METRICS = ("hint/loss", "hint/proj_accuracy")


class ReferenceLogProbs:
    """Log-probability of both responses of every pair under the start of the run; computed once, kept in checkpoints.

    Attributes:
        values: ``[pairs, 2]`` float64, chosen and rejected, in nats over the response.
        checks: ``[pairs, 2]`` checksums of the token ids that were scored.
    """

    def __init__(self, dataset: TraceDataset) -> None:
        sizes = torch.tensor([len(trace.preference_pairs) for trace in dataset.traces], dtype=torch.int64)
        self.offsets = sizes.cumsum(0) - sizes
        # float64: a margin is the small difference of two sums over whole messages
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
        ranks = policy.dims.data
        # ranks that score together wait for each other inside the model
        scoring = Comm.alone() if policy.dims.is_sharded else ranks
        for mine in rank_batches(with_pairs, rank=rank, world=world, rows=rows):
            with ranks.fail_together():
                batch = collate([dataset[i] for i in mine])
                channel = batch.channel("preference")
                places = self._places(batch)
            with scoring.fail_together():
                self.values[places] = policy.response_log_probs(channel).reshape(-1, 2)
            self.checks[places] = _checksums(channel).reshape(-1, 2)
        # data-parallel ranks, once per run: two numbers and two checksums per pair, zeros but for those scored here
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
        """State that a checkpoint keeps."""
        return {"values": self.values, "checks": self.checks}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over stored values; they belong to the start of the run, which its weights have left behind."""
        if state["values"].shape != self.values.shape:
            raise LossError(
                f"the checkpoint has reference log-probs of {len(state['values'])} pairs, the traces have "
                f"{len(self.values)}; resume with the traces that the run began with"
            )
        self.values, self.checks = state["values"], state["checks"]


def _checksums(channel: BatchedDataDict) -> Tensor:
    rows = zip(channel["input_ids"], channel["token_mask"], channel["input_lengths"].tolist(), strict=True)
    # without padding, which depends on the neighbours in the batch
    sums = [zlib.crc32(torch.stack((ids[:n], mask[:n])).numpy().tobytes()) for ids, mask, n in rows]
    return torch.tensor(sums, dtype=torch.int64)


class TraceStep:
    """Takes steps on collated batches.

    Args:
        teachers: of the hint channel: one, or two whose log-probabilities are mixed; none where that channel is off.
        reference: None where no loss needs it.
    """

    def __init__(
        self,
        student: Policy,
        losses: ChannelLosses,
        *,
        teachers: Sequence[Teacher],
        reference: ReferenceLogProbs | None,
        monitor: CollapseMonitor,
    ) -> None:
        self.student, self.teachers, self.reference, self.monitor = student, teachers, reference, monitor
        self.losses = losses

    def __call__(
        self, batch: ComposerBatch, factors: Mapping[str, float], *, monitored: bool = False, timer: Timer | None = None
    ) -> dict[str, Any]:
        """One optimizer step; the result is that of ``Policy.train``.

        Raises:
            LossError: a loss is not finite (the step was not taken), or the two sides of the hint channel are disjoint.
        """
        trainer = self.student.trainer
        assert trainer is not None
        result = trainer.step(self.channels(batch, factors, monitored=monitored), timer).as_dict()
        if factors["hint"]:
            check_disjoint(result["metrics"])
        else:
            # without its channel the trainer does not know of an average, which moves along all the same
            for teacher in self.teachers:
                teacher.step_end()
        return result

    def channels(
        self, batch: ComposerBatch, factors: Mapping[str, float], *, monitored: bool = False
    ) -> list[StepInput]:
        """Inputs of a step; a channel with factor 0 is left out."""
        make = {"policy": self._policy, "hint": self._hint, "preference": self._preference}
        return [make[name](batch, factors[name], monitored) for name in make if factors[name]]

    def _policy(self, batch: ComposerBatch, factor: float, monitored: bool) -> StepInput:
        channel = batch.channel("policy")
        channel["advantages"] = batch["advantages"]

        def measure(hidden: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: Any) -> Mapping[str, Pair]:
            return self.monitor.policy(hidden, head, inputs)

        return StepInput(channel, self.losses.policy, factor=factor, monitor=measure if monitored else None)

    def _hint(self, batch: ComposerBatch, factor: float, monitored: bool) -> StepInput:
        share = self.losses.hint.trust_region
        mix_weights = (1 - share, share) if share else (1.0,)

        def measure(hidden: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: Any) -> Mapping[str, Pair]:
            return self.monitor.hint(hidden, head, signals, mix_weights, inputs)

        return StepInput(
            batch.channel("hint"),
            self.losses.hint,
            self.teachers,
            factor=factor,
            monitor=measure if monitored else None,
            reported=_HINT_METRICS,
        )

    def _preference(self, batch: ComposerBatch, factor: float, monitored: bool) -> StepInput:
        channel = batch.channel("preference")
        if self.reference is not None:
            with self.student.dims.data.fail_together():
                self.reference.attach(batch, channel)
        return StepInput(channel, self.losses.preference, factor=factor, group_size=2)


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(run: TraceRun) -> None:
    """Train until ``max_num_steps`` or ``max_num_epochs``, or until asked to stop; see :func:`setup`."""
    TraceLoop(run).train()


class TraceLoop(TrainingLoop[TraceRun]):
    """Steps on the three channels of traces, validated by how probable failed and preferred messages are."""

    def __init__(self, run: TraceRun) -> None:
        super().__init__(run)
        self.weights = run.config.weights()

    def train_step(self, batch: ComposerBatch) -> dict[str, Any]:
        run, done = self.run, self.run.state.total_steps
        self._ask_ahead(batch, done)
        return run.step(batch, self.weights.at(done), monitored=run.step.monitor.due(done + 1), timer=run.timer)

    def _ask_ahead(self, batch: ComposerBatch, done: int) -> None:
        """Let the requests of this step and then those of the next begin, for a teacher that takes requests."""
        for teacher in (teacher for teacher in self.run.step.teachers if teacher.asks_ahead):
            # it must know which ranks read the same rows, also before the first step shows them
            teacher.attach(self.run.student.layout)
            for step, rows in ((done, batch), (done + 1, self.upcoming())):
                if rows is not None and self.weights.at(step)["hint"]:
                    teacher.ask_ahead(rows.channel("hint"))

    def close(self) -> None:
        for teacher in self.run.step.teachers:
            teacher.close()

    def skipped_of(self, batch: ComposerBatch) -> list[dict[str, int]]:
        return [batch["skipped"]]

    def more_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        factors = self.weights.at(self.run.state.total_steps)
        counts = {f"count/{name}": float(value) for name, value in result["counts"].items()}
        return {"alpha": factors["hint"], "beta": factors["preference"], **counts}

    def validate(self) -> dict[str, Any]:
        with self.run.timer.time("validation"):
            metrics = self.run.validation.measure()
        self.run.logger.log_samples(self.run.validation.written, self.run.state.total_steps)
        return metrics

    def summary_line(self, means: dict[str, float]) -> str:
        figures = ", ".join(f"{name} {means[key]:.3f}" for key, name in _SHOWN.items() if key in means)
        return f"mean log p of {figures or 'nothing: there are no failed or preferred messages'}"


_SHOWN = {
    "erroneous_logprob": "failed messages",
    "rejected_logprob": "rejected",
    "chosen_logprob": "chosen",
}


def run(config: TraceMasterConfig) -> Path:
    """Train from a run file, resuming where a checkpoint lies; returns the run folder."""
    with whole_run(config):
        if not is_finished(config):
            train(setup(config))
    return Path(config.logger.log_dir)
