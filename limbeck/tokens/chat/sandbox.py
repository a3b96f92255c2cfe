"""Where chat templates run: a process of their own, with limits, that can be ended at any moment.

A template comes with a model, so it is code of a stranger. jinja2's immutable sandbox keeps it from Python; what it
takes is bounded from outside, since no check between operations sees how long one of them will take. One process
serves all templates of a process and lives as long; it has none of the environment's variables, so no keys either. What
a batch needs is asked for at once, so that the next conversation is rendered while one is tokenized.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.util import Finalize
from typing import IO, Any, NamedTuple

import jinja2

from limbeck.errors import ConfigError, TemplateError

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "template_process.py")
_START = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
_SIZE = struct.Struct("<Q")
_KEPT_VARIABLES = ("PATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_MOST_SOURCES = 256
_MOST_KEPT = 1 << 16
"""Characters of what is given to a template beyond which its text is not kept."""
_MOST_AHEAD = 1 << 22
"""Bytes of what is asked for ahead; the rest of a long batch is asked for when it is needed."""
_PATIENCE = 30
"""Times the limit of CPU time that a rendering may take by the clock, on however busy a machine."""
_LASTING = ("memory", "seconds", "size")
"""Limits behind which the process is not what it was."""
_ERRORS: dict[str, type[Exception]] = {
    one.__name__: one
    for one in (
        jinja2.TemplateError,
        jinja2.TemplateRuntimeError,
        jinja2.TemplateSyntaxError,
        jinja2.UndefinedError,
        jinja2.exceptions.FilterArgumentError,
        jinja2.exceptions.SecurityError,
        TypeError,
        ValueError,
        LookupError,
        IndexError,
        KeyError,
        AttributeError,
        ArithmeticError,
        OverflowError,
        ZeroDivisionError,
    )
}
_ADVICE = "correct it, or pass another template."


@dataclass(frozen=True)
class Limits:
    """Limits of one rendering: seconds of CPU time, characters of text, bytes of address space (not on macOS)."""

    seconds: float = 10.0
    characters: int = 1 << 26
    memory: int = 1 << 30


class LimitExceeded(TemplateError):
    """A template ran too long or took too much; there is no use in trying it another way."""


class Request(NamedTuple):
    """One rendering: a template, what it is given as JSON, its limits, and the second where it writes the time."""

    source: str
    variables: str
    limits: Limits
    now: int

    @classmethod
    def of(cls, source: str, variables: Mapping[str, Any], limits: Limits | None = None) -> Request:
        """The request for a rendering with these variables.

        Variables travel as JSON: anything else, which could have methods, as the name of its type.
        """
        try:
            written = json.dumps(variables, default=_plain, ensure_ascii=False)
        except RecursionError:
            raise ValueError("the conversation is nested too deeply") from None
        return cls(source, written, limits or Limits(), int(time.time()) if "strftime_now" in source else 0)


def render(
    source: str, variables: Mapping[str, Any], limits: Limits | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """The text that a template writes, and the character spans that its generation markers enclose.

    Raises:
        LimitExceeded: it ran too long or took too much.
        jinja2.TemplateError, TypeError, ...: its own refusal, or an operation that does not fit the data.
    """
    return _render(Request.of(source, variables, limits))


def render_kept(source: str, variables: Mapping[str, Any], limits: Limits | None = None) -> str:
    """The text of :func:`render`, looked up where the same was asked for before.

    A template that writes the time is asked anew every second.
    """
    request = Request.of(source, variables, limits)
    return _render(request)[0] if len(request.variables) > _MOST_KEPT else _kept(request)


def render_ahead(requests: Iterable[Request]) -> None:
    """Have the process work on renderings that :func:`render` will soon be asked for, while this one goes on.

    One exchange for all of them. Each has limits of its own, as it has alone; what is not asked for is dropped with the
    next batch. A rendering that ends the process is asked for again, alone, as are those behind it.
    """
    wanted, size = [], 0
    for request in dict.fromkeys(requests):
        size += len(request.variables)
        if size > _MOST_AHEAD:
            break
        wanted.append(request)
    if len(wanted) < 2:
        return
    with _lock, _exchange() as process:
        if not process.ahead(wanted):
            _end()


@lru_cache(maxsize=256)
def _kept(request: Request) -> str:
    return _render(request)[0]


def _render(request: Request) -> tuple[str, list[tuple[int, int]]]:
    with _lock:
        answer = _answer(request)
    if "text" in answer:
        return answer["text"], answer["spans"]
    if "error" in answer:
        raise _error(answer["error"], answer["words"])
    raise LimitExceeded(_said(answer, request.limits))


@contextmanager
def _exchange() -> Iterator[_Process]:
    """The process, or a new one; the lock is held."""
    global _process
    _process = _process or _Process()
    try:
        yield _process
    except BaseException:
        # half an exchange would be answered to the next request
        _end()
        raise


def _end() -> int:
    """End the process; the number of the signal that it ended by. The next exchange starts another."""
    global _process
    process, _process = _process, None
    return process.close() if process is not None else 0


def _answer(request: Request) -> dict[str, Any]:
    """Answer of the process; ``died``: the number of the signal that ended it."""
    died = tries = 0
    while tries < 2:  # something else may have ended a process that was there before
        with _exchange() as process:
            answer = process.ask(request)
        if answer is not None and answer.get("limit") not in _LASTING:
            return answer
        died = _end()
        if process.awaited and process.awaited[0] != request:
            continue  # another rendering, asked for ahead, ended it; a new process awaits none
        tries += 1
        if answer is not None:
            return answer
        if died == signal.SIGPROF:
            return {"limit": "seconds"}
        if died <= 0:
            raise ConfigError(f"the process that renders chat templates does not start ({sys.executable} -I -S)")
    return {"died": died}


def _said(answer: Mapping[str, Any], limits: Limits) -> str:
    known = {
        "seconds": f"ran for more than {limits.seconds:g} s",
        "characters": f"wrote more than the {limits.characters} characters that are allowed",
        "size": f"gave more than the {limits.characters} characters that are allowed",
        "memory": f"took more than the {limits.memory >> 20} MiB of memory that are allowed",
        "calls": "calls itself too often",
        "nesting": "is nested too deeply",
    }
    what = known.get(answer.get("limit", ""), f"ended its process (signal {answer.get('died')})")
    return f"a chat template {what}; {_ADVICE}"


def _error(classes: list[str], words: list[str]) -> Exception:
    kind = next((_ERRORS[name] for name in classes if name in _ERRORS), None)
    if kind is None:
        return jinja2.TemplateError(f"{classes[0]}: {' '.join(words)}")
    if kind is jinja2.TemplateSyntaxError:
        syntax = jinja2.TemplateSyntaxError(words[0], 0)
        syntax.translated = True  # the words have the line already
        return syntax
    return kind(*words)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


class _Process:
    """The process while it lives."""

    def __init__(self) -> None:
        path = [entry for entry in sys.path if entry]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, _SCRIPT, *path],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                start_new_session=True,  # what a terminal sends ends the run, which ends this process
            )
        except OSError as error:
            raise ConfigError(f"the process that renders chat templates does not start: {error}") from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input: IO[bytes] = self._child.stdin
        self._output: IO[bytes] = self._child.stdout
        self._ready = select.poll()
        self._ready.register(self._output, select.POLLIN)
        self._numbers: dict[str, int] = {}
        self.awaited: deque[Request] = deque()
        self._answers: dict[Request, dict[str, Any]] = {}
        self._unread = bytearray()
        # unlike atexit, also at the end of a process that multiprocessing forked
        self._at_end = Finalize(None, self.close, exitpriority=0)

    def ask(self, request: Request) -> dict[str, Any] | None:
        """The answer to a request; None where the process has ended or is not what it was.

        Then ``awaited`` begins with the request whose fault that may be.
        """
        while request not in self._answers and self.awaited:
            if not self._receive():
                return self._answers.get(request)
        if request not in self._answers and not (self._send([request]) and self._receive()):
            return self._answers.get(request)
        return self._answers.pop(request)

    def ahead(self, requests: Sequence[Request]) -> bool:
        """Send requests whose answers are read when they are asked for; whether the process is still there."""
        while self.awaited:
            if not self._receive():
                return False
        self._answers.clear()
        return self._send(requests)

    def _send(self, requests: Sequence[Request]) -> bool:
        # the process reads all of them before it answers the first, so neither waits for the other to read
        data = b"".join(map(self._framed, requests))
        self.awaited.extend(requests)
        try:
            self._write(_SIZE.pack(len(data)) + data)
        except BrokenPipeError:
            return False
        return True

    def _framed(self, request: Request) -> bytes:
        """The bytes that ask for one rendering; a template's text travels once."""
        if len(self._numbers) == _MOST_SOURCES:
            self._numbers.clear()
        number = self._numbers.get(request.source, len(self._numbers))
        new = request.source if number == len(self._numbers) else None
        self._numbers[request.source] = number
        limits = request.limits
        # written by hand: setting JSON up for five values takes longer than the values
        text = "null" if new is None else json.dumps(new)
        settings = f"[{number}, {text}, {float(limits.seconds)!r}, {limits.characters}, {limits.memory}"
        data = f"{settings}, {request.variables}]".encode("utf-8", "surrogatepass")
        return _SIZE.pack(len(data)) + data

    def _receive(self) -> bool:
        """Read the answer to the first request that is awaited; whether the process can answer more."""
        request = self.awaited[0]
        try:
            answer = self._read(request.limits)
        except (EOFError, BrokenPipeError):
            return False
        except TimeoutError:
            answer = {"limit": "seconds"}
        self._answers[request] = answer
        if answer.get("limit") in _LASTING:
            return False
        self.awaited.popleft()
        return True

    def _read(self, limits: Limits) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE * limits.seconds
        self._fill(_SIZE.size, deadline)
        (size,) = _SIZE.unpack_from(self._unread)
        # a character is 4 bytes at most, and a span 16
        if size > 6 * limits.characters + (1 << 16):
            return {"limit": "size"}
        self._fill(_SIZE.size + size, deadline)
        answer = self._unread[_SIZE.size : _SIZE.size + size]
        del self._unread[: _SIZE.size + size]
        if answer[:1] == b"\0":
            (count,) = _SIZE.unpack_from(answer, 1)
            begin = 1 + _SIZE.size * (1 + 2 * count)
            places = struct.unpack_from(f"<{2 * count}Q", answer, 1 + _SIZE.size)
            spans = list(zip(places[::2], places[1::2], strict=True))
            return {"text": answer[begin:].decode("utf-8", "surrogatepass"), "spans": spans}
        return dict(json.loads(answer.decode("utf-8", "surrogatepass")))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._input.write(view) :]

    def _fill(self, size: int, deadline: float) -> None:
        """Read until at least so many bytes are there."""
        while len(self._unread) < size:
            if not self._ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = self._output.read(1 << 16)
            if not part:
                raise EOFError
            self._unread += part

    def close(self) -> int:
        """End the process; returns the number of the signal that ended it, at the latest this one's."""
        self._at_end.cancel()
        self._input.close()
        self._output.close()
        self._child.kill()
        return -self._child.wait()

    def forget(self) -> None:
        """In a forked process: the pipes are the parent's, and stay open there."""
        self._at_end.cancel()
        self._input.close()
        self._output.close()
        self._child.returncode = 0


_process: _Process | None = None
_lock = threading.Lock()


def _forget() -> None:
    global _process, _lock
    if _process is not None:
        _process.forget()
    _process, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
