"""A rendered conversation cut into pieces that can be tokenised, copied and left out one by one.

A piece begins at a special (or other added) token, where every tokenizer starts afresh: the ids of a conversation are
the ids of its pieces, end to end. The pieces of a trace are tokenised once and shared by every sequence made of them,
so a target's ids in a teacher sequence are the student's own, whatever stands in front of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.tokens.chat.assistant_spans import Special, Turn, locate_turns
from limbeck.tokens.chat.placeholders import CALL_KINDS, PlaceholderSpan, RenderedChat
from limbeck.tokens.chat.render import AliasedText, supervise
from limbeck.tokens.chat.template import ChatTemplate
from limbeck.tokens.chat.template_compat import AS_IS, RULES, Rule, Written
from limbeck.tokens.tokenized_text import TokenizedText
from limbeck.tokens.tokenizer import ByteTokenizer
from limbeck.tokens.vocab import KNOWN_ROLES, is_end

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A stretch of a rendered conversation: the first one, or one that begins at an added token.

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
        """Key of its token ids: the text, and which special strings in it are tokens."""
        return self.text, tuple(s.start for s in self.specials)


@dataclass
class Conversation:
    """Pieces of one rendered conversation.

    Attributes:
        piece_of: message -> piece with its first string; messages that the template left out are missing.
        turns: assistant message -> its turn in characters of its piece; several parts where the template parts it.
        skipped: what the template left out, by reason.
        rule: how the messages were adapted to the template.
    """

    messages: list[dict[str, Any]]
    pieces: list[Piece]
    piece_of: dict[int, int]
    turns: dict[int, list[Turn]]
    skipped: Counter[str]
    rule: Rule = AS_IS

    @property
    def head(self) -> int:
        """Number of leading pieces without a message of the dialogue: BOS token, tools, system messages."""
        count = 0
        for piece in self.pieces:
            if any(i >= 0 and self.messages[i]["role"] != "system" for i in piece.messages):
                break
            count += 1
        return count

    @property
    def preamble(self) -> int:
        """Number of leading pieces without any message at all, such as the BOS token."""
        return next((i for i, piece in enumerate(self.pieces) if piece.messages), len(self.pieces))


class ChatRenderer:
    """One model's view of conversations: its tokenizer, its chat template, and the pieces tokenised so far."""

    def __init__(
        self, tokenizer: object, *, template_kwargs: Mapping[str, Any] | None = None, name: str | None = None
    ) -> None:
        self.tokenizer = ByteTokenizer.of(tokenizer)
        self.template_kwargs = dict(template_kwargs or {})
        self.name = name
        self._added = _added_pattern(self.tokenizer)
        self._alone: dict[str, bool] = {}
        self._known: dict[tuple[str, tuple[int, ...]], AliasedText] = {}

    def forget(self) -> None:
        """Drop the pieces of earlier batches."""
        self._known.clear()

    def conversation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None, *, rule: Rule | None = None
    ) -> Conversation:
        """Render a conversation and cut it into pieces; nothing is tokenised yet.

        ``rule``: how it is adapted to the template; by default the first rule that loses nothing, see ``adapt``.
        """
        template = ChatTemplate(self.tokenizer, tools=tools, arguments=self.template_kwargs, name=self.name)
        rules = RULES if rule is None else (rule,)
        located = locate_turns(template, self.tokenizer, messages, rules=rules)
        atoms = self._with_added(located.rendered, located.specials)
        return _Cutter(located.rendered, located.specials, atoms, located.turns).cut(list(messages), located.skipped)

    def _with_added(self, rendered: RenderedChat, specials: Sequence[Special]) -> list[Special]:
        """The special tokens and the template's other added tokens, which tokenizers cut out of the text as well."""
        if self._added is None:
            return list(specials)
        atoms = list(specials)
        position = 0
        for span in [*rendered.spans, None]:
            end = len(rendered.text) if span is None else span.start
            for match in self._added.finditer(rendered.text, position, end):
                if self._stands_alone(match[0]):
                    atoms.append(Special(match.start(), match.end(), -1, KNOWN_ROLES.get(match[0], "added")))
            position = end if span is None else span.end
        return sorted(atoms, key=lambda s: s.start)

    def _stands_alone(self, content: str) -> bool:
        """Whether an added token is always cut out of the text around it."""
        if content not in self._alone:
            before, alone = (self.tokenizer.encode(text).ids.tolist() for text in ("a\n", content))
            whole = self.tokenizer.encode(f"a\n{content}a").ids.tolist()
            self._alone[content] = len(alone) == 1 and whole[: len(before) + 1] == before + alone
        return self._alone[content]

    def encode(self, piece: Piece) -> AliasedText:
        """A piece's tokens; tokenised once however many sequences hold it."""
        known = self._known.get(piece.key)
        if known is None:
            known = self._known[piece.key] = AliasedText(piece.text, piece.specials, self.tokenizer)
        return known

    def written(self, conversation: Conversation, message: int) -> tuple[str, tuple[int, ...]] | None:
        """An assistant message's piece up to the end of its turn, as :attr:`Piece.key`; None where there is none."""
        if message not in conversation.turns:
            return None
        piece = conversation.pieces[conversation.piece_of[message]]
        end = max(_turn_end(turn) for turn in conversation.turns[message])
        return piece.text[:end], tuple(s.start for s in piece.specials if s.start < end)

    def ids(self, piece: Piece) -> IntArray:
        return self.encode(piece).rendering.ids

    def length(self, pieces: Iterable[Piece]) -> int:
        return sum(len(self.ids(piece)) for piece in pieces)

    def target(self, conversation: Conversation, message: int) -> Target | None:
        """The supervised tokens of an assistant message; None where the template shows none."""
        if message not in conversation.turns:
            return None
        piece = conversation.pieces[conversation.piece_of[message]]
        return _target(self.encode(piece), conversation.turns[message])


