"""Python's garbage collector while a run starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Modules, vocabularies and their tables are millions of small objects without a cycle among them; looking through
    them again and again takes up to a third of the time in which they are made. Inside, the collector looks rarely."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
