"""The page that says what a training step enters names every file that it does enter."""

from __future__ import annotations

import pytest

from benchmarks.house import walked
from tests.docs.blocks import ROOT


@pytest.mark.slow
def test_the_walk_of_a_step_names_every_file_on_it() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = walked(ROOT)["walk"]
    assert isinstance(files, list), files
    assert [file for file in files if f"`{file}`" not in page] == []
