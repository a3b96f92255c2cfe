"""The sdist and the wheel hold everything that runs, and what is installed from them works away from the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from limbeck import __version__

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def tracked() -> set[str]:
    """Files of the package as they lie in the source tree, without what Python makes of them."""
    found = (p for p in (ROOT / "limbeck").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(ROOT).as_posix() for p in found}


def built(kind: str, source: Path, out: Path) -> Path:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built from a copy of the tree without its history."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "limbeck", source / "limbeck", ignore=shutil.ignore_patterns("__pycache__"))
    sdist = built("build_sdist", source, folder)
    assert sdist.name == f"limbeck-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return built("build_wheel", folder / f"limbeck-{__version__}", folder)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert tracked() - names == set()
    assert {name for name in names if not re.match(r"limbeck(-[\d.]+\.dist-info)?/", name)} == set()


@pytest.mark.slow
def test_what_is_installed_runs_away_from_the_source(wheel: Path, tmp_path: Path) -> None:
    place, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    environment = {
        **os.environ,
        "PYTHONPATH": str(place),
        "LIMBECK_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "limbeck", *arguments]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    where = [sys.executable, "-c", "import limbeck; print(limbeck.__file__)"]
    found = subprocess.run(where, cwd=work, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(place))
    assert run("--version").split() == ["limbeck", __version__]
    assert "distil" in run("--help").lower()
    run("train", "cpu_smoke", "distillation.max_num_steps=1", "logger.log_dir=run")
    assert (work / "run" / "report.html").is_file()


def test_a_release_has_the_tag_of_its_version() -> None:
    """`make release` compares them; here, that the line it reads the version from is there."""
    line = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
    assert line.findall((ROOT / "limbeck" / "__init__.py").read_text(encoding="utf-8")) == [__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
