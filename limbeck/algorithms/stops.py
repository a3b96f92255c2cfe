"""Signals that stop a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limbeck.distributed.comm import Comm
from limbeck.utils.checkpoint import CheckpointManager


# no Exception, which code on the way may catch
class BrokenOff(KeyboardInterrupt):
    """Ctrl-C came during a validation, which may be left out."""


class Stops:
    """Effect of signals on a run: SIGTERM and the first Ctrl-C ask for a checkpoint after the step, a second ends it.

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
        # a shell's background jobs ignore Ctrl-C, which is meant for others
        if before[signal.SIGINT] is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: one that was not set from Python, and cannot be set again
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """A block that Ctrl-C ends by ``BrokenOff``; several ranks must reach its end together, so there it waits."""
        self._may_break_off = Comm.world().size == 1
        try:
            if self._may_break_off and self.interrupted:
                raise BrokenOff
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
            raise BrokenOff
