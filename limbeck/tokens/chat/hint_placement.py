"""Where a hint stands in the conversation: probed once per chat template, never assumed.

A hint goes directly before the message that it is about. The cleanest place is a system turn of its own; templates that
refuse one in mid-conversation, drop it, or move it to the front get the hint at the end of the last user or tool turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

from limbeck.errors import TemplateError
from limbeck.tokens.chat.template import ChatTemplate, Message, render_errors
from limbeck.tokens.tokenizer import ByteTokenizer

Placement = Literal["system", "append", "user"]
"""``system``: own system turn; ``append``: end of the last user or tool turn; ``user``: own user turn."""

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

_HINT, _BEFORE, _TARGET = "qzhintzq", "qzbeforezq", "qztargetzq"


class ChatTokenizer(Protocol):
    """Part that the probe needs of a tokenizer that is not a `ByteTokenizer`."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool) -> Any: ...


_known: dict[str, Placement] = {}


def probe_placement(tokenizer: ByteTokenizer | ChatTokenizer) -> Placement:
    """The best placement that this tokenizer's chat template carries out faithfully.

    A placement passes when the hint is rendered exactly once, after the turn before it and before the target, in a
    conversation that ends with a user turn and, where the template knows tools at all, in one that ends with a tool
    result. The answer is remembered per template.
    """
    templates = (
        tokenizer.templates if isinstance(tokenizer, ByteTokenizer) else getattr(tokenizer, "chat_template", None)
    )
    if not templates:
        raise TemplateError(
            f"the tokenizer {_name(tokenizer)} has no chat template, so hints cannot be placed: set one"
        )
    key = repr(templates)
    if key not in _known:
        _known[key] = _probe(tokenizer)
    return _known[key]


def _name(tokenizer: Any) -> str:
    known = tokenizer.name if isinstance(tokenizer, ByteTokenizer) else getattr(tokenizer, "name_or_path", "")
    return repr(known or type(tokenizer).__name__)


def _probe(tokenizer: ByteTokenizer | ChatTokenizer) -> Placement:
    usable = [conversation for conversation in _conversations() if _render(tokenizer, conversation) is not None]
    if not usable:
        raise TemplateError(
            f"the chat template of {_name(tokenizer)} refuses a plain conversation of two user and two assistant "
            "turns: check the template"
        )
    for placement in PLACEMENTS:
        if all(_placed_well(tokenizer, conversation, placement) for conversation in usable):
            return placement
    raise TemplateError(
        f"the chat template of {_name(tokenizer)} shows a hint neither in a system turn, nor in the last user or tool "
        "turn, nor in a user turn of its own: use another template"
    )


def _conversations() -> list[list[Message]]:
    function = {"name": "look", "arguments": {"at": "x"}}
    call = {"id": "abcdefghi", "type": "function", "function": function}  # Mistral wants ids of nine characters
    start = [{"role": "user", "content": "Hello."}]
    target = {"role": "assistant", "content": _TARGET}
    return [
        [*start, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": _BEFORE}, target],
        [
            *start,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": _BEFORE},
            target,
        ],
    ]


def _render(tokenizer: ByteTokenizer | ChatTokenizer, messages: Sequence[Message]) -> str | None:
    """The conversation as text, or None where the template refuses it."""
    try:
        if isinstance(tokenizer, ByteTokenizer):
            text, _ = ChatTemplate(tokenizer).render(messages)
        else:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except render_errors():
        # Templates refuse with raise_exception, or stumble over a missing field.
        return None
    return text if isinstance(text, str) and _TARGET in text and _BEFORE in text else None


def _placed_well(tokenizer: ByteTokenizer | ChatTokenizer, conversation: list[Message], placement: Placement) -> bool:
    text = _render(tokenizer, insert_hint(conversation, len(conversation) - 1, _HINT, placement))
    if text is None or text.count(_HINT) != 1:
        return False
    return text.index(_BEFORE) < text.index(_HINT) < text.index(_TARGET)


def insert_hint(messages: Sequence[Message], target_index: int, hint: str, placement: Placement) -> list[Message]:
    """The conversation with a hint directly before the message at ``target_index``.

    The target then stands at ``target_index + len(result) - len(messages)``. The messages given are not changed. An
    empty hint changes nothing. ``append`` without any user or tool turn before the target falls back to a user turn.
    """
    if not 0 <= target_index < len(messages):
        raise TemplateError(f"message {target_index} is no target in a conversation of {len(messages)} messages")
    if placement not in PLACEMENTS:
        raise TemplateError(f"unknown hint placement {placement!r}: expected one of {', '.join(PLACEMENTS)}")
    result = list(messages)
    if not hint:
        return result
    if placement == "append":
        for index in range(target_index - 1, -1, -1):
            if result[index].get("role") in ("user", "tool"):
                content = result[index].get("content") or ""
                result[index] = {**result[index], "content": f"{content}\n\n{hint}" if content else hint}
                return result
    role = "system" if placement == "system" else "user"
    result.insert(target_index, {"role": role, "content": hint})
    return result
