"""Code against its tests: what passes, what fails, and code that is wild."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from limbeck.verifiers import Answer, Python, make_verifier

RECORD = {"tests": ["assert f(2) == 4", "assert f(3) == 6"]}
RIGHT = "def f(x):\n    return 2 * x"
HUMANEVAL = {
    "prompt": 'def twice(x):\n    """2 x"""\n',
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


def judged(code: str, record: Any = RECORD, **settings: Any) -> Any:
    return Python(**settings).verify(Answer(code), record)


def test_code_is_run_against_its_tests() -> None:
    assert judged(RIGHT).right
    assert judged(f"Here:\n```python\n{RIGHT}\n```\nDone.").right
    assert judged("import json, math, collections\n" + RIGHT).right
    wrong = judged("def f(x):\n    return x")
    assert (wrong.reason, "tests.py line 1" in wrong.why) == ("wrong", True)
    assert judged("  ").reason == "no_answer"
    assert judged(RIGHT, {"test_list": RECORD["tests"], "test_setup_code": "y = 1"}).right


def test_humaneval_takes_a_function_or_the_rest_of_one() -> None:
    assert judged("    return 2 * x\n", HUMANEVAL).right
    assert judged("```python\ndef twice(x):\n    return x + x\n```", HUMANEVAL).right
    assert judged("    return x\n", HUMANEVAL).reason == "wrong"


def test_several_at_a_time_come_in_order() -> None:
    answers = [Answer(RIGHT), Answer("f = None"), Answer(RIGHT)]
    assert [v.right for v in make_verifier("python").verify_all(answers, [RECORD] * 3)] == [True, False, True]


ENDS = {
    "exit": "import sys\nsys.exit(0)",
    "quick exit": "import os\nos._exit(0)",
    "syntax": "def f(:",
    "nested": "x = " + "(" * 10_000,
    "recursion": "def f(x): return f(x)",
    "an error that cannot be shown": "class E(Exception):\n    def __str__(self): raise E\nraise E",
    "not passed by a report of its own": (
        "import os\nfor i in range(3, 60):\n    try: os.write(i, b'{\"passed\": true}\\n')\n    except OSError: pass\n"
        "os._exit(0)"
    ),
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "equal to anything": "class A(int):\n    def __eq__(self, other): raise SystemExit(0)\ndef f(x): return A(x)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_what_does_not_pass(code: str) -> None:
    assert judged(code).reason == "wrong"


@pytest.mark.parametrize("code", ["import time\ntime.sleep(1000)", "while True: pass", "input()\n" * 3 + "[].sort()"])
def test_what_does_not_end_is_ended(code: str) -> None:
    assert judged(code, seconds=1.0).reason == "wrong"


REFUSED = {
    "fork": "import os\nos.fork()",
    "fork bomb": "import os\nwhile True: os.fork()",
    "process": "import subprocess\nsubprocess.run(['true'])",
    "shell": "import os\nos.system('true')",
    "pool": "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "thread": "import threading\nthreading.Thread(target=print).start()",
    "foreign code": "import ctypes\nctypes.CDLL(None).system(b'true')",
    "memory": "x = [0] * 10**10",
    "a file of gigabytes": "out = open('a', 'w')\nfor i in range(10**6): out.write('a' * 10**6)",
    "many files": "for i in range(10**6): open(str(i), 'w').close()",
}


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_ends_the_code(code: str) -> None:
    verdict = judged(code + "\n" + RIGHT)
    assert (verdict.reason, "answer.py" in verdict.why) == ("wrong", True)


def test_nothing_outside_its_folder_is_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    os.chmod(kept, 0o666)
    os.chmod(tmp_path, 0o777)
    for line in ("open({0!r}, 'w')", "__import__('os').remove({0!r})", "__import__('os').truncate({0!r}, 0)"):
        assert judged(line.format(str(kept)) + "\n" + RIGHT).reason == "wrong"
    assert kept.read_text() == "mine"
    assert judged("open('mine', 'w').write('x')\nassert open('mine').read() == 'x'\n" + RIGHT).right


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for code in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            "import socket\nsocket.socket()",
        ):
            assert judged(code + "\n" + RIGHT).reason == "wrong"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_what_it_prints_takes_no_room() -> None:
    assert judged("print('a' * 10**8)\n" + RIGHT).right
