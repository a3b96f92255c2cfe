"""Metrics of a run: ``metrics.jsonl`` (one object per step), TensorBoard, optional wandb and trackio, progress.

Text that models write on the way: ``samples.jsonl``; episodes with tools, as traces: ``episodes.jsonl``. Scores of
single problems of tasks: ``tasks.jsonl``; bits of single validation records: ``records.jsonl``.

Metrics travel as ``(sum, count)`` pairs and become means here, at the last moment.
"""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from limbeck.errors import ConfigError, DataError, one_line
from limbeck.utils.files import write_atomic
from limbeck.utils.jsonl import read_records
from limbeck.utils.plugins import load_package
from limbeck.utils.progress import Bar, Lines, Progress, current

Metric = float | int | tuple[float, float]
SAMPLES_NAME = "samples.jsonl"
TASKS_NAME = "tasks.jsonl"
RECORDS_NAME = "records.jsonl"
EPISODES_NAME = "episodes.jsonl"


class LoggerConfig(BaseModel):
    """Where metrics go. ``log_dir`` is the run folder."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    log_dir: str = "runs/default"
    """The run folder."""
    tensorboard_enabled: bool = True
    """Write TensorBoard's event files into the run folder."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases (``limbeck[wandb]``)."""
    trackio_enabled: bool = False
    """Send metrics to trackio (``limbeck[trackio]``)."""
    monitor_gpus: bool = False
    """Log what is allocated on the accelerator after every step, beside the most so far, and have timed parts of a step
    wait for it, so that ``time/`` says where it works."""
    progress: bool = True
    """A bar where the command line shows one, a line every ``print_seconds`` elsewhere."""
    print_seconds: float = Field(default=10.0, ge=0)
    """Seconds between two printed lines; 0: one per step."""
    profile_steps: int = Field(default=0, ge=0)
    """Show where the time of this many steps goes, from the second one on: a table, ``profile.html`` and a trace in the
    run folder. ``limbeck train --profile`` sets 10."""
    tensorboard: dict[str, Any] = {}
    """Arguments of ``SummaryWriter``."""
    wandb: dict[str, Any] = {}
    """Arguments of ``wandb.init``; by default the project is ``limbeck`` and the name that of the run folder, and a
    resumed run goes on as the one that it was."""
    trackio: dict[str, Any] = {}
    """Arguments of ``trackio.init``, by default as for wandb."""


def to_means(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """(sum, count) pairs to means; plain numbers pass; a pair with count 0 has no mean and is left out."""
    out: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, tuple):
            if float(value[1]) != 0:
                out[name] = float(value[0]) / float(value[1])
        else:
            out[name] = float(value)
    return out


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``; a last line without its line end (a kill while writing) is left out."""

    def refuse(line: int, why: str) -> None:
        raise DataError(f"{path}:{line} is no metrics row ({why}); remove the line or start a new run folder")

    rows = []
    for line, row in read_records(path, bad=refuse, finished=True):
        try:
            int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            refuse(line, f"{type(error).__name__}: {one_line(error)}")
        rows.append(row)
    return rows


def last_step(run_dir: str | Path) -> int:
    """The last step that a run folder's metrics tell of; 0 where they tell of none or cannot be read."""
    try:
        return max((int(row["step"]) for row in read_metrics(Path(run_dir) / "metrics.jsonl")), default=0)
    except (DataError, OSError):
        return 0


def _truncate(path: Path, resume_step: int) -> None:
    if path.exists():
        rows = [r for r in read_metrics(path) if int(r["step"]) <= resume_step]
        write_atomic(path, "".join(json.dumps(r) + "\n" for r in rows))


