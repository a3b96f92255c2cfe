"""The kernels run in Triton's interpreter here, on the CPU. The variable is read when a kernel is defined, so it is set
before any test module imports one."""

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the number of operations, not by their size."""
    from limbeck.losses.kernels import sorted_l1

    monkeypatch.setattr(sorted_l1, "STEP", 512)
    monkeypatch.setattr(sorted_l1, "LANES", 128)
