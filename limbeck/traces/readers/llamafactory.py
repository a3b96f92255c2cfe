"""LLaMA-Factory's messages of version 1: every content is a list of parts with a ``type`` and a ``value``.

Calls are parts of their own (``tool_call``, its value a JSON object), and results carry no ids: they answer the calls
of the message before them in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import detect_prefix
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
    openai_tools,
    parse_arguments,
    present,
)
from limbeck.traces.schema import ToolCall, Trace


class LLaMAFactoryReader(RecordReader):
    """Messages of typed values; one object is one trace."""

    name = "llamafactory"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Messages whose parts have a ``value``."""
        messages = as_dicts(data.get("messages"))
        parts = as_dicts(messages[0].get("content")) if messages else []
        return bool(parts) and "type" in parts[0] and "value" in parts[0]

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        messages = present(as_dicts(data.get("messages")), record)
        builder = Builder(log, record.line, openai_tools(data.get("tools")))
        for number, message in enumerate(messages):
            _add(builder, message, number)
        return builder.trace(as_text(data.get("id")), final_reward=as_number(data.get("reward")))

    def totals(self, record: Record) -> Totals:
        return sum(map(_totals, as_dicts(record.data.get("messages"))), Totals())


def _values(message: Mapping[str, Any], kind: str) -> list[str]:
    parts = as_dicts(message.get("content"))
    return [text for part in parts if part.get("type") == kind and (text := as_text(part.get("value")))]


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    parsed = (as_dict(parse_arguments(value)) for value in _values(message, "tool_call"))
    return [call for call in parsed if as_text(call.get("name"))]


def _totals(message: Mapping[str, Any]) -> Totals:
    said = characters(*_values(message, "text"), *_values(message, "reasoning"))
    calls = len(_values(message, "tool_call"))
    return Totals(calls=calls, results=int(message.get("role") == "tool"), characters=said)


def _add(builder: Builder, message: Mapping[str, Any], number: int) -> None:
    role, text = message.get("role"), "\n".join(_values(message, "text"))
    for part in as_dicts(message.get("content")):
        if part.get("type") not in ("text", "reasoning", "tool_call"):
            builder.skip("non_text_part", str(part.get("type")))
    if role == "assistant":
        calls = _calls(message)
        if unusable := len(_values(message, "tool_call")) - len(calls):
            builder.skip("unusable_call", f"message {number}", Totals(calls=unusable))
        weight = as_number(message.get("loss_weight"))
        builder.assistant(
            text,
            reasoning="\n".join(_values(message, "reasoning")),
            calls=[
                ToolCall(id=f"turn{number}_{i}", name=call["name"], arguments=parse_arguments(call.get("arguments")))
                for i, call in enumerate(calls)
            ],
            weight=1.0 if weight is None else weight,
        )
    elif role == "tool":
        builder.result(None, text, signal=detect_prefix(text))
    elif role in ("system", "user"):
        builder.say("system" if role == "system" else "user", text)
    else:
        builder.skip("unknown_role", f"role {role!r}", _totals(message))
