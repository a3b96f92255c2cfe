"""The process of an environment, seen from the run: requests with a deadline, replies of limited size, no way to fail
but one."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

WORKER = Path(__file__).with_name("worker.py")
Trouble = Literal["error", "too_large", "timeout", "died"]
"""What went wrong: the environment raised an error, its reply was none or too long, none came in time, or its process
ended."""
# nothing else: keys of services stand in variables, and calls that a model wrote are run there
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV", "PYTHONPATH")
_FILE_BYTES = 64 << 20
_REPLY_BYTES = 1 << 20
_PIECE = 1 << 16


class EnvironmentFailure(Exception):
    """An environment gave no reply that can be used.

    Attributes:
        is_over: its process is gone.
    """

    def __init__(self, trouble: Trouble, why: str) -> None:
        super().__init__(why)
        self.trouble = trouble
        self.is_over = trouble in ("timeout", "died")


class EnvironmentProcess:
    """A process that answers JSON lines with JSON lines, in a session of its own with limits.

    Args:
        order: what it is to do, see ``worker.py``.
        folder: where it works; None: an empty folder of its own.
        memory_mb: its address space; None: any.
        more: names of environment variables that it sees besides the usual ones.
        errors: where its standard error goes; None: nowhere.
    """

    def __init__(
        self,
        order: Mapping[str, Any],
        *,
        folder: str | None,
        memory_mb: int | None,
        more: tuple[str, ...] = (),
        errors: IO[bytes] | None = None,
    ) -> None:
        self._temporary = tempfile.mkdtemp(prefix="limbeck-environment-") if folder is None else None
        limits = {"memory": None if memory_mb is None else memory_mb << 20, "file": _FILE_BYTES}
        whole = {**order, "limits": limits, "parent": os.getpid(), "folder": os.getcwd()}
        variables = {name: os.environ[name] for name in (*_KEPT, *more) if name in os.environ}
        variables |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-B", str(WORKER), json.dumps(whole)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if errors is None else errors,
            cwd=folder or self._temporary,
            env=variables,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        # a program that does not read fills the pipe, where a write that blocks would outlast every deadline
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._read = b""
        self.is_open = True

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply to a request; an `EnvironmentFailure` where there is none within so many seconds."""
        deadline = time.monotonic() + seconds
        try:
            self._write(json.dumps(request, default=str).encode() + b"\n", deadline)
            return self.reply(deadline)
        except EnvironmentFailure as failure:
            if failure.is_over:
                self.close()
            raise

    def reply(self, deadline: float) -> dict[str, Any]:
        line = self._line(deadline)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise EnvironmentFailure("error", "its reply is no JSON object in a line") from None
        if not isinstance(value, dict):
            raise EnvironmentFailure("error", "its reply is no JSON object in a line")
        if value.get("error") is not None:
            raise EnvironmentFailure("error", " ".join(str(value["error"])[:2000].split()))
        return value

    def _write(self, data: bytes, deadline: float) -> None:
        while data:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._in, data[:_PIECE]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise EnvironmentFailure("died", "its process has ended") from error

    def _line(self, deadline: float) -> bytes:
        gone = 0
        while b"\n" not in self._read:
            if len(self._read) > _REPLY_BYTES:  # the rest of the line is read and forgotten
                gone, self._read = gone + len(self._read), b""
            self._wait(self._out, select.POLLIN, deadline)
            try:
                piece = os.read(self._out, _PIECE)
            except BlockingIOError:
                continue
            if not piece:
                raise EnvironmentFailure("died", "its process has ended")
            self._read += piece
        # what stands behind the line is the next reply's
        line, _, self._read = self._read.partition(b"\n")
        if gone or len(line) > _REPLY_BYTES:
            raise EnvironmentFailure("too_large", f"its reply has more than {_REPLY_BYTES:,} bytes")
        return line

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        # select() takes no descriptor above 1023
        poll = select.poll()
        poll.register(descriptor, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise EnvironmentFailure("timeout", "it gave no reply in time")

    def close(self) -> None:
        """End the process with all that it has started, and remove its folder."""
        if not self.is_open:
            return
        self.is_open = False
        # whatever it has started is of its session
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
