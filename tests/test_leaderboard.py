"""The leaderboard is drawn from the stored results, and every row can be run again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from benchmarks.leaderboard.table import page
from benchmarks.quality.suite import ARMS

ROOT = Path(__file__).parents[1] / "benchmarks"


def test_the_page_is_what_the_results_say() -> None:
    assert (ROOT / "LEADERBOARD.md").read_text(encoding="utf-8") == page()


def test_every_row_has_a_script_that_runs_its_arm() -> None:
    rows = re.findall(r"^\| `(\S+)` \|.*\((leaderboard/\S+\.sh)\) \|$", page(), re.MULTILINE)
    assert len(rows) >= 6
    for arm, name in rows:
        script = (ROOT / name).read_text(encoding="utf-8")
        assert f"--arms {arm} " in script
        assert arm in ARMS
        assert subprocess.run(["sh", "-n", str(ROOT / name)], check=False).returncode == 0
