"""What all recipes share: epochs, validation and checkpoints when they are due, stopping, resuming, counting.

A recipe subclasses :class:`TrainingLoop` and says what a step, a validation and its own part of a checkpoint are.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms import run_folder
from limbeck.algorithms.profiling import StepProfile
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.comm import Comm, leave_distributed, naming_silent_ranks
from limbeck.distributed.device import host_threads, memory_in_use
from limbeck.errors import CheckpointError, ConfigError, DataError, LossError, StoppedEarly
from limbeck.losses.contract import State
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.policy import Policy
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.logger import Logger, last_step, to_means
from limbeck.utils.manifest import MANIFEST_NAME
from limbeck.utils.progress import say, stage
from limbeck.utils.state import capture_rng, restore_rng
from limbeck.utils.timer import Timer


class TrainingLoop(ABC):
    """One run between two steps.

    Args:
        config: run file with the sections ``distillation``, ``logger`` and ``checkpointing``.
        state: counters of the run (``current_epoch``, ``current_step``, ``total_steps``, ``consumed_samples``,
            ``total_valid_tokens``), changed in place and stored with every checkpoint.
    """

    def __init__(
        self,
        config: Any,
        state: Any,
        student: Policy,
        loader: StatefulDataLoader,
        logger: Logger,
        checkpointer: CheckpointManager,
    ) -> None:
        self.config, self.state, self.student, self.loader = config, state, student, loader
        self.logger, self.checkpointer = logger, checkpointer
        profiled = config.logger.profile_steps if Comm.world().rank == 0 else 0
        self.profile = StepProfile(config.logger.log_dir, profiled, student.device)
        wait = torch.cuda.synchronize if config.logger.monitor_gpus else self.profile.synchronize
        self.timer = Timer(wait, self.profile.mark)
        # counts of all ranks so far lie with rank 0, so that their sum counts nothing twice
        self.dropped: Counter[str] = Counter(state.get("dropped", {}) if Comm.world().rank == 0 else {})
        self.total = steps_of(config, loader)
        self.validated: tuple[int, dict[str, float]] = (-1, {})
        self._stops = _Stops(checkpointer)
        self._opening = ExitStack()  # what is shown until the first step is taken

    # -- what a recipe says -----------------------------------------------------------------------------------------

    validates = True
    """Whether there is anything to validate on."""

    @abstractmethod
    def train_step(self, batch: Any) -> dict[str, Any]:
        """One optimizer step; the result of ``Policy.train``."""

    @abstractmethod
    def dropped_of(self, batch: Any) -> Iterable[Mapping[str, int]]:
        """What collating a batch left out, by reason."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Validation metrics as (sum, count)."""

    @abstractmethod
    def summary_line(self, means: dict[str, float]) -> str:
        """One line about a validation."""

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """What this rank must find again in a checkpoint, besides its position and random state."""

    @abstractmethod
    def nothing_learned(self, left_out: str) -> str:
        """The error where a whole epoch holds nothing to learn from."""

    def more_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """A step's metrics besides those of every recipe."""
        return {}

    def rows_of(self, batch: Any) -> BatchedDataDict:
        """The rows that a step was taken on, which are kept where it fails."""
        rows: BatchedDataDict = batch
        return rows

    def bits_per_byte(self, batch: Any, result: Mapping[str, Any]) -> float | None:
        """Of this rank's part of a step, for whoever watches; None where the recipe trains on no text."""
        return None

    def look_ahead(self) -> None:
        """Before a run's first step: what a user should know now and not after it. Collective."""

    def samples(self) -> list[dict[str, Any]]:
        """Text that the models write at a validation, as ``Logger.log_samples`` takes it. Collective."""
        return []

    def shared_state(self) -> dict[str, Any]:
        """What the ranks keep together in a checkpoint, each its shards."""
        return {}

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run until ``max_num_steps`` or ``max_num_epochs``; closes the logger.

        Raises:
            StoppedEarly: SIGTERM, Ctrl-C or a deadline ended the run after a step, which is saved.
        """
        try:
            with self._stops.watched(), host_threads(self.student.device):
                self._run()
        finally:
            if self.profile.close():
                self.logger.print(self.profile.table())
            self.logger.close()

    def _run(self) -> None:
        d, state = self.config.distillation, self.state
        self.logger.log_hyperparams(self.config.model_dump(mode="json"))
        if state["total_steps"] == 0:
            self.look_ahead()
            if d.val_at_start and self.validates:
                self._validate(0)
                self.logger.commit()
            wanted = d.save_start and self.config.checkpointing.enabled
            if wanted and not self.checkpointer.checkpoints():
                self._save(0)
        if state["total_steps"] >= self.total:
            self.logger.print(f"the run is complete with {state['total_steps']} steps; nothing is left to do")
        self.logger.start_progress(self.total, state["total_steps"])
        stop = False
        with self._opening:
            if state["total_steps"] < self.total:
                compiles = ", which compiles the model" if self.student.compiles else ""
                self._opening.enter_context(stage(f"the first step{compiles}"))
            while state["total_steps"] < self.total and not stop:
                self.loader.sampler.set_epoch(state["current_epoch"])
                stop = self._epoch()
        run_folder.write_dropped(self.config.logger.log_dir, self.dropped)
        if state["total_steps"] < self.total:
            raise self._stopped()

    def _stopped(self) -> StoppedEarly:
        """What to tell a user whose run was ended before its time."""
        saved = "it is saved: run the same command again to go on"
        if not self.checkpointer.config.enabled:
            saved = "nothing is saved, because checkpointing.enabled is false: the next start begins at step 1"
        # all ranks, once: Ctrl-C may have reached one of them
        interrupted = Comm.world().any(self._stops.interrupted)
        line = f"stopped at step {self.state['total_steps']} of {self.total}; {saved}"
        return StoppedEarly(line, interrupted=interrupted)

    def _epoch(self) -> bool:
        """One pass over the data, or what is left of it; True when the run must stop."""
        state = self.state
        for batch in self.timer.iterate(self.loader, "data"):
            self._step(batch)
            ended = state["current_step"] >= len(self.loader)
            if ended:
                state["current_epoch"] += 1
                state["current_step"] = 0
            last = state["total_steps"] >= self.total
            if ended or last:
                self._report_dropped()
            stop = self._after_step(last=last)
            if self.profile.end_step(state["total_steps"]):
                self.logger.print(self.profile.table())
            if stop or last:
                return True
        return False

    def _step(self, batch: Any) -> None:
        state, start = self.state, time.perf_counter()
        step = state["total_steps"] + 1
        if self.student.dims.owns_records:
            for counts in self.dropped_of(batch):
                self.dropped.update(counts)
        try:
            result = self.train_step(batch)
        except LossError as error:
            kept = run_folder.save_failed_batch(self.config.logger.log_dir, step, self.rows_of(batch))
            last = self.checkpointer.latest()
            good = f"the last checkpoint is {last.name}" if last else "there is no checkpoint yet"
            raise LossError(f"step {step}: {error}; the batch is kept in {str(kept)!r}, {good}") from error
        self._opening.close()
        seconds = time.perf_counter() - start + self.timer.get_timing_metrics("sum").get("data", 0.0)
        state["current_step"] += 1
        state["total_steps"] = step
        state["consumed_samples"] += self.config.distillation.num_prompts_per_step
        state["total_valid_tokens"] += int(result["global_valid_toks"])
        speed = result["tokens"] / seconds
        metrics = {
            **{name: pair for name, pair in result["metrics"].items() if name != "loss"},
            **{name: result[name] for name in ("loss", "grad_norm", "lr")},
            **self.more_metrics(result),
            "tokens_per_s": speed,
            "seconds": seconds,
            **{f"time/{name}": s for name, s in self.timer.get_timing_metrics("sum").items()},
            **_memory(self.student.device),
        }
        self.profile.take(self.timer)
        self.timer.reset()
        self._stops.worth_saving = True
        with self.profile.section("logging"):
            self.logger.log_metrics(metrics, step, "train")
            self.logger.update_progress(
                step,
                loss=result["loss"],
                tokens_per_s=speed,
                bits_per_byte=self.bits_per_byte(batch, result),
                memory_bytes=memory_in_use(self.student.device),
            )

    def _after_step(self, *, last: bool) -> bool:
        """Validate and save where that is due; True when the run must stop."""
        stop = self.checkpointer.should_stop()
        d, step = self.config.distillation, self.state["total_steps"]
        due = (d.val_period > 0 and step % d.val_period == 0) or (last and d.val_at_end)
        if due and self.validates:
            with self.profile.section("validation"):
                self._validate(step)
            stop = self.checkpointer.should_stop()
        with self.profile.section("logging"):
            self.logger.commit()
        if self.checkpointer.should_save(step, last=last, stop=stop):
            with self.profile.section("checkpoint"):
                self._save(step)
        return stop

    def _validate(self, step: int) -> None:
        try:
            with nullcontext() if step else stage("validating before training"), self._stops.breaking_off():
                metrics = self.validate()
                written = self.samples()
        except _BrokenOff:
            self.logger.print(f"step {step}: the validation is left out")
            self.timer.reset()
            return
        means = to_means(metrics)
        self.validated = (step, {f"val/{name}": value for name, value in means.items()})
        self.logger.log_metrics(metrics, step, "val")
        self._log_dropped(Comm.world().sum_counter(self.dropped))  # all ranks, once per validation
        self.logger.log_samples(written, step)
        self.logger.print(f"step {step}: {self.summary_line(means)}")
        self.timer.reset()

    def _save(self, step: int) -> None:
        # a checkpoint is ranked by what was measured on its own weights, not by an earlier validation
        measured = self.validated[1] if self.validated[0] == step else {}
        self.state["dropped"] = dict(Comm.world().sum_counter(self.dropped))
        used = self.state["current_step"] * self.config.distillation.num_prompts_per_step
        sampler: Any = self.loader.sampler
        with self.checkpointer.saving(step, {**self.state, **measured}) as folder:
            own = {"position": sampler.position(used), "rng": capture_rng(), **self.own_state()}
            Checkpoint(folder).save(self.student, self.student.trainer, shared=self.shared_state(), own=own)

    def _log_dropped(self, total: Mapping[str, int]) -> None:
        counts = {f"dropped/{reason}": float(n) for reason, n in sorted(total.items())}
        self.logger.log_metrics(counts, self.state["total_steps"], "train")

    def _report_dropped(self) -> None:
        """At the end of an epoch: say what was left out, and stop where that is everything."""
        dropped = run_folder.write_dropped(self.config.logger.log_dir, self.dropped)
        self._log_dropped(dropped)
        if self.state["total_valid_tokens"] == 0:
            raise DataError(self.nothing_learned(str(dict(dropped) or "nothing")))
        if dropped:
            shown = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))
            self.logger.print(f"epoch {self.state['current_epoch']}: left out so far: {shown}")
        if lost := dropped["truncated_tokens"]:
            share = lost / (lost + self.state["total_valid_tokens"])
            self.logger.print(f"texts longer than the context lost {share:.0%} of their tokens ({lost:,}) so far")


def _memory(device: torch.device) -> dict[str, float]:
    """GiB that this process holds: resident in main memory and, where there is one, on the accelerator at most."""
    found = {"memory/resident_gib": memory_in_use(torch.device("cpu")) / 2**30}
    if device.type != "cpu":
        found["memory/device_gib"] = memory_in_use(device) / 2**30
    return found


# ---- stopping --------------------------------------------------------------------------------------------------------


class _BrokenOff(KeyboardInterrupt):
    """Ctrl-C came during a validation, which may be left out."""


class _Stops:
    """What signals do to a run: SIGTERM and the first Ctrl-C ask for a checkpoint after the step, a second ends it.

    Attributes:
        interrupted: Ctrl-C was pressed.
        worth_saving: a step was taken that no checkpoint may hold yet; before that Ctrl-C ends the run at once.
    """

    def __init__(self, checkpointer: CheckpointManager) -> None:
        self._checkpointer = checkpointer
        self.interrupted = self.worth_saving = self._may_break_off = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Answer signals in this way while the block runs; afterwards they mean what they meant before."""
        if threading.current_thread() is not threading.main_thread():
            # Python lets only the main thread change handlers
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._checkpointer.install_signal_handler()
        if before[signal.SIGINT] is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """A block that Ctrl-C ends by ``_BrokenOff``; several ranks must reach its end together, so there it waits."""
        self._may_break_off = Comm.world().size == 1
        try:
            if self._may_break_off and self.interrupted:
                raise _BrokenOff
            yield
        finally:
            self._may_break_off = False

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        if self.interrupted or not self.worth_saving:
            raise KeyboardInterrupt
        self.interrupted = self._checkpointer.save_on_signal = True
        # past the stream's buffer, which the interrupted code may be writing to
        os.write(2, b"\nCtrl-C: the run is saved after this step; press it again to end at once\n")
        if self._may_break_off:
            raise _BrokenOff


