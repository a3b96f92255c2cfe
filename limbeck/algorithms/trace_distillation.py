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
from typing import Any, TypedDict

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import NotRequired

from limbeck.algorithms import run_folder
from limbeck.algorithms.build import chat_tokenizer_of, fitted
from limbeck.algorithms.config import TraceMasterConfig
from limbeck.algorithms.loop import TrainingLoop, announce, is_finished, resume, stored_counters, whole_run
from limbeck.algorithms.monitors import CollapseMonitor, check_disjoint
from limbeck.algorithms.origins import check_origins, model_origins
from limbeck.algorithms.validation import TraceValidation
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.loader import make_loader, rank_batches
from limbeck.distributed.comm import Comm, init_distributed
from limbeck.distributed.launch import check_cluster
from limbeck.distributed.mesh import data_rank_and_world
from limbeck.errors import DataError, LossError
from limbeck.losses.hint import HintDistillationLossFn
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.preference import PreferenceLossFn
from limbeck.losses.signals import Head, Signal
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.loading import ModelConfig, check_length, check_settings
from limbeck.models.policy import Policy
from limbeck.models.trainer import Channel
from limbeck.projection import load_or_build
from limbeck.teachers.build import connect, same_rows
from limbeck.teachers.hinted import HintTeacher, make_other_teacher, make_self_teacher
from limbeck.teachers.server.teacher import ServerTeacher
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
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.files import Stamp, stamp_files
from limbeck.utils.logger import Logger
from limbeck.utils.metrics import Pair
from limbeck.utils.progress import stage
from limbeck.utils.state import fitting, seed_everything
from limbeck.utils.timer import Timer

__all__ = ["TraceMasterConfig", "TraceRun", "TraceSaveState", "run", "setup", "train"]


class TraceSaveState(TypedDict):
    """Where a run stands."""

    current_epoch: int
    current_step: int
    total_steps: int
    consumed_samples: int
    total_valid_tokens: int
    dropped: NotRequired[dict[str, int]]


@dataclass
class TraceRun:
    """Everything that :func:`train` needs."""

    config: TraceMasterConfig
    student: Policy
    step: TraceStep
    loader: StatefulDataLoader
    validation: TraceValidation
    logger: Logger
    checkpointer: CheckpointManager
    state: TraceSaveState


# ---- set-up ----------------------------------------------------------------------------------------------------------


