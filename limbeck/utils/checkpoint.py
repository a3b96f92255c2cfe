"""Checkpoints that a kill at any moment cannot damage.

A checkpoint is written to ``tmp_step_N``, flushed, and renamed to ``step_N``: the rename is the commit. Older ones are
removed afterwards, by rename to ``del_step_N`` first, so that no half-deleted folder bears a checkpoint's name. A run
that finds the latest one damaged sets it aside as ``damaged_step_N`` and goes on from the one before.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from limbeck.config import resolve
from limbeck.distributed.comm import Comm
from limbeck.errors import CheckpointError, ConfigError, one_line
from limbeck.utils.files import fsync_path, fsync_tree, is_disk_full, write_atomic
from limbeck.utils.manifest import MANIFEST_NAME, check_manifest, write_manifest
from limbeck.utils.progress import Lines, current

INFO_NAME = "training_info.json"
_STEP = re.compile(r"step_(\d+)$")
_OLD = re.compile(r"old_step_(\d+)$")
_LEFTOVER = re.compile(r"(tmp|del)_step_\d+$")


class CheckpointingConfig(BaseModel):
    """When and where to save, and what to keep."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """False writes no checkpoint: such a run cannot be resumed."""
    checkpoint_dir: str | None = None
    """Default: ``checkpoints`` inside the run folder."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, as logged (``val/bpb``; the published form ``val:loss`` is read too)."""
    higher_is_better: bool = False
    """Whether a larger ``metric_name`` is the better one."""
    keep_top_k: int | None = Field(default=3, ge=1)
    """Best k by the metric (latest k without one) and always the latest; null keeps all."""
    save_period: int = Field(default=0, ge=0)
    """Save every this many steps; 0: only at the end, by time or on a signal."""
    save_every_minutes: float | None = Field(default=None, gt=0)
    """Save when this much time has passed since the last checkpoint."""
    checkpoint_must_save_by: str | None = None
    """``DD:HH:MM:SS`` (or shorter, ``MM:SS``) after start: save then, and stop the run."""
    save_on_sigterm: bool = True
    """On SIGTERM save, and stop with exit code 75."""


