"""Gemini CLI: recorded sessions, and conversations as lists of ``contents``.

A session is ``{"sessionId", "messages": [...]}`` with messages of type ``user`` and ``gemini``, the latter with their
``toolCalls``, results included; newer ones hold a message per line. Checkpoints and API logs are lists of
``{"role": "user" | "model", "parts": [...]}``, bare or under ``contents`` or ``history``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal
from limbeck.traces.readers.base import (
    Builder,
    ReadLog,
    Record,
    RecordReader,
    SkipRecord,
    Totals,
    as_dict,
    as_dicts,
    as_text,
    characters,
    plain_text,
)
from limbeck.traces.schema import ToolCall, Trace

_SPEAKERS = ("user", "gemini")
_SESSION_KEYS = ("sessionId", "projectHash")


class GeminiReader(RecordReader):
    """Sessions and lists of contents."""

    name = "gemini"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """A session, one of its messages, or contents."""
        if all(key in data for key in _SESSION_KEYS) or _is_message(data):
            return True
        contents = _contents(data)
        return bool(contents) and isinstance(contents[0].get("parts"), list)

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per object; the messages of a file that has one per line form a session together."""
        yield from super().read(_sessions(records), log)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        messages, contents = _messages(data), _contents(data)
        if not messages and not contents:
            raise SkipRecord("no_messages", f"keys {sorted(data)[:6]}")
        builder = Builder(log, record.line, _tools(data))
        builder.say("system", _system(data))
        for message in messages:
            _add_message(builder, message)
        for content in contents:
            _add_content(builder, content)
        name = as_text(data.get("sessionId"))
        return builder.trace(name)

    def totals(self, record: Record) -> Totals:
        data = record.data
        if _is_message(data):
            return _message_totals(data)
        totals = sum(map(_message_totals, _messages(data)), Totals(characters=characters(_system(data))))
        return sum(map(_content_totals, _contents(data)), totals)


def _is_message(data: Mapping[str, Any]) -> bool:
    return data.get("type") in _SPEAKERS and "content" in data and "id" in data and "uuid" not in data


def _sessions(records: Iterator[Record]) -> Iterator[Record]:
    loose: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    line = 1
    for record in records:
        if _is_message(record.data):
            line = record.line if not loose else line
            loose.append(record.data)
        elif all(key in record.data for key in _SESSION_KEYS) and "messages" not in record.data:
            head = record.data
        else:
            yield record
    if loose:
        yield Record(line, {**head, "messages": loose})


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [message for message in as_dicts(data.get("messages")) if "parts" not in message and "type" in message]


