"""A conversation with context that a teacher alone reads: a solution, a hint, examples, documents, a long instruction.

Nothing of the context is ever a target, and nothing of the conversation's own answers changes, so that the targets of
the teacher's rendering are those of the student's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from limbeck.tokens.chat.hint_placement import insert_hint, probe_placement
from limbeck.tokens.chat.template import Message
from limbeck.tokens.tokenized_text import CallField, Segment, TokenizedText
from limbeck.tokens.tokenizer import ByteTokenizer

Context = str | Sequence[Mapping[str, Any]]
"""Text, or messages of its own."""
ContextForm = Literal["system", "user", "hint"]
"""Place of a text: part of the instructions, of the first question, or a hint directly before the last answer."""

_INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True)
class InContext:
    """A conversation with its context.

    Attributes:
        messages: what the teacher's template is given.
        origin: for each of them the number of the conversation's message that it is; -1 for one of the context.
    """

    messages: list[dict[str, Any]]
    origin: list[int]

    def then(self, further: InContext) -> InContext:
        """``further``, which was made of these messages, in terms of the conversation's own."""
        return InContext(further.messages, [self.origin[i] if i >= 0 else -1 for i in further.origin])

    def renumbered(self, rendering: TokenizedText) -> TokenizedText:
        """The rendering with segments and fields under the numbers of the conversation's messages."""

        def own(parts: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(replace(p, message=self.origin[p.message]) for p in parts if self.origin[p.message] >= 0)

        segments: tuple[Segment, ...] = own(rendering.segments)
        fields: tuple[CallField, ...] = own(rendering.fields)
        return replace(rendering, segments=segments, fields=fields)


def add_context(
    messages: Sequence[Message],
    context: Context,
    form: ContextForm,
    tokenizer: ByteTokenizer | None,
    *,
    to_come: bool = False,
) -> InContext:
    """The conversation as a teacher reads it.

    Context stands behind the conversation's own instructions and before all else; messages of one role that meet there
    are joined, since many templates want roles to alternate. ``form``: what text becomes; ``hint`` asks the template of
    ``tokenizer`` where a message may stand before the last answer, or, with ``to_come``, before the one that follows.
    """
    copies = [dict(message) for message in messages]
    if isinstance(context, str) and form == "hint":
        assert tokenizer is not None
        answers = [] if to_come else [i for i, message in enumerate(copies) if message.get("role") == "assistant"]
        target = answers[-1] if answers else len(copies)
        hinted = insert_hint(
            [*copies, {"role": "assistant", "content": ""}], target, context, probe_placement(tokenizer)
        )
        new = len(hinted) - 1 - len(copies)
        return InContext([dict(m) for m in hinted[:-1]], [*range(target), *[-1] * new, *range(target, len(copies))])
    start = int(bool(copies) and copies[0].get("role") in _INSTRUCTIONS)
    head, rest, numbers = copies[:start], copies[start:], list(range(len(copies)))
    if isinstance(context, str):
        role = head[0]["role"] if head and form == "system" else form
        added = [{"role": role, "content": context}]
    else:
        added = [{**message, "supervise": False} for message in context]
    if head and added and added[0].get("role") == head[0]["role"]:
        head, added = [_joined(head[0], added[0])], added[1:]
    if added and rest and added[-1].get("role") == rest[0].get("role") == "user":
        rest, added = [_joined(rest[0], added[-1], behind=False), *rest[1:]], added[:-1]
    return InContext([*head, *added, *rest], [*numbers[:start], *[-1] * len(added), *numbers[start:]])


def _joined(message: dict[str, Any], more: Mapping[str, Any], *, behind: bool = True) -> dict[str, Any]:
    """A message with the content of another behind its own, or in front of it."""
    contents = [message.get("content") or "", more.get("content") or ""]
    if not behind:
        contents.reverse()
    if all(isinstance(content, str) for content in contents):
        return {**message, "content": "\n\n".join(content for content in contents if content)}
    parts = [[{"type": "text", "text": c}] if isinstance(c, str) else list(c) for c in contents if c]
    return {**message, "content": [part for content_parts in parts for part in content_parts]}