def _truncate_episodes(path: Path, resume_step: int) -> None:
    """Cut traces off behind a step; they lie in the order of steps, and a kill may have left half a line."""
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                break
            try:
                step = int(json.loads(line)["meta"]["step"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                why = f"{type(error).__name__}: {one_line(error)}"
                raise DataError(
                    f"{path}:{number} is no trace of an episode ({why}); remove the line or start a new run folder"
                ) from error
            if step > resume_step:
                break
            end += len(line)
        stream.truncate(end)


def _sample_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("step", "writer", "kind", "number", "prompt"))


def _append(fd: int, line: bytes) -> None:
    """Append in one call, so that a reader never sees half a row; what a full disk cuts off is taken back."""
    size = os.fstat(fd).st_size
    try:
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(fd, size)
        raise


class Logger:
    """Writes the metrics of one run. Only rank 0 writes; the other ranks may make the same calls.

    ``resume_step``: rows past it are removed from ``metrics.jsonl``, so that a resumed run repeats none (a run that
    starts anew in an old folder passes -1). None keeps what is there.

    ``progress``: where bars and lines are shown; by default what the command line shows, or plain lines.
    """

    def __init__(
        self,
        config: LoggerConfig | Mapping[str, Any],
        *,
        resume_step: int | None = None,
        rank: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config if isinstance(config, LoggerConfig) else LoggerConfig(**config)
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.log_dir = Path(self.config.log_dir)
        self.path = self.log_dir / "metrics.jsonl"
        self.samples_path = self.log_dir / SAMPLES_NAME
        self._samples: set[tuple[Any, ...]] | None = None
        self._row: dict[str, Any] = {}
        self._step: int | None = None
        self._fd: int | None = None
        self._writers: list[Any] = []
        self._progress = progress or current() or Lines(self.config.print_seconds)
        self._bar: Bar | None = None
        if self.rank != 0:
            return
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                _truncate(self.path, resume_step)
                _truncate(self.samples_path, resume_step)
                _truncate(self.log_dir / TASKS_NAME, resume_step)
                _truncate(self.log_dir / RECORDS_NAME, resume_step)
                _truncate_episodes(self.log_dir / EPISODES_NAME, resume_step)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise ConfigError(f"run folder {str(self.log_dir)!r} cannot be written ({e}); set logger.log_dir") from e
        check_writers(self.config)
        self._open_writers(resume_step)

    def _open_writers(self, resume_step: int | None) -> None:
        cfg = self.config
        if cfg.tensorboard_enabled:
            self._writers.append(_TensorBoard(self.log_dir / "tensorboard", cfg.tensorboard, resume_step))
        if not (cfg.wandb_enabled or cfg.trackio_enabled):
            return
        known, name = self._tracked_id(resume_step), self.log_dir.absolute().name
        if cfg.wandb_enabled:
            arguments = {"dir": str(self.log_dir), "name": name, "id": known, "resume": "allow"}
            self._writers.append(_Tracker("wandb", {"project": "limbeck", **arguments, **cfg.wandb}))
        if cfg.trackio_enabled:
            # which knows a run by its name alone
            arguments = {"name": f"{name}-{known}", "resume": "allow"}
            self._writers.append(_Tracker("trackio", {"project": "limbeck", **arguments, **cfg.trackio}))

    def _tracked_id(self, resume_step: int | None) -> str:
        """Id by which trackers know this run: kept in its folder, so that a run and its continuations are one there."""
        path = self.log_dir / "tracker.json"
        goes_on = resume_step is None or resume_step >= 0
        try:
            return str(json.loads(path.read_bytes())["id"]) if goes_on else self._new_id(path)
        except (OSError, ValueError, KeyError, TypeError):
            return self._new_id(path)

    @staticmethod
    def _new_id(path: Path) -> str:
        new_id = secrets.token_hex(4)
        write_atomic(path, json.dumps({"id": new_id}) + "\n")
        return new_id

    def log_metrics(
        self, metrics: Mapping[str, Metric], step: int, prefix: str = "", *, step_finished: bool = False
    ) -> None:
        """Add metrics to the row of ``step`` as ``prefix/name``; the row is written when the step is finished.

        A row is finished by ``step_finished=True``, by ``commit()``, or by the first metric of another step.
        """
        if self.rank != 0:
            return
        if self._step is not None and step != self._step:
            self.commit()
        self._step = step
        lead = f"{prefix}/" if prefix else ""
        self._row.update({f"{lead}{name}": value for name, value in to_means(metrics).items()})
        if step_finished:
            self.commit()

    def commit(self) -> None:
        """Write the current row. Call it before a checkpoint of the same step is made."""
        if self._step is None or self._fd is None:
            return
        # JSON has no NaN
        row = {k: v if math.isfinite(v) else None for k, v in self._row.items()}
        line = json.dumps({"step": self._step, **row}, allow_nan=False) + "\n"
        _append(self._fd, line.encode())
        for writer in self._writers:
            writer.log(self._row, self._step)
        self._row, self._step = {}, None

    def log_samples(self, samples: Iterable[Mapping[str, Any]], step: int) -> None:
        """Add text that models wrote to ``samples.jsonl``, one object per sample, none twice.

        Keys: ``writer`` (``student``, ``teacher``, ``data``, ...), ``number`` of the prompt, ``prompt``, ``text``;
        where known ``tokens``, ``ended``, ``kind`` (default: a fixed prompt; others, such as ``rollout``, are shown
        apart) and figures such as ``reward``. ``step`` counts unless a sample has its own.
        """
        rows = [{"step": step, **sample} for sample in samples] if self.rank == 0 else []
        if not rows:
            return
        if self._samples is None:
            known = read_metrics(self.samples_path) if self.samples_path.exists() else []
            self._samples = {_sample_key(row) for row in known}
        new = {key: row for row in rows if (key := _sample_key(row)) not in self._samples}
        if new:
            fd = os.open(self.samples_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _append(fd, "".join(json.dumps(row) + "\n" for row in new.values()).encode())
            finally:
                os.close(fd)
            self._samples.update(new)

    def log_tasks(self, results: Iterable[Mapping[str, Any]], step: int) -> None:
        """Add the scores of single problems to ``tasks.jsonl``: ``task``, ``problems`` (numbers of their records) and
        ``scores``, one object per task and validation."""
        self._add_lines(TASKS_NAME, [{"step": step, **result} for result in results])

    def log_records(self, bits: Mapping[int, float], sizes: Mapping[int, float], step: int) -> None:
        """Add the bits of validation records and the bytes that they stand for, by the records' numbers, to
        ``records.jsonl``."""
        numbers = sorted(bits)
        values = {"bits": [bits[number] for number in numbers], "bytes": [sizes[number] for number in numbers]}
        self._add_lines(RECORDS_NAME, [{"step": step, "records": numbers, **values}])

    def log_episodes(self, traces: Iterable[Mapping[str, Any]]) -> None:
        """Add canonical traces, whose ``meta`` says of which step they are, to ``episodes.jsonl``."""
        self._add_lines(EPISODES_NAME, traces)

    def _add_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows) if self.rank == 0 else ""
        if lines:
            fd = os.open(self.log_dir / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _append(fd, lines.encode())
            finally:
                os.close(fd)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Hand the resolved run configuration to the trackers that have a place for it."""
        for writer in self._writers:
            writer.hyperparams(params)

    def start_progress(self, total_steps: int, start_step: int = 0, description: str = "step") -> None:
        """Show a progress bar from ``start_step`` to ``total_steps``."""
        self._stop_progress()
        if self.rank == 0 and self.config.progress:
            self._bar = self._progress.begin(description, total_steps, start_step)

    def update_progress(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        bits_per_byte: float | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        """Move the bar; the figures that are given are shown beside it."""
        if self._bar is None:
            return
        figures = {
            "loss {:.4f}": loss,
            "{:.3f} bpb": bits_per_byte,
            "{:,.0f} tok/s": tokens_per_s,
            "{:.1f} GiB": None if memory_bytes is None else memory_bytes / 2**30,
        }
        self._bar.update(step, note="  ".join(text.format(x) for text, x in figures.items() if x is not None))

    def _stop_progress(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print(self, text: str) -> None:
        """A line for the user, above the bar; rank 0 only."""
        if self.rank == 0:
            self._progress.say(text)

    def close(self) -> None:
        """Write what is left and close all writers."""
        self.commit()
        self._stop_progress()
        for writer in self._writers:
            writer.close()
        self._writers = []
        if self._fd is not None:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_writers(config: LoggerConfig) -> None:
    """Refuse what metrics cannot be sent to: a package that is missing, or arguments that it does not know."""
    if config.tensorboard_enabled:
        _accepts(_summary_writer(), "tensorboard", {"log_dir": "", "purge_step": None}, config.tensorboard)
        if config.tensorboard:
            _try_tensorboard(config.tensorboard)
    for name, enabled, arguments in (
        ("wandb", config.wandb_enabled, config.wandb),
        ("trackio", config.trackio_enabled, config.trackio),
    ):
        if enabled:
            _accepts(_tracker(name).init, name, {}, arguments)


def _accepts(function: Callable[..., Any], name: str, ours: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    if taken := sorted(ours.keys() & arguments.keys()):
        raise ConfigError(f"logger.{name} gives {taken[0]!r}, which the run itself sets; leave it out")
    try:
        inspect.signature(function).bind(**ours, **arguments)
    except TypeError as e:
        raise ConfigError(f"logger.{name} is {dict(arguments)}: {e}; see the arguments of {name}") from e


def _try_tensorboard(arguments: Mapping[str, Any]) -> None:
    """Refuse values that only a writer at work finds to be wrong."""
    with TemporaryDirectory() as folder:
        try:
            writer = _TensorBoard(Path(folder), dict(arguments), None)
            writer.log({"step": 0.0}, 0)
            writer.close()
        except Exception as e:
            raise ConfigError(
                f"logger.tensorboard is {dict(arguments)}: {one_line(e)}; see the arguments of tensorboard"
            ) from e


def _summary_writer() -> Any:
    why = "logger.tensorboard_enabled needs the package tensorboard; install it or set it to false"
    return load_package("torch.utils.tensorboard", why).SummaryWriter


def _tracker(name: str) -> Any:
    why = f"logger.{name}_enabled needs the package {name}; pip install 'limbeck[{name}]' or set it to false"
    return load_package(name, why)


class _TensorBoard:
    def __init__(self, folder: Path, kwargs: dict[str, Any], resume_step: int | None) -> None:
        # TensorBoard drops the purge step itself as well
        purge = None if resume_step is None else resume_step + 1
        self._writer = _summary_writer()(log_dir=str(folder), purge_step=purge, **kwargs)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def hyperparams(self, params: Mapping[str, Any]) -> None:
        self._writer.add_text("config", "```json\n" + json.dumps(params, indent=1, default=str) + "\n```")

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """wandb and trackio share one interface: init, log, finish."""

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        self._module = _tracker(name)
        self._run = self._module.init(**kwargs)

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._module.log(dict(row), step=step)

    def hyperparams(self, params: Mapping[str, Any]) -> None:
        config = getattr(self._run, "config", None)
        if config is not None:
            config.update(dict(params))

    def close(self) -> None:
        self._module.finish()
