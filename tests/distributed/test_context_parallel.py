"""Sequences split over ranks: packed documents, sliding windows and losses that look at whole
micro-batches take the step that one process takes (float32, 1e-5 relative), on real processes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.config import load_config
from limbeck.distributed import attention
from limbeck.distributed.attention import GatheredAttention, Span, SplitSequences, VarlenKernel, query_spans
from limbeck.distributed.comm import Comm
from tests.distributed.cases import Case, close, step, together
from tests.helpers import runs
from tests.helpers.tiny import LLAMA, QWEN3
from tests.models.test_varlen import plain_kernel

CONTEXT, TENSOR, FSDP = {"context_parallel_size": 2}, {"tensor_parallel_size": 2}, {"fsdp": True}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 9}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
MIXED = {
    **QWEN3,
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
    "tie_word_embeddings": False,
}

P_KL = {"mode": "p_kl", "vocab_topk": 20}

CASES: dict[str, Case] = {
    "padded": Case(),
    "packed": Case(packed=True, topk=16),
    "packed, tied": Case({"mode": "uld"}, packed=True, student=QWEN3),
    "two teachers": Case({"direction": "reverse"}, teachers=("cross", "same"), packed=True),
    "an empty rank": Case(packed=True, rows=((0, 1, 2, 3, 4, 5), ())),
    "a rank without chunks": Case(packed=True, rows=((0, 1), (-1,))),
    "windows": Case(student=MISTRAL, packed=True),
    "some layers with windows": Case(student=MIXED),
    "p_kl": Case(P_KL),
    "p_kl, shares without chunks": Case(P_KL, mbs=1, rows=((4,), ())),
    "p_kl, averaged": Case({**P_KL, "teacher_combination": "averaged_logits"}, teachers=("cross", "cross")),
    # random teachers differ little, so their scores are made to matter
    "scored by ce": Case({"teacher_scoring": "ce", "scoring_alpha": 100.0}, teachers=("same", "same")),
    "scored by entropy": Case({"teacher_scoring": "entropy", "scoring_alpha": 1e4}, teachers=("same", "same"), mbs=1),
    "scored by max_prob": Case(
        {"teacher_scoring": "max_prob", "scoring_alpha": 1e4}, teachers=("cross", "same"), packed=True
    ),
    "selected": Case({"teacher_combination": "select_teacher"}, teachers=("same", "same"), mbs=1),
}
EMPTY = ["an empty rank", "a rank without chunks"]
RECOMPUTED = {"activation_checkpointing": True}

# name: (processes, layout of the student, layout of the teachers, cases)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    "context": (2, CONTEXT, CONTEXT, [name for name in CASES if name not in ("windows", *EMPTY)]),
    "context, whole teachers": (2, CONTEXT, {}, ["two teachers"]),
    "context, recomputed": (2, {**CONTEXT, **RECOMPUTED}, CONTEXT, ["padded", "windows"]),
    "context of four": (4, {"context_parallel_size": 4}, {}, ["padded", "windows"]),
    "data x context": (4, CONTEXT, CONTEXT, ["two teachers", *EMPTY]),
    "fsdp x context": (4, {**FSDP, **CONTEXT}, {**FSDP, **CONTEXT}, ["packed, tied", "an empty rank"]),
    "context x tensor": (4, {**CONTEXT, **TENSOR}, {**CONTEXT, **TENSOR}, ["packed", "p_kl", "scored by ce"]),
    "context x sequence": (4, {**CONTEXT, **SEQUENCE}, CONTEXT, ["windows"]),
    "context x tensor, other teachers": (4, {**CONTEXT, **TENSOR}, TENSOR, ["padded"]),
}


# Of what two ranks do, one case of each kind in the fast tests.
QUICK = ["packed", "two teachers", "some layers with windows", "p_kl", "scored by max_prob"]


def is_quick(layout: str, case: str) -> bool:
    return layout == "context" and case in QUICK


def work(rank: int, world: int, quick: bool) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, (processes, layout, teachers, all_cases) in LAYOUTS.items():
        cases = [case for case in all_cases if processes == world and is_quick(name, case) == quick]
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
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], list[dict[str, dict[str, Any]]]]:
    """What each of so many ranks found in the quick cases, or in the others."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("context")
    return functools.cache(lambda world, quick: together(world, work, folder / f"{world}-{quick}", quick))


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(name, case, marks=() if is_quick(name, case) else pytest.mark.slow)
        for name, entry in LAYOUTS.items()
        for case in entry[3]
    ],
)
def test_split_sequences_take_the_same_step(outcome: Any, layout: str, case: str) -> None:
    expected = alone(case)
    for rank, results in enumerate(outcome(LAYOUTS[layout][0], is_quick(layout, case))):
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


