"""From characters of a rendered conversation to tokens, in one tokenization."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from limbeck.tokens.encoder import TextEncoder
from limbeck.tokens.rendering import Rendering
from limbeck.utils.errors import TemplateError

Span = tuple[int, int]


@dataclass(frozen=True)
class Special:
    """A special token that the template wrote: its characters in the rendering, its id and its role."""

    start: int
    end: int
    id: int
    role: str


@lru_cache(maxsize=32)
def special_pattern(encoder: TextEncoder) -> re.Pattern[str] | None:
    """Matches the content of any special token, the longest first."""
    contents = sorted((c for c in encoder.aliases if c), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents))) if contents else None


def find_specials(text: str, protected: Iterable[Span], encoder: TextEncoder) -> list[Special]:
    """The special tokens in a rendering, outside the spans that hold text of messages."""
    pattern = special_pattern(encoder)
    if pattern is None:
        return []
    found, at = [], 0
    ids = encoder.special_ids
    for start, end in [*protected, (len(text), len(text))]:
        for match in pattern.finditer(text, at, start):
            token = ids[match[0]]
            found.append(Special(match.start(), match.end(), token, encoder.vocab.roles.get(token, "")))
        at = end
    return found


class AliasedText:
    """A rendered conversation, tokenised once; maps its characters to tokens.

    Attributes:
        rendering: ids and byte ends; nothing is a target yet.
    """

    def __init__(self, text: str, specials: Sequence[Special], encoder: TextEncoder) -> None:
        self._specials = list(specials)
        self._special_starts = [s.start for s in specials]
        self._special_ends = [s.end for s in specials]
        contents = [text[s.start : s.end] for s in specials]
        cuts = [0, *(x for s in specials for x in (s.start, s.end)), len(text)]
        plain = [text[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        aliases = [encoder.aliases[content] for content in contents]
        self.rendering: Rendering = encoder.encode_aliased("".join(_interleave(plain, aliases)))
        self._tokens = self._place_specials(encoder)
        self._text = text
        self._bytes = _byte_counts(text, [content.encode() for content in contents], self._special_ends)

    def _place_specials(self, encoder: TextEncoder) -> list[int]:
        """Token index of every special; anything but an unknown-token beyond those is an error."""
        places: list[int] = []
        rendering = self.rendering
        for index in np.flatnonzero(rendering.special).tolist():
            token = int(rendering.ids[index])
            if len(places) < len(self._specials) and token == self._specials[len(places)].id:
                places.append(index)
            elif encoder.vocab.roles.get(token) != "unk":
                raise TemplateError(f"text of the conversation became special token {token}; please report this.")
        if len(places) != len(self._specials):
            raise TemplateError("the tokenizer lost a special token that the chat template wrote; please report this.")
        return places

    def special_token(self, special: Special) -> int:
        """Token index of a special."""
        return self._tokens[bisect_left(self._special_starts, special.start)]

    def byte(self, char: int) -> int:
        """Offset in ``rendering.source`` of character ``char`` of the text."""
        return self._bytes(char)

    def cover(self, start: int, end: int) -> tuple[int, int, int]:
        """Tokens ``[first, last)`` that lie wholly inside characters ``start:end``, and how many straddle an edge."""
        ends, exact, special = self.rendering.ends, self.rendering.exact, self.rendering.special
        before = bisect_right(self._special_ends, start)
        after = bisect_left(self._special_starts, end)
        low = self._tokens[before - 1] + 1 if before else 0
        high = self._tokens[after] if after < len(self._tokens) else len(ends)
        start_byte, end_byte = self.byte(start), self.byte(end)
        first = max(low, int(np.searchsorted(ends, start_byte, side="left")))
        cut = set()
        while first < high and not special[first] and self._begin(first) < start_byte:
            if ends[first] > start_byte:
                cut.add(first)
            first += 1
        # Tokens of a group that a normaliser changed share its end, so they leave together.
        while cut and first < high and not exact[first - 1] and not exact[first] and self._begin(first) == ends[first]:
            cut.add(first)
            first += 1
        last = max(first, min(high, int(np.searchsorted(ends, end_byte, side="right"))))
        if last < high and self._begin(last) < end_byte < ends[last] and end > start:
            cut.add(last)
        return first, last, len(cut)

    def _begin(self, token: int) -> int:
        return int(self.rendering.ends[token - 1]) if token else 0


def _interleave(plain: list[str], aliases: list[str]) -> Iterable[str]:
    for text, alias in zip(plain, [*aliases, ""], strict=True):
        yield text
        yield alias


class _byte_counts:
    """Byte offset of a character, specials not counted; prefix sums over blocks keep it linear in the text."""

    def __init__(self, text: str, specials: list[bytes], ends: list[int]) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        lengths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        self._sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        self._special_sums = [0, *np.cumsum([len(s) for s in specials]).tolist()]
        self._ends = ends

    def __call__(self, char: int) -> int:
        return int(self._sums[char]) - self._special_sums[bisect_right(self._ends, char)]
