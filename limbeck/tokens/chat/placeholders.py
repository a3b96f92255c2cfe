"""Every string of a conversation, found in its rendering and proven.

The strings are brought into the form that templates expect (``canonical``), replaced by placeholders
(``PlaceholderChat``), and the template is rendered a second time. What stands between the placeholders must stand in
the real rendering too, and each placeholder must be one of the forms its string can take (as it is, or escaped for JSON
or Python). If that rebuilds the real rendering to the last character, every string has its span (``RenderedChat``);
otherwise none has.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from markupsafe import escape

from limbeck.errors import TemplateError
from limbeck.tokens.chat.sandbox import LimitExceeded, Request
from limbeck.tokens.chat.template import ChatTemplate, Message, Span, render_errors
from limbeck.tokens.chat.template_compat import AS_IS, KEY, Adapted, Part, Rule, Written, adapt, escaped, written_json

Path = tuple[Any, ...]

CALL_KINDS = ("name", "key", "argument", "scalar")
"""Kinds of the strings and values that make up a tool call."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_OWN_KEYS = ("supervise", "weight")

# Replaced strings by level; each level gives up some, for templates that look at keys, names or at emptiness.
_FIELDS, _ALL, _NO_EMPTY, _NO_NAMES, _NO_ARGUMENTS = range(5)


# -- strings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceString:
    """One string of the conversation: ``message`` is its message's index, -1 for a tool schema.

    ``kind`` is ``content``, ``reasoning``, ``name`` (of a called tool), ``key``, ``argument`` (a string in a call's
    arguments), ``scalar`` (any other value there, ``text`` in JSON) or ``other``; ``call`` numbers the message's tool
    calls, -1 for what is none; ``path`` leads to the string inside its call.
    """

    message: int
    kind: str
    text: str
    call: int = -1
    path: Path = ()


@dataclass(frozen=True)
class Placeholder:
    """A placeholder for ``core``, a stretch of string number ``string``, which has ``before`` and ``after`` around it.

    ``other``: a further way to write it.
    """

    string: int
    core: str
    before: str
    after: str
    other: str | None = None


@dataclass(frozen=True)
class MessageFormat:
    """How to write a conversation for a template that is particular about it.

    Attributes:
        parts: contents as lists of text parts, which templates of image models expect.
        json_arguments: tool arguments as a JSON string, not an object.
        no_content: content of a message that only calls tools.
    """

    parts: bool = False
    json_arguments: bool = False
    no_content: str | None = ""


def canonical(messages: Sequence[Message], message_format: MessageFormat) -> list[Message]:
    """Copies of the messages in the one form that templates agree on best."""
    return [_canonical(message, message_format, index) for index, message in enumerate(messages)]


def _canonical(message: Message, message_format: MessageFormat, index: int) -> Message:
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
        result["tool_calls"] = [_canonical_call(call, message_format) for call in calls]
        result["content"] = result["content"] or message_format.no_content
    if message_format.parts and isinstance(result["content"], str):
        result["content"] = [{"type": "text", "text": result["content"]}]
    return result


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _canonical_call(call: Message, message_format: MessageFormat) -> Message:
    if "function" not in call:
        call = {"function": {key: call[key] for key in ("name", "arguments") if key in call}, **call}
        call.pop("name", None)
        call.pop("arguments", None)
    function = dict(call["function"])
    arguments = function.get("arguments")
    if message_format.json_arguments and not isinstance(arguments, str):
        function["arguments"] = Written(written_json(arguments or {}))
    elif not message_format.json_arguments and (arguments is None or isinstance(arguments, str)):
        function["arguments"] = _parsed(arguments or "{}")
    return {"type": "function", **call, "function": function}


def _parsed(arguments: str) -> Any:
    """The object that a JSON string describes; the string itself where it describes none."""
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


