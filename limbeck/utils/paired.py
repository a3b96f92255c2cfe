"""Two models on the same problems."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> dict[str, float] | None:
    """Two models on the problems that both were asked: the mean difference (second less first) with its standard error,
    how many each alone solved, and McNemar's exact p-value; None where they share none.

    >>> paired({1: 1, 2: 0, 3: 0}, {1: 1, 2: 1, 3: 1, 4: 0})["p"]
    0.5
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    difference = np.array([second[i] - first[i] for i in common])
    gained = sum(second[i] >= 1 > first[i] for i in common)
    lost = sum(first[i] >= 1 > second[i] for i in common)
    error = float(difference.std(ddof=1) / math.sqrt(len(common))) if len(common) > 1 else math.nan
    return {
        "problems": len(common),
        "difference": float(difference.mean()),
        "standard_error": error,
        "gained": gained,
        "lost": lost,
        "p": mcnemar(gained, lost),
    }


def paired_rates(
    first: Mapping[int, float], second: Mapping[int, float], sizes: Mapping[int, float]
) -> tuple[float, float] | None:
    """Difference of two totals per unit of size (second less first), over the items that both have, and its standard
    error over the choice of those items; None where they share none. Bits of records, and their bytes: bits per byte.

    >>> paired_rates({1: 4.0, 2: 9.0}, {1: 3.0, 2: 8.0}, {1: 10, 2: 10})
    (-0.1, 0.0)
    """
    common = sorted(first.keys() & second.keys() & sizes.keys())
    size = np.array([sizes[i] for i in common], dtype=float)
    if not common or not size.sum():
        return None
    difference = np.array([second[i] - first[i] for i in common])
    rate = float(difference.sum() / size.sum())
    if len(common) < 2:
        return rate, math.nan
    # of a ratio of two sums: what is left of each item's difference beside the common rate
    left = difference - rate * size
    return rate, math.sqrt(len(common) / (len(common) - 1) * float((left**2).sum())) / float(size.sum())


def mcnemar(gained: int, lost: int) -> float:
    """Probability of a split at least as uneven where either is equally likely."""
    total = gained + lost
    tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1))
    # at an even split both tails hold the middle
    return min(1.0, 2 * tail / 2**total)