def parse_duration(text: str) -> float:
    """``[[DD:]HH:]MM:SS`` to seconds."""
    parts = text.split(":")
    if not 2 <= len(parts) <= 4 or not all(p.isdigit() for p in parts):
        raise ConfigError(f"duration {text!r} is not of the form DD:HH:MM:SS; write for example '00:03:45:00'")
    return float(sum(int(p) * unit for p, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)))


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint so that no run takes it for one; what it holds may still be of use to somebody."""
    names = (f"damaged_{checkpoint.name}" + (f".{n}" if n else "") for n in range(1000))
    aside = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
    return checkpoint.rename(aside)


class CheckpointManager:
    """Decides when to save, writes atomically, keeps the best, finds the latest.

    >>> manager = CheckpointManager({"checkpoint_dir": "run/checkpoints", "save_period": 100})   # doctest: +SKIP
    >>> with manager.saving(step=100, info={"step": 100, "val/bpb": 1.7}) as folder:             # doctest: +SKIP
    ...     policy.save_checkpoint(folder / "policy" / "weights")

    Under torch.distributed every rank makes the same calls; rank 0 renames after a barrier.
    """

    def __init__(self, config: CheckpointingConfig | Mapping[str, Any], *, run_dir: str | Path | None = None) -> None:
        self.config = resolve(CheckpointingConfig, config)
        folder = self.config.checkpoint_dir
        if folder is None:
            if run_dir is None:
                raise ConfigError("checkpointing.checkpoint_dir is not set and there is no run folder; set one of them")
            folder = str(Path(run_dir) / "checkpoints")
        self.checkpoint_dir = Path(folder)
        self.save_on_signal = False
        self._start = self._last_save = time.monotonic()
        by = self.config.checkpoint_must_save_by
        self._deadline = None if by is None else parse_duration(by)
        if self.config.enabled and Comm.world().rank == 0:
            self._make_dir()
            self._clean()
        # nobody may look for checkpoints before the leftovers of a killed run are gone
        Comm.world().barrier()

    def _make_dir(self) -> None:
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"cannot make checkpoint folder {str(self.checkpoint_dir)!r}: {e}") from e

    def refuse_unusable_dir(self) -> None:
        """Refuse a folder that cannot be made or written; one that is made for that is removed again."""
        new = [path for path in (self.checkpoint_dir, *self.checkpoint_dir.parents) if not path.exists()]
        self._make_dir()
        for path in new:
            path.rmdir()

    def _clean(self) -> None:
        """Remove what a killed run left behind; put back a checkpoint that was about to be replaced."""
        for path in self.checkpoint_dir.iterdir():
            if _LEFTOVER.match(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif m := _OLD.match(path.name):
                whole = self.checkpoint_dir / f"step_{m.group(1)}"
                if whole.exists():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.rename(whole)

    # -- when -------------------------------------------------------------------------------------------------------

    def install_signal_handler(self) -> None:
        """Let SIGTERM ask for a checkpoint and a clean stop instead of ending the process."""
        # only the main thread may set handlers; under Ray a run lives in another, and Ray itself ends workers
        if self.config.save_on_sigterm and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        # no more than that: a signal comes at any moment, and all ranks must stop at the same step
        self.save_on_signal = True

    def should_stop(self) -> bool:
        """Whether the run must end now, after saving: SIGTERM arrived or the deadline passed. Collective."""
        late = self._deadline is not None and time.monotonic() - self._start >= self._deadline
        # clocks and signals differ between ranks, the decision must not
        return Comm.world().any(self.save_on_signal or late)

    def should_save(self, step: int, *, last: bool = False, stop: bool = False) -> bool:
        """Whether to save after ``step``. Pass ``stop=should_stop()``. Collective where time decides."""
        if not self.config.enabled:
            return False
        period = self.config.save_period
        by_time = False
        if self.config.save_every_minutes is not None:
            # all ranks, per step: clocks differ, the decision must not
            by_time = Comm.world().any(time.monotonic() - self._last_save >= 60 * self.config.save_every_minutes)
        return last or stop or by_time or (period > 0 and step % period == 0)

    # -- write ------------------------------------------------------------------------------------------------------

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, Any], run_config: Mapping[str, Any] | None = None
    ) -> Path:
        """Make ``tmp_step_N`` with the counters and metrics of this step, and return it for the caller to fill."""
        if not self.config.enabled:
            raise CheckpointError("checkpointing is disabled in this run; set checkpointing.enabled=true to save")
        tmp = self.checkpoint_dir / f"tmp_step_{step}"
        if Comm.world().rank == 0:
            if tmp.exists():
                shutil.rmtree(tmp)
            tmp.mkdir(parents=True)
            info = {**training_info, "step": step}
            write_atomic(tmp / INFO_NAME, json.dumps(info, indent=1, sort_keys=True))
            if run_config is not None:
                write_atomic(tmp / "config.json", json.dumps(run_config, indent=1, sort_keys=True, default=str))
        # the folder must be there before any rank writes into it
        Comm.world().barrier()
        return tmp

    def finalize_checkpoint(self, tmp: str | Path) -> Path:
        """Flush ``tmp_step_N``, give it its name, then remove what need not be kept."""
        tmp = Path(tmp)
        final = self.checkpoint_dir / tmp.name.removeprefix("tmp_")
        # rank 0 must not name it before all have written
        Comm.world().barrier()
        if Comm.world().rank == 0:
            write_manifest(tmp, self._step(final))
            # a rename may reach the disk before the files that it names
            fsync_tree(tmp)
            if final.exists():
                old = self.checkpoint_dir / f"old_{final.name}"
                if old.exists():
                    shutil.rmtree(old)
                # a kill between the two renames leaves `old_` alone, which `_clean` puts back
                final.rename(old)
                tmp.rename(final)
                fsync_path(self.checkpoint_dir)
                shutil.rmtree(old)
            else:
                tmp.rename(final)
                fsync_path(self.checkpoint_dir)
            # last: until the new one has its name, the old ones are all that there is
            self.remove_old_checkpoints()
        # and nobody may look for it before it has its name
        Comm.world().barrier()
        self._last_save = time.monotonic()
        return final

    @contextmanager
    def saving(self, step: int, info: Mapping[str, Any], run_config: Mapping[str, Any] | None = None) -> Iterator[Path]:
        """``with`` block that yields the folder to fill; it becomes ``step_N`` only if the block succeeds."""
        tmp = self.checkpoint_dir / f"tmp_step_{step}"
        try:
            yield self.init_tmp_checkpoint(step, info, run_config)
            self.finalize_checkpoint(tmp)
        except (OSError, RuntimeError, SafetensorError, CheckpointError) as e:
            if not is_disk_full(e):
                raise
            # first, so that the figure below is what is free without the attempt
            shutil.rmtree(tmp, ignore_errors=True)
            free = shutil.disk_usage(self.checkpoint_dir).free
            last = self.latest()
            raise CheckpointError(
                f"no space left to save step {step} in {str(self.checkpoint_dir)!r} ({free / 2**20:.0f} MiB free); "
                f"{'the checkpoint ' + last.name + ' is intact' if last else 'no earlier checkpoint exists'}; "
                "free some space or lower checkpointing.keep_top_k, then resume"
            ) from e
        finally:
            # gone after a success; after any failure nothing of the attempt stays
            shutil.rmtree(tmp, ignore_errors=True)

    def remove_old_checkpoints(self) -> None:
        """Keep the best ``keep_top_k`` and the latest; remove the rest."""
        if self.config.keep_top_k is None:
            return
        checkpoints = self.checkpoints()
        best = sorted(checkpoints, key=self._rank_key)[: self.config.keep_top_k]
        keep = {*best, checkpoints[-1]} if checkpoints else set()
        for path in checkpoints:
            if path not in keep:
                dead = self.checkpoint_dir / f"del_{path.name}"
                path.rename(dead)
                shutil.rmtree(dead, ignore_errors=True)

    def _rank_key(self, path: Path) -> tuple[float, float]:
        """Smaller is better; a checkpoint without the metric comes after all that have it; ties go to the later one."""
        step = -float(self._step(path))
        try:
            value = self.metric(path)
        except CheckpointError:
            # noticed where it matters, when a run resumes from it
            value = None
        # NaN compares false with everything and would leave the order to chance
        if value is None or value != value:
            return (float("inf"), step)
        return (-value if self.config.higher_is_better else value, step)

    # -- read -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _step(path: Path) -> int:
        m = _STEP.match(path.name)
        if m is None:
            raise CheckpointError(f"{str(path)!r} is not named step_N, so it is no checkpoint of this run")
        return int(m.group(1))

    def checkpoints(self) -> list[Path]:
        """All whole checkpoints, by step."""
        if not self.checkpoint_dir.is_dir():
            return []
        folders = [p for p in self.checkpoint_dir.iterdir() if _STEP.match(p.name)]
        whole = (path for path in folders if any((path / name).is_file() for name in (INFO_NAME, MANIFEST_NAME)))
        return sorted(whole, key=self._step)

    def latest(self) -> Path | None:
        """The checkpoint with the highest step, or None."""
        checkpoints = self.checkpoints()
        return checkpoints[-1] if checkpoints else None

    def to_resume(self) -> Path | None:
        """The latest checkpoint that is what was saved; None without any, or where checkpoints are off. Collective.

        Later ones that are damaged are set aside with a line that says so.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        world, name = Comm.world(), None
        with world.fail_together():
            if self.config.enabled and world.rank == 0:
                whole = self.latest_whole()
                name = None if whole is None else whole.name
        # rank 0 to all, once per run: a name; the others may see another state of the folder
        name = world.broadcast_json(name)
        return None if name is None else self.checkpoint_dir / name

    def latest_whole(self, *, set_aside: bool = True) -> Path | None:
        """Checkpoint that ``to_resume`` finds, by this process alone. ``set_aside``: rename those that are damaged."""
        damaged, progress = dict[Path, CheckpointError](), current() or Lines()
        for path in reversed(self.checkpoints()):
            try:
                self.check(path)
            except CheckpointError as error:
                damaged[path] = error
                continue
            for later, why in damaged.items():
                aside = f"it is set aside as {_set_aside(later).name}, and " if set_aside else ""
                progress.say(f"{why}; {aside}the run goes on from {path.name}")
            return path
        for why in damaged.values():
            raise CheckpointError(
                f"{why}, and there is no older checkpoint; put back what was saved, or start anew in another folder"
            )
        return None

    def check(self, checkpoint: Path) -> None:
        """Raise a ``CheckpointError`` unless a checkpoint is what was saved, as far as its manifest shows."""
        step = self._step(checkpoint)
        check_manifest(checkpoint, step)
        saved = (self.load_training_info(checkpoint) or {}).get("step", step)
        if saved != step:
            raise CheckpointError(f"the checkpoint {str(checkpoint)!r} was saved as step {saved}")

    def best(self) -> Path | None:
        """The best checkpoint by ``metric_name`` (the latest where there is no metric), or None."""
        checkpoints = self.checkpoints()
        return min(checkpoints, key=self._rank_key) if checkpoints else None

    get_latest_checkpoint_path = latest
    get_best_checkpoint_path = best

    def load_training_info(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """Counters and metrics stored with a checkpoint (default: the latest); None where there is none."""
        folder = Path(path) if path is not None else self.latest()
        if folder is None:
            return None
        try:
            info = json.loads((folder / INFO_NAME).read_text())
        except (OSError, ValueError, RecursionError) as e:
            raise CheckpointError(f"{str(folder / INFO_NAME)!r} cannot be read ({one_line(e)})") from e
        if not isinstance(info, dict):
            raise CheckpointError(f"{str(folder / INFO_NAME)!r} holds no object")
        return info

    def metric(self, path: Path) -> float | None:
        """Value of ``metric_name`` stored with a checkpoint, if any."""
        name = self.config.metric_name
        if name is None:
            return None
        info = self.load_training_info(path) or {}
        value = info.get(name, info.get(name.replace(":", "/", 1)))
        # beyond what a float holds is no figure either
        return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
