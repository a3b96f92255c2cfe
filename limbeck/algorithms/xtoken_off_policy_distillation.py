"""Off-policy distillation across tokenizers: one run file in, a better student out.

Per step: a collated batch (student ids, teachers' ids, alignments) -> teachers' signals -> student forward, block loss,
backward -> one optimizer step. Validation, checkpoints and logging around it.

    limbeck train cpu_smoke
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import NotRequired

from limbeck.algorithms import run_folder
from limbeck.algorithms.build import (
    count_ends,
    fitted,
    load_datasets,
    load_tokenizers,
    lost_ahead,
    make_collator,
    make_loaders,
    student_length,
    teacher_lengths,
)
from limbeck.algorithms.config import MasterConfig, OffPolicyDistillationConfig
from limbeck.algorithms.loop import TrainingLoop, announce, is_finished, resume, stored_counters, whole_run
from limbeck.algorithms.origins import check_origins, model_origins
from limbeck.algorithms.samples import PromptSamples
from limbeck.algorithms.validation import compared, compared_bits, evaluate, teacher_bits, wrong_begin
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.loader import batch_parts
from limbeck.data.sources import RecordDataset
from limbeck.distributed.comm import Comm, init_distributed
from limbeck.distributed.launch import check_cluster
from limbeck.errors import ConfigError, DataError, one_line
from limbeck.losses.contract import Teacher
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.losses.objectives import OBJECTIVES
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.loading import ModelConfig, check_length, check_settings, model_identity
from limbeck.models.policy import Policy
from limbeck.projection import load_or_build
from limbeck.teachers.build import connect_servers, make_teacher
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import class_table
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.collector import rare_collections
from limbeck.utils.files import Stamp, stamp_files
from limbeck.utils.logger import Logger
from limbeck.utils.progress import Watched, say, stage
from limbeck.utils.state import fitting, seed_everything
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

RECORDS_AHEAD = 8
"""Training records on which student and teachers are compared before the first step, where nothing else does it."""
WORK_AHEAD = 6e10
"""On a CPU only as many of them as this many (parameter, token) pairs allow, and one at least: seconds, not minutes."""

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
"""Batch keys whose second dimension is not the student's sequence; of several teachers also with their number."""
_NUMBERED = re.compile(r"^(teacher|alignment)_\d+_")

Teachers = Policy | Teacher | Sequence[Teacher] | None


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


