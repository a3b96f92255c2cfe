"""Every collective against what one process would compute, and the one rank that does nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from limbeck.distributed import comm as comm_module
from limbeck.distributed.comm import Comm, init_distributed
from limbeck.errors import ConfigError, LimbeckError
from tests.distributed.cases import together


def test_alone_nothing_happens() -> None:
    comm = Comm.alone()
    x = torch.arange(4.0, requires_grad=True)
    assert (comm.rank, comm.size, comm.device) == (0, 1, torch.device("cpu"))
    assert comm.sum(x) is x
    assert comm.max(x) is x
    assert comm.sum_same_loss(x) is x
    assert comm.broadcast_(x) is x
    assert comm.gather(x)[0] is x
    assert comm.reduce_scatter([x]) is x
    assert comm.all_to_all(x, [4], [4]) is x
    comm.sum_(x)
    comm.barrier()
    assert comm.any(True) is True
    assert comm.any(False) is False
    assert comm.broadcast_json({"a": 1}) == {"a": 1}
    assert comm.first_only(lambda: b"x") == b"x"
    assert comm.sum_counter(Counter(a=2)) == Counter(a=2)
    assert comm.all_names("ba") == ["a", "b"]
    assert comm.sum_named({"a": x[0]})["a"] is not None
    with pytest.raises(ConfigError, match="mine"), comm.fail_together():
        raise ConfigError("mine")


def test_who_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_distributed() is Comm.alone()
    assert Comm.world() is Comm.of(None) is Comm.of(Comm.alone()) is Comm.alone()


def _tensors(rank: int, world: int) -> dict[str, Any]:
    comm = Comm.world()
    assert (comm.rank, comm.size) == (rank, world)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("many", "one"))
    assert Comm.of(mesh["one"]) is Comm.alone()
    assert Comm.of(mesh["many"]).size == Comm.of(dist.group.WORLD).size == world
    x = torch.arange(6.0).reshape(2, 3).t() + 10 * rank  # not contiguous
    kept = x.clone()
    out: dict[str, Any] = {"sum": comm.sum(x), "max": comm.max(x), "gather": comm.gather(x)}
    out["scatter"] = comm.reduce_scatter([x + r for r in range(world)])
    # rank r keeps nothing and sends s + 1 rows to rank s
    send = [s + 1 for s in range(world)]
    rows = torch.cat([torch.full((n, 2), 10.0 * rank + s) for s, n in enumerate(send)])
    out["exchange"] = comm.all_to_all(rows, send, [rank + 1] * world)
    assert torch.equal(x, kept)
    comm.barrier()
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_tensors(tmp_path: Path, world: int) -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    tens = 10 * sum(range(world))
    for rank, found in enumerate(together(world, _tensors, tmp_path)):
        assert torch.equal(found["sum"], world * x + tens)
        assert torch.equal(found["max"], x + 10 * (world - 1))
        assert all(torch.equal(part, x + 10 * r) for r, part in enumerate(found["gather"]))
        assert torch.equal(found["scatter"], world * (x + rank) + tens)
        assert found["exchange"][:, 0].tolist() == [10.0 * r + rank for r in range(world) for _ in range(rank + 1)]


def _in_place(rank: int, world: int) -> dict[str, Any]:
    comm_module._BUCKET_BYTES = 64  # 16 float32
    comm = Comm.world()
    shapes = ((3,), (2, 5), (17,), (0,), (4,))
    tensors = [torch.full(shape, float(i + rank)) for i, shape in enumerate(shapes)]
    tensors += [torch.full((2, 2), rank, dtype=torch.int64), torch.arange(6.0).reshape(2, 3).t() * (rank + 1)]
    comm.sum_(*tensors)
    comm.sum_()
    sent = torch.full((2, 3), float(rank)).t()
    assert comm.broadcast_(sent, 1) is sent
    return {"sums": tensors, "sent": sent}


def test_sums_in_place_travel_in_buckets(tmp_path: Path) -> None:
    for found in together(2, _in_place, tmp_path):
        *floats, whole, turned = found["sums"]
        assert all(torch.equal(t, torch.full_like(t, 2.0 * i + 1)) for i, t in enumerate(floats))
        assert torch.equal(whole, torch.ones(2, 2, dtype=torch.int64))
        assert torch.equal(turned, 3 * torch.arange(6.0).reshape(2, 3).t())
        assert torch.equal(found["sent"], torch.ones(3, 2))


def _gradient(rank: int, world: int) -> torch.Tensor:
    own = torch.tensor([1.0, 2.0]) * (rank + 1)
    own.requires_grad_()
    # all ranks hold the same loss behind the sum
    (Comm.world().sum_same_loss(own) ** 2).sum().backward()
    assert own.grad is not None
    return own.grad


def test_the_same_loss_behind_a_sum_counts_once(tmp_path: Path) -> None:
    for grad in together(2, _gradient, tmp_path):
        assert grad.tolist() == [6.0, 12.0]


def _small_things(rank: int, world: int) -> dict[str, Any]:
    comm = Comm.world()
    named = {"all": torch.tensor(rank + 1), f"only_{rank}": torch.tensor(0.5)}
    sums = comm.sum_named(named)
    assert sums["all"].dtype == torch.int64
    assert sums[f"only_{rank}"].dtype == torch.float32
    assert comm.sum_named({}) == {}
    return {
        "any": [comm.any(rank == 1), comm.any(False)],
        "json": comm.broadcast_json({"from": rank, "text": "ä" * rank}, 1),
        "counter": dict(comm.sum_counter(Counter({"all": 2, f"only_{rank}": 1}))),
        "empty": dict(comm.sum_counter(Counter())),
        "names": [comm.all_names(["b", "a"]), comm.all_names([f"only_{rank}"] if rank else [])],
        "sums": {name: float(value) for name, value in sums.items()},
        "first": comm.first_only(lambda: b"" if rank == 0 else b"wrong").decode(),
    }


def test_small_things(tmp_path: Path) -> None:
    for found in together(2, _small_things, tmp_path):
        assert found == {
            "any": [True, False],
            "json": {"from": 1, "text": "ä"},
            "counter": {"all": 4, "only_0": 1, "only_1": 1},
            "empty": {},
            "names": [["a", "b"], ["only_1"]],
            "sums": {"all": 3.0, "only_0": 0.5, "only_1": 0.5},
            "first": "",
        }


def _errors(rank: int, world: int) -> list[str]:
    comm = Comm.world()
    out = []

    def fails() -> bytes:
        raise ValueError("only the first knows")

    for bad in ((), (1,), (1, 2)):
        try:
            with comm.fail_together():
                if rank in bad:
                    raise ConfigError(f"no {rank}")
            out.append("fine")
        except LimbeckError as error:
            out.append(f"{type(error).__name__}: {error}")
    try:
        with comm.fail_together():
            if rank == 2:
                raise ValueError("odd")
    except (LimbeckError, ValueError) as error:
        out.append(f"{type(error).__name__}: {error}")
    try:
        comm.first_only(fails)
    except (LimbeckError, ValueError) as error:
        out.append(f"{type(error).__name__}: {error}")
    return out


def test_an_error_of_one_is_one_of_all(tmp_path: Path) -> None:
    first, second, third = together(3, _errors, tmp_path)
    assert first[:3] == ["fine", "ConfigError: rank 1: no 1", "ConfigError: rank 1: no 1"]
    assert second[:3] == ["fine", "ConfigError: no 1", "ConfigError: no 1"]
    assert third[:3] == ["fine", "ConfigError: rank 1: no 1", "ConfigError: no 2"]
    assert [found[3] for found in (first, second, third)] == [
        "LimbeckError: rank 2: odd",
        "LimbeckError: rank 2: odd",
        "ValueError: odd",
    ]
    known = "only the first knows"
    assert [found[4] for found in (first, second, third)] == [
        f"ValueError: {known}",
        f"LimbeckError: {known}",
        f"LimbeckError: {known}",
    ]
