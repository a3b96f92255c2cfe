"""What all readers share: JSON records with their lines, counts of what is left out, lenient field access.

A log is foreign data. Nothing in it may stop a run: a record that cannot be used is counted by reason, its file and
line are kept for the report, and reading goes on.
"""

from __future__ import annotations

import json
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

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
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Totals:
    """How much there is of what a log must not lose: calls, their results, and characters that are not white space."""

    calls: int = 0
    results: int = 0
    characters: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.calls + other.calls, self.results + other.results, self.characters + other.characters)

    def __sub__(self, other: Totals) -> Totals:
        return Totals(self.calls - other.calls, self.results - other.results, self.characters - other.characters)

    def __str__(self) -> str:
        return f"{self.calls} calls, {self.results} results and {self.characters} characters"

    @classmethod
    def of_messages(cls, messages: Iterable[Message]) -> Totals:
        """Of messages as a reader made them."""
        found = list(messages)
        return cls(
            calls=sum(len(message.tool_calls) for message in found),
            results=sum(message.role == "tool" for message in found),
            characters=sum(characters(message.content, message.reasoning) for message in found),
        )


def characters(*texts: str | None) -> int:
    """Characters other than white space, which readers may add or take away where they join texts."""
    return sum(len(part) for text in texts if text for part in text.split())


@dataclass
class ReadLog:
    """What reading left out, by reason, with the first places; shared by all files of one run.

    Attributes:
        skipped: Reason -> how many lines, events, messages or traces were left out.
        places: ``file:line: reason (detail)`` of the first ``max_places`` of them.
        suspected: Extended detector -> results it would mark as failed while only the standard detectors are on.
        versions: Versions of the writing program that no reader has been checked against.
        path, format: The file being read and its format.
        detectors: Which signs of failure count in it.
        left_out: What was left out of that file on purpose.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)
    suspected: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    max_places: int = 50
    path: Path = Path("-")
    format: str = ""
    detectors: Detectors = "standard"
    left_out: Totals = Totals()

    def of_file(self, path: Path, format: str = "", detectors: Detectors = "standard") -> ReadLog:
        """This log while one file is read; all counts are shared."""
        return replace(self, path=path, format=format, detectors=detectors, left_out=Totals())

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    def skip(
        self, reason: str, line: int | None = None, detail: str = "", count: int = 1, totals: Totals | None = None
    ) -> None:
        """Count ``count`` things left out for ``reason``; ``totals``: what they held."""
        self.skipped[reason] += count
        self.left_out += totals or Totals()
        if len(self.places) < self.max_places:
            place = f"{self.path.name}:{line}" if line is not None else self.path.name
            self.places.append(f"{place}: {reason}" + (f" ({detail})" if detail else ""))
            logger.debug("skipped %s", self.places[-1])

    def origin(self, line: int | None) -> Origin:
        """Where a trace that starts at ``line`` was read."""
        return Origin(format=self.format, file=self.path.name, line=line)


class Reader(ABC):
    """A log format. To add one: a file in ``readers/`` with a fixture, and a line in ``READERS``."""

    name: ClassVar[str]
    """What ``--format`` takes."""
    about: ClassVar[str]
    """The format in one line."""

    @abstractmethod
    def detect(self, data: Mapping[str, Any]) -> bool:
        """Whether an object looks like a record of this format, by its structure alone.

        All readers are asked, in no order, and no two may say yes to a record of either's format: what only one of them
        has (a key, a type of block) is what they look for.
        """

    @abstractmethod
    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """Stream the traces of one file; what is left out is counted in ``log``, with its totals."""

    @abstractmethod
    def totals(self, record: Record) -> Totals:
        """What a record holds, counted without ``read``. Of every file, this is what its traces hold and what ``read``
        left out, or ``read_traces`` refuses it: a log of another format must not be read with half of it lost."""


class RecordReader(Reader):
    """A format in which every record is a whole trace."""

    @abstractmethod
    def convert(self, record: Record, log: ReadLog) -> Trace:
        """The trace; ``SkipRecord`` or pydantic's ``ValidationError`` where the record holds none."""

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per record; records that cannot be used are counted."""
        for record in records:
            before = log.left_out
            try:
                trace = self.convert(record, log)
                if not any(message.role == "assistant" for message in trace.messages):
                    raise SkipRecord("no_assistant_message")
            except (SkipRecord, ValidationError) as error:
                log.left_out = before  # parts of a record that is left out whole are not counted twice
                if isinstance(error, SkipRecord):
                    log.skip(error.reason, record.line, error.detail, totals=self.totals(record))
                else:
                    detail = describe_validation(error)
                    log.skip("invalid_trace", record.line, detail, totals=self.totals(record))
            else:
                yield trace


def iter_records(path: Path, log: ReadLog) -> Iterator[Record]:
    """Stream the JSON objects of a file: one per line, or the elements of a file that is a single JSON document."""
    log = log.of_file(path)
    if str(path) != STDIN and not path.is_file():
        raise TraceError(f"there is no trace file {str(path)!r}: give an existing .jsonl, .json or .traj file")

    def malformed(line: int, why: str) -> None:
        log.skip("malformed_line", line, why)

    for line, value in read_records(path, bad=malformed, document=True):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield Record(line, item)
            else:
                log.skip("not_an_object", line, type(item).__name__)


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
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def content_text(content: Any, log: ReadLog, line: int | None) -> str:
    """The text of a content field: a string, or the text parts of a list of parts; other parts are counted."""
    for part in content if isinstance(content, list) else []:
        if _part_text(part) is None:
            log.skip("non_text_part", line, str(as_dict(part).get("type", type(part).__name__)))
    return plain_text(content)


def plain_text(content: Any) -> str:
    """``content_text`` without counting."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    return "\n".join(text for part in content if (text := _part_text(part)) is not None)


def _part_text(part: Any) -> str | None:
    return part if isinstance(part, str) else as_text(as_dict(part).get("text"))


_CALL_PARTS = ("tool_use", "tool_call", "function_call")
_RESULT_PARTS = ("tool_result", "function_call_output")


def content_totals(content: Any) -> Totals:
    """Text of a content field, and the calls and results among its parts in whatever format has them there."""
    found = Totals(characters=characters(plain_text(content)))
    for part in as_dicts(content):
        if part.get("type") in _CALL_PARTS:
            found += Totals(calls=1)
        elif part.get("type") in _RESULT_PARTS:
            found += Totals(results=1) + content_totals(part.get("content"))
    return found


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


def openai_call_count(value: Any) -> int:
    """How many calls ``openai_tool_calls`` has to find."""
    return sum(as_text((as_dict(item.get("function")) or item).get("name")) is not None for item in as_dicts(value))


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