@rare_collections()
def setup(
    master_config: MasterConfig,
    student_tokenizer: object,
    teacher_tokenizer: object,
    train_dataset: Any,
    val_dataset: Any | None,
    *,
    wrap: Callable[[CrossTokenizerCollator], Any] | None = None,
    student_model: nn.Module | None = None,
    teacher_models: Sequence[nn.Module | None] | None = None,
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
        wrap: makes what collates training records of the collator, where that is more than it; not for validation.
        student_model, teacher_models: causal models in memory to use instead of loading them (one entry per teacher,
            None where it is loaded). The student is trained in place; a checkpoint's weights are put into it.

    Returns:
        Student, teacher (a Policy for one live teacher, otherwise a list of sources), loaders, loss, logger,
        checkpointer, state and configuration, in the published order.
    """
    config = master_config
    world = init_distributed(config.cluster.backend, config.cluster.timeout)
    check_cluster(config.cluster, world.size)
    seed_everything(config.distillation.seed)
    tokenizers = _listed(teacher_tokenizer)
    teachers = config.all_teachers
    if len(tokenizers) != len(teachers):
        raise ConfigError(f"{len(teachers)} teachers in the run file but {len(tokenizers)} teacher tokenizers")
    models = list(teacher_models or [None] * len(teachers))
    if len(models) != len(teachers):
        raise ConfigError(f"{len(teachers)} teachers in the run file but {len(models)} teacher models")
    _check_models(config, student_tokenizer, tokenizers, student_model, models)
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    foreign = foreign_tokenizers(student_tokenizer, tokenizers)
    remote = {}
    if any(own.server is not None and own.cache is None for own in teachers):
        with stage("asking the teachers' servers"):
            remote = connect_servers(
                teachers, tokenizers, vocab, longest=teacher_lengths(config), layout=config.policy.dtensor_cfg
            )
    checkpointer = CheckpointManager(config.checkpointing, run_dir=config.logger.log_dir)
    found = checkpointer.to_resume()
    latest = None if found is None else Checkpoint(found)
    if Comm.world().rank == 0:
        prints = [ByteVocab.from_tokenizer(t).fingerprint for t in tokenizers]
        facts = run_folder.versions(
            seed=config.distillation.seed, student_fingerprint=vocab.fingerprint, teacher_fingerprints=prints
        )
        run_folder.open_run_folder(config, config.logger.log_dir, has_checkpoint=latest is not None, versions=facts)
    with stage(f"tables of the loss ({config.loss_fn.mode})") if foreign else nullcontext():
        loss_fn = make_loss(config.loss_fn, student_tokenizer, foreign)
        loss_fn.count_by_class(class_table(vocab))
    conditions = [objective.conditions for objective in loss_fn.objectives]
    collator = make_collator(config, student_tokenizer, foreign, conditions)
    collate = collator if wrap is None else wrap(collator)
    identities = _identities(config, student_model, models)
    loader, val_loader = make_loaders(config, collate, train_dataset, val_dataset, val_collator=collator)
    announce(config, checkpointer, latest, loader)
    if loss_fn.counts_ends and wrap is not None:
        raise ConfigError("loss_fn.condition 'counted' goes by a text, which an on-policy run has not got; use another")
    if wrap is None:
        with Comm.world().fail_together():
            told = lost_ahead(config, student_tokenizer, foreign, train_dataset) if Comm.world().rank == 0 else None
            if told is not None:
                say(f"warning: {told}")
            count_ends(config, loss_fn, student_tokenizer, foreign, train_dataset)
    policy, teachers = fitted(config.policy, teachers)
    with stage(f"loading the student {policy.shown_name}"):
        student = Policy(
            policy,
            student_tokenizer,
            name="student",
            seed=config.distillation.seed,
            weights_path=latest.weights if latest else None,
            optimizer_path=latest.optimizer if latest else None,
            dp_group=world,
            model=student_model,
            extra_parameters=loss_fn.parameters(),
        )
    sources: list[Teacher] = []
    for i, (own, tokenizer) in enumerate(zip(teachers, tokenizers, strict=True)):
        if i in remote:
            sources.append(remote[i])
            continue
        what = own.shown_name if own.cache is None else f"from the cache {own.cache}"
        with stage(f"loading the teacher {what}"):
            seed = config.distillation.seed + 1 + i
            sources.append(make_teacher(own, i, tokenizer, vocab, seed=seed, model=models[i]))
    with Comm.world().fail_together():
        if Comm.world().rank == 0:
            files = _files(config, train_dataset, val_dataset, given=set(identities))
            facts = identities | _caches(sources)
            check_origins(config.logger.log_dir, files, facts, has_checkpoint=latest is not None)
    teacher: Teachers = sources
    if len(sources) == 1 and isinstance(sources[0], LiveTeacher) and isinstance(sources[0].policy, Policy):
        teacher = sources[0].policy
    state = _default_off_policy_distillation_save_state()
    if latest is not None:
        with fitting(f"the checkpoint {str(latest.folder)!r}"):
            state = _resume(checkpointer, latest, loader, val_loader, loss_fn)
    logger = Logger(config.logger, resume_step=state["total_steps"] if latest else -1, rank=Comm.world().rank)
    return student, teacher, loader, val_loader, loss_fn, logger, checkpointer, state, config


def _identities(
    config: MasterConfig, student: nn.Module | None, teachers: Sequence[nn.Module | None]
) -> dict[str, dict[str, Any]]:
    """What identifies the models in memory that a resumed run must be given again: teachers', and below adapters."""
    given = {f"teacher_{i}": model for i, model in enumerate(teachers)}
    given["policy"] = student if config.policy.trains_adapters() else None
    return {name: dict(model_identity(model)) for name, model in given.items() if model is not None}


def _files(config: MasterConfig, train: Any, val: Any | None, given: Collection[str] = ()) -> dict[str, list[Stamp]]:
    """Stamps of the data and of the weights that every start reads: of live teachers, and the student's first ones
    where it is asked for them. ``given``: models that come from memory."""
    models: dict[str, ModelConfig] = {
        f"teacher_{i}": own for i, own in enumerate(config.all_teachers) if own.cache is None and own.server is None
    }
    if config.reads_start:
        models["policy"] = config.policy
    models = {name: own for name, own in models.items() if name not in given}
    data = {"data.train": train, "data.validation": val}
    files = {name: records.stamps() for name, records in data.items() if isinstance(records, RecordDataset)}
    paths = config.loss_fn.projection_matrix_path
    files["loss_fn.projection_matrix_path"] = stamp_files([p for p in _listed(paths) if p is not None])
    return files | model_origins(models)


def _caches(teachers: Sequence[Teacher]) -> dict[str, dict[str, Any]]:
    """What the caches that teachers are read from say about themselves."""
    return {f"teacher_{t.number}.cache": t.reader.spec.to_dict() for t in teachers if isinstance(t, CachedTeacher)}


def _check_models(
    config: MasterConfig,
    student_tokenizer: object,
    tokenizers: list[Any],
    student: nn.Module | None,
    models: Sequence[nn.Module | None],
) -> None:
    """Refuse a layout or a length that does not fit one of the models before any of them is loaded."""
    check_settings(config.policy, student_tokenizer, name="student", trained=True, model=student)
    check_length(config.policy, student_length(config), name="student", model=student)
    lengths = teacher_lengths(config)
    for index, (own, tokenizer) in enumerate(zip(config.all_teachers, tokenizers, strict=True)):
        if own.cache is None and own.server is None:
            check_settings(own, tokenizer, name=f"teacher_{index}", trained=False, model=models[index])
            check_length(own, lengths[index], name=f"teacher_{index}", model=models[index])


def foreign_tokenizers(student_tokenizer: object, tokenizers: Sequence[Any]) -> list[Any]:
    """The teachers' tokenizers; None for those that are the student's own."""
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    return [None if ByteVocab.from_tokenizer(t).same_tokens(vocab) else t for t in tokenizers]


def make_loss(
    settings: CrossTokenizerDistillationLossConfig, student_tokenizer: object, foreign: Sequence[Any]
) -> CrossTokenizerDistillationLossFn:
    """The loss with a projection for every teacher; ``foreign``: None for those that share the student's tokenizer."""
    paths = settings.projection_matrix_path
    per_teacher = paths if isinstance(paths, list) else [paths] * len(foreign)
    if not foreign:
        per_teacher = []
    if len(per_teacher) != len(foreign):
        raise ConfigError(f"loss_fn.projection_matrix_path has {len(per_teacher)} entries for {len(foreign)} teachers")
    trees = OBJECTIVES[settings.mode].needs_trees
    projections = [
        None if tokenizer is None else load_or_build(student_tokenizer, tokenizer, path, trees=trees)
        for tokenizer, path in zip(foreign, per_teacher, strict=True)
    ]
    return CrossTokenizerDistillationLossFn(settings, projections=projections)


def live_teacher(config: MasterConfig, index: int, tokenizer: object) -> Policy:
    """The frozen model of one teacher; random weights depend on the run's seed and the teacher's number."""
    own, seed = fitted(config.all_teachers[index])[0], config.distillation.seed + 1 + index
    return Policy(own, tokenizer, name=f"teacher_{index}", init_optimizer=False, seed=seed)


def _resume(
    checkpointer: CheckpointManager,
    latest: Checkpoint,
    loader: StatefulDataLoader,
    val_loader: StatefulDataLoader | None,
    loss_fn: CrossTokenizerDistillationLossFn,
) -> OffPolicyDistillationSaveState:
    state = _default_off_policy_distillation_save_state()
    names = OffPolicyDistillationSaveState.__annotations__
    state.update(stored_counters(checkpointer, latest, names))  # type: ignore[typeddict-item]
    stored = latest.own()
    run_folder.check_same_data(stored["data"], _fingerprints(loader, val_loader))
    loss_fn.load_state_dict(stored["loss_fn"])
    resume(stored, state, loader)
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


def as_teachers(teacher: Teachers) -> list[Teacher]:
    """Teachers in order, whether given as a policy, a teacher or several."""
    teachers: list[Teacher] = [LiveTeacher(teacher)] if isinstance(teacher, Policy) else _listed(teacher)
    for number, own in enumerate(teachers):
        own.number = number
    return teachers


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
    OffPolicyLoop(
        student_policy,
        as_teachers(teacher_policy),
        dataloader,
        val_dataloader,
        loss_fn,
        logger,
        checkpointer,
        off_policy_distillation_state,
        master_config,
    ).train()


def check_widths(batch: BatchedDataDict) -> None:
    """Refuse a batch, of whichever loader, that holds a tensor of another width than the student's sequences."""
    width = batch["input_ids"].shape[1]
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim < 2 or _NUMBERED.sub(r"\1_", key) in XTOKEN_NON_STUDENT_SEQ_KEYS:
            continue
        if value.shape[1] != width:
            raise DataError(
                f"the batch entry {key!r} is {value.shape[1]} wide, but input_ids are {width}; what does not lie along "
                "the student's sequence must be one of XTOKEN_NON_STUDENT_SEQ_KEYS"
            )


class OffPolicyLoop(TrainingLoop):
    """Steps on texts that teachers read too, validated by bits per byte."""

    def __init__(
        self,
        student: Policy,
        teachers: list[Teacher],
        loader: StatefulDataLoader,
        val_loader: StatefulDataLoader | None,
        loss_fn: CrossTokenizerDistillationLossFn,
        logger: Logger,
        checkpointer: CheckpointManager,
        state: OffPolicyDistillationSaveState,
        config: MasterConfig,
    ) -> None:
        super().__init__(config, state, student, loader, logger, checkpointer)
        self.teachers, self.val_loader, self.loss_fn = teachers, val_loader, loss_fn
        self.validates = val_loader is not None
        self.teacher_bits: dict[str, tuple[float, float]] | None = None
        self.prompts: PromptSamples | None = None
        self.writes = True
        size = config.policy.train_global_batch_size
        # None: all rows of a step, however many documents its records hold
        self.rows_per_update = None if size == config.distillation.num_prompts_per_step else size

    def train_step(self, batch: BatchedDataDict) -> dict[str, Any]:
        check_widths(batch)
        # measured on the weights that this step changes
        self.state.pop("val_loss", None)
        return self.student.train(
            batch, self.loss_fn, teachers=self.teachers, gbs=self.rows_per_update, timer=self.timer
        )

    def dropped_of(self, batch: BatchedDataDict) -> list[dict[str, int]]:
        return list(batch.get("dropped", []))

    def bits_per_byte(self, batch: Any, result: Mapping[str, Any]) -> float | None:
        return self.bits_of(self.rows_of(batch), result)

    @staticmethod
    def bits_of(rows: BatchedDataDict, result: Mapping[str, Any]) -> float | None:
        """Bits per byte of these rows, by a step's cross-entropy."""
        nats, tokens = result["metrics"].get("ce_loss", (0.0, 0.0))
        size = float(rows["target_bytes"].sum()) if "target_bytes" in rows else 0.0
        if not tokens or not size:
            return None
        # a token's mean over all ranks, this rank's tokens and bytes
        own = float((rows["token_mask"][:, 1:] > 0).sum())
        return float(nats) / float(tokens) / math.log(2) * own / size

    def validate(self) -> dict[str, Any]:
        assert self.val_loader is not None
        metrics, _ = validate(
            self.student, self.teachers, self.val_loader, self.loss_fn, self.config, self.timer, known=self.teacher_bits
        )
        if self.teacher_bits is None:
            self.teacher_bits = {k: v for k, v in metrics.items() if re.search(r"(^|/)teacher_(\d+_)?bpb$", k)}
        return metrics

    def samples(self) -> list[dict[str, Any]]:
        config, wanted = self.config, self.config.distillation.samples
        if not self.writes:
            return []
        try:
            if self.prompts is None:
                assert self.val_loader is not None
                self.prompts = PromptSamples(
                    wanted,
                    self.student,
                    self.teachers,
                    self.val_loader.dataset,
                    sections=[config.policy, *config.all_teachers],
                    chat=config.data.detected_mode() == "chat",
                )
            return self.prompts.write()
        except Exception as error:
            if wanted.number is not None:
                raise
            # nobody asked for them: not every model can write, and a run must not end for want of a look at it
            self.logger.print(f"warning: this run writes no samples ({one_line(error)}); see distillation.samples")
            self.writes = False
            return []

    def summary_line(self, means: dict[str, float]) -> str:
        self.state["val_loss"] = means.get("loss", float("nan"))
        return compared_bits(means)

    def look_ahead(self) -> None:
        models = [self.student, *(t.policy for t in self.teachers if isinstance(t, LiveTeacher))]
        flex = any("flex" in str(model.cfg.attn_implementation) for model in models)
        # a few records are no reason to compile passes that no step takes, but for attention that is slow without
        eager = self.student.compiles and not flex
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            self._look_ahead()

    def _look_ahead(self) -> None:
        with stage("looking at how texts begin"):
            warnings = wrong_begin(self.student, self.teachers, self.config)
        for warning in warnings:
            self.logger.print(f"warning: {warning}")
        if (self.validates and self.config.distillation.val_at_start) or not self.teachers:
            return
        with stage("comparing student and teacher"):
            records = self._records_ahead()
            means = compared(
                self.student, self.teachers, self.stored_rows(records), self.loss_fn, self.timer, self.config
            )
        self.timer.reset()
        which = "training record" if len(records) == 1 else f"{len(records)} training records"
        self.logger.print(f"on the first {which}: {compared_bits(means)}")

    def _records_ahead(self) -> list[Any]:
        """The first records, as many as a comparison may cost."""
        records: Any = self.loader.dataset
        found = [records[i] for i in range(min(len(records), RECORDS_AHEAD))]
        if self.student.device.type != "cpu":
            return found
        models = [self.student, *(t.policy for t in self.teachers if isinstance(t, LiveTeacher))]
        left = WORK_AHEAD / sum(parameter.numel() for model in models for parameter in model.model.parameters())
        for number, record in enumerate(found):
            left -= int(self.stored_rows([record])["input_lengths"].sum())
            if left < 0:
                return found[: max(number, 1)]
        return found

    def stored_rows(self, records: list[Any]) -> BatchedDataDict:
        """Records as they are stored, collated."""
        batch: BatchedDataDict = self.loader.collate_fn(records)
        return batch

    def own_state(self) -> dict[str, Any]:
        return {"loss_fn": self.loss_fn.state_dict(), "data": _fingerprints(self.loader, self.val_loader)}

    def nothing_learned(self, left_out: str) -> str:
        return (
            f"data.train holds nothing to learn from: in {self.state['consumed_samples']} records no token counts "
            f"(left out: {left_out}); give longer texts, or conversations with assistant messages"
        )


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
    sources = as_teachers(teacher_policy)
    parts = batch_parts(val_dataloader)
    with timer.time("validation"):
        metrics = evaluate(student_policy, sources, Watched(val_dataloader, "validating"), loss_fn, timer, parts)
        if known is None and sources:
            known = teacher_bits(student_policy, sources, Watched(val_dataloader, "validating the teacher"), parts)
    return {**metrics, **(known or {})}, timer.get_timing_metrics("sum")


# ---- whole runs ------------------------------------------------------------------------------------------------------


def run(config: MasterConfig) -> Path:
    """Train from a run file, resuming where a checkpoint lies; returns the run folder."""
    with whole_run(config):
        if is_finished(config):
            return Path(config.logger.log_dir)
        if config.named_teachers and not config.all_teachers:
            say("loss_fn.kl_loss_weight is 0: cross-entropy alone, no teacher is loaded")
        with stage("tokenizers"):
            tokenizers = load_tokenizers(config)
        train_student(config, *tokenizers)
    return Path(config.logger.log_dir)


def train_student(
    config: MasterConfig, student_tokenizer: Any, teacher_tokenizers: Sequence[Any], **models: Any
) -> Policy:
    """The trained student of a run, inside of ``whole_run``. ``models``: those in memory, see :func:`setup`."""
    with stage("data") as told:
        train, val = load_datasets(config)
        told.note = f"{len(train):,} records" + ("" if val is None else f", {len(val):,} to validate")
    parts = setup(config, student_tokenizer, list(teacher_tokenizers), train, val, **models)
    if teacher_tokenizers and Comm.world().rank == 0:
        run_folder.write_alignment_sample(config.logger.log_dir, student_tokenizer, teacher_tokenizers[0], train)
    xtoken_off_policy_distillation_train(*parts)
    return parts[0]