class PlaceholderChat:
    """A conversation in which strings are replaced by placeholders.

    Attributes:
        messages, tools: the conversation with placeholders.
        strings: every replaced string.
        placeholders: a string may have several, around markup that templates look for.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        *,
        real: str,
        tested: frozenset[str],
        wanted: Callable[[SourceString], bool],
        keep_edges: bool = True,
    ) -> None:
        self.strings: list[SourceString] = []
        self.placeholders: list[Placeholder] = []
        self._nonce, self._digits = _fresh_nonces(real)
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
        """``(placeholder, start, end)`` of every placeholder in a rendering, in order."""
        for match in re.finditer(rf"{self._nonce}(\d+)x[^Z]{{0,16}}?Z|{self._digits}(\d{{7}})", text):
            yield int(match[1] or match[2]), match.start(), match.end()

    def _walk(self, value: Any, path: Path) -> Any:
        if isinstance(value, Written):
            return "".join(p if isinstance(p, str) else self._replace_part(p, path) for p in value.parts)
        if isinstance(value, dict):
            return {
                self._replace(key, (*path, key, KEY)) if isinstance(key, str) else key: item
                if key == "thinking" and len(path) == 1
                else self._walk(item, (*path, key))
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._walk(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, str):
            return self._replace(value, path)
        return self._replace_scalar(value, path) if _kind(path) == "argument" else value

    def _replace(self, text: str, path: Path) -> str:
        kind = _kind(path)
        inside = kind in CALL_KINDS
        string = SourceString(path[0], kind, text, path[2] if inside else -1, path[3:] if inside else ())
        return self._replaced(string) if self._wanted(string) else text

    def _replace_part(self, part: Part, path: Path) -> str:
        """A string inside a longer one that was written from it."""
        call = path[2] if path[1:2] == ("tool_calls",) else part.call
        string = SourceString(path[0], part.kind, part.text, call, part.path)
        return self._replaced(string, escaped if part.in_json else str) if self._wanted(string) else part.written

    def _replace_scalar(self, value: Any, path: Path) -> Any:
        """A number in place of a number, truth value or null: templates print it wherever they print the value."""
        string = SourceString(path[0], "scalar", json.dumps(value), path[2], path[3:])
        if not self._wanted(string):
            return value
        self.strings.append(string)
        self.placeholders.append(Placeholder(len(self.strings) - 1, string.text, "", "", str(value)))
        return int(f"{self._digits}{len(self.placeholders) - 1:07d}")

    def _replaced(self, string: SourceString, write: Callable[[str], str] = str) -> str:
        # Templates compare messages with each other, so equal strings stay equal where their place does not matter.
        shared = (string.kind, string.text) if string.message < 0 or not self._assistant[string.message] else None
        if shared in self._shared:
            return self._shared[shared]
        self.strings.append(string)
        replaced = self._with_placeholders(string.text, write)
        if shared is not None:
            self._shared[shared] = replaced
        return replaced

    def _with_placeholders(self, text: str, write: Callable[[str], str]) -> str:
        """Placeholders in place of the text's cores; white space and markup that templates look for stay as they are.

        ``write``: how text stands in the string around it.
        """
        cores = list(self._cores(text)) or [(0, len(text))]
        placeholders = [self._placeholder(text, start, end) for start, end in cores]
        edges = [0, *(x for core in cores for x in core), len(text)]
        between = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        if not self._keep_edges:
            between[0], between[-1] = between[0].lstrip(), between[-1].rstrip()
        return "".join(x for pair in zip(map(write, between), [*placeholders, ""], strict=True) for x in pair)

    def _cores(self, text: str) -> Iterator[tuple[int, int]]:
        position = 0
        for match in [*(self._tested.finditer(text) if self._tested else ()), None]:
            chunk = text[position : match.start() if match else len(text)]
            if core := chunk.strip():
                start = position + chunk.index(core)
                yield start, start + len(core)
            position = match.end() if match else 0

    def _placeholder(self, text: str, start: int, end: int) -> str:
        core = text[start:end]
        self.placeholders.append(Placeholder(len(self.strings) - 1, core, text[:start], text[end:]))
        # The kind of quotes inside decides how Python prints a string, so the placeholder has the same kinds.
        quotes = "".join(q for q in "'\"" if q in core)
        return f"{self._nonce}{len(self.placeholders) - 1}x{quotes}Z"


def _kind(path: Path) -> str:
    in_arguments = path[1:2] == ("tool_calls",) and path[3:5] == ("function", "arguments")
    if path[-1] is KEY:
        return "key" if in_arguments and len(path) > 6 else "other"
    if path[0] < 0 or len(path) < 2:
        return "other"
    if path[1] == "content" and path[-1] != "type":
        return "content"
    if path[1] == "reasoning_content":
        return "reasoning"
    if path[1] == "tool_calls" and path[3:] == ("function", "name"):
        return "name"
    if in_arguments:
        return "argument"
    return "other"


_SECRET = secrets.token_hex(16)
"""Nobody can write a text with the placeholders of this process, and conversations of one form have the same ones."""


def _fresh_nonces(real: str) -> tuple[str, str]:
    """Placeholders that no text of the rendering contains: one for strings, one of digits for other values."""
    salt = 0
    while True:
        digest = hashlib.sha256(f"{salt}\0{_SECRET}".encode())
        nonce, digits = f"Lk{digest.hexdigest()[:12]}n", f"7{int.from_bytes(digest.digest()[:8], 'big') % 10**11:011d}"
        if nonce not in real and digits not in real:
            return nonce, digits
        salt += 1


# -- spans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlaceholderSpan:
    """Characters ``start:end`` of the rendering stand for a placeholder; ``repeat`` if it stood somewhere before."""

    placeholder: int
    start: int
    end: int
    repeat: bool


class Mismatch(Exception):
    """The rendering cannot be rebuilt; ``placeholder`` is the first one that does not fit, None if there is none."""

    def __init__(self, placeholder: int | None) -> None:
        super().__init__(placeholder)
        self.placeholder = placeholder


def locate(real: str, skeleton: str, chat: PlaceholderChat) -> list[PlaceholderSpan]:
    """Every placeholder's span in the real rendering, in order.

    Raises:
        Mismatch: the skeleton does not rebuild the rendering.
    """
    occurrences = list(chat.occurrences(skeleton))
    edges = [0, *(x for _, start, end in occurrences for x in (start, end)), len(skeleton)]
    literals = [skeleton[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    writings = [_writings(chat.placeholders[placeholder]) for placeholder, _, _ in occurrences]
    bounds = _rebuild(real, literals, writings)
    if isinstance(bounds, int):
        raise Mismatch(occurrences[min(bounds, len(occurrences) - 1)][0] if occurrences else None)
    seen: set[int] = set()
    spans = []
    for (placeholder, _, _), (start, end) in zip(occurrences, bounds, strict=True):
        spans.append(PlaceholderSpan(placeholder, start, end, placeholder in seen))
        seen.add(placeholder)
    return spans


def _rebuild(real: str, literals: list[str], writings: list[tuple[str, ...]]) -> list[tuple[int, int]] | int:
    """Bounds of the placeholders such that literals and writings spell ``real``; otherwise how many of them fitted."""
    count = len(writings)
    starts, ends, tried = [len(literals[0])] + [0] * count, [0] * count, [0] * (count + 1)
    if not real.startswith(literals[0]) or (not count and real != literals[0]):
        return 0
    fitted = furthest = 0
    budget = 64 * count + 4096
    while 0 <= fitted < count and budget:
        budget -= 1
        if tried[fitted] == len(writings[fitted]):
            fitted -= 1
            continue
        writing = writings[fitted][tried[fitted]]
        tried[fitted] += 1
        end = starts[fitted] + len(writing)
        follows = end + len(literals[fitted + 1])
        fits = real.startswith(writing, starts[fitted]) and real.startswith(literals[fitted + 1], end)
        if fits and (fitted + 1 < count or follows == len(real)):
            ends[fitted], starts[fitted + 1], tried[fitted + 1] = end, follows, 0
            fitted += 1
            furthest = max(furthest, fitted)
    return list(zip(starts[:count], ends, strict=True)) if fitted == count else furthest


def _writings(placeholder: Placeholder) -> tuple[str, ...]:
    """Forms that a template can give a string without losing any of it."""
    core = placeholder.core
    escaped = json.dumps(core, ensure_ascii=False)[1:-1]
    writings = [core, escaped, json.dumps(core)[1:-1], repr(core)[1:-1], str(escape(core))]
    writings.append(json.dumps(escaped, ensure_ascii=False)[1:-1])
    if placeholder.other is not None:
        writings.append(placeholder.other)
    if not core.strip():
        writings += [core.lstrip("\n"), core.rstrip("\n"), core.strip("\n"), ""]
    return tuple(dict.fromkeys(writings))


def kept_edges(skeleton: str, bare: str, chat: PlaceholderChat) -> list[tuple[int, int]] | None:
    """How much of each replaced string's leading and trailing white space the template kept.

    Args:
        skeleton: the rendering with placeholders and white space.
        bare: the rendering whose replaced strings have no white space at their ends.

    Returns:
        ``(before, after)`` characters for every placeholder in order; None where the two renderings do not correspond.
    """
    with_edges, without = list(chat.occurrences(skeleton)), list(chat.occurrences(bare))
    if [o[0] for o in with_edges] != [o[0] for o in without]:
        return None
    kept = [[0, 0] for _ in with_edges]
    last_a = last_b = 0
    for i, ((_, start_a, end_a), (_, start_b, end_b)) in enumerate(zip(with_edges, without, strict=True)):
        gap, plain = skeleton[last_a:start_a], bare[last_b:start_b]
        after = chat.placeholders[with_edges[i - 1][0]].after if i else ""
        split = _split_gap(gap, plain, after, chat.placeholders[with_edges[i][0]].before)
        if split is None:
            return None
        if i:
            kept[i - 1][1] = split[0]
        kept[i][0] = split[1]
        last_a, last_b = end_a, end_b
    if with_edges:
        split = _split_gap(skeleton[last_a:], bare[last_b:], chat.placeholders[with_edges[-1][0]].after, "")
        kept[-1][1] = split[0] if split else 0
    return [(before, after) for before, after in kept]


def _split_gap(gap: str, plain: str, after: str, before: str) -> tuple[int, int] | None:
    """How much of ``gap`` continues the string in front (``after``) and begins the next one (``before``).

    ``plain`` is the gap between the same placeholders when the strings have no white space at their ends.
    """
    after_markup, before_markup = after.rstrip(), before.lstrip()
    left_markup = len(after_markup) if gap.startswith(after_markup) and plain.startswith(after_markup) else 0
    right_markup = len(before_markup) if gap.endswith(before_markup) and plain.endswith(before_markup) else 0
    if left_markup + right_markup > len(plain):
        right_markup = 0
    inner = gap[left_markup : len(gap) - right_markup]
    core = plain[left_markup : len(plain) - right_markup]
    after, before = after[len(after_markup) :], before[: len(before) - len(before_markup)]
    extra = len(inner) - len(core)
    for left in range(extra, -1, -1):
        right = extra - left
        fits = inner[left : len(inner) - right] == core
        if fits and _is_start(inner[:left], after) and _is_end(inner[len(inner) - right :], before):
            return left_markup + left, right_markup + right
    return None


def _is_start(part: str, text: str) -> bool:
    return text.startswith(part) or json.dumps(text, ensure_ascii=False)[1:-1].startswith(part)


def _is_end(part: str, text: str) -> bool:
    return text.endswith(part) or json.dumps(text, ensure_ascii=False)[1:-1].endswith(part)


# -- rendering ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RenderedChat:
    """The rendering of a conversation, taken apart.

    Attributes:
        template, messages: what was rendered; the messages are in canonical form.
        adapted: from which messages of the conversation each of ``messages`` is made.
        rule: how they were adapted to the template.
        text: the rendering.
        chat: the conversation with placeholders.
        spans: where each placeholder's string lies in ``text``, in order.
        edges: white space and markup before and after each span that belong to its string, in characters.
        generation: character spans that the template's generation placeholders enclose.
        edges_known: whether ``edges`` was measured; otherwise white space at the edges counts as the template's.
    """

    template: ChatTemplate
    messages: list[Message]
    text: str
    chat: PlaceholderChat
    spans: list[PlaceholderSpan]
    edges: list[Span]
    generation: list[Span]
    edges_known: bool
    adapted: list[Adapted] = field(default_factory=list)
    rule: Rule = AS_IS

    def string(self, span: PlaceholderSpan) -> SourceString:
        return self.chat.strings[self.chat.placeholders[span.placeholder].string]

    def check(self) -> None:
        """Refuse a rendering that left out a tool call, or that hides where a message's calls are."""
        written = {(string.message, string.call) for string in map(self.string, self.spans)}
        replaced = {(string.message, string.call) for string in self.chat.strings}
        for i, message in enumerate(self.messages):
            calls = [(i, k) for k in range(len(message.get("tool_calls", ())))]
            if any(call in replaced and call not in written for call in calls):
                raise self.template.error(i, self.messages, "leaves out a tool call")
            if calls and not written.intersection(calls):
                raise self.template.error(i, self.messages, "writes its tool calls where they cannot be found")

    def has_contents(self) -> bool:
        """Whether any content was rendered, if there was one to render."""
        contents = any(string.kind == "content" for string in self.chat.strings)
        return not contents or any(self.string(span).kind == "content" for span in self.spans)

    def loses_answers(self) -> bool:
        """Whether the template left out something that the assistant said beside its thoughts."""
        lost = (string for string in self.unrendered() if string.kind == "content")
        return any(self.messages[string.message]["role"] == "assistant" for string in lost)

    def unrendered(self) -> list[SourceString]:
        """Contents and reasoning that the template left out."""
        written = {self.chat.placeholders[span.placeholder].string for span in self.spans}
        lost = [string for i, string in enumerate(self.chat.strings) if i not in written and string.text.strip()]
        return [string for string in lost if string.kind in ("content", "reasoning")]


