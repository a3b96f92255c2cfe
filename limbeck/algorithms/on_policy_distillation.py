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
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms import run_folder
from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.algorithms.build import load_datasets, load_tokenizers, reading_of, teacher_lengths
from limbeck.algorithms.config import OnPolicyConfig, OnPolicyMasterConfig
from limbeck.algorithms.engine import EngineSampler
from limbeck.algorithms.loop import is_finished, whole_run
from limbeck.algorithms.ray_sampler import RaySampler
from limbeck.algorithms.rewards import make_reward
from limbeck.algorithms.rollouts import WRITTEN, Rollout, Rollouts, RunawayGuard, StepCollate, StepData, balanced
from limbeck.algorithms.served_sampler import ServedSampler
from limbeck.algorithms.vllm_sampler import VllmSampler
from limbeck.align import TokenAligner
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator, Side
from limbeck.data.sources import build_dataset
from limbeck.distributed.comm import Comm
from limbeck.losses.chunk_policy import BEHAVIOR, ChunkPolicyLossFn, sampled_figures
from limbeck.losses.contract import Loss, Teacher
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.losses.hint import SelfTeacherKind
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.signals import Head, Signal
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.continuous import make_local_sampler
from limbeck.models.generate import Sampler
from limbeck.models.policy import Policy
from limbeck.models.trainer import Channel
from limbeck.teachers.hinted import HintTeacher, make_self_teacher
from limbeck.teachers.server.teacher import ServerTeacher
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import CREDIT_CLASSES, credit_table
from limbeck.tokens.tokenizer import read_template
from limbeck.traces.states import load_failed_states
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.logger import Logger
from limbeck.utils.metrics import Pair
from limbeck.utils.progress import stage
from limbeck.utils.state import fitting, restore_rng

__all__ = ["OnPolicyConfig", "OnPolicyMasterConfig", "OnPolicyRun", "run", "setup", "train"]

PREFIX = "on_policy/"
"""Of the metrics of the loss on sampled text."""
ANCHOR = "anchor/"
REWARD = "reward/"
ENGINE_ROWS = 8
"""Samples per step whose log-probabilities from an engine are compared with the trainer's."""
_OF_TEACHERS = ("teacher_", "chunks_", "alignment_")


@dataclass
class OnPolicyRun:
    """Everything that :func:`train` needs; ``rollouts`` and ``sampled_loss`` are what off-policy distillation lacks."""

    config: OnPolicyMasterConfig
    student: Policy
    teachers: list[Teacher]
    loader: StatefulDataLoader
    val_loader: StatefulDataLoader | None
    loss_fn: Any
    sampled_loss: Loss[Any]
    anchor: HintTeacher | None
    self_teacher: HintTeacher | None
    guard: RunawayGuard
    rollouts: Rollouts
    logger: Logger
    checkpointer: CheckpointManager
    state: off_policy.OffPolicyDistillationSaveState


# ---- set-up ----------------------------------------------------------------------------------------------------------


def setup(
    config: OnPolicyMasterConfig,
    student_tokenizer: object,
    teacher_tokenizers: Sequence[Any],
    train_dataset: Any,
    val_dataset: Any | None,
) -> OnPolicyRun:
    """Models, data and losses of a run file, resumed from the latest checkpoint if there is one."""
    own = config.on_policy
    parts = off_policy.setup(
        config,
        student_tokenizer,
        list(teacher_tokenizers),
        train_dataset,
        val_dataset,
        wrap=partial(_step_collate, config),
    )
    student, teacher, loader, val_loader, loss_fn, logger, checkpointer, state, _ = parts
    rows: ContinuationCollator = loader.collate_fn.rows
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    foreign = off_policy.foreign_tokenizers(student_tokenizer, teacher_tokenizers)
    if config.self_teacher is not None:
        foreign = [None]
    sampled_loss = _sampled_loss(config, student, student_tokenizer, foreign, rows.end_ids)
    anchor = None if own.anchor is None else _past(config, student, own.anchor.kind, own.anchor.ema_decay)
    hinted = config.self_teacher
    self_teacher = None if hinted is None else _past(config, student, hinted.self_teacher, hinted.ema_decay)
    guard = RunawayGuard(own.guard)
    reward = None if own.reward is None else make_reward(own.reward)
    sampler = _sampler(config, student, rows.end_ids, vocab)
    teachers = off_policy.as_teachers(teacher)
    for server in teachers:
        if isinstance(server, ServerTeacher):
            with Comm.world().fail_together():
                server.check_repeats()
    found = checkpointer.to_resume()
    if found is not None:
        latest = Checkpoint(found)
        with fitting(f"the checkpoint {str(latest.folder)!r}"):
            stored = latest.own()
            sampled_loss.load_state_dict(stored["sampled_loss"])
            guard.load_state_dict(stored["guard"])
            for name, past in _averages(anchor, self_teacher).items():
                past.load_state_dict(latest.shared({name: past.state_dict()})[name])
            restore_rng(stored["rng"])
    return OnPolicyRun(
        config,
        student,
        teachers,
        loader,
        val_loader,
        loss_fn,
        sampled_loss,
        anchor,
        self_teacher,
        guard,
        Rollouts(sampler, rows, n=own.samples_per_prompt, seed=config.distillation.seed, reward=reward),
        logger,
        checkpointer,
        state,
    )


