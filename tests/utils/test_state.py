import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.errors import CheckpointError
from limbeck.utils import capture_rng, load_state, restore_rng, save_state

leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
key = st.text() | st.integers() | st.sampled_from(["$tensor", "$dict", "a/b", "#"])
trees = st.recursive(
    leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, float) and a != a:
        return isinstance(b, float) and b != b
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None)
@given(trees)
def test_any_plain_tree_comes_back_the_same(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("state")
    save_state(folder, tree)
    assert same(load_state(folder), tree)


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path):
    tensors = [
        torch.randn(3, 4),
        torch.randn(3, 4).T,
        torch.tensor(3.0, dtype=torch.float64),
        torch.zeros(0, 5),
        torch.randn(7).bfloat16(),
        torch.arange(10, dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.tensor(float("nan")),
    ]
    tree = {"state": {0: {"t": tensors}, "0": {"t": tensors[:1]}}, "array": np.arange(6, dtype=np.int64).reshape(2, 3)}
    save_state(tmp_path, tree)
    back = load_state(tmp_path)
    for a, b in zip(tensors, back["state"][0]["t"], strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    assert torch.equal(back["state"]["0"]["t"][0], tensors[0])
    assert np.array_equal(back["array"], tree["array"])


def test_a_template_is_filled_in_place(tmp_path):
    save_state(tmp_path, {"w": torch.arange(4.0), "n": 3})
    target = torch.zeros(4)
    back = load_state(tmp_path, template={"w": target, "n": 0})
    assert back["w"].data_ptr() == target.data_ptr()
    assert target.tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"shape \(4,\), this run needs \(5,\)"):
        load_state(tmp_path, template={"w": torch.zeros(5), "n": 0})


def test_no_pickle_is_written_or_needed(tmp_path):
    save_state(tmp_path, {"w": torch.randn(4), "n": 3})
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_what_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"state 'a.0' is a object"):
        save_state(tmp_path, {"a": [object()]})


@pytest.mark.parametrize("damage", ["cut", "missing", "json", "format", "lost"])
def test_damage_is_one_clear_error(tmp_path, damage):
    save_state(tmp_path, {"w": torch.randn(400)})
    (weights,) = tmp_path.glob("*.safetensors")
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        (tmp_path / "state.json").unlink()
    elif damage == "json":
        (tmp_path / "state.json").write_text("{")
    elif damage == "format":
        head = json.loads((tmp_path / "state.json").read_text())
        (tmp_path / "state.json").write_text(json.dumps({**head, "format": 99}))
    else:
        weights.unlink()
    with pytest.raises(CheckpointError):
        load_state(tmp_path)


def test_all_generators_continue_where_they_were(tmp_path):
    random.gauss(0, 1)
    np.random.randn()
    save_state(tmp_path, capture_rng())
    expected = (random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(3).tolist())
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    restore_rng(load_state(tmp_path))
    assert (random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(3).tolist()) == expected


def test_loader_state_survives(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader():
        return StatefulDataLoader(
            list(range(20)), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=1
        )

    first = loader()
    it = iter(first)
    head = [next(it).tolist() for _ in range(3)]
    save_state(tmp_path, first.state_dict())
    rest = [b.tolist() for b in it]
    second = loader()
    second.load_state_dict(load_state(tmp_path))
    assert [b.tolist() for b in second] == rest
    assert sorted(x for batch in head + rest for x in batch) == list(range(20))
