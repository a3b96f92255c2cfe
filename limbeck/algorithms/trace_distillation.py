"""Training on agent traces: rewards, hints and preferences in one objective.

Per step: a collated batch of traces -> the policy, hint and preference channels, each with its own rows and denominator
-> one optimizer step on policy + alpha x hint + beta x preference. Around it, as in distillation: validation,
checkpoints, logging, resume.

    limbeck train recipes/traces_cpu.yaml
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import NotRequired

from limbeck.algorithms import run_folder
from limbeck.algorithms.remote import connect, same_rows_group
from limbeck.algorithms.run_inputs import loader_processes
from limbeck.algorithms.self_teacher import HintTeacher, make_other_teacher, make_self_teacher
from limbeck.algorithms.trace_config import TraceMasterConfig
from limbeck.algorithms.trace_data import (
    TraceCollate,
    TraceDataset,
    load_chat_tokenizer,
    load_traces,
    make_collator,
    plan_policy,
)
from limbeck.algorithms.trace_monitors import CollapseMonitor
from limbeck.algorithms.trace_step import ReferenceLogProbs, TraceStep
from limbeck.algorithms.trace_validation import TraceValidation
from limbeck.algorithms.xtoken_off_policy_distillation import sigterm_saves
from limbeck.data.sampler import ShardSampler
from limbeck.distributed.mesh import data_rank_and_world, plan_cluster
from limbeck.distributed.process import join_peers, rank_and_world
from limbeck.losses.hint import HintDistillationLossFn
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.preference import PreferenceLossFn
from limbeck.models.policy import Policy
from limbeck.models.teachers import TeacherSource
from limbeck.projection import load_or_build
from limbeck.tokens import ByteVocab
from limbeck.traces import ComposerBatch
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.errors import ConfigError, DataError, LossError
from limbeck.utils.logger import Logger, to_means
from limbeck.utils.rng import capture_rng, restore_rng, seed_everything
from limbeck.utils.state_io import load_state, save_state
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
    group = join_peers(config.cluster.backend)
    plan_cluster(config.cluster, rank_and_world()[1])
    seed = config.distillation.seed
    seed_everything(seed)
    tokenizer = load_chat_tokenizer(config.policy)
    teacher_tokenizer = None if config.teacher is None else load_chat_tokenizer(config.teacher)
    server = _server(config, tokenizer, teacher_tokenizer)
    dataset = load_traces(config.traces)
    held_out = dataset if config.traces.validation is None else load_traces(config.traces, "validation")
    checkpointer = CheckpointManager(config.checkpointing, run_dir=config.logger.log_dir)
    latest = checkpointer.latest() if config.checkpointing.enabled else None
    _open_folder(config, tokenizer, teacher_tokenizer, dataset, has_checkpoint=latest is not None)
    plan = plan_policy(dataset.traces, config.loss.policy.spec(config.loss.block_rows), config.traces)
    foreign = _foreign(tokenizer, teacher_tokenizer)
    collator = make_collator(config, tokenizer, foreign, hint=config.uses("hint"), preference=config.uses("preference"))
    collate = TraceCollate(collator, plan)
    loader = _loader(config, dataset, collate)
    student = Policy(
        config.policy,
        tokenizer,
        name="student",
        seed=seed,
        weights_path=latest / "policy" / "weights" if latest else None,
        optimizer_path=latest / "policy" / "optimizer" if latest else None,
        dp_group=group,
    )
    policy_loss = PolicyGradientLossFn(plan.spec)
    policy_loss.active = plan.spec
    teacher = _teacher(config, student, tokenizer, teacher_tokenizer, server)
    monitor = CollapseMonitor(tokenizer, student.vocab_size, config.distillation.monitor)
    preference_loss = PreferenceLossFn(config.loss.preference.spec(config.loss.block_rows))
    reference = ReferenceLogProbs(dataset) if _needs_reference(config, preference_loss) else None
    step = TraceStep(
        student,
        policy_loss=policy_loss,
        hint_loss=_hint_loss(config, teacher, tokenizer, foreign),
        preference_loss=preference_loss,
        teacher=teacher,
        reference=reference,
        monitor=monitor,
    )
    measured = TraceCollate(make_collator(config, tokenizer, foreign, hint=True, preference=True))
    validation = TraceValidation(student, held_out, measured, monitor, rows=config.distillation.val_batch_size)
    state: TraceSaveState = {**_fresh_state(), "dropped": dict(dataset.dropped)}
    if latest is not None:
        state = _resume(checkpointer, latest, loader, step, dataset.fingerprint)
    elif reference is not None:
        rank, world = data_rank_and_world(config.policy.dtensor_cfg)
        reference.fill(student, dataset, collate, rank=rank, world=world, rows=config.distillation.val_batch_size)
    logger = Logger(config.logger, resume_step=state["total_steps"] if latest else -1, rank=rank_and_world()[0])
    logger.print(f"{len(dataset)} traces, policy mode {plan.spec.mode}")
    return TraceRun(config, student, step, loader, validation, logger, checkpointer, state)


def _fresh_state() -> TraceSaveState:
    return {"current_epoch": 0, "current_step": 0, "total_steps": 0, "consumed_samples": 0, "total_valid_tokens": 0}


def _open_folder(
    config: TraceMasterConfig, tokenizer: Any, teacher_tokenizer: Any, dataset: TraceDataset, *, has_checkpoint: bool
) -> None:
    if rank_and_world()[0] != 0:
        return
    others = [] if teacher_tokenizer is None else [teacher_tokenizer]
    facts = run_folder.versions(
        seed=config.distillation.seed,
        student_fingerprint=ByteVocab.from_tokenizer(tokenizer).fingerprint,
        teacher_fingerprints=[ByteVocab.from_tokenizer(t).fingerprint for t in others],
        traces_fingerprint=dataset.fingerprint,
    )
    run_folder.open_run_folder(config, config.logger.log_dir, has_checkpoint=has_checkpoint, versions=facts)


def _foreign(tokenizer: Any, teacher_tokenizer: Any | None) -> Any | None:
    """The teacher's tokenizer where it is another one than the student's."""
    if teacher_tokenizer is None:
        return None
    same = ByteVocab.from_tokenizer(teacher_tokenizer).same_tokens(ByteVocab.from_tokenizer(tokenizer))
    return None if same else teacher_tokenizer


def _server(config: TraceMasterConfig, tokenizer: Any, teacher_tokenizer: Any) -> TeacherSource | None:
    """The hinted teacher behind a server, connected before any model is loaded."""
    if config.teacher is None or config.teacher.server is None or not config.uses("hint"):
        return None
    traces = config.traces
    longest = traces.max_teacher_seq_length or min(traces.max_seq_length, config.policy.max_total_sequence_length)
    student = ByteVocab.from_tokenizer(tokenizer)
    group = same_rows_group(config.policy.dtensor_cfg)
    found: TeacherSource = connect(config.teacher.server, teacher_tokenizer, student, longest=longest, group=group)
    return found


def _teacher(
    config: TraceMasterConfig, student: Policy, tokenizer: Any, teacher_tokenizer: Any, server: TeacherSource | None
) -> HintTeacher | None:
    if not config.uses("hint"):
        return None
    if config.teacher is not None:
        return make_other_teacher(config, teacher_tokenizer, tokenizer, server)
    return make_self_teacher(student, config)


def _hint_loss(
    config: TraceMasterConfig, teacher: HintTeacher | None, tokenizer: Any, foreign: Any | None
) -> HintDistillationLossFn:
    hint = config.loss.hint
    projection = None
    if foreign is not None and teacher is not None:
        projection = load_or_build(tokenizer, foreign, hint.projection_matrix_path)
    share = 0.0 if teacher is None else teacher.trust_region
    return HintDistillationLossFn(hint.spec(config.loss.block_rows), projection=projection, trust_region=share)


def _needs_reference(config: TraceMasterConfig, loss: PreferenceLossFn) -> bool:
    return config.uses("preference") and loss.spec.needs_reference


def _loader(config: TraceMasterConfig, dataset: TraceDataset, collate: TraceCollate) -> StatefulDataLoader:
    # processes that split one model's layers or sequences read the same traces
    rank, world = data_rank_and_world(config.policy.dtensor_cfg)
    prompts, seed = config.distillation.num_prompts_per_step, config.distillation.seed
    if prompts % world:
        raise ConfigError(
            f"distillation.num_prompts_per_step is {prompts}, which {world} processes cannot share evenly"
        )
    sampler = ShardSampler(
        len(dataset),
        rank=rank,
        world=world,
        seed=seed,
        shuffle=config.traces.shuffle,
        multiple=prompts // world,
        fingerprint=dataset.fingerprint,
    )
    return StatefulDataLoader(
        dataset,
        batch_size=prompts // world,
        sampler=sampler,
        num_workers=loader_processes(config.traces.num_workers),
        collate_fn=collate,
        # A new iterator draws a seed; from the global generator that would shift a resumed run's numbers.
        generator=torch.Generator().manual_seed(seed),
    )


def _resume(
    checkpointer: CheckpointManager, latest: Path, loader: StatefulDataLoader, step: TraceStep, fingerprint: str
) -> TraceSaveState:
    info = checkpointer.load_training_info(latest) or {}
    state = _fresh_state()
    state.update({k: info[k] for k in TraceSaveState.__annotations__ if k in info})  # type: ignore[typeddict-item]
    # averaged weights arrive in this run's layout, whichever wrote them
    template = None if step.teacher is None else {"teacher": step.teacher.state_dict()}
    shared = load_state(latest / "train_state" / "shared", template=template)
    if shared["traces"] != fingerprint:
        raise DataError(
            "traces.train is no longer what this run began with (files, pairs or their order have changed); put the "
            "old traces back, or give another logger.log_dir"
        )
    if step.teacher is not None:
        step.teacher.load_state_dict(shared["teacher"])
    if step.reference is not None:
        step.reference.load_state_dict(shared["reference"])
    own = latest / "train_state" / f"rank_{rank_and_world()[0]}"
    # a run that has grown reads what every rank knows: positions are counted over all ranks
    stored = load_state(own if own.is_dir() else own.with_name("rank_0"), local=True)
    sampler: Any = loader.sampler
    sampler.go_to(stored["position"])
    sampler.set_epoch(state["current_epoch"])
    step.hint_loss.guard.seen = int(stored["guard_seen"])
    restore_rng(stored["rng"])
    return state


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(run: TraceRun) -> None:
    """Train until ``max_num_steps`` or ``max_num_epochs``, or until asked to stop; see :func:`setup`."""
    loop = _Loop(run)
    try:
        with sigterm_saves(run.checkpointer):
            loop.run()
    finally:
        run.logger.close()


class _Loop:
    """The state of one run between two steps."""

    def __init__(self, run: TraceRun) -> None:
        self.config, self.state, self.logger = run.config, run.state, run.logger
        self.parts, self.loader, self.checkpointer = run, run.loader, run.checkpointer
        # counts of all ranks so far lie with rank 0, so that their sum counts nothing twice
        self.dropped: Counter[str] = Counter(run.state.get("dropped", {}) if rank_and_world()[0] == 0 else {})
        self.weights = run.config.weights()
        self.timer = Timer(torch.cuda.synchronize if run.config.logger.monitor_gpus else None)
        d = run.config.distillation
        self.total = min(d.max_num_steps, d.max_num_epochs * len(run.loader))
        self.validated: tuple[int, dict[str, float]] = (-1, {})

    def run(self) -> None:
        d, state = self.config.distillation, self.state
        self.logger.log_hyperparams(self.config.model_dump(mode="json"))
        if state["total_steps"] == 0:
            if d.val_at_start:
                self._validate(0)
                self.logger.commit()
            if d.save_start and self.config.checkpointing.enabled and not self.checkpointer.checkpoints():
                self._save(0)
        if state["total_steps"] >= self.total:
            self.logger.print(f"the run is complete with {state['total_steps']} steps; nothing is left to do")
        self.logger.start_progress(self.total, state["total_steps"])
        stop = False
        while state["total_steps"] < self.total and not stop:
            self.loader.sampler.set_epoch(state["current_epoch"])  # type: ignore[attr-defined]
            stop = self._epoch()
        self._report_dropped()

    def _epoch(self) -> bool:
        """One pass over the traces, or what is left of it; True when the run must stop."""
        state = self.state
        for batch in self.timer.iterate(self.loader, "data"):
            self._step(batch)
            ended = state["current_step"] >= len(self.loader)
            if ended:
                state["current_epoch"] += 1
                state["current_step"] = 0
            last = state["total_steps"] >= self.total
            if ended or last:
                self._refuse_empty_data()
            stop = self.checkpointer.should_stop()
            self._after_step(last=last, stop=stop)
            if last or stop:
                return True
        return False

    def _step(self, batch: ComposerBatch) -> None:
        state, start = self.state, time.perf_counter()
        step = state["total_steps"] + 1
        if self.parts.student.counts_records:
            self.dropped.update(batch["dropped"])
        factors = self.weights.at(state["total_steps"])
        try:
            result = self.parts.step(batch, factors, monitored=self.parts.step.monitor.due(step), timer=self.timer)
        except LossError as error:
            kept = run_folder.save_failed_batch(self.config.logger.log_dir, step, batch)  # type: ignore[arg-type]
            last = self.checkpointer.latest()
            good = f"the last checkpoint is {last.name}" if last else "there is no checkpoint yet"
            raise LossError(f"step {step}: {error}; the batch is kept in {str(kept)!r}, {good}") from error
        seconds = time.perf_counter() - start + self.timer.get_timing_metrics("sum").get("data", 0.0)
        state["current_step"] += 1
        state["total_steps"] = step
        state["consumed_samples"] += self.config.distillation.num_prompts_per_step
        state["total_valid_tokens"] += int(result["global_valid_toks"])
        speed = result["tokens"] / seconds
        metrics = {
            **result["metrics"],
            "loss": result["loss"],
            "grad_norm": result["grad_norm"],
            "lr": result["lr"],
            "alpha": factors["hint"],
            "beta": factors["preference"],
            **{f"count/{name}": float(value) for name, value in result["counts"].items()},
            "tokens_per_s": speed,
            "seconds": seconds,
            **{f"time/{name}": s for name, s in self.timer.get_timing_metrics("sum").items()},
        }
        self.timer.reset()
        self.logger.log_metrics(metrics, step, "train")
        self.logger.update_progress(step, loss=result["loss"], tokens_per_s=speed)

    def _after_step(self, *, last: bool, stop: bool) -> None:
        d, step = self.config.distillation, self.state["total_steps"]
        if (d.val_period > 0 and step % d.val_period == 0) or (last and d.val_at_end):
            self._validate(step)
        self.logger.commit()
        if self.checkpointer.should_save(step, last=last, stop=stop):
            self._save(step)

    def _validate(self, step: int) -> None:
        with self.timer.time("validation"):
            metrics = self.parts.validation.measure()
        means = to_means(metrics)
        self.validated = (step, {f"val/{name}": value for name, value in means.items()})
        self.logger.log_metrics(metrics, step, "val")
        shown = ", ".join(f"{name} {means[key]:.3f}" for key, name in _SHOWN.items() if key in means)
        self.logger.print(f"step {step}: mean log p of {shown or 'nothing: there are no failed or preferred messages'}")
        self.timer.reset()

    def _save(self, step: int) -> None:
        # a checkpoint is ranked by what was measured on its own weights, not by an earlier validation
        self.state["dropped"] = dict(run_folder.over_ranks(self.dropped))
        info = {**self.state, **(self.validated[1] if self.validated[0] == step else {})}
        parts = self.parts.step
        sampler: Any = self.loader.sampler
        with self.checkpointer.saving(step, info) as folder:
            self.parts.student.save_checkpoint(folder / "policy" / "weights", folder / "policy" / "optimizer")
            shared = {
                "traces": self.loader.dataset.fingerprint,
                "teacher": {} if parts.teacher is None else parts.teacher.state_dict(),
                "reference": {} if parts.reference is None else parts.reference.state_dict(),
            }
            save_state(folder / "train_state" / "shared", shared)
            state = {
                "position": sampler.position(
                    self.state["current_step"] * self.config.distillation.num_prompts_per_step
                ),
                "guard_seen": parts.hint_loss.guard.seen,
                "rng": capture_rng(),
            }
            save_state(folder / "train_state" / f"rank_{rank_and_world()[0]}", state, local=True)

    def _refuse_empty_data(self) -> None:
        if self.state["total_valid_tokens"] == 0:
            shown = dict(run_folder.over_ranks(self.dropped)) or "nothing"
            raise DataError(
                f"traces.train holds nothing to learn from: in {self.state['consumed_samples']} traces no reward, "
                f"failed call or pair counts for the channels that are on (left out: {shown})"
            )

    def _report_dropped(self) -> None:
        total = run_folder.write_dropped(self.config.logger.log_dir, self.dropped)
        if total:
            shown = ", ".join(f"{n} {reason}" for reason, n in sorted(total.items()))
            self.logger.print(f"left out so far: {shown}")


_SHOWN = {
    "erroneous_logprob": "failed messages",
    "rejected_logprob": "rejected",
    "chosen_logprob": "chosen",
}


def run(config: TraceMasterConfig) -> Path:
    """Train from a run file, resuming where a checkpoint lies; returns the run folder."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    train(setup(config))
    return Path(config.logger.log_dir)
