"""A batch: a dict of tensors and lists that share their first dimension, one row per sample.

The names are those of the published class, so that code written for it reads the same here. Every operation checks that
all entries have the same number of rows and says which one has not.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, Generic, Protocol, TypedDict, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import Self, TypeVar

from limbeck.data.packing import ALGORITHM, Bins, batch_by_tokens, check_algorithm, pack
from limbeck.errors import ConfigError, DataError

DictT = TypeVar("DictT", bound=Mapping[str, Any], default=Any)


class _DynamicBatchingRequired(TypedDict):
    max_tokens_per_microbatch: int | Sequence[int]


class DynamicBatchingArgs(_DynamicBatchingRequired, total=False):
    """Token-budget batching; several budgets go with several ``input_lengths_key`` (student, teachers)."""

    sequence_length_round: int
    input_key: str
    input_lengths_key: str | Sequence[str]


class SequencePackingArgs(_DynamicBatchingRequired, total=False):
    """Sequence packing; ``sequence_length_pad_multiple`` rounds every sequence's length up before it is packed."""

    algorithm: str
    input_key: str
    input_lengths_key: str | Sequence[str]
    sequence_length_pad_multiple: int


@runtime_checkable
class RowEntry(Sized, Protocol):
    """An entry of a batch that is neither tensor nor list and cuts its rows itself: a `ChunkLayout`, media."""

    def slice(self, indices: list[int], /) -> Any:
        """The rows with these numbers, in that order."""
        ...


@runtime_checkable
class JoinableEntry(RowEntry, Protocol):
    """Rows that can be joined with those of other batches."""

    @classmethod
    def concat(cls, parts: list[Any], /) -> Any:
        """The rows of several entries, one after the other."""
        ...


