"""``limbeck recipes``, and recipes by name from any folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from limbeck.config import RECIPES, load_config, recipe_names
from limbeck.errors import ConfigError
from limbeck.utils.files import package_file
from tests.cli.command import run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_list_names_every_recipe_with_its_purpose(capsys) -> None:
    code, out, _ = run(capsys, "recipes", "list", "--json")
    assert code == 0
    found = json.loads(out)["recipes"]
    assert list(found) == recipe_names()
    assert all(len(what) > 20 for what in found.values())
    plain = run(capsys, "recipes", "list")[1]
    assert all(name in plain for name in found)


def test_show_prints_the_file(capsys) -> None:
    assert run(capsys, "recipes", "show", "chat")[1] == (RECIPES / "chat.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_means_the_same_and_is_never_written_over(capsys, name: str) -> None:
    assert run(capsys, "recipes", "copy", name, "sub/mine.yaml")[0] == 0
    assert load_config("sub/mine.yaml") == load_config(name) == load_config(f"{name}.yaml")
    code, _, err = run(capsys, "recipes", "copy", name, "sub/mine.yaml")
    assert (code, "--force" in err) == (1, True)
    assert run(capsys, "recipes", "copy", name, "sub/mine.yaml", "--force")[0] == 0
    assert run(capsys, "recipes", "copy", name)[0] == 0
    assert Path(f"{name}.yaml").is_file()


def test_a_file_of_ones_own_goes_before_a_recipe() -> None:
    Path("chat.yaml").write_text("policy: {model_name: mine}\n")
    assert load_config("chat.yaml") == {"policy": {"model_name": "mine"}}
    # a name without a file is the recipe's
    assert load_config("chat")["policy"]["model_name"] != "mine"


def test_files_inside_packages_are_found() -> None:
    """Every file of this package that a recipe names is there, and it names none by a path of the checkout."""
    for path in RECIPES.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        for spec in re.findall(r"package:limbeck/[^\s,}\"]+", text):
            assert Path(package_file(spec)).is_file(), spec
        assert not re.search(r"(?<!package:limbeck/)recipes/", text), path


@pytest.mark.parametrize("verb", ["show", "copy"])
def test_an_unknown_recipe_is_one_line_with_the_near_name(capsys, verb: str) -> None:
    code, out, err = run(capsys, "recipes", verb, "caht")
    assert (code, out) == (1, "")
    assert err == "limbeck: there is no recipe 'caht'; did you mean 'chat'?\n"


def test_a_run_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"smok\.yaml' .*'cpu_smoke'"):
        load_config("cpu_smok.yaml")
    with pytest.raises(ConfigError, match=r"zzz' .*recipes list"):
        load_config("zzz")
