"""Python code against unit tests, in a process of its own with limits.

The process (``python_harness.py``) may not write outside an empty folder, start processes or threads, open sockets, and
has limits on time, memory, and the size and number of files. This stops code that is wrong, careless or wild. It is no
prison for code that is written to break out: where that is to be feared, run in a container without network.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from limbeck.errors import ConfigError, DataError, LimbeckError
from limbeck.verifiers.base import RIGHT, Answer, Record, Verdict, Verifier, no_answer, shown, wrong

HARNESS = Path(__file__).with_name("python_harness.py")
_FENCED = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV")
_REPORT_BYTES = 4096


class Python(Verifier):
    """Runs the answer's code, then the record's tests.

    Tests are the record's ``test``, ``tests`` or ``test_list``: Python, or a list of statements. With ``entry_point``,
    as HumanEval has it, ``check(entry_point)`` follows, and an answer that does not define the function continues the
    record's ``prompt``.
    """

    name: Literal["python"] = "python"
    """Which verifier."""
    seconds: float = Field(default=10.0, gt=0)
    """Time limit of one answer with its tests, by the clock."""
    memory_mb: int = Field(default=1024, ge=64)
    """Address space of its process."""

    parallel: ClassVar[bool] = True

    @property
    def keys(self) -> tuple[str, ...] | None:
        return ("test", "tests", "test_list", "test_setup_code", "entry_point", "prompt")

    def ready(self) -> None:
        if os.name != "posix":
            raise ConfigError(f"the verifier 'python' limits processes as Linux and macOS do; this is {os.name}")

    def check(self, record: Record) -> None:
        _tests(record)

    def judge(self, answer: Answer, record: Record) -> Verdict:
        tests, code = _tests(record), code_of(answer.said)
        if not code.strip():
            return no_answer("no code in the answer")
        name = record.get("entry_point")
        if isinstance(name, str):
            if not re.search(rf"^\s*(?:async )?def {re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.MULTILINE):
                # joined as they are: such an answer begins with the indented body behind the prompt's last line
                code = f"{record.get('prompt') or ''}{code}"
            tests = f"{tests}\ncheck({name})" if "def check(" in tests else tests
        setup = record.get("test_setup_code")
        return self._run(code, f"{setup}\n{tests}" if isinstance(setup, str) and setup else tests)

    def _run(self, code: str, tests: str) -> Verdict:
        word = secrets.token_hex(16)
        order = {"code": code, "tests": tests, "word": word, "memory": self.memory_mb << 20, "seconds": self.seconds}
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # threads are refused there, and numpy's libraries would start one for each core
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory(prefix="limbeck-python-", ignore_cleanup_errors=True) as folder:
            # a harness that is started as root goes on as nobody, who could not write into what mkdtemp makes
            os.chmod(folder, 0o777)
            reading, writing = os.pipe()
            try:
                process = subprocess.Popen(
                    # -I: the script's own folder would come first on the path, and it holds a math.py and a regex.py
                    [sys.executable, "-I", "-B", str(HARNESS), str(writing)],
                    stdin=subprocess.PIPE,
                    # reports have a pipe of their own: whatever code prints takes no room, and no reader
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(writing,),
                    cwd=folder,
                    env={**environment, "TMPDIR": folder},
                    start_new_session=True,
                )
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(writing)
            with os.fdopen(reading, "rb") as reports:
                try:
                    process.communicate(json.dumps(order).encode(), timeout=self.seconds)
                except subprocess.TimeoutExpired:
                    return wrong(f"it runs for more than {self.seconds:g} s")
                finally:
                    # whatever it has started is of its session
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                    process.wait()
                # a process that got away may still hold the other end, and to read to the end would wait for it
                os.set_blocking(reports.fileno(), False)
                report = reports.read(_REPORT_BYTES) or b""
        return _verdict(report, word, process.returncode)


def _verdict(report: bytes, word: str, code: int) -> Verdict:
    first, *rest = report.decode("utf-8", "replace").split("\n", 2)
    if first != "started":
        raise LimbeckError(f"the process of the code did not start (exit status {code}): {shown(first, 120)}")
    said = json.loads(rest[0]) if rest and rest[0].startswith("{") else None
    if said is None:
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return wrong(f"its process ended before the tests did ({how})")
    # a word that the code was not given: it cannot say by itself that it has passed
    if said.get("word") != word:
        return wrong("its process gave a report that is not the tests'")
    return RIGHT if said.get("passed") is True else wrong(str(said.get("why")))


def code_of(text: str) -> str:
    """The code of an answer: its fenced blocks, or all of it.

    >>> code_of("Here it is:\\n```python\\nx = 1\\n```\\nIt works.")
    'x = 1'
    """
    blocks = _FENCED.findall(text)
    return "\n\n".join(blocks) if blocks else text


def _tests(record: Record) -> str:
    tests: Any = next((record[key] for key in ("test", "tests", "test_list") if record.get(key)), None)
    if isinstance(tests, list) and all(isinstance(one, str) for one in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str):
        keys = ", ".join(sorted(map(str, record))) or "none"
        raise DataError(f"the record has no tests under 'test', 'tests' or 'test_list', only {shown(keys)}")
    return tests