def render_with_placeholders(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    holds_special: Callable[[str], bool],
    generation_prompt: bool = False,
    rules: Sequence[Rule] = (AS_IS,),
) -> RenderedChat:
    """Render the conversation in the first form that the template takes without an error and without losing a call.

    Args:
        holds_special: whether a string contains the content of a special token.
        rules: how the conversation may be adapted to the template, in order; the first that loses nothing of what the
            assistant said, else the first that works.
    """
    if not messages:
        raise TemplateError(f"chat template {template.name!r} was given no messages; expected at least one.")
    tried: list[_Failures] = []
    lossy: RenderedChat | None = None
    for candidate in _candidates(messages, rules):
        if not candidate.worth_trying(tried):
            continue
        if not tried or tried[-1].rule != candidate.rule:
            tried.append(_Failures(template, candidate.rule, candidate.adapted))
        rendered = _render_candidate(template, candidate, tried[-1], holds_special, generation_prompt)
        if rendered is not None and not rendered.loses_answers():
            return rendered
        lossy = lossy or rendered
    if lossy is not None:
        return lossy
    raise tried[0].most_telling()


def first_request(template: ChatTemplate, messages: Sequence[Message], *, generation_prompt: bool = False) -> Request:
    """The first rendering that :func:`render_with_placeholders` asks for, without rules."""
    first = next(_candidates(messages, (AS_IS,)))
    conversation = canonical([one.message for one in first.adapted], first.message_format)
    return template.request(conversation, generation_prompt=generation_prompt)


