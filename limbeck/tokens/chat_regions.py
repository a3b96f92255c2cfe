"""What an assistant wrote in a rendered conversation: its spans, and the token that ends its turn."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from limbeck.tokens.chat_layout import Layout
from limbeck.tokens.chat_template import Span, render_errors
from limbeck.tokens.chat_tokens import Special
from limbeck.tokens.roles import is_end

_CALL = {"name": "tool_call", "argument": "tool_call"}
_EMPTY_THOUGHT = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
_OPENING_ROLES = ("bos", "start_of_turn")


@dataclass(frozen=True)
class Turn:
    """What one assistant message taught: ``region`` (characters) and the end-of-turn token are supervised.

    ``segments`` are the parts of the region with a meaning of their own: ``(kind, start, end)``.
    """

    message: int
    region: Span
    segments: tuple[tuple[str, int, int], ...]
    end: Special | None


@dataclass
class _Run:
    """Neighbouring places of one kind in one message."""

    kind: str
    start: int
    end: int


@dataclass
class TurnFinder:
    """Finds the assistant turns of one layout.

    Attributes:
        specials: the special tokens that the template wrote, in order.
        dropped: what was not supervised although it should have been, counted by reason.
    """

    layout: Layout
    specials: Sequence[Special]
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._special_starts = [s.start for s in self.specials]
        self._headers: dict[str, int] = {}
        self._own: dict[int, list[int]] = {}
        for i, place in enumerate(self.layout.places):
            leaf = self.layout.leaf(place)
            if not place.repeat and leaf.kind != "other":
                self._own.setdefault(leaf.message, []).append(i)

    def find(self, messages: Collection[int]) -> list[Turn]:
        """The turns of the given messages, in order; those that the template left out are counted."""
        turns = []
        for message in sorted(messages):
            self._count_unrendered(message)
            if self._own.get(message):
                turn = self._turn(message)
                if turn is not None:
                    turns.append(turn)
        return turns

    def _count_unrendered(self, message: int) -> None:
        layout = self.layout
        there = {
            _CALL.get(kind, kind) for kind in (layout.leaf(layout.places[i]).kind for i in self._own.get(message, []))
        }
        record = layout.messages[message]
        for key, kind in (("content", "content"), ("reasoning_content", "reasoning")):
            if record.get(key) and kind not in there and str(record[key]).strip():
                self.dropped[f"unrendered_{kind}"] += 1

    def _turn(self, message: int) -> Turn | None:
        own = self._own[message]
        self._check_contiguous(message, own)
        runs = self._runs(own)
        gap_start = self._outer_end(own[0] - 1) if own[0] else 0
        stop = self._next_foreign(message, own[-1])
        end = self._end_of_turn(self.layout.places[own[-1]].end, stop)
        if end is None:
            self.dropped["no_end_of_turn"] += 1
        plain = all(run.kind == "content" for run in runs)
        start = runs[0].start if runs[0].kind == "content" else self._header_end(message, gap_start, runs[0].start)
        region_end = runs[-1].end if plain else (end.start if end else self._call_end(message, own[-1], runs[-1]))
        if self.layout.template.has_generation_markers:
            marked = self._generated((gap_start, stop), (runs[0].start, runs[-1].end))
            if marked is None:
                self.dropped["outside_generation"] += 1
                return None
            start, region_end = marked[0], min(marked[1], end.start) if end else marked[1]
        return Turn(message, (start, region_end), _segments(runs, start, region_end), end)

    def _check_contiguous(self, message: int, own: list[int]) -> None:
        layout = self.layout
        for i in range(own[0], own[-1]):
            if layout.leaf(layout.places[i]).message != message:
                raise layout.template.error(message, layout.messages, "mixes it with the text of other messages")

    def _runs(self, own: list[int]) -> list[_Run]:
        runs: list[_Run] = []
        for i in own:
            place = self.layout.places[i]
            kind = self.layout.leaf(place).kind
            before, after = self.layout.edges[i] if kind in ("content", "reasoning") else (0, 0)
            start, end, kind = place.start - before, place.end + after, _CALL.get(kind, kind)
            if runs and runs[-1].kind == kind:
                runs[-1].end = end
            else:
                runs.append(_Run(kind, start, end))
        return runs

    def _outer_end(self, index: int) -> int:
        return self.layout.places[index].end

    def _next_foreign(self, message: int, index: int) -> int:
        """Where the next string of another message begins."""
        layout = self.layout
        for place in layout.places[index + 1 :]:
            if layout.leaf(place).message != message:
                return place.start
        return len(layout.text)

    def _end_of_turn(self, start: int, stop: int) -> Special | None:
        """The first token that ends a turn, unless another turn begins before it."""
        for special in self.specials[bisect_left(self._special_starts, start) :]:
            if special.start >= stop or special.role in _OPENING_ROLES:
                return None
            if is_end(special.role):
                return special
        return None

    def _header_end(self, message: int, start: int, end: int) -> int:
        """Where the model begins to write, between the string before (``start``) and its own first one (``end``)."""
        gap = self.layout.text[start:end]
        if gap not in self._headers:
            self._headers[gap] = self._search_header(message, gap, start)
        return start + self._headers[gap]

    def _search_header(self, message: int, gap: str, start: int) -> int:
        prompt = self.layout.template.generation_prompt()
        for header in (prompt, prompt.split("<think>")[0]):
            if header.strip() and header in gap:
                size = gap.rindex(header) + len(header)
                break
        else:
            size = self._whole_specials(start, _common(gap, self._tail(message, generation_prompt=True)))
        thought = _EMPTY_THOUGHT.match(gap, size)
        return thought.end() if thought else size

    def _call_end(self, message: int, index: int, last: _Run) -> int:
        """End of a turn that no special token ends: what the template writes when the conversation stops there."""
        if last.kind != "tool_call":
            return last.end
        start = self.layout.places[index].end
        stop = self._next_foreign(message, index)
        tail = self._tail(message + 1, generation_prompt=False)
        return start + self._whole_specials(start, _common(self.layout.text[start:stop], tail))

    def _tail(self, count: int, *, generation_prompt: bool) -> str:
        """What the template writes after the last string of the first ``count`` messages."""
        layout = self.layout
        try:
            text, _ = layout.template.render(
                layout.marked.messages[:count], tools=layout.marked.tools, generation_prompt=generation_prompt
            )
        except render_errors() as error:
            index = max(0, count - 1)
            what = "does not show where the answer begins or ends"
            raise layout.template.error(index, layout.messages, what) from error
        ends = [end for _, _, end in layout.marked.occurrences(text)]
        return text[ends[-1] if ends else 0 :]

    def _whole_specials(self, start: int, size: int) -> int:
        """``size`` characters from ``start`` on, less a special token that they would cut in two."""
        at = bisect_left(self._special_starts, start + size) - 1
        if at >= 0 and self.specials[at].end > start + size:
            return self.specials[at].start - start
        return size

    def _generated(self, bounds: Span, strings: Span) -> Span | None:
        """The generation-marked stretch around a message's strings; the strings themselves where markers cut them."""
        spans = [s for s in self.layout.generation if s[0] < bounds[1] and s[1] > bounds[0]]
        spans = [s for s in spans if s[0] <= strings[1] and s[1] >= strings[0]]
        if not spans:
            return None
        start, end = max(bounds[0], min(s[0] for s in spans)), min(bounds[1], max(s[1] for s in spans))
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
