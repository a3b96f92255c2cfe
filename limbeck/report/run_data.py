"""Content of a run folder, read without trusting it: a run may have just begun, been killed, or be training now."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from limbeck.config import parse_yaml
from limbeck.errors import ConfigError, LimbeckError, one_line
from limbeck.utils.jsonl import parse
from limbeck.utils.paired import paired_rates

_MARKS = ("metrics.jsonl", "config.yaml", "versions.json")
BASELINE = "baseline"
_OPTIONS: dict[str, Any] = {"direction": "forward", "temperature": 1.0, "condition": "none", "gate": "none"}
"""Settings, with their defaults, that make another divergence of a mode."""
_OLD_METRICS = (
    (r"train/dropped/(.*)", r"train/skipped/\1"),
    (r"(.*/)(?:unreached|lost)_mass", r"\1uncovered_mass"),
    (r"(.*/)excluded_mass_(student|teacher)", r"\1uncovered_root_\2"),
)
"""Names in the logs of earlier runs, and what they are called now."""
Points = list[tuple[int, float]]


def current_name(key: str) -> str:
    """The name under which a metric of a log is read."""
    for old, new in _OLD_METRICS:
        if match := re.fullmatch(old, key):
            return match.expand(new)
    return key


class JsonLines:
    """Objects of a file that grows, one a line, each of them with a step; what was read is not read again.

    A last line without its end is left for later: a writer is at work, or was killed. A file that was replaced or has
    become shorter, as a resumed run's does, is read anew.

    Attributes:
        bad: number of lines that are no such object.
        cut: the last line has no end.
        problem: why the file cannot be read, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad = 0
        self.cut = False
        self.problem = ""
        self._file: tuple[int, int] | None = None
        self._at = 0

    def read(self, restart: Callable[[], None], take: Callable[[dict[str, Any]], None]) -> None:
        """Hand what has come since the last time to ``take``; ``restart`` comes before a file's first line."""
        self.problem, self.cut = "", False
        try:
            status = self.path.stat() if self.path.is_file() else None
            file = None if status is None else (status.st_dev, status.st_ino)
            if file is None or file != self._file or (status is not None and status.st_size < self._at):
                self._file, self._at, self.bad = file, 0, 0
                restart()
            if file is not None:
                with self.path.open("rb") as stream:
                    stream.seek(self._at)
                    for row in self._new(stream):
                        take(row)
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {one_line(error)}."

    def _new(self, stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for raw in stream:
            if not raw.endswith(b"\n"):
                self.cut = True
                return
            # in bytes, where the next read goes on: characters of a text file would be other places
            self._at += len(raw)
            if not raw.strip():
                continue
            try:
                row = parse(raw)
                yield {**row, "step": int(row["step"])}
            # RecursionError: nesting deeper than the parser can follow is no ValueError
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.bad += 1


class History:
    """Every metric's finite values by step; later values of a step replace earlier ones."""

    def __init__(self) -> None:
        self.steps: dict[int, None] = {}
        self._columns: dict[str, tuple[list[int], list[float]]] = {}
        # by the names of the log, so that a name is looked up once and not with every line
        self._columns_of_log: dict[str, tuple[list[int], list[float]]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.steps.clear()
        self._columns.clear()
        self._columns_of_log.clear()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take over the values of one line."""
        step = row["step"]
        self.steps[step] = None
        for key, value in row.items():
            number = value if type(value) is float and math.isfinite(value) else as_number(value)
            if number is None or key in ("step", "timestamp"):
                continue
            column = self._columns_of_log.get(key)
            if column is None:
                column = self._columns.setdefault(sys.intern(current_name(key)), ([], []))
                self._columns_of_log[sys.intern(key)] = column
            column[0].append(step)
            column[1].append(number)

    def names(self) -> list[str]:
        """All metrics with at least one value, in order of appearance."""
        return list(self._columns)

    def points(self, key: str) -> Points:
        """(step, value) in order of steps."""
        steps, values = self._columns.get(key, ([], []))
        points = list(zip(steps, values, strict=True))
        # a resumed run logs steps again: of two values of a step dict keeps the later one
        rising = all(a < b for a, b in pairwise(steps))
        return points if rising else sorted(dict(points).items())


@dataclass
class RunData:
    """A run folder in memory.

    Attributes:
        history: all metrics by step.
        end: how the run ended before its last step; empty where it did not.
        samples: what models wrote, as ``Logger.log_samples`` stores it.
        tasks: scores of single problems, as ``Logger.log_tasks`` stores them.
        records: bits of single validation records, as ``Logger.log_records`` stores them.
        problems: one sentence for each file that is damaged; a missing file is no problem.
        baseline: the same student by cross-entropy alone on the same records, where it was trained beside.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    samples: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    alignment: dict[str, Any] | None = None
    checkpoints: list[int] = field(default_factory=list)
    failed_steps: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: dict[str, JsonLines] = field(default_factory=dict, repr=False)
    baseline: RunData | None = None

    def solved(self, task: str) -> dict[int, float]:
        """Scores of a task's problems at its last validation, by the numbers of their records."""
        rows = [row for row in self.tasks if row.get("task") == task]
        if not rows:
            return {}
        problems, scores = rows[-1].get("problems"), rows[-1].get("scores")
        if not isinstance(problems, list) or not isinstance(scores, list) or len(problems) != len(scores):
            return {}
        pairs = zip(problems, scores, strict=True)
        return {int(i): float(s) for i, s in pairs if isinstance(i, int) and isinstance(s, int | float)}

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def points(self, key: str) -> Points:
        """(step, value) of a metric wherever it is a finite number."""
        return self.history.points(key)

    def last(self, key: str) -> float | None:
        """The last value of a metric."""
        points = self.points(key)
        return points[-1][1] if points else None

    @property
    def gain(self) -> tuple[int, float] | None:
        """The last step that this run and its baseline were both validated at, and the bits per byte by which this one
        is ahead there."""
        if self.baseline is None:
            return None
        bits, other = dict(self.points("val/bpb")), dict(self.baseline.points("val/bpb"))
        # both begin as the same student
        steps = [step for step in bits.keys() & other.keys() if step > 0]
        return (max(steps), other[max(steps)] - bits[max(steps)]) if steps else None

    def gain_error(self, step: int) -> float | None:
        """Standard error over the validation records of the gain at a step; None where they were not scored one by
        one."""
        if self.baseline is None:
            return None
        (bits, sizes), (alone, _) = (run.record_bits(step) for run in (self, self.baseline))
        pair = paired_rates(alone, bits, sizes)
        return None if pair is None or math.isnan(pair[1]) else pair[1]

    def shown_gain(self, step: int) -> str:
        """Bits per byte over the baseline at a step that both were validated at, with the standard error where it is
        known; less is better."""
        assert self.baseline is not None
        change = dict(self.points("val/bpb"))[step] - dict(self.baseline.points("val/bpb"))[step]
        error = self.gain_error(step)
        return f"{change:+.4f}" + ("" if error is None else f" ± {error:.4f}")

    def record_bits(self, step: int) -> tuple[dict[int, float], dict[int, float]]:
        """Bits of validation records at a step, and the bytes that they stand for, by the records' numbers."""
        rows = [row for row in self.records if row.get("step") == step]
        columns = [rows[-1].get(name) for name in ("records", "bits", "bytes")] if rows else []
        tables: tuple[dict[int, float], dict[int, float]] = {}, {}
        if all(isinstance(column, list) for column in columns):
            # columns of a damaged line may differ in length
            for number, *values in zip(*columns, strict=False):
                bits, size = map(as_number, values)
                if isinstance(number, int) and bits is not None and size is not None:
                    tables[0][number], tables[1][number] = bits, size
        return tables

    @property
    def metric_names(self) -> list[str]:
        """All metrics with at least one value, in order of appearance."""
        return self.history.names()

    @property
    def steps(self) -> list[int]:
        """All steps that were logged, ascending."""
        return sorted(self.history.steps)

    @property
    def last_step(self) -> int:
        """The last step that was logged, 0 for none."""
        return max(self.history.steps, default=0)

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the resolved configuration by its dotted path."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return default if node is None else node

    @property
    def total_steps(self) -> int | None:
        """Steps the run was asked for."""
        value = next((v for s in ("distillation", "training") if (v := self.setting(f"{s}.max_num_steps"))), None)
        number = as_number(value)
        return None if number is None else int(number)

    @property
    def student(self) -> str:
        """Name of the student model."""
        return self._model(self.setting("policy", {}))

    @property
    def teachers(self) -> list[str]:
        """Names of the teachers, in order."""
        one = self.setting("teacher")
        many = self.setting("teachers", [])
        listed = [one] if isinstance(one, Mapping) else many if isinstance(many, list) else []
        return [self._model(teacher) for teacher in listed]

    @property
    def divergence(self) -> str | None:
        """Name of the run's distillation loss; None where no teacher counts, as in cross-entropy alone. Values of
        different divergences cannot be compared."""
        mode = self.setting("loss_fn.mode")
        # a run of weight 0 asks no teacher, whatever scales its loss
        if mode is None or not self.teachers or self.setting("loss_fn.kl_loss_weight", 1.0) == 0:
            return None
        many = self.setting("teachers", [])
        objectives = [teacher.get("loss_fn") for teacher in many if isinstance(teacher, Mapping)] if many else [None]
        modes = dict.fromkeys(str(one.get("mode", mode) if isinstance(one, Mapping) else mode) for one in objectives)
        words = [self._compared_as(" and ".join(modes))]
        for name, usual in _OPTIONS.items():
            value = self.setting(f"loss_fn.{name}", usual)
            if value != usual:
                words.append(str(value) if name == "direction" else f"{name} {value}")
        return ", ".join(words)

    def _compared_as(self, mode: str) -> str:
        """``mode``, or what takes its place for teachers with the student's own tokenizer."""
        student, stored = self.versions.get("student_fingerprint"), self.versions.get("teacher_fingerprints")
        theirs = stored if isinstance(stored, list) else []
        same = [i for i, tokenizer in enumerate(theirs) if tokenizer == student]
        if student is None or not same:
            return mode
        if len(same) == len(theirs):
            return "token by token"
        return f"{mode}, {' and '.join(f'teacher {i}' for i in same)} token by token"

    @property
    def objective(self) -> str:
        """Settings that the run was trained with, in a few words; empty where the configuration does not say."""
        if self.on_traces:
            return ""
        if self.divergence is None:
            return "cross-entropy alone" if self.config else ""
        # dynamic scaling scales to cross-entropy, which then counts whole
        alone = self.setting("loss_fn.ce_loss_scale", 1.0) == 0 and not self.setting("loss_fn.dynamic_loss_scaling")
        return self.divergence if alone else f"{self.divergence} + cross-entropy"

    @property
    def own_text(self) -> str:
        """How much of what the run learns from the student writes, and by which loss; empty where it writes nothing."""
        share = as_number(self.setting("on_policy.fraction"))
        if self.setting("algorithm") != "on_policy_distillation" or not share:
            return ""
        loss = [self.setting(f"on_policy.loss_fn.{name}") for name in ("mode", "direction")]
        if isinstance(self.setting("on_policy.policy_gradient"), Mapping):
            loss = ["policy gradient"]
        return ", ".join([f"{share:.0%}", *(str(part) for part in loss if part)])

    @property
    def on_traces(self) -> bool:
        """Whether the run learns from agent traces."""
        return self.setting("algorithm") == "trace_distillation" or isinstance(self.setting("traces"), Mapping)

    @property
    def self_teacher(self) -> str | None:
        """How the student teaches itself behind hints; None where another model teaches, or none does."""
        states = self.setting("on_policy.failed_states")
        if isinstance(states, Mapping) and self.own_text and not self.teachers:
            return str(states.get("self_teacher", "frozen"))
        off = self.setting("traces.channels.hint", True) is False or self.setting("loss.alpha", 1) == 0
        if not self.on_traces or self.teachers or off:
            return None
        return str(self.setting("loss.hint.self_teacher", "frozen"))

    @staticmethod
    def _model(section: Any) -> str:
        if not isinstance(section, Mapping):
            return "unknown"
        if section.get("model_name"):
            return str(section["model_name"])
        source = section.get("source")
        if isinstance(source, Mapping) and source.get("kind") not in (None, "live"):
            where = source.get("folder") or source.get("weights")
            return " ".join(str(word) for word in (source["kind"], where) if word)
        overrides = section.get("model_overrides")
        kind = overrides.get("model_type") if isinstance(overrides, Mapping) else None
        return f"new {kind}" if kind else "unknown"


def as_number(value: Any) -> float | None:
    """The value where it is a finite number; JSON can spell others."""
    # a bool is an int to isinstance, and an integer of JSON may be larger than any float
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds at least one of the files that a run writes first."""
    return any((folder / name).is_file() for name in _MARKS)


def find_runs(folders: list[Path]) -> list[Path]:
    """The run folders among ``folders``; one that only holds run folders stands for them."""
    runs: list[Path] = []
    for folder in folders:
        if is_run(folder):
            runs.append(folder)
            continue
        inner = sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []
        if not inner:
            what = "holds no run" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
            raise ConfigError(
                f"{str(folder)!r} {what}; expected a run folder with {', '.join(_MARKS[:2])} (logger.log_dir of a run)."
            )
        runs.extend(inner)
    return runs


def read_run(folder: Path, before: RunData | None = None) -> RunData:
    """Everything that the page shows; damaged files become ``problems``.

    ``before``: the same folder as it was read earlier; of its metrics and samples only the new lines are read.
    """
    run = RunData(folder)
    if before is not None:
        run.files, run.history, run.samples = before.files, before.history, before.samples
        run.tasks, run.records = before.tasks, before.records
    _read_config(run)
    run.versions = _read_json(run, "versions.json") or {}
    # earlier runs wrote dropped.json
    run.skipped = _read_json(run, "skipped.json") or _read_json(run, "dropped.json") or {}
    run.end = str((_read_json(run, "end.json") or {}).get("line", ""))
    run.alignment = _read_json(run, "alignment_sample.json")
    _read_lines(run, "metrics.jsonl", run.history.clear, run.history.add)
    _read_lines(run, "samples.jsonl", run.samples.clear, run.samples.append)
    _read_lines(run, "tasks.jsonl", run.tasks.clear, run.tasks.append)
    _read_lines(run, "records.jsonl", run.records.clear, run.records.append)
    run.checkpoints = _numbers(folder / "checkpoints", r"step_(\d+)")
    run.failed_steps = _numbers(folder, r"failed_batch_step_(\d+)")
    if is_run(folder / BASELINE):
        run.baseline = read_run(folder / BASELINE, None if before is None else before.baseline)
    return run


def _numbers(folder: Path, pattern: str) -> list[int]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(pattern, name)))


def _read_text(run: RunData, name: str) -> str | None:
    path = run.folder / name
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        run.problems.append(f"{name} cannot be read: {error}.")
        return None


def _read_json(run: RunData, name: str) -> dict[str, Any] | None:
    text = _read_text(run, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        run.problems.append(f"{name} is damaged: {error}.")
        return None
    if not isinstance(value, dict):
        run.problems.append(f"{name} is damaged: it holds no object.")
        return None
    return value


def _read_config(run: RunData) -> None:
    run.config_text = _read_text(run, "config.yaml") or ""
    try:
        config = parse_yaml(run.config_text, "config.yaml")
    except LimbeckError as error:
        run.problems.append(f"{error}.")
        return
    run.config = config if isinstance(config, dict) else {}


def _read_lines(run: RunData, name: str, restart: Callable[[], None], take: Callable[[dict[str, Any]], None]) -> None:
    """The new lines of a file, and what is wrong with it."""
    lines = run.files.setdefault(name, JsonLines(run.folder / name))
    lines.read(restart, take)
    if lines.problem:
        run.problems.append(lines.problem)
    if lines.cut:
        run.problems.append(
            f"{name} ends inside a line, which is left out: the run was killed while writing, or writes just now."
        )
    if lines.bad:
        plural = "s" if lines.bad > 1 else ""
        run.problems.append(f"{name} has {lines.bad} damaged line{plural}; they are left out.")