@dataclass(frozen=True)
class _Candidate:
    """A conversation as a rule adapts it, in one of the formats that templates expect."""

    rule: Rule
    adapted: list[Adapted]
    message_format: MessageFormat

    def worth_trying(self, tried: Sequence[_Failures]) -> bool:
        """Whether what failed so far leaves a reason to try it; ``tried`` has an entry for each rule that was."""
        if not tried:
            return True
        if tried[-1].rule == self.rule:
            # a format that works is the rule's answer, even where it loses one of the assistant's: another rule is next
            return not tried[-1].rendered and (not self.message_format.parts or tried[-1].suggest_parts)
        if self.rule == "short_ids" and not tried[0].suggests_ids:
            return False
        return self.adapted != tried[-1].adapted


def _candidates(messages: Sequence[Message], rules: Sequence[Rule]) -> Iterator[_Candidate]:
    """Every rule with every format, the usual ones first."""
    for rule in rules:
        adapted = adapt(messages, rule)
        for message_format in _message_formats([one.message for one in adapted]):
            yield _Candidate(rule, adapted, message_format)


def _render_candidate(
    template: ChatTemplate,
    candidate: _Candidate,
    failures: _Failures,
    holds_special: Callable[[str], bool],
    generation_prompt: bool,
) -> RenderedChat | None:
    """The candidate's rendering; None where it does not do, and ``failures`` says why."""
    conversation = canonical([one.message for one in candidate.adapted], candidate.message_format)
    try:
        text, generation = template.render(conversation, generation_prompt=generation_prompt)
        rendered = _locate(template, conversation, text, generation, holds_special, generation_prompt)
        rendered.check()
    except LimitExceeded:
        # a template that needs too much needs it for every candidate
        raise
    except TemplateError as error:
        failures.losses.append(error)
        return None
    except render_errors() as error:
        failures.refusals.append((error, conversation))
        return None
    if not rendered.has_contents():
        failures.losses.append(template.error(0, conversation, "leaves out the content of every message"))
        failures.contents_lost = True
        return None
    failures.rendered = True
    return replace(rendered, adapted=candidate.adapted, rule=candidate.rule)


