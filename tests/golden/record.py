"""Record the golden steps anew: only where a change of the numbers is what was wanted.

    OMP_NUM_THREADS=1 python -m tests.golden.record             # everything
    OMP_NUM_THREADS=1 python -m tests.golden.record packed      # cases whose name holds "packed"; the others stay

A part can only be recorded on the machine that recorded the rest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401  lets kernels run in Triton's interpreter, before anything imports them
from tests.golden import stored
from tests.golden.cases import CASES, can_play, play
from tests.golden.digest import setup


def record(part: str = "") -> None:
    """Play all cases whose name holds ``part`` and store what comes out."""
    here = setup()
    if here["threads"] != 1:
        raise SystemExit(f"{here['threads']} threads; record with OMP_NUM_THREADS=1")
    kept = stored.load() if part else stored.Golden(here, {})
    if kept.setup != here:
        raise SystemExit(f"the rest was recorded on {kept.setup}, this is {here}; record everything")
    for name, case in CASES.items():
        if part in name:
            if not can_play(case):
                raise SystemExit(f"{name!r} needs Triton's interpreter, which is not at hand")
            for dtype in case.dtypes:
                with tempfile.TemporaryDirectory() as folder:
                    kept.cases[stored.key(name, dtype)] = play(case, dtype, Path(folder))
    known = {stored.key(name, dtype) for name, case in CASES.items() for dtype in case.dtypes}
    kept.cases = {name: kept.cases[name] for name in sorted(known)}
    stored.save(kept)


if __name__ == "__main__":
    record(*sys.argv[1:])
