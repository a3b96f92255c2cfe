"""On-policy distillation: the student writes, its teachers correct what it wrote.

Per step: prompts -> the student's continuations -> each teacher reads their bytes in its own tokens and template ->
loss -> one optimizer step. Stored text may be mixed in (``on_policy.fraction``). Everything around a step is that of
off-policy distillation, and with ``fraction: 0`` so is the step.

    limbeck train on_policy_cpu
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limbeck.algorithms import run_folder
from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.algorithms.build import common_ends, load_datasets, load_tokenizers, reading_of
from limbeck.algorithms.config import OnPolicyConfig, OnPolicyMasterConfig
from limbeck.algorithms.engine import EngineSampler
from limbeck.algorithms.episodes import Episodes
from limbeck.algorithms.observers.runaway import RunawayGuard
from limbeck.algorithms.overlap import AheadWriter
from limbeck.algorithms.pace import Pace
from limbeck.algorithms.ray_sampler import RaySampler
from limbeck.algorithms.rewards import Reward, make_reward
from limbeck.algorithms.rollouts import WRITTEN, Rollout, Rollouts, StepCollate, StepData, Written, balanced
from limbeck.algorithms.served_sampler import ServedSampler
from limbeck.algorithms.start import is_finished, whole_run
from limbeck.algorithms.vllm_sampler import VllmSampler
from limbeck.align import TokenAligner
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.sources import CONTEXT, REFERENCE, build_dataset, flatten_documents
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, DataError
from limbeck.losses.chunk_policy import BEHAVIOR, ChunkPolicyLossFn, sampled_figures
from limbeck.losses.contract import Loss, State
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.continuous import make_local_sampler
from limbeck.models.generate import Sampler
from limbeck.models.policy import Policy
from limbeck.models.trainer import StepInput
from limbeck.teachers.self_teacher import SelfTeacher, Weights, make_self_teacher
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import CREDIT_CLASSES, credit_table
from limbeck.traces.failed_state_prompts import load_failed_states
from limbeck.utils.metrics import Pair
from limbeck.utils.progress import stage

__all__ = ["OnPolicyConfig", "OnPolicyMasterConfig", "OnPolicyRun", "run", "setup", "train"]

PREFIX = "on_policy/"
"""Prefix of the metrics of the loss on sampled text."""
ANCHOR = "anchor/"
REWARD = "reward/"
ENGINE_ROWS = 8
"""Samples per step whose log-probabilities from an engine are compared with the trainer's."""
_OF_TEACHERS = ("teacher_", "chunks_", "alignment_")


@dataclass
class OnPolicyRun(off_policy.OffPolicyRun):
    """A run on what the student writes. ``sampled_loss`` is of that; ``loss_fn`` of stored text."""

    config: OnPolicyMasterConfig
    sampled_loss: Loss[Any]
    anchor: SelfTeacher | None
    self_teacher: SelfTeacher | None
    rollouts: Rollouts

    def averages(self) -> dict[str, SelfTeacher]:
        """Models of the student's past that move along, by their names in a checkpoint."""
        both = {"anchor": self.anchor, "self_teacher": self.self_teacher}
        return {name: past for name, past in both.items() if past is not None}

    def own_state(self) -> State:
        return {**super().own_state(), "sampled_loss": self.sampled_loss.state_dict()}

    def load_own_state(self, stored: State) -> None:
        super().load_own_state(stored)
        self.sampled_loss.load_state_dict(stored["sampled_loss"])
        # checkpoints written before observers had states of their own
        if "guard" in stored:
            self.state.observers.setdefault(RunawayGuard.name, stored["guard"])

    def shared_state(self) -> State:
        return super().shared_state() | {name: past.state_dict() for name, past in self.averages().items()}

    def load_shared_state(self, checkpoint: Checkpoint) -> None:
        super().load_shared_state(checkpoint)
        for name, past in self.averages().items():
            past.load_state_dict(checkpoint.shared({name: past.state_dict()})[name])

    def nothing_learned(self, skipped: str) -> str:
        return (
            f"nothing was learnt from in {self.state.consumed_samples} prompts (skipped: {skipped}); give prompts "
            "that leave room for an answer, or teachers that can read what the student writes"
        )


# ---- set-up ----------------------------------------------------------------------------------------------------------


