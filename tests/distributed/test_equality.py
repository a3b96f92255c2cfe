"""One denominator: every layout takes the step that one process takes (float32, 1e-5 relative), on real processes.

The matrix: data 2, tensor 2, context 2 and data 2 x tensor 2, each with every loss mode, one and two teachers, and
micro-batches of one row, of four rows and packed. Beside it, cases that the matrix has no place for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.data.batched_data_dict import BatchedDataDict, SlicedDataDict
from limbeck.data.microbatch import plan_microbatches
from limbeck.models.policy import Policy
from tests.distributed.cases import CASES, Case, batch, close, loss_of, step, student_of, teachers_of, together, whole
from tests.helpers.tiny import LLAMA

pytestmark = pytest.mark.slow

TENSOR, CONTEXT, FSDP = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {"fsdp": True}
EMPTY = ["an empty rank", "a rank without chunks"]
MATRIX: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "tensor": (2, TENSOR),
    "context": (2, CONTEXT),
    "data x tensor": (4, TENSOR),
}
MODES: dict[str, dict[str, Any]] = {
    "boundary_kl": {},
    "alm": {"mode": "alm"},
    "uld": {"mode": "uld"},
    "p_kl": {"mode": "p_kl", "vocab_topk": 64},
    "gold": {"mode": "gold", "uncommon_topk": 50},
    "h_kl": {"mode": "h_kl", "temperature": 2.0},
    "tree_kl": {"mode": "tree_kl", "gate": "soft"},
    "tree_kl, counted": {"mode": "tree_kl", "condition": "counted"},
}
TEACHERS: dict[str, tuple[str, ...]] = {"one teacher": ("cross",), "two teachers": ("cross", "same")}
BATCHES: dict[str, dict[str, Any]] = {"rows of 1": {"mbs": 1}, "rows of 4": {"mbs": 4}, "packed": {"packed": True}}

# name: (processes, layout of the student, layout of the teachers, cases)
OTHERS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    "data": (2, {}, {}, ["packed, tied Qwen3", "stored top-k", "cross-entropy alone", *EMPTY]),
    "fsdp": (2, FSDP, FSDP, ["one row at a time", "packed, tied Qwen3", "two teachers", "alm", *EMPTY]),
    "tensor": (
        2,
        TENSOR,
        TENSOR,
        [
            "packed, tied Qwen3",
            "same vocabulary",
            "same vocabulary, top-k",
            "stored top-k",
            "tree_kl, stored top-k",
            "strict",
            "strict, all shared",
        ],
    ),
    "tensor, whole teachers": (2, TENSOR, {}, ["boundary_kl", "gold"]),
    "context": (
        2,
        CONTEXT,
        CONTEXT,
        ["same vocabulary", "stored top-k", "cross-entropy alone"],
    ),
    "context, whole teachers": (2, CONTEXT, {}, ["boundary_kl"]),
    "data x tensor": (4, TENSOR, TENSOR, EMPTY),
    "fsdp x tensor": (4, {**FSDP, **TENSOR}, {**FSDP, **TENSOR}, ["one row at a time", "packed, tied Qwen3", *EMPTY]),
    "data x tensor, fsdp teachers": (4, TENSOR, FSDP, ["two teachers"]),
    "fsdp x context": (4, {**FSDP, **CONTEXT}, CONTEXT, ["two teachers", "an empty rank"]),
    "context x tensor": (4, {**CONTEXT, **TENSOR}, TENSOR, ["boundary_kl"]),
}

Cell = tuple[str, str, str]
CELLS: list[Cell] = list(itertools.product(MODES, TEACHERS, BATCHES))


# the other cases have two layers
ONE_LAYER = {"num_hidden_layers": 1}


def case_of(cell: Cell) -> Case:
    mode, teachers, batches = cell
    # larger blocks than elsewhere: split vocabularies talk in each of them
    loss = {**MODES[mode], "block_rows": 80}
    return Case(loss, teachers=TEACHERS[teachers], student={**LLAMA, **ONE_LAYER}, **BATCHES[batches])


class Rig:
    """One student per way of batching and one set of teachers, for all cells of a layout: a rate of 0 moves nothing."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self.students: dict[bool, Policy] = {}
        self.teachers = teachers_of(Case(teachers=TEACHERS["two teachers"], teacher=ONE_LAYER), layout)

    def student(self, case: Case) -> Policy:
        if case.packed not in self.students:
            still = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.0}}}
            self.students[case.packed] = student_of(case, self.layout, still)
        return self.students[case.packed]

    def step(self, case: Case, data: BatchedDataDict) -> dict[str, Any]:
        """Loss, gradient norm, metrics and gradients (after clipping)."""
        student = self.student(case)
        assert student.optimizer is not None
        names = {id(p): n for n, p in student.model.named_parameters()}
        gradients: dict[str, torch.Tensor] = {}

        def keep(optimizer: Any, *_: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            gradients.update({names[id(p)]: whole(p.grad).clone() for p in params})

        hook = student.optimizer.register_step_pre_hook(keep)
        out = student.train(data, loss_of(case), teachers=self.teachers[: len(case.teachers)], mbs=case.mbs)
        hook.remove()
        return {**{k: out[k] for k in ("loss", "grad_norm", "metrics", "tokens")}, "gradients": gradients}


def reader_rows(case: Case, readers: int) -> list[tuple[int, ...]]:
    """Rows of every rank that reads data."""
    return [case.rows[0] + case.rows[1]] if readers == 1 else list(case.rows)


def readers_of(layout: dict[str, Any], world: int) -> int:
    return world // (layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1))


def work(rank: int, world: int) -> dict[str, dict[Any, dict[str, Any]]]:
    out: dict[str, dict[Any, dict[str, Any]]] = {}
    for name, (processes, layout) in MATRIX.items():
        if processes != world:
            continue
        rig, readers = Rig(layout), readers_of(layout, world)
        for cell in CELLS:
            case = case_of(cell)
            rows = reader_rows(case, readers)[rank * readers // world]
            out.setdefault(name, {})["/".join(cell)] = rig.step(case, batch(case, rows))
    for name, (processes, layout, teachers, cases) in OTHERS.items():
        readers = readers_of(layout, world)
        for case_name in cases if processes == world else []:
            case = CASES[case_name]
            rows = reader_rows(case, readers)[rank * readers // world]
            out.setdefault(name, {})[case_name] = step(case, layout, rows, teachers)
    return out


@functools.cache
def lone_rig() -> Rig:
    return Rig({})


def planned(case: Case, parts: list[tuple[int, ...]]) -> BatchedDataDict:
    """All rows in one process, in the micro-batches that several readers would make of theirs."""
    data = batch(case, sum(parts, ()))
    if not case.packed:
        return data
    cfg, plan, done = lone_rig().student(case).cfg, [], 0
    for rows in parts:
        plan += [[done + i for i in items] for items in plan_microbatches(batch(case, rows), cfg, case.mbs)]
        done += len(rows)
    out: SlicedDataDict = SlicedDataDict(data.data)
    out.microbatch_bins = [plan]
    return out


@functools.cache
def alone_in_cell(cell: Cell, readers: int) -> dict[str, Any]:
    case = case_of(cell)
    return lone_rig().step(case, planned(case, reader_rows(case, readers)))


@functools.cache
def alone(case_name: str) -> dict[str, Any]:
    case = CASES[case_name]
    return step(case, {}, case.rows[0] + case.rows[1])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[Any, dict[str, Any]]]]]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("equality")
    return {world: together(world, work, folder / str(world)) for world in (2, 4)}


