"""Which token may follow which: what a deterministic tokenizer tells about the token after the last one.

A byte-pair tokenizer never writes two tokens in a row that it would have written otherwise: `(u, v)` is *allowed*
where the encoding of both texts together is `[u, v]`. A model whose last token is `u` knows this and gives the other
tokens no mass. The rule needs no table of pairs: a merge `(a, b)` of rank `r` crosses the border of `u|v` where `a` is
on the right edge of `u` and not yet used up inside it by an earlier merge, and `b` likewise on the left edge of `v`.
With tokens numbered depth-first in the forest "made from this left part", children by rank, each merge forbids one
token and one contiguous range.

Merges and bytes together also spell: `PairRule.spell` is the tokenizer's model without its splitting rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.tokens.tokenizer import backend_spec

IdArray = npt.NDArray[np.int32]
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class PairRule:
    """Forbidden successors of every token of a byte-pair vocabulary of V ids.

    The rule knows merges, not the tokenizer's splitting rules: a pair that a splitter tears apart (digits in threes)
    may count as forbidden although texts hold it. A pair that occurs is proof that it is allowed.

    Attributes:
        merge_left, merge_right: int32 [R]; the ids that each merge joins, in order of rank.
        left, right, made: int32 [V]; the two parts that the tokenizer makes a token from and the rank of that merge;
            -1 for tokens that are not made by a merge.
        place, stop: int32 [V]; number of a token in depth-first order, and the number after its last descendant.
        text, text_end: int32 [B], [V]; the bytes of all tokens, one after another, and where those of each end.
    """

    merge_left: IdArray
    merge_right: IdArray
    left: IdArray
    right: IdArray
    made: IdArray
    place: IdArray
    stop: IdArray
    text: IdArray
    text_end: IdArray

    def __post_init__(self) -> None:
        size, ranks = self.left.size, self.merge_left.size
        shapes = {"merge_left": ranks, "merge_right": ranks, "text": self.text.size}
        for name, array in self.arrays().items():
            if array.dtype != np.int32 or array.shape != (shapes.get(name, size),):
                raise ProjectionError(f"pair rule: `{name}` is {array.dtype} {array.shape}; expected int32, one length")
        limits = {
            "made": (-1, ranks),
            "left": (-1, size),
            "right": (-1, size),
            "stop": (1, size + 1),
            "text": (0, 256),
            "text_end": (0, self.text.size + 1),
        }
        for name, array in self.arrays().items():
            low, high = limits.get(name, (0, size))
            if array.size and (array.min() < low or array.max() >= high):
                raise ProjectionError(f"pair rule: `{name}` has entries outside {low}..{high - 1}")
        if np.bincount(self.place, minlength=size).max(initial=1) > 1 or (self.stop <= self.place).any():
            raise ProjectionError("pair rule: the depth-first numbers are no numbering")
        if (np.diff(self.text_end) < 0).any() or self.text_end[-1:].sum() != self.text.size:
            raise ProjectionError("pair rule: the bytes of tokens do not follow each other")
        inner = self.left >= 0
        whole = (inner == (self.right >= 0)).all() and (inner == (self.made >= 0)).all()
        if not (whole and _ends(self.left) and _ends(self.right)):
            raise ProjectionError("pair rule: the parts of tokens do not form trees")

    def arrays(self) -> dict[str, IdArray]:
        """The stored arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def size(self) -> int:
        """Number of ids, V."""
        return int(self.left.size)

    @classmethod
    def from_tokenizer(cls, tokenizer: object, token_bytes: Sequence[bytes]) -> PairRule | None:
        """The rule of a byte-pair tokenizer; None for unigram and WordPiece models, which have no merges."""
        model = backend_spec(tokenizer)["model"]
        if model.get("type", "BPE") != "BPE" or not model.get("merges"):
            return None
        ids: Mapping[str, int] = model["vocab"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        merges = [(ids[a], ids[b], ids[a + b]) for a, b in pairs]
        return cls.from_merges(merges, token_bytes)

    @classmethod
    def from_merges(cls, merges: Sequence[tuple[int, int, int]], token_bytes: Sequence[bytes]) -> PairRule:
        """From (left id, right id, made id) in order of rank, and the bytes of every id."""
        table = np.asarray(merges, dtype=np.int32).reshape(-1, 3)
        left, right, made = _how_made(table, token_bytes)
        place, stop = _number_depth_first(left, made)
        text = np.frombuffer(b"".join(token_bytes), dtype=np.uint8).astype(np.int32)
        text_end = np.cumsum([len(data) for data in token_bytes], dtype=np.int32)
        return cls(table[:, 0].copy(), table[:, 1].copy(), left, right, made, place, stop, text, text_end)

    @cached_property
    def _by_left(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Merges by left part, ranks ascending: order [R], offsets [V + 1]."""
        return _grouped(self.merge_left, self.size)

    @cached_property
    def _children(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens by (left part, rank) with sortable keys, and offsets [V + 1] by left part."""
        inner = np.flatnonzero(self.left >= 0)
        order = inner[np.lexsort((self.made[inner], self.left[inner]))]
        offsets = np.searchsorted(self.left[order], np.arange(self.size + 1))
        return order, self._key(self.left[order], self.made[order]), offsets

    @cached_property
    def _by_place(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.place, kind="stable")

    def _key(self, token: npt.NDArray[Any], rank: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return np.asarray(token.astype(np.int64) * (self.merge_left.size + 1) + rank)

    def forbidden(self, last: int) -> IdArray:
        """Ids that cannot follow token `last`, ascending."""
        order, offsets = self._by_left
        children, keys, child_offsets = self._children
        edges = np.zeros(self.size + 1, dtype=np.int64)
        part, limit = last, _NEVER
        while part >= 0:
            ranks = order[offsets[part] : offsets[part + 1]]
            ranks = ranks[: np.searchsorted(ranks, limit)]
            heads = self.merge_right[ranks]
            np.add.at(edges, self.place[heads], 1)
            np.add.at(edges, self.place[heads] + 1, -1)
            first = np.searchsorted(keys, self._key(heads, ranks))
            later = first < child_offsets[heads + 1]
            np.add.at(edges, self.place[children[first[later]]], 1)
            np.add.at(edges, self.stop[heads[later]], -1)
            limit, part = int(self.made[part]), int(self.right[part])
        return np.sort(self._by_place[np.cumsum(edges[:-1]) > 0]).astype(np.int32)

    def allowed(self, last: int, following: int) -> bool:
        """Whether `following` may stand after `last`."""
        return not _crossed(self._ranks, (self._lists[0], self._lists[1], self._lists[2]), last, following, _NEVER)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of every id; empty for ids that no text gives."""
        text, ends = self.text.astype(np.uint8).tobytes(), self.text_end.tolist()
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.merge_left.tolist(), self.merge_right.tolist(), strict=True)
        return {pair: rank for rank, pair in enumerate(pairs)}

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        return self.left.tolist(), self.right.tolist(), self.made.tolist()

    @cached_property
    def _products(self) -> dict[tuple[int, int], int]:
        """Token that each merge makes; several merges may make one."""
        ids = {data: token for token, data in reversed(list(enumerate(self.token_bytes))) if data}
        ids |= {self.token_bytes[token]: token for token in np.flatnonzero(self.made >= 0).tolist()}
        data = self.token_bytes
        return {(a, b): ids[data[a] + data[b]] for a, b in self._ranks if data[a] + data[b] in ids}

    @cached_property
    def _symbols(self) -> dict[bytes, int]:
        """What spelling begins with: tokens that no merge makes; of equal bytes the one that merges use."""
        plain = [token for token in np.flatnonzero(self.made < 0).tolist() if self.token_bytes[token]]
        used = {*self.merge_left.tolist(), *self.merge_right.tolist()}
        return {self.token_bytes[token]: token for token in sorted(plain, key=lambda token: (token in used, -token))}

    def spell(self, data: bytes) -> tuple[int, ...]:
        """The merges' spelling of some bytes, () where a byte has no token. Splitting rules are not applied."""
        symbols, ranks = self._symbols, self._ranks
        if data in symbols:
            return (symbols[data],)
        ids: list[int] = []
        at = 0
        while at < len(data):
            width = _char_width(data[at])
            char = data[at : at + width]
            if char not in symbols:
                char = char[:1]
            if char not in symbols:
                return ()
            ids.append(symbols[char])
            at += len(char)
        while len(ids) > 1:
            rank, place = min((ranks.get(pair, _NEVER), i) for i, pair in enumerate(pairwise(ids)))
            if rank == _NEVER:
                break
            ids[place : place + 2] = [self._products[ids[place], ids[place + 1]]]
        return tuple(ids)


def _char_width(lead: int) -> int:
    """Bytes of the UTF-8 character that begins so; 1 for a byte that begins none."""
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _crossed(
    ranks: Mapping[tuple[int, int], int],
    parts: tuple[Sequence[int], Sequence[int], Sequence[int]],
    first: int,
    second: int,
    before: int,
) -> bool:
    """Whether a merge of a rank below `before` joins a right edge of `first` with a left edge of `second`. parts: left
    and right part of each token and the rank that made it."""
    left, right, made = parts
    a, limit_a = first, before
    while a >= 0:
        b, limit_b = second, before - 1
        while b >= 0:
            # of equal ranks the leftmost is merged first, so a tie is lost on the right side only
            if ranks.get((a, b), _NEVER) < min(limit_a, limit_b + 1):
                return True
            limit_b, b = made[b], left[b]
        limit_a, a = made[a], right[a]
    return False


def _ends(parent: IdArray) -> bool:
    """Whether the way from every token to its part, the part's part, ... ends."""
    jump = np.append(parent, np.int32(-1))
    for _ in range(parent.size.bit_length()):
        jump = jump[jump]
    return bool((jump < 0).all())


def _grouped(owner: IdArray, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    order = np.argsort(owner, kind="stable")
    return order, np.searchsorted(owner[order], np.arange(size + 1))


def _how_made(table: IdArray, token_bytes: Sequence[bytes]) -> tuple[IdArray, IdArray, IdArray]:
    """Of the merges that give a token, the one by which the tokenizer makes it from its own text."""
    size = len(token_bytes)
    order, offsets = _grouped(table[:, 2], size)
    count = np.diff(offsets)
    once = np.flatnonzero(count == 1)
    parts = np.full((3, size), -1, np.int64)
    parts[2, once] = order[offsets[once]]
    parts[:2, once] = table[parts[2, once], :2].T
    left, right, made = parts.tolist()
    merges = table.tolist()
    rank_of = {(a, b): rank for rank, (a, b, _) in enumerate(merges)}
    several, ranks_of, starts = np.flatnonzero(count > 1).tolist(), order.tolist(), offsets.tolist()
    # a token's parts are shorter than it, and decided before it
    for token in sorted(several, key=lambda token: len(token_bytes[token])):
        for rank in ranks_of[starts[token] : starts[token + 1]]:
            a, b, _ = merges[rank]
            if not _crossed(rank_of, (left, right, made), a, b, rank):
                left[token], right[token], made[token] = a, b, rank
                break
    return np.array(left, np.int32), np.array(right, np.int32), np.array(made, np.int32)


def _number_depth_first(left: IdArray, made: IdArray) -> tuple[IdArray, IdArray]:
    """Preorder numbers in the forest "left part is the parent", children by rank, and the number after each subtree."""
    size = left.size
    order = np.lexsort((made, left))
    offsets = np.searchsorted(left[order], np.arange(-1, size + 1))
    levels = [order[: offsets[1]]]
    while levels[-1].size:
        parents = levels[-1]
        starts, counts = offsets[parents + 1], offsets[parents + 2] - offsets[parents + 1]
        inner = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        levels.append(order[np.repeat(starts, counts) + inner])
    total = np.ones(size, dtype=np.int64)
    for level in reversed(levels[1:]):
        np.add.at(total, left[level], total[level])
    place = np.zeros(size, dtype=np.int64)
    for level in levels:
        if not level.size:
            continue
        before = np.cumsum(total[level]) - total[level]
        parents = left[level]
        first = np.ones(level.size, dtype=bool)
        first[1:] = parents[1:] != parents[:-1]
        base = before[first][np.cumsum(first) - 1]
        place[level] = before - base + np.where(parents < 0, 0, place[parents] + 1)
    return place.astype(np.int32), (place + total).astype(np.int32)
