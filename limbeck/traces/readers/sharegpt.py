"""ShareGPT conversations: ``{"conversations": [{"from", "value"}, ...]}``, with tool calls where there are any.

A call is a turn of its own (``function_call``, its value a JSON object), or ``<tool_call>`` text inside the answer;
the latter stays in the text and is kept beside it. ``system`` and ``tools`` may stand beside the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from limbeck.data.forms import SHAREGPT_ROLES
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
    plain_text,
    present,
)
from limbeck.traces.schema import ToolCall, Trace

_WRITTEN_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ShareGPTReader(RecordReader):
    """Conversations of turns; one object is one trace."""

    name = "sharegpt"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Turns with ``from`` and ``value``."""
        turns = as_dicts(data.get("conversations"))
        return bool(turns) and "from" in turns[0] and "value" in turns[0]

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        turns = present(as_dicts(data.get("conversations")), record)
        builder = Builder(log, record.line, openai_tools(data.get("tools")))
        builder.say("system", as_text(data.get("system")) or "")
        for number, turn in enumerate(turns):
            _add(builder, turn, number)
        return builder.trace(as_text(data.get("id")), final_reward=as_number(data.get("reward")))

    def totals(self, record: Record) -> Totals:
        system = Totals(characters=characters(as_text(record.data.get("system"))))
        return sum(map(_totals, as_dicts(record.data.get("conversations"))), system)


def _role(turn: Mapping[str, Any]) -> str | None:
    name = turn.get("from")
    return SHAREGPT_ROLES.get(name) if isinstance(name, str) else None


def _totals(turn: Mapping[str, Any]) -> Totals:
    role, text = _role(turn), plain_text(turn.get("value"))
    if role == "call" and (count := len(_calls(text))):
        return Totals(calls=count)
    if role == "assistant":
        return Totals(calls=len(_written(text)), characters=characters(text))
    return Totals(results=int(role == "tool"), characters=characters(text))


def _add(builder: Builder, turn: Mapping[str, Any], number: int) -> None:
    role, text = _role(turn), builder.text(turn.get("value"))
    if role in ("user", "system"):
        builder.say("system" if role == "system" else "user", text)
    elif role == "assistant":
        calls = [_call(item, f"turn{number}_{i}", True) for i, item in enumerate(_written(text))]
        builder.assistant(text, calls=calls, weight=1.0)
    elif role == "call":
        calls_in_text = _calls(text)
        calls = [_call(item, f"turn{number}_{i}", False) for i, item in enumerate(calls_in_text)]
        builder.assistant("" if calls_in_text else text, calls=calls)
    elif role == "tool":
        builder.result(None, text, signal=detect_prefix(text))
    else:
        builder.skip("unknown_role", f"from {turn.get('from')!r}", _totals(turn))


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls of a turn that is nothing else: an object, or a list of them."""
    parsed = parse_arguments(f'{{"calls": {text}}}')
    value = as_dict(parsed).get("calls")
    return [item for item in as_dicts(value if isinstance(value, list) else [value]) if as_text(item.get("name"))]


def _written(text: str) -> list[dict[str, Any]]:
    """The calls that an answer has in its text."""
    parsed = [as_dict(parse_arguments(match)) for match in _WRITTEN_CALL.findall(text)] if "<tool_call>" in text else []
    return [item for item in parsed if as_text(item.get("name"))]


def _call(item: Mapping[str, Any], call_id: str, in_content: bool) -> ToolCall:
    arguments = parse_arguments(item.get("arguments", item.get("parameters")))
    return ToolCall(id=call_id, name=item["name"], arguments=arguments, in_content=in_content)
