"""``limbeck docs``: pages of the checkout or of the package, listed, shown and searched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from limbeck.cli.docs import find_pages
from tests.cli.command import run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documentation is not here")


def test_every_page_is_listed_with_its_title(capsys) -> None:
    found = json.loads(run(capsys, "docs", "--json")[1])["pages"]
    assert set(found) == {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in (ROOT / "docs").rglob("*.md")}
    assert all(found.values())
    assert "configuration" in run(capsys, "docs")[1]


@pytest.mark.parametrize("name", ["data", "data.md", "docs/data.md"])
def test_a_page_is_shown_as_it_is_in_a_pipe(capsys, name: str) -> None:
    assert run(capsys, "docs", name)[1] == (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_a_terminal_gets_it_rendered(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr("limbeck.cli.docs.console", lambda: Console(width=80, force_terminal=True))
    code, out, _ = run(capsys, "docs", "data")
    assert code == 0
    assert "# Data" not in out
    assert "Documents longer than the context" in out


def test_words_are_searched_in_all_pages_or_in_one(capsys) -> None:
    found = json.loads(run(capsys, "docs", "--search", "ON_BAD_RECORD", "--json")[1])["found"]
    assert {"data", "configuration"} <= {entry["page"] for entry in found}
    one = json.loads(run(capsys, "docs", "data", "--search", "on_bad_record", "--json")[1])["found"]
    assert {entry["page"] for entry in one} == {"data"}
    assert "data" in run(capsys, "docs", "--search", "on_bad_record")[1].splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dta"], "did you mean 'data'?"),
        (["qqq"], "limbeck docs lists them"),
        (["--search", "zzqqzz"], "no page holds"),
    ],
)
def test_what_is_not_there_is_one_line(capsys, arguments: list[str], said: str) -> None:
    code, out, err = run(capsys, "docs", *arguments)
    assert (code, out) == (1, "")
    assert said in err


@pytest.mark.slow
def test_pages_and_recipes_are_inside_what_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build_py", "-d", str(tmp_path / "b")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / "b" / "limbeck"
    assert (built / "docs" / "data.md").is_file()
    assert (built / "recipes" / "chat.yaml").is_file()
    assert (built / "recipes" / "data" / "alembic.txt").is_file()
    assert len(list((built / "docs").rglob("*.md"))) == len(find_pages())
