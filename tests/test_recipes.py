"""Every recipe is a valid run file, and its header gives a command that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

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