def setup(
    config: OnPolicyMasterConfig,
    student_tokenizer: object,
    teacher_tokenizers: Sequence[Any],
    train_dataset: Any,
    val_dataset: Any | None,
) -> OnPolicyRun:
    """Models, data and losses of a run file, resumed from the latest checkpoint if there is one."""
    on_policy, hinted = config.on_policy, config.self_teacher
    check_self_teachers(config, train_dataset)
    parts, latest = off_policy.make_parts(
        config,
        student_tokenizer,
        teacher_tokenizers,
        train_dataset,
        val_dataset,
        wrap=partial(step_collate, config),
    )
    student: Policy = parts["student"]
    rows: ContinuationCollator = parts["loader"].collate_fn.rows
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    foreign = off_policy.foreign_tokenizers(student_tokenizer, teacher_tokenizers) if hinted is None else [None]
    ends = common_ends(config, student_tokenizer, teacher_tokenizers, foreign) if hinted is None else [()]
    sampled_loss = _sampled_loss(config, student, student_tokenizer, foreign, rows.end_ids, ends)
    kept = on_policy.anchor
    anchor = None if kept is None else _past(config, student, kept.kind, kept.ema_decay)
    self_teacher = None if hinted is None else _past(config, student, hinted.self_teacher, hinted.ema_decay)
    reward = None if on_policy.reward is None or on_policy.reward.environment else make_reward(on_policy.reward)
    if reward is not None:
        check_references(reward, train_dataset)
    sampler = _sampler(config, student, rows.end_ids, vocab)
    rollouts = _rollouts(config, student, sampler, rows, reward)
    run = OnPolicyRun(**parts, sampled_loss=sampled_loss, anchor=anchor, self_teacher=self_teacher, rollouts=rollouts)
    run.begin(latest)
    return run


RECORDS_SEEN = 64
"""Among which one must have a context for a teacher that is the student itself, and what a verifier compares with."""


def check_references(reward: Reward, records: Any) -> None:
    """Refuse a reward that finds nothing to compare answers with."""
    first: DataError | None = None
    for record in flatten_documents([records[i] for i in range(min(len(records), RECORDS_SEEN))]):
        try:
            reward.check(record.get(REFERENCE) or {})
            return
        except DataError as error:
            first = first or error
    raise ConfigError(f"on_policy.reward.verifier can judge none of the first {RECORDS_SEEN} records: {first}")


def check_self_teachers(config: OnPolicyMasterConfig, records: Any) -> None:
    """Refuse a student that is its own teacher on its own text where the teacher reads nothing more."""
    if config.on_policy.fraction == 0 or not any(teacher.kind.follows_student for teacher in config.all_teachers):
        return
    if config.on_policy.hint_after_failure is not None:
        return
    seen = flatten_documents([records[i] for i in range(min(len(records), RECORDS_SEEN))])
    if not any(record.get(CONTEXT) for record in seen):
        raise ConfigError(
            f"a teacher of source 'self' reads no more than the student does: none of the first {RECORDS_SEEN} records "
            f"has a {config.data.teacher_context_key or CONTEXT}; give it one, hold the student near its past by "
            "on_policy.anchor, or let it read hints by on_policy.failed_states.self_teacher or "
            "on_policy.hint_after_failure"
        )


def _sampler(config: OnPolicyMasterConfig, student: Policy, end_ids: Sequence[int], vocab: ByteVocab) -> Sampler:
    on_policy, engine = config.on_policy, config.on_policy.engine
    if engine is None:
        return make_local_sampler(student, on_policy.sampler, on_policy, end_ids, vocab)
    if engine.ray is not None:
        return RaySampler(engine, on_policy, on_policy.sampler, end_ids, patience=config.cluster.timeout)
    kind = VllmSampler if engine.vllm is not None else ServedSampler
    return kind(engine, on_policy, end_ids, vocab.size)


def _rollouts(
    config: OnPolicyMasterConfig, student: Policy, sampler: Sampler, rows: ContinuationCollator, reward: Reward | None
) -> Rollouts:
    on_policy, n, seed = config.on_policy, config.on_policy.samples_per_prompt, config.distillation.seed
    if on_policy.environment is None:
        return Rollouts(sampler, rows, n=n, seed=seed, reward=reward)
    if student.dims.is_sharded or student.dims.rows.size > 1:
        raise ConfigError(
            "on_policy.environment needs the whole student in each process, since episodes wait for their tools by "
            "themselves; set the parallel sizes of policy.dtensor_cfg to 1"
        )
    by_environment = on_policy.reward is not None and on_policy.reward.environment
    return Episodes(
        sampler,
        rows,
        on_policy.environment,
        n=n,
        seed=seed,
        reward=reward,
        by_environment=by_environment,
        hints=on_policy.hint_after_failure,
    )


