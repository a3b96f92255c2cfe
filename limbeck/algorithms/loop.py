"""The loop of all recipes: epochs, validation and checkpoints when they are due, stopping.

A recipe subclasses :class:`TrainingLoop` and says what a step and a validation are. What only watches a run is an
observer (``limbeck.algorithms.observers``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, Generic, TypeVar

from limbeck.algorithms import run_folder
from limbeck.algorithms.observers import load_states, make_observers, stop_reason
from limbeck.algorithms.run import Run, Step, steps_of
from limbeck.algorithms.stops import BrokenOff, Stops
from limbeck.algorithms.validation import logged_name, unmeasured
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import host_threads, memory_in_use
from limbeck.errors import ConfigError, LossError, StoppedEarly
from limbeck.utils.logger import to_means
from limbeck.utils.progress import stage

R = TypeVar("R", bound=Run)


class Batches:
    """A run's batches, epoch after epoch, of which the next may be read before it is due.

    Positions in checkpoints go by the steps that were taken, so that what was read ahead is read again.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._epoch = run, -1
        self._iterator: Iterator[Any] | None = None
        self._next: Future[Any] | None = None

    def due(self) -> Any:
        """The batch of the step that begins."""
        batch, self._next = self._next or self._read(), None
        return batch.result()

    def ahead(self) -> Any | None:
        """The batch of the step behind it; None where it cannot be read, which is an error of that step."""
        self._next = self._next or self._read()
        return None if self._next.exception() else self._next.result()

    def _read(self) -> Future[Any]:
        read: Future[Any] = Future()
        with self._run.timer.time("data"):
            try:
                read.set_result(self._following())
            except Exception as error:
                read.set_exception(error)
        return read

    def _following(self) -> Any:
        loader = self._run.loader
        if self._iterator is None:
            # behind the last batch of an epoch the run may still stand in it
            self._epoch = max(self._epoch + 1, self._run.state.current_epoch)
            loader.sampler.set_epoch(self._epoch)
            self._iterator = iter(loader)
        for batch in self._iterator:
            return batch
        self._iterator = None
        return self._following()


