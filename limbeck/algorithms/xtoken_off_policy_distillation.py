"""Off-policy distillation across tokenizers: one run file in, a better student out.

Per step: a collated batch (student ids, teachers' ids, alignments) -> teachers' signals -> student forward, block loss,
backward -> one optimizer step. Validation, checkpoints and logging around it.

    limbeck train cpu_smoke
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import NotRequired

from limbeck.algorithms import run_folder
from limbeck.algorithms.build import (
    check_names_of_teachers,
    common_ends,
    count_token_ends,
    count_truncated,
    fit_models,
    load_datasets,
    load_tokenizers,
    make_collator,
    make_loaders,
    student_length,
    teacher_lengths,
)
from limbeck.algorithms.config import MasterConfig, OffPolicyDistillationConfig
from limbeck.algorithms.loop import TrainingLoop
from limbeck.algorithms.origins import check_origins, model_origins, tokenizer_origins
from limbeck.algorithms.pace import Pace
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
from limbeck.algorithms.validation import check_bos, check_metric, compared, compared_bits, evaluate, teacher_bits
from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.loader import batch_parts
from limbeck.data.microbatch import check_sequence_dim
from limbeck.data.sources import RecordDataset
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError
from limbeck.losses.contract import State, Teacher
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.losses.objectives import ObjectiveConfig, find_objective
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.loading import ModelConfig, check_length, check_settings, model_identity, tokenizer_size
from limbeck.models.policy import Policy
from limbeck.projection import Projection, load_or_build, refuse_missing
from limbeck.teachers.build import TeacherConfig, load_states, make_teacher, same_rows, stored_states
from limbeck.teachers.kinds import TeacherKind
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import class_table
from limbeck.utils.arguments import also_named
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.collector import rare_collections
from limbeck.utils.files import Stamp, stamp_files
from limbeck.utils.logger import Logger
from limbeck.utils.progress import Watched, say, stage
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
        "alignment_pair_same_text",
        "alignment_teacher_exact_partition_mask",
        "alignment_teacher_chunk_id",
    }
)
"""Batch keys whose second dimension is not the student's sequence; of several teachers also with their number."""
_NUMBERED = re.compile(r"^(teacher|alignment)_\d+_")

Teachers = Policy | Teacher | Sequence[Teacher] | None


class OffPolicyDistillationSaveState(TypedDict):
    """Where a run stands, for the published calls; ``limbeck.algorithms.run.RunState`` is the same with types."""

    current_epoch: int
    current_step: int
    total_steps: int
    consumed_samples: int
    total_valid_tokens: int
    val_loss: NotRequired[float]
    observers: NotRequired[dict[str, dict[str, Any]]]


def _default_off_policy_distillation_save_state() -> OffPolicyDistillationSaveState:
    return _published(RunState())


def _published(state: RunState) -> OffPolicyDistillationSaveState:
    state_dict: Any = state.as_dict()
    return state_dict


@dataclass
class OffPolicyRun(Run):
    """A run on texts that teachers read too."""

    config: MasterConfig
    loss_fn: CrossTokenizerDistillationLossFn

    def own_state(self) -> State:
        return {"loss_fn": self.loss_fn.state_dict(), "data": _fingerprints(self.loader, self.val_loader)}

    def load_own_state(self, stored: State) -> None:
        run_folder.check_same_data(stored["data"], _fingerprints(self.loader, self.val_loader))
        self.loss_fn.load_state_dict(stored["loss_fn"])

    def shared_state(self) -> State:
        return stored_states(self.teachers)

    def load_shared_state(self, checkpoint: Checkpoint) -> None:
        if stored_states(self.teachers):
            load_states(self.teachers, checkpoint)

    def nothing_learned(self, skipped: str) -> str:
        return nothing_to_learn(self.state.consumed_samples, skipped)


def nothing_to_learn(records: int, skipped: str) -> str:
    """The message where no token of so many records counts, for the reasons of ``skipped``."""
    return (
        f"data.train holds nothing to learn from: in {records} records no token counts (skipped: {skipped}); give "
        "longer texts, or conversations with assistant messages"
    )


