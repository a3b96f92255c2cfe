"""Draws the results of `suite.py`: mean and spread over seeds, by domain and by class of token.

PYTHONPATH=. python benchmarks/quality/tables.py benchmarks/quality/{results,real}.jsonl > benchmarks/quality/RESULTS.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.quality.suite import ARMS, PAIRS

Row = dict[str, Any]


def by_class(row: Row) -> dict[str, float]:
    """Bits per byte of every class of token over all domains."""
    bits, size = defaultdict[str, float](float), defaultdict[str, int](int)
    for domain in row["measures"].values():
        for name, figures in domain["classes"].items():
            bits[name] += figures["bpb"] * figures["bytes"]
            size[name] += figures["bytes"]
    return {name: bits[name] / size[name] for name in bits}


def by_domain(row: Row) -> dict[str, float]:
    domains = {name: figures["bpb"] for name, figures in row["measures"].items()}
    return {"mean": statistics.mean(domains.values()), **domains}


def table(rows: Iterable[Row], figures: Any) -> list[str]:
    """One line per arm: mean over seeds, and in the first column the spread; bold where it is best."""
    arms = defaultdict[str, list[dict[str, float]]](list)
    for row in rows:
        arms[row["arm"]].append(figures(row))
    columns = list(dict.fromkeys(name for found in arms.values() for own in found for name in own))
    means = {arm: {c: statistics.mean(own[c] for own in found) for c in columns} for arm, found in arms.items()}
    best = {c: min(own[c] for arm, own in means.items() if arm in ARMS) for c in columns}
    lines = ["| arm | seeds | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for arm in sorted(means, key=lambda name: list(ARMS).index(name) if name in ARMS else -1):
        cells = []
        for c in columns:
            text = f"{means[arm][c]:.3f}"
            if c == columns[0] and len(arms[arm]) > 1:
                text += f" ± {statistics.stdev(own[c] for own in arms[arm]):.3f}"
            cells.append(f"**{text}**" if means[arm][c] == best[c] else text)
        name = "the teacher" if arm.startswith("bpe") else arm
        lines.append(f"| {name} | {len(arms[arm])} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    print(Path(__file__).with_name("reading.md").read_text(), end="")
    rows = [json.loads(line) for path in parser.parse_args().results for line in path.read_text().splitlines()]
    for pair, (student, teacher) in PAIRS.items():
        own = [row for row in rows if row["pair"] == pair]
        if not own:
            continue
        own += [row for row in rows if row["pair"] == "teacher" and row["arm"] == teacher]
        sizes = own[0]["sizes"]
        print(f"## {pair}: student {student}, teacher {teacher}\n")
        print(f"{sizes[2]} steps of {sizes[3]} documents; {own[0]['origin']['device']}. Bits per byte, held out.\n")
        print("\n".join(table(own, by_domain)), "\n")
        print("By class of the student's (the teacher's own) tokens, all domains together:\n")
        print("\n".join(table(own, by_class)), "\n")
    for pair in sorted({row["pair"] for row in rows if row["pair"].startswith("real_")}):
        own = [row for row in rows if row["pair"] in (pair, "real")]
        first = next(row for row in own if "steps" in row)
        print(f"## Real models, {pair.removeprefix('real_')} MB of text\n")
        print(f"{first['steps']} steps of {first['batch']} documents, {first['epochs']} epochs; ", end="")
        print(f"{first['origin']['device']}.\n")
        print("\n".join(table(own, by_domain)), "\n")
        print("\n".join(table(own, by_class)), "\n")


if __name__ == "__main__":
    main()