def _contents(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    request = as_dict(data.get("request")) or data
    for key in ("contents", "history", "messages"):
        contents = [content for content in as_dicts(request.get(key)) if "parts" in content]
        if contents:
            return contents
    return []


def _system(data: Mapping[str, Any]) -> str:
    request = as_dict(data.get("request")) or data
    instruction = request.get("systemInstruction", request.get("system_instruction"))
    return plain_text(as_dict(instruction).get("parts") if isinstance(instruction, dict) else instruction)


def _tools(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    request = as_dict(data.get("request")) or data
    declared = [
        declaration
        for tool in as_dicts(request.get("tools"))
        for key in ("functionDeclarations", "function_declarations")
        for declaration in as_dicts(tool.get(key))
    ]
    return [{"type": "function", "function": declaration} for declaration in declared]


# -- sessions ----------------------------------------------------------------------------------------------------------


def _message_totals(message: Mapping[str, Any]) -> Totals:
    if message.get("type") not in _SPEAKERS:
        return Totals()
    totals = Totals(characters=characters(plain_text(message.get("content")), _thoughts(message)))
    for call in as_dicts(message.get("toolCalls")):
        output = _shown(call)
        totals += Totals(1, int(output is not None), characters(output))
    return totals


def _thoughts(message: Mapping[str, Any]) -> str:
    thoughts = as_dicts(message.get("thoughts"))
    return "\n\n".join(
        ": ".join(text for key in ("subject", "description") if (text := as_text(thought.get(key))))
        for thought in thoughts
    )


def _add_message(builder: Builder, message: Mapping[str, Any]) -> None:
    kind = message.get("type")
    if kind not in _SPEAKERS:
        builder.skip(f"event_{kind}")
        return
    text = builder.text(message.get("content"))
    if kind == "user":
        builder.say("user", text)
        if thoughts := _thoughts(message):
            builder.skip("thinking_by_another_role", totals=Totals(characters=characters(thoughts)))
    else:
        builder.assistant(text, reasoning=_thoughts(message), weight=1.0)
    calls = as_dicts(message.get("toolCalls"))
    usable = []
    for call in calls:
        name, call_id = as_text(call.get("name")), as_text(call.get("id"))
        if kind == "gemini" and name and call_id:
            usable.append(call)
            builder.assistant(calls=[ToolCall(id=call_id, name=name, arguments=as_dict(call.get("args")))])
        else:
            builder.skip(
                "unusable_call",
                f"id {call_id!r}, name {name!r}",
                _message_totals({**message, "content": "", "thoughts": [], "toolCalls": [call]}),
            )
    for call in usable:
        output = _shown(call)
        if output is not None:
            builder.result(call["id"], output, signal=_failure(call))


def _shown(call: Mapping[str, Any]) -> str | None:
    """The result of a recorded call, None where it has none."""
    result = call.get("result")
    if result is None:
        return None
    parts = result if isinstance(result, list) else [result]
    return "\n".join(_response_text(part) for part in parts)


def _response_text(part: Any) -> str:
    response = as_dict(as_dict(part).get("functionResponse")).get("response")
    if response is None:
        return plain_text([part])
    values = [
        response[key] for key in ("output", "error", "content") if isinstance(response, dict) and response.get(key)
    ]
    return plain_text(values[0]) if values else json.dumps(response, ensure_ascii=False)


def _failure(call: Mapping[str, Any]) -> ErrorSignal | None:
    responses = [
        as_dict(as_dict(part).get("functionResponse")).get("response") for part in as_dicts(call.get("result"))
    ]
    if call.get("status") == "cancelled":
        return ErrorSignal("flag", {"status": "cancelled"})
    failed = call.get("status") == "error" or any(as_dict(response).get("error") for response in responses)
    return ErrorSignal("flag") if failed else None


# -- contents ----------------------------------------------------------------------------------------------------------


def _content_totals(content: Mapping[str, Any]) -> Totals:
    totals = Totals()
    for part in as_dicts(content.get("parts")):
        if "functionCall" in part:
            totals += Totals(calls=1)
        elif "functionResponse" in part:
            totals += Totals(results=1, characters=characters(_response_text(part)))
        else:
            totals += Totals(characters=characters(as_text(part.get("text"))))
    return totals


def _add_content(builder: Builder, content: Mapping[str, Any]) -> None:
    role = content.get("role", "user")
    if role not in ("user", "model", "function", "system"):
        builder.skip("unknown_role", f"role {role!r}", _content_totals(content))
        return
    texts: list[Any] = []
    for part in as_dicts(content.get("parts")):
        call, response = as_dict(part.get("functionCall")), as_dict(part.get("functionResponse"))
        if "functionCall" in part:
            name = as_text(call.get("name"))
            if name is None or role != "model":
                builder.skip("unusable_call", f"name {name!r} by {role}", Totals(calls=1))
                continue
            call_id = as_text(call.get("id")) or f"call_{len(builder.messages)}_{name}"
            builder.assistant(calls=[ToolCall(id=call_id, name=name, arguments=as_dict(call.get("args")))])
        elif "functionResponse" in part:
            failed = ErrorSignal("flag") if as_dict(response.get("response")).get("error") else None
            output = _response_text(part)
            builder.result(as_text(response.get("id")), output, name=as_text(response.get("name")), signal=failed)
        elif role == "model" and part.get("thought") is True:
            builder.assistant(reasoning=as_text(part.get("text")))
        elif role == "model":
            builder.assistant(builder.text([part]))
        else:
            texts.append(part)
    builder.say("system" if role == "system" else "user", builder.text(texts))
