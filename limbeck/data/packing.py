"""Which samples share a micro-batch: bin packing and token-budget batching.

A sample has one size per model that reads it (its student length, its teacher lengths), and a bin has one capacity per
model; a sample fits where *every* size fits, so student and teacher are packed in lockstep. All algorithms are
deterministic: the same lengths give the same bins on every rank and in every run.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from limbeck.errors import ConfigError, DataError

Bins = list[list[int]]


class PackingAlgorithm(str, Enum):
    """Names accepted in ``sequence_packing.algorithm``."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


def as_sizes(lengths: Any, capacities: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Check and normalise sizes to int64 ``[N, D]`` and capacities to int64 ``[D]``.

    ``lengths`` is ``[N]`` (one model) or ``[N, D]`` (several models, one column each).
    """
    room = np.atleast_1d(np.asarray(capacities, dtype=np.int64))
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim == 1:
        sizes = sizes[:, None]
    if sizes.ndim != 2 or room.ndim != 1 or sizes.shape[1] != room.shape[0]:
        raise DataError(
            f"Packing got lengths of shape {tuple(np.shape(lengths))} for {room.size} capacities; "
            "give one column of lengths per capacity."
        )
    if (room <= 0).any():
        raise ConfigError(f"A packing capacity of {room.tolist()} tokens is not usable; give positive numbers.")
    if (sizes < 0).any():
        raise DataError(f"A sequence length of {int(sizes.min())} is not usable; lengths must be 0 or more.")
    too_long = np.flatnonzero((sizes > room).any(axis=1))
    if too_long.size:
        first = int(too_long[0])
        raise DataError(
            f"{too_long.size} of {len(sizes)} sequences do not fit a micro-batch: sequence {first} has "
            f"{sizes[first].tolist()} tokens for capacities {room.tolist()}; raise the token budget of the "
            "micro-batch (train_mb_tokens, teacher_mb_tokens) or lower the context length."
        )
    return sizes, room


class SequencePacker(ABC):
    """Puts sequences into bins so that no capacity is exceeded and every sequence is in exactly one bin.

    Args:
        bin_capacity: tokens per bin, one number per model.
        min_bin_count: at least this many bins (bins are split, never left empty).
        bin_count_multiple: the number of bins is a multiple of this, so that data-parallel ranks get equally many.
    """

    def __init__(
        self,
        bin_capacity: int | Sequence[int],
        *,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        for name, value in (("min_bin_count", min_bin_count), ("bin_count_multiple", bin_count_multiple)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give a positive number or None.")
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count or 1
        self.bin_count_multiple = bin_count_multiple or 1

    def pack(self, sequence_lengths: Any) -> Bins:
        """Bins of sequence indices for lengths ``[N]`` or ``[N, D]``; indices ascend within a bin."""
        sizes, room = as_sizes(sequence_lengths, self.bin_capacity)
        if len(sizes) == 0:
            return []
        bins = self._pack(sizes, room)
        wanted = required_bins(max(len(bins), self.min_bin_count), self.bin_count_multiple)
        return [sorted(items) for items in split_to_count(bins, sizes / room, wanted)]

    @abstractmethod
    def _pack(self, sizes: np.ndarray, room: np.ndarray) -> Bins: ...


class ConcatenativePacker(SequencePacker):
    """Next fit: keeps the order of the data and closes a bin when the next sequence does not fit."""

    def _pack(self, sizes: np.ndarray, room: np.ndarray) -> Bins:
        bins: Bins = [[]]
        free = room.copy()
        for item, size in enumerate(sizes):
            if (size > free).any():
                bins.append([])
                free = room.copy()
            bins[-1].append(item)
            free -= size
        return bins


class FirstFitDecreasingPacker(SequencePacker):
    """Longest first, each into the first bin with room: at most 11/9 of the optimum plus 6/9 for one size."""

    def _pack(self, sizes: np.ndarray, room: np.ndarray) -> Bins:
        return _first_fit(decreasing_order(sizes, room), sizes, room)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Johnson and Garey's refinement of first-fit decreasing: at most 71/60 of the optimum plus 1 for one size.

    Sequences longer than half a bin open the bins; the rest are fitted into what those leave, largest class first, and
    only what remains is packed by first-fit decreasing. With several sizes a sequence's class is that of its largest
    relative size.
    """

    def _pack(self, sizes: np.ndarray, room: np.ndarray) -> Bins:
        order = decreasing_order(sizes, room)
        share = (sizes / room).max(axis=1)[order]
        large, medium, small = (int(np.count_nonzero(share > limit)) for limit in (1 / 2, 1 / 3, 1 / 6))
        bins: Bins = [[int(item)] for item in order[:large]]
        pool = _Pool(order, sizes, start=large)
        free = room - sizes[order[:large]]

        has_medium = np.zeros(large, dtype=bool)
        for number in range(large):
            place = pool.largest_fitting(free[number], large, medium)
            if place is not None:
                has_medium[number] = True
                pool.move(place, bins[number], free[number])
        for number in reversed(range(large)):
            if not has_medium[number]:
                self._add_small_pair(pool, bins[number], free[number], medium, small)
        for number in range(large):
            while (place := pool.largest_fitting(free[number], large, len(order))) is not None:
                pool.move(place, bins[number], free[number])
        return bins + _first_fit(order[pool.left], sizes, room)

    @staticmethod
    def _add_small_pair(pool: _Pool, items: list[int], free: np.ndarray, medium: int, small: int) -> None:
        """Two small sequences, or none: a single one would waste the bin's rest."""
        first = pool.smallest(medium, small)
        if first is None:
            return
        pool.left[first] = False
        second = pool.largest_fitting(free - pool.size(first), medium, small)
        pool.left[first] = True
        if second is not None:
            pool.move(first, items, free)
            pool.move(second, items, free)


class _Pool:
    """Sequences not yet packed, in decreasing order; a place is an index into that order."""

    def __init__(self, order: np.ndarray, sizes: np.ndarray, start: int) -> None:
        self._order = order
        self._sizes = sizes[order]
        self.left = np.ones(len(order), dtype=bool)
        self.left[:start] = False

    def size(self, place: int) -> np.ndarray:
        return self._sizes[place]

    def largest_fitting(self, free: np.ndarray, start: int, end: int) -> int | None:
        fits = self.left[start:end] & (self._sizes[start:end] <= free).all(axis=1)
        place = int(fits.argmax()) if fits.size else 0
        return start + place if fits.size and fits[place] else None

    def smallest(self, start: int, end: int) -> int | None:
        places = np.flatnonzero(self.left[start:end])
        return start + int(places[-1]) if places.size else None

    def move(self, place: int, items: list[int], free: np.ndarray) -> None:
        self.left[place] = False
        items.append(int(self._order[place]))
        free -= self._sizes[place]


def decreasing_order(sizes: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Indices by decreasing largest relative size; ties keep the order of the data."""
    return np.argsort(-(sizes / room).max(axis=1), kind="stable")


def _first_fit(order: np.ndarray, sizes: np.ndarray, room: np.ndarray) -> Bins:
    bins: Bins = []
    free = np.empty((len(order), len(room)), dtype=np.int64)
    for item in order:
        fits = (free[: len(bins)] >= sizes[item]).all(axis=1)
        number = int(fits.argmax()) if fits.any() else len(bins)
        if number == len(bins):
            bins.append([])
            free[number] = room
        bins[number].append(int(item))
        free[number] -= sizes[item]
    return bins


def required_bins(at_least: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``at_least``."""
    return -(-at_least // multiple) * multiple


def split_to_count(bins: Bins, shares: np.ndarray, count: int) -> Bins:
    """Split the fullest bins in two until there are ``count``; ``shares`` ``[N, D]`` are the relative sizes."""
    total = sum(len(items) for items in bins)
    if total < count:
        raise DataError(
            f"{total} sequences cannot fill {count} micro-batches; give a larger batch or fewer data-parallel ranks."
        )
    load = shares.max(axis=1)
    bins = list(bins)
    heap = [(-float(load[items].sum()), number) for number, items in enumerate(bins) if len(items) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        _, number = heapq.heappop(heap)
        halves: Bins = [[], []]
        weight = [0.0, 0.0]
        for item in sorted(bins[number], key=lambda i: (-load[i], i)):
            # An empty half goes first, so that sequences of length 0 cannot leave it empty.
            side = min((0, 1), key=lambda s: (bool(halves[s]), weight[s], s))
            halves[side].append(item)
            weight[side] += float(load[item])
        bins[number] = halves[0]
        bins.append(halves[1])
        for place in (number, len(bins) - 1):
            if len(bins[place]) > 1:
                heapq.heappush(heap, (-float(load[bins[place]].sum()), place))
    return bins


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int | Sequence[int],
    *,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """The packer of that name, e.g. ``get_packer("modified_first_fit_decreasing", 8192).pack(lengths)``."""
    try:
        kind = PackingAlgorithm(algorithm.lower() if isinstance(algorithm, str) else algorithm)
    except ValueError:
        names = ", ".join(member.value for member in PackingAlgorithm)
        raise ConfigError(f"The packing algorithm {algorithm!r} is not known; choose one of {names}.") from None
    return _PACKERS[kind](bin_capacity, min_bin_count=min_bin_count, bin_count_multiple=bin_count_multiple)


def batch_by_tokens(
    lengths: Any,
    capacities: int | Sequence[int],
    *,
    round_to: int = 1,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Bins:
    """Token-budget (dynamic) batching: rows of similar length whose *padded* rectangle stays within the budget.

    A batch of n rows costs n times its longest row, rounded up to ``round_to``, on every model. A row that is longer
    than the budget on its own is an error, except that rounding never makes a fitting row unfit.

    Args:
        lengths: ``[N]`` or ``[N, D]`` token counts, one column per model.
        capacities: tokens per micro-batch, one number per model.

    Returns:
        Bins of row indices, ascending within a bin.
    """
    sizes, room = as_sizes(lengths, capacities)
    if round_to < 1:
        raise ConfigError(f"sequence_length_round is {round_to}; give a positive number.")
    if len(sizes) == 0:
        return []
    rounded = np.minimum(-(-sizes // round_to) * round_to, room)
    bins: Bins = []
    longest = np.zeros_like(room)
    for item in decreasing_order(sizes, room):
        widest = np.maximum(longest, rounded[item])
        if bins and ((len(bins[-1]) + 1) * widest <= room).all():
            bins[-1].append(int(item))
            longest = widest
        else:
            bins.append([int(item)])
            longest = rounded[item]
    wanted = required_bins(max(len(bins), min_bin_count or 1), bin_count_multiple or 1)
    return [sorted(items) for items in split_to_count(bins, sizes / room, wanted)]
