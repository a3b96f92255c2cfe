"""``limbeck check --pilot``: is the teacher worth it to a student that reads the data?

A few steps of the run on a part of its data, once by cross-entropy alone and once by the run's own loss, from the same
weights, on the same records in the same order at the same rate. Held-out records are scored behind both, so that the
difference has a standard error. Each arm is set up and trained as a run is; its folder is a temporary one.
"""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from limbeck import short_forms
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.config import MasterConfig, OnPolicyMasterConfig
from limbeck.algorithms.observers.samples import PromptSamples, SamplesConfig
from limbeck.algorithms.records import RecordBits, record_bits
from limbeck.algorithms.start import whole_run
from limbeck.algorithms.xtoken_off_policy_distillation import OffPolicyLoop, OffPolicyRun, baseline_of, setup_run
from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.sources import flatten_documents
from limbeck.errors import ConfigError
from limbeck.losses.contract import Teacher
from limbeck.utils.progress import Bar, Progress, Silent, Stage, current, showing

SECONDS = 60.0
LEAST_STEPS = 8
"""A step has fewer records than the run's where the time would not allow for so many steps of them."""
LEAST_RECORDS = 32
"""That an arm reads at the least: of fewer no difference would mean anything."""
MOST_HELD_OUT = 200
_SCORING = 0.25
"""Share of the time for scoring held-out records."""
_TRIED = 4
"""Records of the steps by which time is estimated."""
_HOLDOUT = 0.1
_LESS = 0.3
"""Factor of the second weight that is tried."""
_CLEAR = 2.0
"""Standard errors from which on a difference is one."""
_WRITTEN_TOKENS, _TRIED_TOKENS, _WRITING_ROWS, _PROMPTS_AT_A_TIME = 256, 8, 8, 64

ALONE, OWN, WRITTEN = "cross-entropy alone", "the run's loss", "the run's loss on the teacher's text"


@dataclass
class Arm:
    """One way to train the student.

    Attributes:
        settings: run-file keys by which it differs from the run.
        bits: of the held-out records behind its last step.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    bits: RecordBits = field(default_factory=RecordBits)
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Size of a pilot."""

    steps: int
    records: int
    held_out: int


@dataclass(frozen=True)
class Costs:
    """Seconds for one record, as measured: a step by the run's loss, the student's and the teachers' forward passes;
    and for a set-up."""

    step: float
    student: float
    teacher: float
    setup: float

    @property
    def alone(self) -> float:
        """A step's by cross-entropy alone."""
        # a difference of two noisy measurements, which could be 0 or less
        return max(self.step - self.teacher, self.step / 4)


