"""What a user gets: environments of their own that hold the wheel of this tree, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "docs", "limbeck")
"""What the package is built from."""


def copy_sources(place: Path, names: Iterable[str] = SOURCES) -> Path:
    """The new folder ``place`` with these files and folders of the source tree."""
    place.mkdir(parents=True)
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place)
    return place


class Environment:
    """A virtual environment, empty at first; the test that asks for one is skipped where none can be made.

    ``python`` is its interpreter. The wheel of this tree lies in ``folder``, where :meth:`install` finds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        source = copy_sources(folder / "source")
        self._do([sys.executable, "-m", "venv", str(folder / "venv")])
        self._pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))

    def install(self, *requirements: str) -> None:
        """Install packages in the versions that the project was tested with; options of pip may be among them."""
        self._pip(
            "install", "--constraint", str(ROOT / "constraints.txt"), "--find-links", str(self.folder), *requirements
        )

    def run(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """``limbeck`` with these arguments in ``folder``, as installed here."""
        command = [str(self.python), "-m", "limbeck", *arguments]
        kept = {name: value for name, value in _variables().items() if name != "PYTHONPATH"}
        environment = {**kept, "LIMBECK_CACHE": str(self.folder / "cache")}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    def _pip(self, *arguments: str) -> None:
        # Isolated: xdist puts the checkout on PYTHONPATH, and an editable installation there counts as installed.
        self._do([str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments])

    def _do(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.folder, env=_variables(), capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            pytest.skip(f"no environment could be made, the package registry may be out of reach: {said}")


def _variables() -> dict[str, str]:
    """Those of this process without the Makefile's constraints, which name a file of the checkout."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")}
