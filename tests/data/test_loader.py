"""The reading order: dealt out evenly, the same for any number of workers, resumed to the record."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.data.loader import Loader, ShardSampler
from limbeck.data.sources import PAD_INDEX, ReadingConfig, RecordDataset
from limbeck.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "a.jsonl"
    rows = [json.dumps({"text": f"text {number} " * (number % 7 + 1)}) for number in range(23)]
    rows[5] = "{broken"
    file.write_text("\n".join(rows))
    return str(file)


def make_dataset(path: str) -> RecordDataset:
    return RecordDataset(path, ReadingConfig(on_bad_record="skip", check_records="on_read"))


def make_loader(data: RecordDataset, workers: int, epoch: int = 0, **kwargs: Any) -> StatefulDataLoader:
    sampler = ShardSampler(len(data), seed=3, fingerprint=data.fingerprint, **kwargs)
    sampler.set_epoch(epoch)
    return StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=workers, collate_fn=list)


@given(
    length=st.integers(1, 60),
    world=st.integers(1, 4),
    multiple=st.integers(1, 3),
    even=st.sampled_from(["drop", "pad"]),
    shuffle=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_ranks_share_the_data_evenly(length: int, world: int, multiple: int, even: Any, shuffle: bool) -> None:
    def sampler(rank: int) -> ShardSampler:
        return ShardSampler(length, rank=rank, world=world, even=even, multiple=multiple, shuffle=shuffle)

    if even == "drop" and length < world * multiple:
        with pytest.raises(DataError, match=rf"\b{length} .* {world * multiple};"):
            sampler(0)
        return
    parts = [list(sampler(rank)) for rank in range(world)]
    assert {len(part) for part in parts} == {len(sampler(0))}
    assert len(parts[0]) % multiple == 0
    seen = [index for part in parts for index in part if index != PAD_INDEX]
    assert len(set(seen)) == len(seen)
    assert len(seen) == (length if even == "pad" else length // (world * multiple) * world * multiple)
    if not shuffle:
        assert sorted(seen) == list(range(len(seen)))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {(seed, epoch): ShardSampler(50, seed=seed).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert ShardSampler(50, seed=1).order(1).tolist() == orders[1, 1]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world: int) -> None:
    batch, per_rank = 8, 8 // world
    whole = ShardSampler(48).order(0)
    shares = [ShardSampler(48, rank=rank, world=world).order(0) for rank in range(world)]
    for step in range(6):
        together = np.concatenate([share[step * per_rank : (step + 1) * per_rank] for share in shares])
        assert sorted(together) == sorted(whole[step * batch : (step + 1) * batch])


def test_workers_give_the_same_records(path: str) -> None:
    data = make_dataset(path)
    alone = list(make_loader(data, 0))
    assert len(alone) == 12
    assert sum("skip_reason" in record for batch in alone for record in batch) == 1
    for workers in (1, 2):
        assert list(make_loader(make_dataset(path), workers)) == alone


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 5, 12])
def test_resume_continues_with_the_very_next_record(path: str, workers: int, stop: int) -> None:
    expected = list(make_loader(make_dataset(path), 0, epoch=4))
    loader = make_loader(make_dataset(path), workers, epoch=4)
    batches = iter(loader)
    first = [next(batches) for _ in range(stop)]
    state = loader.state_dict()
    del batches
    # A fresh process starts in epoch 0; the state brings its own.
    resumed = make_loader(make_dataset(path), workers)
    resumed.load_state_dict(state)
    assert first + list(resumed) == expected
    assert resumed.sampler.epoch == 4
    resumed.sampler.set_epoch(5)
    assert list(resumed) == list(make_loader(make_dataset(path), 0, epoch=5))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
def test_a_position_does_not_depend_on_loader_processes(path: str, before: int, after: int) -> None:
    expected = list(make_loader(make_dataset(path), 0, epoch=4))
    loader = make_loader(make_dataset(path), before, epoch=4)
    batches = iter(loader)
    first = [next(batches) for _ in range(5)]
    state = loader.sampler.position(10)
    resumed = make_loader(make_dataset(path), after)
    resumed.sampler.go_to(state)
    assert first + list(resumed) == expected
    resumed.sampler.set_epoch(5)
    assert list(resumed) == list(make_loader(make_dataset(path), 0, epoch=5))


def test_resume_with_another_number_of_ranks() -> None:
    state = None
    for rank in range(2):
        iterator = iter(ShardSampler(40, rank=rank, world=2))
        read = [next(iterator) for _ in range(6)]
        state = iterator.state_dict()
        assert len(read) == 6
    assert state is not None
    alone = iter(ShardSampler(40))
    alone.load_state_dict(state)
    assert list(alone) == ShardSampler(40).order(0)[12:].tolist()
    with pytest.raises(DataError, match=r"12 records .* 5 ranks"):
        iter(ShardSampler(40, world=5)).load_state_dict(state)


@pytest.mark.parametrize("change", [{"length": 41}, {"seed": 1}, {"fingerprint": "other"}])
def test_a_position_in_other_data_is_refused(change: dict[str, Any]) -> None:
    state = iter(ShardSampler(40)).state_dict()
    with pytest.raises(DataError, match=f"other data: its {next(iter(change))} is"):
        iter(ShardSampler(**{"length": 40, **change})).load_state_dict(state)


def test_bad_ranks() -> None:
    with pytest.raises(ConfigError, match="Rank 2 of 2"):
        ShardSampler(10, rank=2, world=2)


def test_padding_reaches_the_records(path: str) -> None:
    data = make_dataset(path)
    loader = make_loader(data, 0, even="pad", multiple=2, shuffle=False)
    last = list(loader)[-1]
    assert [record["idx"] for record in last] == [22, PAD_INDEX]
    assert last[1]["skip_reason"] == "padding"


def test_bad_record_in_a_worker_keeps_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text":"a"}\n{"text":\n')
    data = RecordDataset(str(file), ReadingConfig(check_records="on_read"))
    loader = Loader(data, batch_size=2, num_workers=1, collate_fn=list)
    with pytest.raises(DataError, match=r"^[^\n]*a\.jsonl:2: [^\n]*JSON[^\n]*\Z"):
        list(loader)


def _die(batch: list[Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_sentence(path: str) -> None:
    loader = Loader(make_dataset(path), batch_size=2, num_workers=1, collate_fn=_die)
    with pytest.raises(DataError, match=r"DataLoader worker"):
        list(loader)


def test_more_processes_than_cores_are_no_matter_for_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    Loader(range(4), num_workers=1000)
    assert [str(w.message) for w in recwarn if "worker processes" in str(w.message)] == []
