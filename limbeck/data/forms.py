"""Conversations under the keys that people use: prompt and completion, Alpaca, ShareGPT, question and answer.

A form is known by its keys alone. Its records are read as the messages that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from limbeck.data.readers import BadRecord, from_json
from limbeck.errors import DataError

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "function"), "tool"),
}
"""Role of each ``from`` of a ShareGPT turn. A ``call`` is an assistant's turn that is nothing but calls: agent logs
have them (``limbeck.traces``), conversations for training store calls as OpenAI does."""


@dataclass(frozen=True)
class ChatForm:
    """One way to store a conversation.

    Attributes:
        name: as messages call it.
        needed: keys that a record must have.
        optional: keys that count where a record has them.
        convert: a record to messages; raises BadRecord.
    """

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Row], Messages]

    @property
    def keys(self) -> str:
        return ", ".join(self.needed)


def _messages(value: Any, key: str, role: str) -> Messages:
    """A turn that is text, or a list of messages of its own; nothing for null."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(part, Mapping) and "role" in part for part in value):
        return [dict(part) for part in value]
    if value is None:
        return []
    raise BadRecord("wrong_type", f"{key!r} is a {type(value).__name__}, neither text nor a list of messages")


def _pair(question: str, answer: str) -> Callable[[Row], Messages]:
    def convert(row: Row) -> Messages:
        system = _messages(row.get("system") or None, "system", "system")
        asked = _messages(row.get(question), question, "user")
        answered = _messages(row.get(answer), answer, "assistant")
        for key, part in ((question, asked), (answer, answered)):
            if not any(message.get("content") or message.get("tool_calls") for message in part):
                raise BadRecord("empty", f"{key!r} is empty")
        return [*system, *asked, *answered]

    return convert


def _alpaca(row: Row) -> Messages:
    extra = row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise BadRecord("wrong_type", f"'input' is a {type(extra).__name__}, not text")
    whole = dict(row)
    if extra and isinstance(row.get("instruction"), str):
        whole["instruction"] = f"{row['instruction']}\n\n{extra}"
    return _pair("instruction", "output")(whole)


def _sharegpt(row: Row) -> Messages:
    turns = from_json(row.get("conversations"), "conversations")
    if not isinstance(turns, list):
        raise BadRecord("wrong_type", f"'conversations' is a {type(turns).__name__}, not a list of turns")
    messages = _messages(row.get("system") or None, "system", "system")
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise BadRecord("bad_message", f"turn {number} of 'conversations' is a {type(turn).__name__}")
        if "role" in turn:
            messages.append(dict(turn))
            continue
        who = turn.get("from")
        role = SHAREGPT_ROLES.get(who) if isinstance(who, str) else None
        if role is None or role == "call":
            known = ", ".join(name for name, role in SHAREGPT_ROLES.items() if role != "call")
            raise BadRecord("bad_message", f"turn {number} of 'conversations' is from {who!r}; known are {known}")
        if not isinstance(turn.get("value"), str):
            raise BadRecord("bad_message", f"turn {number} of 'conversations' has no text as its 'value'")
        messages.append({"role": role, "content": turn["value"]})
    return messages


FORMS = (
    ChatForm("prompt and completion", ("prompt", "completion"), ("system",), _pair("prompt", "completion")),
    ChatForm("prompt and response", ("prompt", "response"), ("system",), _pair("prompt", "response")),
    ChatForm("Alpaca", ("instruction", "output"), ("input", "system"), _alpaca),
    ChatForm("instruction and response", ("instruction", "response"), ("system",), _pair("instruction", "response")),
    ChatForm("ShareGPT", ("conversations",), ("system",), _sharegpt),
    ChatForm("question and answer", ("question", "answer"), ("system",), _pair("question", "answer")),
)
"""Known forms, beside a list of messages under ``data.messages_key``."""
# a question with choices is a test, and its answer a letter or number
_NO_CONVERSATION = frozenset({"choices", "options", "chosen", "rejected"})


def chat_form(keys: Collection[str], where: str) -> ChatForm | None:
    """The form that has all of its keys among ``keys``; None where none has. Two of them are a DataError."""
    if _NO_CONVERSATION & set(keys):
        return None
    matching = [form for form in FORMS if set(form.needed) <= set(keys)]
    if len(matching) > 1:
        both = " and ".join(f"{form.name} ({form.keys})" for form in matching)
        raise DataError(
            f"{where} has the keys of more than one form of chat data: {both}; leave one of them out, or store "
            "conversations as 'messages'"
        )
    return matching[0] if matching else None


def detect(keys: Collection[str], text_key: str, messages_key: str, where: str) -> tuple[str, ChatForm | None]:
    """``text`` or ``chat`` by the keys of a record, and the form of the chat where it is not a list of messages."""
    form = None if messages_key in keys else chat_form(keys, where)
    if messages_key not in keys and form is None:
        return "text", None
    if text_key in keys:
        named = repr(messages_key) if form is None else form.keys
        raise DataError(
            f"{where} has text ({text_key!r}) and a conversation ({named}); set data.mode to text or to chat"
        )
    return "chat", form
