"""What all readers share: JSON records with their lines, counts of what is left out, lenient field access.

A log is foreign data. Nothing in it may stop a run: a record that cannot be used is counted by reason, its file and
line are kept for the report, and reading goes on.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from limbeck.errors import TraceError
from limbeck.traces.schema import Message, Origin, ToolCall, Trace, describe_validation
from limbeck.utils.jsonl import STDIN, read_records, replace_surrogates

logger = logging.getLogger(__name__)

Detectors = Literal["standard", "extended"]


@dataclass(frozen=True)
class Record:
    """One JSON object of a log and the 1-based line where it starts."""

    line: int
    data: dict[str, Any]


class SkipRecord(TraceError):
    """Raised inside a reader: this record cannot be used; ``reason`` is a short countable name."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass
class ReadReport:
    """What reading left out, by reason, with the first places; shared by all files of one run.

    Attributes:
        skipped: Reason -> how many lines, events, messages or traces were left out.
        places: ``file:line: reason (detail)`` of the first ``max_places`` of them.
        suspected: Extended detector -> results it would mark as failed while only the standard detectors are on.
        versions: Versions of the writing program that no reader has been checked against.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)
    suspected: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    max_places: int = 50

    def skip(self, reason: str, *, file: str, line: int | None = None, detail: str = "", count: int = 1) -> None:
        """Count ``count`` things left out for ``reason``."""
        self.skipped[reason] += count
        if len(self.places) < self.max_places:
            place = f"{file}:{line}" if line is not None else file
            self.places.append(f"{place}: {reason}" + (f" ({detail})" if detail else ""))
            logger.debug("skipped %s", self.places[-1])


@dataclass
class ReadContext:
    """One file being read."""

    path: Path
    format: str
    report: ReadReport
    detectors: Detectors = "standard"

    @property
    def stem(self) -> str:
        return self.path.stem

    def skip(self, reason: str, line: int | None = None, detail: str = "", count: int = 1) -> None:
        self.report.skip(reason, file=self.path.name, line=line, detail=detail, count=count)

    def origin(self, line: int | None) -> Origin:
        return Origin(format=self.format, file=self.path.name, line=line)


@dataclass(frozen=True)
class Reader:
    """A log format: how one of its records looks, and how a file's records become traces."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Iterator[Record], ReadContext], Iterator[Trace]]


def iter_records(path: Path, report: ReadReport) -> Iterator[Record]:
    """Stream the JSON objects of a file: one per line, or the elements of a file that is a single JSON document."""
    if str(path) != STDIN and not path.is_file():
        raise TraceError(f"there is no trace file {str(path)!r}: give an existing .jsonl, .json or .traj file")

    def malformed(line: int, why: str) -> None:
        report.skip("malformed_line", file=path.name, line=line, detail=why)

    for line, value in read_records(path, bad=malformed, document=True):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield Record(line, item)
            else:
                report.skip("not_an_object", file=path.name, line=line, detail=type(item).__name__)


def convert_records(
    records: Iterable[Record], context: ReadContext, convert: Callable[[Record, ReadContext], Trace]
) -> Iterator[Trace]:
    """Apply a one-record-one-trace conversion; records that cannot be used are counted."""
    for record in records:
        try:
            trace = convert(record, context)
        except SkipRecord as skip:
            context.skip(skip.reason, record.line, str(skip))
        except ValidationError as error:
            context.skip("invalid_trace", record.line, describe_validation(error))
        else:
            if any(message.role == "assistant" for message in trace.messages):
                yield trace
            else:
                context.skip("no_assistant_message", record.line)


# -- lenient access ----------------------------------------------------------------------------------------------------


def as_dict(value: Any) -> dict[str, Any]:
    """The value where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; anything else is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_text(value: Any) -> str | None:
    """The value where it is a string that is not empty."""
    return value if isinstance(value, str) and value else None


def as_number(value: Any) -> float | None:
    """The value where it is a finite number; booleans count as 0 and 1."""
    if isinstance(value, int | float) and value == value and abs(value) != float("inf"):
        return float(value)
    return None


def content_text(content: Any, context: ReadContext, line: int | None) -> str:
    """The text of a content field: a string, or the text parts of a list of parts; other parts are counted."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else as_text(as_dict(part).get("text"))
        if text is not None:
            texts.append(text)
        else:
            context.skip("non_text_part", line, str(as_dict(part).get("type", type(part).__name__)))
    return "\n".join(texts)


def parse_arguments(value: Any) -> dict[str, Any] | str:
    """Tool-call arguments as an object; the raw string where they are not one."""
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not value.strip():
        return {}
    try:
        parsed = replace_surrogates(json.loads(value))
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def openai_tool_calls(value: Any) -> list[ToolCall]:
    """``tool_calls`` of an OpenAI-style message; a call without an id gets one from its position."""
    calls: list[ToolCall] = []
    for position, item in enumerate(as_dicts(value)):
        function = as_dict(item.get("function")) or item
        name = as_text(function.get("name"))
        if name is None:
            continue
        call_id = as_text(item.get("id")) or f"call_{position}"
        calls.append(ToolCall(id=call_id, name=name, arguments=parse_arguments(function.get("arguments"))))
    return calls


def openai_tools(value: Any) -> list[dict[str, Any]]:
    """Tool schemas in the chat template's form, from ``tools`` or the older ``functions``; a JSON string is parsed."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in as_dicts(value)]


def find_call(messages: list[Message], call_id: str | None) -> tuple[int, ToolCall] | None:
    """The nearest earlier call with this id, searching from the end."""
    for index in range(len(messages) - 1, -1, -1):
        for call in messages[index].tool_calls:
            if call.id == call_id:
                return index, call
    return None
