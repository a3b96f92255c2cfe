"""The order in which ranks read a data set: shuffled by seed and epoch, dealt out evenly, resumable at any record."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.data.sources import PAD_INDEX, RecordDataset
from limbeck.distributed.mesh import ParallelConfig, data_rank_and_world
from limbeck.errors import ConfigError, DataError, LimbeckError, one_line


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
        self.epoch = self.start = 0
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
        # a resumed run sets the epoch that it stands in, and must keep its place there
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def position(self, consumed: int) -> dict[str, Any]:
        """A position: the epoch, and how many records of it all ranks together have used.

        It does not say how many ranks or loader processes there are, so both may change between runs.
        """
        names = ("epoch", "seed", "length", "fingerprint")
        return {"consumed": consumed, **{name: getattr(self, name) for name in names}}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Let iterations start at a position, until another epoch is set.

        Other data, another seed or a number of ranks that does not divide the position is a ``DataError``.
        """
        for name in ("length", "fingerprint", "seed"):
            mine = getattr(self, name)
            if state[name] != mine:
                raise DataError(
                    f"The saved position belongs to other data: its {name} is {state[name]!r}, here it is {mine!r}; "
                    "resume with the same data, or start a new run folder."
                )
        if state["consumed"] % self.world:
            raise DataError(
                f"{state['consumed']} records were read, which {self.world} ranks cannot share evenly; "
                "resume with a number of ranks that divides it."
            )
        self.epoch, self.start = int(state["epoch"]), int(state["consumed"]) // self.world

    def __len__(self) -> int:
        return self._per_rank

    def __iter__(self) -> ShardIterator:
        return ShardIterator(self)

    def order(self, epoch: int) -> np.ndarray:
        """int64 indices of this rank in ``epoch``."""
        # a pair, not a sum: epoch 1 of seed 0 must not be epoch 0 of seed 1
        shuffled = np.random.default_rng([self.seed, epoch])
        whole = shuffled.permutation(self.length) if self.shuffle else np.arange(self.length)
        total = self._per_rank * self.world
        if total > self.length:
            whole = np.concatenate([whole, np.full(total - self.length, PAD_INDEX)])
        return whole[self.rank : total : self.world]


