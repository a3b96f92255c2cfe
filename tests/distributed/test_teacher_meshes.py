"""Teachers on meshes of their own: whatever their layout, the student gets the numbers of one process (1e-5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import Case, batch, close, loss_of, step, student_of, teachers_of, together
from tests.helpers.tiny import LLAMA

pytestmark = pytest.mark.slow

SPLIT: dict[str, Any] = {"sequence_parallel": True}
FSDP: dict[str, Any] = {"fsdp": True}
EMPTY = ((0, 1, 2, 3, 4, 5), ())
# four heads of keys, so that four ranks can split them
WIDE: dict[str, Any] = {"student": {**LLAMA, "num_key_value_heads": 4}, "teacher": {"num_key_value_heads": 4}}
SIX: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}


def tp(size: int) -> dict[str, Any]:
    return {"tensor_parallel_size": size}


def cp(size: int) -> dict[str, Any]:
    return {"context_parallel_size": size}


# name: (processes, layout of the student, layout of each teacher, case)
RUNS: dict[str, tuple[int, dict[str, Any], list[dict[str, Any]], Case]] = {
    "data, teacher tensor": (2, {}, [tp(2)], Case()),
    "data, teacher tensor, packed, row by row": (2, {}, [tp(2)], Case({"mode": "alm"}, packed=True, mbs=1)),
    "data, teacher tensor, gold": (2, {}, [tp(2)], Case({"mode": "gold", "uncommon_topk": 50})),
    "data, teacher tensor, p_kl": (2, {}, [tp(2)], Case({"mode": "p_kl"}, rows=EMPTY)),
    "data, teacher tensor, top-k": (2, {}, [tp(2)], Case(topk=16)),
    "data, teacher context": (2, {}, [cp(2)], Case({"direction": "reverse"}, mbs=1)),
    "data, teacher context, same vocabulary": (2, {}, [cp(2)], Case(teachers=("same",), rows=((0, 1), (-1,)))),
    "data, teacher context, packed": (2, {}, [cp(2)], Case(packed=True)),
    "tensor, teacher context, packed": (2, tp(2), [cp(2)], Case({"direction": "jsd"}, ("same",), packed=True)),
    "fsdp, teacher tensor": (2, FSDP, [tp(2)], Case(teachers=("same",), rows=EMPTY)),
    "tensor, teacher context": (2, tp(2), [cp(2)], Case()),
    "data, teacher split sequences, same vocabulary": (2, {}, [{**tp(2), **SPLIT}], Case(teachers=("same",), mbs=1)),
    "context, teacher tensor": (2, cp(2), [tp(2)], Case({"mode": "gold"})),
    "two teachers, two layouts": (2, {}, [tp(2), FSDP], Case(teachers=("cross", "same"), mbs=1)),
    "data x tensor, teacher tensor 4": (4, tp(2), [tp(4)], Case(**WIDE)),
    "tensor 4, teacher tensor 2": (4, tp(4), [tp(2)], Case({"mode": "uld"}, packed=True, **WIDE)),
    "fsdp x tensor, teacher context x tensor": (4, {**FSDP, **tp(2)}, [{**cp(2), **tp(2)}], Case(rows=EMPTY)),
    "fsdp, teacher fsdp x tensor": (4, FSDP, [{**FSDP, **tp(2)}], Case({"mode": "p_kl"}, mbs=1)),
    "data x context, teachers tensor 4 and fsdp x tensor 2": (
        4,
        cp(2),
        [tp(4), {**FSDP, **tp(2)}],
        Case({"mode": "alm"}, teachers=("cross", "same"), **WIDE),
    ),
    "data 3 x tensor 2, teacher data 2 x tensor 3": (
        6,
        tp(2),
        [{**FSDP, **tp(3)}],
        Case(
            student={**LLAMA, **SIX},
            teacher={**SIX, "vocab_size": 342},
        ),
    ),
}


def readers(world: int, layout: dict[str, Any]) -> int:
    return world // (layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1))


def rows_of(case: Case, place: int, places: int) -> tuple[int, ...]:
    """Rows of one of several readers: the case's two shares, dealt out further where there are more."""
    share = case.rows[0] + case.rows[1] if places == 1 else case.rows[place % 2]
    return share if places == 1 else share[place // 2 :: (places + 1 - place % 2) // 2]


def work(rank: int, world: int) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, (processes, layout, teachers, case) in RUNS.items():
        if processes == world:
            places = readers(world, layout)
            out[name] = step(case, layout, rows_of(case, rank * places // world, places), teachers)
    return {**out, "heads kept": heads_kept(rank)} if world == 2 else out


def heads_kept(rank: int) -> dict[str, list[bool]]:
    """Whether gathered heads (of the student, the teachers) are still there after each kind of call."""
    case = Case(teachers=("cross", "same"))
    student, teachers = student_of(case, FSDP), teachers_of(case, [FSDP, tp(2)])
    data, models = batch(case, case.rows[rank]), [student, *(teacher.policy for teacher in teachers)]
    calls: dict[str, Callable[[], Any]] = {
        "held out": lambda: student.train(data, loss_of(case), teachers=teachers, eval_mode=True),
        "trained": lambda: student.train(data, loss_of(case), teachers=teachers),
        "scored": lambda: student.get_logprobs(data),
        "teacher scored": lambda: [teacher.log_probs(data) for teacher in teachers],
    }
    kept: dict[str, list[bool]] = {"made": []}
    for name, call in calls.items():
        call()
        kept[name] = [bool(gathered(model)) for model in models]
        if name == "held out":
            models[0].head()
            models[1].head()
            models[2].head(whole=True)
            kept["made"] = [bool(gathered(model)) for model in models]
    return kept


def gathered(model: Any) -> list[torch.Tensor]:
    return [t for t in (model.sharding._leaf, model.sharding._whole) if t is not None]


@functools.cache
def alone(name: str) -> dict[str, Any]:
    case = RUNS[name][3]
    return step(case, {}, case.rows[0] + case.rows[1])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("meshes")
    return {world: together(world, work, folder / str(world)) for world in sorted({run[0] for run in RUNS.values()})}


@pytest.mark.parametrize("name", RUNS)
def test_the_teachers_layout_changes_nothing(outcome: Any, name: str) -> None:
    expected = alone(name)
    for rank, results in enumerate(outcome[RUNS[name][0]]):
        found = results[name]
        for key in ("loss", "held_out", "grad_norm", "tokens"):
            close(found[key], expected[key], f"rank {rank}: {key}")
        for key in ("metrics", "gradients", "bits"):
            assert set(found[key]) == set(expected[key])
            for inner, value in expected[key].items():
                close(found[key][inner], value, f"rank {rank}: {inner}")


def test_gathered_heads_do_not_outlive_a_step(outcome: Any) -> None:
    for results in outcome[2]:
        kept = dict(results["heads kept"])
        assert kept.pop("made") == [True, True, True]
        assert not any(flag for flags in kept.values() for flag in flags), kept


def test_rows_are_dealt_out_once() -> None:
    for places in (1, 2, 3, 4):
        dealt = [row for place in range(places) for row in rows_of(Case(), place, places)]
        assert sorted(dealt) == [0, 1, 2, 3, 4, 5]
