"""Off-policy distillation across tokenizers: one run file in, a better student out.

Per step: a collated batch (student ids, teachers' ids, alignments) -> teachers' signals -> student forward, block loss,
backward -> one optimizer step. Validation, checkpoints and logging around it.

    limbeck train recipes/cpu_smoke.yaml
"""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import NotRequired

from limbeck.algorithms import run_folder
from limbeck.algorithms.master_config import MasterConfig, OffPolicyDistillationConfig
from limbeck.algorithms.remote import connect_servers
from limbeck.algorithms.run_inputs import load_datasets, load_tokenizers, make_collator, make_loaders
from limbeck.algorithms.validation import evaluate, teacher_bits
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.mesh import plan_cluster
from limbeck.distributed.process import join_peers, rank_and_world
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy
from limbeck.models.teachers import CachedTeacher, LiveTeacher, TeacherSource
from limbeck.projection import load_or_build
from limbeck.tokens import ByteVocab
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.errors import CheckpointError, ConfigError, DataError, LossError
from limbeck.utils.logger import Logger, to_means
from limbeck.utils.rng import capture_rng, restore_rng, seed_everything
from limbeck.utils.state_io import load_state, save_state
from limbeck.utils.timer import Timer

__all__ = [
    "XTOKEN_NON_STUDENT_SEQ_KEYS",
    "MasterConfig",
    "OffPolicyDistillationConfig",
    "OffPolicyDistillationSaveState",
    "run",
    "setup",
    "validate",
    "xtoken_off_policy_distillation_train",
]

# Batch keys whose second dimension is not the student's sequence.
XTOKEN_NON_STUDENT_SEQ_KEYS: frozenset[str] = frozenset(
    {
        "teacher_input_ids",
        "teacher_token_mask",
        "alignment_pair_valid",
        "alignment_pair_is_correct",
        "alignment_teacher_exact_partition_mask",
        "alignment_teacher_chunk_id",
    }
)

Teachers = Policy | TeacherSource | Sequence[TeacherSource] | None


class OffPolicyDistillationSaveState(TypedDict):
    """Where a run stands."""

    current_epoch: int
    current_step: int
    total_steps: int
    consumed_samples: int
    total_valid_tokens: int
    val_loss: NotRequired[float]
    dropped: NotRequired[dict[str, int]]


def _default_off_policy_distillation_save_state() -> OffPolicyDistillationSaveState:
    return {"current_epoch": 0, "current_step": 0, "total_steps": 0, "consumed_samples": 0, "total_valid_tokens": 0}


# ---- set-up ----------------------------------------------------------------------------------------------------------


def setup(
    master_config: MasterConfig,
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    train_dataset: Any,
    val_dataset: Any | None,
) -> tuple[
    Policy,
    Teachers,
    StatefulDataLoader,
    StatefulDataLoader | None,
    CrossTokenizerDistillationLossFn,
    Logger,
    CheckpointManager,
    OffPolicyDistillationSaveState,
    MasterConfig,
]:
    """Everything that :func:`xtoken_off_policy_distillation_train` needs, resumed from the latest checkpoint if any.

    Args:
        teacher_tokenizer: of the teacher, or one per teacher.
        train_dataset, val_dataset: map-style data sets of records, see ``limbeck.data.sources``.

    Returns:
        Student, teacher (a Policy for one live teacher, otherwise a list of sources), loaders, loss, logger,
        checkpointer, state and configuration, in the published order.
    """
    config = master_config
    group = join_peers(config.cluster.backend)
    plan_cluster(config.cluster, rank_and_world()[1])
    seed_everything(config.distillation.seed)
    tokenizers = _listed(teacher_tokenizer)
    teachers = config.all_teachers
    if len(tokenizers) != len(teachers):
        raise ConfigError(f"{len(teachers)} teachers in the run file but {len(tokenizers)} teacher tokenizers")
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    foreign = [None if ByteVocab.from_tokenizer(t).same_tokens(vocab) else t for t in tokenizers]
    remote = connect_servers(config, tokenizers, vocab)
    checkpointer = CheckpointManager(config.checkpointing, run_dir=config.logger.log_dir)
    latest = checkpointer.latest() if config.checkpointing.enabled else None
    if rank_and_world()[0] == 0:
        prints = [ByteVocab.from_tokenizer(t).fingerprint for t in tokenizers]
        facts = run_folder.versions(
            seed=config.distillation.seed, student_fingerprint=vocab.fingerprint, teacher_fingerprints=prints
        )
        run_folder.open_run_folder(config, config.logger.log_dir, has_checkpoint=latest is not None, versions=facts)
    collator = make_collator(config, student_tokenizer, foreign)
    loader, val_loader = make_loaders(config, collator, train_dataset, val_dataset)
    loss_fn = _make_loss(config, student_tokenizer, foreign)
    student = Policy(
        config.policy,
        student_tokenizer,
        name="student",
        seed=config.distillation.seed,
        weights_path=latest / "policy" / "weights" if latest else None,
        optimizer_path=latest / "policy" / "optimizer" if latest else None,
        dp_group=group,
        extra_parameters=loss_fn.parameters(),
    )
    sources = [remote.get(i) or _teacher(config, i, tokenizer, vocab) for i, tokenizer in enumerate(tokenizers)]
    teacher: Teachers = sources
    if len(sources) == 1 and isinstance(sources[0], LiveTeacher):
        teacher = sources[0].policy
    state = _default_off_policy_distillation_save_state()
    if latest is not None:
        state = _resume(checkpointer, latest, loader, val_loader, loss_fn)
    logger = Logger(config.logger, resume_step=state["total_steps"] if latest else -1, rank=rank_and_world()[0])
    return student, teacher, loader, val_loader, loss_fn, logger, checkpointer, state, config


