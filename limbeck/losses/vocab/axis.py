"""Sums, picks and sorts along a vocabulary, so that a loss need not know whether all its columns are here.

A leaf written with these works on one process and, with the axis of `limbeck.distributed.vocab_parallel`, on shards of
the vocabulary: values `[n, V_local]` are local, results `[n]` or `[n, k]` are the same on every shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class VocabAxis:
    """The axis of a process that holds all columns."""

    sharded = False
    bounds: tuple[tuple[int, int], ...] = ()
    """Of a sharded axis: the columns of every rank, half open."""

    def place(self, size: int) -> tuple[int, int]:
        """Columns `[start, end)` of a vocabulary of `size` that are here."""
        return 0, size

    def like(self, size: int) -> VocabAxis:
        """The axis of another vocabulary, split over the same ranks."""
        return self

    def width(self, values: Tensor) -> int:
        """Number of columns over all shards."""
        return int(values.shape[-1])

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return logits.logsumexp(-1)

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(-1)

    def pick(self, values: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """values[rows, ids] `[n]`; rows ascend without repeats, so as many rows as there are means all of them."""
        if rows.numel() == values.shape[0]:
            return values.gather(1, ids[:, None]).squeeze(1)
        return values[rows, ids]

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """values at each row's own ids `[n, k]`."""
        return values.gather(1, ids)

    def argmax(self, values: Tensor) -> Tensor:
        return values.argmax(-1)

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest values of each row (all, where there are fewer), falling, and their ids."""
        top = values.topk(min(k, values.shape[-1]), dim=-1)
        return top.values, top.indices

    def columns(self, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        """Local places of columns, and which of them are here (None: all)."""
        return chosen, None

    def total(self, part: Tensor) -> Tensor:
        """Sum over shards of what each has a part of; without gradient."""
        return part

    def split(self, vocab: Any, teacher: VocabAxis, common: Any = None) -> Any:
        """A vocabulary map between columns as they lie on the shards."""
        return vocab


WHOLE = VocabAxis()
