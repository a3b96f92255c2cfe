"""Token-budget windows: cut from the left by whole messages, at the same message wherever two sides are compared."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from limbeck.traces.collator_pieces import Conversation, IntArray, Piece, Renderer, Target


@dataclass(frozen=True)
class View:
    """A target as one model reads it: the pieces in front of it, possibly changed by a hint, and the target's piece.

    The sequence is ``plain.pieces[:splice]``, then ``middle``, then ``plain.pieces[piece]`` up to the target's last
    token. Without a hint ``splice`` is ``piece`` and ``middle`` is empty.

    Attributes:
        limit: longest sequence, in tokens.
    """

    renderer: Renderer
    plain: Conversation
    piece: int
    target: Target
    limit: int
    splice: int = -1
    middle: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if self.splice < 0:
            object.__setattr__(self, "splice", self.piece)

    def starts(self) -> dict[int, int]:
        """Message -> piece at which a window may begin with it; -1 stands for the whole sequence."""
        starts = {-1: self.plain.head}
        for number in range(self.plain.head + 1, self.splice + 1):
            piece = self.plain.pieces[number]
            first = self.middle[0] if self.middle and number == self.splice else piece
            if first.clean and piece.messages:
                starts[min(piece.messages)] = number
        return starts

    def running(self) -> list[int]:
        """``[splice + 1]`` tokens in front of each piece."""
        return [0, *accumulate(len(self.renderer.ids(piece)) for piece in self.plain.pieces[: self.splice])]

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

    view: View
    ids: IntArray
    places: IntArray
    uncut: bool


def cut_windows(first: View, second: View) -> tuple[Window, Window] | None:
    """The longest windows that fit both sides and begin with the same message; None where no window does.

    The head (begin token, tools, system messages) stays in front of a cut where it fits, else only the begin token.
    """
    views = (first, second)
    starts = [view.starts() for view in views]
    running = [view.running() for view in views]
    room = [view.limit - view.tail() for view in views]
    common = sorted(set(starts[0]) & set(starts[1]))
    for heads in ([v.plain.head for v in views], [v.plain.preamble for v in views], [0, 0]):
        for message in common:
            cuts = [(min(head, start[message]), start[message]) for head, start in zip(heads, starts, strict=True)]
            used = [r[keep] + r[-1] - r[start] for r, (keep, start) in zip(running, cuts, strict=True)]
            if all(u <= limit for u, limit in zip(used, room, strict=True)):
                return views[0].window(*cuts[0]), views[1].window(*cuts[1])
    return None