def _make_loss(config: MasterConfig, student_tokenizer: Any, foreign: list[Any]) -> CrossTokenizerDistillationLossFn:
    paths = config.loss_fn.projection_matrix_path
    per_teacher = paths if isinstance(paths, list) else [paths] * len(foreign)
    if len(per_teacher) != len(foreign):
        raise ConfigError(f"loss_fn.projection_matrix_path has {len(per_teacher)} entries for {len(foreign)} teachers")
    projections = [
        None if tokenizer is None else load_or_build(student_tokenizer, tokenizer, path)
        for tokenizer, path in zip(foreign, per_teacher, strict=True)
    ]
    return CrossTokenizerDistillationLossFn(config.loss_fn, projections=projections)


def _teacher(config: MasterConfig, index: int, tokenizer: Any, student: ByteVocab) -> TeacherSource:
    own = config.all_teachers[index]
    if own.cache is not None:
        return CachedTeacher(own.cache, teacher_fingerprint=ByteVocab.from_tokenizer(tokenizer).fingerprint)
    return LiveTeacher(live_teacher(config, index, tokenizer), student_fingerprint=student.fingerprint)


def live_teacher(config: MasterConfig, index: int, tokenizer: Any) -> Policy:
    """The frozen model of one teacher; random weights depend on the run's seed and the teacher's number."""
    seed = config.distillation.seed + 1 + index
    settings = config.all_teachers[index].policy_settings()
    return Policy(settings, tokenizer, name=f"teacher_{index}", init_optimizer=False, seed=seed)


def _resume(
    checkpointer: CheckpointManager,
    latest: Path,
    loader: StatefulDataLoader,
    val_loader: StatefulDataLoader | None,
    loss_fn: CrossTokenizerDistillationLossFn,
) -> OffPolicyDistillationSaveState:
    info = checkpointer.load_training_info(latest) or {}
    state = _default_off_policy_distillation_save_state()
    state.update({k: info[k] for k in OffPolicyDistillationSaveState.__annotations__ if k in info})  # type: ignore[typeddict-item]
    own = latest / "train_state" / f"rank_{rank_and_world()[0]}"
    # a run that has grown reads what every rank knows: positions are counted over all ranks
    stored = load_state(own if own.is_dir() else own.with_name("rank_0"), local=True)
    run_folder.check_same_data(stored["data"], _fingerprints(loader, val_loader))
    sampler: Any = loader.sampler
    sampler.go_to(stored["position"])
    sampler.set_epoch(state["current_epoch"])
    loss_fn.load_state_dict(stored["loss_fn"])
    restore_rng(stored["rng"])
    return state


def _fingerprints(loader: StatefulDataLoader, val_loader: StatefulDataLoader | None) -> dict[str, str | None]:
    """What identifies the records of a run."""
    held_out: Any = None if val_loader is None else val_loader.sampler
    train: Any = loader.sampler
    return {"train": train.fingerprint, "validation": None if held_out is None else held_out.fingerprint}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def as_sources(teacher: Teachers) -> list[TeacherSource]:
    """Teachers as sources, whether given as a policy, a source or several."""
    if isinstance(teacher, Policy):
        return [LiveTeacher(teacher)]
    return _listed(teacher)


# ---- the loop --------------------------------------------------------------------------------------------------------