def setup(config: TraceMasterConfig) -> TraceRun:
    """Models, data and losses of a run file, resumed from the latest checkpoint if there is one."""
    ranks = init_distributed(config.cluster.backend, config.cluster.timeout)
    check_cluster(config.cluster, ranks.size)
    seed = config.distillation.seed
    seed_everything(seed)
    with stage("tokenizers"):
        tokenizer = chat_tokenizer_of(config.policy)
        teacher_tokenizer = None if config.teacher is None else chat_tokenizer_of(config.teacher)
    check_settings(config.policy, tokenizer, name="student", trained=True)
    if config.teacher is not None and config.teacher.server is None:
        check_settings(config.teacher, teacher_tokenizer, name="teacher", trained=False)
    foreign = _foreign(tokenizer, teacher_tokenizer)
    _check_lengths(config, foreign=foreign is not None)
    server = _server(config, tokenizer, teacher_tokenizer)
    with stage("traces") as told:
        dataset = load_traces(config.traces)
        held_out = dataset if config.traces.validation is None else load_traces(config.traces, "validation")
        told.note = f"{len(dataset):,}, {len(held_out):,} to validate"
    checkpointer = CheckpointManager(config.checkpointing, run_dir=config.logger.log_dir)
    found = checkpointer.to_resume()
    latest = None if found is None else Checkpoint(found)
    _open_folder(config, tokenizer, teacher_tokenizer, dataset, has_checkpoint=latest is not None)
    advantages = compute_advantages(dataset.traces, config.loss.policy, config.traces)
    collator = partial(make_collator, config.traces, config.policy, config.teacher, tokenizer, foreign)
    collate = TraceCollate(collator(hint=config.uses("hint"), preference=config.uses("preference")), advantages)
    loader = make_loader(
        dataset,
        collate,
        records=config.distillation.num_prompts_per_step,
        layout=config.policy.dtensor_cfg,
        seed=seed,
        shuffle=config.traces.shuffle,
        num_workers=config.traces.num_workers,
    )
    announce(config, checkpointer, latest, loader)
    policy, _ = fitted(config.policy)
    with stage(f"loading the student {policy.shown_name}"):
        student = Policy(
            policy,
            tokenizer,
            name="student",
            seed=seed,
            weights_path=latest.weights if latest else None,
            optimizer_path=latest.optimizer if latest else None,
            dp_group=ranks,
        )
    policy_loss = PolicyGradientLossFn(advantages.cfg, block_rows=config.loss.block_rows)
    with stage("the teacher of hints"):
        teacher = _teacher(config, student, tokenizer, teacher_tokenizer, server)
    monitor = CollapseMonitor(tokenizer, student.vocab_size, config.distillation.monitor)
    preference_loss = PreferenceLossFn(config.loss.preference, block_rows=config.loss.block_rows)
    needs_reference = config.uses("preference") and config.loss.preference.needs_reference
    reference = ReferenceLogProbs(dataset) if needs_reference else None
    step = TraceStep(
        student,
        policy_loss=policy_loss,
        hint_loss=_hint_loss(config, teacher, tokenizer, foreign),
        preference_loss=preference_loss,
        teacher=teacher,
        reference=reference,
        monitor=monitor,
    )
    with Comm.world().fail_together():
        if Comm.world().rank == 0:
            check_origins(config.logger.log_dir, _files(config), has_checkpoint=latest is not None)
    measured = TraceCollate(collator(hint=True, preference=True))
    validation = TraceValidation(student, held_out, measured, monitor, rows=config.distillation.val_batch_size)
    state: TraceSaveState = {**_fresh_state(), "dropped": dict(dataset.dropped)}
    if latest is not None:
        with fitting(f"the checkpoint {str(latest.folder)!r}"):
            state = _resume(checkpointer, latest, loader, step, dataset.fingerprint)
    elif reference is not None:
        rank, world = data_rank_and_world(config.policy.dtensor_cfg)
        with stage("the start's probabilities of preferred messages"):
            reference.fill(student, dataset, collate, rank=rank, world=world, rows=config.distillation.val_batch_size)
    logger = Logger(config.logger, resume_step=state["total_steps"] if latest else -1, rank=Comm.world().rank)
    logger.print(f"{len(dataset)} traces, {_policy_line(advantages)}")
    return TraceRun(config, student, step, loader, validation, logger, checkpointer, state)


def _policy_line(advantages: Advantages) -> str:
    """What becomes of the policy channel; without rewards it has nothing to learn from."""
    if bool(advantages.counted.any()):
        return f"policy mode {advantages.cfg.mode}"
    return "the policy channel is off: no trace has a reward (limbeck traces ingest --judge MODEL@URL scores them)"


def _fresh_state() -> TraceSaveState:
    return {"current_epoch": 0, "current_step": 0, "total_steps": 0, "consumed_samples": 0, "total_valid_tokens": 0}


def _open_folder(
    config: TraceMasterConfig,
    tokenizer: object,
    teacher_tokenizer: object,
    dataset: TraceDataset,
    *,
    has_checkpoint: bool,
) -> None:
    if Comm.world().rank != 0:
        return
    others = [] if teacher_tokenizer is None else [teacher_tokenizer]
    facts = run_folder.versions(
        seed=config.distillation.seed,
        student_fingerprint=ByteVocab.from_tokenizer(tokenizer).fingerprint,
        teacher_fingerprints=[ByteVocab.from_tokenizer(t).fingerprint for t in others],
        traces_fingerprint=dataset.fingerprint,
    )
    run_folder.open_run_folder(config, config.logger.log_dir, has_checkpoint=has_checkpoint, versions=facts)