def _sampled_loss(
    config: OnPolicyMasterConfig,
    student: Policy,
    student_tokenizer: object,
    foreign: Sequence[Any],
    end_ids: Sequence[int],
    ends: Sequence[Sequence[int]],
) -> Loss[Any]:
    on_policy = config.on_policy
    if on_policy.policy_gradient is not None:
        classes = torch.from_numpy(credit_table(ByteVocab.from_tokenizer(student_tokenizer), student.vocab_size))
        return ChunkPolicyLossFn(
            on_policy.policy_gradient,
            len(foreign),
            classes_V=classes,
            class_names=CREDIT_CLASSES,
            end_ids=end_ids,
            ends=ends,
        )
    paths = {"projection_matrix_path": config.loss_fn.projection_matrix_path}
    return off_policy.make_loss(on_policy.loss_fn.model_copy(update=paths), student_tokenizer, foreign, ends=ends)[0]


def _past(config: OnPolicyMasterConfig, student: Policy, kind: Weights, decay: float) -> SelfTeacher:
    """The student's start, or an average of its past."""
    return make_self_teacher(student, kind, config.policy, seed=config.distillation.seed, ema_decay=decay)


def step_collate(config: OnPolicyMasterConfig, collator: CrossTokenizerCollator) -> StepCollate:
    """Maker of prompts, and of rows of stored text, of records."""
    on_policy = config.on_policy
    plain = collator
    if on_policy.environment is not None and collator.mode != "chat":
        raise ConfigError("on_policy.environment needs conversations, but data.train holds texts; give chat records")
    if on_policy.failed_states is not None and not collator.teachers:
        # stored rows keep the collator without this teacher
        plain = copy.copy(collator)
        plain.teachers = [replace(collator.student, name="student as its teacher", context_as="hint")]
        plain.aligners = [TokenAligner(collator.student.tokenizer, collator.student.tokenizer)]
    rows = ContinuationCollator(
        plain,
        prompt_tokens=on_policy.prompt_tokens,
        max_new_tokens=on_policy.max_new_tokens,
        compare_stops=on_policy.compare_stops,
        mask_blanks=on_policy.mask_blanks,
        turns=on_policy.turns,
    )
    plays = on_policy.environment is not None
    if plays and rows.markup is None:
        raise ConfigError(
            "the student's chat template writes no tool calls, so that on_policy.environment could read none; give a "
            "template that does as policy.tokenizer.chat_template"
        )
    return StepCollate(rows, collator, seed=config.distillation.seed, fraction=on_policy.fraction, plays=plays)


def training_data(config: OnPolicyMasterConfig) -> tuple[Any, Any | None]:
    """Training and validation data; of agent logs their failed states."""
    states = config.on_policy.failed_states
    if states is None:
        reward = config.on_policy.reward
        if config.on_policy.environment is not None:
            return load_datasets(config, None)
        return load_datasets(config, () if reward is None or reward.verifier is None else reward.verifier.keys)
    val = build_dataset(reading_of(config), "validation").prepare() if config.data.validation else None
    return load_failed_states(config.data.train, states), val


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(run: OnPolicyRun) -> None:
    """Train until ``max_num_steps`` or ``max_num_epochs``, or until asked to stop; see :func:`setup`."""
    OnPolicyLoop(run).train()


