"""What the runs of a quality benchmark say of their pairs and losses, where `loss_fn.probe_every` asked them:
one-to-one coverage, shared mass, cosines between the gradients of a loss's parts. Means over seeds of the first and of
the second half of a run.

    python benchmarks/quality/probes.py WORK           # folders of runs, as suite.py and real.py leave them
    python benchmarks/quality/probes.py WORK --table
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

PROBED = re.compile(r"train/teacher_(\d+)/((?:cosine|norm_ratio|shared_mass)_\w+|strict_(?:chunks|\w+_tokens))")


def halves(folder: Path) -> dict[str, list[float]]:
    """Mean of every probed metric over the first and over the second half of a run's probed steps."""
    found: dict[str, list[float]] = defaultdict(list)
    probed = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        figures = {name: value for name, value in row.items() if PROBED.fullmatch(name) and value is not None}
        if any("/strict_chunks" in name for name in figures):
            probed.append(figures)
    middle = (len(probed) + 1) // 2
    for half in (probed[:middle], probed[middle:]):
        for name in {name for figures in half for name in figures}:
            found[name.removeprefix("train/")].append(fmean(f[name] for f in half if name in f))
    return dict(found)


def collect(work: Path) -> dict[str, dict[str, list[float]]]:
    """By run without its seed: every metric's halves, averaged over seeds."""
    runs: dict[str, list[dict[str, list[float]]]] = defaultdict(list)
    for path in sorted(work.rglob("metrics.jsonl")):
        if figures := halves(path.parent):
            runs[re.sub(r"_\d+$", "", path.parent.relative_to(work).parts[0])].append(figures)
    out = {}
    for name, seeds in runs.items():
        keys = sorted({key for figures in seeds for key in figures})
        out[name] = {
            key: [round(fmean(half), 4) for half in zip(*(f[key] for f in seeds if key in f), strict=False)]
            for key in keys
        }
    return out


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a row per run, the second half's figures of its first teacher."""
    columns = sorted(
        {key.split("/")[1] for figures in found.values() for key in figures if key.startswith("teacher_0/")}
    )
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, figures in found.items():
        cells = [figures.get(f"teacher_0/{column}", []) for column in columns]
        lines.append(f"| {name} | " + " | ".join(f"{cell[-1]:.3f}" if cell else "" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--table", action="store_true", help="markdown instead of JSON")
    args = parser.parse_args()
    found = collect(args.work)
    print(table(found) if args.table else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
