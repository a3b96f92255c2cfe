"""A model that is whole in every process behind the same calls as one on a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import ParallelDims
from limbeck.distributed.sharding import NoSharding, shard_model
from tests.distributed.cases import together


def test_a_whole_model_alone_is_left_as_it_is() -> None:
    model = nn.Linear(2, 2, bias=False)
    sharding = shard_model(model, model, ParallelDims.alone())
    assert type(sharding) is NoSharding
    assert not sharding.is_sharded
    assert not sharding.fsdp
    assert sharding.head_weight(model.weight) is sharding.head_weight(model.weight, whole=True) is model.weight
    sharding.collect([model.weight])
    assert model.weight.grad is None
    model.weight.grad = torch.full((2, 2), 2.0)
    sharding.release(gradient=True)
    assert float(sharding.clip([model.weight], 1.0)) == 4.0
    torch.testing.assert_close(model.weight.grad.norm(), torch.tensor(1.0))
    assert sharding.full_state() is None


def collected(rank: int, world: int) -> list[Any]:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    params = list(model.parameters())
    for i, p in enumerate(params):
        # the last is not reached by the rows of rank 1
        p.grad = None if rank == 1 and i == 3 else torch.full_like(p, float(10 * rank + i))
    NoSharding(model, model, ParallelDims.replicas(Comm.world())).collect(params)
    return [p.grad for p in params]


def test_replicas_add_up_their_gradients(tmp_path: Path) -> None:
    for grads in together(2, collected, tmp_path):
        assert [set(grad.flatten().tolist()) for grad in grads] == [{10.0}, {12.0}, {14.0}, {3.0}]
