"""Material that all whole-run tests share."""

from pathlib import Path

import pytest

from tests.integration import material


@pytest.fixture(scope="session")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers and two data files."""
    folder = tmp_path_factory.mktemp("stuff")
    material.write_tokenizers(folder)
    material.write_data(folder)
    return folder
