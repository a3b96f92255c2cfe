"""Every recipe is a valid run file, and its header gives a command that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import capitals
from limbeck.algorithms.config import MasterConfig
from limbeck.cli.recipes import describe
from limbeck.config import RECIPES as FOLDER
from limbeck.config import load_config, resolve

RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe(path: Path) -> None:
    header = "".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    assert describe(path.read_text(encoding="utf-8")).endswith("."), "limbeck recipes list shows the first line alone"
    assert any(f"limbeck {verb} {path.stem}" in header for verb in ("train", "plan"))
    raw = load_config(path)
    if raw.get("algorithm", "xtoken_off_policy_distillation") == "xtoken_off_policy_distillation":
        config = resolve(MasterConfig, raw)
        assert config.logger.log_dir == f"runs/{path.stem}"


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 7


def test_the_capitals_are_what_their_script_writes(tmp_path: Path) -> None:
    capitals.write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (capitals.FOLDER / path.name).read_bytes(), path.name
    asked = {json.loads(line)["question"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()}
    held_out = {json.loads(line)["question"] for line in (tmp_path / "held_out.jsonl").read_text().splitlines()}
    assert (len(asked), len(held_out), asked & held_out) == (4 * 48, 48, set())
