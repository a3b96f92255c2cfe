"""Which samples share a micro-batch: bin packing and token-budget batching.

A sample has one size per model that reads it (its student length, its teacher lengths), and a bin has one capacity per
model; a sample fits where *every* size fits, so student and teacher are packed in lockstep. The same lengths give the
same bins on every rank and in every run.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from limbeck.errors import ConfigError, DataError

Bins = list[list[int]]

log = logging.getLogger(__name__)

ALGORITHM = "first_fit_decreasing"
_EARLIER = ("modified_first_fit_decreasing", "concatenative")


@functools.cache
def check_algorithm(name: str) -> None:
    """Refuse a name that no packing algorithm ever had. Those of earlier versions mean the one there is, which the log
    says once."""
    if name.lower() in _EARLIER:
        log.warning("Sequences are packed by %s; the algorithm %s was removed.", ALGORITHM, name.lower())
    elif name.lower() != ALGORITHM:
        raise ConfigError(f"The packing algorithm {name!r} is not known; leave it out, or give {ALGORITHM!r}.")


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


def pack(
    lengths: Any,
    capacities: int | Sequence[int],
    *,
    bin_count_multiple: int | None = None,
) -> Bins:
    """Bins of sequences by first-fit decreasing: longest first, each into the first bin with room. Every sequence is in
    one bin, and no capacity is exceeded; with one model at most 11/9 of the fewest possible bins, and 6/9.

    Args:
        lengths: ``[N]`` or ``[N, D]`` token counts, one column per model.
        capacities: tokens per bin, one number per model.
        bin_count_multiple: the number of bins is a multiple of this, so that data-parallel ranks get equally many.

    Returns:
        Bins of sequence indices, ascending within a bin.
    """
    sizes, room = as_sizes(lengths, capacities)
    bins: Bins = []
    free = np.empty((len(sizes), len(room)), dtype=np.int64)
    for item in decreasing_order(sizes, room):
        fits = (free[: len(bins)] >= sizes[item]).all(axis=1)
        number = int(fits.argmax()) if fits.any() else len(bins)
        if number == len(bins):
            bins.append([])
            free[number] = room
        bins[number].append(int(item))
        free[number] -= sizes[item]
    return _enough(bins, sizes / room, bin_count_multiple)


def decreasing_order(sizes: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Indices by decreasing largest relative size; ties keep the order of the data."""
    return np.argsort(-(sizes / room).max(axis=1), kind="stable")


def _enough(bins: Bins, shares: np.ndarray, bin_count_multiple: int | None) -> Bins:
    """As many bins as are asked for, indices ascending; none where there is no sequence."""
    if bin_count_multiple is not None and bin_count_multiple < 1:
        raise ConfigError(f"bin_count_multiple is {bin_count_multiple}; give a positive number or None.")
    if not bins:
        return []
    multiple = bin_count_multiple or 1
    count = -(-len(bins) // multiple) * multiple
    return [sorted(items) for items in split_to_count(bins, shares, count)]


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
        for half in (number, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(heap, (-float(load[bins[half]].sum()), half))
    return bins


def batch_by_tokens(
    lengths: Any,
    capacities: int | Sequence[int],
    *,
    round_to: int = 1,
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
    return _enough(bins, sizes / room, bin_count_multiple)