# ---- resuming --------------------------------------------------------------------------------------------------------


def steps_of(config: Any, loader: StatefulDataLoader) -> int:
    """Steps of a whole run."""
    d = config.distillation
    return int(min(d.max_num_steps, d.max_num_epochs * len(loader)))


def announce(
    config: Any, checkpointer: CheckpointManager, latest: Checkpoint | None, loader: StatefulDataLoader
) -> None:
    """Say where a run begins, and where an earlier one in its folder left nothing to go on from. Before its logger is
    made, which begins the metrics anew."""
    total = steps_of(config, loader)
    line = f"beginning at step 1 of {total}"
    if latest is not None:
        info = checkpointer.load_training_info(latest.folder) or {}
        line = f"resuming from step {info.get('total_steps')} of {total}"
    elif (before := last_step(config.logger.log_dir)) > 0:
        why = "none was due before it ended" if checkpointer.config.enabled else "checkpointing.enabled is false"
        line += f": an earlier run in this folder came to step {before} and left no checkpoint ({why})"
    say(line)


def is_finished(config: Any) -> bool:
    """Whether the run of this configuration has come to its end, as its last checkpoint says; told in a line.

    Looked at before anything is loaded. What such a glance cannot settle (another configuration, a checkpoint that is
    damaged or without a manifest) is no end: the run's start deals with it.
    """
    if not config.checkpointing.enabled:
        return False
    d = config.distillation
    settings = config.checkpointing.model_copy(update={"enabled": False})
    checkpointer = CheckpointManager(settings, run_dir=config.logger.log_dir)
    try:
        latest = checkpointer.latest()
        info = {} if latest is None else checkpointer.load_training_info(latest) or {}
        done = info.get("total_steps", 0) >= d.max_num_steps or info.get("current_epoch", 0) >= d.max_num_epochs
        if latest is None or not done or not (latest / MANIFEST_NAME).is_file():
            return False
        if run_folder.changes(config, config.logger.log_dir):
            return False
        checkpointer.check(latest)
    except (CheckpointError, ConfigError, TypeError):
        return False
    more = "raise distillation.max_num_steps or max_num_epochs to go on"
    say(f"the run is complete with {info['total_steps']} steps; nothing is left to do ({more})")
    return True