def plan_pilot(costs: Costs, left: float, *, arms: int, records: int, steps: int, held_out: int) -> Plan | float:
    """What so many seconds allow for; the seconds that are missing where that is too little to tell anything.

    ``arms``: by the run's loss, beside cross-entropy alone. ``records``, ``steps``: of the run; ``held_out``: records
    that there are.
    """
    scored = min(held_out, MOST_HELD_OUT, int(left * _SCORING / ((arms + 2) * costs.student + costs.teacher)))
    scored = max(scored, min(held_out, LEAST_RECORDS // 2))
    each = costs.alone + arms * costs.step
    other = scored * ((arms + 2) * costs.student + costs.teacher) + (arms + 1) * costs.setup
    number, least = int((left - other) / each), min(LEAST_RECORDS, records * steps)
    if number < least:
        return other + least * each - left
    per_step = records if number >= records * min(LEAST_STEPS, steps) else number // LEAST_STEPS
    return Plan(min(steps, number // per_step), per_step, scored)


class _Warnings(Silent):
    """Shows what a user should know of a set-up, and none of its stages; each line once."""

    def __init__(self, inner: Progress) -> None:
        self._inner, self._told = inner, set[str]()

    def say(self, line: str) -> None:
        if line.startswith("warning") and line not in self._told:
            self._told.add(line)
            self._inner.say(line)

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        yield Stage(what)


class _Loop(OffPolicyLoop[OffPolicyRun]):
    """The loop of a run, shown as a part of a pilot."""

    def __init__(self, run: OffPolicyRun, bar: Bar, seconds_per_step: float) -> None:
        super().__init__(run)
        self._bar, self._seconds = bar, seconds_per_step

    def log_baseline(self) -> None:
        """The pilot compares the models itself."""

    def train_step(self, batch: BatchedDataDict) -> dict[str, Any]:
        result = super().train_step(batch)
        self._bar.advance(self._seconds)
        return result


def refuse(config: Any, *, pilot: bool = True) -> None:
    """Refuse a run file that has no pair of models to be checked on stored texts."""
    if not isinstance(config, MasterConfig) or isinstance(config, OnPolicyMasterConfig):
        raise ConfigError(
            "limbeck check looks at a student, a teacher and stored texts; this run file is of another algorithm"
        )
    if not config.all_teachers:
        raise ConfigError("the run is cross-entropy alone: there is no teacher to be checked; give one as teacher")
    if pilot and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a pilot takes one process; start limbeck check without torchrun")


def run_pilot(
    config: MasterConfig,
    *,
    seconds: float = SECONDS,
    write: bool | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train the arms of a run file for about so many seconds and compare them on held-out records.

    ``write``: a further arm on text that the teacher writes; None: where that is cheap.
    Returns plain data: ``steps``, ``records`` per step, ``held_out``, ``before`` (bits per byte of student and
    teacher), ``arms`` (``name``, ``settings``, ``bits``, ``difference`` to cross-entropy alone with its
    ``standard_error``, ``seconds``), ``choice``, ``settings`` and one ``sentence``; or ``skipped``: why there is none.
    """
    refuse(config)
    progress = progress or current() or Silent()
    with tempfile.TemporaryDirectory(prefix="limbeck-pilot-") as folder, showing(_Warnings(progress)):
        return _Pilot(config, Path(folder), seconds, write, progress).run()


class _Pilot:
    def __init__(
        self, config: MasterConfig, folder: Path, seconds: float, write: bool | None, progress: Progress
    ) -> None:
        self.config, self.folder, self.write = config, folder, write
        self.progress, self.seconds, self.begun = progress, seconds, time.monotonic()
        self.loaded: dict[int, Teacher] = {}
        self.order: list[int] = []

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def run(self) -> dict[str, Any]:
        bar = self.progress.begin("pilot: loading models and data")
        first = self._config("probe", 2, min(_TRIED, self.config.distillation.num_prompts_per_step))
        with whole_run(first):
            self.tokenizers = load_tokenizers(first)
            self.train, val = load_datasets(first)
            assert val is not None
            kinds = [section.kind for section in first.all_teachers]
            teachers = self._set_up(first).teachers
            # one that is made of the student's weights belongs to one arm's student; others serve all arms
            self.loaded = {number: t for number, t in enumerate(teachers) if not kinds[number].follows_student}
            # the first one has read files and built tables
            begun = time.monotonic()
            probe = self._set_up(first)
            setup = time.monotonic() - begun
            bar.close()
            bar = self.progress.begin("pilot: finding out how long a step takes")
            held_out, costs = self._measure(probe, val, setup)
            bar.close()
        writes = self._can_write(probe.teachers)
        order: Any = probe.loader.sampler
        self.order = order.order(0).tolist()
        # the probe's student would lie in memory beside that of every arm
        del probe, teachers
        plan = plan_pilot(
            costs,
            self.left,
            arms=2 + bool(self.write and writes),
            records=self.config.distillation.num_prompts_per_step,
            steps=min(
                self.config.distillation.max_num_steps,
                self.config.distillation.max_num_epochs
                * max(1, len(self.train) // self.config.distillation.num_prompts_per_step),
            ),
            held_out=len(val),
        )
        if not isinstance(plan, Plan):
            needed = 5 * math.ceil((self.seconds + plan) / 5)
            return {"skipped": f"{self.seconds:g} s are too short; it needs --pilot-seconds {needed} or more here"}
        return self._compare(plan, costs, held_out(plan.held_out), writes)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _config(self, name: str, steps: int, records: int, settings: Mapping[str, Any] | None = None) -> MasterConfig:
        """The run for so many steps, validated by nobody, in a folder of its own."""
        values = self.config.model_dump(mode="json")
        policy, loop = values["policy"], values["distillation"]
        if (word := short_forms.schedule_word(policy["scheduler"], loop["max_num_steps"])) is not None:
            policy["scheduler"] = word[0]
            policy["warmup_steps"] = int(word[1] * steps / loop["max_num_steps"])
        if records < loop["num_prompts_per_step"]:
            policy["train_global_batch_size"] = records
            arguments = policy["optimizer"]["kwargs"]
            if isinstance(rate := arguments.get("lr"), float | int):
                # gradients of fewer records are noisier by the root of it
                arguments["lr"] = rate * math.sqrt(records / loop["num_prompts_per_step"])
        # so many epochs that the steps alone end it
        loop |= {"num_prompts_per_step": records, "max_num_steps": steps, "max_num_epochs": steps * records}
        loop |= {"val_period": 0, "val_at_start": False, "val_at_end": False, "early_stopping": None, "tasks": []}
        loop |= {"samples": {"number": 0}, "baseline": False, "save_start": False}
        values["checkpointing"] = {"enabled": False}
        values["logger"] = {"log_dir": str(self.folder / name), "tensorboard_enabled": False, "progress": False}
        if not self.config.data.validates:
            values["data"]["holdout"] = _HOLDOUT
        for key, value in (settings or {}).items():
            section, _, entry = key.partition(".")
            values[section][entry] = value
        return resolve(MasterConfig, values)

    def _set_up(self, config: MasterConfig, train: Any = None) -> OffPolicyRun:
        student, teachers = self.tokenizers
        taught = teachers if config.all_teachers else []
        loaded = self.loaded if taught else {}
        return setup_run(config, student, taught, self.train if train is None else train, None, loaded=loaded)

    def _measure(self, probe: OffPolicyRun, val: Any, setup: float) -> tuple[Any, Costs]:
        """How held-out records are had, collated, and the seconds that records cost."""
        collate: Any = probe.loader.collate_fn

        def held_out(number: int) -> list[BatchedDataDict]:
            chosen = torch.linspace(0, len(val) - 1, number).round().long().unique().tolist()
            rows = self.config.distillation.val_rows
            # numbered here: a batch's own numbers are those of pieces of records
            documents = flatten_documents([val[position] for position in chosen])
            records = [{**record, "idx": number} for number, record in enumerate(documents)]
            return [collate(records[start : start + rows]) for start in range(0, len(records), rows)]

        tried = min(_TRIED, len(val))
        some = held_out(tried)
        begun = time.monotonic()
        record_bits(probe.student, some)
        student = (time.monotonic() - begun) / tried
        begun = time.monotonic()
        for teacher in probe.teachers:
            teacher.attach(probe.student.layout)
            record_bits(teacher, some)
        taught = (time.monotonic() - begun) / tried
        loop, batch = _Loop(probe, Silent(), 0.0), next(iter(probe.loader))
        step = math.inf
        for _ in range(2):
            # the first step has more to do than others
            begun = time.monotonic()
            loop.train_step(batch)
            step = min(step, (time.monotonic() - begun) / probe.config.distillation.num_prompts_per_step)
            if self.left < self.seconds / 2:
                break
        return held_out, Costs(step, student, taught, setup)

    # -- arms ---------------------------------------------------------------------------------------------------------

    def _compare(self, plan: Plan, costs: Costs, held_out: list[BatchedDataDict], writes: bool) -> dict[str, Any]:
        alone, taught = Arm(ALONE), Arm(OWN)
        steps = plan.steps * plan.records
        bar = self.progress.begin("pilot, seconds", total=round(steps * (costs.alone + 2 * costs.step)))
        try:
            several = len(self.config.all_teachers) > 1 or not self.loaded
            teacher = None if several else record_bits(self.loaded[0], held_out)
            before = self._train(alone, plan, costs.alone, held_out, bar, baseline_of)
            self._train(taught, plan, costs.step, held_out, bar)
            arms = [alone, taught]
            more = another_weight(self.config, taught.bits.against(alone.bits))
            if more is not None:
                arms.append(Arm(", ".join(f"{key} {value}" for key, value in more.items()), more))
                self._train(arms[-1], plan, costs.step, held_out, bar)
            if writes and (texts := self._write(plan, costs)) is not None:
                arms.append(Arm(WRITTEN))
                self._train(arms[-1], plan, costs.step, held_out, bar, records=texts)
        finally:
            bar.close()
        return report(plan, before, teacher, arms)

    def _train(
        self,
        arm: Arm,
        plan: Plan,
        seconds: float,
        held_out: list[BatchedDataDict],
        bar: Bar,
        made_of: Any = None,
        records: Path | None = None,
    ) -> RecordBits:
        """Train an arm and score the held-out records behind it; returns those of the student as it began."""
        settings = dict(arm.settings)
        if records is not None:
            settings |= {"data.train": str(records), "data.validation": None, "data.holdout": 0.0}
            # the texts lie in the order in which the other arms read their records
            settings |= {"data.shuffle": False, "data.mode": self.config.data.detected_mode()}
        config = self._config(f"arm_{arm.name.replace('/', '_')}", plan.steps, plan.records, settings)
        config = config if made_of is None else made_of(config)
        begun = time.monotonic()
        with whole_run(config):
            train = load_datasets(config)[0] if records is not None else None
            run = self._set_up(config, train)
            # once: all arms begin with the same weights
            before = record_bits(run.student, held_out) if made_of is not None else RecordBits()
            _Loop(run, bar, seconds * plan.records).train()
            arm.bits = record_bits(run.student, held_out)
        arm.seconds = time.monotonic() - begun
        del run
        # cycles would keep this arm's student beside the next one's
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return before

    # -- text that the teacher writes ---------------------------------------------------------------------------------

    def _can_write(self, teachers: Sequence[Teacher]) -> bool:
        models = [teacher.model for teacher in teachers]
        can = len(models) == 1 and models[0] is not None and models[0].tokenizer is not None and bool(self.loaded)
        if self.write and not can:
            raise ConfigError("--pilot-write needs one teacher whose weights this process loads; leave it out")
        return can and self.write is not False

    def _prompts(self, number: int) -> Iterator[PromptSamples]:
        """The prompts of the records that the other arms read, some at a time, with the teacher that answers them."""
        teacher, section = self.loaded[0], self.config.all_teachers[0]
        assert teacher.model is not None
        places, chat = self.order[:number], self.config.data.detected_mode() == "chat"
        for start in range(0, len(places), _PROMPTS_AT_A_TIME):
            records = [self.train[record] for record in places[start : start + _PROMPTS_AT_A_TIME]]
            settings = SamplesConfig(number=len(records))
            # the teacher in the student's place too, which is asked for nothing but whether it can read a prompt
            yield PromptSamples(settings, teacher.model, [teacher], records, sections=[section] * 2, chat=chat)

    def _write(self, plan: Plan, costs: Costs) -> Path | None:
        """Records with the teacher's answers to the prompts of those that the other arms read; None where it takes too
        long, or too few answers come to an end."""
        number = plan.steps * plan.records
        if self.write is None:
            first = next(self._prompts(_WRITING_ROWS), None)
            if first is None or not first.prompts:
                return None
            begun = time.monotonic()
            first.teachers[0].write(first.prompts, _TRIED_TOKENS)
            pace = (time.monotonic() - begun) / _TRIED_TOKENS * _WRITTEN_TOKENS * math.ceil(number / _WRITING_ROWS)
            if pace + number * costs.step + costs.setup > self.left:
                return None
        written: list[dict[str, Any]] = []
        bar = self.progress.begin("pilot: the teacher writes", number)
        for part in self._prompts(number):
            rows = part.teachers[0].write(part.prompts, _WRITTEN_TOKENS) if part.prompts else []
            written += [_record(part.prompts[row["number"]], row) for row in rows if row["text"].strip()]
            bar.advance(len(rows))
        bar.close()
        if len(written) < max(plan.records, number // 4):
            return None
        path = self.folder / "written.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in written), encoding="utf-8")
        return path


def _record(prompt: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt with its answer, as data has it."""
    if prompt.text is not None:
        return {"text": prompt.text + row["text"]}
    answer = {"role": "assistant", "content": row["text"].strip()}
    return {"messages": [*prompt.messages, answer], **({"tools": prompt.tools} if prompt.tools else {})}


# -- what it says ------------------------------------------------------------------------------------------------------


def is_clear(difference: tuple[float, float] | None) -> bool:
    """Whether a difference is more than noise."""
    return difference is not None and abs(difference[0]) > _CLEAR * difference[1]


def another_weight(config: MasterConfig, difference: tuple[float, float] | None) -> dict[str, Any] | None:
    """Settings of the loss to try besides: more of the teacher where it helps clearly, else less."""
    loss = config.loss_fn
    if loss.dynamic_loss_scaling:
        return None
    if difference is not None and difference[0] < 0 and is_clear(difference):
        if loss.ce_loss_scale is None or loss.ce_loss_scale <= _LESS:
            return None
        return {"loss_fn.ce_loss_scale": _LESS, **({"loss_fn.gate": "none"} if loss.gate != "none" else {})}
    return {"loss_fn.kl_loss_weight": round(_LESS * loss.kl_loss_weight, 6)}


def report(plan: Plan, before: RecordBits, teacher: RecordBits | None, arms: Sequence[Arm]) -> dict[str, Any]:
    """The pilot as plain data; ``arms``: cross-entropy alone first, the run's loss second."""
    alone = arms[0]
    table = []
    for arm in arms:
        difference, error = arm.bits.against(alone.bits) or (None, None)
        row: dict[str, Any] = {"name": arm.name, "settings": arm.settings, "bits": arm.bits.per_byte}
        row |= {} if arm is alone else {"difference": difference, "standard_error": error}
        table.append({**row, "seconds": arm.seconds})
    outcome = {
        "steps": plan.steps,
        "records": plan.records,
        "held_out": len(before.bits),
        "before": {"student": before.per_byte, "teacher": None if teacher is None else teacher.per_byte},
        "arms": table,
    }
    return {**outcome, **verdict(outcome)}


def verdict(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """``choice`` (``distil``, ``write``, ``cross_entropy`` or ``either``), the ``settings`` that belong to it, and one
    ``sentence``."""
    taught = outcome["arms"][1:]
    read = f"{outcome['steps']} steps of {outcome['records']} records"
    clear = [arm for arm in taught if is_clear((arm["difference"], arm["standard_error"]))]
    ahead = sorted((arm for arm in clear if arm["difference"] < 0), key=lambda arm: float(arm["difference"]))
    run_arm, before, after = taught[0], outcome["before"]["student"], outcome["arms"][0]["bits"]
    if after > before:
        line = f"These steps tell nothing: cross-entropy alone made the student worse, from {before:.4f} to {after:.4f}"
        more = "lower policy.lr, or give the pilot more time (--pilot-seconds)"
        return {"choice": "either", "settings": {}, "sentence": f"{line} bits per byte after {read}; {more}."}

    def described(arm: Mapping[str, Any]) -> str:
        way = "ahead of" if arm["difference"] < 0 else "behind"
        margin = f"{abs(arm['difference']):.4f} ± {arm['standard_error']:.4f}"
        return f"{margin} bits per byte {way} cross-entropy alone after {read}"

    if ahead:
        best = ahead[0]
        # a setting that is not clearly better than what the run file says is no reason to change it
        if run_arm in ahead and run_arm["difference"] - best["difference"] < _CLEAR * best["standard_error"]:
            best = run_arm
        if best["name"] == WRITTEN:
            line = f"Let the teacher write (limbeck write): its text, with its distribution, is {described(best)}"
            return {"choice": "write", "settings": {}, "sentence": f"{line}."}
        changed = " ".join(f"{key}={value}" for key, value in best["settings"].items())
        line = f"Distil{f' with {changed}' if changed else ''}: {described(best)}"
        return {"choice": "distil", "settings": best["settings"], "sentence": f"{line}."}
    if run_arm in clear:
        others = [
            f"{' '.join(f'{key}={value}' for key, value in arm['settings'].items())} does not help"
            for arm in taught
            if arm["settings"]
        ]
        line = f"Train by cross-entropy alone (teacher=null): the run's loss is {described(run_arm)}"
        line = ", and ".join([line, *others])
        return {
            "choice": "cross_entropy",
            "settings": {"teacher": None},
            "sentence": f"{line}; adapt the teacher to this kind of text, or let it write (limbeck write).",
        }
    line = f"No difference beyond noise: the run's loss is {described(run_arm)}"
    return {
        "choice": "either",
        "settings": {},
        "sentence": f"{line}; a longer pilot (--pilot-seconds) or limbeck train --baseline can tell.",
    }
