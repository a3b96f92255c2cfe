"""What the trace tests share: shipped and real logs, and reading and writing them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import limbeck
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.schema import Trace

EXAMPLES = Path(limbeck.__file__).parent / "traces" / "examples"


def real_logs(pattern: str) -> list[Path]:
    """The real logs that match, which lie beside the checkout; the test is skipped where that folder is absent."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    files = sorted(folder.glob(pattern))
    if not files:
        pytest.skip(f"no real logs {pattern} beside the checkout")
    return files


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """A JSON-lines file; strings are written as they are."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def read(path: Path, **options: Any) -> tuple[list[Trace], ReadLog]:
    """All traces of a file and the log of reading."""
    log = ReadLog()
    return list(read_traces([path], log=log, **options)), log
