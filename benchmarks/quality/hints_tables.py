"""Tables of what `hints.py` measured.

cd benchmarks/quality; PYTHONPATH=../.. python hints_tables.py hints.jsonl > HINTS.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.hints import ARMS

Row = dict[str, Any]
WHEN = {"first": "first call", "again": "after failing"}
GROUPS = [(f"{tools} tools, {WHEN[key]}", f"{tools}_{key}") for tools in ("seen", "unseen") for key in WHEN]


def share(own: dict[str, int], name: str) -> float:
    """Of the states that can tell."""
    of = own["recoverable"] if name.startswith("right") else own["states"]
    return own[name] / of if of else float("nan")


def by_arm(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows of one arm at one rate, in the order of the arms."""
    found = defaultdict[tuple[str, float], list[Row]](list)
    for row in sorted(rows, key=lambda row: (list(ARMS).index(row["arm"]), row["rate"], row["seed"])):
        found[row["arm"], row["rate"]].append(row)
    return found


def right_on_dev(rows: Sequence[Row]) -> float:
    """What rates are chosen by: right calls at the even states, mean of groups and seeds."""
    names = [f"{group}_dev" for _, group in GROUPS]
    return statistics.mean(
        share(row["measures"][n], "right_form") for row in rows for n in names if n in row["measures"]
    )


def cell(values: Sequence[float]) -> str:
    known = [100 * value for value in values if value == value]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.0f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.0f}{spread}"


FORM, EXACT = ("same_form", "right_form"), ("repeated", "right")


def tools_line(name: str, rows: Sequence[Row], prefix: str = "", measured: tuple[str, str] = FORM) -> str:
    """Mistakes and right calls at the reported states, by group, and what stayed right."""
    cells = []
    for _, group in GROUPS:
        own = [row["measures"].get(f"{prefix}{group}_test") for row in rows]
        found = [one for one in own if one]
        cells += [cell([share(one, what) for one in found]) for what in measured]
    kept = [share(row["measures"]["kept"], measured[0]) for row in rows if not prefix and "kept" in row["measures"]]
    return f"| {name} | " + " | ".join([*cells, cell(kept)]) + " |"


def tools_tables(rows: list[Row]) -> list[str]:
    found, chosen = by_arm(rows), dict[str, float]()
    for arm, rate in found:
        if arm not in chosen or right_on_dev(found[arm, rate]) > right_on_dev(found[arm, chosen[arm]]):
            chosen[arm] = rate
    head = "| arm | " + " | ".join(f"{name}: mistake | right" for name, _ in GROUPS) + " | kept |"
    rule = "|---" * (2 * len(GROUPS) + 2) + "|"
    seeds, sizes, model = sorted({row["seed"] for row in rows}), rows[0]["sizes"], rows[0].get("model")
    student = model or f"{sizes['layers']} layers x {sizes['hidden']} from scratch"
    lines = [
        f"## The generated world: {student}\n",
        f"Seeds {', '.join(map(str, seeds))}; {sizes['base_steps']} steps of {sizes['base_batch']} logs, then "
        f"{sizes['steps']} steps of {sizes['batch']} failed calls of {sizes['sites']} tasks; {rows[0]['device']}. Per "
        "cent of the states, mean and standard deviation over seeds; each arm at its own rate, chosen on other states. "
        "A mistake is a call of the form of the recorded failure, right one of the form of the recovery, whatever "
        "values were copied.\n",
        head,
        rule,
    ]
    lines += chosen_lines(found, chosen, FORM)
    lines += ["", "The very same call again, and the very same recovery, values included:\n", head, rule]
    lines += chosen_lines(found, chosen, EXACT)
    if len({rate for _, rate in found}) <= 2:
        return [*lines, ""]
    lines += ["", "Every rate, by form:\n", head, rule]
    return [*lines, *(tools_line(f"{arm} ({rate:g})", own) for (arm, rate), own in found.items() if ARMS[arm]), ""]


def chosen_lines(
    found: dict[tuple[str, float], list[Row]], chosen: dict[str, float], measured: tuple[str, str]
) -> list[str]:
    lines = []
    for arm, rate in chosen.items():
        if ARMS[arm] is None:
            lines.append(tools_line(arm, found[arm, rate], measured=measured))
            lines.append(tools_line("nothing, but the hint is read", found[arm, rate], "hinted_", measured))
        else:
            lines.append(tools_line(f"{arm} ({rate:g})", found[arm, rate], measured=measured))
    return lines


def logs_table(rows: list[Row]) -> list[str]:
    sizes = rows[0]["sizes"]
    lines = [
        "## Real logs\n",
        f"{len({row['seed'] for row in rows})} of 3 folds; {sizes['base_steps']} steps of {sizes['base_batch']} "
        f"examples, then {sizes['steps']} of {sizes['batch']}; windows of {sizes['context']} tokens; "
        f"{rows[0]['device']}. Numbers of held-out states; log-probabilities in nats per message, mean of the folds.\n",
        "| arm | states | a call parses | repeated | right | log p failed | log p failed, hint read | log p better |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (arm, rate), own in by_arm(rows).items():
        for prefix, name in (("as_it_came_", "as it came"), ("", arm if ARMS[arm] is None else f"{arm} ({rate:g})")):
            counts = [row["measures"][f"{prefix}all"] for row in own if f"{prefix}all" in row["measures"]]
            if not counts:
                continue
            total = {key: sum(one[key] for one in counts) for key in counts[0]}
            logs = [
                statistics.mean(row["measures"][f"{prefix}{kind}_logprob"] for row in own)
                for kind in ("failed", "hinted", "better")
            ]
            lines.append(
                f"| {name} | {total['states']} | {total['calls']} | {total['repeated']} | {total['right']} of "
                f"{total['recoverable']} | " + " | ".join(f"{value:.1f}" for value in logs) + " |"
            )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    rows = [json.loads(line) for path in parser.parse_args().results for line in path.read_text().splitlines()]
    reading = Path(__file__).with_name("hints_reading.md")
    if reading.exists():
        print(reading.read_text())
    for name, draw in (("tools", tools_tables), ("logs", logs_table)):
        students = defaultdict[str, list[Row]](list)
        for row in rows:
            if row["experiment"] == name:
                students[row.get("model") or ""].append(row)
        for _, own in sorted(students.items(), reverse=True):
            print("\n".join(draw(own)))


if __name__ == "__main__":
    main()
