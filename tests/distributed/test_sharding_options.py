"""Options of a sharded model take the step that one process takes: adapters, split sequences,
shards in main memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import Case, batch, close, loss_of, student_of, teachers_of, together, whole
from tests.helpers.tiny import LLAMA, QWEN3

pytestmark = pytest.mark.slow

TENSOR, CONTEXT, FSDP = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {"fsdp": True}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
LORA = {"lora": {"r": 4, "alpha": 8.0}}
AGAIN = {"activation_checkpointing": True}


# name: (case, settings of the policy)
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "adapters": (Case(teachers=()), LORA),
    "adapters, odd rank": (Case(teachers=(), mbs=1), {"lora": {"r": 3, "target_modules": ["q_proj", "down_proj"]}}),
    "adapters, tied, packed": (Case(teachers=(), packed=True, student=QWEN3), LORA),
    "biases": (Case(teachers=(), student={**LLAMA, "model_type": "qwen2"}), {}),
    "Llama": (Case(teachers=(), mbs=1), {}),
    "Llama, packed": (Case(teachers=(), packed=True), {}),
    "Qwen3, packed": (Case(packed=True, student=QWEN3), {}),
}
ADAPTERS = [name for name in CASES if name.startswith("adapters")]
MODELS = ["Llama", "Llama, packed", "Qwen3, packed"]

# name: (processes, layout, cases)
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "tensor": (2, TENSOR, ADAPTERS),
    "fsdp": (2, FSDP, ADAPTERS),
    "context": (2, CONTEXT, ["adapters"]),
    "fsdp in main memory": (2, {**FSDP, "cpu_offload": True}, ["Llama", "Qwen3, packed", "adapters"]),
    "sequence": (2, SEQUENCE, [*MODELS, "adapters"]),
    "sequence, layers computed twice": (2, {**SEQUENCE, **AGAIN}, ["adapters"]),
    "fsdp, layers computed twice": (2, {**FSDP, **AGAIN}, ["adapters"]),
    "data x tensor": (4, TENSOR, ["adapters"]),
    "fsdp x tensor": (4, {**FSDP, **TENSOR}, ["biases", *ADAPTERS[:2]]),
    "fsdp x sequence": (4, {**FSDP, **SEQUENCE}, ["Llama", "Qwen3, packed"]),
    "context x sequence": (4, {**CONTEXT, **SEQUENCE}, ["Llama"]),
}


def step(case: Case, settings: dict[str, Any], layout: dict[str, Any], rows: tuple[int, ...]) -> dict[str, Any]:
    """Loss, gradient norm and all gradients after clipping."""
    loss = loss_of(case)
    student = student_of(case, layout, settings)
    names, gradients = {id(p): name for name, p in student.model.named_parameters()}, {}
    # adapters start at zero, where half of their gradients are
    for p in (p for name, p in student.model.named_parameters() if ".lora_B." in name):
        torch.nn.init.constant_(p, 0.02)

    def keep(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            gradients.update({names[id(p)]: whole(p.grad).clone() for p in group["params"]})

    assert student.optimizer is not None
    student.optimizer.register_step_pre_hook(keep)
    split = {key: value for key, value in layout.items() if key != "fsdp"}
    teachers = teachers_of(case, layout if "cpu_offload" in layout else split)
    out = student.train(batch(case, rows), loss, teachers=teachers, mbs=case.mbs)
    after = student.train(batch(case, rows), loss, teachers=teachers, mbs=case.mbs, eval_mode=True)
    return {"loss": out["loss"], "norm": out["grad_norm"], "after": after["loss"], "gradients": gradients}


def work(rank: int, world: int) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, (processes, layout, cases) in LAYOUTS.items():
        if processes != world:
            continue
        same_rows = layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1)
        for case_name in cases:
            case, settings = CASES[case_name]
            rows = case.rows[0] + case.rows[1] if world == same_rows else case.rows[rank // same_rows]
            out.setdefault(name, {})[case_name] = step(case, settings, layout, rows)
    return out


@functools.cache
def alone(case_name: str) -> dict[str, Any]:
    case, settings = CASES[case_name]
    return step(case, settings, {}, case.rows[0] + case.rows[1])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("options")
    return {world: together(world, work, folder / str(world)) for world in (2, 4)}


@pytest.mark.parametrize(("layout", "case"), [(n, c) for n, entry in LAYOUTS.items() for c in entry[2]])
def test_the_step_is_that_of_one_process(outcome: Any, layout: str, case: str) -> None:
    expected = alone(case)
    for rank, results in enumerate(outcome[LAYOUTS[layout][0]]):
        found = results[layout][case]
        for name in ("loss", "norm", "after"):
            close(found[name], expected[name], f"rank {rank}: {name}")
        assert set(found["gradients"]) == set(expected["gradients"])
        for name, grad in expected["gradients"].items():
            close(found["gradients"][name], grad, f"rank {rank}: {name}")
