"""A rendered conversation cut into pieces that can be tokenised, copied and left out one by one.

A piece begins at a special token, where every tokenizer starts afresh: the ids of a conversation are the ids of its
pieces, end to end. The pieces of a trace are tokenised once and shared by every sequence made of them, so a target's ids
in a teacher sequence are the student's own, whatever stands in front of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.tokens import Rendering, Segment, TextEncoder
from limbeck.tokens.chat_layout import Layout, lay_out
from limbeck.tokens.chat_regions import Turn, TurnFinder
from limbeck.tokens.chat_spans import Place
from limbeck.tokens.chat_template import ChatTemplate
from limbeck.tokens.chat_tokens import AliasedText, Special, find_specials, special_pattern
from limbeck.tokens.roles import is_end

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A stretch of a rendered conversation, the first or one that begins at a special token.

    Attributes:
        text: its characters.
        specials: the special tokens that the template wrote in it, by characters of ``text``.
        clean: whole messages begin here, so a window may too.
        messages: indices of the messages whose strings lie in it; empty for template text in front of the first.
    """

    text: str
    specials: tuple[Special, ...]
    clean: bool
    messages: frozenset[int]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What its token ids depend on: the text, and which special strings in it are tokens."""
        return self.text, tuple(s.start for s in self.specials)


@dataclass
class Conversation:
    """Pieces of one rendered conversation.

    Attributes:
        piece_of: message -> piece with its first string; messages that the template left out are missing.
        turns: assistant message -> its turn, in characters of its piece.
        dropped: what the template left out, by reason.
    """

    messages: list[dict[str, Any]]
    pieces: list[Piece]
    piece_of: dict[int, int]
    turns: dict[int, Turn]
    dropped: Counter[str]

    @property
    def head(self) -> int:
        """Number of leading pieces without a message of the dialogue: begin token, tools, system messages."""
        count = 0
        for piece in self.pieces:
            if any(i >= 0 and self.messages[i]["role"] != "system" for i in piece.messages):
                break
            count += 1
        return count

    @property
    def preamble(self) -> int:
        """Number of leading pieces without any message at all, such as the begin token."""
        return next((i for i, piece in enumerate(self.pieces) if piece.messages), len(self.pieces))


class Renderer:
    """One model's view of conversations: its tokenizer, its chat template, and the pieces tokenised so far.

    Attributes:
        tokens: number of tokens tokenised so far; the cost that must stay linear.
    """

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, name: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = TextEncoder.for_tokenizer(tokenizer)
        self.template_kwargs = dict(template_kwargs or {})
        self.name = name
        self.tokens = 0
        self._known: dict[tuple[str, tuple[int, ...]], AliasedText] = {}

    def forget(self) -> None:
        """Drop the pieces of earlier batches."""
        self._known.clear()

    def conversation(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None) -> Conversation:
        """Render a conversation and cut it into pieces; nothing is tokenised yet."""
        template = ChatTemplate(self.tokenizer, tools=tools, arguments=self.template_kwargs, name=self.name)
        pattern = special_pattern(self.encoder)
        layout = lay_out(
            template, messages, holds_special=lambda text: pattern is not None and pattern.search(text) is not None
        )
        specials = find_specials(layout.text, [(p.start, p.end) for p in layout.places], self.encoder)
        finder = TurnFinder(layout, specials)
        turns = finder.find([i for i, m in enumerate(messages) if m["role"] == "assistant"])
        return _cut(layout, specials, turns, finder.dropped)

    def encode(self, piece: Piece) -> AliasedText:
        """A piece's tokens; tokenised once however many sequences hold it."""
        known = self._known.get(piece.key)
        if known is None:
            known = self._known[piece.key] = AliasedText(piece.text, piece.specials, self.encoder)
            self.tokens += len(known.rendering)
        return known

    def ids(self, piece: Piece) -> IntArray:
        return self.encode(piece).rendering.ids

    def length(self, pieces: Iterable[Piece]) -> int:
        return sum(len(self.ids(piece)) for piece in pieces)

    def target(self, conversation: Conversation, message: int) -> Target | None:
        """The supervised tokens of an assistant message; None where the template shows none."""
        turn = conversation.turns.get(message)
        if turn is None:
            return None
        return _target(self.encode(conversation.pieces[conversation.piece_of[message]]), turn)


@dataclass(frozen=True)
class Target:
    """Supervised tokens of one message.

    Attributes:
        places: ``[K]`` their indices in the piece, ascending.
        ids: ``[K]`` the tokens.
        rendering: the piece with this target and its segments.
        dropped: tokens left out, by reason.
    """

    places: IntArray
    ids: IntArray
    rendering: Rendering
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def end(self) -> int:
        """Tokens of the piece up to the last supervised one."""
        return int(self.places[-1]) + 1