class TrainingLoop(ABC, Generic[R]):
    """One run between two steps; ``run.state`` is changed in place."""

    def __init__(self, run: R) -> None:
        self.run = run
        self.observers = make_observers(run.config)
        load_states(self.observers, run.state.observers)
        self.total = steps_of(run.config, run.loader)
        self._measured: tuple[int, dict[str, float]] = (-1, {})
        self._refused: ConfigError | None = None  # what a validation has shown to be wrong: raised once all is saved
        self._stops = Stops(run.checkpointer)
        self._batches = Batches(run)
        self._opening = ExitStack()  # what is shown until the first step is taken

    # -- what a recipe says -----------------------------------------------------------------------------------------

    validates = True
    """Whether there is anything to validate on."""

    @abstractmethod
    def train_step(self, batch: Any) -> dict[str, Any]:
        """One optimizer step; the result of ``Policy.train``."""

    @abstractmethod
    def skipped_of(self, batch: Any) -> Iterable[Mapping[str, int]]:
        """Parts that collating a batch skipped, by reason; asked once the step is taken."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Validation metrics as (sum, count)."""

    @abstractmethod
    def summary_line(self, means: dict[str, float]) -> str:
        """One line about a validation."""

    def more_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """A step's metrics besides those of every recipe."""
        return {}

    def rows_of(self, batch: Any) -> BatchedDataDict:
        """The rows that a step was taken on, which are kept where it fails."""
        rows: BatchedDataDict = batch
        return rows

    def bits_per_byte(self, batch: Any, result: Mapping[str, Any]) -> float | None:
        """Bits per byte of this rank's part of a step, for observers; None where the recipe trains on no text."""
        return None

    def close(self) -> None:
        """The run is over, also after an error: let go of what works for it elsewhere."""

    def log_baseline(self) -> None:
        """Before a run's first step: what a user should know now and not after it. Collective."""

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run until ``max_num_steps`` or ``max_num_epochs``, or until an observer ends it; closes the logger.

        Raises:
            StoppedEarly: SIGTERM, Ctrl-C or a deadline ended the run after a step, which is saved.
        """
        try:
            with self._stops.watched(), host_threads(self.run.student.device):
                self._run()
        finally:
            try:
                self.close()
            finally:
                for observer in self.observers:
                    observer.close(self.run)
                self.run.logger.close()

    def _run(self) -> None:
        run, state = self.run, self.run.state
        run.logger.log_hyperparams(run.config.model_dump(mode="json"))
        for observer in self.observers:
            observer.on_start(run)
        if state.total_steps == 0:
            self._before_the_first_step()
        if self._over():
            run.logger.print(f"the run is complete with {state.total_steps} steps; nothing is left to do")
        run.logger.start_progress(self.total, state.total_steps)
        stop = False
        with self._opening:
            if not self._over():
                compiles = ", which compiles the model" if run.student.compiles else ""
                self._opening.enter_context(stage(f"the first step{compiles}"))
            while not self._over() and not stop:
                stop = self._take(self._batches.due())
        for observer in self.observers:
            observer.on_end(run)
        if not self._over():
            raise self._stopped()
        if (why := stop_reason(self.observers)) is not None and Comm.world().rank == 0:
            run_folder.write_end(run.config.logger.log_dir, state.total_steps, self._told_end(why))

    def _before_the_first_step(self) -> None:
        run, d = self.run, self.run.config.distillation
        self.log_baseline()
        if d.val_at_start and self.validates:
            self._validate(0)
            run.logger.commit()
            if self._refused is not None:
                raise self._refused
        if d.save_start and run.checkpointer.config.enabled and not run.checkpointer.checkpoints():
            self._save(0)

    def _over(self) -> bool:
        """Whether no step is left; the same on every rank."""
        return self.run.state.total_steps >= self.total or stop_reason(self.observers) is not None

    def _told_end(self, why: str) -> str:
        """Say that an observer has ended the run."""
        run, line = self.run, f"the run ended early at step {self.run.state.total_steps} of {self.total}: {why}"
        best = run.checkpointer.best() if run.checkpointer.config.enabled else None
        if best is not None:
            line += f"; the best checkpoint is {best.name}"
        run.logger.print(line)
        return line

    def _stopped(self) -> StoppedEarly:
        """Message to a user whose run was ended before its time."""
        saved = "it is saved: run the same command again to go on"
        if not self.run.checkpointer.config.enabled:
            saved = "nothing is saved, because checkpointing.enabled is false: the next start begins at step 1"
        # all ranks, once: Ctrl-C may have reached one of them
        interrupted = Comm.world().any(self._stops.interrupted)
        line = f"stopped at step {self.run.state.total_steps} of {self.total}; {saved}"
        return StoppedEarly(line, interrupted=interrupted)

    def upcoming(self) -> Any | None:
        """The batch of the next step, read before this one is taken; None behind the last step, and where it cannot be
        read, which is an error of its own step."""
        return self._batches.ahead() if self.run.state.total_steps + 1 < self.total else None

    def _take(self, batch: Any) -> bool:
        """A step with all that is due behind it; True when the run must stop."""
        run, state = self.run, self.run.state
        self._step(batch)
        # with the last batch, not when the loader is found empty: the checkpoint of this very step must say that a
        # resumed run begins the next epoch
        ended = state.current_step >= len(run.loader)
        if ended:
            state.current_epoch += 1
            state.current_step = 0
        if ended or self._over():
            self._end_epoch()
        stop = self._after_step()
        for observer in self.observers:
            observer.after_step(run)
        return stop

    def _end_epoch(self) -> None:
        for observer in self.observers:
            observer.on_epoch(self.run)

    def _step(self, batch: Any) -> None:
        run, state, start = self.run, self.run.state, time.perf_counter()
        waited = run.timer.get_timing_metrics("sum").get("data", 0.0)
        # what the last validation measured belongs to the weights that this step changes
        state.val_loss = None
        number = state.total_steps + 1
        try:
            result = self.train_step(batch)
            seconds = time.perf_counter() - start + waited
            step = Step(number, result["tokens"], self._metrics(result, seconds), list(self.skipped_of(batch)))
            for observer in self.observers:
                observer.on_step(run, step)
        except LossError as error:
            kept = run_folder.save_failed_batch(run.config.logger.log_dir, number, self.rows_of(batch))
            last = run.checkpointer.latest()
            good = f"the last checkpoint is {last.name}" if last else "there is no checkpoint yet"
            raise LossError(f"step {number}: {error}; the batch is kept in {str(kept)!r}, {good}") from error
        self._opening.close()
        # only now: a step that failed was not taken, and a checkpoint of the state as it is stays true
        state.current_step += 1
        state.total_steps = number
        state.consumed_samples += run.config.distillation.num_prompts_per_step
        state.total_valid_tokens += int(result["global_valid_toks"])
        run.timer.reset()
        self._stops.worth_saving = True
        with run.section("logging"):
            run.logger.log_metrics(step.metrics, number, "train")
            run.logger.update_progress(
                number,
                loss=result["loss"],
                tokens_per_s=step.metrics["tokens_per_s"],
                bits_per_byte=self.bits_per_byte(batch, result),
                memory_bytes=memory_in_use(run.student.device),
            )

    def _metrics(self, result: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        return {
            **{name: pair for name, pair in result["metrics"].items() if name != "loss"},
            **{name: result[name] for name in ("loss", "grad_norm", "lr")},
            **self.more_metrics(result),
            "tokens_per_s": result["tokens"] / seconds,
            "seconds": seconds,
            **{f"time/{name}": s for name, s in self.run.timer.get_timing_metrics("sum").items()},
        }

    def _after_step(self) -> bool:
        """Validate and save where that is due; True when the run must stop."""
        run, step = self.run, self.run.state.total_steps
        d, last = run.config.distillation, self._over()
        # collective: asked after every step by every rank, whether or not anything is due
        stop = run.checkpointer.should_stop()
        due = (d.val_period > 0 and step % d.val_period == 0) or (last and d.val_at_end)
        if due and self.validates:
            with run.section("validation"):
                self._validate(step)
            # a validation takes minutes: what arrived meanwhile must not wait for another step
            stop = run.checkpointer.should_stop()
        # asked again: a validation may have ended the run
        over = self._over()
        if over and not last and run.state.current_step:
            self._end_epoch()
        with run.section("logging"):
            run.logger.commit()
        if over and self._refused is not None:
            # all steps are taken: there is nothing to end
            run.logger.print(f"warning: {self._refused}")
            self._refused = None
        wanted = over or self._refused is not None or any(observer.wants_checkpoint() for observer in self.observers)
        if run.checkpointer.should_save(step, last=wanted, stop=stop):
            with run.section("checkpoint"):
                self._save(step)
        if self._refused is not None:
            raise self._refused
        return stop

    def _validate(self, step: int) -> None:
        run = self.run
        try:
            with nullcontext() if step else stage("validating before training"), self._stops.breaking_off():
                metrics = self.validate()
                for observer in self.observers:
                    metrics = {**metrics, **observer.measure(run, step)}
        except BrokenOff:
            run.logger.print(f"step {step}: the validation is left out")
            run.timer.reset()
            return
        means = to_means(metrics)
        run.state.val_loss = means.get("loss")
        if self._measured[0] < 0:
            self._refused = self._unmeasured(means)
        self._measured = (step, {f"val/{name}": value for name, value in means.items()})
        run.logger.log_metrics(metrics, step, "val")
        run.logger.print(f"step {step}: {self.summary_line(means)}")
        for observer in self.observers:
            breaking = self._stops.breaking_off() if observer.breaks_off else nullcontext()
            with suppress(BrokenOff), breaking:
                observer.on_validation(run, step, means)
        # a validation's seconds are no part of the next step's
        run.timer.reset()

    def _unmeasured(self, means: Mapping[str, float]) -> ConfigError | None:
        """The refusal of a metric that ranks checkpoints, or ends the run, and that the first validation has not given.

        None where an earlier validation of the run has given it.
        """
        checkpointer = self.run.checkpointer
        name = logged_name(checkpointer.config.metric_name)
        if name is None or any(checkpointer.metric(path) is not None for path in checkpointer.checkpoints()):
            return None
        return unmeasured(name, means)

    def _save(self, step: int) -> None:
        kept = {observer.name: observer.state_dict() for observer in self.observers}
        self.run.state.observers = {name: state for name, state in kept.items() if state}
        # a checkpoint is ranked by what was measured on its own weights, not by an earlier validation
        self.run.save(step, self._measured[1] if self._measured[0] == step else {})
