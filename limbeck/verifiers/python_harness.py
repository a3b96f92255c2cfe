"""Runs code and its tests with limits. Started as a script by ``limbeck.verifiers.python``; imports nothing of ours.

Reads an order as JSON from its input and writes lines to a pipe: ``started``, then a report. Limits are those of the
operating system, and below them a hook that refuses what the code must not do, which also holds for the tests.
"""

from __future__ import annotations

import _thread
import ctypes
import json
import os
import resource
import sys
import threading
from typing import Any

FILE_BYTES = 8 << 20
FILES = 64
NOBODY = 65534
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_REFUSED = (
    "ctypes",
    "fcntl",
    "ftplib",
    "mmap",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.link",
    "os.posix_spawn",
    "os.spawn",
    "os.symlink",
    "os.system",
    "pty.",
    "resource.",
    "shutil.chown",
    "signal.pthread_kill",
    "smtplib",
    "socket.",
    "subprocess.",
    "sys._current_frames",
    "syslog",
    "urllib",
    "webbrowser",
)
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.utime", "shutil.rmtree", "shutil.move")


def _limit(order: dict[str, Any]) -> None:
    def set_limit(kind: int, most: int) -> None:
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # without the right to it a new network needs a new user, which some systems refuse
        if libc.unshare(_NEW_NETWORK):
            libc.unshare(_NEW_USER | _NEW_NETWORK)
        libc.prctl(38, 1, 0, 0, 0)  # no program that it could start has more rights
    except (OSError, AttributeError):
        pass
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    set_limit(resource.RLIMIT_NOFILE, FILES)
    set_limit(resource.RLIMIT_CPU, int(order["seconds"]) + 1)
    if sys.platform != "darwin":
        set_limit(resource.RLIMIT_AS, order["memory"])
    _leave_root()
    # a root would not be held to it
    set_limit(resource.RLIMIT_NPROC, 0)


def _leave_root() -> None:
    if os.geteuid() != 0:
        return
    # where nobody cannot read Python's own files, the hook below has to do
    os.seteuid(NOBODY)
    reads = os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    if reads:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _watch(folder: str) -> None:
    written = [0]
    inside = os.path.realpath(folder) + os.sep

    def is_inside(path: str | bytes) -> bool:
        path = os.fsdecode(path)
        return os.path.realpath(path).startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        # numpy looks at Python itself that way when it is imported; a function found there is refused
        if event == "ctypes.dlopen" and arguments == (None,):
            return
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is not allowed")
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if not writes or isinstance(path, int):
                return
            written[0] += 1
            if not is_inside(path) or written[0] > FILES:
                raise PermissionError(f"writing {path!r} is not allowed")
        elif event.startswith(_CHANGES) and not (isinstance(arguments[0], (str, bytes)) and is_inside(arguments[0])):
            raise PermissionError(f"{event} is not allowed")

    def start_no_thread(*_arguments: Any, **_named: Any) -> None:
        raise PermissionError("starting a thread is not allowed")

    # no event tells of it, and a root is not held to the limit of processes
    for module, name in ((_thread, "start_new_thread"), (_thread, "start_new"), (threading, "_start_new_thread")):
        setattr(module, name, start_no_thread)
    sys.addaudithook(hook)


def main() -> None:
    """Follow the order."""
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", errors="replace")
    order = json.load(sys.stdin)
    sys.argv[:] = ["answer.py"]
    sys.setrecursionlimit(3000)
    _limit(order)
    # what goes wrong before this line is the harness's fault, behind it the code's
    print("started", file=pipe, flush=True)
    word = order["word"]
    code, tests = order["code"], order["tests"]
    order.clear()
    for name in ("ctypes", "_ctypes", "resource"):
        sys.modules.pop(name, None)
    _watch(os.getcwd())
    report = {"word": word, "passed": False, "why": ""}
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "answer.py", "exec"), space)
        exec(compile(tests, "tests.py", "exec"), space)
        report["passed"] = True
    except BaseException as error:  # SystemExit too: code that exits has passed nothing
        line, where = _line(error)
        report["why"] = f"{type(error).__name__}: {_said(error)}"[:300] + (f" ({where} line {line})" if line else "")
    print(json.dumps(report), file=pipe, flush=True)
    # no handlers at exit: nothing of the code runs behind the report
    os._exit(0)


def _said(error: BaseException) -> str:
    try:
        return " ".join(str(error)[:1000].split())
    except BaseException:
        return "..."


def _line(error: BaseException) -> tuple[int, str]:
    step, last = error.__traceback__, (0, "")
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if name in ("answer.py", "tests.py"):
            last = (step.tb_lineno, name)
        step = step.tb_next
    return last


if __name__ == "__main__":
    main()
