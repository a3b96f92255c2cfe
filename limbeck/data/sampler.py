"""The order in which ranks read a data set: shuffled by seed and epoch, dealt out evenly, resumable at any record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from limbeck.data.sources import PAD_INDEX
from limbeck.utils.errors import ConfigError, DataError


class ShardSampler(Sampler[int]):
    """Indices of one data-parallel rank.

    Rank r takes every ``world``-th index of the epoch's order, starting at r. So the ranks' n-th batches together are
    the same records for every number of ranks that divides the global batch.

    Args:
        length: records in the data set.
        rank, world: this rank and the number of ranks.
        seed: with the epoch it determines the order.
        shuffle: False reads in order.
        even: the ranks must take equally many; ``drop`` leaves the last few records of the order out, ``pad`` fills up
            with records that count for nothing (for validation).
        multiple: the number of indices per rank is a multiple of this (the rank's batch size), in the same way.
        fingerprint: the data set's; a saved position of another data set is refused.
    """

    def __init__(
        self,
        length: int,
        *,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        even: Literal["drop", "pad"] = "drop",
        multiple: int = 1,
        fingerprint: str = "",
    ) -> None:
        if world < 1 or not 0 <= rank < world or multiple < 1:
            raise ConfigError(f"Rank {rank} of {world} with batches of {multiple} does not exist.")
        self.length, self.rank, self.world = length, rank, world
        self.seed, self.shuffle, self.even, self.multiple = seed, shuffle, even, multiple
        self.fingerprint = fingerprint
        self.epoch = 0
        unit = world * multiple
        rounds = length // unit if even == "drop" else -(-length // unit)
        self._per_rank = rounds * multiple
        if self._per_rank == 0:
            raise DataError(
                f"A data set of {length} records is smaller than one global batch of {unit}; "
                "use more data or a smaller batch."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._per_rank

    def __iter__(self) -> ShardIterator:
        return ShardIterator(self)

    def order(self, epoch: int) -> np.ndarray:
        """int64 indices of this rank in ``epoch``."""
        whole = np.arange(self.length)
        if self.shuffle:
            whole = np.random.default_rng([self.seed, epoch]).permutation(self.length)
        total = self._per_rank * self.world
        if total > self.length:
            whole = np.concatenate([whole, np.full(total - self.length, PAD_INDEX)])
        return whole[self.rank : total : self.world]


class ShardIterator(Iterator[int]):
    """One epoch's iteration; a stateful data loader saves and restores it."""

    def __init__(self, sampler: ShardSampler) -> None:
        self._sampler = sampler
        self._epoch = sampler.epoch
        self._order = sampler.order(self._epoch)
        self._yielded = 0

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> int:
        if self._yielded >= len(self._order):
            raise StopIteration
        self._yielded += 1
        return int(self._order[self._yielded - 1])

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, counted over all ranks so that their number may change between runs."""
        return {
            "epoch": self._epoch,
            "consumed": self._yielded * self._sampler.world,
            "seed": self._sampler.seed,
            "length": self._sampler.length,
            "fingerprint": self._sampler.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; another data set, seed or an odd number of ranks is an error."""
        for name in ("length", "fingerprint", "seed"):
            mine = getattr(self._sampler, name)
            if state[name] != mine:
                raise DataError(
                    f"The saved position belongs to other data: its {name} is {state[name]!r}, here it is {mine!r}; "
                    "resume with the same data, or start a new run folder."
                )
        if state["consumed"] % self._sampler.world:
            raise DataError(
                f"{state['consumed']} records were read, which {self._sampler.world} ranks cannot share evenly; "
                "resume with a number of ranks that divides it."
            )
        self._epoch = self._sampler.epoch = int(state["epoch"])
        self._order = self._sampler.order(self._epoch)
        self._yielded = int(state["consumed"]) // self._sampler.world