def _foreign(tokenizer: object, teacher_tokenizer: object | None) -> Any | None:
    """The teacher's tokenizer where it is another one than the student's."""
    if teacher_tokenizer is None:
        return None
    same = ByteVocab.from_tokenizer(teacher_tokenizer).same_tokens(ByteVocab.from_tokenizer(tokenizer))
    return None if same else teacher_tokenizer


def _files(config: TraceMasterConfig) -> dict[str, list[Stamp]]:
    """Stamps of what every start reads: sites, a live teacher's weights, and the student's below adapters or as its own
    first teacher. The traces themselves have a fingerprint."""
    models: dict[str, ModelConfig] = {}
    own, hinted = config.teacher, config.uses("hint")
    if own is not None and own.server is None and hinted:
        models["teacher"] = own
    starts = own is None and hinted and config.loss.hint.self_teacher in ("frozen", "trust_region")
    if starts or config.policy.trains_adapters():
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
    if config.uses("hint") and config.teacher is not None and config.teacher.server is None:
        check_length(config.teacher, rows.teacher, name="teacher", keys="traces.max_teacher_seq_length")


def _server(config: TraceMasterConfig, tokenizer: object, teacher_tokenizer: object) -> ServerTeacher | None:
    """The hinted teacher behind a server, connected before any model is loaded."""
    if config.teacher is None or config.teacher.server is None or not config.uses("hint"):
        return None
    student, readers = ByteVocab.from_tokenizer(tokenizer), same_rows(config.policy.dtensor_cfg)
    longest = row_lengths(config.traces, config.policy, config.teacher).teacher
    return connect(config.teacher.server, teacher_tokenizer, student, longest=longest, readers=readers)


def _teacher(
    config: TraceMasterConfig,
    student: Policy,
    tokenizer: object,
    teacher_tokenizer: object,
    server: ServerTeacher | None,
) -> HintTeacher | None:
    seed, hint = config.distillation.seed, config.loss.hint
    if not config.uses("hint"):
        return None
    if server is not None:
        return HintTeacher([server])
    if config.teacher is not None:
        vocab = ByteVocab.from_tokenizer(tokenizer)
        return make_other_teacher(fitted(config.teacher)[0], teacher_tokenizer, vocab, seed=seed + 1)
    return make_self_teacher(
        student,
        hint.self_teacher,
        student.cfg,
        seed=seed,
        ema_decay=hint.ema_decay,
        trust_region=hint.trust_region,
    )


def _hint_loss(
    config: TraceMasterConfig, teacher: HintTeacher | None, tokenizer: object, foreign: Any | None
) -> HintDistillationLossFn:
    hint = config.loss.hint
    projection = None
    if foreign is not None and teacher is not None:
        projection = load_or_build(tokenizer, foreign, hint.projection_matrix_path)
    share = 0.0 if teacher is None else teacher.trust_region
    rows = config.loss.block_rows
    return HintDistillationLossFn(hint, projection=projection, trust_region=share, block_rows=rows)


