"""Parts that all readers share: JSON records with their lines, counts of what is left out, lenient field access.

A log is foreign data. Nothing in it may stop a run: a record that cannot be used is counted by reason, its file and
line are kept for the report, and reading goes on.
"""

from __future__ import annotations

import json
import logging
import math
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError

from limbeck.errors import TraceError, one_line
from limbeck.traces.errors import ErrorSignal, mark_error
from limbeck.traces.redact import redact_text
from limbeck.traces.schema import Message, Origin, Role, ToolCall, Trace, describe_validation
from limbeck.utils.jsonl import MAX_BYTES, STDIN, parse, read_records, replace_surrogates

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


PartsT = TypeVar("PartsT", bound=Sequence[Any])


def present(parts: PartsT, record: Record, what: str = "messages") -> PartsT:
    """The parts that a record was found to have; ``SkipRecord`` where there are none."""
    if not parts:
        raise SkipRecord(f"no_{what}", f"keys {sorted(record.data)[:6]}")
    return parts


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
        """Totals of messages as a reader made them."""
        listed = list(messages)
        return cls(
            calls=sum(len(message.tool_calls) for message in listed),
            results=sum(message.role == "tool" for message in listed),
            characters=sum(characters(message.content, message.reasoning) for message in listed),
        )


def characters(*texts: str | None) -> int:
    """Characters other than white space, which readers may add or take away where they join texts."""
    return sum(len(part) for text in texts if text for part in text.split())


def unnamed(path: Path, line: int | None) -> str:
    """Stands for the id of a trace that its log does not name; ``read_traces`` replaces it by one of the content."""
    return f"{path.stem}:{line}"


