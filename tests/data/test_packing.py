"""Bins hold every sequence once, within every capacity, in few bins, always the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.packing import batch_by_tokens, check_algorithm, pack
from limbeck.errors import ConfigError, DataError


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    models = draw(st.integers(1, 3))
    rooms = draw(st.lists(st.integers(1, 64), min_size=models, max_size=models))
    sizes = draw(st.lists(st.tuples(*(st.integers(0, room) for room in rooms)), max_size=40))
    return [list(size) for size in sizes], rooms


def check_partition(bins: list[list[int]], count: int) -> None:
    assert sorted(item for items in bins for item in items) == list(range(count))
    assert all(bins)
    assert all(items == sorted(items) for items in bins)


def fewest_bins(sizes: list[int], room: int) -> int:
    """Exact optimum by branch and bound: each item into every distinct open bin or a new one."""
    sizes = sorted((size for size in sizes if size), reverse=True)
    best = len(sizes)

    def place(item: int, free: tuple[int, ...]) -> None:
        nonlocal best
        if len(free) >= best:
            return
        if item == len(sizes):
            best = len(free)
            return
        for number in {space: place_no for place_no, space in enumerate(free) if space >= sizes[item]}.values():
            place(item + 1, tuple(s - sizes[item] if n == number else s for n, s in enumerate(free)))
        place(item + 1, (*free, room - sizes[item]))

    place(0, ())
    return best


@given(problem=problems(), multiple=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_each_sequence_once_and_no_capacity_exceeded(problem: tuple[list[list[int]], list[int]], multiple: int) -> None:
    sizes, rooms = problem
    if 0 < len(sizes) < multiple:
        multiple = 1
    lengths = np.array(sizes, dtype=np.int64).reshape(len(sizes), len(rooms))
    bins = pack(lengths, rooms)
    check_partition(bins, len(sizes))
    assert all((lengths[items].sum(axis=0) <= rooms).all() for items in bins)
    assert bins == pack(lengths, rooms)
    needed = -(-lengths.sum(axis=0) // np.array(rooms))
    assert len(bins) >= needed.max(initial=0)
    if len(sizes) >= multiple * math.ceil(len(bins) / multiple):
        rounded = pack(lengths, rooms, bin_count_multiple=multiple)
        check_partition(rounded, len(sizes))
        assert len(rounded) % multiple == 0
        assert len(rounded) == multiple * math.ceil(len(bins) / multiple)
        assert all((lengths[items].sum(axis=0) <= rooms).all() for items in rounded)


@given(room=st.integers(6, 40), data=st.data())
@settings(max_examples=150, deadline=None)
def test_packing_stays_within_its_bound_of_the_optimum(room: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, room), min_size=1, max_size=9))
    optimum = fewest_bins(sizes, room)
    assert len(pack(sizes, room)) <= 11 / 9 * optimum + 6 / 9


def test_real_length_mix_packs_tightly() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.zipf(1.3, 2000) * 16, 4096)
    bins = pack(lengths, 8192)
    assert len(bins) <= math.ceil(lengths.sum() / 8192) + 1


def test_lockstep_a_long_teacher_closes_the_bin() -> None:
    assert pack([[1, 9], [1, 2], [1, 8]], [10, 10]) == [[0], [1, 2]]


def test_too_few_sequences_for_the_bins() -> None:
    with pytest.raises(DataError, match="3 sequences cannot fill 4 micro-batches"):
        pack([1, 1, 1], 100, bin_count_multiple=4)


def test_a_sequence_over_the_capacity_is_named() -> None:
    with pytest.raises(DataError, match=r"sequence 1 has \[5, 11\] tokens for capacities \[10, 10\]"):
        pack([[1, 1], [5, 11]], [10, 10])


@pytest.mark.parametrize("lengths", [[[1, 2]], [[-1]]])
def test_bad_lengths(lengths: list[list[int]]) -> None:
    with pytest.raises(DataError):
        pack(lengths, 10)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="'best_fit' is not known; leave it out"):
        check_algorithm("best_fit")
    with pytest.raises(ConfigError, match="capacity"):
        pack([1], 0)
    with pytest.raises(ConfigError, match="bin_count_multiple is 0"):
        pack([1], 10, bin_count_multiple=0)


def test_algorithms_of_earlier_versions_are_this_one_and_said_to_be_gone_once(caplog: pytest.LogCaptureFixture) -> None:
    check_algorithm.cache_clear()
    batch: BatchedDataDict = BatchedDataDict(input_lengths=torch.tensor([4, 6, 1, 9, 10]))
    want = batch.plan_packed_batches({"max_tokens_per_microbatch": 10})
    for name in ("first_fit_decreasing", "modified_first_fit_decreasing", "Concatenative", "Concatenative"):
        assert batch.plan_packed_batches({"max_tokens_per_microbatch": 10, "algorithm": name}) == want
    assert [record.args[1] for record in caplog.records] == ["modified_first_fit_decreasing", "concatenative"]


@given(problem=problems(), round_to=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_token_budget_holds_for_the_padded_rectangle(problem: tuple[list[list[int]], list[int]], round_to: int) -> None:
    sizes, rooms = problem
    lengths = np.array(sizes, dtype=np.int64).reshape(len(sizes), len(rooms))
    bins = batch_by_tokens(lengths, rooms, round_to=round_to)
    check_partition(bins, len(sizes))
    for items in bins:
        widest = -(-lengths[items].max(axis=0) // round_to) * round_to
        assert len(items) == 1 or (len(items) * widest <= rooms).all()


def test_token_budget_groups_similar_lengths() -> None:
    assert batch_by_tokens([8, 1, 8, 1, 1, 1], 16) == [[0, 2], [1, 3, 4, 5]]
    assert len(batch_by_tokens([1] * 8, 100, bin_count_multiple=4)) == 4
    with pytest.raises(ConfigError, match="sequence_length_round is 0"):
        batch_by_tokens([1], 4, round_to=0)
