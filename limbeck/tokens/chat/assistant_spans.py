"""Assistant spans of a rendered conversation: the characters that an assistant wrote, and the token that ends its
turn."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from limbeck.tokens.chat.placeholders import CALL_KINDS, RenderedChat, render_with_placeholders
from limbeck.tokens.chat.template import ChatTemplate, Message, Span, render_errors
from limbeck.tokens.chat.template_compat import AS_IS, Rule
from limbeck.tokens.tokenized_text import CallField
from limbeck.tokens.tokenizer import ByteTokenizer
from limbeck.tokens.vocab import is_end

_CALL = dict.fromkeys(CALL_KINDS, "tool_call")
_EMPTY_THOUGHT = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
_OPENING_ROLES = ("bos", "start_of_turn")


@dataclass(frozen=True)
class Special:
    """A special token that the template wrote: its characters in the rendering, its id and its role."""

    start: int
    end: int
    id: int
    role: str


@dataclass(frozen=True)
class Turn:
    """Supervision of one assistant message: ``region`` (characters) and the end-of-turn token are supervised.

    ``segments`` are the parts of the region with a meaning of their own: ``(kind, start, end)``. ``fields`` are the
    names, keys and values of its calls, by characters as well.
    """

    message: int
    region: Span
    segments: tuple[tuple[str, int, int], ...]
    end: Special | None
    fields: tuple[CallField, ...] = ()


@dataclass(frozen=True)
class LocatedTurns:
    """A rendered conversation before it is tokenised: its text, the template's special tokens, and what the assistant
    wrote, all by characters."""

    rendered: RenderedChat
    specials: list[Special]
    turns: list[Turn]
    skipped: Counter[str]


def locate_turns(
    template: ChatTemplate,
    tokenizer: ByteTokenizer,
    messages: Sequence[Message],
    *,
    train_on: str = "all",
    generation_prompt: bool = False,
    rules: Sequence[Rule] = (AS_IS,),
) -> LocatedTurns:
    """Render a conversation and find the turns of its assistant messages; see :func:`render_chat`.

    ``rules``: how the conversation may be adapted to the template. Turns carry the numbers of the messages given.
    """
    pattern = tokenizer.special_pattern
    rendered = render_with_placeholders(
        template,
        messages,
        holds_special=lambda text: pattern is not None and pattern.search(text) is not None,
        generation_prompt=generation_prompt,
        rules=rules,
    )
    strings = [(p.start - e[0], p.end + e[1]) for p, e in zip(rendered.spans, rendered.edges, strict=True)]
    specials = find_specials(rendered.text, strings, tokenizer)
    finder = TurnFinder(rendered, specials)
    wanted = set(_supervised(messages, train_on))
    turns = finder.find([i for i, one in enumerate(rendered.adapted) if one.origins and one.origins[0] in wanted])
    if template.tools and not template.reads_tools:
        finder.skipped["unrendered_tools"] += len(template.tools)
    if not rendered.edges_known:
        finder.skipped["edge_whitespace"] += _edged(rendered, turns)
    if rendered.rule != AS_IS:
        finder.skipped[f"written_{rendered.rule}"] += 1
    return LocatedTurns(rendered, specials, _original(rendered, turns), finder.skipped)


def _original(rendered: RenderedChat, turns: Sequence[Turn]) -> list[Turn]:
    """The turns by the messages of the conversation; of a message in several parts only the last one ends its turn."""
    parts = Counter(one.origins[0] for one in rendered.adapted if one.origins)
    last = {rendered.adapted[turn.message].origins[0]: i for i, turn in enumerate(turns)}
    original = []
    for i, turn in enumerate(turns):
        one = rendered.adapted[turn.message]
        message = one.origins[0]
        fields = [replace(f, message=message, call=f.call + one.first_call) for f in turn.fields]
        end = turn.end if parts[message] == 1 or i == last[message] else None
        original.append(replace(turn, message=message, end=end, fields=tuple(fields)))
    return original


def _supervised(messages: Sequence[Message], train_on: str) -> list[int]:
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = assistant[-1:] if train_on == "last" else assistant
    return [i for i in chosen if messages[i].get("supervise", True) and messages[i].get("weight", 1)]


def _edged(rendered: RenderedChat, turns: Sequence[Turn]) -> int:
    """Number of supervised strings that begin or end with white space."""
    messages = {turn.message for turn in turns}
    return sum(string.message in messages and string.text != string.text.strip() for string in rendered.chat.strings)


def find_specials(text: str, protected: Iterable[Span], tokenizer: ByteTokenizer) -> list[Special]:
    """The special tokens in a rendering, outside the spans that hold text of messages."""
    pattern = tokenizer.special_pattern
    if pattern is None:
        return []
    specials, position = [], 0
    ids = tokenizer.special_ids
    for start, end in [*protected, (len(text), len(text))]:
        for match in pattern.finditer(text, position, start):
            token = ids[match[0]]
            specials.append(Special(match.start(), match.end(), token, tokenizer.vocab.roles.get(token, "")))
        position = end
    return specials


@dataclass
class _Run:
    """Neighbouring spans of one kind in one message."""

    kind: str
    start: int
    end: int


@dataclass
class TurnFinder:
    """Finds the assistant turns of one rendered conversation.

    Attributes:
        specials: the special tokens that the template wrote, in order.
        skipped: what was not supervised although it should have been, counted by reason.
    """

    rendered: RenderedChat
    specials: Sequence[Special]
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._special_starts = [s.start for s in self.specials]
        self._headers: dict[str, int] = {}
        self._spans_of: dict[int, list[int]] = {}
        for i, span in enumerate(self.rendered.spans):
            string = self.rendered.string(span)
            if not span.repeat and string.kind != "other":
                self._spans_of.setdefault(string.message, []).append(i)

    def find(self, messages: Collection[int]) -> list[Turn]:
        """The turns of the given messages, in order; what the template left out is counted."""
        for string in self.rendered.unrendered():
            assistant = self.rendered.messages[string.message]["role"] == "assistant"
            self.skipped[f"unrendered_{string.kind}" if assistant else "unrendered_context"] += 1
        turns = [self._turn(i, part) for i in sorted(messages) for part in self._parts(i)]
        return [turn for turn in turns if turn is not None]

    def _parts(self, message: int) -> list[list[int]]:
        """A message's spans, parted where strings of other messages come between."""
        parts: list[list[int]] = []
        for i in self._spans_of.get(message, []):
            between = self.rendered.spans[parts[-1][-1] + 1 : i] if parts else []
            if parts and all(self.rendered.string(span).message == message for span in between):
                parts[-1].append(i)
            else:
                parts.append([i])
        return parts

    def _turn(self, message: int, spans: list[int]) -> Turn | None:
        runs = self._runs(spans)
        gap_start = self.rendered.spans[spans[0] - 1].end if spans[0] else 0
        stop = self._next_foreign(message, spans[-1])
        end = self._end_of_turn(self.rendered.spans[spans[-1]].end, stop)
        if end is None:
            self.skipped["no_end_of_turn"] += 1
        plain = all(run.kind == "content" for run in runs)
        start = runs[0].start if plain or runs[0].kind == "content" else self._header_end(message, spans[0], gap_start)
        region_end = runs[-1].end if plain else (end.start if end else self._call_end(message, spans[-1], runs[-1]))
        if self.rendered.template.has_generation_markers:
            generated = self._generated((gap_start, stop), (runs[0].start, runs[-1].end))
            if generated is None:
                self.skipped["outside_generation"] += 1
                return None
            start, region_end = generated[0], min(generated[1], end.start) if end else generated[1]
        return Turn(message, (start, region_end), _segments(runs, start, region_end), end, self._fields(spans))

    def _fields(self, spans: list[int]) -> tuple[CallField, ...]:
        """The names, keys and values of calls among a message's spans; one that lies in several is one field."""
        fields: dict[int, CallField] = {}
        for i in spans:
            span = self.rendered.spans[i]
            string, number = self.rendered.string(span), self.rendered.chat.placeholders[span.placeholder].string
            if string.kind in CALL_KINDS:
                start = fields[number].start if number in fields else span.start
                fields[number] = CallField(string.message, string.call, string.path, start, span.end)
        return tuple(sorted(fields.values(), key=lambda f: f.start))

    def _runs(self, spans: list[int]) -> list[_Run]:
        runs: list[_Run] = []
        for i in spans:
            span = self.rendered.spans[i]
            kind = self.rendered.string(span).kind
            before, after = self.rendered.edges[i] if kind in ("content", "reasoning") else (0, 0)
            start, end, kind = span.start - before, span.end + after, _CALL.get(kind, kind)
            if runs and runs[-1].kind == kind:
                runs[-1].end = end
            else:
                runs.append(_Run(kind, start, end))
        return runs

    def _next_foreign(self, message: int, index: int) -> int:
        """Where the next string of another message begins."""
        rendered = self.rendered
        for span in islice(rendered.spans, index + 1, None):
            if rendered.string(span).message != message:
                return span.start
        return len(rendered.text)

    def _end_of_turn(self, start: int, stop: int) -> Special | None:
        """The first token that ends a turn, unless another turn begins before it."""
        for special in islice(self.specials, bisect_left(self._special_starts, start), None):
            if special.start >= stop or special.role in _OPENING_ROLES:
                return None
            if is_end(special.role):
                return special
        return None

    def _header_end(self, message: int, index: int, start: int) -> int:
        """Where the model begins to write, between the string before (``start``) and its own first one."""
        gap = self.rendered.text[start : self.rendered.spans[index].start]
        if gap not in self._headers:
            self._headers[gap] = self._search_header(message, index, gap, start)
        return start + self._headers[gap]

    def _search_header(self, message: int, index: int, gap: str, start: int) -> int:
        size = self._prompt_end(gap)
        if size is None:
            header = self._written_after(index - 1, message, generation_prompt=True)
            size = self._whole_specials(start, _common(gap, header))
        thought = _EMPTY_THOUGHT.match(gap, size)
        return thought.end() if thought else size

    def _prompt_end(self, gap: str) -> int | None:
        """Where the generation prompt ends in the text in front of an answer."""
        prompt = self.rendered.template.generation_prompt()
        for header in (prompt, prompt.split("<think>")[0]):
            if header.strip() and header in gap:
                return gap.rindex(header) + len(header)
        return None

    def _call_end(self, message: int, index: int, last: _Run) -> int:
        """End of a turn that no special token ends: what the template writes when the conversation stops there."""
        if last.kind != "tool_call":
            return last.end
        start = self.rendered.spans[index].end
        stop = self._next_foreign(message, index)
        ending = self._written_after(index, message + 1, generation_prompt=False)
        return start + self._whole_specials(start, _common(self.rendered.text[start:stop], ending))

    def _written_after(self, index: int, count: int, *, generation_prompt: bool) -> str:
        """Text that the template writes behind a span when it is given only the first ``count`` messages."""
        rendered = self.rendered
        try:
            text, _ = rendered.template.render(
                rendered.chat.messages[:count], tools=rendered.chat.tools, generation_prompt=generation_prompt
            )
        except render_errors() as error:
            what = "does not show where the answer begins or ends"
            raise rendered.template.error(max(0, count - 1), rendered.messages, what) from error
        occurrences = list(rendered.chat.occurrences(text))
        placeholder = rendered.spans[index].placeholder if index >= 0 else None
        # Equal strings share a marker, so it is the n-th of them that counts.
        before = sum(span.placeholder == placeholder for span in islice(rendered.spans, max(index, 0)))
        same = [i for i, (number, _, _) in enumerate(occurrences) if number == placeholder]
        occurrence = same[min(before, len(same) - 1)] if same else -1
        start = occurrences[occurrence][2] if occurrence >= 0 else 0
        return text[start : occurrences[occurrence + 1][1] if occurrence + 1 < len(occurrences) else len(text)]

    def _whole_specials(self, start: int, size: int) -> int:
        """``size`` characters from ``start`` on, less a special token that they would cut in two."""
        index = bisect_left(self._special_starts, start + size) - 1
        if index >= 0 and self.specials[index].end > start + size:
            return self.specials[index].start - start
        return size

    def _generated(self, bounds: Span, strings: Span) -> Span | None:
        """The generation-marked stretch around a message's strings, without a generation prompt that it begins with."""
        spans = [s for s in self.rendered.generation if s[0] <= strings[1] and s[1] >= strings[0]]
        if not spans:
            return None
        start, end = max(bounds[0], min(s[0] for s in spans)), min(bounds[1], max(s[1] for s in spans))
        prompt_end = self._prompt_end(self.rendered.text[bounds[0] : strings[0]])
        if prompt_end is not None:
            start = max(start, bounds[0] + prompt_end)
        return min(start, strings[0]), max(end, strings[1])


def _segments(runs: list[_Run], start: int, end: int) -> tuple[tuple[str, int, int], ...]:
    """Strings as they are; a tool call with all the syntax around it."""
    segments = []
    for i, run in enumerate(runs):
        first, last = run.start, run.end
        if run.kind == "tool_call":
            first = runs[i - 1].end if i else start
            last = runs[i + 1].start if i + 1 < len(runs) else end
        segments.append((run.kind, first, last))
    return tuple(segments)


def _common(left: str, right: str) -> int:
    size = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    return min(len(left), len(right)) if size is None else size
