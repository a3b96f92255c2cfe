"""The versions that an installation brings are all written down, and the release lock has the same with hashes."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(name: str) -> set[tuple[str, str]]:
    """(name, version) of every pin in a file."""
    return {(canonicalize_name(n), version) for n, version in PIN.findall((ROOT / name).read_text(encoding="utf-8"))}


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Names of all installed packages that a package needs here, itself included."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    try:
        listed = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    found = {canonicalize_name(name)}
    for requirement in map(Requirement, listed):
        wanted = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker is None or any(requirement.marker.evaluate(extra) for extra in wanted):
            found |= needed(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)
    return found


def test_every_package_that_is_needed_has_a_version() -> None:
    try:
        importlib.metadata.distribution("limbeck")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("limbeck is not installed, so nobody knows what it needs")
    missing = needed("limbeck", frozenset({"dev"}), set()) - {name for name, _ in pins("constraints.txt")} - {"limbeck"}
    assert missing == set()


def test_versions_fit_together() -> None:
    """torch names the one triton that it works with; pins of both must agree wherever both are installed."""
    versions = dict(pins("constraints.txt"))
    if (here := Version(importlib.metadata.version("torch")).base_version) != versions["torch"]:
        pytest.skip(f"the constraints are for torch {versions['torch']}, {here} is installed")
    listed = [Requirement(line) for line in importlib.metadata.requires("torch") or []]
    for requirement in listed:
        if requirement.name == "triton":
            assert requirement.specifier.contains(versions["triton"])


def test_the_lock_has_the_same_versions_with_hashes() -> None:
    lock = (ROOT / "release.lock").read_text(encoding="utf-8")
    assert pins("release.lock") <= pins("constraints.txt")
    blocks = re.split(r"\n(?=\S)", "\n".join(line for line in lock.splitlines() if not line.startswith("#")))
    assert len(blocks) > 80
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    names = {name for name, _ in pins("release.lock")}
    assert {"torch", "transformers", "httpx", "httpcore", "ray", "peft", "setuptools"} <= names


def test_make_installs_with_the_constraints_and_without_the_lock() -> None:
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "release.lock" not in make
    assert "PIP_CONSTRAINT := constraints.txt" in make


def test_the_documented_command_is_the_one_that_wrote_the_lock() -> None:
    lock, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("release.lock", "SECURITY.md"))
    command = lock.splitlines()[1].removeprefix("#").strip()
    assert command in re.sub(r"\s*\\\n\s*", " ", page)


def test_what_the_page_about_security_names_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", page))
    assert len(named) > 15
    assert {name for name in named if not (ROOT / name).exists()} == set()
