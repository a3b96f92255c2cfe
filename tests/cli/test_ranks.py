"""How one of several ranks ends: with its exit code, after what it owes, without tearing down the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A finaliser of a module's global runs only while an interpreter is torn down.
_PROGRAM = """
import atexit, sys
from limbeck.cli import main
class Late:
    def __del__(self): print("torn down")
late = Late()
atexit.register(print, "owed")
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["no-such-command"], 2), (["docs", "no-such-page"], 1)]
)
@pytest.mark.parametrize("world", ["1", "2"])
def test_a_rank_ends_with_its_code_and_what_it_owes(arguments: list[str], code: int, world: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env={**os.environ, "WORLD_SIZE": world},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert "owed" in done.stdout
    assert ("torn down" in done.stdout) == (world == "1")
