"""Rows of the three channels, without tensors: sequences that end with their target, inside windows that fit.

**Windows** are cut from the left by whole messages, at the same message wherever two sides are compared.

**Hint rows**: for every message to correct, the student's sequence and the hinted teacher's. Both end with the same
target. The teacher's is the student's with the hint's turn put in: prefix and target are the student's own pieces, only
what the hint changed is tokenised anew. A target that no special token divides from the hint cannot be spliced: a
teacher with a tokenizer of its own reads the hinted conversation as its template writes it, for any other the target is
dropped, counted as ``hint_not_separable``.

**Pair rows**: both sides of a pair rendered as assistant messages of one conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.align import Chunks, align_renderings
from limbeck.errors import TemplateError
from limbeck.tokens import Rendering
from limbeck.tokens.chat import (
    RULES,
    ChatRenderer,
    Conversation,
    Piece,
    Placement,
    Target,
    insert_hint,
    probe_placement,
)
from limbeck.traces.collate.examples import HintTarget
from limbeck.traces.schema import Message, PreferencePair, Trace, messages_to_chat

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass
class PolicyRow:
    """One trace in the policy channel.

    Attributes:
        ids: ``[n]`` its rendering, or the whole messages of it that fit.
        from_start: nothing is left out in front of what is there.
        places: supervised tokens; ``weights``, ``logprobs`` (NaN where unknown) belong to them.
    """

    trace_id: str
    group_id: str | None
    reward: float | None
    ids: IntArray
    from_start: bool = True
    places: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    weights: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


# -- windows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetInContext:
    """A target as one model reads it: the pieces in front of it, possibly changed by a hint, and the target's piece.

    The sequence is ``plain.pieces[:splice]``, then ``middle``, then ``plain.pieces[piece]`` up to the target's last
    token. Without a hint ``splice`` is ``piece`` and ``middle`` is empty.

    Attributes:
        limit: longest sequence, in tokens.
    """

    renderer: ChatRenderer
    plain: Conversation
    piece: int
    target: Target
    limit: int
    splice: int = -1
    middle: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if self.splice < 0:
            object.__setattr__(self, "splice", self.piece)

    def starts(self, keep: int) -> dict[int, int]:
        """Message -> piece at which a window behind the first ``keep`` pieces may begin with it, as far as it fits.

        -1 stands for the whole sequence. Walks back from the target, so that nothing beyond the window is tokenised.
        """
        starts: dict[int, int] = {}
        room = self.limit - self.tail() - self.renderer.length(self.plain.pieces[:keep])
        for number in range(self.splice, self.plain.head - 1, -1):
            if number < self.splice:
                room -= len(self.renderer.ids(self.plain.pieces[number]))
            if room < 0:
                break
            if number == self.plain.head:
                starts[-1] = number
                break
            piece = self.plain.pieces[number]
            first = self.middle[0] if self.middle and number == self.splice else piece
            if first.clean and piece.messages:
                starts[min(piece.messages)] = number
        return starts

    def tail(self) -> int:
        """Tokens that every window holds: the hint's turn and the target."""
        return self.renderer.length(self.middle) + self.target.end

    def window(self, keep: int, start: int) -> Window:
        """The sequence without the pieces between ``keep`` and ``start``."""
        pieces = [*self.plain.pieces[:keep], *self.plain.pieces[start : self.splice], *self.middle]
        parts = [self.renderer.ids(piece) for piece in pieces]
        own = self.renderer.ids(self.plain.pieces[self.piece])[: self.target.end]
        offset = sum(map(len, parts))
        return Window(self, np.concatenate([*parts, own]), self.target.places + offset, keep == start)


@dataclass(frozen=True)
class Window:
    """A sequence that ends with its target. ``places``: indices of the target's tokens. ``uncut``: nothing is left
    out."""

    view: TargetInContext
    ids: IntArray
    places: IntArray
    uncut: bool


