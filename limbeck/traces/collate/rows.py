"""Rows of the three channels, without tensors: sequences that end with their target, inside windows that fit.

**Windows** are cut from the left by whole messages, at the same message wherever two sides are compared.

**Hint rows**: for every message to correct, the student's sequence and the hinted teacher's. Both end with the same
target. The teacher's is the student's with the hint's turn put in: prefix and target are the student's own pieces, only
what the hint changed is tokenised anew. A target that no special token divides from the hint cannot be spliced: a
teacher with a tokenizer of its own reads the hinted conversation as its template writes it, for any other the target is
skipped, counted as ``hint_not_separable``.

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
from limbeck.tokens import TokenizedText
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


@dataclass(frozen=True)
class Skipped:
    """A target or pair that has no row; ``reason``: under which it is counted."""

    reason: str


@dataclass
class PolicyRow:
    """One trace in the policy channel.

    Attributes:
        ids: ``[n]`` its rendering, or the whole messages of it that fit.
        from_start: nothing is left out in front of what is there.
        positions: supervised tokens; ``weights``, ``logprobs`` (NaN where unknown) belong to them.
    """

    trace_id: str
    group_id: str | None
    reward: float | None
    ids: IntArray
    from_start: bool = True
    positions: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
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
        piece_ids = self.renderer.ids(self.plain.pieces[self.piece])[: self.target.end]
        offset = sum(map(len, parts))
        return Window(self, np.concatenate([*parts, piece_ids]), self.target.positions + offset, keep == start)


@dataclass(frozen=True)
class Window:
    """A sequence that ends with its target. ``positions``: indices of the target's tokens. ``uncut``: nothing is left
    out."""

    view: TargetInContext
    ids: IntArray
    positions: IntArray
    uncut: bool


def cut_windows(first: TargetInContext, second: TargetInContext) -> tuple[Window, Window] | None:
    """The longest windows that fit both sides and begin with the same message; None where no window does.

    The head (BOS token, tools, system messages) stays in front of a cut where it fits, else only the BOS token.
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
class HintRow:
    """One target with both of its sequences.

    Attributes:
        student_ids, teacher_ids: the sequences, up to the target's last token.
        student_positions, teacher_positions: indices of the target's tokens in them.
        chunks: which of these tokens correspond; one to one where both sides share a tokenizer.
        uncut: the student's sequence is the beginning of the trace's own rendering.
        compared, said: bytes of the message's texts, names, keys and values that lie in exact chunks, and all of them;
            what only a template writes does not count.
    """

    target: HintTarget
    student_ids: IntArray
    student_positions: IntArray
    teacher_ids: IntArray
    teacher_positions: IntArray
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
    ) -> list[TargetInContext | Skipped]:
        """Every target with its hint, or the reason why it cannot have it.

        Hints at different messages share one rendering, so a trace is rendered as often as one place has hints; each
        target takes only its own hint from it.
        """
        outcomes: list[TargetInContext | Skipped] = [Skipped("no_target_tokens")] * len(targets)
        rounds: list[list[int]] = []
        taken: list[set[int]] = []
        for number, target in enumerate(targets):
            if self.renderer.target(plain, target.message) is None:
                continue
            anchor = _anchor(plain.messages, target.message, self.placement)
            group = next((i for i, used in enumerate(taken) if anchor not in used), len(taken))
            if group == len(taken):
                taken.append(set())
                rounds.append([])
            taken[group].add(anchor)
            rounds[group].append(number)
        for members in rounds:
            self._render(plain, tools, targets, members, outcomes)
        if self.foreign:
            for number, one in enumerate(outcomes):
                if isinstance(one, Skipped) and one.reason in ("hint_not_separable", "target_rendered_differently"):
                    outcomes[number] = self._alone(plain, tools, targets[number])
        return outcomes

    def _alone(self, plain: Conversation, tools: Sequence[Any] | None, target: HintTarget) -> TargetInContext | Skipped:
        """A target in the conversation with its own hint and no other, as the template writes it."""
        messages = insert_hint(plain.messages, target.message, target.hint, self.placement)
        message_index = target.message + len(messages) - len(plain.messages)
        hinted = self.renderer.conversation(messages, tools, rule=plain.rule)
        anchor = (
            _anchor(plain.messages, target.message, self.placement)
            if message_index == target.message
            else message_index - 1
        )
        hinted_target, first = self.renderer.target(hinted, message_index), hinted.piece_of.get(anchor)
        if hinted_target is None or first is None:
            return Skipped("hint_not_separable")
        piece = hinted.piece_of[message_index]
        middle = tuple(hinted.pieces[first:piece])
        hinted_target = replace(hinted_target, rendering=_renumbered(hinted_target.rendering, target.message))
        return TargetInContext(self.renderer, hinted, piece, hinted_target, self.limit, min(first, piece), middle)

    def _render(
        self,
        plain: Conversation,
        tools: Sequence[Any] | None,
        targets: Sequence[HintTarget],
        members: Sequence[int],
        outcomes: list[TargetInContext | Skipped],
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
                outcomes[members[0]] = Skipped("hint_refused")
                return
            for number in members:
                self._render(plain, tools, targets, [number], outcomes)
            return
        # From the messages of the hinted conversation to those of the plain one; None for a hint's own turn.
        origin: list[int | None] = []
        added = {targets[n].message for n, count in inserted.items() if count}
        for message in range(len(plain.messages)):
            origin += [None, message] if message in added else [message]
        for number in members:
            outcomes[number] = self._splice(plain, hinted, origin, targets[number])

    def _splice(
        self, plain: Conversation, hinted: Conversation, origin: Sequence[int | None], target: HintTarget
    ) -> TargetInContext | Skipped:
        message_index = origin.index(target.message)
        piece, piece_h = plain.piece_of[target.message], hinted.piece_of.get(message_index)
        plain_target = self.renderer.target(plain, target.message)
        assert plain_target is not None, "targets without tokens are sorted out before"
        if not target.hint:
            return TargetInContext(self.renderer, plain, piece, plain_target, self.limit)
        if min(plain.pieces[piece].messages) != target.message:
            return Skipped("hint_not_separable")
        written = self.renderer.written
        if piece_h is None or written(hinted, message_index) != written(plain, target.message):
            return Skipped("target_rendered_differently")
        first = message_index - 1
        if origin[first] is not None:
            anchor = _anchor(plain.messages, target.message, self.placement)
            first = origin.index(anchor)
        if first not in hinted.piece_of:
            return Skipped("hint_not_separable")
        middle = tuple(hinted.pieces[hinted.piece_of[first] : piece_h])
        covered = {origin[m] for part in middle for m in part.messages} - {None}
        splice = min((plain.piece_of[m] for m in covered if m in plain.piece_of), default=piece)
        replaced = {m for part in plain.pieces[splice:piece] for m in part.messages}
        if not middle or covered != replaced:
            return Skipped("hint_not_separable")
        return TargetInContext(self.renderer, plain, piece, plain_target, self.limit, splice, middle)


def _renumbered(rendering: TokenizedText, message: int) -> TokenizedText:
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
        mine, theirs = student.positions, teacher.positions
        true, ends = np.ones(len(mine), dtype=bool), ours.rendering.byte_ends
        begins = np.concatenate([[0], ends[:-1]])[ours.positions]
        special = ours.rendering.special[ours.positions]
        return Chunks(mine, mine + 1, theirs, theirs + 1, begins, ends[ours.positions], true, special, true)
    alignment = align_renderings(ours.rendering, other.rendering, Counter())
    shift_s, shift_t = (int(w.positions[0] - w.view.target.positions[0]) for w in (student, teacher))
    return replace(
        alignment,
        student_start=alignment.student_start + shift_s,
        student_end=alignment.student_end + shift_s,
        teacher_start=alignment.teacher_start + shift_t,
        teacher_end=alignment.teacher_end + shift_t,
    )


def hint_row(target: HintTarget, student: TargetInContext, teacher: TargetInContext) -> HintRow | Skipped:
    """Both sequences of a target inside their windows, or the reason why it is skipped."""
    windows = cut_windows(student, teacher)
    if windows is None:
        too_long = student.target.end > student.limit or teacher.target.end > teacher.limit
        return Skipped("target_too_long" if too_long else "hint_does_not_fit")
    mine, theirs = windows
    if target.hint and np.array_equal(mine.ids, theirs.ids):
        return Skipped("hint_not_shown")
    chunks = _chunks(mine, theirs)
    if bool(chunks.role.all()) and len(student.target.ids) > 1:
        return Skipped("no_shared_text")
    compared = _compared(student.target.rendering, chunks)
    return HintRow(target, mine.ids, mine.positions, theirs.ids, theirs.positions, chunks, mine.uncut, *compared)


def _compared(rendering: TokenizedText, chunks: Chunks) -> tuple[int, int]:
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
    """One preference pair: two sequences with one prompt, and the positions of each side's response tokens."""

    pair: PreferencePair
    chosen_ids: IntArray
    chosen_positions: IntArray
    rejected_ids: IntArray
    rejected_positions: IntArray


def pair_row(
    renderer: ChatRenderer, pair: PreferencePair, trace: Trace, tools: Sequence[Any] | None, limit: int
) -> PairRow | Skipped:
    """Both sides inside a window of ``limit`` tokens, or the reason why the pair is skipped.

    Each side is the state followed by its message, as the template writes it, header and end of turn included. The
    prompt is cut from the left by whole messages, the same for both sides.
    """
    state = pair.state(trace)
    if not state:
        return Skipped("pair_without_state")
    views = _answers(renderer, state, (pair.chosen, pair.rejected), tools, limit)
    if views[0] is None or views[1] is None:
        return Skipped("no_response")
    chosen, rejected = views[0], views[1]
    if [p.key for p in chosen.plain.pieces[: chosen.piece]] != [p.key for p in rejected.plain.pieces[: rejected.piece]]:
        return Skipped("prompts_differ")
    windows = cut_windows(chosen, rejected)
    if windows is None:
        return Skipped("response_too_long")
    first, second = windows
    if np.array_equal(first.ids, second.ids):
        return Skipped("sides_equal")
    return PairRow(pair, first.ids, first.positions, second.ids, second.positions)


def _answers(
    renderer: ChatRenderer, state: list[Message], sides: Sequence[Message], tools: Sequence[Any] | None, limit: int
) -> list[TargetInContext | None]:
    """Both sides behind the state, adapted to the template by one rule, so that their prompts are the same."""
    chats = [messages_to_chat([*state, side]) for side in sides]
    conversations = [renderer.conversation(chat, tools) for chat in chats]
    rule = max((conversation.rule for conversation in conversations), key=RULES.index)
    conversations = [
        c if c.rule == rule else renderer.conversation(c.messages, tools, rule=rule) for c in conversations
    ]
    return [_answer(renderer, conversation, limit) for conversation in conversations]


def _answer(renderer: ChatRenderer, conversation: Conversation, limit: int) -> TargetInContext | None:
    answer = len(conversation.messages) - 1
    target = renderer.target(conversation, answer)
    if target is None:
        return None
    return TargetInContext(renderer, conversation, conversation.piece_of[answer], target, limit)
