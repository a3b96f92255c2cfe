"""The sdist and the wheel hold everything that runs, and what is installed from them works away from the source."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from limbeck import __version__
from limbeck.demo import TEACHER_PACKAGE
from tests.helpers.environments import ROOT, Environment, copy_sources

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def tracked() -> set[str]:
    """Files of the package as they lie in the source tree, without what Python makes of them, and pages of docs."""
    found = (p for p in (ROOT / "limbeck").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    pages = {f"limbeck/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "docs").rglob("*.md")}
    return pages | {p.relative_to(ROOT).as_posix() for p in found}


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
    source = copy_sources(folder / "source")
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


def test_the_image_copies_what_is_there_and_installs_what_was_built() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert name in allowed
    for other in (text, (ROOT / "Makefile").read_text(encoding="utf-8")):
        assert TEACHER_PACKAGE in other
    # by its path, for an index may have another package of that name
    assert re.findall(r"\S*limbeck\S*\[train", text) == ["/tmp/wheels/limbeck-*.whl)[train"]


@pytest.mark.slow
def test_the_image_holds_the_same_package(wheel: Path, tmp_path: Path) -> None:
    """What the first stage of the Dockerfile copies, as far as .dockerignore lets it, builds the whole wheel."""
    stage = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")[1]
    named = [word for line in re.findall(r"^COPY (.*) \S+$", stage, re.MULTILINE) for word in line.split()]
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= set(allowed)
    image = built("build_wheel", copy_sources(tmp_path / "source", named), tmp_path)
    with zipfile.ZipFile(image) as archive, zipfile.ZipFile(wheel) as other:
        assert set(archive.namelist()) == set(other.namelist())


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


@pytest.mark.slow
def test_the_demo_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """What a user types, torch before the rest as the Makefile has it: nothing else may be needed."""
    made = Environment(tmp_path / "environment")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    made.install(*re.findall(r"^torch==\S+", pins, re.MULTILINE))
    made.install("limbeck[demo]")
    done = made.run("demo", "--steps", "2", "--documents", "8", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["bpb_teacher"] < 1.5
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    for arguments in (["recipes", "show", "chat"], ["docs", "quickstart"], ["schema"]):
        assert made.run(*arguments, folder=tmp_path).stdout


def test_a_release_has_the_tag_of_its_version() -> None:
    """`make release` compares them; here, that the line it reads the version from is there."""
    line = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
    assert line.findall((ROOT / "limbeck" / "__init__.py").read_text(encoding="utf-8")) == [__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