def cut_windows(first: TargetInContext, second: TargetInContext) -> tuple[Window, Window] | None:
    """The longest windows that fit both sides and begin with the same message; None where no window does.

    The head (begin token, tools, system messages) stays in front of a cut where it fits, else only the begin token.
    """
    for kept in ("head", "preamble", None):
        keep = [0 if kept is None else getattr(view.plain, kept) for view in (first, second)]
        starts = [view.starts(count) for view, count in zip((first, second), keep, strict=True)]
        common = set(starts[0]) & set(starts[1])
        if common:
            message = min(common)
            return first.window(keep[0], starts[0][message]), second.window(keep[1], starts[1][message])
    return None


# -- hints -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteRow:
    """One target with both of its sequences.

    Attributes:
        student_ids, teacher_ids: the sequences, up to the target's last token.
        student_places, teacher_places: indices of the target's tokens in them.
        chunks: which of these tokens correspond; one to one where both sides share a tokenizer.
        uncut: the student's sequence is the beginning of the trace's own rendering.
        compared, said: bytes of the message's texts, names, keys and values that lie in exact chunks, and all of them;
            what only a template writes does not count.
    """

    target: HintTarget
    student_ids: IntArray
    student_places: IntArray
    teacher_ids: IntArray
    teacher_places: IntArray
    chunks: Chunks
    uncut: bool
    compared: int = 0
    said: int = 0


class HintSide:
    """One model's part in the hint channel: its renderer, its window, and where its template shows a hint.

    ``foreign``: its tokens are not the student's, so that they are aligned by what both wrote.
    """

    def __init__(
        self, renderer: ChatRenderer, limit: int, placement: Placement | None, *, foreign: bool = False
    ) -> None:
        self.renderer, self.limit, self.foreign = renderer, limit, foreign
        self.placement: Placement = placement or probe_placement(renderer.tokenizer)

    def hinted(
        self, plain: Conversation, tools: Sequence[Any] | None, targets: Sequence[HintTarget]
    ) -> list[TargetInContext | str]:
        """Every target with its hint, or the reason why it cannot have it.

        Hints at different places share one rendering, so a trace is rendered as often as one place has hints; each
        target takes only its own hint from it.
        """
        found: list[TargetInContext | str] = ["no_target_tokens"] * len(targets)
        rounds: list[list[int]] = []
        taken: list[set[int]] = []
        for number, target in enumerate(targets):
            if self.renderer.target(plain, target.message) is None:
                continue
            anchor = _anchor(plain.messages, target.message, self.placement)
            place = next((i for i, used in enumerate(taken) if anchor not in used), len(taken))
            if place == len(taken):
                taken.append(set())
                rounds.append([])
            taken[place].add(anchor)
            rounds[place].append(number)
        for members in rounds:
            self._render(plain, tools, targets, members, found)
        if self.foreign:
            for number, one in enumerate(found):
                if one in ("hint_not_separable", "target_rendered_differently"):
                    found[number] = self._alone(plain, tools, targets[number])
        return found

    def _alone(self, plain: Conversation, tools: Sequence[Any] | None, target: HintTarget) -> TargetInContext | str:
        """A target in the conversation with its own hint and no other, as the template writes it."""
        messages = insert_hint(plain.messages, target.message, target.hint, self.placement)
        place = target.message + len(messages) - len(plain.messages)
        hinted = self.renderer.conversation(messages, tools, rule=plain.rule)
        anchor = _anchor(plain.messages, target.message, self.placement) if place == target.message else place - 1
        own, first = self.renderer.target(hinted, place), hinted.piece_of.get(anchor)
        if own is None or first is None:
            return "hint_not_separable"
        piece = hinted.piece_of[place]
        middle = tuple(hinted.pieces[first:piece])
        own = replace(own, rendering=_renumbered(own.rendering, target.message))
        return TargetInContext(self.renderer, hinted, piece, own, self.limit, min(first, piece), middle)

    def _render(
        self,
        plain: Conversation,
        tools: Sequence[Any] | None,
        targets: Sequence[HintTarget],
        members: Sequence[int],
        found: list[TargetInContext | str],
    ) -> None:
        messages: list[dict[str, Any]] = list(plain.messages)
        inserted: dict[int, int] = {}
        for number in sorted(members, key=lambda n: -targets[n].message):
            before = len(messages)
            messages = insert_hint(messages, targets[number].message, targets[number].hint, self.placement)
            inserted[number] = len(messages) - before
        try:
            hinted = self.renderer.conversation(messages, tools, rule=plain.rule)
        except TemplateError:
            if len(members) == 1:
                found[members[0]] = "hint_refused"
                return
            for number in members:
                self._render(plain, tools, targets, [number], found)
            return
        # From the messages of the hinted conversation to those of the plain one; None for a hint's own turn.
        origin: list[int | None] = []
        added = {targets[n].message for n, count in inserted.items() if count}
        for message in range(len(plain.messages)):
            origin += [None, message] if message in added else [message]
        for number in members:
            found[number] = self._splice(plain, hinted, origin, targets[number])

    def _splice(
        self, plain: Conversation, hinted: Conversation, origin: Sequence[int | None], target: HintTarget
    ) -> TargetInContext | str:
        place = origin.index(target.message)
        piece, piece_h = plain.piece_of[target.message], hinted.piece_of.get(place)
        own = self.renderer.target(plain, target.message)
        assert own is not None, "targets without tokens are sorted out before"
        if not target.hint:
            return TargetInContext(self.renderer, plain, piece, own, self.limit)
        if min(plain.pieces[piece].messages) != target.message:
            return "hint_not_separable"
        written = self.renderer.written
        if piece_h is None or written(hinted, place) != written(plain, target.message):
            return "target_rendered_differently"
        first = place - 1
        if origin[first] is not None:
            anchor = _anchor(plain.messages, target.message, self.placement)
            first = origin.index(anchor)
        if first not in hinted.piece_of:
            return "hint_not_separable"
        middle = tuple(hinted.pieces[hinted.piece_of[first] : piece_h])
        covered = {origin[m] for part in middle for m in part.messages} - {None}
        splice = min((plain.piece_of[m] for m in covered if m in plain.piece_of), default=piece)
        replaced = {m for part in plain.pieces[splice:piece] for m in part.messages}
        if not middle or covered != replaced:
            return "hint_not_separable"
        return TargetInContext(self.renderer, plain, piece, own, self.limit, splice, middle)


