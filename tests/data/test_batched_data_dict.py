"""Slicing, joining and sharding keep rows together and lose none."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.batched_data_dict import BatchedDataDict, SlicedDataDict
from limbeck.errors import ConfigError, DataError


def make_batch(rows: int, width: int = 5, lengths: list[int] | None = None) -> BatchedDataDict:
    ids = torch.arange(rows * width).reshape(rows, width)
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.tensor(lengths or [width] * rows, dtype=torch.long),
        width=[width] * rows,
        idx=list(range(rows)),
        score=np.arange(rows),
    )


def rows_of(batch: BatchedDataDict) -> list[int]:
    """The rows by number; every entry must tell the same."""
    # a micro-batch is only as wide as its longest row
    first = [int(v) // width for v, width in zip(batch["input_ids"][:, 0], batch["width"], strict=True)]
    assert first == batch["idx"] == batch["score"].tolist()
    return first


def test_size_names_the_odd_entry() -> None:
    batch = make_batch(3)
    assert batch.size == 3
    assert BatchedDataDict().size == 0
    batch["labels"] = torch.zeros(2)
    with pytest.raises(DataError, match="'input_ids' and 'labels' have 3 and 2 rows"):
        _ = batch.size


@pytest.mark.parametrize("value", [torch.tensor(1), "text", {"a": 1}, 7])
def test_entries_without_rows_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match="'odd'"):
        _ = BatchedDataDict(odd=value).size


@given(rows=st.integers(0, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_slices_and_selections(rows: int, data: st.DataObject) -> None:
    batch = make_batch(rows)
    start = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(start, rows + 3))
    assert rows_of(batch.slice(start, end)) == list(range(rows))[start:end]
    if rows:
        chosen = data.draw(st.lists(st.integers(0, rows - 1), max_size=8))
        assert rows_of(batch.select_indices(chosen)) == chosen
    parts = data.draw(st.integers(1, 5))
    pieces = [batch.chunk(rank, parts) for rank in range(parts)]
    assert [row for piece in pieces for row in rows_of(piece)] == list(range(rows))
    assert max(p.size for p in pieces) - min(p.size for p in pieces) <= 1
    mbs = data.draw(st.integers(1, 5))
    micro = list(batch.make_microbatch_iterator(mbs))
    assert [row for piece in micro for row in rows_of(piece)] == list(range(rows))
    assert all(piece.size == mbs for piece in micro[:-1])


@given(data=st.data(), shards=st.integers(1, 4), per=st.integers(1, 3), batches=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_sharding_keeps_global_batches(data: st.DataObject, shards: int, per: int, batches: int) -> None:
    batch_size = shards * per
    batch = make_batch(batch_size * batches)
    parts = batch.shard_by_batch_size(shards, batch_size)
    assert isinstance(parts, list)
    for number in range(batches):
        found = [row for part in parts for row in rows_of(part.get_batch(number, per))]
        assert found == list(range(number * batch_size, (number + 1) * batch_size))


@given(data=st.data(), shards=st.integers(1, 3), packed=st.booleans())
@settings(max_examples=40, deadline=None)
def test_planned_sharding_restores_and_balances(data: st.DataObject, shards: int, packed: bool) -> None:
    batch_size = 3 * shards
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2 * batch_size, max_size=2 * batch_size))
    batch = make_batch(2 * batch_size, lengths=lengths)
    if packed:
        result = batch.shard_by_batch_size(shards, batch_size, sequence_packing_args={"max_tokens_per_microbatch": 8})
    else:
        result = batch.shard_by_batch_size(shards, batch_size, dynamic_batching_args={"max_tokens_per_microbatch": 8})
    assert isinstance(result, tuple)
    parts, order = result
    for number in range(2):
        counts, seen = set(), []
        for part in parts:
            mine = part.get_batch(number)
            assert rows_of(mine) == mine["idx"]
            micro = list(
                mine.make_microbatch_iterator_for_packable_sequences()
                if packed
                else mine.make_microbatch_iterator_with_dynamic_shapes()
            )
            counts.add(len(micro))
            seen += [row for piece in micro for row in rows_of(piece)]
            for piece in micro:
                lens = piece["input_lengths"]
                assert int(lens.sum() if packed else lens.max() * len(lens)) <= 8
        assert len(counts) == 1
        assert sorted(seen) == list(range(number * batch_size, (number + 1) * batch_size))
    joined = BatchedDataDict.from_batches(parts)
    joined.reorder_data(order)
    assert rows_of(joined) == list(range(batch.size))


def test_lockstep_planning_uses_every_length() -> None:
    batch = make_batch(4, lengths=[1, 1, 1, 1])
    batch["teacher_input_lengths"] = torch.tensor([5, 5, 5, 1])
    keys = ["input_lengths", "teacher_input_lengths"]
    bins = batch.plan_packed_batches({"max_tokens_per_microbatch": [100, 6], "input_lengths_key": keys})
    assert sorted(map(tuple, bins)) == [(0, 3), (1,), (2,)]


def test_uneven_shards_only_when_asked() -> None:
    batch = make_batch(5)
    with pytest.raises(DataError, match=r"5 rows .* over 2 shards"):
        batch.shard_by_batch_size(2)
    parts = batch.shard_by_batch_size(2, allow_uneven_shards=True)
    assert isinstance(parts, list)
    assert [rows_of(part) for part in parts] == [[0, 1, 2], [3, 4]]
    with pytest.raises(DataError, match=r"5 rows .* of 4 for 2 shards"):
        batch.shard_by_batch_size(2, 4)
    with pytest.raises(ConfigError, match="packing"):
        batch.shard_by_batch_size(
            1,
            dynamic_batching_args={"max_tokens_per_microbatch": 8},
            sequence_packing_args={"max_tokens_per_microbatch": 8},
        )


def test_joining_pads_to_the_widest() -> None:
    wide, narrow = make_batch(2, width=4), make_batch(1, width=2)
    joined = BatchedDataDict.from_batches([wide, narrow], pad_value_dict={"input_ids": -7})
    assert joined["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, -7, -7]]
    assert joined["idx"] == [0, 1, 0]
    assert BatchedDataDict.from_batches([]).size == 0
    with pytest.raises(DataError, match=r"Batch 1 .*\['score'\]"):
        BatchedDataDict.from_batches([wide, {k: v for k, v in narrow.items() if k != "score"}])


def test_joining_pads_every_trailing_dimension() -> None:
    joined = BatchedDataDict.from_batches([{"x": torch.ones(1, 2, 1)}, {"x": torch.ones(1, 1, 3)}])
    assert joined["x"].shape == (2, 2, 3)
    assert joined["x"].sum() == 5


def test_repeat_reorder_dict_and_pickle() -> None:
    batch = make_batch(3)
    assert rows_of(batch.repeat_interleave(2)) == [0, 0, 1, 1, 2, 2]
    shuffled = batch.select_indices([2, 0, 1])
    shuffled.reorder_data([2, 0, 1])
    assert rows_of(shuffled) == [0, 1, 2]
    with pytest.raises(DataError, match="permutation"):
        shuffled.reorder_data([0, 0, 1])
    assert type(batch.get_dict()) is dict
    copy = pickle.loads(pickle.dumps(batch.slice(0, 2)))
    assert isinstance(copy, SlicedDataDict)
    assert rows_of(copy) == [0, 1]


def test_batches_beyond_the_end() -> None:
    batch = make_batch(5)
    assert rows_of(batch.get_batch(1, 3)) == [3, 4]
    with pytest.raises(DataError, match=r"Batch 2 of 3 rows .* 5 rows"):
        batch.get_batch(2, 3)
    with pytest.raises(DataError, match=r"Row 5 .* of 5 rows"):
        batch.select_indices([5])
    with pytest.raises(DataError, match="slice 3:1"):
        batch.slice(3, 1)
    with pytest.raises(DataError, match="shard_by_batch_size"):
        batch.make_microbatch_iterator_with_dynamic_shapes()


class Media:
    """Stand-in for a batch of images: a list of tensors that are stacked for the model."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def slice(self, indices: list[int]) -> Media:
        return Media([self.tensors[i] for i in indices])

    @classmethod
    def concat(cls, parts: list[Media]) -> Media:
        return cls([tensor for part in parts for tensor in part.tensors])

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor:
        return torch.stack(self.tensors).to(device)


def test_media_travel_with_their_rows() -> None:
    batch = make_batch(3)
    batch["pixel_values"] = Media([torch.full((2,), float(i)) for i in range(3)])
    batch["token_type_ids"] = torch.zeros(3, 5, dtype=torch.long)
    part = BatchedDataDict.from_batches([batch.select_indices([2]), batch.slice(0, 1)])
    found = part.get_multimodal_dict(as_tensors=True)
    assert found["pixel_values"].tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert found["token_type_ids"].shape == (2, 5)
    assert isinstance(part.get_multimodal_dict()["pixel_values"], Media)