def _resume(
    checkpointer: CheckpointManager, latest: Checkpoint, loader: StatefulDataLoader, step: TraceStep, fingerprint: str
) -> TraceSaveState:
    state = _fresh_state()
    names = TraceSaveState.__annotations__
    state.update(stored_counters(checkpointer, latest, names))  # type: ignore[typeddict-item]
    # averaged weights arrive in this run's layout, whichever wrote them
    template = None if step.teacher is None else {"teacher": step.teacher.state_dict()}
    shared = latest.shared(template)
    if shared["traces"] != fingerprint:
        raise DataError(
            "traces.train is no longer what this run began with (files, pairs or their order have changed); put the "
            "old traces back, or give another logger.log_dir"
        )
    if step.teacher is not None:
        step.teacher.load_state_dict(shared["teacher"])
    if step.reference is not None:
        step.reference.load_state_dict(shared["reference"])
    stored = latest.own()
    step.hint_loss.guard.seen = int(stored["guard_seen"])
    resume(stored, state, loader)
    return state


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
        trainer = self.student.trainer
        assert trainer is not None
        result = trainer.step(self.channels(batch, factors, monitored=monitored), timer).as_dict()
        if factors["hint"]:
            check_disjoint(result["metrics"])
        if self.teacher is not None:
            self.teacher.after_step()
        return result

    def channels(self, batch: ComposerBatch, factors: Mapping[str, float], *, monitored: bool = False) -> list[Channel]:
        """What a step learns from; a channel with factor 0 is left out."""
        make = {"policy": self._policy, "hint": self._hint, "preference": self._preference}
        return [make[name](batch, factors[name], monitored) for name in make if factors[name]]

    def _policy(self, batch: ComposerBatch, factor: float, monitored: bool) -> Channel:
        channel = batch.channel("policy")
        channel["advantages"] = batch["advantages"]

        def measure(hidden: Tensor, head: Head, signals: Sequence[Signal], inputs: Any) -> Mapping[str, Pair]:
            return self.monitor.policy(hidden, head, inputs)

        return Channel(channel, self.policy_loss, factor=factor, monitor=measure if monitored else None)

    def _hint(self, batch: ComposerBatch, factor: float, monitored: bool) -> Channel:
        assert self.teacher is not None, "a hint channel without a teacher"
        share = self.teacher.trust_region
        mix_weights = (1 - share, share) if share else (1.0,)

        def measure(hidden: Tensor, head: Head, signals: Sequence[Signal], inputs: Any) -> Mapping[str, Pair]:
            return self.monitor.hint(hidden, head, signals, mix_weights, inputs)

        return Channel(
            batch.channel("hint"),
            self.hint_loss,
            self.teacher.sources,
            factor=factor,
            monitor=measure if monitored else None,
            reported=_HINT_METRICS,
        )

    def _preference(self, batch: ComposerBatch, factor: float, monitored: bool) -> Channel:
        channel = batch.channel("preference")
        if self.reference is not None:
            with self.student.dims.data.fail_together():
                self.reference.attach(batch, channel)
        return Channel(channel, self.preference_loss, factor=factor, rows_together=2)


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(run: TraceRun) -> None:
    """Train until ``max_num_steps`` or ``max_num_epochs``, or until asked to stop; see :func:`setup`."""
    _Loop(run).train()


class _Loop(TrainingLoop):
    """Steps on the three channels of traces, validated by how probable failed and preferred messages are."""

    def __init__(self, run: TraceRun) -> None:
        super().__init__(run.config, run.state, run.student, run.loader, run.logger, run.checkpointer)
        self.step, self.validation, self.weights = run.step, run.validation, run.config.weights()

    def train_step(self, batch: ComposerBatch) -> dict[str, Any]:
        done = self.state["total_steps"]
        return self.step(batch, self.weights.at(done), monitored=self.step.monitor.due(done + 1), timer=self.timer)

    def dropped_of(self, batch: ComposerBatch) -> list[dict[str, int]]:
        return [batch["dropped"]]

    def more_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        factors = self.weights.at(self.state["total_steps"] - 1)
        counts = {f"count/{name}": float(value) for name, value in result["counts"].items()}
        return {"alpha": factors["hint"], "beta": factors["preference"], **counts}

    def validate(self) -> dict[str, Any]:
        with self.timer.time("validation"):
            return self.validation.measure()

    def samples(self) -> list[dict[str, Any]]:
        return self.validation.written

    def summary_line(self, means: dict[str, float]) -> str:
        shown = ", ".join(f"{name} {means[key]:.3f}" for key, name in _SHOWN.items() if key in means)
        return f"mean log p of {shown or 'nothing: there are no failed or preferred messages'}"

    def shared_state(self) -> dict[str, Any]:
        teacher, reference = self.step.teacher, self.step.reference
        return {
            "traces": self.loader.dataset.fingerprint,
            "teacher": {} if teacher is None else teacher.state_dict(),
            "reference": {} if reference is None else reference.state_dict(),
        }

    def own_state(self) -> dict[str, Any]:
        return {"guard_seen": self.step.hint_loss.guard.seen}

    def nothing_learned(self, left_out: str) -> str:
        return (
            f"traces.train holds nothing to learn from: in {self.state['consumed_samples']} traces no reward, failed "
            f"call or pair counts for the channels that are on (left out: {left_out})"
        )


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
