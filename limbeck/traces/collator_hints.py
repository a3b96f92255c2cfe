"""The hint channel: for every message to correct, the student's sequence and the hinted teacher's.

Both end with the same target. The teacher's is the student's with the hint's turn put in: prefix and target are the
student's own pieces, only what the hint changed is tokenised anew. A target that no special token divides from the hint
cannot be spliced and is dropped, counted as ``hint_not_separable``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from limbeck.align import Chunks, align_renderings
from limbeck.errors import TemplateError
from limbeck.tokens.chat import ChatRenderer, Conversation, Placement, insert_hint, probe_placement
from limbeck.traces.collator_examples import HintTarget
from limbeck.traces.collator_windows import IntArray, View, Window, cut_windows


@dataclass(frozen=True)
class SiteRow:
    """One target with both of its sequences.

    Attributes:
        student_ids, teacher_ids: the sequences, up to the target's last token.
        student_places, teacher_places: indices of the target's tokens in them.
        chunks: which of these tokens correspond; one to one where both sides share a tokenizer.
        uncut: the student's sequence is the beginning of the trace's own rendering.
    """

    target: HintTarget
    student_ids: IntArray
    student_places: IntArray
    teacher_ids: IntArray
    teacher_places: IntArray
    chunks: Chunks
    uncut: bool


class HintSide:
    """One model's part in the hint channel: its renderer, its window, and where its template shows a hint."""

    def __init__(self, renderer: ChatRenderer, limit: int, placement: Placement | None) -> None:
        self.renderer, self.limit = renderer, limit
        self.placement: Placement = placement or probe_placement(renderer.tokenizer)

    def hinted(
        self, plain: Conversation, tools: Sequence[Any] | None, targets: Sequence[HintTarget]
    ) -> list[View | str]:
        """Every target with its hint, or the reason why it cannot have it.

        Hints at different places share one rendering, so a trace is rendered as often as one place has hints; each
        target takes only its own hint from it.
        """
        found: list[View | str] = ["no_target_tokens"] * len(targets)
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
        return found

    def _render(
        self,
        plain: Conversation,
        tools: Sequence[Any] | None,
        targets: Sequence[HintTarget],
        members: Sequence[int],
        found: list[View | str],
    ) -> None:
        messages: list[dict[str, Any]] = list(plain.messages)
        inserted: dict[int, int] = {}
        for number in sorted(members, key=lambda n: -targets[n].message):
            before = len(messages)
            messages = insert_hint(messages, targets[number].message, targets[number].hint, self.placement)
            inserted[number] = len(messages) - before
        try:
            hinted = self.renderer.conversation(messages, tools)
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
    ) -> View | str:
        place = origin.index(target.message)
        piece, piece_h = plain.piece_of[target.message], hinted.piece_of.get(place)
        own = self.renderer.target(plain, target.message)
        assert own is not None, "targets without tokens are sorted out before"
        if not target.hint:
            return View(self.renderer, plain, piece, own, self.limit)
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
        return View(self.renderer, plain, piece, own, self.limit, splice, middle)


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
        zero, true = np.zeros(len(mine), dtype=np.int64), np.ones(len(mine), dtype=bool)
        return Chunks(mine, mine + 1, theirs, theirs + 1, zero, zero, true, ours.rendering.special[ours.places])
    found = align_renderings(ours.rendering, other.rendering, Counter())
    shift_s, shift_t = (int(w.places[0] - w.view.target.places[0]) for w in (student, teacher))
    return replace(
        found,
        student_start=found.student_start + shift_s,
        student_end=found.student_end + shift_s,
        teacher_start=found.teacher_start + shift_t,
        teacher_end=found.teacher_end + shift_t,
    )


def site_row(target: HintTarget, student: View, teacher: View) -> SiteRow | str:
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
    return SiteRow(target, mine.ids, mine.places, theirs.ids, theirs.places, chunks, mine.uncut)
