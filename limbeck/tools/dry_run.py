"""``limbeck train --dry-run``: all that a run will need, looked at in seconds; no weights are read, no run is begun.

All that is wrong is found at once, a sentence each; what is right is listed, so that a user can see what would happen.
Whatever a run refuses before its first step it refuses in a function that is called here too: `preflight.checks`, the
recipes' ``make_inputs``, models made on the meta device. What only numbers can tell (a model that does more than a head
behind its body, packed documents that see each other, a loss that is not finite) is left to the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms import preflight, run_folder
from limbeck.algorithms import trace_distillation as on_traces
from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.algorithms.build import fit_models, load_datasets, student_length, teacher_lengths, tokenizer_of
from limbeck.algorithms.config import MasterConfig, OnPolicyMasterConfig, TraceMasterConfig
from limbeck.algorithms.run import RunState, steps_of
from limbeck.algorithms.start import is_finished
from limbeck.distributed.device import default_device, memory_free
from limbeck.distributed.planner import layouts, memory_of, with_found_microbatch
from limbeck.errors import ConfigError, DataError, LimbeckError, one_line
from limbeck.evaluation.tasks import Task
from limbeck.models.causal import unwrap
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.loading import (
    ModelBuilder,
    ModelConfig,
    check_length,
    check_settings,
    fit_to_device,
    model_numbers,
    refuse_weights_behind_body,
    tokenizer_size,
    weight_files,
)
from limbeck.models.optim import check_optimizer
from limbeck.models.policy import PolicyConfig
from limbeck.models.quantization import quantized_in
from limbeck.tools.workload import workload_of
from limbeck.utils.hub import HubId, locate
from limbeck.utils.state import fitting

ROWS = 4
"""Records that are read, rendered and aligned."""
MOST_ROWS = 64
"""The same where none of their tokens counts."""
Say = Callable[[str], None]
T = TypeVar("T")
_GIB = 1 << 30


def dry_run(config: Any, say: Say) -> list[str]:
    """Look at all that a run of ``config`` needs; returns what is wrong. Writes nothing but caches."""
    check = _Check(config, say)
    elsewhere = config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None
    with ExitStack() as stack:
        with check.part("run folder"):
            stack.enter_context(run_folder.held(config.logger.log_dir, elsewhere))
            check.folder()
            if is_finished(config):
                return check.problems
        for what, check_part in preflight.checks(config):
            with check.part(what):
                check_part()
        for line in preflight.notes(config):
            say(line)
        if isinstance(config, MasterConfig):
            _on_data(config, check)
        else:
            _on_traces(config, check)
    return check.problems


class _Check:
    """Problems so far. ``latest``: the checkpoint that the run would go on from."""

    def __init__(self, config: Any, say: Say) -> None:
        self.config, self.say, self.problems = config, say, list[str]()
        self.latest: Checkpoint | None = None
        self.models_fit = True

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
        # a fault that several parts meet is reported once
        if not any(problem.endswith(line) for problem in self.problems):
            self.problems.append(line if line.startswith(f"{what}: ") else f"{what}: {line}")

    def made(self, what: str, make: Callable[[], T]) -> T | None:
        """Result of ``make``; None where that is a problem."""
        with self.part(what):
            return make()
        return None

    def folder(self) -> None:
        """Where the run would write, and where it would begin."""
        checkpointer = preflight.stored_checkpoints(self.config)
        checkpointer.refuse_unusable_dir()
        # a damaged checkpoint is renamed by the run, not by a look at it
        checkpoint = checkpointer.latest_whole(set_aside=False) if self.config.checkpointing.enabled else None
        self.latest = None if checkpoint is None else Checkpoint(checkpoint)
        begins = "begins at step 1" if checkpoint is None else f"resumes from {checkpoint.name}"
        self.say(f"run folder: {self.config.logger.log_dir}, {begins}")

    def model(self, section: ModelConfig, tokenizer: object, name: str, *, longest: int, trained: bool = False) -> None:
        """Settings, length and files of a model that is loaded here."""
        # `part` swallows what goes wrong: only the end of its block may say that the models fit
        size, fits = tokenizer_size(tokenizer), self.models_fit
        self.models_fit = False
        with self.part(name):
            check_settings(section, tokenizer, name=name, trained=trained)
            check_length(section, longest, name=name)
            here, _ = fit_to_device(section, default_device())
            if (
                section.init == "pretrained"
                and not weight_files(section)
                and isinstance(locate(str(section.model_name)), HubId)
            ):
                self.say(f"{name}: the weights of {section.model_name} are not on this machine and would be fetched")
                # the outline needs no weights, and a dry run fetches none
                here = here.model_copy(update={"init": "random"})
            if model_numbers(section) is not None and quantized_in(weight_files(section)) is None:
                weights = self.latest.weights if trained and self.latest is not None else None
                model = ModelBuilder(here, trained=trained, size=size, seed=0, weights=weights).outline()
                if not section.trust_remote_code:
                    refuse_weights_behind_body(model)  # code of its own may hold weights that it does not use
                if section.packed and unwrap(model)._is_stateful:
                    self.say(
                        f"warning: {name} carries a state along the sequence: the run refuses sequence_packing for it "
                        "unless its kernels keep packed documents apart"
                    )
                if isinstance(section, PolicyConfig):
                    steps = self.config.distillation.max_num_steps
                    check_optimizer(section.optimizer, section.scheduler, steps, model.parameters())
            self.models_fit = fits
            self.say(f"{name}: {section.shown_name}, sequences of at most {longest:,} tokens")

    def resumes(self, stored: dict[str, Any] | None, check_origins: Callable[..., None]) -> None:
        """Whether the checkpoint goes with what is read now. ``stored``: fingerprints of the data."""
        if self.latest is None:
            return
        where = f"the checkpoint {str(self.latest.folder)!r}"
        with self.part("checkpoint"), fitting(where):
            info = preflight.stored_checkpoints(self.config).load_training_info(self.latest.folder) or {}
            RunState.of(info, where)
            check_origins(has_checkpoint=True, store=False)
            if stored is not None:
                run_folder.check_same_data(self.latest.own()["data"], stored)


# ---- on texts and conversations --------------------------------------------------------------------------------------


def _on_data(config: MasterConfig, check: _Check) -> None:
    teachers = config.all_teachers
    student = check.made("student", lambda: tokenizer_of(config.policy))
    tokenizers = [check.made(_name(i, teachers), partial(tokenizer_of, section)) for i, section in enumerate(teachers)]
    lengths = check.made("lengths", lambda: teacher_lengths(config))
    check.model(config.policy, student, "student", longest=student_length(config), trained=True)
    for i, (section, tokenizer) in enumerate(zip(teachers, tokenizers, strict=True)):
        if section.kind.loads_model and lengths is not None:
            check.model(section, tokenizer, _name(i, teachers), longest=lengths[i])
    sampled = config if isinstance(config, OnPolicyMasterConfig) and config.on_policy.fraction > 0 else None
    load = partial(load_datasets, config) if sampled is None else partial(on_policy.training_data, sampled)
    data = check.made("data", load)
    for task in config.distillation.tasks:
        with check.part(f"task {task.name}"):
            Task(task)
    if data is not None:
        train, val = data
        check.say(f"data: {len(train):,} records, " + ("no validation" if val is None else f"{len(val):,} to validate"))
        if sampled is not None:
            check.made("data", partial(on_policy.check_self_teachers, sampled, train))
    if None not in (student, *tokenizers, lengths, data):
        wrap = None if sampled is None else partial(on_policy.step_collate, sampled)
        _inputs(config, student, tokenizers, data, wrap, check)
    if check.models_fit:
        with check.part("memory"):
            _memory(config, check)


def _name(number: int, teachers: Sequence[Any]) -> str:
    return f"teacher {number}" if len(teachers) > 1 else "teacher"


def _inputs(config: MasterConfig, student: object, tokenizers: list[Any], data: Any, wrap: Any, check: _Check) -> None:
    """Servers, caches, tables and loaders, and what the first records become."""
    with check.part("inputs"):
        inputs = off_policy.make_inputs(config, student, tokenizers, *data, wrap=wrap)
        for number, projection in enumerate(inputs.projections):
            share = 1.0 if projection is None else float(projection.mapped.mean())
            check.say(f"teacher {number}: {share:.0%} of the student's tokens have a counterpart")
        for number, teacher in inputs.ready.items():
            check.say(f"teacher {number}: {teacher.describe()}")
        loader, train = inputs.loader, inputs.train
        check.say(f"training: {steps_of(config, loader):,} steps, {len(loader):,} of them an epoch")
        # as the run reads them, which may end before the last record, or go through them again
        reads = steps_of(config, loader) * config.distillation.num_prompts_per_step
        order = [int(row) for row in loader.sampler.order(0)[:reads]]
        if wrap is not None:
            prompts = loader.collate_fn([train[i] for i in order[:ROWS]]).prompts
            check.say(f"prompts: {len(prompts)} of the first {min(ROWS, len(order))} records")
        else:
            _learnt(loader.collate_fn, train, order, check)
        check.resumes(inputs.fingerprints(), partial(inputs.check_origins, config))


def _learnt(collate: Callable[[Any], Any], train: Any, order: Sequence[int], check: _Check) -> None:
    """Tokens that count in the first rows; where there are none, in more, as a run goes on to the next. ``order``:
    all records that the run reads."""
    skipped: Counter[str] = Counter()
    first_rows = order[:MOST_ROWS]
    for start in range(0, len(first_rows), ROWS):
        first = collate([train[i] for i in first_rows[start : start + ROWS]])
        # nothing predicts a sequence's first token
        if learnt := int((first["token_mask"][:, 1:] > 0).sum()):
            behind = f" behind {start} records without one" if start else ""
            check.say(f"the first {len(first['idx'])} rows{behind}: {learnt:,} tokens to learn from")
            return
        for counts in first["skipped"]:
            skipped.update(counts)
    line = off_policy.nothing_to_learn(len(first_rows), str(dict(skipped)))
    # an error where these are all that is read; else a run may find some further on
    if len(first_rows) == len(order):
        raise DataError(line)
    check.say(f"warning: of the first {len(first_rows)} records: {line}")


def _memory(config: MasterConfig, check: _Check) -> None:
    device = default_device()
    policy, teachers = fit_models(
        config.policy.settled(device), [teacher.settled(device) for teacher in config.all_teachers]
    )
    here = config.model_copy(update={"policy": policy, "teacher": None, "teachers": teachers})
    (alone,) = layouts(1)
    free = memory_free(device) / _GIB
    work = with_found_microbatch(workload_of(here), alone, free * _GIB)
    needed = sum(memory_of(work, alone).values()) / _GIB
    check.say(f"memory: about {needed:.1f} GiB of {free:.1f} GiB free on the {device.type.upper()}")
    if needed > free:
        raise ConfigError(
            f"one process needs about {needed:.1f} GiB, {free:.1f} GiB are free; lower the context, or see limbeck "
            "plan for layouts over several devices"
        )


# ---- on traces -------------------------------------------------------------------------------------------------------


def _on_traces(config: TraceMasterConfig, check: _Check) -> None:
    sides = check.made("tokenizers", lambda: on_traces.load_sides(config))
    if sides is not None:
        policy, teacher = config.policy, config.teacher
        check.model(policy, sides.student, "student", longest=policy.max_total_sequence_length, trained=True)
        if teacher is not None and teacher.kind.loads_model:
            check.model(teacher, sides.teacher, "teacher", longest=teacher.max_total_sequence_length)
    data = check.made("traces", lambda: on_traces.load_data(config))
    if data is not None:
        check.say(f"traces: {len(data[0]):,}, {len(data[1]):,} to validate")
    if sides is None or data is None:
        return
    with check.part("inputs"):
        inputs = on_traces.make_inputs(config, sides, *data)
        loader = inputs.loader
        check.say(f"training: {steps_of(config, loader):,} steps, {len(loader):,} of them an epoch")
        inputs.collate([inputs.dataset[i] for i in range(min(ROWS, len(inputs.dataset)))])
        check.resumes(None, partial(on_traces.check_trace_origins, config, sides))
