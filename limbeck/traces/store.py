"""A small cache of JSON values on disk, for answers that cost money or time."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


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
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(value, out, ensure_ascii=False)
        os.replace(name, path)
