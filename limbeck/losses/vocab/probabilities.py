"""Next-token probabilities of one side, read at pairs of a row and a token, however they are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from limbeck.losses.vocab.axis import WHOLE, VocabAxis


class Probabilities(ABC):
    """Probabilities of one side's tokens at some rows; ids are those of its whole vocabulary."""

    @abstractmethod
    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Probabilities of pairs in any order: `[n]`, the same on every shard."""

    @abstractmethod
    def totals(self) -> Tensor:
        """Sum of every row."""


@dataclass(frozen=True)
class Dense(Probabilities):
    """All of them: values `[n, V]`, with the columns that `axis` has here."""

    values: Tensor
    axis: VocabAxis = WHOLE

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        return _picked(self.axis, self.values, rows, ids)

    def totals(self) -> Tensor:
        return self.axis.sum(self.values)


@dataclass(frozen=True)
class FromLogs(Probabilities):
    """The same from log-probabilities `[n, V]`: only what is read is raised. rows: numbers of the rows among them,
    None: all in order."""

    log_values: Tensor
    axis: VocabAxis = WHOLE
    rows: Tensor | None = None

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        return _picked(self.axis, self.log_values, rows if self.rows is None else self.rows[rows], ids, logs=True)

    def totals(self) -> Tensor:
        chosen = self.log_values if self.rows is None else self.log_values.index_select(0, self.rows)
        return self.axis.sum(chosen.exp())


@dataclass(frozen=True)
class Listed(Probabilities):
    """A few tokens of every row; what is not listed is 0.

    keys: row x `size` + id of each entry, ascending without repeats; values: their probabilities; count: rows; size:
    of the vocabulary.
    """

    keys: Tensor
    values: Tensor
    count: int
    size: int

    @classmethod
    def of(cls, ids: Tensor, values: Tensor, size: int) -> Listed:
        """From lists `[n, k]`; an id that a row names twice has the sum."""
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        keys, inverse = (rows * size + ids).flatten().unique(return_inverse=True)
        return cls(keys, values.new_zeros(keys.shape).index_add(0, inverse, values.flatten()), ids.shape[0], size)

    @property
    def rows(self) -> Tensor:
        return self.keys // self.size

    @property
    def ids(self) -> Tensor:
        """Token of each entry."""
        return self.keys % self.size

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        if not self.keys.numel():
            return self.values.new_zeros(ids.shape)
        wanted = rows * self.size + ids
        key_index = torch.searchsorted(self.keys, wanted).clamp(max=self.keys.numel() - 1)
        return self.values[key_index] * (self.keys[key_index] == wanted)

    def totals(self) -> Tensor:
        return self.values.new_zeros(self.count).index_add(0, self.rows, self.values)

    def tail(self) -> Tensor:
        """Probability that every row leaves to tokens that are not listed."""
        # rounding may bring the sum above 1
        return (1 - self.totals()).clamp(min=0)

    def written_out(self) -> Tensor:
        """All of them, `[n, size]`."""
        out = self.values.new_zeros(self.count, self.size)
        return out.index_put((self.rows, self.ids), self.values)

    def select(self, rows: Tensor) -> Listed:
        """These rows, ascending without repeats, numbered anew."""
        number = torch.full((self.count,), -1, device=rows.device)
        number[rows] = torch.arange(rows.numel(), device=rows.device)
        number_at = number[self.rows]
        kept = (number_at >= 0).nonzero().squeeze(1)
        return Listed(number_at[kept] * self.size + self.ids[kept], self.values[kept], rows.numel(), self.size)


def _picked(axis: VocabAxis, values: Tensor, rows: Tensor, ids: Tensor, *, logs: bool = False) -> Tensor:
    column, inside = axis.columns(ids)
    if inside is None:
        picked = values[rows, column]
        return picked.exp() if logs else picked
    if not values.shape[1]:
        return axis.total(values.new_zeros(ids.shape))
    picked = values[rows, column]
    # raised before the product: -inf x 0 is NaN
    return axis.total((picked.exp() if logs else picked) * inside)
