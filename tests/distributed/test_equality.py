"""One denominator: every layout takes the step that one process takes (float32, 1e-5 relative), on real processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import CASES, step, together

TENSOR, CONTEXT, FSDP = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {"fsdp": True}
EMPTY = ["an empty rank", "a rank without chunks"]
MAIN = ["boundary_kl", "one row at a time", "packed, tied Qwen3", "two teachers"]
# packed documents and P-KL's choice of columns are refused there, see test_mesh.py
WHOLE_ROWS = [name for name, case in CASES.items() if not case.packed and case.loss.get("mode") != "p_kl"]

# name: (processes, layout of the student, layout of the teachers, cases)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    "data": (2, {}, {}, [*MAIN, *EMPTY]),
    "fsdp": (2, FSDP, FSDP, [*MAIN, "alm", *EMPTY]),
    "tensor": (2, TENSOR, TENSOR, [name for name in CASES if name not in EMPTY]),
    "tensor, whole teachers": (2, TENSOR, {}, ["boundary_kl", "gold"]),
    "context": (2, CONTEXT, CONTEXT, WHOLE_ROWS),
    "context, whole teachers": (2, CONTEXT, {}, ["boundary_kl"]),
    "data x tensor": (4, TENSOR, TENSOR, ["boundary_kl", "two teachers", *EMPTY]),
    "fsdp x tensor": (4, {**FSDP, **TENSOR}, {**FSDP, **TENSOR}, ["one row at a time", "packed, tied Qwen3", *EMPTY]),
    "data x tensor, fsdp teachers": (4, TENSOR, FSDP, ["two teachers"]),
    "fsdp x context": (4, {**FSDP, **CONTEXT}, CONTEXT, ["two teachers", "an empty rank"]),
    "context x tensor": (4, {**CONTEXT, **TENSOR}, TENSOR, ["boundary_kl"]),
}


def work(rank: int, world: int) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, (processes, layout, teachers, cases) in LAYOUTS.items():
        if processes != world:
            continue
        readers = world // (layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1))
        for case_name in cases:
            case = CASES[case_name]
            rows = case.rows[0] + case.rows[1] if readers == 1 else case.rows[rank * readers // world]
            out.setdefault(name, {})[case_name] = step(case, layout, rows, teachers)
    return out


@functools.cache
def alone(case_name: str) -> dict[str, Any]:
    case = CASES[case_name]
    return step(case, {}, case.rows[0] + case.rows[1])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("equality")
    return {world: together(world, work, folder / str(world)) for world in (2, 4)}


def close(found: Any, expected: Any, what: str) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()) + 1e-9, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize(("layout", "case"), [(n, c) for n, entry in LAYOUTS.items() for c in entry[3]])
def test_every_layout_takes_the_same_step(outcome: Any, layout: str, case: str) -> None:
    expected = alone(case)
    for rank, results in enumerate(outcome[LAYOUTS[layout][0]]):
        found = results[layout][case]
        for name in ("loss", "held_out", "grad_norm", "tokens"):
            close(found[name], expected[name], f"rank {rank}: {name}")
        assert set(found["metrics"]) == set(expected["metrics"])
        for name, pair in expected["metrics"].items():
            close(found["metrics"][name], pair, f"rank {rank}: {name}")
        assert set(found["gradients"]) == set(expected["gradients"])
        for name, grad in expected["gradients"].items():
            close(found["gradients"][name], grad, f"rank {rank}: {name}")
        for row, score in found["scores"].items():
            close(score, expected["scores"][row], f"rank {rank}: scores of row {row}")