@dataclass(frozen=True)
class Target:
    """Supervised tokens of one message.

    Attributes:
        positions: ``[K]`` their indices in the piece, ascending.
        ids: ``[K]`` the tokens.
        rendering: the piece with this target and its segments.
        skipped: tokens left out, by reason.
    """

    positions: IntArray
    ids: IntArray
    rendering: TokenizedText
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def end(self) -> int:
        """Tokens of the piece up to the last supervised one."""
        return int(self.positions[-1]) + 1


def _turn_end(turn: Turn) -> int:
    return turn.region[1] if turn.end is None else turn.end.end


def _target(aliased: AliasedText, turns: Sequence[Turn]) -> Target | None:
    rendering, straddling = supervise(aliased, turns)
    positions = np.flatnonzero(rendering.loss_mask)
    ends = sum(turn.end is not None for turn in turns)
    empty = all(turn.region[0] == turn.region[1] for turn in turns)
    # A token that only ends the turn carries nothing of a message that has a text.
    if not len(positions) or (len(positions) == ends and not empty):
        return None
    skipped = Counter({"straddle": straddling} if straddling else {})
    return Target(positions, rendering.ids[positions], rendering, skipped)


# -- cutting -----------------------------------------------------------------------------------------------------------


def _added_pattern(tokenizer: ByteTokenizer) -> re.Pattern[str] | None:
    """Matches added tokens that are not special, the longest first."""
    contents = [c for c in tokenizer.added if c.strip() and c == c.strip()]
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True)))) if contents else None