def stored_counters(checkpointer: CheckpointManager, checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Any]:
    """The counters of a run as a checkpoint holds them."""
    info = checkpointer.load_training_info(checkpoint.folder) or {}
    found = {name: info[name] for name in names if name in info}
    for name, value in found.items():
        counts = list(value.values()) if name == "dropped" and isinstance(value, dict) else [value]
        if not all(type(n) in ((int, float) if name == "val_loss" else (int,)) for n in counts):
            shown = repr(value)[:100]
            raise CheckpointError(
                f"{name!r} of the checkpoint {str(checkpoint.folder)!r} is {shown}, no count; take another checkpoint"
            )
    return found


def resume(stored: State, state: Mapping[str, Any], loader: StatefulDataLoader) -> None:
    """Put data and random numbers back to where a rank's state was taken; the last thing before the loop."""
    sampler: Any = loader.sampler
    sampler.go_to(stored["position"])
    sampler.set_epoch(state["current_epoch"])
    restore_rng(stored["rng"])


@contextmanager
def whole_run(config: Any) -> Iterator[None]:
    """Around a run from its file to its end: its folder for it alone, number formats, a full disk in one line, leaving
    the peers. ``config``: run file with the sections ``logger`` and ``checkpointing``."""
    run_dir = config.logger.log_dir
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    alone = not dist.is_initialized()
    try:
        elsewhere = config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None
        with run_folder.held(run_dir, elsewhere), naming_silent_ranks():
            yield
    except StoppedEarly:
        if alone:
            leave_distributed()
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"no space left while writing to the run folder {run_dir!r}; free some space and start the same run again: "
            "it goes on from its last checkpoint"
        ) from error
    if alone:
        leave_distributed()
