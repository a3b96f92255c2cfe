from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from limbeck.distributed.device import ALIGNED, host_threads, joined, to_device


class Named(NamedTuple):
    value: Tensor
    word: str


@dataclass(frozen=True)
class Leaf:
    index: Tensor
    size: int
    cached: dict[str, Any] = field(default_factory=dict, init=False)


@dataclass
class Tree:
    leaves: list[Leaf]
    table: dict[str, Tensor]
    pair: tuple[Tensor, Tensor | None]
    named: Named


def _tree() -> Tree:
    shared = torch.arange(3)
    return Tree(
        [Leaf(shared, 3), Leaf(torch.arange(4).reshape(2, 2).t(), 4)],
        {"weight": torch.ones(2), "empty": torch.zeros(0, 5)},
        (shared, None),
        Named(torch.tensor(1.5), "word"),
    )


def test_nothing_moves_where_all_is_there() -> None:
    tree = _tree()
    assert to_device(tree, "cpu") is tree
    assert to_device(tree.pair[0], torch.device("cpu")) is tree.pair[0]


def test_a_tree_keeps_its_shape() -> None:
    tree = _tree()
    found = to_device(tree, "meta")
    assert [leaf.size for leaf in found.leaves] == [3, 4]
    assert found.named.word == "word"
    assert found.pair[1] is None
    assert found.leaves[1].index.shape == (2, 2)
    assert found.table["empty"].shape == (0, 5)
    assert isinstance(found.named, Named)
    moved = (found.leaves[0].index, found.table["weight"], found.pair[0], found.named.value)
    assert all(t.device.type == "meta" for t in moved)
    assert found.pair[0] is found.leaves[0].index
    assert tree.pair[0].device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.complex128])
def test_tensors_that_travel_together_begin_where_kernels_like_it(dtype: torch.dtype) -> None:
    tensors = [torch.ones(shape, dtype=dtype) for shape in ((3,), (), (0, 5), (2, 8), (5, 1))]
    tensors[3] = tensors[3].t()  # not in the order of its memory
    flat, sizes = joined(tensors)
    pieces = flat.split(sizes)[::2]
    assert all(torch.equal(piece.view(t.shape), t) for piece, t in zip(pieces, tensors, strict=True))
    assert all(piece.data_ptr() % ALIGNED == 0 for piece in pieces)
    assert flat.numel() == sum(sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait_for_a_copy() -> None:
    tree = _tree()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, single = to_device(tree, "cuda"), to_device(torch.arange(5), "cuda:0")
        again = to_device(found, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again is found
    assert torch.equal(found.leaves[1].index.cpu(), tree.leaves[1].index)
    assert single.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(found.table["weight"].cpu(), torch.ones(2))
    assert float(found.named.value) == 1.5
    moved = (found.leaves[0].index, found.leaves[1].index, found.table["weight"], found.named.value)
    assert all(t.data_ptr() % ALIGNED == 0 for t in moved)


@pytest.mark.parametrize(
    ("device", "said", "expected"), [("cuda", None, 1), ("cuda", "2", 2), ("cpu", None, 2)], ids=["gpu", "said", "cpu"]
)
def test_threads_of_the_host(device: str, said: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with host_threads(torch.device(device)):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
