"""A conversation as one token sequence: rendered, tokenised once, its supervised spans found and proven.

>>> rendering = render_chat(tokenizer, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
>>> tokenizer.decode(rendering.ids[rendering.target])
'4<|im_end|>'

The special tokens that the template writes are tokens; the same strings inside a message, a tool call or a tool schema
are text. Template arguments are the caller's own and may write special tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from limbeck.tokens.chat_layout import Layout, lay_out
from limbeck.tokens.chat_regions import Turn, TurnFinder
from limbeck.tokens.chat_template import ChatTemplate, Message
from limbeck.tokens.chat_tokens import AliasedText, Special, find_specials, special_pattern
from limbeck.tokens.encoder import TextEncoder
from limbeck.tokens.rendering import Rendering, Segment
from limbeck.utils.errors import ConfigError


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    add_generation_prompt: bool = False,
    train_on: str = "all",
) -> Rendering:
    """Render a conversation with the tokenizer's chat template.

    Supervised (``target``) are, for every assistant message: its content, its reasoning and its tool calls with the
    markup around them, as far as the model has to write it, and the end-of-turn token. Where the template has
    generation markers they decide what the model writes. A message with ``"supervise": False`` or ``"weight": 0`` is
    context only.

    Args:
        messages: dicts with ``role``, ``content`` and optionally ``reasoning_content``, ``tool_calls`` (arguments as an
            object or a JSON string), ``tool_call_id``, ``name``, ``supervise``, ``weight``.
        tools: JSON schemas or functions, passed to the template.
        template: a Jinja template, or the name of one of the tokenizer's, in place of its default.
        template_kwargs: further template arguments, such as ``enable_thinking``.
        name: what errors call the template.
        add_generation_prompt: whether the rendering ends with the header of an answer to come.
        train_on: ``all`` assistant messages, or the ``last`` one.

    Returns:
        Segments of kind ``content``, ``reasoning``, ``tool_call`` and ``eot`` in order, with message indices.
        ``dropped`` counts ``straddle`` (tokens across a span's edge), ``unrendered_content`` and
        ``unrendered_reasoning`` (of assistant messages) and ``unrendered_context`` (of the others) that the template
        leaves out, ``unrendered_tools`` (given to a template that reads none), ``no_end_of_turn``,
        ``outside_generation`` (answers without generation markers) and ``edge_whitespace`` (strings whose white space
        could not be told from the template's).

    Raises:
        TemplateError: the template refuses the conversation, or a message's text cannot be found in the rendering.
    """
    if train_on not in ("all", "last"):
        raise ConfigError(f"train_on is {train_on!r}, expected 'all' or 'last' (assistant messages).")
    chat_template = ChatTemplate(tokenizer, tools=tools, template=template, arguments=template_kwargs, name=name)
    encoder = TextEncoder.for_tokenizer(tokenizer)
    located = locate_turns(chat_template, encoder, messages, train_on=train_on, generation_prompt=add_generation_prompt)
    aliased = AliasedText(located.layout.text, located.specials, encoder)
    return _supervise(aliased, located.turns, located.dropped)


@dataclass(frozen=True)
class LocatedTurns:
    """A rendered conversation before it is tokenised: its text, the template's special tokens, and what the assistant
    wrote, all by characters."""

    layout: Layout
    specials: list[Special]
    turns: list[Turn]
    dropped: Counter[str]


def locate_turns(
    template: ChatTemplate,
    encoder: TextEncoder,
    messages: Sequence[Message],
    *,
    train_on: str = "all",
    generation_prompt: bool = False,
) -> LocatedTurns:
    """Render a conversation and find the turns of its assistant messages; see :func:`render_chat`."""
    pattern = special_pattern(encoder)
    layout = lay_out(
        template,
        messages,
        holds_special=lambda text: pattern is not None and pattern.search(text) is not None,
        generation_prompt=generation_prompt,
    )
    strings = [(p.start - e[0], p.end + e[1]) for p, e in zip(layout.places, layout.edges, strict=True)]
    specials = find_specials(layout.text, strings, encoder)
    finder = TurnFinder(layout, specials)
    turns = finder.find(_supervised(messages, train_on))
    if template.tools and not template.reads_tools:
        finder.dropped["unrendered_tools"] += len(template.tools)
    if not layout.edges_known:
        finder.dropped["edge_whitespace"] += _edged(layout, turns)
    return LocatedTurns(layout, specials, turns, finder.dropped)


def _supervised(messages: Sequence[Message], train_on: str) -> list[int]:
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = assistant[-1:] if train_on == "last" else assistant
    return [i for i in chosen if messages[i].get("supervise", True) and messages[i].get("weight", 1)]


def _edged(layout: Layout, turns: Sequence[Turn]) -> int:
    """Number of supervised strings that begin or end with white space."""
    messages = {turn.message for turn in turns}
    return sum(leaf.message in messages and leaf.text != leaf.text.strip() for leaf in layout.marked.leaves)


def _supervise(aliased: AliasedText, turns: Sequence[Turn], dropped: Counter[str]) -> Rendering:
    """The rendering with its target tokens and segments."""
    rendering = aliased.rendering
    target = np.zeros(len(rendering), dtype=bool)
    segments: list[Segment] = []
    for turn in turns:
        first, last, cut = aliased.cover(*turn.region)
        target[first:last] = True
        dropped["straddle"] += cut
        for kind, start, end in turn.segments:
            tokens = aliased.cover(start, end)[:2]
            segments.append(Segment(turn.message, kind, aliased.byte(start), aliased.byte(end), *tokens))
        if turn.end is not None:
            token, at = aliased.special_token(turn.end), aliased.byte(turn.end.start)
            target[token] = True
            segments.append(Segment(turn.message, "eot", at, at, token, token + 1))
    counts = Counter(rendering.dropped) + dropped
    return replace(rendering, target=target, segments=tuple(segments), dropped=dict(counts))