class PartSampler(ShardSampler):
    """A validation set in order, whose batches of ``rows`` records hold records of one part alone.

    Args:
        parts: records of each part, by name, in the order of the data set.

    Attributes:
        names: the part of each batch; the same on all ranks.
    """

    def __init__(
        self, parts: Mapping[str, int], *, rows: int, rank: int, world: int, seed: int, fingerprint: str
    ) -> None:
        length = sum(parts.values())
        super().__init__(length, rank=rank, world=world, seed=seed, shuffle=False, even="pad", fingerprint=fingerprint)
        pieces, self.names, start, unit = [], list[str](), 0, rows * world
        for name, size in parts.items():
            batches = -(-size // unit)
            pieces.append(np.full(batches * unit, PAD_INDEX, dtype=np.int64))
            pieces[-1][:size] = np.arange(start, start + size)
            self.names += [name] * batches
            start += size
        self._whole = np.concatenate(pieces)
        self._per_rank = len(self._whole) // world

    def order(self, epoch: int) -> np.ndarray:
        return self._whole[self.rank :: self.world]


class ShardIterator(Iterator[int]):
    """One epoch's iteration; a stateful data loader saves and restores it."""

    def __init__(self, sampler: ShardSampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        sampler = self._sampler
        self._epoch, self._yielded = sampler.epoch, sampler.start
        self._order = sampler.order(self._epoch)

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> int:
        if self._yielded >= len(self._order):
            raise StopIteration
        self._yielded += 1
        return int(self._order[self._yielded - 1])

    def state_dict(self) -> dict[str, Any]:
        return {**self._sampler.position(self._yielded * self._sampler.world), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.go_to(state)
        self._begin()


class Loader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A stateful data loader whose processes fail in one sentence: torch hands on their tracebacks as text."""

    def check_worker_number_rationality(self) -> None:
        """torch's advice where there are more processes than cores; ``data.num_workers`` stands."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        except LimbeckError as error:
            message = _LAST_OF_TRACEBACK.search(str(error))
            if message is None:
                raise
            raise type(error)(message[1].strip()) from error
        except RuntimeError as error:
            # torch has no class of its own for a worker that was killed
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a process that reads data was ended from outside ({one_line(error, 120)}), most often because memory "
                "ran out; lower data.num_workers, or free some memory, and start the same run again"
            ) from error


_LAST_OF_TRACEBACK = re.compile(r"\ACaught .*\nlimbeck\.errors\.\w+: (.*)\Z", re.DOTALL)


def rank_batches(items: Sequence[int], *, rank: int, world: int, rows: int) -> Iterator[Sequence[int]]:
    """This rank's share of ``items``, ``rows`` at a time; as many batches for every rank, the last may be empty."""
    mine = items[rank::world]
    for start in range(0, -(-len(items) // world), rows):
        yield mine[start : start + rows]


def make_loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    *,
    records: int,
    layout: ParallelConfig,
    seed: int,
    shuffle: bool,
    num_workers: int | None = None,
) -> StatefulDataLoader:
    """Batches of this rank's share of a training set, ``records`` per step over all ranks; can be resumed.

    Processes that split one model's layers or sequences (``layout``) read the same records. ``num_workers``: loader
    processes; None: 2 where there is an accelerator, which must not wait for text, and none elsewhere.
    """
    rank, world = data_rank_and_world(layout)
    if records % world:
        raise ConfigError(
            f"distillation.num_prompts_per_step is {records}, which {world} processes cannot share evenly; make it a "
            f"multiple of {world}"
        )
    batch = records // world
    sampler = ShardSampler(
        len(dataset),
        rank=rank,
        world=world,
        seed=seed,
        shuffle=shuffle,
        multiple=batch,
        fingerprint=_fingerprint(dataset),
    )
    return _loader(dataset, collate, sampler, batch, seed, num_workers)


def make_validation_loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    *,
    rows: int,
    layout: ParallelConfig,
    seed: int,
    num_workers: int | None = None,
) -> StatefulDataLoader:
    """The same for a validation set: in order, ``rows`` records of each rank at a time, none left out.

    Batches of a set of several files hold records of one file each; see ``batch_parts``.
    """
    rank, world = data_rank_and_world(layout)
    parts = dataset.parts() if isinstance(dataset, RecordDataset) else {}
    fingerprint = _fingerprint(dataset)
    sampler: ShardSampler
    if len(parts) > 1:
        sampler = PartSampler(parts, rows=rows, rank=rank, world=world, seed=seed, fingerprint=fingerprint)
    else:
        sampler = ShardSampler(
            len(dataset), rank=rank, world=world, seed=seed, shuffle=False, even="pad", fingerprint=fingerprint
        )
    return _loader(dataset, collate, sampler, rows, seed, num_workers)


def batch_parts(loader: StatefulDataLoader) -> list[str]:
    """The file that each batch of a validation loader is from; empty where all are from one, or nobody knows."""
    return loader.sampler.names if isinstance(loader.sampler, PartSampler) else []


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that can tell whether its records are the same as before; a user's need not."""

    @property
    def fingerprint(self) -> str:
        """Another string for other records, or another order of them."""
        ...


def _fingerprint(dataset: Any) -> str:
    return dataset.fingerprint if isinstance(dataset, Fingerprinted) else ""


def _loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    sampler: ShardSampler,
    batch: int,
    seed: int,
    num_workers: int | None,
) -> StatefulDataLoader:
    workers = 2 * torch.cuda.is_available() if num_workers is None else num_workers
    with warnings.catch_warnings():
        # the loader marks its use in a way that torch has deprecated; nothing that a user could act on
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return Loader(
            dataset,
            batch_size=batch,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=collate,
            # A new iterator draws a seed; from the global generator that would shift a resumed run's numbers.
            generator=torch.Generator().manual_seed(seed),
        )
