"""Processes that benchmarks give their runs to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.docs.blocks import ROOT
from tests.patience import TEST_SECONDS

PROGRAM = """
import os
import time
from benchmarks.common import worker_pool

def run():
    print(os.getpid(), flush=True)
    time.sleep({seconds})

if __name__ == "__main__":
    with worker_pool(1) as pool:
        pool.submit(run).result()
"""


def test_runs_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(seconds=2 * TEST_SECONDS), encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    # a worker that stays holds the pipe open
    reading = threading.Thread(target=parent.stdout.read, daemon=True)
    reading.start()
    reading.join(TEST_SECONDS / 2)
    stayed = reading.is_alive()
    if stayed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert not stayed
