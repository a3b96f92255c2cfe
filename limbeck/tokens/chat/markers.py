"""Every string of a conversation, found in its rendering and proven.

The strings are brought into the form that templates expect (``canonical``), replaced by markers (``Marked``), and the
template is rendered a second time. What stands between the markers must stand in the real rendering too, and each
marker must be one of the forms its string can take (as it is, or escaped for JSON or Python). If that rebuilds the real
rendering to the last character, every place is known (``Layout``); otherwise nothing is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from markupsafe import escape

from limbeck.errors import TemplateError
from limbeck.tokens.chat.adapt import AS_IS, KEY, Adapted, Part, Rule, Written, adapt, escaped, written_json
from limbeck.tokens.chat.sandbox import LimitExceeded
from limbeck.tokens.chat.template import ChatTemplate, Message, Span, render_errors

Path = tuple[Any, ...]

CALL_KINDS = ("name", "key", "argument", "scalar")
"""Kinds of the strings and values that make up a tool call."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_OWN_KEYS = ("supervise", "weight")

# Marked strings by level; each level gives up some, for templates that look at keys, names or at emptiness.
_FIELDS, _ALL, _NO_EMPTY, _NO_NAMES, _NO_ARGUMENTS = range(5)


# -- strings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
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
class Mark:
    """A marker for ``core``, a stretch of string number ``leaf``, which has ``before`` and ``after`` around it.

    ``other``: a further way to write it.
    """

    leaf: int
    core: str
    before: str
    after: str
    other: str | None = None


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
        function["arguments"] = Written(written_json(arguments or {}))
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
        """``(mark, start, end)`` of every marker in a rendering, in order."""
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
        leaf = Leaf(path[0], kind, text, path[2] if inside else -1, path[3:] if inside else ())
        return self._marked_leaf(leaf) if self._wanted(leaf) else text

    def _replace_part(self, part: Part, path: Path) -> str:
        """A string inside a longer one that was written from it."""
        call = path[2] if path[1:2] == ("tool_calls",) else part.call
        leaf = Leaf(path[0], part.kind, part.text, call, part.path)
        return self._marked_leaf(leaf, escaped if part.in_json else str) if self._wanted(leaf) else part.written

    def _replace_scalar(self, value: Any, path: Path) -> Any:
        """A number in place of a number, truth value or null: templates print it wherever they print the value."""
        leaf = Leaf(path[0], "scalar", json.dumps(value), path[2], path[3:])
        if not self._wanted(leaf):
            return value
        self.leaves.append(leaf)
        self.marks.append(Mark(len(self.leaves) - 1, leaf.text, "", "", str(value)))
        return int(f"{self._digits}{len(self.marks) - 1:07d}")

    def _marked_leaf(self, leaf: Leaf, write: Callable[[str], str] = str) -> str:
        # Templates compare messages with each other, so equal strings stay equal where their place does not matter.
        shared = (leaf.kind, leaf.text) if leaf.message < 0 or not self._assistant[leaf.message] else None
        if shared in self._shared:
            return self._shared[shared]
        self.leaves.append(leaf)
        marked = self._mark(leaf.text, write)
        if shared is not None:
            self._shared[shared] = marked
        return marked

    def _mark(self, text: str, write: Callable[[str], str]) -> str:
        """Markers in place of the text's cores; white space and markup that templates look for stay as they are.

        ``write``: how text stands in the string around it.
        """
        cores = list(self._cores(text)) or [(0, len(text))]
        markers = [self._marker(text, start, end) for start, end in cores]
        edges = [0, *(x for core in cores for x in core), len(text)]
        between = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        if not self._keep_edges:
            between[0], between[-1] = between[0].lstrip(), between[-1].rstrip()
        return "".join(x for pair in zip(map(write, between), [*markers, ""], strict=True) for x in pair)

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


def _fresh_nonces(real: str) -> tuple[str, str]:
    """What no text of the rendering contains: one for strings, one of digits for other values."""
    salt = 0
    while True:
        digest = hashlib.sha256(f"{salt}\0{real}".encode("utf-8", "surrogatepass"))
        nonce, digits = f"Lk{digest.hexdigest()[:12]}n", f"7{int.from_bytes(digest.digest()[:8], 'big') % 10**11:011d}"
        if nonce not in real and digits not in real:
            return nonce, digits
        salt += 1


