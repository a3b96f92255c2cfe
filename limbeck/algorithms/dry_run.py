"""``limbeck train --dry-run``: all that a run will need, looked at in seconds; no weights are read, no run is begun.

All that is wrong is found at once, a sentence each; what is right is told, so that a user can see what would happen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limbeck.algorithms import run_folder
from limbeck.algorithms.build import (
    chat_tokenizer_of,
    fitted,
    load_datasets,
    make_collator,
    student_length,
    teacher_lengths,
    tokenizer_of,
)
from limbeck.algorithms.config import MasterConfig, TraceMasterConfig
from limbeck.algorithms.workload import workload_of
from limbeck.distributed.device import default_device, memory_free
from limbeck.distributed.planner import layouts, memory_of
from limbeck.errors import ConfigError, LimbeckError, one_line
from limbeck.losses.objectives import OBJECTIVES
from limbeck.models.loading import ModelConfig, check_length, check_settings, model_numbers, weight_files
from limbeck.models.policy import PolicyConfig
from limbeck.projection import load_or_build
from limbeck.teachers.build import TeacherConfig, check_cache_kind, connect_servers
from limbeck.teachers.cache import CacheReader
from limbeck.tokens import ByteVocab
from limbeck.traces.dataset import load_traces
from limbeck.utils.checkpoint import CheckpointManager

ROWS = 4
"""Records that are read, rendered and aligned."""
Say = Callable[[str], None]
_GIB = 1 << 30


def dry_run(config: Any, say: Say) -> list[str]:
    """Look at all that a run of ``config`` needs; returns what is wrong. Writes nothing but caches."""
    check = _Check(say)
    check.folder(config)
    if isinstance(config, MasterConfig):
        _off_policy(config, check)
    elif isinstance(config, TraceMasterConfig):
        _traces(config, check)
    else:
        say(f"data and losses of {type(config).__name__} are not looked at")
    return check.problems


class _Check:
    def __init__(self, say: Say) -> None:
        self.say, self.problems = say, list[str]()

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A block whose failure is one problem and no end."""
        try:
            yield
        except LimbeckError as error:
            self._add(what, str(error))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            self._add(what, one_line(error))

    def _add(self, what: str, line: str) -> None:
        # a fault that several parts meet is told once
        if not any(problem.endswith(line) for problem in self.problems):
            self.problems.append(f"{what}: {line}")

    def folder(self, config: Any) -> None:
        """Where the run would write, and where it would begin."""
        folder = Path(config.logger.log_dir)
        with self.part("run folder"):
            there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise ConfigError(f"{str(folder)!r} cannot be written; set logger.log_dir")
            settings = config.checkpointing.model_copy(update={"enabled": False})
            checkpointer = CheckpointManager(settings, run_dir=folder)
            latest = checkpointer.latest() if config.checkpointing.enabled else None
            if latest is None:
                self.say(f"run folder: {folder}, begins at step 1")
                return
            if changed := run_folder.changes(config, folder):
                raise ConfigError(f"{str(folder)!r} holds a run of another configuration ({'; '.join(changed[:5])})")
            checkpointer.check(latest)
            self.say(f"run folder: {folder}, resumes from {latest.name}")

    def model(self, own: PolicyConfig, tokenizer: object, name: str, *, trained: bool, longest: int) -> None:
        """Settings, length and files of a model that is loaded here."""
        with self.part(name):
            check_settings(own, tokenizer, name=name, trained=trained)
            check_length(own, longest, name=name)
            if own.init == "pretrained":
                numbers, files = model_numbers(own), weight_files(own)
                if numbers is not None and not any(file.suffix == ".safetensors" for file in files):
                    self.say(f"{name}: the weights of {own.model_name} are not on this machine and would be fetched")
            self.say(f"{name}: {own.shown_name}, sequences of at most {longest:,} tokens")

    def tokenizer(self, own: ModelConfig, name: str, load: Callable[[ModelConfig], Any]) -> Any | None:
        with self.part(name):
            return load(own)
        return None


def _off_policy(config: MasterConfig, check: _Check) -> None:
    teachers = config.all_teachers
    student_tokenizer = check.tokenizer(config.policy, "student", tokenizer_of)
    tokenizers = [check.tokenizer(own, _name(i, teachers), tokenizer_of) for i, own in enumerate(teachers)]
    lengths: list[int] = []
    with check.part("lengths"):
        lengths = teacher_lengths(config)
    check.model(config.policy, student_tokenizer, "student", trained=True, longest=student_length(config))
    for i, (own, tokenizer) in enumerate(zip(teachers, tokenizers, strict=True)):
        if own.cache is not None:
            _cache(own, tokenizer, i, check)
        elif own.server is None and lengths:
            check.model(own, tokenizer, _name(i, teachers), trained=False, longest=lengths[i])
    train = val = None
    with check.part("data"):
        train, val = load_datasets(config)
        held_out = "no validation" if val is None else f"{len(val):,} to validate"
        check.say(f"data: {len(train):,} records, {held_out}")
    if None not in (student_tokenizer, *tokenizers) and len(lengths) == len(teachers):
        _pairs(config, student_tokenizer, tokenizers, train, check)
    if train is not None:
        _length(config, len(train), check)
    with check.part("memory"):
        _memory(config, check)


