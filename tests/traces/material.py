"""What the trace tests share: the folder of real logs, and small builders of logs and traces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from limbeck.traces.errors import ErrorSignal, mark_error
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.schema import Message, ToolCall, Trace

EXAMPLES = Path(__file__).resolve().parents[2] / "limbeck" / "traces" / "examples"


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


def say(role: str, content: str = "", *calls: ToolCall, **fields: Any) -> Message:
    return Message(role=role, content=content, tool_calls=list(calls), **fields)  # type: ignore[arg-type]


def call(call_id: str = "c1", name: str = "look", **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def answer(made: ToolCall, content: str, failed: bool = False, tools: tuple[dict[str, Any], ...] = ()) -> Message:
    message = Message(role="tool", content=content, tool_call_id=made.id, name=made.name)
    return mark_error(message, ErrorSignal("flag"), call=made, tools=tools) if failed else message
