"""A sharded model is read by one process, and its shards are what that process has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.errors import ConfigError
from limbeck.models import loading as build
from limbeck.models.policy import Policy
from tests.distributed.cases import Case, student_of, together
from tests.helpers.tiny import LLAMA, QWEN3, config, tokenizer

pytestmark = pytest.mark.slow

# a scaled embedding and tables of two kinds are what no checkpoint holds; biases are cut twice
GEMMA = {**QWEN3, "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 8}
BIASED = {**LLAMA, "model_type": "qwen2", "intermediate_size": 56}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "fsdp in main memory": {"fsdp": True, "cpu_offload": True},
    "tensor": {"tensor_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "fsdp x tensor": {"tensor_parallel_size": 2, "fsdp": True},
}
MODELS = {"tied, scaled": GEMMA, "untied, with biases": BIASED}


def buffers(student: Policy) -> dict[str, torch.Tensor]:
    return {n: torch.as_tensor(b.to_local() if hasattr(b, "to_local") else b) for n, b in student.model.named_buffers()}


def work(rank: int, world: int, missing: str) -> dict[str, Any]:
    out: dict[str, Any] = {"read": 0}
    load = build.load_model

    def counted(*args: Any, **kwargs: Any) -> Any:
        out["read"] += 1
        return load(*args, **kwargs)

    build.load_model = counted
    for name, layout in LAYOUTS.items():
        for kind, arch in MODELS.items():
            if ("x" in name.split()) != (world == 4) or (name == "context" and arch is GEMMA):
                continue
            student = student_of(Case(student=arch), layout)
            out[f"{name}/{kind}"] = {"weights": student.sharding.full_state(), "buffers": buffers(student)}
            out["made"] = out.get("made", 0) + 1
    try:
        Policy({"model_name": missing, "dtensor_cfg": {"fsdp": True}}, None, device="cpu")
    except ConfigError as e:
        out["error"] = str(e)
    return out


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("once")
    return {world: together(world, work, folder / str(world), str(folder / "missing")) for world in (2, 4)}


def test_one_process_reads(outcome: Any) -> None:
    for results in outcome.values():
        assert [found["read"] for found in results] == [results[0]["made"] + 1, *[0] * (len(results) - 1)]


def test_an_error_of_the_reader_is_everybodys(outcome: Any) -> None:
    for results in outcome.values():
        assert "missing': the path does not exist" in results[0]["error"]
        # the others say whose error it is
        assert {found["error"].removeprefix("rank 0: ") for found in results} == {results[0]["error"]}
        assert all(found["error"].startswith("rank 0: ") for found in results[1:])


@pytest.mark.parametrize("kind", list(MODELS))
def test_shards_are_those_of_the_whole(outcome: Any, kind: str) -> None:
    expected = Policy(config(MODELS[kind]), tokenizer(300), device="cpu", seed=0)
    weights, tables = expected.model.state_dict(), buffers(expected)
    for results in outcome.values():
        for name in (name for name in results[0] if name.endswith(kind)):
            for rank, found in enumerate(results):
                if rank == 0:
                    assert set(found[name]["weights"]) == set(weights), name
                    for key, value in weights.items():
                        assert torch.equal(found[name]["weights"][key], value), (name, key)
                assert set(found[name]["buffers"]) == set(tables), name
                for key, value in tables.items():
                    assert torch.equal(found[name]["buffers"][key], value), (name, key)