class _Cutter:
    """Cuts one rendered conversation; ``atoms`` are its special and other added tokens, in order."""

    def __init__(
        self, rendered: RenderedChat, specials: Sequence[Special], atoms: Sequence[Special], turns: Sequence[Turn]
    ) -> None:
        self.rendered, self.specials, self.atoms = rendered, specials, atoms
        self.turns: dict[int, list[Turn]] = {}
        for turn in turns:
            self.turns.setdefault(turn.message, []).append(turn)
        # A template may write a called tool's name once more in the result's header: that is the template's text.
        self.spans = [p for p in rendered.spans if not (p.repeat and rendered.string(p).kind in CALL_KINDS)]
        # Parts of one message count as that message, turns that were joined as the first of them.
        self.members = {one.origins[0]: one.origins for one in rendered.adapted if one.origins}
        first = {i: one.origins[0] for i, one in enumerate(rendered.adapted) if one.origins}
        self.owners = [first.get(owner, -1) for owner in _owners(rendered, self.spans)]

    def cut(self, messages: list[dict[str, Any]], skipped: Counter[str]) -> Conversation:
        rendered = self.rendered
        splits = self._splits()
        edges = [0, *(char for char, _ in splits), len(rendered.text)]
        clean = [True, *(flag for _, flag in splits)]
        special_starts = [s.start for s in self.specials]
        span_starts = [p.start for p in self.spans]
        pieces = []
        piece_of: dict[int, int] = {}
        for number, (start, end) in enumerate(pairwise(edges)):
            inside = self.specials[bisect_left(special_starts, start) : bisect_left(special_starts, end)]
            here = slice(bisect_left(span_starts, start), bisect_left(span_starts, end))
            owners = frozenset(m for owner in set(self.owners[here]) - {-1} for m in self.members[owner])
            moved = tuple(_moved(special, start) for special in inside)
            pieces.append(Piece(rendered.text[start:end], moved, clean[number], owners))
            for message in owners:
                piece_of.setdefault(message, number)
        turns = {m: [_moved_turn(part, edges[piece_of[m]]) for part in parts] for m, parts in self.turns.items()}
        return Conversation(messages, pieces, piece_of, turns, skipped, rendered.rule)

    def _splits(self) -> list[tuple[int, bool]]:
        """Characters at which pieces begin, and whether messages begin there; at most one between two messages."""
        starts = [s.start for s in self.atoms]
        spans, owners = self.spans, self.owners
        last_of = {owner: i for i, owner in enumerate(owners)}
        splits: list[tuple[int, bool]] = []
        open_until = -1
        for i, owner in enumerate(owners):
            inside = i <= open_until
            open_until = max(open_until, last_of[owner])
            # A message that the template spreads over several spans stays in one piece, with whatever lies between.
            if inside:
                continue
            low, limit = self._bounds(i)
            gap = self.atoms[bisect_left(starts, spans[i - 1].end if i else 0) : bisect_left(starts, limit + 1)]
            split = _split(self.rendered.text, gap, low)
            if split is not None and split[0] > (splits[-1][0] if splits else 0):
                splits.append(split)
        return splits

    def _bounds(self, i: int) -> tuple[int, int]:
        """Where a split may lie: after the turn before, and not inside what the model writes next."""
        spans = self.spans
        low = spans[i - 1].end if i else 0
        before = self.turns.get(self.owners[i - 1], []) if i else []
        after = self.turns.get(self.owners[i], [])
        low = max([low, *(_turn_end(turn) for turn in before)])
        return low, min([spans[i].start, *(turn.region[0] for turn in after)])


def _owners(rendered: RenderedChat, spans: Sequence[PlaceholderSpan]) -> list[int]:
    """The message of each span. Equal strings of users and tools share one placeholder, so order tells them apart."""
    strings = [rendered.string(span) for span in spans]
    holders: dict[tuple[str, str], list[int]] = {}
    for index, message in enumerate(rendered.messages):
        content = message.get("content")
        if message["role"] != "assistant" and isinstance(content, str):
            parts = content.parts if isinstance(content, Written) else ()
            for text in [part.text for part in parts if not isinstance(part, str)] or [content]:
                holders.setdefault(("content", text), []).append(index)
    shared = [string.message >= 0 and rendered.messages[string.message]["role"] != "assistant" for string in strings]
    times = Counter((string.kind, string.text) for string, several in zip(strings, shared, strict=True) if several)
    used: Counter[tuple[str, str]] = Counter()
    owners: list[int] = []
    for string, several in zip(strings, shared, strict=True):
        key = (string.kind, string.text)
        candidates = holders.get(key, ())
        owner = string.message
        if several and len(candidates) > 1:
            later = [c for c in candidates if not owners or c >= owners[-1]]
            owner = candidates[used[key]] if times[key] == len(candidates) else (later or [owner])[0]
            used[key] += 1
        owners.append(owner)
    return owners


def _split(text: str, gap: Sequence[Special], low: int) -> tuple[int, bool] | None:
    """The token of a gap at which the next message's piece begins, and whether its whole header follows."""
    for first, second in reversed(list(pairwise(gap))):
        opens = is_end(first.role) or first.role == "bos"
        if opens and second.start >= low and not text[first.end : second.start].strip():
            return second.start, True
    usable = [s for s in gap if s.start >= low]
    for atom in reversed(usable):
        if atom.role == "start_of_turn":
            return atom.start, True
    return (usable[-1].start, False) if usable else None


def _moved(special: Special, start: int) -> Special:
    return replace(special, start=special.start - start, end=special.end - start)


def _moved_turn(turn: Turn, start: int) -> Turn:
    return Turn(
        turn.message,
        (turn.region[0] - start, turn.region[1] - start),
        tuple((kind, a - start, b - start) for kind, a, b in turn.segments),
        None if turn.end is None else _moved(turn.end, start),
        tuple(replace(f, start=f.start - start, end=f.end - start) for f in turn.fields),
    )