def _sampler(config: OnPolicyMasterConfig, student: Policy, end_ids: Sequence[int], vocab: ByteVocab) -> Sampler:
    own, engine = config.on_policy, config.on_policy.engine
    if engine is None:
        return make_local_sampler(student, own.sampler, own, end_ids, vocab)
    if engine.ray is not None:
        return RaySampler(engine, own, own.sampler, end_ids, patience=config.cluster.timeout)
    kind = VllmSampler if engine.vllm is not None else ServedSampler
    return kind(engine, own, end_ids, vocab.size)


def _sampled_loss(
    config: OnPolicyMasterConfig,
    student: Policy,
    student_tokenizer: object,
    foreign: Sequence[Any],
    end_ids: Sequence[int],
) -> Loss[Any]:
    own = config.on_policy
    if own.policy_gradient is not None:
        classes = torch.from_numpy(credit_table(ByteVocab.from_tokenizer(student_tokenizer), student.vocab_size))
        return ChunkPolicyLossFn(
            own.policy_gradient, len(foreign), classes_V=classes, class_names=CREDIT_CLASSES, end_ids=end_ids
        )
    paths = {"projection_matrix_path": config.loss_fn.projection_matrix_path}
    return off_policy.make_loss(own.loss_fn.model_copy(update=paths), student_tokenizer, foreign)


def _past(config: OnPolicyMasterConfig, student: Policy, kind: SelfTeacherKind, decay: float) -> HintTeacher:
    """The student's start, or an average of its past."""
    return make_self_teacher(student, kind, config.policy, seed=config.distillation.seed, ema_decay=decay)


def _averages(anchor: HintTeacher | None, self_teacher: HintTeacher | None) -> dict[str, HintTeacher]:
    """Models of the student's past that move along, by their names in a checkpoint."""
    both = {"anchor": anchor, "self_teacher": self_teacher}
    return {name: past for name, past in both.items() if past is not None}


def _step_collate(config: OnPolicyMasterConfig, collator: CrossTokenizerCollator) -> StepCollate:
    own = config.on_policy
    # the facts that a collator sends along belong to the loss on stored text
    plain = copy.copy(collator)
    if own.failed_states is not None:
        # a hint is read by the teacher alone, so that it needs rows of its own also where it shares the tokenizer
        own_rows = [side or _own_side(config, collator, i) for i, side in enumerate(plain.teachers)]
        own_rows = own_rows or [replace(collator.student, name="student as its teacher")]
        tokenizer, known = collator.student.tokenizer, plain.aligners or [None]
        plain.aligners = [
            aligner or TokenAligner(tokenizer, side.tokenizer) for aligner, side in zip(known, own_rows, strict=True)
        ]
        plain.teachers = list(own_rows)
    plain.conditions = [None] * len(plain.teachers)
    rows = ContinuationCollator(
        plain,
        prompt_tokens=own.prompt_tokens,
        max_new_tokens=own.max_new_tokens,
        compare_stops=own.compare_stops,
        mask_blanks=own.mask_blanks,
        turns=own.turns,
    )
    return StepCollate(rows, collator, seed=config.distillation.seed, fraction=own.fraction)


