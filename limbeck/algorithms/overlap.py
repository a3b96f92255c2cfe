"""Work that goes on elsewhere while a step trains: samples of the next step are written, served teachers score them.

One thread writes for one step at a time, through an engine that lives elsewhere. It makes no collective and touches no
model: whatever ranks do together, handing weights over included, is done by the main thread between two generations.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from limbeck.algorithms.engine import EngineSampler
from limbeck.algorithms.rollouts import Rollouts, StepData, Written
from limbeck.data.continuations import Continuation
from limbeck.distributed.comm import Comm
from limbeck.losses.contract import Teacher
from limbeck.models.policy import Policy
from limbeck.utils.timer import BusyClock


@dataclass(frozen=True)
class Generation:
    """Samples that are being written for a step.

    Attributes:
        staleness: steps that the engine's weights will be behind in that step.
        future: None where another rank that reads the same rows has it.
    """

    step: int
    staleness: int
    future: Future[Written] | None


class AheadWriter:
    """Writes a step's samples in a thread, and has served teachers score them as they come.

    Args:
        readers: teachers that score what is written.
    """

    def __init__(self, rollouts: Rollouts, engine: EngineSampler, student: Policy, readers: Sequence[Teacher]) -> None:
        self.rollouts, self.engine, self.student = rollouts, engine, student
        engine.together = False
        self.readers = [teacher for teacher in readers if teacher.asks_ahead]
        self.clock = BusyClock()
        # one thread for the whole run: processes that an environment starts end with the thread that started them
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="limbeck-overlap", initializer=self._on_device)
        self._generation: Generation | None = None

    def _on_device(self) -> None:
        # a thread begins on the first GPU, whatever that of its process is
        if self.student.device.type == "cuda":
            torch.cuda.set_device(self.student.device)

    def start(self, batch: StepData, step: int, *, age: int) -> None:
        """Hand over weights that are due, and begin to write for ``step``, by whose time the present weights will be
        ``age`` steps old. Collective."""
        assert self._generation is None
        self.engine.sync(self.student, step - age)
        for teacher in self.readers:
            # it must know which ranks read the same rows, also before the first step shows them
            teacher.attach(self.student.layout)
        owns = self.student.dims.rows.rank == 0
        future = self._thread.submit(self._write, batch, step) if owns else None
        self._generation = Generation(step, self.engine.staleness + age, future)

    def _write(self, batch: StepData, step: int) -> Written:
        with self.clock:
            written = self.rollouts.write(batch, step, self._score if self.readers else None)
            # several ranks learn from other rows than they have written
            if Comm.world().size == 1:
                written.rollout = self.rollouts.collate(written)
            return written

    def _score(self, written: Sequence[Continuation]) -> None:
        rows = self.rollouts.rows.batch(written)
        for teacher in self.readers:
            teacher.ask_ahead(rows)

    def take(self, batch: StepData, step: int) -> tuple[Written, int]:
        """What was written for a step, and its staleness; waits for it, and begins it where nothing was written ahead.
        An error of the thread is raised here, on all ranks. Collective."""
        if self._generation is None:
            self.start(batch, step, age=0)
        generation, self._generation = self._generation, None
        assert generation is not None
        assert generation.step == step
        with Comm.world().fail_together():
            written = None if generation.future is None else generation.future.result()
        same_rows = self.student.dims.rows
        if same_rows.size > 1:
            # ranks that read the same rows, per step: what the first of them has written
            written = Written.unpacked(same_rows.first_only(lambda: b"" if written is None else written.packed()))
        assert written is not None
        return written, generation.staleness

    @property
    def is_writing(self) -> bool:
        """Whether the thread is at work."""
        future = None if self._generation is None else self._generation.future
        return future is not None and not future.done()

    def wait(self) -> None:
        """Return once nothing is being written: renderers are not for two threads."""
        if self._generation is not None and self._generation.future is not None:
            wait([self._generation.future])

    def close(self) -> None:
        """Give up what is being written, and end the thread."""
        self.engine.close()
        # those who wait for a tool go on when its process is gone
        self.rollouts.close()
        self._thread.shutdown(cancel_futures=True)
        self.rollouts.close()