def _message_formats(messages: Sequence[Message]) -> Iterator[MessageFormat]:
    """Ways to write a conversation, the usual ones first."""
    has_calls = any(isinstance(m, dict) and m.get("tool_calls") for m in messages)
    no_contents: tuple[str | None, ...] = ("", None) if has_calls else ("",)
    for parts in (False, True):
        for as_json in (False, True) if has_calls else (False,):
            for no_content in no_contents:
                yield MessageFormat(parts, as_json, no_content)


@dataclass
class _Failures:
    """Why the formats of one rule that were tried so far did not do; ``rendered`` where one of them did."""

    template: ChatTemplate
    rule: Rule
    adapted: list[Adapted]
    refusals: list[tuple[Exception, list[Message]]] = field(default_factory=list)
    losses: list[TemplateError] = field(default_factory=list)
    contents_lost: bool = False
    rendered: bool = False

    @property
    def suggest_parts(self) -> bool:
        """Whether the template seems to look for parts in a content that is a string."""
        return self.contents_lost or any(type(error).__name__ == "UndefinedError" for error, _ in self.refusals)

    @property
    def suggests_ids(self) -> bool:
        """Whether the template speaks of ids where it refuses."""
        return any(re.search(r"\bids?\b", str(error), re.IGNORECASE) for error, _ in self.refusals)

    def most_telling(self) -> TemplateError:
        """A refusal in the template's own words, else a loss, else an operation that did not fit the data."""
        own_words = [refusal for refusal in self.refusals if type(refusal[0]).__name__ == "TemplateError"]
        if self.losses and not own_words:
            return self.losses[0]
        return self.template.refusal(*(own_words or self.refusals)[0])


