"""One text as one token sequence, with the place of every token in the text's bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """A stretch of target text: byte span in the rendering's source and the tokens that lie wholly inside it.

    ``kind`` is ``text``, ``content``, ``reasoning``, ``tool_call``, ``special`` or ``eot``; ``message`` is the index of
    the message it comes from, 0 for a plain text. A segment of kind ``eot``, the end of a turn, or ``special``, any
    other special token, has no bytes and one token.
    """

    message: int
    kind: str
    start: int
    end: int
    token_start: int
    token_end: int


@dataclass(frozen=True)
class CallField:
    """A name, key or value of a tool call, and where it is written.

    ``path`` leads to it inside the call, whatever the template writes around it; ``start:end`` are bytes of the
    rendering's source (characters before it is tokenised).
    """

    message: int
    call: int
    path: tuple[Any, ...]
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Rendering:
    """Token ids of one text with exact byte ends.

    Attributes:
        ids: ``[n]`` token ids.
        ends: ``[n]`` byte offset in ``source`` at which each token ends; non-decreasing.
        source: UTF-8 bytes of the text that the tokens stand for; special tokens contribute none.
        exact: ``[n]`` bool; False where the tokenizer's normaliser changed a token's bytes.
        special: ``[n]`` bool.
        target: ``[n]`` bool; tokens that are supervised.
        segments: the target stretches, in order.
        dropped: what was left out, counted by reason.
        fields: names, keys and values of the tool calls in the targets, in order.
    """

    ids: IntArray
    ends: IntArray
    source: bytes
    exact: BoolArray
    special: BoolArray
    target: BoolArray
    segments: tuple[Segment, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    fields: tuple[CallField, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, length: int) -> Rendering:
        """The first ``length`` tokens; segments are cut or dropped with them. The source keeps its full text."""
        if length >= len(self):
            return self
        end_byte = int(self.ends[length - 1]) if length else 0
        segments = tuple(
            replace(s, end=max(min(s.end, end_byte), s.start), token_end=min(s.token_end, length))
            for s in self.segments
            if s.token_start < length
        )
        cut = slice(0, length)
        return replace(
            self,
            ids=self.ids[cut],
            ends=self.ends[cut],
            exact=self.exact[cut],
            special=self.special[cut],
            target=self.target[cut],
            segments=segments,
            fields=tuple(f for f in self.fields if f.end <= end_byte),
            dropped={**self.dropped, "truncated_tokens": len(self) - length},
        )

    @classmethod
    def joined(cls, parts: Sequence[Rendering]) -> Rendering:
        """Several renderings, one after the other, as one; their segments and fields are left behind."""
        before = np.cumsum([0, *(len(part.source) for part in parts)])
        none = np.zeros(0, dtype=np.int64)

        def flags(name: str) -> BoolArray:
            return np.concatenate([none.astype(bool), *(getattr(part, name) for part in parts)])

        return cls(
            np.concatenate([none, *(part.ids for part in parts)]),
            np.concatenate([none, *(part.ends + shift for part, shift in zip(parts, before[:-1], strict=True))]),
            b"".join(part.source for part in parts),
            flags("exact"),
            flags("special"),
            flags("target"),
            dropped=dict(sum((Counter(part.dropped) for part in parts), Counter())),
        )