def _target(aliased: AliasedText, turn: Turn) -> Target | None:
    first, last, cut = aliased.cover(*turn.region)
    places = list(range(first, last))
    segments = [
        Segment(0, kind, aliased.byte(start), aliased.byte(end), *aliased.cover(start, end)[:2])
        for kind, start, end in turn.segments
    ]
    if turn.end is not None:
        token, at = aliased.special_token(turn.end), aliased.byte(turn.end.start)
        places.append(token)
        segments.append(Segment(0, "eot", at, at, token, token + 1))
    # A token that only ends the turn carries nothing of the message.
    if last <= first and not (turn.end is not None and turn.region[0] == turn.region[1]):
        return None
    where = np.array(places, dtype=np.int64)
    mask = np.zeros(len(aliased.rendering), dtype=bool)
    mask[where] = True
    rendering = replace(aliased.rendering, target=mask, segments=tuple(segments))
    return Target(where, aliased.rendering.ids[where], rendering, Counter({"straddle": cut} if cut else {}))


# -- cutting -----------------------------------------------------------------------------------------------------------


def _cut(layout: Layout, specials: Sequence[Special], turns: Sequence[Turn], dropped: Counter[str]) -> Conversation:
    by_message = {turn.message: turn for turn in turns}
    splits = _splits(layout, specials, by_message)
    edges = [0, *(at for at, _ in splits), len(layout.text)]
    clean = [True, *(flag for _, flag in splits)]
    starts = [s.start for s in specials]
    place_starts = [p.start for p in layout.places]
    pieces = []
    for number, (start, end) in enumerate(pairwise(edges)):
        inside = specials[bisect_left(starts, start) : bisect_left(starts, end)]
        here = layout.places[bisect_left(place_starts, start) : bisect_left(place_starts, end)]
        owners = frozenset(layout.leaf(place).message for place in here) - {-1}
        moved = tuple(_moved(special, start) for special in inside)
        pieces.append(Piece(layout.text[start:end], moved, clean[number], owners))
    piece_of: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        for message in piece.messages:
            piece_of.setdefault(message, number)
    relative = {m: _moved_turn(turn, edges[piece_of[m]]) for m, turn in by_message.items()}
    return Conversation(layout.messages, pieces, piece_of, relative, dropped)


def _moved(special: Special, start: int) -> Special:
    return replace(special, start=special.start - start, end=special.end - start)


def _moved_turn(turn: Turn, start: int) -> Turn:
    return Turn(
        turn.message,
        (turn.region[0] - start, turn.region[1] - start),
        tuple((kind, a - start, b - start) for kind, a, b in turn.segments),
        None if turn.end is None else _moved(turn.end, start),
    )


def _splits(layout: Layout, specials: Sequence[Special], turns: Mapping[int, Turn]) -> list[tuple[int, bool]]:
    """Characters at which pieces begin, and whether messages begin there; at most one between two messages."""
    starts = [s.start for s in specials]
    owners = [layout.leaf(place).message for place in layout.places]
    last_of = {owner: i for i, owner in enumerate(owners)}
    found = []
    seen: set[int] = set()
    for i, place in enumerate(layout.places):
        owner, before = owners[i], owners[i - 1] if i else None
        # A message that the template spreads over several places stays in one piece, with whatever lies between.
        open_messages = {m for m in seen if last_of[m] >= i}
        seen.add(owner)
        if owner == before or open_messages:
            continue
        low, limit = _bounds(layout.places, i, before, turns, owner)
        gap = specials[bisect_left(starts, layout.places[i - 1].end if i else 0) : bisect_left(starts, limit + 1)]
        split = _split(layout.text, gap, low)
        if split is not None and split[0] > 0:
            found.append(split)
    return found


def _bounds(
    places: Sequence[Place], i: int, before: int | None, turns: Mapping[int, Turn], owner: int
) -> tuple[int, int]:
    """Where a split may lie: after the turn before, and not inside what the model writes next."""
    low = places[i - 1].end if i else 0
    if before is not None and before in turns:
        turn = turns[before]
        low = max(low, turn.region[1] if turn.end is None else turn.end.end)
    limit = turns[owner].region[0] if owner in turns else places[i].start
    return low, limit


def _split(text: str, gap: Sequence[Special], low: int) -> tuple[int, bool] | None:
    """The special token of a gap at which the next message's piece begins, and whether its whole header follows."""
    usable = [s for s in gap if s.start >= low]
    for first, second in reversed(list(pairwise(gap))):
        opens = is_end(first.role) or first.role == "bos"
        if opens and second.start >= low and not text[first.end : second.start].strip():
            return second.start, True
    for special in reversed(usable):
        if special.role == "start_of_turn":
            return special.start, True
    return (usable[-1].start, False) if usable else None