def _renumbered(rendering: Rendering, message: int) -> Rendering:
    """A target's rendering with another number for its message."""
    segments = tuple(replace(segment, message=message) for segment in rendering.segments)
    return replace(rendering, segments=segments, fields=tuple(replace(f, message=message) for f in rendering.fields))


def _anchor(messages: Sequence[dict[str, Any]], target: int, placement: Placement) -> int:
    """The message that a hint changes: the last user or tool turn where it is appended, else the target's place."""
    if placement == "append":
        for index in range(target - 1, -1, -1):
            if messages[index].get("role") in ("user", "tool"):
                return index
    return target


def _chunks(student: Window, teacher: Window) -> Chunks:
    """Corresponding target tokens, as indices into the two sequences."""
    ours, other = student.view.target, teacher.view.target
    if student.view.renderer is teacher.view.renderer:
        mine, theirs = student.places, teacher.places
        true, ends = np.ones(len(mine), dtype=bool), ours.rendering.ends
        begins = np.concatenate([[0], ends[:-1]])[ours.places]
        special = ours.rendering.special[ours.places]
        return Chunks(mine, mine + 1, theirs, theirs + 1, begins, ends[ours.places], true, special)
    found = align_renderings(ours.rendering, other.rendering, Counter())
    shift_s, shift_t = (int(w.places[0] - w.view.target.places[0]) for w in (student, teacher))
    return replace(
        found,
        student_start=found.student_start + shift_s,
        student_end=found.student_end + shift_s,
        teacher_start=found.teacher_start + shift_t,
        teacher_end=found.teacher_end + shift_t,
    )