def check(found: dict[str, Any], expected: dict[str, Any], rank: int) -> None:
    for name in ("loss", "held_out", "grad_norm", "tokens"):
        if name in expected:
            close(found[name], expected[name], f"rank {rank}: {name}")
    for part in ("metrics", "gradients"):
        assert set(found[part]) == set(expected[part])
        for name, value in expected[part].items():
            close(found[part][name], value, f"rank {rank}: {part} {name}")
    for row, score in found.get("scores", {}).items():
        close(score, expected["scores"][row], f"rank {rank}: scores of row {row}")


def matrix() -> Iterator[Any]:
    for layout, cell in itertools.product(MATRIX, CELLS):
        yield pytest.param(layout, cell, id=", ".join((layout, *cell)))


@pytest.mark.parametrize(("layout", "cell"), matrix())
def test_the_matrix(outcome: Any, layout: str, cell: Cell) -> None:
    world, sizes = MATRIX[layout]
    expected = alone_in_cell(cell, readers_of(sizes, world))
    for rank, results in enumerate(outcome[world]):
        check(results[layout]["/".join(cell)], expected, rank)


def test_the_matrix_is_not_empty_handed() -> None:
    """Every cell has a teacher's loss and a gradient, and the modes differ: equality is not that of zeros."""
    found = {cell: alone_in_cell(cell, 1) for cell in CELLS}
    for cell, result in found.items():
        assert abs(result["metrics"]["kl_loss"][0]) > 1e-3, cell
        assert result["grad_norm"] > 1e-2, cell
    losses = [round(found[mode, "one teacher", "rows of 4"]["loss"], 6) for mode in MODES]
    assert len(set(losses)) == len(MODES)


@pytest.mark.parametrize(("layout", "case"), [(n, c) for n, entry in OTHERS.items() for c in entry[3]])
def test_other_cases(outcome: Any, layout: str, case: str) -> None:
    expected = alone(case)
    for rank, results in enumerate(outcome[OTHERS[layout][0]]):
        check(results[layout][case], expected, rank)
