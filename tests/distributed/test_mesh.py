"""Layouts that cannot work are refused in one line, before any model is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import load_config, resolve
from limbeck.distributed import mesh
from limbeck.distributed.comm import Comm
from limbeck.distributed.launch import ClusterConfig, check_cluster
from limbeck.distributed.mesh import MeshShape, ParallelConfig, ParallelDims, check_model, mesh_shape_for
from limbeck.errors import ConfigError
from limbeck.models.policy import Policy
from limbeck.teachers.live import places_met
from tests.distributed.cases import together
from tests.helpers import runs
from tests.helpers.tiny import LLAMA, config, tokenizer

WIDE = {**LLAMA, "num_key_value_heads": 4}
PLAIN = ParallelConfig()


def test_data_parallelism_takes_what_is_left() -> None:
    assert mesh_shape_for(ParallelConfig(tensor_parallel_size=2, context_parallel_size=2), 8) == MeshShape(2, 2, 2)
    assert mesh_shape_for(PLAIN, 3) == MeshShape(3)
    shape = MeshShape(2, 2, 3)
    assert [shape.place(r) for r in (0, 2, 3, 11)] == [(0, 0, 0), (0, 0, 2), (0, 1, 0), (1, 1, 2)]
    assert sorted(shape.place(r) for r in range(shape.world)) == [shape.place(r) for r in range(shape.world)]


def test_sizes_that_do_not_divide_the_world() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel_size 1 = 3 .* 4 processes"):
        mesh_shape_for(ParallelConfig(tensor_parallel_size=3), 4)
    with pytest.raises(ConfigError, match=r"num_nodes 2 x gpus_per_node 8 = 16, but 8 processes"):
        check_cluster(ClusterConfig(num_nodes=2, gpus_per_node=8), 8)
    check_cluster(ClusterConfig(num_nodes=2, gpus_per_node=None), 8)
    check_cluster(ClusterConfig(num_nodes=2, gpus_per_node=8, launcher="ray"), 8)


@pytest.mark.parametrize(
    ("change", "shape", "message"),
    [
        ({"num_attention_heads": 6}, MeshShape(tensor=4), "does not divide the model's num_attention_heads 6"),
        ({}, MeshShape(tensor=4), "num_key_value_heads 2"),
        ({"vocab_size": 301}, MeshShape(tensor=2), "vocabulary 301"),
        ({"intermediate_size": 49}, MeshShape(tensor=2), "intermediate_size 49"),
        ({"model_type": "gpt2"}, MeshShape(tensor=2), "tensor parallelism does not know models of type 'gpt2'"),
        ({"model_type": "mamba"}, MeshShape(context=2), "context parallelism does not know models of type 'mamba'"),
        ({"layer_types": ["full_attention", "linear"]}, MeshShape(context=2), "not layers of type 'linear'"),
    ],
)
def test_models_that_cannot_be_split(change: dict[str, Any], shape: MeshShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model({**LLAMA, "vocab_size": 300, **change}, shape)


def test_models_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {**LLAMA, "vocab_size": 300}
    check_model(numbers, MeshShape(context=2, tensor=2))
    check_model(SimpleNamespace(**numbers), MeshShape(tensor=2))
    check_model({"model_type": "gpt2"}, MeshShape(data=8))
    check_model({**numbers, "model_type": "mistral", "sliding_window": 64}, MeshShape(context=2))
    check_model({**numbers, "layer_types": ["full_attention", "sliding_attention"]}, MeshShape(context=2))


def test_a_policy_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limbeck.models.loading.current_world", lambda: 4)
    monkeypatch.setattr("limbeck.models.loading.load_model", lambda *a, **k: pytest.fail("loaded"))
    for layout, message, more in (
        ({"tensor_parallel_size": 3}, "does not divide the 4 processes", {}),
        ({"tensor_parallel_size": 4}, "num_key_value_heads 2", {}),
        ({"fsdp": True}, "modules_to_save", {"lora": {"modules_to_save": ["lm_head"]}}),
        ({"cpu_offload": True}, "fsdp is off", {}),
        ({"cpu_offload": True, "fsdp": True, "tensor_parallel_size": 4}, "several data", {"model_overrides": WIDE}),
        ({"sequence_parallel": True}, "tensor_parallel_size is 1", {}),
    ):
        with pytest.raises(ConfigError, match=message):
            Policy(config(dtensor_cfg=layout, **more), tokenizer(300), device="cpu")


def test_a_run_refuses_its_teachers_layout_before_it_loads_the_student(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("limbeck.models.loading.load_model", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr("limbeck.models.loading.current_world", lambda: 4)
    settings = resolve(
        MasterConfig, load_config(runs.write_run(tmp_path), ["teacher.dtensor_cfg.tensor_parallel_size=4"])
    )
    with pytest.raises(ConfigError, match=r"teacher_0: tensor_parallel_size 4 .*num_key"):
        run(settings)


def test_which_rows_meet_in_a_teachers_block() -> None:
    assert [places_met(MeshShape(4), MeshShape(2, 1, 2), block) for block in (0, 1)] == [[0, 1], [2, 3]]
    assert [places_met(MeshShape(2, 1, 2), MeshShape(1, 2, 2), block) for block in (0,)] == [[0, 1]]
    assert [places_met(MeshShape(1, 1, 4), MeshShape(2, 2, 1), block) for block in (0, 1)] == [[0], [0]]
    odd = MeshShape(3, 1, 4), MeshShape(4, 1, 3)
    assert [places_met(*odd, block) for block in range(4)] == [[0], [0, 1], [1, 2], [2]]


def test_data_rank() -> None:
    assert mesh.data_rank_and_world(PLAIN) == (0, 1)


def place(rank: int, world: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    dims = ParallelDims.sharded(MeshShape(*shape), "cpu")
    assert ParallelDims.sharded(MeshShape(*shape), "cpu") is dims
    assert dims.is_sharded
    found: dict[str, Any] = {"owns": [dims.owns_rows, dims.owns_records]}
    for name in ("data", "context", "tensor", "rows", "loss"):
        comm: Comm = getattr(dims, name)
        found[name] = [int(x) for x in torch.cat(comm.gather(torch.tensor([rank])))]
        assert found[name][comm.rank] == rank
    return found


def test_who_works_with_whom(tmp_path: Path) -> None:
    """Two ways to split at a time, on four processes: rank = (data x contexts + context) x tensors + tensor."""
    ranks = together(4, place, tmp_path / "a", (1, 2, 2))
    assert [found["context"] for found in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["tensor"] for found in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["loss"] for found in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(found["rows"] == [0, 1, 2, 3] for found in ranks)
    assert [found["data"] for found in ranks] == [[0], [1], [2], [3]]
    assert [found["owns"] for found in ranks] == [[True, True], [True, False], [False, False], [False, False]]
    ranks = together(4, place, tmp_path / "b", (2, 2, 1))
    assert [found["data"] for found in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["rows"] for found in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(found["loss"] == [0, 1, 2, 3] for found in ranks)
    assert [found["owns"] for found in ranks] == [[True, True], [False, False], [True, True], [False, False]]


def test_one_process_has_all_dimensions() -> None:
    for dims in (ParallelDims.alone(), ParallelDims.replicas(Comm.alone())):
        assert dims.shape == MeshShape()
        assert {dims.data, dims.context, dims.tensor, dims.rows, dims.loss} == {Comm.alone()}
        assert dims.owns_rows
        assert dims.owns_records
        assert not dims.is_sharded
