"""One training step in every way that must give the same numbers, and processes that take it together."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from limbeck.algorithms.validation import teacher_bits
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.contract import Teacher
from limbeck.losses.objectives import ObjectiveConfig
from limbeck.losses.signals import TeacherHidden, TeacherTopK
from limbeck.models.language_model import score_rows
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from tests.helpers.processes import free_port, ranks
from tests.helpers.tiny import LLAMA, QWEN3, TEXTS, config, projection, tokenizer
from tests.patience import WAIT_SECONDS

SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}


@dataclass(frozen=True)
class Case:
    """A loss and a way of cutting the batch. ``teachers``: ``cross`` (another tokenizer) or ``same``."""

    loss: dict[str, Any] = field(default_factory=dict)
    teachers: tuple[str, ...] = ("cross",)
    mbs: int = 4
    packed: bool = False
    student: dict[str, Any] = field(default_factory=lambda: dict(LLAMA))
    teacher: dict[str, Any] = field(default_factory=dict)
    """What the teachers' models have differently."""
    topk: int = 0
    """Teachers hand out so many tokens per row, as a cache would; 0: everything."""
    rows: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2, 3), (4, 5))
    """Rows of the first and the second data-parallel rank."""


CASES: dict[str, Case] = {
    "boundary_kl": Case(),
    "one row at a time": Case(mbs=1),
    "packed": Case(packed=True),
    "packed, tied Qwen3": Case({"mode": "uld"}, packed=True, student=QWEN3),
    "two teachers": Case({"direction": "reverse"}, teachers=("cross", "same"), mbs=1),
    "p_kl": Case({"mode": "p_kl"}),
    "same vocabulary": Case({"direction": "jsd"}, teachers=("same",), student=QWEN3),
    "same vocabulary, top-k": Case({"topk": 9}, teachers=("same",)),
    "gold": Case({"mode": "gold", "uncommon_topk": 50}),
    "h_kl": Case({"mode": "h_kl", "temperature": 2.0}),
    "uld": Case({"mode": "uld"}),
    "alm": Case({"mode": "alm"}, packed=True),
    "strict": Case({"mode": "strict", "span_weight": 0.1}),
    "strict, all shared": Case({"mode": "strict", "strict_topk": None, "strict_rest": True}),
    "stored top-k": Case(teachers=("cross",), topk=16),
    "tree_kl, stored top-k": Case({"mode": "tree_kl"}, topk=16),
    "cross-entropy alone": Case(teachers=()),
    "an empty rank": Case(rows=((0, 1, 2, 3, 4, 5), ())),
    "a rank without chunks": Case(teachers=("cross",), rows=((0, 1), (-1,))),
}


@functools.cache
def _collator(teachers: tuple[str, ...]) -> CrossTokenizerCollator:
    return CrossTokenizerCollator(
        student_tokenizer=tokenizer(300),
        teacher_tokenizer=[tokenizer(340) if kind == "cross" else None for kind in teachers] or None,
        ctx_length_student=64,
        ctx_length_teacher=64,
        append_eos=True,
    )


def batch(case: Case, rows: tuple[int, ...]) -> BatchedDataDict:
    """Rows of a case; -1 stands for a row that counts for nothing."""
    records = [{"text": TEXTS[i], "idx": i, "loss_multiplier": float(i >= 0)} for i in rows or (0,)]
    whole = _collator(case.teachers)(records)
    return whole if rows else whole.slice(0, 0)


def student_of(case: Case, layout: dict[str, Any], settings: dict[str, Any] | None = None, **more: Any) -> Policy:
    """The student of a case under a layout (keys of ``dtensor_cfg``)."""
    if dist.is_initialized():
        more["dp_group"] = dist.group.WORLD
    packing = {"enabled": case.packed, "train_mb_tokens": 128}
    whole = {"optimizer": SGD, "sequence_packing": packing, "max_grad_norm": 0.5, **(settings or {})}
    return Policy(
        config(case.student, dtensor_cfg=layout, **whole), tokenizer(300), device="cpu", seed=0, name="student", **more
    )


