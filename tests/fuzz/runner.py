"""Cases in processes of their own, so that one that takes its process down is only one fault."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limbeck.errors import LimbeckError

CPU_SECONDS = 30.0
"""More than any case needs; a process that computes longer has no end."""
MEMORY = 3 << 30
"""Bytes that a case may take beyond what its process has."""
_WALL_SECONDS = 600.0
_PER_PROCESS = 200


class Target(ABC):
    """Something that reads what others wrote."""

    name: str

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Make valid input, once per process."""

    @abstractmethod
    def attack(self, rng: random.Random, folder: Path) -> None:
        """Spoil a copy of it in ``folder``, which is empty, and use it; raise whatever comes of it."""


@dataclass(frozen=True)
class Fault:
    """A case that did not end as it should."""

    target: str
    case: int
    what: str


def judge(target: Target, case: int, scratch: Path) -> None:
    """Run one case in this process; what is not as it should be is raised."""
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        target.attack(random.Random(f"{target.name}/{case}"), folder)
    except LimbeckError as error:
        text = str(error)
        assert text.strip(), "an error without a word"
        assert "\n" not in text, f"an error of several lines: {text!r}"
        assert len(text) < 4000, f"an error of {len(text)} characters: {text[:200]!r}"


def run_cases(target: Target, cases: Iterator[int]) -> Iterator[Fault | None]:
    """One verdict per case: None, or its fault."""
    waiting = next(cases, None)
    while waiting is not None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        todo, back = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_work, args=(target, todo, sender), daemon=True)
        process.start()
        sender.close()
        for _ in range(_PER_PROCESS):
            back.send(waiting)
            verdict = _answer(receiver)
            if verdict is _GONE:
                process.kill()
                process.join()
                yield Fault(target.name, waiting, _how_it_ended(process.exitcode))
            else:
                yield None if verdict is None else Fault(target.name, waiting, verdict)
            waiting = next(cases, None)
            if waiting is None or verdict is _GONE:
                break
        if process.is_alive():
            back.send(None)
        process.join()


_GONE = object()


def _answer(receiver: Any) -> Any:
    try:
        return receiver.recv() if receiver.poll(_WALL_SECONDS) else _GONE
    except (EOFError, OSError):
        return _GONE


def _how_it_ended(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return f"it computed for more than {CPU_SECONDS:g} s"
    return f"its process ended with {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"


def _work(target: Target, todo: Any, out: Any) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        # threads do not survive a fork, and a computation by several would wait for them for ever
        torch.set_num_threads(1)
    # what a case says is of no interest, only how it ends
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "valid").mkdir()
        target.prepare(folder / "valid")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        while True:
            case = todo.recv()
            if case is None:
                return
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                judge(target, case, folder)
                verdict = None
            except BaseException as error:  # whatever it is, it is the finding
                verdict = "".join(traceback.format_exception(error)[-6:])
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.send(verdict)


def for_minutes(minutes: float, first: int) -> Iterator[int]:
    """Case numbers from ``first`` on, until the time is over."""
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        yield first
        first += 1
