"""Kernels in Triton's interpreter, on the CPU (see tests/conftest.py)."""

import pytest

from tests.helpers.interpreter import interpreter_fault


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the number of operations, not by their size."""
    fault = interpreter_fault()
    if fault is not None:
        pytest.skip(fault)
    from limbeck.losses.fast.kernels import sorted_l1

    monkeypatch.setattr(sorted_l1, "STEP", 512)
    monkeypatch.setattr(sorted_l1, "LANES", 128)
