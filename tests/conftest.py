"""Settings that must hold before any test module is imported, and what a whole test run says at its end."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import zoo
from tests.patience import TEST_SECONDS

# On every machine alike tests run on the CPU, kernels in Triton's interpreter. Both hold for a whole process and are
# chosen before torch and Triton are imported; tests marked gpu have a process of their own (tests/test_gpu_suite.py).
if os.environ.get("LIMBECK_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

# Read by pytest-timeout; the option --timeout goes before it.
os.environ.setdefault("PYTEST_TIMEOUT", f"{TEST_SECONDS:g}")

# How long an example takes says something about the machine, not about the code.
# the same examples on every machine; new ones where they are looked for
RANDOM = "LIMBECK_TEST_RANDOM" in os.environ
settings.register_profile(
    "any machine", deadline=None, derandomize=not RANDOM, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers and two data files."""
    from tests.helpers import runs  # needs torch, which the core alone has not

    folder = tmp_path_factory.mktemp("stuff")
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _own_threads() -> Iterator[None]:
    """A module that computes with one thread leaves the next one as many as the machine was given: with another number
    sums have other bits, and runs in processes of their own would not be those of this one."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    yield
    if torch is not None:
        torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one of the zoo's slow tokenizers are slow ones. Files that use the zoo come last, so that of two workers
    one reads most of its tokenizers. Where only the core is installed, tests that need more are skipped
    (tests/test_core.py)."""
    items.sort(key=lambda item: isinstance(item, pytest.Function) and _uses_the_zoo(item.module))
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value in zoo.SLOW_NAMES for value in parameters):
            item.add_marker(pytest.mark.slow)
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("train") is not None:
            item.add_marker(pytest.mark.skip(reason="needs limbeck[train]"))


@functools.cache
def _uses_the_zoo(module: ModuleType) -> bool:
    return any(value is zoo or value is zoo.tokenizer or value is zoo.tokenizer_dir for value in vars(module).values())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests had to do without real tokenizers, and why, in one line each."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        _, found, why = str(report.longrepr[-1] if report.longrepr else "").partition(zoo.ZooError.PREFIX)
        if found:
            reasons[why] = reasons.get(why, 0) + 1
    for why, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} tests skipped, real tokenizers {zoo.ZooError.PREFIX}{why}", yellow=True)
