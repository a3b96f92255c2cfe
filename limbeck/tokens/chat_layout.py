"""A rendered conversation with the place of every string in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from limbeck.tokens.chat_leaves import Forms, Leaf, Marked, canonical
from limbeck.tokens.chat_spans import Mismatch, Place, kept_edges, locate
from limbeck.tokens.chat_template import ChatTemplate, Message, Span, render_errors
from limbeck.utils.errors import TemplateError

# Marked strings by level; each level gives up some, for templates that look at names or at emptiness.
_ALL, _NO_EMPTY, _NO_NAMES, _NO_ARGUMENTS = range(4)


@dataclass(frozen=True)
class Layout:
    """The rendering of a conversation, taken apart.

    Attributes:
        template, messages: what was rendered; the messages are in canonical form.
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
) -> Layout:
    """Render the conversation in the first form that the template takes without an error and without losing a call.

    Args:
        holds_special: whether a string contains the content of a special token.
    """
    if not messages:
        raise TemplateError(f"chat template {template.name!r} was given no messages; expected at least one.")
    failures = _Failures(template)
    for forms in _forms(messages):
        if forms.parts and not failures.suggest_parts:
            break
        conversation = canonical(messages, forms)
        try:
            text, generation = template.render(conversation, generation_prompt=generation_prompt)
            layout = _locate(template, conversation, text, generation, holds_special, generation_prompt)
            layout.check()
        except TemplateError as error:
            failures.losses.append(error)
        except render_errors() as error:
            failures.refusals.append((error, conversation))
        else:
            if layout.has_contents():
                return layout
            failures.losses.append(template.error(0, conversation, "leaves out the content of every message"))
            failures.contents_lost = True
    raise failures.most_telling()


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

    for level in (_ALL, _NO_EMPTY, _NO_NAMES, _NO_ARGUMENTS):
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
        return level == _ALL and leaf.kind == "content" and message["role"] == "assistant" and alone
    by_kind = {"content": True, "reasoning": True, "name": level < _NO_NAMES, "argument": level < _NO_ARGUMENTS}
    return by_kind.get(leaf.kind, False)


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