def test_spans_of_a_piece() -> None:
    borders = [0, 3, 10, 12]
    assert query_spans((2, 8), borders, None, None) == [Span(2, 3, 0), Span(3, 8, 3)]
    assert query_spans((6, 12), borders, None, None) == [Span(6, 10, 3), Span(10, 12, 10)]
    # a window cuts keys off the front, and long spans are taken in steps
    assert query_spans((6, 12), borders, 2, None) == [Span(6, 10, 5), Span(10, 12, 10)]
    assert query_spans((4, 10), borders, 2, 3) == [Span(4, 7, 3), Span(7, 10, 6)]


class Alone(GatheredAttention):
    """Both pieces of a sequence on the only rank."""

    def __init__(self) -> None:
        super().__init__(Comm.alone())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("borders", [[0, 24], [0, 7, 8, 19, 24]])
def test_one_kernel_call_per_piece_is_the_loop_over_documents(
    monkeypatch: pytest.MonkeyPatch, window: int | None, borders: list[int]
) -> None:
    """The way of accelerators, with a plain kernel in place of flash: values and gradients."""
    monkeypatch.setattr(
        attention, "varlen_kernel", lambda: VarlenKernel(plain_kernel, frozenset({"enable_gqa", "window_size"}))
    )
    sequences = SplitSequences(Alone(), 24, borders)
    rows = 1 if len(borders) > 2 else 3
    inputs = [torch.randn(rows, heads, 24, 8, requires_grad=True) for heads in (4, 2, 2)]
    whole = [inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])]
    outputs: list[list[torch.Tensor]] = [[], []]
    for number, part in enumerate(inputs[0].chunk(2, 2)):
        piece = sequences.piece(number)
        spans = query_spans(piece, borders, window, None)
        args: dict[str, Any] = {"window": window, "scaling": None}
        outputs[0].append(attention._by_kernel(part, *inputs[1:], spans, sequences, **args))
        small = query_spans(piece, borders, window, None if window is None else 4)
        outputs[1].append(attention._by_span(part, *whole[1:], small, dropout=0.0, **args))
    found, wanted = (torch.cat(parts, 2) for parts in outputs)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("borders", [[0, 512], [0, 77, 78, 300, 512]])
def test_flash_attends_like_the_loop(window: int | None, borders: list[int]) -> None:
    sequences = SplitSequences(Alone(), 512, borders)
    inputs = [torch.randn(1, heads, 512, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    inputs = [x.requires_grad_() for x in inputs]
    whole = [x.repeat_interleave(2, 1) for x in inputs[1:]]
    args: dict[str, Any] = {"window": window, "scaling": 0.2}
    for number, part in enumerate(inputs[0].chunk(2, 2)):
        spans = query_spans(sequences.piece(number), borders, window, None)
        found = attention._by_kernel(part, *inputs[1:], spans, sequences, **args)
        wanted = attention._by_span(part, *whole, spans, dropout=0.0, **args)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        weight = torch.randn_like(found)
        grads = [torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (found, wanted)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def whole_run(rank: int, world: int, run: dict[str, Any]) -> None:
    resolve_and_run(run)


@pytest.mark.slow
def test_a_whole_run_counts_every_record_once(tmp_path: Path) -> None:
    """Packed, with texts that are cut: two ranks that read the same records leave the folder that one leaves."""
    packing = {"enabled": True, "train_mb_tokens": 96}
    run = load_config(runs.write_run(tmp_path))
    run["data"]["max_input_seq_length"] = 40
    run["policy"]["sequence_packing"] = packing
    run["distillation"]["max_num_steps"] = 2
    found = []
    for world, layout in ((1, {}), (2, CONTEXT), (2, TENSOR)):
        folder = tmp_path / "-".join(("run", *layout))
        run["logger"]["log_dir"] = str(folder)
        run["policy"]["dtensor_cfg"] = layout
        together(world, whole_run, tmp_path / "processes", run)
        found.append((json.loads((folder / "skipped.json").read_text()), runs.rows(folder)))
    assert sum(found[0][0].values()) > 0
    for skipped, rows in found[1:]:
        assert skipped == found[0][0]
        for one, other in zip(rows, found[0][1], strict=True):
            assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
