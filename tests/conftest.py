"""Settings that must hold before any test module is imported."""

from __future__ import annotations

import os
import shutil

from hypothesis import HealthCheck, settings

from tests.patience import TEST_SECONDS

# Triton reads this when a kernel is defined: without a GPU its kernels run in the interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read by pytest-timeout; the option --timeout goes before it.
os.environ.setdefault("PYTEST_TIMEOUT", f"{TEST_SECONDS:g}")

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