# ---- set-up ----------------------------------------------------------------------------------------------------------


@also_named(teacher_tokenizers="teacher_tokenizer")
def setup(
    master_config: MasterConfig,
    student_tokenizer: object,
    teacher_tokenizer: object,
    train_dataset: Any,
    val_dataset: Any | None,
    *,
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
        student_model, teacher_models: causal models in memory to use instead of loading them (one entry per teacher,
            None where it is loaded). The student is trained in place; a checkpoint's weights are put into it.

    Returns:
        Student, teacher (a Policy for one live teacher, otherwise a list of sources), loaders, loss, logger,
        checkpointer, state and configuration, in the published order.
    """
    run = setup_run(
        _with_mode_of(master_config, train_dataset),
        student_tokenizer,
        _listed(teacher_tokenizer),
        train_dataset,
        val_dataset,
        student_model=student_model,
        teacher_models=teacher_models,
    )
    teacher: Teachers = run.teachers
    only = run.teachers[0] if len(run.teachers) == 1 else None
    # the very type: a subclass is more than its model, such as a student without its adapters
    if type(only) is LiveTeacher and isinstance(only.policy, Policy):
        teacher = only.policy
    parts = run.student, teacher, run.loader, run.val_loader, run.loss_fn, run.logger, run.checkpointer
    return *parts, _published(run.state), run.config


def _with_mode_of(config: MasterConfig, records: Any) -> MasterConfig:
    """The configuration with ``data.mode`` detected from records that no file holds."""
    if isinstance(records, RecordDataset) or config.data.mode != "auto" or not len(records):
        return config
    mode = "chat" if records[0].get("messages") else "text"
    return config.model_copy(update={"data": config.data.model_copy(update={"mode": mode})})


def setup_run(
    config: MasterConfig,
    student_tokenizer: object,
    teacher_tokenizers: Sequence[Any],
    train: Any,
    val: Any,
    **models: Any,
) -> OffPolicyRun:
    """The run of a configuration, resumed from the latest checkpoint if any. ``models``: those in memory, see
    :func:`setup`; ``loaded``: teachers that are there, see :func:`make_parts`."""
    parts, latest = make_parts(config, student_tokenizer, teacher_tokenizers, train, val, **models)
    run = OffPolicyRun(**parts)
    run.begin(latest)
    return run


@rare_collections()
def make_parts(
    config: MasterConfig,
    student_tokenizer: object,
    teacher_tokenizers: Sequence[Any],
    train: Any,
    val: Any | None,
    *,
    wrap: Callable[[CrossTokenizerCollator], Any] | None = None,
    student_model: nn.Module | None = None,
    teacher_models: Sequence[nn.Module | None] | None = None,
    loaded: Mapping[int, Teacher] | None = None,
) -> tuple[dict[str, Any], Checkpoint | None]:
    """The fields of a run on texts, and the checkpoint that it goes on from, which is yet to be read.

    ``wrap``: makes what collates training records of the collator, where that is more than it; not for validation.
    ``loaded``: teachers of an earlier run, by their numbers, which are not loaded once more.
    """
    join_ranks(config)
    tokenizers, models = _one_each(config, teacher_tokenizers, teacher_models)
    inputs = make_inputs(
        config, student_tokenizer, tokenizers, train, val, wrap=wrap, student_model=student_model, teacher_models=models
    )
    checkpointer, latest = find_checkpoint(config)
    open_folder(config, latest, student_tokenizer, tokenizers)
    with Comm.world().fail_together():
        if Comm.world().rank == 0:
            inputs.check_origins(config, has_checkpoint=latest is not None)
    log_start(config, checkpointer, latest, inputs.loader)
    policy, sections = fit_models(config.policy, config.all_teachers)
    student = load_student(config, policy, student_tokenizer, latest, model=student_model)
    ready = {**inputs.ready, **(loaded or {})}
    teachers = _load_teachers(config, sections, student_tokenizer, tokenizers, ready, models, student)
    parts = {
        "config": config,
        "student": student,
        "teachers": as_teachers(teachers),
        "loader": inputs.loader,
        "val_loader": inputs.val_loader,
        "loss_fn": inputs.loss_fn,
        "checkpointer": checkpointer,
    }
    return parts, latest


@dataclass(frozen=True)
class Inputs:
    """Parts that a run has before it loads a model; ``limbeck train --dry-run`` comes as far.

    Attributes:
        projections: of each teacher; None for one that shares the student's tokenizer.
        ready: teachers that load no weights, by their numbers: servers and caches.
        identities: of models in memory, by what messages call them.
        tokenizers: the student's and the teachers'.
    """

    train: Any
    val: Any | None
    loader: StatefulDataLoader
    val_loader: StatefulDataLoader | None
    loss_fn: CrossTokenizerDistillationLossFn
    projections: Sequence[Projection | None]
    ready: Mapping[int, TeacherKind]
    identities: Mapping[str, Mapping[str, Any]]
    tokenizers: Sequence[object]

    def fingerprints(self) -> dict[str, str | None]:
        """Facts that identify the records of a run."""
        return _fingerprints(self.loader, self.val_loader)

    def check_origins(self, config: MasterConfig, *, has_checkpoint: bool, store: bool = True) -> None:
        """Refuse to go on with other data, tokenizers or teachers than the run began with; for one rank."""
        files = _files(config, self.train, self.val, from_memory=set(self.identities))
        # weights that are loaded are compared by their files, or by ``identities``
        stated = {f"teacher_{number}": teacher.identity() for number, teacher in self.ready.items()}
        facts = {**self.identities, **stated}
        names = ("policy", *(f"teacher_{number}" for number in range(len(config.all_teachers))))
        read = zip((config.policy, *config.all_teachers), self.tokenizers, strict=True)
        tokenizers = tokenizer_origins(dict(zip(names, read, strict=True)))
        check_origins(config.logger.log_dir, files, facts, tokenizers, has_checkpoint=has_checkpoint, store=store)


def make_inputs(
    config: MasterConfig,
    student_tokenizer: object,
    tokenizers: list[Any],
    train: Any,
    val: Any | None,
    *,
    wrap: Callable[[CrossTokenizerCollator], Any] | None = None,
    student_model: nn.Module | None = None,
    teacher_models: Sequence[nn.Module | None] = (),
) -> Inputs:
    """All that a run on texts refuses before it loads a model, and what it has then. Collective.

    ``tokenizers``: one per teacher; ``wrap``, ``student_model``, ``teacher_models``: as of ``make_parts``.
    """
    models = list(teacher_models or [None] * len(tokenizers))
    _check_models(config, student_tokenizer, tokenizers, student_model, models)
    foreign = foreign_tokenizers(student_tokenizer, tokenizers)
    _check_budgets(config, foreign)
    if same := [f"teacher {number}" for number, tokenizer in enumerate(foreign) if tokenizer is None]:
        say(f"{' and '.join(same)}: the student's own tokenizer, compared token by token, not by loss_fn.mode")
    ready = _teachers_without_models(config, student_tokenizer, tokenizers)
    ends = common_ends(config, student_tokenizer, tokenizers, foreign)
    for number, of_teacher in enumerate(ends):
        if of_teacher:
            names = " and ".join(ByteVocab.from_tokenizer(student_tokenizer).display(of_teacher))
            say(f"teacher {number} ends answers with another token: {names} are compared as one event")
    loss_fn, projections = _loss(config, student_tokenizer, foreign, ends)
    collator = make_collator(config, student_tokenizer, foreign)
    for records in (train, val):
        if records is not None:
            check_names_of_teachers(config, collator, records)
    collate = collator if wrap is None else wrap(collator)
    check_metric(config, foreign, val, loss_fn.objectives)
    loader, val_loader = make_loaders(config, collate, train, val, val_collator=collator)
    _look_at_records(config, loss_fn, student_tokenizer, foreign, train, stored=wrap is None)
    identities = _identities(config, student_model, models)
    sides = (student_tokenizer, *tokenizers)
    return Inputs(train, val, loader, val_loader, loss_fn, projections, ready, identities, sides)


def _one_each(
    config: MasterConfig, tokenizers: Sequence[Any], models: Sequence[nn.Module | None] | None
) -> tuple[list[Any], list[nn.Module | None]]:
    """A tokenizer, and a model in memory or None, for each teacher."""
    number = len(config.all_teachers)
    if len(tokenizers) != number:
        raise ConfigError(f"{number} teachers in the run file but {len(tokenizers)} teacher tokenizers")
    one_each = list(models or [None] * number)
    if len(one_each) != number:
        raise ConfigError(f"{number} teachers in the run file but {len(one_each)} teacher models")
    return list(tokenizers), one_each


def _teachers_without_models(
    config: MasterConfig, student_tokenizer: object, tokenizers: Sequence[Any]
) -> Mapping[int, TeacherKind]:
    """Teachers that load no weights here, by their numbers, before any model is loaded: what is wrong with a server or
    a cache is said at once. Collective."""
    vocab, teachers, readers = ByteVocab.from_tokenizer(student_tokenizer), dict[int, TeacherKind](), None
    for i, (section, tokenizer) in enumerate(zip(config.all_teachers, tokenizers, strict=True)):
        if section.kind.loads_model or section.kind.follows_student:
            continue
        # collective, and only where a teacher needs it: sections are the same on every rank
        readers = readers or same_rows(config.policy.dtensor_cfg)
        seed, longest = config.distillation.seed + 1 + i, teacher_lengths(config)[i]
        with stage(f"the teacher {section.kind.shown(section.source, section)}"), Comm.world().fail_together():
            teachers[i] = make_teacher(section, i, tokenizer, vocab, seed=seed, longest=longest, readers=readers)
        teachers[i].verify()
    return teachers


def _loss(
    config: MasterConfig, student_tokenizer: object, foreign: Sequence[Any], ends: Sequence[Sequence[int]]
) -> tuple[CrossTokenizerDistillationLossFn, list[Projection | None]]:
    objectives = [section.loss_fn for section in config.all_teachers]
    with stage(f"tables of the loss ({', '.join(dict.fromkeys(config.modes))})") if foreign else nullcontext():
        loss_fn, projections = make_loss(config.loss_fn, student_tokenizer, foreign, objectives, ends)
        loss_fn.count_by_class(class_table(ByteVocab.from_tokenizer(student_tokenizer)))
    size = tokenizer_size(student_tokenizer)
    if size is not None:
        loss_fn.check_vocab_size(size)
    for number, section in enumerate(config.all_teachers):
        if section.kind.gives_topk(section.source):
            loss_fn.check_topk(number)
    return loss_fn, projections


def _look_at_records(
    config: MasterConfig,
    loss_fn: CrossTokenizerDistillationLossFn,
    student_tokenizer: object,
    foreign: list[Any],
    records: Any,
    *,
    stored: bool,
) -> None:
    """Findings in the first records: text that the contexts cut off, and what a loss counts in texts. ``stored``: they
    are learnt from as they are, not as prompts. Collective."""
    if not stored:
        if loss_fn.counts_ends:
            raise ConfigError(
                "loss_fn.condition 'counted' goes by a text, which an on-policy run has not got; use another"
            )
        return
    with Comm.world().fail_together():
        warning = count_truncated(config, student_tokenizer, foreign, records) if Comm.world().rank == 0 else None
        if warning is not None:
            say(f"warning: {warning}")
        count_token_ends(config, loss_fn, student_tokenizer, foreign, records)


def _load_teachers(
    config: MasterConfig,
    sections: Sequence[TeacherConfig],
    student_tokenizer: object,
    tokenizers: Sequence[Any],
    ready: Mapping[int, Teacher],
    models: Sequence[nn.Module | None],
    student: Policy,
) -> list[Teacher]:
    """The teachers in order. ``sections``: theirs, fitted to the device; ``ready``: those that need no model."""
    vocab, teachers = ByteVocab.from_tokenizer(student_tokenizer), list[Teacher]()
    for i, (section, tokenizer) in enumerate(zip(sections, tokenizers, strict=True)):
        if i in ready:
            teachers.append(ready[i])
            continue
        with stage(f"loading the teacher {section.kind.shown(section.source, section)}"):
            # a student that teaches itself began as the student did
            seed = config.distillation.seed + (0 if section.kind.follows_student else 1 + i)
            teacher = make_teacher(
                section, i, tokenizer, vocab, seed=seed, model=models[i], policy=student, start=config.policy
            )
            teacher.verify()
            teachers.append(teacher)
    return teachers


def _identities(
    config: MasterConfig, student: nn.Module | None, teachers: Sequence[nn.Module | None]
) -> dict[str, dict[str, Any]]:
    """Facts that identify the models in memory that a resumed run must be given again: teachers', and below
    adapters."""
    in_memory = {f"teacher_{i}": model for i, model in enumerate(teachers)}
    in_memory["policy"] = student if config.policy.adapters is not None else None
    return {name: dict(model_identity(model)) for name, model in in_memory.items() if model is not None}


def _files(
    config: MasterConfig, train: Any, val: Any | None, from_memory: Collection[str] = ()
) -> dict[str, list[Stamp]]:
    """Stamps of the data and of the weights that every start reads: of live teachers, and the student's first ones
    where it is asked for them. ``from_memory``: models that are given as objects."""
    models: dict[str, ModelConfig] = {
        f"teacher_{i}": section for i, section in enumerate(config.all_teachers) if section.kind.loads_model
    }
    if config.reads_start:
        models["policy"] = config.policy
    models = {name: section for name, section in models.items() if name not in from_memory}
    data = {"data.train": train, "data.validation": val}
    files = {name: records.stamps() for name, records in data.items() if isinstance(records, RecordDataset)}
    paths = config.loss_fn.projection_matrix_path
    files["loss_fn.projection_matrix_path"] = stamp_files([p for p in _listed(paths) if p is not None])
    return files | model_origins(models)


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
    for task in config.distillation.tasks:
        check_length(
            config.policy,
            task.max_new_tokens,
            name=f"the student of task {task.name!r}",
            keys="the task's max_new_tokens",
            model=student,
        )
    lengths = teacher_lengths(config)
    for index, (section, tokenizer) in enumerate(zip(config.all_teachers, tokenizers, strict=True)):
        if section.kind.loads_model:
            check_settings(section, tokenizer, name=f"teacher_{index}", trained=False, model=models[index])
            check_length(section, lengths[index], name=f"teacher_{index}", model=models[index])


def _check_budgets(config: MasterConfig, foreign: Sequence[Any]) -> None:
    """Refuse micro-batches that have no room for the longest row, which would end the run when it comes. ``foreign``:
    None for teachers that share the student's rows."""
    name, section = config.policy.budgets or ("", None)
    if section is None:
        return
    keys = ("train_mb_tokens", "logprob_mb_tokens")
    rooms = [("the student", key, getattr(section, key), student_length(config)) for key in keys]
    room = section.teacher_mb_tokens or section.train_mb_tokens
    lengths = [length for length, it in zip(teacher_lengths(config), foreign, strict=True) if it is not None]
    listed = room if isinstance(room, list) else [room] * len(lengths)
    if len(listed) != len(lengths):
        raise ConfigError(
            f"policy.{name}.teacher_mb_tokens has {len(listed)} numbers for the {len(lengths)} teachers that have "
            "token ids of their own; give one number for all or one for each"
        )
    rooms += [("a teacher", "teacher_mb_tokens", *pair) for pair in zip(listed, lengths, strict=True)]
    for side, key, tokens, length in rooms:
        if tokens is not None and tokens < length:
            raise ConfigError(
                f"policy.{name}.{key} is {tokens:,}, but a row of {side} may have {length:,} tokens; raise it, leave "
                "it out so that it is found, or lower the context"
            )


def foreign_tokenizers(student_tokenizer: object, tokenizers: Sequence[Any]) -> list[Any]:
    """The teachers' tokenizers; None for those that are the student's own."""
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    return [None if ByteVocab.from_tokenizer(t).same_tokens(vocab) else t for t in tokenizers]


def make_loss(
    settings: CrossTokenizerDistillationLossConfig,
    student_tokenizer: object,
    foreign: Sequence[Any],
    objectives: Sequence[ObjectiveConfig | None] | None = None,
    ends: Sequence[Sequence[int]] | None = None,
) -> tuple[CrossTokenizerDistillationLossFn, list[Projection | None]]:
    """The loss, and a projection for every teacher. ``foreign``: None for those that share the student's tokenizer;
    ``objectives``: of teachers that have one of their own; ``ends``: see ``common_ends``."""
    objective_of_each = list(objectives or [None] * len(foreign))
    for number, (tokenizer, objective) in enumerate(zip(foreign, objective_of_each, strict=True)):
        if tokenizer is None and objective is not None:
            raise ConfigError(
                f"teachers.{number} has the student's own tokenizer, so it is compared token by token, not by mode "
                f"{objective.mode!r}; leave out its loss_fn"
            )
    modes = [(objective or settings).mode for objective in objective_of_each]
    projections = load_projections(settings, student_tokenizer, foreign, modes)
    return CrossTokenizerDistillationLossFn(
        settings, projections=projections, teacher_objectives=objective_of_each, ends=ends
    ), projections


def load_projections(
    settings: CrossTokenizerDistillationLossConfig,
    student_tokenizer: object,
    foreign: Sequence[Any],
    modes: Sequence[str] = (),
) -> list[Projection | None]:
    """A projection for every teacher that has another tokenizer; read where a file is named, else built. ``modes``: the
    objective of each, where it is not that of the settings."""
    paths = settings.projection_matrix_path
    per_teacher = paths if isinstance(paths, list) else [paths] * len(foreign)
    if not foreign:
        per_teacher = []
    for path in per_teacher:
        refuse_missing(path, "loss_fn.projection_matrix_path")
    if len(per_teacher) != len(foreign):
        raise ConfigError(f"loss_fn.projection_matrix_path has {len(per_teacher)} entries for {len(foreign)} teachers")
    trees = [find_objective(mode).needs_trees for mode in modes or [settings.mode] * len(foreign)]
    return [
        None if tokenizer is None else load_or_build(student_tokenizer, tokenizer, path, trees=has_trees)
        for tokenizer, path, has_trees in zip(foreign, per_teacher, trees, strict=True)
    ]


def live_teacher(config: MasterConfig, index: int, tokenizer: object) -> Policy:
    """The frozen model of one teacher; random weights depend on the run's seed and the teacher's number."""
    section, seed = fit_models(config.all_teachers[index])[0], config.distillation.seed + 1 + index
    return Policy(section, tokenizer, name=f"teacher_{index}", init_optimizer=False, seed=seed)


def _fingerprints(loader: StatefulDataLoader, val_loader: StatefulDataLoader | None) -> dict[str, str | None]:
    """Facts that identify the records of a run."""
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
    for number, teacher_of_run in enumerate(teachers):
        teacher_of_run.number = number
    return teachers


# ---- the loop --------------------------------------------------------------------------------------------------------


@also_named(teacher_policies="teacher_policy")
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
    run = OffPolicyRun(
        master_config,
        student_policy,
        as_teachers(teacher_policy),
        dataloader,
        val_dataloader,
        loss_fn,
        checkpointer,
        state=RunState.of(off_policy_distillation_state),
    )
    run.logger = logger
    try:
        OffPolicyLoop(run).train()
    finally:
        off_policy_distillation_state.update(_published(run.state))


def check_widths(batch: BatchedDataDict, skip_keys: Collection[str] = ()) -> None:
    """Refuse a batch, of whichever loader, that holds a tensor of another width than the student's sequences."""
    known_keys = {key for key in batch if _NUMBERED.sub(r"\1_", key) in XTOKEN_NON_STUDENT_SEQ_KEYS}
    check_sequence_dim(batch, skip_keys=known_keys | set(skip_keys))


OffPolicyRunT = TypeVar("OffPolicyRunT", bound=OffPolicyRun)


class OffPolicyLoop(TrainingLoop[OffPolicyRunT]):
    """Steps on texts that teachers read too, validated by bits per byte."""

    def __init__(self, run: OffPolicyRunT) -> None:
        super().__init__(run)
        self.validates = run.val_loader is not None or bool(run.config.distillation.tasks)
        self.teacher_bits: dict[str, tuple[float, float]] | None = None
        size = run.config.policy.train_global_batch_size
        # None: all rows of a step, however many documents its records hold
        self.rows_per_update = None if size == run.config.distillation.num_prompts_per_step else size
        self.pace = Pace(run.teachers)

    def close(self) -> None:
        for teacher in self.run.teachers:
            teacher.close()

    def train_step(self, batch: BatchedDataDict) -> dict[str, Any]:
        check_widths(batch)
        run = self.run
        self.pace.begin()
        if any(teacher.asks_ahead for teacher in run.teachers):
            self.ask_ahead(batch, self.upcoming())
        with self.pace.train():
            return run.student.train(
                batch, run.loss_fn, teachers=run.teachers, gbs=self.rows_per_update, timer=run.timer
            )

    def ask_ahead(self, *batches: BatchedDataDict | None) -> None:
        """Let the requests of this step and then those of the next begin, for teachers that take requests."""
        for teacher in (teacher for teacher in self.run.teachers if teacher.asks_ahead):
            # it must know which ranks read the same rows, also before the first step shows them
            teacher.attach(self.run.student.layout)
            for batch in batches:
                if batch is not None:
                    teacher.ask_ahead(batch)

    def more_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        return self.pace.figures()

    def skipped_of(self, batch: BatchedDataDict) -> list[dict[str, int]]:
        return list(batch.get("skipped", []))

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
        tokens_here = float((rows["token_mask"][:, 1:] > 0).sum())
        return float(nats) / float(tokens) / math.log(2) * tokens_here / size

    def validate(self) -> dict[str, Any]:
        run = self.run
        if run.val_loader is None:
            return {}
        metrics, _ = validate(
            run.student, run.teachers, run.val_loader, run.loss_fn, run.config, run.timer, known=self.teacher_bits
        )
        # once: what teachers make of these texts does not change during a run
        if self.teacher_bits is None:
            self.teacher_bits = {k: v for k, v in metrics.items() if re.search(r"(^|/)teacher_(\d+_)?bpb$", k)}
        return metrics

    def summary_line(self, means: dict[str, float]) -> str:
        return compared_bits(means) if self.run.val_loader is not None else "validated on tasks alone"

    def log_baseline(self) -> None:
        run = self.run
        models = [run.student, *(t.model for t in run.teachers if t.model is not None)]
        flex = any("flex" in str(model.cfg.attn_implementation) for model in models)
        # a few records are no reason to compile passes that no step takes, but for attention that is slow without
        eager = run.student.compiles and not flex
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            self._log_baseline()

    def _log_baseline(self) -> None:
        run = self.run
        with stage("looking at how texts begin"):
            warnings = check_bos(run.student, run.teachers, run.config)
        for warning in warnings:
            run.logger.print(f"warning: {warning}")
        if (run.val_loader is not None and run.config.distillation.val_at_start) or not run.teachers:
            return
        with stage("comparing student and teacher"):
            records = self._first_records()
            means = compared(
                run.student,
                run.teachers,
                self.stored_rows(records),
                run.loss_fn,
                run.timer,
                run.config,
            )
        run.timer.reset()
        which = "training record" if len(records) == 1 else f"{len(records)} training records"
        run.logger.print(f"on the first {which}: {compared_bits(means)}")

    def _first_records(self) -> list[Any]:
        """The first records, as many as a comparison may cost."""
        run = self.run
        records: Any = run.loader.dataset
        first = [records[i] for i in range(min(len(records), RECORDS_AHEAD))]
        if run.student.device.type != "cpu":
            return first
        models = [run.student, *(t.model for t in run.teachers if t.model is not None)]
        left = WORK_AHEAD / sum(parameter.numel() for model in models for parameter in model.model.parameters())
        for number, record in enumerate(first):
            left -= int(self.stored_rows([record])["input_lengths"].sum())
            if left < 0:
                return first[: max(number, 1)]
        return first

    def stored_rows(self, records: list[Any]) -> BatchedDataDict:
        """Records as they are stored, collated."""
        batch: BatchedDataDict = self.run.loader.collate_fn(records)
        return batch


@also_named(teacher_policies="teacher_policy")
def validate(
    student_policy: Policy,
    teacher_policy: Teachers,
    val_dataloader: StatefulDataLoader,
    loss_fn: CrossTokenizerDistillationLossFn,
    master_config: MasterConfig,
    timer: Timer | None = None,
    *,
    skip_keys: Collection[str] = (),
    known: dict[str, tuple[float, float]] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Held-out KL, CE, accuracy, bits per byte and coverage over the whole set, ragged last batch included.

    Returns (metrics as (sum, count) pairs, timings in seconds); `limbeck.models.policy.published_metrics` makes means
    of them. ``skip_keys``: entries of a batch that do not lie along the student's sequence, beside
    `XTOKEN_NON_STUDENT_SEQ_KEYS`. ``known``: teachers' bits per byte from an earlier call, which do not change during a
    run.
    """
    timer = timer or Timer()
    sources = as_teachers(teacher_policy)
    parts = batch_parts(val_dataloader)
    with timer.time("validation"):
        batches = _checked(Watched(val_dataloader, "validating"), skip_keys)
        metrics = evaluate(student_policy, sources, batches, loss_fn, timer, parts)
        if known is None and sources:
            known = teacher_bits(student_policy, sources, Watched(val_dataloader, "validating the teacher"), parts)
    return {**metrics, **(known or {})}, timer.get_timing_metrics("sum")


def _checked(batches: Iterable[BatchedDataDict], skip_keys: Collection[str]) -> Iterator[BatchedDataDict]:
    for batch in batches:
        check_widths(batch, skip_keys)
        yield batch


# ---- whole runs ------------------------------------------------------------------------------------------------------


def run(config: MasterConfig) -> Path:
    """Train from a run file, resuming where a checkpoint lies, and its baseline behind it; returns the run folder."""
    with whole_run(config):
        _run_once(config)
        if config.distillation.baseline:
            alone = baseline_of(config)
            say(f"the baseline: cross-entropy alone on the same records, in {alone.logger.log_dir}")
            # the first student's memory is the second one's
            gc.collect()
            with whole_run(alone):
                _run_once(alone)
    return Path(config.logger.log_dir)


def _run_once(config: MasterConfig) -> None:
    if is_finished(config):
        return
    if config.named_teachers and not config.all_teachers:
        say("loss_fn.kl_loss_weight is 0: cross-entropy alone, no teacher is loaded")
    with stage("tokenizers"):
        tokenizers = load_tokenizers(config)
    train_student(config, *tokenizers)


def baseline_of(config: MasterConfig) -> MasterConfig:
    """The same run by cross-entropy alone, in a folder inside the run's."""
    values = config.model_dump(mode="json", exclude={"teacher", "teachers", "loss_fn"})
    # as many steps as the run may take; they are compared at the last one that both have
    values["distillation"] |= {"baseline": False, "early_stopping": None}
    if values["distillation"]["record_bits"]["enabled"] is None:
        values["distillation"]["record_bits"] = {"enabled": True}
    values["logger"]["log_dir"] = str(Path(config.logger.log_dir) / run_folder.BASELINE)
    # a folder that is named holds the run's own checkpoints
    values["checkpointing"] |= {"checkpoint_dir": None, "metric_name": None}
    sizes = config.loss_fn.model_dump(include={"student_vocab_size", "block_rows", "fast_path"})
    return resolve(MasterConfig, {**values, "loss_fn": sizes})


def train_student(
    config: MasterConfig, student_tokenizer: Any, teacher_tokenizers: Sequence[Any], **models: Any
) -> Policy:
    """The trained student of a run, inside of ``whole_run``. ``models``: those in memory, see :func:`setup`."""
    with stage("data") as progress:
        train, val = load_datasets(config)
        progress.note = f"{len(train):,} records" + ("" if val is None else f", {len(val):,} to validate")
    run = setup_run(config, student_tokenizer, teacher_tokenizers, train, val, **models)
    if teacher_tokenizers and Comm.world().rank == 0:
        run_folder.write_alignment_sample(config.logger.log_dir, student_tokenizer, teacher_tokenizers[0], train)
    OffPolicyLoop(run).train()
    return run.student