# -- places ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Characters ``start:end`` of the rendering stand for mark ``mark``; ``repeat`` if it stood somewhere before."""

    mark: int
    start: int
    end: int
    repeat: bool


class Mismatch(Exception):
    """The rendering cannot be rebuilt; ``mark`` is the first marker that does not fit, None if there is none."""

    def __init__(self, mark: int | None) -> None:
        super().__init__(mark)
        self.mark = mark


def locate(real: str, skeleton: str, marked: Marked) -> list[Place]:
    """Every marker's place in the real rendering, in order.

    Raises:
        Mismatch: the skeleton does not rebuild the rendering.
    """
    found = list(marked.occurrences(skeleton))
    edges = [0, *(x for _, start, end in found for x in (start, end)), len(skeleton)]
    literals = [skeleton[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    forms = [_writings(marked.marks[mark]) for mark, _, _ in found]
    spans = _rebuild(real, literals, forms)
    if isinstance(spans, int):
        raise Mismatch(found[min(spans, len(found) - 1)][0] if found else None)
    seen: set[int] = set()
    places = []
    for (mark, _, _), (start, end) in zip(found, spans, strict=True):
        places.append(Place(mark, start, end, mark in seen))
        seen.add(mark)
    return places


def _rebuild(real: str, literals: list[str], forms: list[tuple[str, ...]]) -> list[tuple[int, int]] | int:
    """Spans of the markers such that literals and forms spell ``real``; otherwise how many markers fitted."""
    count = len(forms)
    starts, ends, tried = [len(literals[0])] + [0] * count, [0] * count, [0] * (count + 1)
    if not real.startswith(literals[0]) or (not count and real != literals[0]):
        return 0
    at = furthest = 0
    budget = 64 * count + 4096
    while 0 <= at < count and budget:
        budget -= 1
        if tried[at] == len(forms[at]):
            at -= 1
            continue
        form = forms[at][tried[at]]
        tried[at] += 1
        end = starts[at] + len(form)
        follows = end + len(literals[at + 1])
        fits = real.startswith(form, starts[at]) and real.startswith(literals[at + 1], end)
        if fits and (at + 1 < count or follows == len(real)):
            ends[at], starts[at + 1], tried[at + 1] = end, follows, 0
            at += 1
            furthest = max(furthest, at)
    return list(zip(starts[:count], ends, strict=True)) if at == count else furthest


def _writings(mark: Mark) -> tuple[str, ...]:
    """What a template can make of a string without losing any of it."""
    core = mark.core
    escaped = json.dumps(core, ensure_ascii=False)[1:-1]
    forms = [core, escaped, json.dumps(core)[1:-1], repr(core)[1:-1], str(escape(core))]
    forms.append(json.dumps(escaped, ensure_ascii=False)[1:-1])
    if mark.other is not None:
        forms.append(mark.other)
    if not core.strip():
        forms += [core.lstrip("\n"), core.rstrip("\n"), core.strip("\n"), ""]
    return tuple(dict.fromkeys(forms))


def kept_edges(skeleton: str, bare: str, marked: Marked) -> list[tuple[int, int]] | None:
    """How much of each marked string's leading and trailing white space the template kept.

    Args:
        skeleton: the rendering with markers and white space.
        bare: the rendering whose marked strings have no white space at their ends.

    Returns:
        ``(before, after)`` characters for every marker in order; None where the two renderings do not correspond.
    """
    with_edges, without = list(marked.occurrences(skeleton)), list(marked.occurrences(bare))
    if [o[0] for o in with_edges] != [o[0] for o in without]:
        return None
    kept = [[0, 0] for _ in with_edges]
    last_a = last_b = 0
    for i, ((_, start_a, end_a), (_, start_b, end_b)) in enumerate(zip(with_edges, without, strict=True)):
        gap, plain = skeleton[last_a:start_a], bare[last_b:start_b]
        after = marked.marks[with_edges[i - 1][0]].after if i else ""
        split = _split_gap(gap, plain, after, marked.marks[with_edges[i][0]].before)
        if split is None:
            return None
        if i:
            kept[i - 1][1] = split[0]
        kept[i][0] = split[1]
        last_a, last_b = end_a, end_b
    if with_edges:
        split = _split_gap(skeleton[last_a:], bare[last_b:], marked.marks[with_edges[-1][0]].after, "")
        kept[-1][1] = split[0] if split else 0
    return [(before, after) for before, after in kept]


def _split_gap(gap: str, plain: str, after: str, before: str) -> tuple[int, int] | None:
    """How much of ``gap`` continues the string in front (``after``) and begins the next one (``before``).

    ``plain`` is the gap between the same markers when the strings have no white space at their ends.
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


# -- layouts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The rendering of a conversation, taken apart.

    Attributes:
        template, messages: what was rendered; the messages are in canonical form.
        adapted: from which messages of the conversation each of ``messages`` is made.
        rule: how they were adapted to the template.
        text: the rendering.
        skeleton: the rendering with markers; outside ``places`` it says the same as ``text``.
        marked: the markers.
        places: where each marker's string lies in ``text``, in order.
        edges: white space and markup before and after each place that belong to its string, in characters.
        generation: character spans that the template's generation markers enclose.
        edges_known: whether ``edges`` was measured; otherwise white space at the edges counts as the template's.
    """

    template: ChatTemplate
    messages: list[Message]
    text: str
    skeleton: str
    marked: Marked
    places: list[Place]
    edges: list[Span]
    generation: list[Span]
    edges_known: bool
    adapted: list[Adapted] = field(default_factory=list)
    rule: Rule = AS_IS

    def leaf(self, place: Place) -> Leaf:
        """The string that lies at a place."""
        return self.marked.leaves[self.marked.marks[place.mark].leaf]

    def check(self) -> None:
        """Refuse a rendering that left out a tool call, or that hides where a message's calls are."""
        there = {(leaf.message, leaf.call) for leaf in map(self.leaf, self.places)}
        marked = {(leaf.message, leaf.call) for leaf in self.marked.leaves}
        for i, message in enumerate(self.messages):
            calls = [(i, k) for k in range(len(message.get("tool_calls", ())))]
            if any(call in marked and call not in there for call in calls):
                raise self.template.error(i, self.messages, "leaves out a tool call")
            if calls and not there.intersection(calls):
                raise self.template.error(i, self.messages, "writes its tool calls where they cannot be found")

    def has_contents(self) -> bool:
        """Whether any content was rendered, if there was one to render."""
        contents = any(leaf.kind == "content" for leaf in self.marked.leaves)
        return not contents or any(self.leaf(place).kind == "content" for place in self.places)

    def loses_answers(self) -> bool:
        """Whether the template left out something that the assistant said beside its thoughts."""
        lost = (leaf for leaf in self.unrendered() if leaf.kind == "content")
        return any(self.messages[leaf.message]["role"] == "assistant" for leaf in lost)

    def unrendered(self) -> list[Leaf]:
        """Contents and reasoning that the template left out."""
        there = {self.marked.marks[place.mark].leaf for place in self.places}
        lost = [leaf for i, leaf in enumerate(self.marked.leaves) if i not in there and leaf.text.strip()]
        return [leaf for leaf in lost if leaf.kind in ("content", "reasoning")]


def lay_out(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    holds_special: Callable[[str], bool],
    generation_prompt: bool = False,
    rules: Sequence[Rule] = (AS_IS,),
) -> Layout:
    """Render the conversation in the first form that the template takes without an error and without losing a call.

    Args:
        holds_special: whether a string contains the content of a special token.
        rules: how the conversation may be adapted to the template, in order; the first that loses nothing of what the
            assistant said, else the first that works.
    """
    if not messages:
        raise TemplateError(f"chat template {template.name!r} was given no messages; expected at least one.")
    tried: list[_Failures] = []
    lossy: Layout | None = None
    before: list[Adapted] | None = None
    for rule in rules:
        adapted = adapt(messages, rule)
        if adapted == before or (rule == "short_ids" and tried and not tried[0].suggests_ids):
            continue
        before = adapted
        failures = _Failures(template)
        tried.append(failures)
        found = _first_form(template, adapted, rule, failures, holds_special, generation_prompt)
        if found is not None and not found.loses_answers():
            return found
        lossy = lossy or found
    if lossy is not None:
        return lossy
    raise tried[0].most_telling()


def _first_form(
    template: ChatTemplate,
    adapted: list[Adapted],
    rule: Rule,
    failures: _Failures,
    holds_special: Callable[[str], bool],
    generation_prompt: bool,
) -> Layout | None:
    """The layout in the first form that works; None where none does, and ``failures`` says why."""
    messages = [one.message for one in adapted]
    for forms in _forms(messages):
        if forms.parts and not failures.suggest_parts:
            break
        conversation = canonical(messages, forms)
        try:
            text, generation = template.render(conversation, generation_prompt=generation_prompt)
            layout = _locate(template, conversation, text, generation, holds_special, generation_prompt)
            layout.check()
        except LimitExceeded:
            raise
        except TemplateError as error:
            failures.losses.append(error)
        except render_errors() as error:
            failures.refusals.append((error, conversation))
        else:
            if layout.has_contents():
                return replace(layout, adapted=adapted, rule=rule)
            failures.losses.append(template.error(0, conversation, "leaves out the content of every message"))
            failures.contents_lost = True
    return None


def _forms(messages: Sequence[Message]) -> Iterator[Forms]:
    """Ways to write a conversation, the usual ones first."""
    has_calls = any(isinstance(m, dict) and m.get("tool_calls") for m in messages)
    no_contents: tuple[str | None, ...] = ("", None) if has_calls else ("",)
    for parts in (False, True):
        for as_json in (False, True) if has_calls else (False,):
            for no_content in no_contents:
                yield Forms(parts, as_json, no_content)


@dataclass
class _Failures:
    """Why the forms tried so far did not do."""

    template: ChatTemplate
    refusals: list[tuple[Exception, list[Message]]] = field(default_factory=list)
    losses: list[TemplateError] = field(default_factory=list)
    contents_lost: bool = False

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
) -> Layout:
    tested = frozenset(s for s in template.tested_strings() if not holds_special(s))
    failed: int | None = None

    def marked(level: int, keep_edges: bool) -> Marked:
        def wanted(leaf: Leaf) -> bool:
            return holds_special(leaf.text) or _wanted(leaf, level, messages)

        return Marked(messages, template.tools, real=text, tested=tested, wanted=wanted, keep_edges=keep_edges)

    for level in (_FIELDS, _ALL, _NO_EMPTY, _NO_NAMES, _NO_ARGUMENTS):
        marks = marked(level, True)
        try:
            skeleton, _ = template.render(marks.messages, tools=marks.tools, generation_prompt=generation_prompt)
            places = locate(text, skeleton, marks)
        except render_errors():
            continue
        except Mismatch as mismatch:
            if failed is None and mismatch.mark is not None:
                failed = marks.leaves[marks.marks[mismatch.mark].leaf].message
            continue
        edges, known = _edges(template, skeleton, marks, partial(marked, level, False), generation_prompt)
        return Layout(template, messages, text, skeleton, marks, places, edges, generation, known)
    index = len(messages) - 1 if failed is None else failed
    raise template.error(index, messages, "changes it in a way that its text cannot be found again")


def _wanted(leaf: Leaf, level: int, messages: list[Message]) -> bool:
    if not leaf.text.strip():
        # An empty answer still has a place, and an end of turn to learn.
        message = messages[leaf.message]
        alone = not message.get("tool_calls") and not message.get("reasoning_content")
        return level <= _ALL and leaf.kind == "content" and message["role"] == "assistant" and alone
    by_kind = {"content": True, "reasoning": True, "name": level < _NO_NAMES, "argument": level < _NO_ARGUMENTS}
    return by_kind.get(leaf.kind, level == _FIELDS and leaf.kind in CALL_KINDS)


def _edges(
    template: ChatTemplate, skeleton: str, marks: Marked, make_bare: Callable[[], Marked], generation_prompt: bool
) -> tuple[list[Span], bool]:
    """Kept white space around each place, and whether it is known for sure."""
    if any(leaf.text != leaf.text.strip() for leaf in marks.leaves):
        bare = make_bare()
        try:
            stripped, _ = template.render(bare.messages, tools=bare.tools, generation_prompt=generation_prompt)
        except render_errors():
            stripped = ""
        edges = kept_edges(skeleton, stripped, marks)
        if edges is not None:
            return edges, True
        return kept_edges(skeleton, skeleton, marks) or [], False
    return kept_edges(skeleton, skeleton, marks) or [], True