class TopKTeacher(Teacher):
    """A live teacher that says no more than a cache would."""

    def __init__(self, live: LiveTeacher, k: int) -> None:
        self.live, self.k, self.vocab_size = live, k, live.vocab_size
        self.attach, self.release = live.attach, live.release  # type: ignore[method-assign]

    def log_probs(self, batch: Any) -> torch.Tensor:
        return self.live.log_probs(batch)

    def signal(self, mb: Any, device: torch.device) -> TeacherTopK:
        self.live.number = self.number
        full = self.live.signal(mb, device)
        assert isinstance(full, TeacherHidden)
        following = torch.cat((full.input_ids[1:], full.input_ids.new_full((1,), -1)))
        scores = score_rows(full.hidden, full.head, following, k=self.k)
        stored = (scores.topk_ids, scores.topk_logprobs, scores.next_logprob, following)
        return TeacherTopK(*stored, vocab_size=self.vocab_size, row_start_B=full.row_start_B)


def teachers_of(case: Case, layout: dict[str, Any] | list[dict[str, Any]]) -> list[Any]:
    """The teachers of a case, all under one layout or each under its own."""
    out: list[Any] = []
    for i, kind in enumerate(case.teachers):
        tok, arch = (tokenizer(340), QWEN3) if kind == "cross" else (tokenizer(300), LLAMA)
        own = layout[i] if isinstance(layout, list) else layout
        settings = config({**arch, **case.teacher}, dtensor_cfg=own)
        live = LiveTeacher(Policy(settings, tok, device="cpu", seed=1 + i, name="teacher", init_optimizer=False))
        out.append(TopKTeacher(live, case.topk) if case.topk else live)
    return out


def loss_of(case: Case, objectives: list[ObjectiveConfig] | None = None) -> CrossTokenizerDistillationLossFn:
    maps = [projection() if kind == "cross" else None for kind in case.teachers]
    settings = {"mode": "boundary_kl", "block_rows": 40, **case.loss}
    loss_fn = CrossTokenizerDistillationLossFn(settings, projections=maps, teacher_objectives=objectives)
    if loss_fn.counts_ends:
        loss_fn.count_token_ends([loss_fn.select_chunks(batch(case, tuple(range(len(TEXTS)))))])
    return loss_fn


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def step(
    case: Case,
    layout: dict[str, Any],
    rows: tuple[int, ...],
    teacher_layout: dict[str, Any] | list[dict[str, Any]] | None = None,
    objectives: list[ObjectiveConfig] | None = None,
) -> dict[str, Any]:
    """Loss, gradient norm, metrics and gradients (after clipping) of one step over ``rows``; scores before it."""
    student, teachers = (
        student_of(case, layout),
        teachers_of(case, layout if teacher_layout is None else teacher_layout),
    )
    gradients: dict[str, torch.Tensor] = {}
    names = {id(p): n for n, p in student.model.named_parameters()}

    def keep(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            gradients.update({names[id(p)]: whole(p.grad).clone() for p in group["params"]})

    assert student.optimizer is not None
    student.optimizer.register_step_pre_hook(keep)
    data = batch(case, rows)
    scores = student.get_logprobs(data)["logprobs"].sum(1).tolist()
    held = student.train(data, loss_of(case, objectives), teachers=teachers, mbs=case.mbs, eval_mode=True)
    out = student.train(data, loss_of(case, objectives), teachers=teachers, mbs=case.mbs)
    kept = {k: out[k] for k in ("loss", "grad_norm", "metrics", "tokens")}
    scored = dict(zip(rows, scores, strict=True))
    bits = teacher_bits(student, teachers, [data])
    return {**kept, "gradients": gradients, "held_out": held["loss"], "scores": scored, "bits": bits}


def close(found: Any, expected: Any, what: str, floor: float = 1e-9) -> None:
    """Equal to 1e-5, relative to the entry or to the largest one."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()) + floor, msg=lambda m: f"{what}: {m}")


def _main(rank: int, world: int, port: int, work: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=WAIT_SECONDS))
    try:
        result = work(rank, world, *args)
        torch.save(result, Path(folder) / f"rank_{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def together(world: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """``work(rank, world, *args)`` in processes of one gloo group; what each returned."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks(world, _main, world, free_port(), work, str(folder), args)
    return [torch.load(folder / f"rank_{r}.pt", weights_only=True) for r in range(world)]
