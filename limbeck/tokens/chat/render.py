"""A conversation as one token sequence: rendered, tokenised once, its supervised spans found and proven.

>>> rendering = render_chat(tokenizer, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
>>> tokenizer.decode(rendering.ids[rendering.loss_mask])
'4<|im_end|>'

The special tokens that the template writes are tokens; the same strings inside a message, a tool call or a tool schema
are text. Template arguments are the caller's own and may write special tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from limbeck.errors import ConfigError, LimbeckError, TemplateError
from limbeck.tokens.chat import sandbox
from limbeck.tokens.chat.assistant_spans import Special, Turn, locate_turns
from limbeck.tokens.chat.placeholders import first_request
from limbeck.tokens.chat.template import ChatTemplate, Message, render_errors
from limbeck.tokens.tokenized_text import CallField, Segment, TokenizedText
from limbeck.tokens.tokenizer import ByteTokenizer

_REFUSALS: tuple[type[Exception], ...] = (LimbeckError, *render_errors())


def render_chat(
    tokenizer: object,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    add_generation_prompt: bool = False,
    train_on: str = "all",
) -> TokenizedText:
    """Render a conversation with the tokenizer's chat template.

    Supervised (``loss_mask``) are, for every assistant message: its content, its reasoning and its tool calls with the
    markup around them, as far as the model has to write it, and the end-of-turn token. Where the template has
    generation markers they decide what the model writes. A message with ``"supervise": False`` or ``"weight": 0`` is
    context only.

    Args:
        tokenizer: a :class:`ByteTokenizer`, or a transformers fast tokenizer.
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
        ``skipped`` counts ``straddle`` (tokens across a span's edge), ``unrendered_content`` and
        ``unrendered_reasoning`` (of assistant messages) and ``unrendered_context`` (of the others) that the template
        leaves out, ``unrendered_tools`` (given to a template that reads none), ``no_end_of_turn``,
        ``outside_generation`` (answers without generation markers) and ``edge_whitespace`` (strings whose white space
        could not be distinguished from the template's).

    Raises:
        TemplateError: the template refuses the conversation, or a message's text cannot be found in the rendering.
    """
    if train_on not in ("all", "last"):
        raise ConfigError(f"train_on is {train_on!r}, expected 'all' or 'last' (assistant messages).")
    byte_tokenizer = ByteTokenizer.of(tokenizer)
    chat = ChatTemplate(byte_tokenizer, tools=tools, template=template, arguments=template_kwargs, name=name)
    located = locate_turns(chat, byte_tokenizer, messages, train_on=train_on, generation_prompt=add_generation_prompt)
    aliased = AliasedText(located.rendered.text, located.specials, byte_tokenizer)
    rendering, straddling = supervise(aliased, located.turns)
    skipped = Counter(rendering.skipped) + located.skipped + Counter(straddle=straddling)
    return replace(rendering, skipped=dict(skipped))


def render_ahead(conversations: Iterable[Mapping[str, Any]]) -> None:
    """Begin to render conversations that :func:`render_chat` is called for next, in its arguments.

    Their templates run while the first of them are tokenized. Nothing depends on it but the time that it takes; what
    cannot be rendered is left to :func:`render_chat` to refuse.
    """
    sandbox.render_ahead(request for arguments in conversations if (request := _request(**arguments)) is not None)


def _request(
    tokenizer: object,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    **_: Any,
) -> sandbox.Request | None:
    try:
        chat = ChatTemplate(ByteTokenizer.of(tokenizer), tools=tools, template=template, arguments=template_kwargs)
        return first_request(chat, messages, generation_prompt=add_generation_prompt)
    except _REFUSALS:
        return None


def supervise(aliased: AliasedText, turns: Sequence[Turn]) -> tuple[TokenizedText, int]:
    """The rendering with the turns' tokens as its targets and their parts as its segments.

    Also returns how many tokens were left out because they straddle a turn's edge.
    """
    rendering = aliased.rendering
    target = np.zeros(len(rendering), dtype=bool)
    segments: list[Segment] = []
    fields: list[CallField] = []
    straddling = 0
    for turn in turns:
        first, last, cut = aliased.cover(*turn.region)
        target[first:last] = True
        straddling += cut
        for kind, start, end in turn.segments:
            tokens = aliased.cover(start, end)[:2]
            segments.append(Segment(turn.message, kind, aliased.byte(start), aliased.byte(end), *tokens))
        fields += [replace(f, start=aliased.byte(f.start), end=aliased.byte(f.end)) for f in turn.fields]
        if turn.end is not None:
            token, byte = aliased.special_token(turn.end), aliased.byte(turn.end.start)
            target[token] = True
            segments.append(Segment(turn.message, "eot", byte, byte, token, token + 1))
    return replace(rendering, loss_mask=target, segments=tuple(segments), fields=tuple(fields)), straddling


class AliasedText:
    """A rendered conversation, tokenised once; maps its characters to tokens.

    Attributes:
        rendering: ids and byte ends; nothing is a target yet.
    """

    def __init__(self, text: str, specials: Sequence[Special], tokenizer: ByteTokenizer) -> None:
        self._specials = list(specials)
        self._special_starts = [s.start for s in specials]
        self._special_ends = [s.end for s in specials]
        contents = [text[s.start : s.end] for s in specials]
        cuts = [0, *(x for s in specials for x in (s.start, s.end)), len(text)]
        plain = [text[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        aliases = [tokenizer.aliases[content] for content in contents]
        self.rendering: TokenizedText = tokenizer.encode_aliased("".join(_interleave(plain, aliases)))
        self._tokens = self._find_specials(tokenizer)
        self._text = text
        self._bytes = _byte_counts(text, [content.encode() for content in contents], self._special_ends)

    def _find_specials(self, tokenizer: ByteTokenizer) -> list[int]:
        """Token index of every special; anything but an unknown-token beyond those is an error."""
        indices: list[int] = []
        rendering = self.rendering
        for index in np.flatnonzero(rendering.special).tolist():
            token = int(rendering.ids[index])
            if len(indices) < len(self._specials) and token == self._specials[len(indices)].id:
                indices.append(index)
            elif tokenizer.vocab.roles.get(token) != "unk":
                raise TemplateError(f"text of the conversation became special token {token}; please report this.")
        if len(indices) != len(self._specials):
            raise TemplateError("the tokenizer lost a special token that the chat template wrote; please report this.")
        return indices

    def special_token(self, special: Special) -> int:
        """Token index of a special."""
        return self._tokens[bisect_left(self._special_starts, special.start)]

    def byte(self, char: int) -> int:
        """Offset in ``rendering.source`` of character ``char`` of the text."""
        return self._bytes(char)

    def cover(self, start: int, end: int) -> tuple[int, int, int]:
        """Tokens ``[first, last)`` that lie wholly inside characters ``start:end``, and how many straddle an edge."""
        ends, exact, special = self.rendering.byte_ends, self.rendering.byte_exact, self.rendering.special
        before = bisect_right(self._special_ends, start)
        after = bisect_left(self._special_starts, end)
        low = self._tokens[before - 1] + 1 if before else 0
        high = self._tokens[after] if after < len(self._tokens) else len(ends)
        start_byte, end_byte = self.byte(start), self.byte(end)
        first = max(low, int(np.searchsorted(ends, start_byte, side="left")))
        cut = set()
        while first < high and not special[first] and self._begin(first) < start_byte:
            if ends[first] > start_byte:
                cut.add(first)
            first += 1
        # Tokens of a group that a normaliser changed share its end, so they leave together.
        while cut and first < high and not exact[first - 1] and not exact[first] and self._begin(first) == ends[first]:
            cut.add(first)
            first += 1
        last = max(first, min(high, int(np.searchsorted(ends, end_byte, side="right"))))
        if last < high and self._begin(last) < end_byte < ends[last] and end > start:
            cut.add(last)
        return first, last, len(cut)

    def _begin(self, token: int) -> int:
        return int(self.rendering.byte_ends[token - 1]) if token else 0


def _interleave(plain: list[str], aliases: list[str]) -> Iterable[str]:
    for text, alias in zip(plain, [*aliases, ""], strict=True):
        yield text
        yield alias


class _byte_counts:
    """Byte offset of a character, specials not counted; prefix sums over blocks keep it linear in the text."""

    def __init__(self, text: str, specials: list[bytes], ends: list[int]) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        lengths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        self._sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        self._special_sums: list[int] = [0, *np.cumsum([len(s) for s in specials]).tolist()]
        self._ends = ends

    def __call__(self, char: int) -> int:
        return int(self._sums[char]) - self._special_sums[bisect_right(self._ends, char)]