def _own_side(config: OnPolicyMasterConfig, collator: CrossTokenizerCollator, number: int) -> Side:
    """How a teacher with the student's tokenizer reads a conversation by itself."""
    own = config.all_teachers[number]
    template, like = own.tokenizer.chat_template, collator.student
    return Side(
        like.tokenizer,
        teacher_lengths(config)[number],
        own.make_sequence_length_divisible_by,
        like.template if template is None else read_template(template),
        own.tokenizer.chat_template_kwargs,
        f"teacher {number}",
    )


def _training_data(config: OnPolicyMasterConfig) -> tuple[Any, Any | None]:
    """Training and validation data; of agent logs their failed states."""
    states = config.on_policy.failed_states
    if states is None:
        return load_datasets(config)
    val = build_dataset(reading_of(config), "validation").prepare() if config.data.validation else None
    return load_failed_states(config.data.train, states), val


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(run: OnPolicyRun) -> None:
    """Train until ``max_num_steps`` or ``max_num_epochs``, or until asked to stop; see :func:`setup`."""
    OnPolicyLoop(run).train()


class OnPolicyLoop(off_policy.OffPolicyLoop):
    """Steps on what the student writes, validated like off-policy distillation."""

    def __init__(self, run: OnPolicyRun) -> None:
        super().__init__(
            run.student,
            run.teachers,
            run.loader,
            run.val_loader,
            run.loss_fn,
            run.logger,
            run.checkpointer,
            run.state,
            run.config,
        )
        self.rollouts, self.sampled_loss, self.collator = run.rollouts, run.sampled_loss, run.loader.collate_fn.stored
        self.fraction = run.config.on_policy.fraction
        self.anchor, self.self_teacher, self.guard = run.anchor, run.self_teacher, run.guard
        self.readers = run.teachers if run.self_teacher is None else list(run.self_teacher.sources)
        """Who scores what the student writes."""
        self.anchor_loss = CrossTokenizerDistillationLossFn(
            {"direction": "reverse", "ce_loss_scale": 0.0}, projections=[None]
        )
        divisor = float(run.config.on_policy.max_new_tokens)
        self.reward_loss = PolicyGradientLossFn({"mode": "dr_grpo", "divisor": divisor})
        self.rollout: Rollout | None = None

    def train_step(self, batch: StepData) -> dict[str, Any]:  # type: ignore[override]
        self.state.pop("val_loss", None)
        trainer = self.student.trainer
        assert trainer is not None
        step = self.state["total_steps"]
        dims = self.student.dims
        # ranks that write together wait for each other inside the model
        together = Comm.alone() if dims.is_sharded else dims.data
        engine = self.rollouts.sampler if isinstance(self.rollouts.sampler, EngineSampler) else None
        with self.timer.time("sample"):
            self.rollouts.sampler.sync(self.student, step)
            with together.fail_together():
                written = self.rollouts.draw(batch.prompts, step)
            written = balanced(written, dims.data)
            with together.fail_together():
                self.rollout = rollout = self.rollouts.collate(written)
            if engine is not None:
                rollout.metrics.add(self._engine_figures(rollout, engine))
        if self.student.dims.owns_records:
            for counts in rollout.batch["dropped"]:
                self.dropped.update(counts)
        # data-parallel ranks, per step: some figures of what was written
        figures, _ = rollout.metrics.reduced(self.student.dims.data)
        if engine is not None:
            engine.check_gap(figures.means().get("sample/engine_gap", 0.0))
        result = trainer.step(self.channels(batch, rollout), self.timer).as_dict()
        if not dims.data.any(batch.stored is not None or self._compares(rollout)):
            # what no teacher could read was not learnt from, whatever the anchor said about it
            result["global_valid_toks"] = 0.0
        for past in _averages(self.anchor, self.self_teacher).values():
            past.after_step()
        result["metrics"] = {**result["metrics"], **figures.pairs()}
        ratios = self.guard.observe(figures.means())
        result["metrics"] |= {name: (value, 1.0) for name, value in ratios.items()}
        return result

    def _compares(self, rollout: Rollout) -> bool:
        """Whether this rank has anything of a step's samples to learn from."""
        own = self.config.on_policy
        if own.reward is not None or (own.policy_gradient is None and own.loss_fn.ce_loss_scale):
            return True
        chunks = [rollout.batch.get(f"chunks_{i}") for i in range(len(self.readers))]
        # a teacher with the student's tokens has no chunks, and reads them all
        return any(one is None or one.num_chunks > 0 for one in chunks)

    def _engine_figures(self, rollout: Rollout, engine: EngineSampler) -> Mapping[str, Pair]:
        """How old the engine's weights are, and how far its log-probabilities are from the trainer's."""
        few = slice(0, ENGINE_ROWS)
        names = ("input_ids", "input_lengths")
        rows: BatchedDataDict = BatchedDataDict({name: rollout.batch[name][few] for name in names})
        mine, theirs = self.student.get_logprobs(rows)["logprobs"], rollout.batch[BEHAVIOR][few]
        written = theirs != 0
        gap = (mine - theirs)[written].abs().double()
        return {
            "sample/staleness": (float(engine.staleness), 1.0),
            "sample/engine_gap": (float(gap.sum()), float(gap.numel())),
        }

    def channels(self, batch: StepData, rollout: Rollout) -> list[Channel]:
        """What a step learns from; the same ones on every rank, whatever rows it has."""
        most, ends = self.config.on_policy.monitor_chunks, self.rollouts.rows.end_ids

        # the policy gradient tells all but the entropy itself
        told = not isinstance(self.sampled_loss, CrossTokenizerDistillationLossFn)

        def measure(hidden: Tensor, head: Head, signals: Sequence[Signal], inputs: Any) -> Mapping[str, Pair]:
            found = sampled_figures(hidden, head, signals, inputs.layouts, most=most, end_ids=ends)
            return {"entropy": found["entropy"]} if told else found

        monitor = measure if most else None
        own = rollout.batch, self.sampled_loss, self.readers, self.fraction
        found = [Channel(*own, monitor=monitor, prefix=PREFIX)]
        rows: BatchedDataDict = BatchedDataDict(
            {k: v for k, v in rollout.batch.items() if not k.startswith(_OF_TEACHERS)}
        )
        # reward and anchor are about all that was written
        rows["token_mask"] = rows[WRITTEN]
        if self.config.on_policy.reward is not None:
            factor = self.fraction * self.config.on_policy.reward.weight
            found.append(Channel(rows, self.reward_loss, factor=factor, prefix=REWARD))
        if self.anchor is not None:
            settings = self.config.on_policy.anchor
            factor = self.fraction * settings.weight
            found.append(Channel(rows, self.anchor_loss, self.anchor.sources, factor=factor, prefix=ANCHOR))
        if batch.stored is not None:
            found.append(Channel(batch.stored, self.loss_fn, self.teachers, factor=1 - self.fraction))
        return found

    def dropped_of(self, batch: StepData) -> list[dict[str, int]]:  # type: ignore[override]
        return [batch.dropped]

    def rows_of(self, batch: StepData) -> BatchedDataDict:
        assert self.rollout is not None
        return self.rollout.batch

    def bits_per_byte(self, batch: StepData, result: Mapping[str, Any]) -> float | None:
        # of stored text alone: what the student wrote by itself says nothing about how well it reads
        return None if batch.stored is None else self.bits_of(batch.stored, result)

    def stored_rows(self, records: list[Any]) -> BatchedDataDict:
        return self.collator(records)

    def own_state(self) -> dict[str, Any]:
        mine = {"sampled_loss": self.sampled_loss.state_dict(), "guard": self.guard.state_dict()}
        return {**super().own_state(), **mine}

    def shared_state(self) -> dict[str, Any]:
        return {name: past.state_dict() for name, past in _averages(self.anchor, self.self_teacher).items()}

    def nothing_learned(self, left_out: str) -> str:
        return (
            f"nothing was learnt from in {self.state['consumed_samples']} prompts (left out: {left_out}); give prompts "
            "that leave room for an answer, or teachers that can read what the student writes"
        )


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
            train_set, val_set = _training_data(config)
        parts = setup(config, student_tokenizer, teacher_tokenizers, train_set, val_set)
        if Comm.world().rank == 0 and config.on_policy.failed_states is None:
            folder = config.logger.log_dir
            run_folder.write_alignment_sample(folder, student_tokenizer, teacher_tokenizers[0], train_set)
        train(parts)
    return Path(config.logger.log_dir)
