"""Anthropic Messages: a request's ``system``, ``tools`` and ``messages``, with the response where it was logged.

Recognised objects: ``{"messages": [...], "system": ..., "tools": [...]}``, the same under ``request`` or ``body``
with the answer under ``response`` (each with a ``body`` where an HTTP exchange was recorded), and a bare list of
messages. Calls are ``tool_use`` blocks of the assistant, results are ``tool_result`` blocks of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal
from limbeck.traces.readers.base import (
    Builder,
    ReadLog,
    Record,
    RecordReader,
    Totals,
    as_dict,
    as_dicts,
    as_number,
    as_text,
    characters,
    plain_text,
    present,
)
from limbeck.traces.schema import ToolCall, Trace

_OWN_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use")
_ROLES = ("system", "user", "assistant")


class AnthropicReader(RecordReader):
    """Conversations in blocks; one object is one trace."""

    name = "anthropic"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Messages with blocks that only this format has, or with the system prompt beside them."""
        body, messages = _body(data), _messages(data)
        if not messages or "role" not in messages[0]:
            return False
        blocks = (block for message in messages for block in as_dicts(message.get("content")))
        return any(block.get("type") in _OWN_BLOCKS for block in blocks) or bool(plain_text(body.get("system")))

    def convert(self, record: Record, log: ReadLog) -> Trace:
        body = _body(record.data)
        present(_messages(record.data), record)
        tools = [_tool(tool) for tool in as_dicts(body.get("tools")) if as_text(tool.get("name"))]
        builder = Builder(log, record.line, tools)
        builder.say("system", builder.text(body.get("system")))
        for message in _messages(record.data):
            _add(builder, message)
        data = record.data
        name = as_text(data.get("id")) or as_text(data.get("session_id")) or as_text(data.get("trace_id"))
        return Trace(
            id=name or log.unnamed(record.line),
            group_id=as_text(data.get("group_id")),
            origin=log.origin(record.line),
            tools=tools,
            messages=builder.messages,
            final_reward=as_number(data.get("reward")),
        )

    def totals(self, record: Record) -> Totals:
        system = Totals(characters=characters(plain_text(_body(record.data).get("system"))))
        return sum(map(_totals, _messages(record.data)), system)


def _body(data: Mapping[str, Any]) -> Mapping[str, Any]:
    request = as_dict(data.get("request"))
    places = (request, as_dict(request.get("body")), as_dict(data.get("body")))
    return next((body for body in places if "messages" in body), data)


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    response = as_dict(data.get("response"))
    response = as_dict(response.get("body")) or response
    answer = [response] if response.get("role") == "assistant" and response.get("content") else []
    return [*as_dicts(_body(data).get("messages")), *answer]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the chat template's form."""
    if "function" in tool:
        return dict(tool)
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": as_dict(tool.get("input_schema"))}}


def _totals(message: Mapping[str, Any]) -> Totals:
    """Totals of one message, whoever speaks."""
    content = message.get("content")
    if not isinstance(content, list):
        return Totals(characters=characters(plain_text(content)))
    totals = Totals()
    for block in content:
        kind = as_dict(block).get("type")
        if kind == "tool_use":
            totals += Totals(calls=1)
        elif kind == "tool_result":
            totals += Totals(results=1, characters=characters(plain_text(block.get("content"))))
        elif kind == "thinking":
            totals += Totals(characters=characters(as_text(block.get("thinking"))))
        else:
            totals += Totals(characters=characters(plain_text([block])))
    return totals


def _add(builder: Builder, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        builder.skip("unknown_role", f"role {role!r}", _totals(message))
        return
    blocks = as_dicts(content)
    if not isinstance(content, list):
        blocks = [{"type": "text", "text": builder.text(content)}]
    elif len(blocks) < len(content):
        blocks = [
            block if isinstance(block, dict) else {"type": "text", "text": plain_text([block])} for block in content
        ]
    texts: list[Any] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            _add_call(builder, block, role)
        elif kind == "tool_result":
            _add_result(builder, block)
        elif kind == "thinking" and role == "assistant":
            builder.assistant(reasoning=as_text(block.get("thinking")))
        elif kind == "thinking":
            builder.skip("thinking_by_another_role", str(role), _totals({"content": [block]}))
        elif role == "assistant":
            builder.assistant(builder.text([block]))
        else:
            texts.append(block)
    if role != "assistant":
        builder.say("system" if role == "system" else "user", builder.text(texts))


def _add_call(builder: Builder, block: Mapping[str, Any], role: Any) -> None:
    call_id, name = as_text(block.get("id")), as_text(block.get("name"))
    if role != "assistant" or call_id is None or name is None:
        builder.skip("unusable_call", f"id {call_id!r}, name {name!r}", Totals(calls=1))
        return
    builder.assistant(calls=[ToolCall(id=call_id, name=name, arguments=as_dict(block.get("input")))])


def _add_result(builder: Builder, block: Mapping[str, Any]) -> None:
    failed = ErrorSignal("flag") if block.get("is_error") is True else None
    # an id that is not there must not fall back to some other call
    builder.result(as_text(block.get("tool_use_id")) or "", builder.text(block.get("content")), signal=failed)