class OnPolicyLoop(off_policy.OffPolicyLoop[OnPolicyRun]):
    """Steps on what the student writes, validated like off-policy distillation."""

    def __init__(self, run: OnPolicyRun) -> None:
        super().__init__(run)
        self.rollouts, self.collator = run.rollouts, run.loader.collate_fn.stored
        self.fraction = run.config.on_policy.fraction
        self.readers = run.teachers if run.self_teacher is None else [run.self_teacher]
        """Who scores what the student writes."""
        self.anchor_loss = CrossTokenizerDistillationLossFn(
            {"direction": "reverse", "ce_loss_scale": 0.0}, projections=[None]
        )
        divisor = float(run.config.on_policy.max_new_tokens)
        # as the mode says by itself, where it is asked about groups: those of episodes are settled before
        self.reward_loss = PolicyGradientLossFn({"mode": "dr_grpo", "divisor": divisor, "normalisation": "constant"})
        self.rollout: Rollout | None = None
        self.writer: AheadWriter | None = None
        if run.config.on_policy.overlap:
            assert isinstance(self.rollouts.sampler, EngineSampler)
            self.writer = AheadWriter(self.rollouts, self.rollouts.sampler, run.student, self.readers)
        asked = run.teachers if self.writer is not None or self.fraction < 1 else []
        self.pace = Pace(asked, None if self.writer is None else self.writer.clock)

    def close(self) -> None:
        # before the teachers, which it asks
        if self.writer is not None:
            self.writer.close()
        elif isinstance(self.rollouts.sampler, EngineSampler):
            self.rollouts.sampler.close()
        self.rollouts.close()
        super().close()

    def train_step(self, batch: StepData) -> dict[str, Any]:  # type: ignore[override]
        student, timer = self.run.student, self.run.timer
        trainer = student.trainer
        assert trainer is not None
        dims = student.dims
        # ranks that write together wait for each other inside the model
        together = Comm.alone() if dims.is_sharded else dims.data
        engine = self.rollouts.sampler if isinstance(self.rollouts.sampler, EngineSampler) else None
        self.pace.begin()
        with timer.time("sample"):
            written, staleness = self._written(batch, together)
            self.run.logger.log_episodes(written.traces)
            written = balanced(
                written, dims.data, self.rollouts.rows, [] if self.writer is None else self.writer.readers
            )
            with together.fail_together():
                self.rollout = rollout = written.rollout or self.rollouts.collate(written)
            if engine is not None:
                rollout.metrics.add(self._engine_figures(rollout, staleness))
        # data-parallel ranks, per step: some figures of what was written
        figures, _ = rollout.metrics.reduced(dims.data)
        if engine is not None:
            engine.check_gap(figures.means().get("sample/engine_gap", 0.0))
        self._look_ahead(batch)
        with self.pace.train():
            result = trainer.step(self.step_inputs(batch, rollout), timer).as_dict()
        if not dims.data.any(batch.stored is not None or self._compares(rollout)):
            # what no teacher could read was not learnt from, whatever the anchor said about it
            result["global_valid_toks"] = 0.0
        result["metrics"] = {**result["metrics"], **figures.pairs()}
        return result

    def _written(self, batch: StepData, together: Comm) -> tuple[Written, int]:
        """What the student has written for this step, and how old the weights were that it was written with."""
        step, sampler = self.run.state.total_steps, self.rollouts.sampler
        if self.writer is not None:
            return self.writer.take(batch, step)
        sampler.sync(self.run.student, step)
        with together.fail_together():
            written = self.rollouts.write(batch, step)
        return written, sampler.staleness if isinstance(sampler, EngineSampler) else 0

    def _look_ahead(self, batch: StepData) -> None:
        """Begin what the next step needs and this one can do without. Behind the last answer of this step and before
        the first of the next: collating, here and there, is not for two threads."""
        asks = self.fraction < 1 and any(teacher.asks_ahead for teacher in self.run.teachers)
        if self.writer is None and not asks:
            return
        upcoming: StepData | None = self.upcoming()
        if asks:
            self.ask_ahead(batch.stored, None if upcoming is None else upcoming.stored)
        # all ranks, per step: one that cannot read its records starts nothing, and then none may
        if self.writer is not None and not Comm.world().any(upcoming is None):
            assert upcoming is not None
            with self.run.timer.time("hand_over"):
                self.writer.start(upcoming, self.run.state.total_steps + 1, age=1)

    def validate(self) -> dict[str, Any]:
        if self.writer is not None:
            self.writer.wait()
        return super().validate()

    def _compares(self, rollout: Rollout) -> bool:
        """Whether this rank has anything of a step's samples to learn from."""
        on_policy = self.run.config.on_policy
        if on_policy.reward is not None or (on_policy.policy_gradient is None and on_policy.loss_fn.ce_loss_scale):
            return True
        numbers = range(len(self.readers))
        chunks = [rollout.batch.get(f"chunks_{i}") for i in numbers]
        asked = [rollout.batch.get(f"teacher_{i}_sample_mask") for i in numbers]
        # a teacher with the student's tokens has no chunks, and reads all rows that it is asked about
        return any(
            mask is None or bool(mask.any()) if one is None else one.num_chunks > 0
            for one, mask in zip(chunks, asked, strict=True)
        )

    def _engine_figures(self, rollout: Rollout, staleness: int) -> Mapping[str, Pair]:
        """How old the engine's weights are, and how far its log-probabilities are from the trainer's."""
        few = slice(0, ENGINE_ROWS)
        names = ("input_ids", "input_lengths")
        rows: BatchedDataDict = BatchedDataDict({name: rollout.batch[name][few] for name in names})
        mine, theirs = self.run.student.get_logprobs(rows)["logprobs"], rollout.batch[BEHAVIOR][few]
        # zeros stand where nothing was written, see `Rollouts.collate`
        written = theirs != 0
        gap = (mine - theirs)[written].abs().double()
        return {
            "sample/staleness": (float(staleness), 1.0),
            "sample/engine_gap": (float(gap.sum()), float(gap.numel())),
        }

    def step_inputs(self, batch: StepData, rollout: Rollout) -> list[StepInput]:
        """Inputs of a step; the same ones on every rank, whatever rows it has."""
        run, config = self.run, self.run.config.on_policy
        most, ends = config.monitor_chunks, self.rollouts.rows.end_ids

        # the policy gradient computes all but the entropy itself
        loss_fn = run.sampled_loss
        entropy_alone = not isinstance(loss_fn, CrossTokenizerDistillationLossFn)
        objectives = loss_fn.objectives if isinstance(loss_fn, CrossTokenizerDistillationLossFn) else []
        events = [objective.ends for objective in objectives] or None

        def measure(hidden: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: Any) -> Mapping[str, Pair]:
            figures = sampled_figures(hidden, head, signals, inputs.layouts, most=most, end_ids=ends, ends=events)
            return {"entropy": figures["entropy"]} if entropy_alone else figures

        monitor = measure if most else None
        sampled = rollout.batch, run.sampled_loss, self.readers, self.fraction
        step_inputs = [StepInput(*sampled, monitor=monitor, prefix=PREFIX)]
        rows: BatchedDataDict = BatchedDataDict(
            {k: v for k, v in rollout.batch.items() if not k.startswith(_OF_TEACHERS)}
        )
        # reward and anchor are about all that was written
        rows["token_mask"] = rows[WRITTEN]
        if config.reward is not None:
            factor = self.fraction * config.reward.weight
            step_inputs.append(StepInput(rows, self.reward_loss, factor=factor, prefix=REWARD))
        if run.anchor is not None and config.anchor is not None:
            factor = self.fraction * config.anchor.weight
            step_inputs.append(StepInput(rows, self.anchor_loss, [run.anchor], factor=factor, prefix=ANCHOR))
        if batch.stored is not None:
            step_inputs.append(StepInput(batch.stored, run.loss_fn, run.teachers, factor=1 - self.fraction))
        return step_inputs

    def skipped_of(self, batch: StepData) -> list[dict[str, int]]:  # type: ignore[override]
        assert self.rollout is not None
        return [batch.skipped, self.rollout.skipped, *self.rollout.batch["skipped"]]

    def rows_of(self, batch: StepData) -> BatchedDataDict:
        assert self.rollout is not None
        return self.rollout.batch

    def bits_per_byte(self, batch: StepData, result: Mapping[str, Any]) -> float | None:
        # of stored text alone: what the student wrote by itself says nothing about how well it reads
        return None if batch.stored is None else self.bits_of(batch.stored, result)

    def stored_rows(self, records: list[Any]) -> BatchedDataDict:
        return self.collator(records)


def run(config: OnPolicyMasterConfig) -> Path:
    """Train from a run file, resuming where a checkpoint lies; returns the run folder."""
    if config.on_policy.fraction == 0:
        return off_policy.run(config)
    with whole_run(config):
        if is_finished(config):
            return Path(config.logger.log_dir)
        with stage("tokenizers"):
            student_tokenizer, teacher_tokenizers = load_tokenizers(config)
        with stage("data"):
            train_set, val_set = training_data(config)
        parts = setup(config, student_tokenizer, teacher_tokenizers, train_set, val_set)
        if Comm.world().rank == 0 and config.on_policy.failed_states is None:
            folder = config.logger.log_dir
            run_folder.write_alignment_sample(folder, student_tokenizer, teacher_tokenizers[0], train_set)
        train(parts)
    return Path(config.logger.log_dir)
