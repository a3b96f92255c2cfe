"""Options of a sharded model take the step that one process takes: learnable projections."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import Case, batch, loss_of, student_of, teachers_of, together, whole
from tests.distributed.test_equality import close

TENSOR, FSDP = {"tensor_parallel_size": 2}, {"fsdp": True}


def learnable(mode: str, **more: Any) -> Case:
    return Case({"mode": mode, "learnable_projection": True, **more})


# name: (case, settings of the policy, processes and layouts)
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "boundary_kl, learnable": (learnable("boundary_kl"), {}),
    "p_kl_norm, learnable": (learnable("p_kl_norm", vocab_topk=16), {}),
    "p_kl, learnable": (learnable("p_kl"), {}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "tensor": (2, TENSOR, [name for name in CASES if "learnable" in name]),
    "data x tensor": (4, TENSOR, [name for name in CASES if "learnable" in name and not name.startswith("p_kl,")]),
    "fsdp x tensor": (4, {**FSDP, **TENSOR}, [name for name in CASES if "learnable" in name and "p_kl," not in name]),
}


def step(case: Case, settings: dict[str, Any], layout: dict[str, Any], rows: tuple[int, ...]) -> dict[str, Any]:
    """Loss, gradient norm and all gradients after clipping, those of the loss's own parameters included."""
    loss = loss_of(case)
    student = student_of(case, layout, settings, extra_parameters=list(loss.parameters()))
    named = (*student.model.named_parameters(), *loss.named_parameters())
    names, gradients = {id(p): name for name, p in named}, {}

    def keep(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            gradients.update({names[id(p)]: whole(p.grad).clone() for p in group["params"]})

    assert student.optimizer is not None
    student.optimizer.register_step_pre_hook(keep)
    out = student.train(batch(case, rows), loss, teachers=teachers_of(case, layout), mbs=case.mbs)
    after = student.train(batch(case, rows), loss, teachers=teachers_of(case, layout), mbs=case.mbs, eval_mode=True)
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


def test_a_projection_has_a_gradient_to_compare() -> None:
    for name in (n for n in CASES if "learnable" in n):
        assert float(alone(name)["gradients"]["teachers.0.vocab.log_weight"].abs().max()) > 1e-6, name