def xtoken_off_policy_distillation_train(
    student_policy: Policy,
    teacher_policy: Teachers,
    dataloader: StatefulDataLoader,
    val_dataloader: StatefulDataLoader | None,
    loss_fn: CrossTokenizerDistillationLossFn,
    logger: Logger,
    checkpointer: CheckpointManager,
    off_policy_distillation_state: OffPolicyDistillationSaveState,
    master_config: MasterConfig,
) -> None:
    """Train until ``max_num_steps`` or ``max_num_epochs``, or until asked to stop; see :func:`setup`."""
    loop = _Loop(
        student_policy,
        as_sources(teacher_policy),
        dataloader,
        val_dataloader,
        loss_fn,
        logger,
        checkpointer,
        off_policy_distillation_state,
        master_config,
    )
    try:
        with sigterm_saves(checkpointer):
            loop.run()
    finally:
        logger.close()


@contextmanager
def sigterm_saves(checkpointer: CheckpointManager) -> Iterator[None]:
    """SIGTERM asks for a checkpoint while a run lasts; afterwards it means what it meant before."""
    if threading.current_thread() is not threading.main_thread():
        # Python lets only the main thread change handlers
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    checkpointer.install_signal_handler()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


class _Loop:
    """The state of one run between two steps."""

    def __init__(
        self,
        student: Policy,
        teachers: list[TeacherSource],
        loader: StatefulDataLoader,
        val_loader: StatefulDataLoader | None,
        loss_fn: CrossTokenizerDistillationLossFn,
        logger: Logger,
        checkpointer: CheckpointManager,
        state: OffPolicyDistillationSaveState,
        config: MasterConfig,
    ) -> None:
        self.student, self.teachers, self.loader, self.val_loader = student, teachers, loader, val_loader
        self.loss_fn, self.logger, self.checkpointer = loss_fn, logger, checkpointer
        self.state, self.config = state, config
        self.timer = Timer(torch.cuda.synchronize if config.logger.monitor_gpus else None)
        # counts of all ranks so far lie with rank 0, so that their sum counts nothing twice
        known = state.get("dropped", {}) if rank_and_world()[0] == 0 else {}
        self.dropped: Counter[str] = Counter(known)
        self.teacher_bits: dict[str, tuple[float, float]] | None = None
        per_epoch = len(loader)
        size = config.policy.train_global_batch_size
        # None: all rows of a step, however many documents its records hold
        self.rows_per_update = None if size == config.distillation.num_prompts_per_step else size
        self.total = min(config.distillation.max_num_steps, config.distillation.max_num_epochs * per_epoch)
        self.validated: tuple[int, dict[str, float]] = (-1, {})

    def run(self) -> None:
        d, state = self.config.distillation, self.state
        self.logger.log_hyperparams(self.config.model_dump(mode="json"))
        if d.val_at_start and state["total_steps"] == 0 and self.val_loader is not None:
            self._validate(0)
            self.logger.commit()
        if state["total_steps"] >= self.total:
            self.logger.print(f"the run is complete with {state['total_steps']} steps; nothing is left to do")
        self.logger.start_progress(self.total, state["total_steps"])
        stop = False
        while state["total_steps"] < self.total and not stop:
            self.loader.sampler.set_epoch(state["current_epoch"])  # type: ignore[attr-defined]
            stop = self._epoch()
        run_folder.write_dropped(self.config.logger.log_dir, self.dropped)

    def _epoch(self) -> bool:
        """One pass over the data, or what is left of it; True when the run must stop."""
        state = self.state
        for batch in self.timer.iterate(self.loader, "data"):
            self._step(batch)
            ended = state["current_step"] >= len(self.loader)
            if ended:
                state["current_epoch"] += 1
                state["current_step"] = 0
                self._report_dropped()
            last = state["total_steps"] >= self.total
            if ended or last:
                self._refuse_empty_data()
            stop = self.checkpointer.should_stop()
            self._after_step(last=last, stop=stop)
            if last or stop:
                return True
        return False

    def _step(self, batch: BatchedDataDict) -> None:
        state, start = self.state, time.perf_counter()
        step = state["total_steps"] + 1
        self._count_dropped(batch)
        try:
            result = self.student.train(
                batch,
                self.loss_fn,
                teachers=self.teachers,
                gbs=self.rows_per_update,
                timer=self.timer,
            )
        except LossError as error:
            kept = run_folder.save_failed_batch(self.config.logger.log_dir, step, batch)
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
            **{name: pair for name, pair in result["metrics"].items() if name != "loss"},
            "loss": result["loss"],
            "grad_norm": result["grad_norm"],
            "lr": result["lr"],
            "tokens_per_s": speed,
            "seconds": seconds,
            **{f"time/{name}": s for name, s in self.timer.get_timing_metrics("sum").items()},
        }
        self.timer.reset()
        self.logger.log_metrics(metrics, step, "train")
        self.logger.update_progress(step, loss=result["loss"], tokens_per_s=speed)

    def _after_step(self, *, last: bool, stop: bool) -> None:
        d, step = self.config.distillation, self.state["total_steps"]
        due = (d.val_period > 0 and step % d.val_period == 0) or (last and d.val_at_end)
        if due and self.val_loader is not None:
            self._validate(step)
        self.logger.commit()
        if self.checkpointer.should_save(step, last=last, stop=stop):
            self._save(step)

    def _validate(self, step: int) -> None:
        assert self.val_loader is not None
        metrics, _ = validate(
            self.student, self.teachers, self.val_loader, self.loss_fn, self.config, self.timer, known=self.teacher_bits
        )
        if self.teacher_bits is None:
            self.teacher_bits = {k: v for k, v in metrics.items() if k.startswith("teacher_") and k.endswith("bpb")}
        means = to_means(metrics)
        self.state["val_loss"] = means.get("loss", float("nan"))
        self.validated = (step, {f"val/{k}": v for k, v in means.items()})
        self.logger.log_metrics(metrics, step, "val")
        teacher = f", teacher {means['teacher_bpb']:.4f}" if "teacher_bpb" in means else ""
        self.logger.print(f"step {step}: {means.get('bpb', float('nan')):.4f} bits per byte{teacher}")
        self.timer.reset()

    def _save(self, step: int) -> None:
        # a checkpoint is ranked by what was measured on its own weights, not by an earlier validation
        measured = self.validated[1] if self.validated[0] == step else {}
        self.state["dropped"] = dict(run_folder.over_ranks(self.dropped))
        info = {**self.state, **measured}
        sampler: Any = self.loader.sampler
        with self.checkpointer.saving(step, info) as folder:
            self.student.save_checkpoint(folder / "policy" / "weights", folder / "policy" / "optimizer")
            state = {
                "position": sampler.position(
                    self.state["current_step"] * self.config.distillation.num_prompts_per_step
                ),
                "loss_fn": self.loss_fn.state_dict(),
                "rng": capture_rng(),
                "data": _fingerprints(self.loader, self.val_loader),
            }
            save_state(folder / "train_state" / f"rank_{rank_and_world()[0]}", state, local=True)

    def _refuse_empty_data(self) -> None:
        if self.state["total_valid_tokens"] == 0:
            shown = dict(run_folder.over_ranks(self.dropped)) or "nothing"
            raise DataError(
                f"data.train holds nothing to learn from: in {self.state['consumed_samples']} records no token counts "
                f"(left out: {shown}); give longer texts, or conversations with assistant messages"
            )

    def _count_dropped(self, batch: BatchedDataDict) -> None:
        if self.student.counts_records:
            for counts in batch.get("dropped", []):
                self.dropped.update(counts)

    def _report_dropped(self) -> None:
        dropped = run_folder.write_dropped(self.config.logger.log_dir, self.dropped)
        if dropped:
            shown = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))
            self.logger.print(f"epoch {self.state['current_epoch']}: left out so far: {shown}")


