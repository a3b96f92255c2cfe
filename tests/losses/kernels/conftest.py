"""These tests hand CPU tensors to the kernels, so they need Triton's interpreter, which is chosen for a whole process.

`tests/conftest.py` chooses it where there is no GPU. Where there is one, `tests/losses/test_gpu.py` tests the compiled
kernels and starts this folder in a process of its own.
"""

import os

import pytest


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the number of operations, not by their size."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled in this process; test_gpu.py starts these tests in one of their own")
    from limbeck.losses.kernels import sorted_l1

    monkeypatch.setattr(sorted_l1, "STEP", 512)
    monkeypatch.setattr(sorted_l1, "LANES", 128)
