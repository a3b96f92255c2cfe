"""What a run folder says, read without trusting it: a run may have just begun, been killed, or be training now."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limbeck.config import parse_yaml
from limbeck.errors import ConfigError, DataError, LimbeckError
from limbeck.utils.jsonl import read_records

_MARKS = ("metrics.jsonl", "config.yaml", "versions.json")
Points = list[tuple[int, float]]


@dataclass
class RunData:
    """A run folder in memory.

    Attributes:
        rows: one per step, ascending; later lines about a step add to earlier ones.
        problems: one sentence for each file that is damaged; a missing file is no problem.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, Any] | None = None
    checkpoints: list[int] = field(default_factory=list)
    failed_steps: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def points(self, key: str) -> Points:
        """(step, value) of a metric wherever it is a finite number."""
        found = ((row["step"], as_number(row.get(key))) for row in self.rows)
        return [(step, value) for step, value in found if value is not None]

    def metric_names(self) -> list[str]:
        """All metrics with at least one value, in order of appearance."""
        seen = dict.fromkeys(key for row in self.rows for key in row if key not in ("step", "timestamp"))
        return [key for key in seen if self.points(key)]

    @property
    def last_step(self) -> int:
        """The last step that was logged, 0 for none."""
        return self.rows[-1]["step"] if self.rows else 0

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
    def on_traces(self) -> bool:
        """Whether the run learns from agent traces."""
        return self.setting("algorithm") == "trace_distillation" or isinstance(self.setting("traces"), Mapping)

    @property
    def self_teacher(self) -> str | None:
        """How the student teaches itself behind hints; None where another model teaches, or none does."""
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


def read_run(folder: Path) -> RunData:
    """Everything that the page shows; damaged files become ``problems``."""
    run = RunData(folder)
    _read_config(run)
    run.versions = _read_json(run, "versions.json") or {}
    run.dropped = _read_json(run, "dropped.json") or {}
    run.alignment = _read_json(run, "alignment_sample.json")
    _read_metrics(run)
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


def _read_metrics(run: RunData) -> None:
    path = run.folder / "metrics.jsonl"
    if not path.is_file():
        return
    by_step: dict[int, dict[str, Any]] = {}
    bad: list[int] = []
    try:
        for line, row in read_records(path, bad=lambda line, why: bad.append(line), finished=True):
            try:
                step = int(row["step"])
            except (ValueError, KeyError, TypeError, OverflowError):
                bad.append(line)
                continue
            by_step.setdefault(step, {}).update({**row, "step": step})
    except DataError as error:
        run.problems.append(str(error))
    if bad:
        run.problems.append(
            f"metrics.jsonl has {len(bad)} damaged line{'s' if len(bad) > 1 else ''}; they are left out."
        )
    run.rows = [by_step[step] for step in sorted(by_step)]