@dataclass
class ReadLog:
    """Skipped parts of logs, counted by reason, with the first places; shared by all files of one run.

    Attributes:
        skipped: Reason -> how many lines, events, messages or traces were left out.
        places: ``file:line: reason (detail)`` of the first ``max_places`` of them.
        suspected: Extended detector -> results it would mark as failed while only the standard detectors are on.
        versions: Versions of the writing program that no reader has been checked against.
        path, format: The file being read and its format.
        detectors: Which signs of failure count in it.
        skipped_totals: What the skipped parts of that file held.
        events: Ids of events that the files before it had.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)
    suspected: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    max_places: int = 50
    path: Path = Path("-")
    format: str = ""
    detectors: Detectors = "standard"
    skipped_totals: Totals = Totals()
    events: set[str] = field(default_factory=set)

    def of_file(self, path: Path, format: str = "", detectors: Detectors = "standard") -> ReadLog:
        """This log while one file is read; all counts are shared."""
        return replace(self, path=path, format=format, detectors=detectors, skipped_totals=Totals())

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    def skip(
        self, reason: str, line: int | None = None, detail: str = "", count: int = 1, totals: Totals | None = None
    ) -> None:
        """Count ``count`` things left out for ``reason``; ``totals``: what they held."""
        self.skipped[reason] += count
        self.skipped_totals += totals or Totals()
        if len(self.places) < self.max_places:
            location = f"{self.path.name}:{line}" if line is not None else self.path.name
            # a detail may be an id or a line of the log, and places are printed and stored
            self.places.append(f"{location}: {reason}" + (f" ({redact_text(detail)})" if detail else ""))
            logger.debug("skipped %s", self.places[-1])

    def unnamed(self, line: int | None) -> str:
        """The id of a trace that the log does not name."""
        return unnamed(self.path, line)

    def origin(self, line: int | None) -> Origin:
        """Where a trace that starts at ``line`` was read."""
        return Origin(format=self.format, file=self.path.name, line=line)


class Reader(ABC):
    """A log format. To add one: a file in ``readers/`` with a fixture, and a line in ``READERS``."""

    name: ClassVar[str]
    """Value of ``--format``."""
    general: ClassVar[bool] = False
    """Gives way to a reader that recognises more of a record."""

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
        """Count of what a record holds, made without ``read``. Of every file, this is what its traces hold and what
        ``read`` left out, or ``read_traces`` refuses it: a log of another format must not be read with half of it
        lost."""


class RecordReader(Reader):
    """A format in which every record is a whole trace."""

    @abstractmethod
    def convert(self, record: Record, log: ReadLog) -> Trace:
        """The trace; ``SkipRecord`` or pydantic's ``ValidationError`` where the record holds none."""

    def trace_totals(self, record: Record) -> Totals:
        """Totals of a record as ``convert`` gets it, for formats whose ``read`` takes the file's records apart."""
        return self.totals(record)

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per record; records that cannot be used are counted."""
        for record in records:
            before = log.skipped_totals
            try:
                trace = self.convert(record, log)
                if not any(message.role == "assistant" for message in trace.messages):
                    raise SkipRecord("no_assistant_message")
            except (SkipRecord, ValidationError) as error:
                log.skipped_totals = before  # parts of a record that is left out whole are not counted twice
                if isinstance(error, SkipRecord):
                    log.skip(error.reason, record.line, error.detail, totals=self.trace_totals(record))
                else:
                    detail = describe_validation(error)
                    log.skip("invalid_trace", record.line, detail, totals=self.trace_totals(record))
            else:
                yield trace


class Builder:
    """The messages of one trace, added in order.

    What a log says in several pieces (reasoning, text, calls) becomes one assistant message, as long as nobody else
    speaks in between. Whatever cannot be placed is counted in the log with its totals.
    """

    def __init__(self, log: ReadLog, line: int, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.messages: list[Message] = []
        self.tools = list(tools)
        self._log, self._line = log, line
        self._calls: dict[str, ToolCall] = {}
        self._open: list[str] = []

    def say(self, role: Role, text: str, name: str | None = None) -> None:
        """A message of the system or the user; an empty one is left out."""
        if text.strip():
            self.messages.append(Message(role=role, content=text, name=name))

    def assistant(
        self, text: str = "", *, reasoning: str | None = None, calls: Sequence[ToolCall] = (), **fields: Any
    ) -> None:
        """A piece of an assistant message; ``fields`` are further ones of ``Message`` and start a message."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or fields:
            last = Message(role="assistant", **fields)
            self.messages.append(last)
        self.messages[-1] = last.model_copy(
            update={
                "content": _joined(last.content, text),
                "reasoning": _joined(last.reasoning or "", reasoning or "") or None,
                "tool_calls": [*last.tool_calls, *calls],
            }
        )
        for call in calls:
            self._calls[call.id] = call
            self._open.append(call.id)

    def result(
        self, call_id: str | None, text: str, *, name: str | None = None, signal: ErrorSignal | None = None
    ) -> None:
        """The result of a call; without an id, of the first one of that name that has none yet."""
        if call_id is None:
            waiting = (i for i in self._open if name is None or self._calls[i].name == name)
            call_id = next(waiting, None)
        call = self._calls.get(call_id or "")
        if call is None or call_id is None:
            lost = Totals(results=1, characters=characters(text))
            self._log.skip("result_without_call", self._line, f"call {call_id!r}", totals=lost)
            return
        if call_id in self._open:
            self._open.remove(call_id)
        message = Message(role="tool", content=text, tool_call_id=call_id, name=name or call.name)
        self.messages.append(message if signal is None else mark_error(message, signal, call=call, tools=self.tools))

    def skip(self, reason: str, detail: str = "", totals: Totals | None = None) -> None:
        """Count something that is left out."""
        self._log.skip(reason, self._line, detail, totals=totals)

    def calls(self, items: Any, *, id_key: str = "id", name_key: str = "name") -> list[ToolCall]:
        """Calls of a list of objects with ``arguments``; those without an id or a name are counted."""
        calls = []
        for item in as_dicts(items):
            call_id, name = as_text(item.get(id_key)), as_text(item.get(name_key))
            if call_id is None or name is None:
                self.skip("unusable_call", f"id {call_id!r}, name {name!r}", Totals(calls=1))
            else:
                calls.append(ToolCall(id=call_id, name=name, arguments=parse_arguments(item.get("arguments"))))
        return calls

    def trace(self, name: str | None = None, **fields: Any) -> Trace:
        """Trace of what was added; one without a ``name`` is named by its place. ``fields``: others of ``Trace``."""
        return Trace(
            id=name or self._log.unnamed(self._line),
            origin=self._log.origin(self._line),
            tools=self.tools,
            messages=self.messages,
            **fields,
        )

    def text(self, content: Any) -> str:
        """``content_text`` of a field of this trace."""
        return content_text(content, self._log, self._line)


