"""Conversations as a chat template can take them: by rule, with the way back to the messages they came from.

Templates differ in what they know: calls side by side, text in front of a call, results of tools, turns that do not
alternate. Where one refuses a conversation, or leaves out what the assistant said, the next rule is tried:

- ``as_is``: the messages as they are.
- ``short_ids``: call ids of nine letters and digits, which some templates insist on.
- ``apart``: a message that says something and calls tools, or makes several calls, becomes messages of one thing each,
  one after another; the results follow as before. Only the last of them ends the turn.
- ``text``: calls and results are written as text. A call is ``<tool_call>\\n{"name": ..., "arguments": {...}}\\n
  </tool_call>`` behind the message's content, a result a user's turn ``<tool_response>\\n...\\n</tool_response>``.
- ``alternate``: as ``text``, and user and assistant take turns: system messages become text of the user, neighbouring
  turns of the user one turn with a blank line between, and an assistant that follows no user follows an empty turn.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

Message = dict[str, Any]
Rule = Literal["as_is", "short_ids", "apart", "text", "alternate"]

AS_IS: Final = "as_is"
RULES: tuple[Rule, ...] = ("as_is", "short_ids", "apart", "text", "alternate")


class _Key:
    """The last part of a path that leads to a key instead of its value."""

    def __repr__(self) -> str:
        return "KEY"


KEY = _Key()


@dataclass(frozen=True)
class Part:
    """A string of the conversation inside a longer one; ``in_json``: inside quotes, with JSON's escapes."""

    kind: str
    text: str
    call: int = -1
    path: tuple[Any, ...] = ()
    in_json: bool = False

    @property
    def written(self) -> str:
        """How it stands there."""
        return escaped(self.text) if self.in_json else self.text


class Written(str):
    """One string for the template, made of literals and of strings that must be found again."""

    parts: tuple[str | Part, ...]

    def __new__(cls, parts: Sequence[str | Part]) -> Written:
        written = super().__new__(cls, "".join(p if isinstance(p, str) else p.written for p in parts))
        written.parts = tuple(parts)
        return written


def written_json(value: Any, call: int = -1, path: tuple[Any, ...] = ("function", "arguments")) -> list[str | Part]:
    """A call's arguments in JSON, as ``json.dumps`` writes them, with their keys and values as parts."""
    return list(_json_parts(value, call, path))


def _json_parts(value: Any, call: int, path: tuple[Any, ...]) -> Iterator[str | Part]:
    if isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            name = str(key)
            yield ', "' if i else '"'
            yield Part("key", name, call, (*path, key, KEY), in_json=True)
            yield '": '
            yield from _json_parts(item, call, (*path, key))
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _json_parts(item, call, (*path, i))
        yield "]"
    elif isinstance(value, str):
        yield from ('"', Part("argument", value, call, path, in_json=True), '"')
    else:
        yield Part("scalar", json.dumps(value), call, path)


def escaped(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class Adapted:
    """A message for the template.

    Attributes:
        origins: the messages of the conversation that it is made of; empty for a turn that only keeps the order.
        first_call: number of its first call among those of its original.
    """

    message: Message
    origins: tuple[int, ...]
    first_call: int = 0


def adapt(messages: Sequence[Message], rule: Rule) -> list[Adapted]:
    """The conversation by a rule; the messages given are not changed."""
    adapted = [Adapted(message, (index,)) for index, message in enumerate(messages)]
    if rule == "as_is" or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        return adapted
    adapted = [replace(one, message=_short_ids(one.message)) for one in adapted]
    if rule == "apart":
        return [part for one in adapted for part in _apart(one)]
    if rule in ("text", "alternate"):
        adapted = [replace(one, message=_as_text(one.message)) for one in adapted]
    return _alternating(adapted) if rule == "alternate" else adapted


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def _short_id(call_id: Any) -> str:
    if isinstance(call_id, str) and _SHORT.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(str(call_id).encode("utf-8", "surrogatepass")).digest()[:16], "big")
    letters = string.digits + string.ascii_letters
    return "".join(letters[number // 62**i % 62] for i in range(9))


def _short_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if message.get("tool_call_id") is not None:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _apart(one: Adapted) -> list[Adapted]:
    message, calls = one.message, one.message.get("tool_calls") or []
    said = isinstance(message.get("content"), str) and message["content"].strip()
    if not calls or (len(calls) == 1 and not said):
        return [one]
    bare = {key: value for key, value in message.items() if key != "tool_calls"}
    silent = {key: value for key, value in bare.items() if key not in _THOUGHTS}
    parts = [replace(one, message=bare)] if said else []
    for number, call in enumerate(calls):
        # Thoughts stand once, in front of what comes first.
        rest = silent if parts else bare
        parts.append(Adapted({**rest, "content": "", "tool_calls": [call]}, one.origins, number))
    return parts


def _as_text(message: Message) -> Message:
    content = message.get("content")
    content_parts = [Part("content", content)] if isinstance(content, str) and content else []
    if message["role"] == "tool":
        kept = {key: value for key, value in message.items() if key not in ("tool_call_id", "name")}
        return {**kept, "role": "user", "content": Written(["<tool_response>\n", *content_parts, "\n</tool_response>"])}
    if not message.get("tool_calls"):
        return message
    parts: list[str | Part] = list(content_parts)
    for number, call in enumerate(message["tool_calls"]):
        parts += ["\n"] if parts else []
        parts += _call_as_text(call.get("function", call), number)
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": Written(parts)}


def _call_as_text(function: Message, number: int) -> list[str | Part]:
    name, arguments = str(function.get("name", "")), function.get("arguments")
    if isinstance(arguments, str):
        # What is no JSON object was written by the model as it stands.
        argument_parts: list[str | Part] = [Part("argument", arguments, number, ("function", "arguments"))]
    else:
        argument_parts = written_json(arguments or {}, number)
    named = Part("name", name, number, ("function", "name"), in_json=True)
    return ['<tool_call>\n{"name": "', named, '", "arguments": ', *argument_parts, "}\n</tool_call>"]


def _alternating(adapted: Sequence[Adapted]) -> list[Adapted]:
    turns: list[Adapted] = []
    for one in adapted:
        if one.message["role"] == "assistant":
            if not turns or turns[-1].message["role"] == "assistant":
                turns.append(Adapted({"role": "user", "content": ""}, ()))
            turns.append(one)
        elif turns and turns[-1].message["role"] == "user":
            parts = [*_parts(turns[-1].message), "\n\n", *_parts(one.message)]
            joined = {**turns[-1].message, "content": Written(parts)}
            turns[-1] = Adapted(joined, (*turns[-1].origins, *one.origins))
        else:
            turns.append(replace(one, message={**one.message, "role": "user"}))
    return turns


def _parts(message: Message) -> list[str | Part]:
    content = message.get("content") or ""
    if isinstance(content, Written):
        return list(content.parts)
    return [Part("content", content)] if isinstance(content, str) and content else []