def validate(
    student_policy: Policy,
    teacher_policy: Teachers,
    val_dataloader: StatefulDataLoader,
    loss_fn: CrossTokenizerDistillationLossFn,
    master_config: MasterConfig,
    timer: Timer | None = None,
    *,
    known: dict[str, tuple[float, float]] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Held-out KL, CE, accuracy, bits per byte and coverage over the whole set, ragged last batch included.

    Returns (metrics as (sum, count) pairs, timings in seconds). ``known``: teachers' bits per byte from an earlier
    call, which do not change during a run.
    """
    timer = timer or Timer()
    sources = as_sources(teacher_policy)
    with timer.time("validation"):
        metrics = evaluate(student_policy, sources, val_dataloader, loss_fn, timer)
        if known is None and sources:
            known = teacher_bits(student_policy, sources, val_dataloader)
    return {**metrics, **(known or {})}, timer.get_timing_metrics("sum")


# ---- whole runs ------------------------------------------------------------------------------------------------------


def run(config: MasterConfig) -> Path:
    """Train from a run file, resuming where a checkpoint lies; returns the run folder."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    alone = not dist.is_initialized()
    try:
        student_tokenizer, teacher_tokenizers = load_tokenizers(config)
        train, val = load_datasets(config)
        parts = setup(config, student_tokenizer, teacher_tokenizers, train, val)
        if teacher_tokenizers and rank_and_world()[0] == 0:
            run_folder.write_alignment_sample(config.logger.log_dir, student_tokenizer, teacher_tokenizers[0], train)
        xtoken_off_policy_distillation_train(*parts)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"no space left while writing to the run folder {config.logger.log_dir!r}; free some space and start the "
            "same run again: it goes on from its last checkpoint"
        ) from error
    if alone and dist.is_initialized():
        dist.destroy_process_group()
    return Path(config.logger.log_dir)