def _name(number: int, teachers: Sequence[TeacherConfig]) -> str:
    return f"teacher {number}" if len(teachers) > 1 else "teacher"


def _cache(own: TeacherConfig, tokenizer: object | None, number: int, check: _Check) -> None:
    with check.part(f"cache of teacher {number}"):
        prints = None if tokenizer is None else ByteVocab.from_tokenizer(tokenizer).fingerprints
        reader = CacheReader(str(own.cache), teacher_fingerprint=prints)
        check_cache_kind(own, reader.spec, number)
        check.say(f"teacher {number}: {len(reader):,} texts in the cache {own.cache}")


def _pairs(config: MasterConfig, student: object, tokenizers: list[Any], train: Any, check: _Check) -> None:
    """What student and teachers make of each other: servers, tables, and the first records."""
    vocab, layout = ByteVocab.from_tokenizer(student), config.policy.dtensor_cfg
    with check.part("servers"):
        connect_servers(config.all_teachers, tokenizers, vocab, longest=teacher_lengths(config), layout=layout)
    foreign = [None if ByteVocab.from_tokenizer(t).same_tokens(vocab) else t for t in tokenizers]
    with check.part("tables"):
        paths = config.loss_fn.projection_matrix_path
        given = paths if isinstance(paths, list) else [paths] * len(foreign)
        for number, (tokenizer, path) in enumerate(zip(foreign, given, strict=True)):
            if tokenizer is None:
                check.say(f"teacher {number}: shares the student's tokenizer")
            elif path is None or Path(path).exists():
                trees = OBJECTIVES[config.loss_fn.mode].needs_trees
                made = load_or_build(student, tokenizer, path, trees=trees)
                share = float(made.mapped.mean())
                check.say(f"teacher {number}: {share:.0%} of the student's tokens have a counterpart")
            else:
                check.say(f"teacher {number}: the projection would be built and written to {path}")
    if train is not None:
        with check.part("records"):
            batch = make_collator(config, student, foreign)([train[i] for i in range(min(ROWS, len(train)))])
            learnt = int((batch["token_mask"][:, 1:] > 0).sum())
            lost = sum(counts.get("truncated_tokens", 0) for counts in batch["dropped"])
            cut = f", {lost / (lost + learnt):.0%} of their text is longer than the context" if lost else ""
            check.say(f"the first {len(batch['idx'])} rows: {learnt:,} tokens to learn from{cut}")
            if not learnt:
                raise ConfigError(f"the first records hold nothing to learn from ({list(batch['dropped'])})")


def _length(config: MasterConfig, records: int, check: _Check) -> None:
    loop = config.distillation
    each = records // loop.num_prompts_per_step
    if not each:
        check.problems.append(
            f"data: {records} records are fewer than one step of {loop.num_prompts_per_step} "
            "(distillation.num_prompts_per_step)"
        )
        return
    total = min(loop.max_num_steps, each * loop.max_num_epochs)
    check.say(f"training: {total:,} steps, {each:,} of them an epoch")


def _memory(config: MasterConfig, check: _Check) -> None:
    device = default_device()
    policy, teachers = fitted(config.policy.settled(device), [own.settled(device) for own in config.all_teachers])
    here = config.model_copy(update={"policy": policy, "teacher": None, "teachers": teachers})
    (alone,) = layouts(1)
    needed, free = sum(memory_of(workload_of(here), alone).values()) / _GIB, memory_free(device) / _GIB
    check.say(f"memory: about {needed:.1f} GiB of {free:.1f} GiB free on the {device.type.upper()}")
    if needed > free:
        raise ConfigError(
            f"one process needs about {needed:.1f} GiB, {free:.1f} GiB are free; take smaller micro-batches, or see "
            "limbeck plan for layouts over several devices"
        )


def _traces(config: TraceMasterConfig, check: _Check) -> None:
    models: list[tuple[PolicyConfig, str, bool]] = [(config.policy, "student", True)]
    if config.teacher is not None:
        models.append((config.teacher, "teacher", False))
    for own, name, trained in models:
        tokenizer = check.tokenizer(own, name, chat_tokenizer_of)
        check.model(own, tokenizer, name, trained=trained, longest=own.max_total_sequence_length)
    with check.part("traces"):
        found = load_traces(config.traces)
        check.say(f"traces: {len(found):,}")
    if config.traces.validation is not None:
        with check.part("traces to validate"):
            check.say(f"traces to validate: {len(load_traces(config.traces, 'validation')):,}")