def _locate(
    template: ChatTemplate,
    messages: list[Message],
    text: str,
    generation: list[Span],
    holds_special: Callable[[str], bool],
    generation_prompt: bool,
) -> RenderedChat:
    tested = frozenset(s for s in template.tested_strings() if not holds_special(s))
    failed: int | None = None

    def placeholder_chat(level: int, keep_edges: bool) -> PlaceholderChat:
        def wanted(string: SourceString) -> bool:
            return holds_special(string.text) or _wanted(string, level, messages)

        return PlaceholderChat(messages, template.tools, real=text, tested=tested, wanted=wanted, keep_edges=keep_edges)

    for level in (_FIELDS, _ALL, _NO_EMPTY, _NO_NAMES, _NO_ARGUMENTS):
        chat = placeholder_chat(level, True)
        try:
            skeleton = template.render_skeleton(chat.messages, chat.tools, generation_prompt)
            spans = locate(text, skeleton, chat)
        except render_errors():
            continue
        except Mismatch as mismatch:
            if failed is None and mismatch.placeholder is not None:
                failed = chat.strings[chat.placeholders[mismatch.placeholder].string].message
            continue
        edges, known = _edges(template, skeleton, chat, partial(placeholder_chat, level, False), generation_prompt)
        return RenderedChat(template, messages, text, chat, spans, edges, generation, known)
    index = len(messages) - 1 if failed is None else failed
    raise template.error(index, messages, "changes it in a way that its text cannot be found again")


def _wanted(string: SourceString, level: int, messages: list[Message]) -> bool:
    if not string.text.strip():
        # An empty answer still has a place, and an end of turn to learn.
        message = messages[string.message]
        alone = not message.get("tool_calls") and not message.get("reasoning_content")
        return level <= _ALL and string.kind == "content" and message["role"] == "assistant" and alone
    by_kind = {"content": True, "reasoning": True, "name": level < _NO_NAMES, "argument": level < _NO_ARGUMENTS}
    return by_kind.get(string.kind, level == _FIELDS and string.kind in CALL_KINDS)


def _edges(
    template: ChatTemplate,
    skeleton: str,
    chat: PlaceholderChat,
    make_bare: Callable[[], PlaceholderChat],
    generation_prompt: bool,
) -> tuple[list[Span], bool]:
    """Kept white space around each span, and whether it is known for sure."""
    if any(string.text != string.text.strip() for string in chat.strings):
        bare = make_bare()
        try:
            stripped = template.render_skeleton(bare.messages, bare.tools, generation_prompt)
        except render_errors():
            stripped = ""
        edges = kept_edges(skeleton, stripped, chat)
        if edges is not None:
            return edges, True
        return kept_edges(skeleton, skeleton, chat) or [], False
    return kept_edges(skeleton, skeleton, chat) or [], True
