"""OpenTelemetry spans of generative AI: the messages that a request carried, and the answer.

Read are OTLP exports (``{"resourceSpans": [...]}``) and files with a span per line. A span's messages are its
attributes ``gen_ai.input.messages``, ``gen_ai.output.messages`` and ``gen_ai.system_instructions``, as values or as
JSON text, or the older ``gen_ai.prompt.N.*`` and ``gen_ai.completion.N.*``. An agent sends its growing conversation
again and again: a span whose messages begin those of another one of the same trace is counted and left out.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from limbeck.traces.errors import detect_prefix
from limbeck.traces.readers.base import (
    Builder,
    Reader,
    ReadLog,
    Record,
    Totals,
    as_dict,
    as_dicts,
    as_text,
    characters,
    openai_tools,
    parse_arguments,
    plain_text,
)
from limbeck.traces.schema import Role, ToolCall, Trace, describe_validation
from limbeck.utils.files import content_hash

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user"}
_THOUGHTS = ("reasoning", "thinking")
_INDEXED = re.compile(r"gen_ai\.(prompt|completion)\.(\d{1,6})\.(.+)")
_INDEXED_CALL = re.compile(r"tool_calls\.(\d{1,4})\.(id|name|arguments)")

Part = dict[str, Any]
Spoken = tuple[str, list[Part]]
"""A role and the parts of a message."""


class OpenTelemetryReader(Reader):
    """Spans; those of one conversation are one trace."""

    name = "otel"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """An export, or a span with attributes of generative AI."""
        return bool(as_dicts(data.get("resourceSpans"))) or any(key.startswith("gen_ai.") for key in _attributes(data))

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per conversation that no other span of its trace continues."""
        by_trace: dict[str, list[tuple[int, dict[str, Any], list[Spoken]]]] = defaultdict(list)
        for record in records:
            for number, span in enumerate(_spans(record.data)):
                name = _trace_id(span) or f"{log.stem}:{record.line}.{number}"
                if spoken := _spoken(span):
                    by_trace[name].append((record.line, span, spoken))
                else:
                    log.skip("event_span", record.line, str(span.get("name")))
        for name, spans in by_trace.items():
            yield from _longest(name, spans, log)

    def totals(self, record: Record) -> Totals:
        return sum((_totals(_spoken(span)) for span in _spans(record.data)), Totals())


# -- spans -------------------------------------------------------------------------------------------------------------