def site_row(target: HintTarget, student: TargetInContext, teacher: TargetInContext) -> SiteRow | str:
    """Both sequences of a target inside their windows, or the reason why it is dropped."""
    windows = cut_windows(student, teacher)
    if windows is None:
        too_long = student.target.end > student.limit or teacher.target.end > teacher.limit
        return "target_too_long" if too_long else "hint_does_not_fit"
    mine, theirs = windows
    if target.hint and np.array_equal(mine.ids, theirs.ids):
        return "hint_not_shown"
    chunks = _chunks(mine, theirs)
    if bool(chunks.role.all()) and len(student.target.ids) > 1:
        return "no_shared_text"
    compared = _compared(student.target.rendering, chunks)
    return SiteRow(target, mine.ids, mine.places, theirs.ids, theirs.places, chunks, mine.uncut, *compared)


def _compared(rendering: Rendering, chunks: Chunks) -> tuple[int, int]:
    """Bytes of texts and call fields that lie in exact chunks, and all bytes of them."""
    marks = np.zeros(len(rendering.source), dtype=bool)
    spans = [(s.start, s.end) for s in rendering.segments if s.kind in ("content", "reasoning")]
    for start, end in [*spans, *((f.start, f.end) for f in rendering.fields)]:
        marks[start:end] = True
    inside = np.zeros(len(marks), dtype=bool)
    for start, end in zip(
        chunks.byte_start[chunks.exact].tolist(), chunks.byte_end[chunks.exact].tolist(), strict=True
    ):
        inside[start:end] = True
    return int((marks & inside).sum()), int(marks.sum())


# -- preference pairs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairRow:
    """One preference pair: two sequences with one prompt, and the places of each side's response tokens."""

    pair: PreferencePair
    chosen_ids: IntArray
    chosen_places: IntArray
    rejected_ids: IntArray
    rejected_places: IntArray


def pair_row(
    renderer: ChatRenderer, pair: PreferencePair, trace: Trace, tools: Sequence[Any] | None, limit: int
) -> PairRow | str:
    """Both sides inside a window of ``limit`` tokens, or the reason why the pair is dropped.

    Each side is the state followed by its message, as the template writes it, header and end of turn included. The
    prompt is cut from the left by whole messages, the same for both sides.
    """
    state = pair.state(trace)
    if not state:
        return "pair_without_state"
    views = _answers(renderer, state, (pair.chosen, pair.rejected), tools, limit)
    if views[0] is None or views[1] is None:
        return "no_response"
    chosen, rejected = views[0], views[1]
    if [p.key for p in chosen.plain.pieces[: chosen.piece]] != [p.key for p in rejected.plain.pieces[: rejected.piece]]:
        return "prompts_differ"
    windows = cut_windows(chosen, rejected)
    if windows is None:
        return "response_too_long"
    first, second = windows
    if np.array_equal(first.ids, second.ids):
        return "sides_equal"
    return PairRow(pair, first.ids, first.places, second.ids, second.places)


def _answers(
    renderer: ChatRenderer, state: list[Message], sides: Sequence[Message], tools: Sequence[Any] | None, limit: int
) -> list[TargetInContext | None]:
    """Both sides behind the state, adapted to the template by one rule, so that their prompts are the same."""
    chats = [messages_to_chat([*state, side]) for side in sides]
    found = [renderer.conversation(chat, tools) for chat in chats]
    rule = max((conversation.rule for conversation in found), key=RULES.index)
    found = [c if c.rule == rule else renderer.conversation(c.messages, tools, rule=rule) for c in found]
    return [_answer(renderer, conversation, limit) for conversation in found]


def _answer(renderer: ChatRenderer, conversation: Conversation, limit: int) -> TargetInContext | None:
    answer = len(conversation.messages) - 1
    target = renderer.target(conversation, answer)
    if target is None:
        return None
    return TargetInContext(renderer, conversation, conversation.piece_of[answer], target, limit)
