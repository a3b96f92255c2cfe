"""Files that traces leave behind: line files written whole or not at all, and a cache of answers that cost money."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limbeck.utils.errors import TraceError
from limbeck.utils.paths import write_atomic


@contextmanager
def line_writer(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes lines to ``path``, which appears only when all are written; None writes nothing.

    The output may be one of the inputs still being read.
    """
    if path is None:
        yield lambda line: None
        return
    if path.is_dir() or not path.parent.is_dir():
        raise TraceError(f"cannot write {str(path)!r}: give a file in an existing folder")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as out:

            def write(line: str) -> None:
                out.write(line + "\n")

            yield write
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def fingerprint(value: Any) -> str:
    """A sha256 of a JSON value; equal values have equal fingerprints whatever their key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class JsonCache:
    """One JSON file per key, written atomically, so an interrupted run never leaves half an answer.

    Attributes:
        damaged: Entries that could not be read and were treated as absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged = 0

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> dict[str, Any] | None:
        """The stored object; None where there is none."""
        try:
            value = json.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            self.damaged += 1
            return None
        if not isinstance(value, dict):
            self.damaged += 1
            return None
        return value

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store an object under a key made by ``fingerprint``."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(value, ensure_ascii=True))
