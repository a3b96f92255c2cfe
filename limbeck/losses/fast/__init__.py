"""The gate: which micro-batches the kernels can do. Imports none of them, so it can be asked where Triton is not
installed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.errors import LossError
from limbeck.losses.blocks import BlockRun, TeacherTerm, row_block_loss
from limbeck.losses.fast.order import Lanes, lanes_for
from limbeck.losses.fast.trees import plan_trees
from limbeck.losses.objectives.base import Objective
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.signals import Head, HiddenSignal, Signal

logger = logging.getLogger(__name__)

FastPath = Literal["auto", "off", "force"]
FAST_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_available() -> bool:
    """Whether Triton can be imported, without importing it."""
    return find_spec("triton") is not None


def _is_plain(head: Head) -> bool:
    """A bare matrix: no bias, no softcap, no scale, no wrapper; whole, or divided among ranks."""
    if head.weight is None or head.module is not None or head.bias is not None:
        return False
    return not head.softcap and head.scale == 1.0 and head.weight.dtype in FAST_TYPES


def _can_read(signal: Signal) -> bool:
    return signal.is_topk or (isinstance(signal, HiddenSignal) and _is_plain(signal.head))


def _can_do(term: TeacherTerm) -> bool:
    """One teacher that the kernels can read, with fixed weights, and an objective that they know."""
    signals, objective = term.teacher.signals, term.objective
    # a gate asks for the probability of every realised token, at temperature 1
    open_gate = objective.options.gate == "none"
    by_token = objective.lanes == ("first", "first") or objective.vocab is None
    gate_known = by_token and objective.temperature == 1.0
    if not (open_gate or gate_known) or len(signals) != 1 or any(weight.requires_grad for weight in term.learned):
        return False
    return _can_read(signals[0]) and objective.has_kernels(topk=signals[0].is_topk)


def plan_lanes(
    choice: FastPath,
    objectives: Sequence[Objective],
    tokens: TokenLayout,
    layouts: Sequence[ChunkLayout],
    block_rows: int | None,
    shards: int = 1,
) -> tuple[Lanes, ...] | None:
    """The kernels' order of a micro-batch, on the CPU, where they may come to be used: one for every teacher, of which
    the first has the tokens under cross-entropy. shards: ranks among which the student's vocabulary is divided; each is
    given as many blocks as any other."""
    here = torch.cuda.is_available() and triton_available()
    if choice == "off" or (choice == "auto" and not here):
        return None
    if not objectives:
        alone = lanes_for(("first", "first"), tokens, layouts, None, block_rows, shards)
        return None if alone is None else (alone,)
    found: list[Lanes] = []
    for objective, layout in zip(objectives, layouts, strict=True):
        own = _teacher_lanes(objective, TokenLayout.empty() if found else tokens, layout, block_rows, shards)
        if own is None:
            return None
        found.append(own)
    return tuple(found)


def _teacher_lanes(
    objective: Objective, tokens: TokenLayout, layout: ChunkLayout, block_rows: int | None, shards: int
) -> Lanes | None:
    vocab = objective.vocab
    sizes = None if vocab is None else (vocab.student_size, vocab.teacher_size)
    lanes = lanes_for(objective.lanes, tokens, [layout], sizes, block_rows, shards)
    if lanes is None or not isinstance(objective, TreeKL):
        return lanes
    return _with_trees(lanes, objective) if objective.has_kernels(topk=False) else None


def _with_trees(lanes: Lanes, objective: TreeKL) -> Lanes:
    found = []
    for block, own in zip(lanes.blocks, lanes.lanes, strict=True):
        if own.teacher is not None:
            (chunks,) = block.chunks
            extra = own.student.extra_first, own.teacher.extra_first
            order = own.order_C - chunks.chunks[0]
            own = replace(own, trees=plan_trees(objective, chunks, order, own.single, extra))
        found.append(own)
    return replace(lanes, lanes=tuple(found))


def usable_lanes(
    choice: FastPath, lanes: tuple[Lanes, ...] | None, hidden_RH: Tensor, head: Head, terms: Sequence[TeacherTerm]
) -> tuple[Lanes, ...] | None:
    """The lanes if the kernels can do this micro-batch; None: the plain path does it."""
    forced = choice == "force"
    if choice == "off" or not (forced or (hidden_RH.device.type == "cuda" and triton_available())):
        return None
    if lanes is not None and hidden_RH.dtype in FAST_TYPES and _is_plain(head) and all(_can_do(term) for term in terms):
        return lanes
    names = ", ".join(term.objective.mode for term in terms)
    if forced:
        raise LossError(
            f"fast_path is 'force' but the kernels do not cover mode {names!r} with these settings, teachers "
            "and heads; use 'auto'"
        )
    _tell_once(names)
    return None


@functools.cache
def _tell_once(modes: str) -> None:
    logger.warning(
        "the kernels do not cover mode %r with these settings, teachers and heads: plain torch computes the loss, "
        "slower and with more memory",
        modes,
    )


def run_blocks(run: BlockRun, hidden_RH: Tensor, lanes: tuple[Lanes, ...] | None) -> Tensor:
    """Loss of a run, by the kernels where there are lanes: teacher after teacher, each with logits of its own. Not yet
    verified, see `blocks.verify`."""
    if lanes is None:
        return row_block_loss(run, hidden_RH, check=False)
    from limbeck.losses.fast.walk import fast_row_block_loss

    if len(lanes) == 1:
        return fast_row_block_loss(run, lanes[0], hidden_RH)
    losses = []
    for term, own in zip(run.terms, lanes, strict=True):
        factor = 0.0 if run.parts else run.token_factor
        part = replace(
            run, blocks=own.blocks, token_factor=factor, terms=[replace(term, index=0)], metrics={}, parts=[]
        )
        run.parts.append(part)
        losses.append(fast_row_block_loss(part, own, hidden_RH))
        run.add("", part.metrics)
    return torch.stack(losses).sum()
