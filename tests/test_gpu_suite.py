"""Tests marked gpu, in a process that sees the device; all other tests run without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import TEST_SECONDS

_SECONDS = TEST_SECONDS * 4 / 3
"""A whole suite, not a test."""


@pytest.mark.timeout(_SECONDS)
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA device")
@pytest.mark.skipif(os.environ.get("LIMBECK_TEST_GPU") == "1", reason="this is that process")
def test_everything_marked_gpu() -> None:
    hidden = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-rfs", "--tb=short"]
    done = subprocess.run(
        command,
        env={**environment, "LIMBECK_TEST_GPU": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "needs a CUDA device" not in done.stdout, "the device is there, but torch does not see it"