def _joined(before: str, after: str) -> str:
    return f"{before}\n\n{after}" if before.strip() and after.strip() else after if after.strip() else before


def iter_records(path: Path, log: ReadLog) -> Iterator[Record]:
    """Stream the JSON objects of a file: one per line, or the elements of a file that is a single JSON document."""
    log = log.of_file(path)
    if str(path) != STDIN and not path.is_file():
        raise TraceError(f"there is no trace file {str(path)!r}: give an existing .jsonl, .json or .traj file")

    if path.suffix.lower() == ".eval":
        yield from _archived(path, log)
        return

    def malformed(line: int, why: str) -> None:
        log.skip("malformed_line", line, why)

    for line, value in read_records(path, bad=malformed, document=True):
        if is_conversation(value):
            yield Record(line, {"messages": value})
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield Record(line, item)
            else:
                log.skip("not_an_object", line, type(item).__name__)


def _archived(path: Path, log: ReadLog) -> Iterator[Record]:
    """The samples of an Inspect archive, numbered from 1; larger ones than a line may be are counted and left out."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if re.fullmatch(r"samples/[^/]+\.json", name))
            for number, name in enumerate(names, 1):
                if archive.getinfo(name).file_size > MAX_BYTES:
                    log.skip("malformed_line", number, f"{name} is longer than {MAX_BYTES >> 20} MiB")
                    continue
                try:
                    value = parse(archive.read(name))
                except (ValueError, RecursionError) as error:
                    log.skip("malformed_line", number, f"{name}: {one_line(error, 120)}")
                    continue
                if isinstance(value, dict):
                    yield Record(number, value)
                else:
                    log.skip("not_an_object", number, type(value).__name__)
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, OSError) as error:
        raise TraceError(f"{path.name} cannot be unpacked ({one_line(error)}); give it as .json") from error


def gather_events(records: Iterable[Record], is_event: Callable[[Mapping[str, Any]], bool]) -> Iterator[Record]:
    """Records as they are; events that lie loose among them come last, as the history of one run."""
    loose: list[dict[str, Any]] = []
    first_line = 1
    for record in records:
        if is_event(record.data):
            first_line = record.line if not loose else first_line
            loose.append(record.data)
        else:
            yield record
    if loose:
        yield Record(first_line, {"history": loose})


def is_conversation(value: Any) -> bool:
    """Whether a value is a bare list of messages, which is one trace and not a list of records."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


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
    return "\n".join(text for part in content if (text := _part_text(part)))


def _part_text(part: Any) -> str | None:
    text = part if isinstance(part, str) else as_dict(part).get("text")
    return text if isinstance(text, str) else None


_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_PARTS = ("tool_use", "tool_call", "function_call")
_RESULT_PARTS = ("tool_result", "function_call_output")


def content_totals(content: Any) -> Totals:
    """Text of a content field, and the calls and results among its parts in whatever format has them there."""
    totals = Totals(characters=characters(plain_text(content)))
    for part in as_dicts(content):
        if part.get("type") in _TEXT_PARTS and _part_text(part) is None:  # text, under a key of another format
            totals += Totals(characters=sum(characters(as_text(value)) for key, value in part.items() if key != "type"))
        if part.get("type") in _CALL_PARTS:
            totals += Totals(calls=1)
        elif part.get("type") in _RESULT_PARTS:
            totals += Totals(results=1) + content_totals(part.get("content"))
    return totals


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


def sampled_tokens(data: Mapping[str, Any], key: str) -> tuple[list[int] | None, list[float] | None]:
    """Token ids under ``key`` and their ``logprobs``, as a rollout engine stores them."""
    ids = data.get(key)
    ids = ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None
    logprobs = data.get("logprobs")
    if isinstance(logprobs, dict):
        logprobs = [entry.get("logprob") for entry in as_dicts(logprobs.get("content"))]
    values = [as_number(value) for value in logprobs] if isinstance(logprobs, list) else []
    numbers = [value for value in values if value is not None]
    return ids, (numbers if numbers and len(numbers) == len(values) else None)


def find_call(messages: list[Message], call_id: str | None) -> tuple[int, ToolCall] | None:
    """The nearest earlier call with this id, searching from the end."""
    for index in range(len(messages) - 1, -1, -1):
        for call in messages[index].tool_calls:
            if call.id == call_id:
                return index, call
    return None