@runtime_checkable
class MediaEntry(RowEntry, Protocol):
    """Rows of images or sounds, an input of multimodal models."""

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor:
        """All rows as the model reads them."""
        ...


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Dict of tensors (dim 0 = samples) and lists (one entry per sample).

    A value may also be a `RowEntry`; where batches are joined a `JoinableEntry`. A `MediaEntry` counts as a multimodal
    input.

    Example:
        >>> batch = BatchedDataDict(input_ids=torch.zeros(4, 8, dtype=torch.long), idx=[0, 1, 2, 3])
        >>> batch.size, batch.slice(1, 3)["idx"]
        (4, [1, 2])
    """

    ADDITIONAL_OPTIONAL_KEY_TENSORS: ClassVar[list[str]] = ["token_type_ids"]
    sequence_length_round: int = 1

    @property
    def size(self) -> int:
        """Number of samples; raises where two entries disagree."""
        return self.check()

    def check(self) -> int:
        """Verify that every entry has the same number of rows and return it."""
        first: tuple[str, int] | None = None
        for key, value in self.data.items():
            rows = _rows(key, value)
            if first is None:
                first = (key, rows)
            elif rows != first[1]:
                raise DataError(
                    f"The batch entries {first[0]!r} and {key!r} have {first[1]} and {rows} rows; "
                    "every entry needs one row per sample."
                )
        return 0 if first is None else first[1]

    def get_dict(self) -> dict[str, Any]:
        """The entries as a plain dict."""
        return dict(self.data)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Join batches along dim 0; tensors are right-padded to the widest with ``pad_value_dict[key]`` (default 0)."""
        if not batches:
            return cls()
        keys = list(batches[0])
        for number, batch in enumerate(batches):
            if set(batch) != set(keys):
                odd = sorted(set(batch).symmetric_difference(keys))
                raise DataError(
                    f"Batch {number} and batch 0 do not have the same entries: {odd} is only in one of them."
                )
        pads = pad_value_dict or {}
        return cls({key: _join(key, [batch[key] for batch in batches], pads.get(key, 0)) for key in keys})

    def select_indices(self, indices: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """The rows at ``indices`` (tensors are copied), in that order; repeats are allowed."""
        order = [int(i) for i in indices]
        size = self.size
        if order and not (-size <= min(order) and max(order) < size):
            raise DataError(f"Row {min(order)} or {max(order)} is outside the batch of {size} rows.")
        return self._like({key: _take(value, order) for key, value in self.data.items()})

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Rows ``start`` to ``end`` (half open, cut at the batch's end); tensors are views."""
        size = self.size
        if not 0 <= start <= end:
            raise DataError(f"The slice {start}:{end} of a batch of {size} rows is not usable; give 0 <= start <= end.")
        end = min(end, size)
        start = min(start, end)
        rows = list(range(start, end))
        return SlicedDataDict(
            {k: v.slice(rows) if isinstance(v, RowEntry) else v[start:end] for k, v in self.data.items()}
        )

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """Global batch number ``batch_idx``; the last one may be shorter."""
        size = self.size
        if batch_size is None:
            batch_size = size
        start = batch_size * batch_idx
        if batch_size < 1 or not 0 <= start < max(size, 1):
            raise DataError(f"Batch {batch_idx} of {batch_size} rows is outside the data, which has {size} rows.")
        return self.slice(start, start + batch_size)

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Contiguous part ``rank`` of ``chunks``; the first parts take one row more where it does not come out even."""
        if chunks < 1 or not 0 <= rank < chunks:
            raise DataError(f"Part {rank} of {chunks} does not exist; give 0 <= rank < chunks.")
        base, extra = divmod(self.size, chunks)
        start = rank * base + min(rank, extra)
        return self.slice(start, start + base + (rank < extra))

    def reorder_data(self, reordered_indices: Sequence[int]) -> None:
        """Undo a reordering in place: row i goes back to row ``reordered_indices[i]``."""
        size = self.size
        if sorted(int(i) for i in reordered_indices) != list(range(size)):
            raise DataError(
                f"reorder_data needs a permutation of the {size} rows, got {list(reordered_indices)[:8]}..."
            )
        inverse = np.argsort(np.asarray([int(i) for i in reordered_indices]), kind="stable")
        self.data = {key: _take(value, inverse.tolist()) for key, value in self.data.items()}

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Every row ``num_repeats`` times in a row."""
        return self.select_indices([row for row in range(self.size) for _ in range(num_repeats)])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Move the tensors (in place, as the published class does) and return self."""
        self._map(lambda value: value.to(device, non_blocking=non_blocking))
        return self

    def pin_memory(self) -> Self:
        """Pin the tensors' memory (in place) and return self; data loaders call it."""
        self._map(lambda value: value.pin_memory())
        return self

    def get_multimodal_keys(self) -> list[str]:
        """Keys of media entries and of the optional tensors that only multimodal models read."""
        optional = self.ADDITIONAL_OPTIONAL_KEY_TENSORS
        return [key for key, value in self.data.items() if isinstance(value, MediaEntry) or key in optional]

    def get_multimodal_dict(self, as_tensors: bool = False, device: torch.device | str | None = None) -> dict[str, Any]:
        """Multimodal model arguments by name; empty for text."""
        media: dict[str, Any] = {}
        for key in self.get_multimodal_keys():
            value = self.data[key]
            if isinstance(value, torch.Tensor):
                media[key] = value if device is None else value.to(device)
            else:
                media[key] = value.as_tensor(device=device) if as_tensors else value
        return media

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Fixed micro-batches in order; the last one may be smaller."""
        if microbatch_size < 1:
            raise ConfigError(f"A micro-batch size of {microbatch_size} is not usable; give a positive number.")
        size = self.size
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(
        self, args: DynamicBatchingArgs | None = None
    ) -> Iterator[BatchedDataDict]:
        """Micro-batches by token budget, as wide as their longest row; without ``args`` those planned by
        :meth:`shard_by_batch_size`."""
        bins = self._planned() if args is None else self.plan_dynamic_batches(args)
        round_to = self.sequence_length_round if args is None else args.get("sequence_length_round", 1)
        return (self.select_indices(items)._narrowed(round_to) for items in bins)

    def make_microbatch_iterator_for_packable_sequences(
        self, args: SequencePackingArgs | None = None
    ) -> Iterator[BatchedDataDict]:
        """Micro-batches whose rows fit one packed sequence; without ``args`` those planned by sharding."""
        bins = self._planned() if args is None else self.plan_packed_batches(args)
        return (self.select_indices(items) for items in bins)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Number of planned micro-batches."""
        return len(self._planned())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Number of planned micro-batches and the longest row in tokens."""
        longest = int(self.data["input_lengths"].max()) if self.size and "input_lengths" in self.data else 0
        return len(self._planned()), longest

    def plan_dynamic_batches(self, args: DynamicBatchingArgs, bin_count_multiple: int | None = None) -> Bins:
        """Row indices of each token-budget micro-batch."""
        lengths, budgets = self._lengths(args.get("input_lengths_key"), args["max_tokens_per_microbatch"])
        return batch_by_tokens(
            lengths, budgets, round_to=args.get("sequence_length_round", 1), bin_count_multiple=bin_count_multiple
        )

    def plan_packed_batches(self, args: SequencePackingArgs, bin_count_multiple: int | None = None) -> Bins:
        """Row indices of each packed micro-batch."""
        lengths, budgets = self._lengths(args.get("input_lengths_key"), args["max_tokens_per_microbatch"])
        multiple = args.get("sequence_length_pad_multiple", 1)
        check_algorithm(args.get("algorithm", ALGORITHM))
        return pack(-(-lengths // multiple) * multiple, budgets, bin_count_multiple=bin_count_multiple)

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Split every global batch of ``batch_size`` rows over ``shards`` data-parallel ranks.

        Shard i holds its part of every global batch, one after the other. With batching or packing arguments each
        global batch is planned into micro-batches first (equally many per shard) and dealt out by load; then the result
        is ``(shards, order)``, where ``order`` restores the rows: ``from_batches(shards).reorder_data(order)``.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ConfigError("Dynamic batching and sequence packing exclude each other; give arguments for one only.")
        size = self.size
        if allow_uneven_shards and batch_size is not None:
            raise ConfigError(f"allow_uneven_shards splits the whole batch once; leave batch_size ({batch_size}) out.")
        batch_size = size if batch_size is None else batch_size
        if shards < 1 or batch_size < 1 or size % batch_size:
            raise DataError(
                f"{size} rows cannot be cut into global batches of {batch_size} for {shards} shards; "
                "the number of rows must be a multiple of the batch size."
            )
        planned = dynamic_batching_args is not None or sequence_packing_args is not None
        if batch_size % shards and not planned and not allow_uneven_shards:
            raise DataError(
                f"A batch of {batch_size} rows does not split evenly over {shards} shards; "
                "change the batch size or pass allow_uneven_shards=True."
            )
        if not planned:
            rows: list[list[int]] = [[] for _ in range(shards)]
            for start in range(0, size, batch_size):
                for shard, part in enumerate(np.array_split(np.arange(start, start + batch_size), shards)):
                    rows[shard].extend(part.tolist())
            return [SlicedDataDict(self.select_indices(part).data) for part in rows]
        return self._shard_planned(shards, batch_size, dynamic_batching_args, sequence_packing_args)

    def _shard_planned(
        self,
        shards: int,
        batch_size: int,
        dynamic: DynamicBatchingArgs | None,
        packing: SequencePackingArgs | None,
    ) -> tuple[list[SlicedDataDict], list[int]]:
        rows: list[list[int]] = [[] for _ in range(shards)]
        plans: list[list[Bins]] = [[] for _ in range(shards)]
        for start in range(0, self.size, batch_size):
            batch = self.slice(start, start + batch_size)
            if dynamic is not None:
                bins = batch.plan_dynamic_batches(dynamic, shards)
                load_key = dynamic.get("input_lengths_key")
            else:
                assert packing is not None
                bins = batch.plan_packed_batches(packing, shards)
                load_key = packing.get("input_lengths_key")
            loads = batch._lengths(load_key, None)[0].sum(axis=1)
            for shard, mine in enumerate(_deal(bins, loads, shards)):
                local: Bins = []
                begin = 0
                for items in mine:
                    local.append(list(range(begin, begin + len(items))))
                    rows[shard].extend(start + item for item in items)
                    begin += len(items)
                plans[shard].append(local)
        shard_batches = []
        for part, plan in zip(rows, plans, strict=True):
            shard_data = SlicedDataDict(self.select_indices(part).data)
            shard_data.microbatch_bins = plan
            if dynamic is not None:
                shard_data.sequence_length_round = dynamic.get("sequence_length_round", 1)
            shard_batches.append(shard_data)
        return shard_batches, [row for part in rows for row in part]

    def _lengths(
        self, key: str | Sequence[str] | None, budgets: int | Sequence[int] | None
    ) -> tuple[np.ndarray, list[int]]:
        keys = ["input_lengths"] if key is None else [key] if isinstance(key, str) else list(key)
        missing = [name for name in keys if name not in self.data]
        if missing:
            raise DataError(
                f"The batch has no entry {missing[0]!r} to plan micro-batches with; it has {sorted(self.data)}."
            )
        columns = [torch.as_tensor(self.data[name]).cpu().numpy().astype(np.int64) for name in keys]
        rooms = [0] * len(keys) if budgets is None else [budgets] if isinstance(budgets, int) else list(budgets)
        if len(rooms) == 1:
            rooms = rooms * len(keys)
        return np.stack(columns, axis=1), rooms

    def _narrowed(self, round_to: int) -> Self:
        """Without the columns behind the longest row; tensors along a teacher's sequence or along chunks stay."""
        if "input_ids" not in self.data or "input_lengths" not in self.data or not self.size:
            return self
        full, longest = self.data["input_ids"].shape[1], int(self.data["input_lengths"].max())
        width = min(-(-max(longest, 1) // round_to) * round_to, full)
        for key, value in self.data.items():
            # the width alone does not tell: a teacher's sequence or the chunks may happen to be as wide
            along = not (key.startswith("teacher_") or "_teacher_" in key or "pair_" in key)
            if along and isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == full:
                self.data[key] = value[:, :width]
        return self

    def _planned(self) -> Bins:
        raise DataError(
            "No micro-batches were planned for this batch; pass the batching arguments, "
            "or make the batch with shard_by_batch_size."
        )

    def _like(self, data: dict[str, Any]) -> Self:
        return type(self)(data)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = change(value)


class SlicedDataDict(BatchedDataDict):
    """A part of a larger batch; it may carry the micro-batches that were planned for it.

    ``microbatch_bins[g]`` lists the micro-batches of global batch g as row indices relative to that batch's first row.
    """

    microbatch_bins: list[Bins] | None = None

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """Global batch ``batch_idx``: by its planned rows where there is a plan, else by ``batch_size``."""
        if self.microbatch_bins is None:
            return super().get_batch(batch_idx, batch_size)
        if not 0 <= batch_idx < len(self.microbatch_bins):
            raise DataError(f"Batch {batch_idx} is outside the {len(self.microbatch_bins)} planned global batches.")
        counts = [sum(len(items) for items in bins) for bins in self.microbatch_bins]
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        batch.microbatch_bins = [self.microbatch_bins[batch_idx]]
        batch.sequence_length_round = self.sequence_length_round
        return batch

    def _planned(self) -> Bins:
        if self.microbatch_bins is None:
            return super()._planned()
        if len(self.microbatch_bins) != 1:
            raise DataError(
                f"The data holds {len(self.microbatch_bins)} global batches; take one with get_batch before iterating."
            )
        return self.microbatch_bins[0]


def _rows(key: str, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise DataError(f"The batch entry {key!r} is a scalar tensor; dim 0 must be the samples.")
        return value.shape[0]
    # texts and mappings have a length, too, but not of rows
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sized):
        raise DataError(
            f"The batch entry {key!r} is a {type(value).__name__}; give a tensor or a list of one per sample."
        )
    return len(value)


def _take(value: Any, indices: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[torch.as_tensor(indices, dtype=torch.long, device=value.device)]
    if isinstance(value, np.ndarray):
        return value[np.asarray(indices, dtype=np.int64)]
    if isinstance(value, RowEntry):
        return value.slice(indices)
    return [value[i] for i in indices]


def _join(key: str, values: list[Any], pad: float) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if len({value.ndim for value in values}) > 1:
            raise DataError(f"The entry {key!r} has tensors of different rank: {[tuple(v.shape) for v in values]}.")
        widest = [max(value.shape[dim] for value in values) for dim in range(1, first.ndim)]
        return torch.cat([_pad_right(value, widest, pad) for value in values])
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, JoinableEntry):
        return type(first).concat(values)
    return [item for value in values for item in value]


def _pad_right(value: torch.Tensor, shape: list[int], pad: float) -> torch.Tensor:
    missing = [want - have for want, have in zip(shape, value.shape[1:], strict=True)]
    if not any(missing):
        return value
    # F.pad counts from the last dimension backwards.
    return F.pad(value, [side for extra in reversed(missing) for side in (0, extra)], value=pad)


def _deal(bins: Bins, loads: np.ndarray, shards: int) -> list[Bins]:
    """Equally many bins per shard, heaviest first to the shard with the least load so far."""
    each = math.ceil(len(bins) / shards)
    hands: list[Bins] = [[] for _ in range(shards)]
    totals = [0] * shards
    for items in sorted(bins, key=lambda items: (-int(loads[items].sum()), items)):
        shard = min((s for s in range(shards) if len(hands[s]) < each), key=lambda s: (totals[s], s))
        hands[shard].append(items)
        totals[shard] += int(loads[items].sum())
    return hands
