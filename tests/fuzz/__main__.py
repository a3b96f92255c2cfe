"""See the package."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz.runner import for_minutes, judge, run_cases
from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run targets; exit code 1 where a fault was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Spoilt input for everything that reads.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; default: all of them")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    parser.add_argument("--cases", type=int, help="this many of each, from the first on, instead of a time")
    parser.add_argument("--case", type=int, help="this one alone, in this process")
    args = parser.parse_args()
    if unknown := sorted(set(args.targets) - set(TARGETS)):
        parser.error(f"there is no target {', '.join(unknown)}")
    names = args.targets or list(TARGETS)
    if args.case is not None:
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "valid").mkdir()
            for name in names:
                target = TARGETS[name]()
                target.prepare(Path(scratch) / "valid")
                judge(target, args.case, Path(scratch))
        return
    faults = 0
    for name in names:
        first = random.randrange(10**9)
        cases = iter(range(args.cases)) if args.cases else for_minutes(args.minutes / len(names), first)
        done = 0
        for fault in run_cases(TARGETS[name](), cases):
            done += 1
            if fault is not None:
                faults += 1
                print(f"{name}: case {fault.case}: {fault.what}", flush=True)
                print(f"  again: python -m tests.fuzz {name} --case {fault.case}", flush=True)
        print(f"{name}: {done:,} cases from {0 if args.cases else first}", flush=True)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
