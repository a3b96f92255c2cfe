"""The strings of a conversation: brought into the form templates expect, and replaced by markers to find them again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from limbeck.tokens.chat_template import Message
from limbeck.utils.errors import TemplateError

Path = tuple[Any, ...]

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_OWN_KEYS = ("supervise", "weight")


@dataclass(frozen=True)
class Leaf:
    """One string of the conversation: ``message`` is its message's index, -1 for a tool schema.

    ``kind`` is ``content``, ``reasoning``, ``name`` (of a called tool), ``argument`` or ``other``; ``call`` numbers the
    message's tool calls, -1 for what is none.
    """

    message: int
    kind: str
    text: str
    call: int = -1


@dataclass(frozen=True)
class Mark:
    """A marker for ``core``, a stretch of string number ``leaf``, which has ``before`` and ``after`` around it."""

    leaf: int
    core: str
    before: str
    after: str


@dataclass(frozen=True)
class Forms:
    """How to write a conversation for a template that is particular about it.

    Attributes:
        parts: contents as lists of text parts, which templates of image models expect.
        json_arguments: tool arguments as a JSON string, not an object.
        no_content: content of a message that only calls tools.
    """

    parts: bool = False
    json_arguments: bool = False
    no_content: str | None = ""


def canonical(messages: Sequence[Message], forms: Forms) -> list[Message]:
    """Copies of the messages in the one form that templates agree on best."""
    return [_canonical(message, forms, index) for index, message in enumerate(messages)]


def _canonical(message: Message, forms: Forms, index: int) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TemplateError(f"message {index} is {message!r:.80}, expected a dict with a 'role' string.")
    result = {key: value for key, value in message.items() if key not in _OWN_KEYS and key not in _REASONING_KEYS}
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        result["reasoning_content"] = result["thinking"] = reasoning
    content = result.setdefault("content", "")
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        result["content"] = "".join(part["text"] for part in content)
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [_canonical_call(call, forms) for call in calls]
        result["content"] = result["content"] or forms.no_content
    if forms.parts and isinstance(result["content"], str):
        result["content"] = [{"type": "text", "text": result["content"]}]
    return result


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _canonical_call(call: Message, forms: Forms) -> Message:
    if "function" not in call:
        call = {"function": {key: call[key] for key in ("name", "arguments") if key in call}, **call}
        call.pop("name", None)
        call.pop("arguments", None)
    function = dict(call["function"])
    arguments = function.get("arguments")
    if forms.json_arguments and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    elif not forms.json_arguments and (arguments is None or isinstance(arguments, str)):
        function["arguments"] = _parsed(arguments or "{}")
    return {"type": "function", **call, "function": function}


def _parsed(arguments: str) -> Any:
    """The object that a JSON string describes; the string itself where it describes none."""
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


class Marked:
    """A conversation in which strings are replaced by markers.

    Attributes:
        messages, tools: the conversation with markers.
        leaves: every marked string.
        marks: one per marker; a leaf may have several, around markup that templates look for.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        *,
        real: str,
        tested: frozenset[str],
        wanted: Callable[[Leaf], bool],
        keep_edges: bool = True,
    ) -> None:
        self.leaves: list[Leaf] = []
        self.marks: list[Mark] = []
        self._nonce = _fresh_nonce(real)
        self._tested = re.compile("|".join(map(re.escape, sorted(tested, key=len, reverse=True)))) if tested else None
        self._wanted = wanted
        self._keep_edges = keep_edges
        self._shared: dict[tuple[str, str], str] = {}
        self._assistant = [m["role"] == "assistant" for m in messages]
        self.messages: list[Message] = [self._walk(m, (i,)) for i, m in enumerate(messages)]
        for message in self.messages:
            if "thinking" in message:
                message["thinking"] = message["reasoning_content"]
        self.tools = None if tools is None else self._walk(tools, (-1, "tools"))

    def occurrences(self, text: str) -> Iterator[tuple[int, int, int]]:
        """``(mark, start, end)`` of every marker in a rendering, in order."""
        for match in re.finditer(rf"{self._nonce}(\d+)x[^Z]{{0,16}}?Z", text):
            yield int(match[1]), match.start(), match.end()

    def _walk(self, value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {
                self._replace(key, (*path, "key")) if isinstance(key, str) else key: item
                if key == "thinking" and len(path) == 1
                else self._walk(item, (*path, key))
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._walk(item, (*path, i)) for i, item in enumerate(value)]
        return self._replace(value, path) if isinstance(value, str) else value

    def _replace(self, text: str, path: Path) -> str:
        kind = _kind(path)
        leaf = Leaf(path[0], kind, text, path[2] if kind in ("name", "argument") else -1)
        if not self._wanted(leaf):
            return text
        # Templates compare messages with each other, so equal strings stay equal where their place does not matter.
        shared = (leaf.kind, text) if leaf.message < 0 or not self._assistant[leaf.message] else None
        if shared in self._shared:
            return self._shared[shared]
        self.leaves.append(leaf)
        marked = self._mark(text)
        if shared is not None:
            self._shared[shared] = marked
        return marked

    def _mark(self, text: str) -> str:
        """Markers in place of the text's cores; white space and markup that templates look for stay as they are."""
        cores = list(self._cores(text)) or [(0, len(text))]
        parts, at = [], 0
        for start, end in cores:
            parts += [text[at:start], self._marker(text, start, end)]
            at = end
        marked = "".join([*parts, text[at:]])
        return marked if self._keep_edges else marked.strip()

    def _cores(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        for match in [*(self._tested.finditer(text) if self._tested else ()), None]:
            chunk = text[at : match.start() if match else len(text)]
            if core := chunk.strip():
                start = at + chunk.index(core)
                yield start, start + len(core)
            at = match.end() if match else 0

    def _marker(self, text: str, start: int, end: int) -> str:
        core = text[start:end]
        self.marks.append(Mark(len(self.leaves) - 1, core, text[:start], text[end:]))
        # The kind of quotes inside decides how Python prints a string, so the marker has the same kinds.
        quotes = "".join(q for q in "'\"" if q in core)
        return f"{self._nonce}{len(self.marks) - 1}x{quotes}Z"


def _kind(path: Path) -> str:
    if path[0] < 0 or len(path) < 2 or path[-1] == "key":
        return "other"
    if path[1] == "content" and path[-1] != "type":
        return "content"
    if path[1] == "reasoning_content":
        return "reasoning"
    if path[1] == "tool_calls" and path[3:] == ("function", "name"):
        return "name"
    if path[1] == "tool_calls" and path[3:5] == ("function", "arguments"):
        return "argument"
    return "other"


def _fresh_nonce(real: str) -> str:
    salt = 0
    while True:
        nonce = "Lk" + hashlib.sha256(f"{salt}\0{real}".encode("utf-8", "surrogatepass")).hexdigest()[:12] + "n"
        if nonce not in real:
            return nonce
        salt += 1
