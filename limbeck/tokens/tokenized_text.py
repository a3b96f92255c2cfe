"""One text as one token sequence, with the bytes that every token stands for."""

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

    def shifted(self, by_bytes: int, by_tokens: int) -> Segment:
        """The same stretch in a rendering that has so much more in front."""
        start, end = self.start + by_bytes, self.end + by_bytes
        places = self.token_start + by_tokens, self.token_end + by_tokens
        return Segment(self.message, self.kind, start, end, *places)


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


# eq=False: arrays compare to arrays, which have no truth value
@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Token ids of one text with exact byte ends.

    Attributes:
        ids: ``[n]`` token ids.
        byte_ends: ``[n]`` byte offset in ``source`` at which each token ends; non-decreasing.
        source: UTF-8 bytes of the text that the tokens stand for; special tokens contribute none.
        byte_exact: ``[n]`` bool; False where the tokenizer's normaliser changed a token's bytes.
        special: ``[n]`` bool.
        loss_mask: ``[n]`` bool; tokens that are supervised.
        segments: the target stretches, in order.
        skipped: what was left out, counted by reason.
        fields: names, keys and values of the tool calls in the targets, in order.
    """

    ids: IntArray
    byte_ends: IntArray
    source: bytes
    byte_exact: BoolArray
    special: BoolArray
    loss_mask: BoolArray
    segments: tuple[Segment, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    fields: tuple[CallField, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, length: int) -> TokenizedText:
        """The first ``length`` tokens; segments are cut with them. The source keeps its full text."""
        if length >= len(self):
            return self
        end_byte = int(self.byte_ends[length - 1]) if length else 0
        segments = tuple(
            replace(s, end=max(min(s.end, end_byte), s.start), token_end=min(s.token_end, length))
            for s in self.segments
            if s.token_start < length
        )
        cut = slice(0, length)
        return replace(
            self,
            ids=self.ids[cut],
            byte_ends=self.byte_ends[cut],
            byte_exact=self.byte_exact[cut],
            special=self.special[cut],
            loss_mask=self.loss_mask[cut],
            segments=segments,
            fields=tuple(f for f in self.fields if f.end <= end_byte),
            skipped={**self.skipped, "truncated_tokens": len(self) - length},
        )

    def part(self, tokens: slice) -> TokenizedText:
        """Some of the tokens and the bytes that they stand for; without segments, fields and counts."""
        first, last, _ = tokens.indices(len(self))
        begin = int(self.byte_ends[first - 1]) if first else 0
        # a source may have bytes and no token, where the tokenizer drops all of a text
        end = len(self.source) if last == len(self) else int(self.byte_ends[last - 1]) if last else 0
        return TokenizedText(
            ids=self.ids[tokens],
            byte_ends=self.byte_ends[tokens] - begin,
            source=self.source[begin:end],
            byte_exact=self.byte_exact[tokens],
            special=self.special[tokens],
            loss_mask=self.loss_mask[tokens],
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenizedText]) -> TokenizedText:
        """Several renderings, one after the other, as one; their segments and fields are left behind."""
        before = np.cumsum([0, *(len(part.source) for part in parts)])
        # np.concatenate refuses an empty list
        none = np.zeros(0, dtype=np.int64)

        def flags(name: str) -> BoolArray:
            return np.concatenate([none.astype(bool), *(getattr(part, name) for part in parts)])

        return cls(
            np.concatenate([none, *(part.ids for part in parts)]),
            np.concatenate([none, *(part.byte_ends + shift for part, shift in zip(parts, before[:-1], strict=True))]),
            b"".join(part.source for part in parts),
            flags("byte_exact"),
            flags("special"),
            flags("loss_mask"),
            skipped=dict(sum((Counter(part.skipped) for part in parts), Counter())),
        )
