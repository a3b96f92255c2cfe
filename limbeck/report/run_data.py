"""What a run folder says, read without trusting it: a run may have just begun, been killed, or be training now."""

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

_MARKS = ("metrics.jsonl", "config.yaml", "versions.json")
_OPTIONS: dict[str, Any] = {"direction": "forward", "temperature": 1.0, "condition": "none", "gate": "none"}
"""Settings, with their defaults, that make another divergence of a mode."""
Points = list[tuple[int, float]]


class JsonLines:
    """Objects of a file that grows, one a line, each of them with a step; what was read is not read again.

    A last line without its end is left for later: a writer is at work, or was killed. A file that was replaced or has
    become shorter, as a resumed run's does, is read anew.

    Attributes:
        bad: number of lines that are no such object.
        problem: why the file cannot be read, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad = 0
        self.problem = ""
        self._file: tuple[int, int] | None = None
        self._at = 0

    def read(self, restart: Callable[[], None], take: Callable[[dict[str, Any]], None]) -> None:
        """Hand what has come since the last time to ``take``; ``restart`` comes before a file's first line."""
        self.problem = ""
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
                return
            self._at += len(raw)
            if not raw.strip():
                continue
            try:
                row = parse(raw)
                yield {**row, "step": int(row["step"])}
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.bad += 1


class History:
    """Every metric's finite values by step; later values of a step replace earlier ones."""

    def __init__(self) -> None:
        self.steps: dict[int, None] = {}
        self._columns: dict[str, tuple[list[int], list[float]]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.steps.clear()
        self._columns.clear()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take over the values of one line."""
        step = row["step"]
        self.steps[step] = None
        for key, value in row.items():
            number = value if type(value) is float and math.isfinite(value) else as_number(value)
            if number is None or key in ("step", "timestamp"):
                continue
            column = self._columns.get(key)
            if column is None:
                column = self._columns[sys.intern(key)] = ([], [])
            column[0].append(step)
            column[1].append(number)

    def names(self) -> list[str]:
        """All metrics with at least one value, in order of appearance."""
        return list(self._columns)

    def points(self, key: str) -> Points:
        """(step, value) in order of steps."""
        steps, values = self._columns.get(key, ([], []))
        points = list(zip(steps, values, strict=True))
        rising = all(a < b for a, b in pairwise(steps))
        return points if rising else sorted(dict(points).items())


@dataclass
class RunData:
    """A run folder in memory.

    Attributes:
        history: all metrics by step.
        samples: what models wrote, as ``Logger.log_samples`` stores it.
        problems: one sentence for each file that is damaged; a missing file is no problem.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    samples: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, Any] | None = None
    checkpoints: list[int] = field(default_factory=list)
    failed_steps: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: dict[str, JsonLines] = field(default_factory=dict, repr=False)

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
        """What the distillation loss of the run is; None where no teacher counts, as in cross-entropy alone. Values of
        different divergences cannot be compared."""
        mode = self.setting("loss_fn.mode")
        if mode is None or not self.teachers:
            return None
        told = [str(mode)]
        for name, usual in _OPTIONS.items():
            value = self.setting(f"loss_fn.{name}", usual)
            if value != usual:
                told.append(str(value) if name == "direction" else f"{name} {value}")
        if self.setting("loss_fn.kl_loss_weight", 1.0) == 0 and not self.setting("loss_fn.dynamic_loss_scaling", False):
            told.append("measured only")
        return ", ".join(told)

    @property
    def objective(self) -> str:
        """What the run was trained with, in a few words; empty where the configuration does not say."""
        if self.on_traces:
            return ""
        if self.divergence is None or self.divergence.endswith("measured only"):
            return "cross-entropy alone" if self.config else ""
        alone = self.setting("loss_fn.ce_loss_scale", 1.0) == 0
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
        if section.get("cache"):
            return f"cache {section['cache']}"
        overrides = section.get("model_overrides")
        kind = overrides.get("model_type") if isinstance(overrides, Mapping) else None
        return f"new {kind}" if kind else "unknown"


def as_number(value: Any) -> float | None:
    """The value where it is a finite number; JSON can spell others."""
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
    found: list[Path] = []
    for folder in folders:
        if is_run(folder):
            found.append(folder)
            continue
        inner = sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []
        if not inner:
            what = "holds no run" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
            raise ConfigError(
                f"{str(folder)!r} {what}; expected a run folder with {', '.join(_MARKS[:2])} (logger.log_dir of a run)."
            )
        found.extend(inner)
    return found


def read_run(folder: Path, before: RunData | None = None) -> RunData:
    """Everything that the page shows; damaged files become ``problems``.

    ``before``: the same folder as it was read earlier; of its metrics and samples only the new lines are read.
    """
    run = RunData(folder)
    if before is not None:
        run.files, run.history, run.samples = before.files, before.history, before.samples
    _read_config(run)
    run.versions = _read_json(run, "versions.json") or {}
    run.dropped = _read_json(run, "dropped.json") or {}
    run.alignment = _read_json(run, "alignment_sample.json")
    _read_lines(run, "metrics.jsonl", run.history.clear, run.history.add)
    _read_lines(run, "samples.jsonl", run.samples.clear, run.samples.append)
    run.checkpoints = _numbers(folder / "checkpoints", r"step_(\d+)")
    run.failed_steps = _numbers(folder, r"failed_batch_step_(\d+)")
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
    if lines.bad:
        plural = "s" if lines.bad > 1 else ""
        run.problems.append(f"{name} has {lines.bad} damaged line{plural}; they are left out.")