def _spans(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "resourceSpans" not in data:
        return [dict(data)]
    return [
        span
        for resource in as_dicts(data.get("resourceSpans"))
        for key in ("scopeSpans", "instrumentationLibrarySpans")
        for scope in as_dicts(resource.get(key))
        for span in as_dicts(scope.get("spans"))
    ]


def _trace_id(span: Mapping[str, Any]) -> str | None:
    conversation = as_text(_attributes(span).get("gen_ai.conversation.id"))
    context = as_dict(span.get("context"))
    return (
        conversation
        or as_text(span.get("traceId"))
        or as_text(span.get("trace_id"))
        or as_text(context.get("trace_id"))
    )


def _attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    attributes = span.get("attributes")
    if isinstance(attributes, list):
        return {str(item.get("key")): _value(item.get("value")) for item in as_dicts(attributes)}
    return as_dict(attributes)


def _value(value: Any) -> Any:
    """A value of OTLP's JSON, which names its type."""
    wrapped = as_dict(value)
    if "arrayValue" in wrapped:
        return [_value(item) for item in as_dicts(as_dict(wrapped["arrayValue"]).get("values"))]
    if "kvlistValue" in wrapped:
        entries = as_dicts(as_dict(wrapped["kvlistValue"]).get("values"))
        return {str(entry.get("key")): _value(entry.get("value")) for entry in entries}
    return next(iter(wrapped.values()), None)


def _structured(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _spoken(span: Mapping[str, Any]) -> list[Spoken]:
    """The conversation of a span, its answer included."""
    attributes = _attributes(span)
    spoken: list[Spoken] = []
    system = _structured(attributes.get("gen_ai.system_instructions"))
    if system:
        spoken.append(("system", _parts(system)))
    for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
        for message in as_dicts(_structured(attributes.get(key))):
            spoken.append((str(message.get("role")), _parts(message.get("parts", message.get("content")))))
    return spoken or _indexed(attributes)


def _parts(value: Any) -> list[Part]:
    if isinstance(value, str):
        return [{"type": "text", "content": value}]
    return as_dicts(value)


def _indexed(attributes: Mapping[str, Any]) -> list[Spoken]:
    """The older form, an attribute per field of a message."""
    fields: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for key, value in attributes.items():
        if match := _INDEXED.fullmatch(key):
            fields[int(match[1] == "completion"), int(match[2])][match[3]] = value
    spoken: list[Spoken] = []
    for _, message in sorted(fields.items()):
        role, content = str(message.get("role", "assistant")), message.get("content")
        text = (
            content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
        )
        if role == "tool":
            spoken.append((role, [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}]))
            continue
        calls: dict[int, Part] = defaultdict(lambda: {"type": "tool_call"})
        for key, value in message.items():
            if match := _INDEXED_CALL.fullmatch(key):
                calls[int(match[1])][match[2]] = value
        spoken.append((role, [{"type": "text", "content": text}, *(calls[i] for i in sorted(calls))]))
    return spoken


# -- conversations -----------------------------------------------------------------------------------------------------


def _longest(name: str, spans: list[tuple[int, dict[str, Any], list[Spoken]]], log: ReadLog) -> Iterator[Trace]:
    beginnings: set[str] = set()
    kept = []
    for line, span, spoken in sorted(spans, key=lambda entry: -len(entry[2])):
        hashes: list[str] = []
        for role, parts in spoken:
            hashes.append(content_hash([hashes[-1] if hashes else "", role, parts]))
        if hashes[-1] in beginnings:
            log.skip("continued_span", line, str(span.get("name")), totals=_totals(spoken))
            continue
        beginnings.update(hashes)
        kept.append((line, span, spoken))
    for number, (line, span, spoken) in enumerate(sorted(kept, key=lambda entry: entry[0])):
        before = log.skipped_totals
        try:
            trace = _trace(name if number == 0 else f"{name}#{number + 1}", line, span, spoken, log)
        except ValidationError as error:
            log.skipped_totals = before
            log.skip("invalid_trace", line, describe_validation(error), totals=_totals(spoken))
            continue
        if any(message.role == "assistant" for message in trace.messages):
            yield trace
        else:
            log.skipped_totals = before
            log.skip("no_assistant_message", line, totals=_totals(spoken))


def _trace(name: str, line: int, span: Mapping[str, Any], spoken: list[Spoken], log: ReadLog) -> Trace:
    tools = openai_tools(_structured(_attributes(span).get("gen_ai.tool.definitions")))
    builder = Builder(log, line, tools)
    for role, parts in spoken:
        _add(builder, role, parts)
    return builder.trace(name)


def _shown(part: Part) -> str:
    return plain_text(part.get("response", part.get("result")))


def _totals(spoken: list[Spoken]) -> Totals:
    totals = Totals()
    for _, parts in spoken:
        for part in parts:
            if part.get("type") == "tool_call":
                totals += Totals(calls=1)
            elif part.get("type") == "tool_call_response":
                totals += Totals(results=1, characters=characters(_shown(part)))
            else:
                totals += Totals(characters=characters(as_text(part.get("content")) or as_text(part.get("text"))))
    return totals


def _add(builder: Builder, role: str, parts: list[Part]) -> None:
    if role not in _ROLES and role not in ("assistant", "tool"):
        builder.skip("unknown_role", f"role {role!r}", _totals([(role, parts)]))
        return
    for part in parts:
        kind, text = part.get("type"), as_text(part.get("content")) or as_text(part.get("text")) or ""
        if kind == "tool_call":
            call_id, name = as_text(part.get("id")), as_text(part.get("name"))
            if role != "assistant" or name is None:
                builder.skip("unusable_call", f"id {call_id!r}, name {name!r}", Totals(calls=1))
                continue
            call_id = call_id or f"call_{len(builder.messages)}_{name}"
            builder.assistant(calls=[ToolCall(id=call_id, name=name, arguments=parse_arguments(part.get("arguments")))])
        elif kind == "tool_call_response":
            output = _shown(part)
            builder.result(as_text(part.get("id")), output, signal=detect_prefix(output))
        elif role == "assistant":
            thought = kind in _THOUGHTS
            builder.assistant("" if thought else text, reasoning=text if thought else None)
        elif role == "tool":
            builder.skip("text_by_another_role", role, Totals(characters=characters(text)))
        else:
            builder.say(_ROLES[role], text)
        if not text and kind not in ("tool_call", "tool_call_response", "text", *_THOUGHTS):
            builder.skip("non_text_part", str(kind))
