"""Settings that must hold before any test module is imported, and what a whole test run says at its end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import TEST_SECONDS
from tests.zoo import ZooError

# Triton reads this when a kernel is defined: without a GPU its kernels run in the interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read by pytest-timeout; the option --timeout goes before it.
os.environ.setdefault("PYTEST_TIMEOUT", f"{TEST_SECONDS:g}")

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

NOT_FETCHED = "not fetched: "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test whose real tokenizer cannot be fetched on this machine is skipped, with the reason."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(ZooError):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, f"Skipped: {NOT_FETCHED}{call.excinfo.value}")
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests had to do without real tokenizers, and why, in one line each."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        _, found, why = str(report.longrepr[-1] if report.longrepr else "").partition(NOT_FETCHED)
        if found:
            reasons[why] = reasons.get(why, 0) + 1
    for why, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} tests skipped, real tokenizers {NOT_FETCHED}{why}", yellow=True)
