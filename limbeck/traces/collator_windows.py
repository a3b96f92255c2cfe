"""Token-budget windows: cut from the left by whole messages, at the same message wherever two sides are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from limbeck.tokens.chat import ChatRenderer, Conversation, Piece, Target

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class View:
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

    view: View
    ids: IntArray
    places: IntArray
    uncut: bool


def cut_windows(first: View, second: View) -> tuple[Window, Window] | None:
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
