"""The preference channel: both sides of a pair rendered as assistant messages of one conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from limbeck.tokens.chat import ChatRenderer
from limbeck.traces.collator_windows import IntArray, View, cut_windows
from limbeck.traces.schema import Message, PreferencePair, Trace, messages_to_chat


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
    views = [_view(renderer, [*state, side], tools, limit) for side in (pair.chosen, pair.rejected)]
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


def _view(renderer: ChatRenderer, messages: list[Message], tools: Sequence[Any] | None, limit: int) -> View | None:
    conversation = renderer.conversation(messages_to_chat(messages), tools)
    answer = len(messages) - 1
    target = renderer.target(conversation, answer)
    if target is None:
        return None
    return View(renderer, conversation, conversation.piece_of[answer], target, limit)
