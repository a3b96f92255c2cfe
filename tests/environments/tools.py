"""Tools of every kind of hostility, as a user could write them."""

from __future__ import annotations

import os
import sys
import time


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    print("printed, which must not mix with replies")
    return a + b


def fail(why: str) -> str:
    """Raise an error.

    Args:
        why: What it says.
    """
    raise ValueError(why)


def leave() -> str:
    """Leave by an exit that can be caught."""
    sys.exit(3)


def die() -> str:
    """End the process."""
    os._exit(3)


def hang() -> str:
    """Never come back."""
    while True:
        time.sleep(60)


def flood() -> str:
    """Say too much."""
    return "x" * (8 << 20)


def hoard() -> str:
    """Take too much memory."""
    return str(len(bytearray(16 << 30)))


def _hidden() -> None:
    pass
