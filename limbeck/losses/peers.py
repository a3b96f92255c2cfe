"""Ranks that share one micro-batch's rows, as a loss sees them: what is taken over the whole micro-batch is combined.

A process that has all rows is `ALONE`; `limbeck.distributed.attention` has the peers of a context-parallel rank.
"""

from __future__ import annotations

from torch import Tensor


class Peers:
    """The only rank. Every rank makes the same calls, in the same order, with tensors of the same shape and type."""

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks; without gradient."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks; without gradient."""
        return values


ALONE = Peers()
