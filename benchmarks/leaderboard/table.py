"""Draws `benchmarks/LEADERBOARD.md` from the stored results of the quality benchmark; writes the scripts of its rows.

PYTHONPATH=. python benchmarks/leaderboard/table.py
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from benchmarks.quality.tables import by_domain, read_rows, unique, usual

HERE = Path(__file__).parent
PAIRS = ("coarse", "fine")
SCRIPT = """#!/bin/sh
# sh benchmarks/leaderboard/{arm}.sh CORPUS WORK    CORPUS is what benchmarks/quality/corpus.py wrote
set -eu
cd "$(dirname "$0")/../.."
PYTHONPATH=. exec python benchmarks/quality/suite.py "$1" "$2" \\
    --arms {arm} --pairs coarse fine --seeds 1 2 3 --minutes 600
"""
HEAD = """# Leaderboard

Held-out bits per byte (mean of eight domains) of a student that each objective teaches; lower is better. `coarse`: the
teacher has 32,768 tokens and the student 8,192, `fine`: the other way round. All rows have the same students, teachers,
text, steps and seeds ([what exactly, and by domain](quality/RESULTS.md)); ± is the standard deviation over seeds. The
teachers themselves reach {teachers}.

Every row has the script that makes it, on one GPU. A new row is a new arm in `quality/suite.py`, its script, its lines
in `quality/results.jsonl`, and `python benchmarks/leaderboard/table.py`.

| objective | mean of both | coarse | fine | seconds a run* | run |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page: every arm that both directions have measured with several seeds."""
    stored = unique(read_rows([HERE.parent / "quality" / "results.jsonl"]))
    rows = usual([row for row in stored if row["pair"] in (*PAIRS, "teacher")])
    bits: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, list[int]] = {}
    teachers = {}
    for row in rows:
        value = by_domain(row)["mean"]
        if row["pair"] == "teacher":
            teachers[row["arm"]] = value
        elif row["pair"] in PAIRS:
            bits.setdefault(row["arm"], {}).setdefault(row["pair"], []).append(value)
            seconds.setdefault(row["arm"], []).append(row["seconds"])
    whole = {arm: own for arm, own in bits.items() if all(len(own.get(pair, ())) > 1 for pair in PAIRS)}
    means = {arm: statistics.mean(statistics.mean(own[pair]) for pair in PAIRS) for arm, own in whole.items()}
    lines = []
    for arm in sorted(means, key=means.__getitem__):
        cells = [f"{statistics.mean(whole[arm][p]):.3f} ± {statistics.stdev(whole[arm][p]):.3f}" for p in PAIRS]
        script = f"[{arm}.sh](leaderboard/{arm}.sh)"
        cost = f"{statistics.median(seconds[arm]):.0f}"
        lines.append(f"| `{arm}` | {means[arm]:.3f} | {' | '.join(cells)} | {cost} | {script} |")
    shown = " and ".join(f"{value:.3f} (`{name}`)" for name, value in sorted(teachers.items()))
    return (
        HEAD.format(teachers=shown)
        + "\n".join(lines)
        + "\n\n*of training, with eight to ten runs side by side on one device.\n"
    )


def main() -> None:
    text = page()
    (HERE.parent / "LEADERBOARD.md").write_text(text, encoding="utf-8")
    for arm in re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE):
        (HERE / f"{arm}.sh").write_text(SCRIPT.format(arm=arm), encoding="utf-8")


if __name__ == "__main__":
    main()
