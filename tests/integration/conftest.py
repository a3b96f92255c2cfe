"""Material that all whole-run tests share."""

from pathlib import Path

import pytest

from tests.helpers import runs


@pytest.fixture(scope="session")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers and two data files."""
    folder = tmp_path_factory.mktemp("stuff")
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    return folder
