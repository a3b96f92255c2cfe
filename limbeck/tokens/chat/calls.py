"""Tool calls in a text that a model wrote, whatever syntax its template taught it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_NAMED_BLOCK = re.compile(r"([\w.:-]+)\s*```(?:json)?\s*(?=\{)")
_OBJECT = re.compile(r"\{(?=\s*[\"}])")
_MOST_TRIED = 10_000
"""Braces at which no JSON begins, each of which costs a look at the whole text before it."""
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class WrittenCall(NamedTuple):
    """A tool call that was found in a text, and the id that it was given there."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


def wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat servers take it: arguments as JSON text, and no key that is ours alone."""
    wire = {key: value for key, value in message.items() if key not in ("supervise", "reasoning_content", "tool_calls")}
    if message.get("tool_calls"):
        wire["tool_calls"] = [_wire_call(number, call) for number, call in enumerate(message["tool_calls"])]
    return wire


def _wire_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or f"call{number:05}",
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


def written_calls(text: str) -> list[WrittenCall]:
    """The calls in an answer, in order; empty where none parses.

    Understood are JSON objects with a ``name`` and ``arguments`` or ``parameters`` (an object, or one written as a
    string) anywhere in the text, a name in front of a fenced JSON object, and functions with parameters in tags.
    """
    calls: list[tuple[int, WrittenCall]] = []
    decoder = json.JSONDecoder()
    tried, start = 0, 0
    while tried < _MOST_TRIED and (match := _OBJECT.search(text, start)) is not None:
        brace = match.start()
        try:
            value, end = decoder.raw_decode(text, brace)
        except json.JSONDecodeError:
            tried, start = tried + 1, brace + 1
            continue
        except RecursionError:
            # nested so deeply that trying each of its braces would take minutes
            break
        named = _NAMED_BLOCK.search(text, max(0, brace - 200), brace + 1)
        if (call := _from_object(value)) is not None:
            calls.append((brace, call))
        elif named is not None and named.end() == brace and isinstance(value, dict):
            calls.append((brace, WrittenCall(named[1], value)))
        start = end
    for match in _FUNCTION.finditer(text):
        arguments = {key: _value(written) for key, written in _PARAMETER.findall(match[2])}
        calls.append((match.start(), WrittenCall(match[1], arguments)))
    return [call for _, call in sorted(calls, key=lambda one: one[0])]


def _from_object(value: Any) -> WrittenCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, dict):
        return None
    return WrittenCall(value["name"], arguments, value["id"] if isinstance(value.get("id"), str) else None)


def _value(written: str) -> Any:
    """The JSON value that a text spells; the text itself where it spells none."""
    try:
        return json.loads(written)
    except (json.JSONDecodeError, RecursionError):
        return written
