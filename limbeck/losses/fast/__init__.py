"""Chooses between kernels and plain torch: which micro-batches the kernels cover. Imports no kernel, so it can
be asked where Triton is not installed."""

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
from limbeck.losses.fast.position_order import PositionOrder, order_positions
from limbeck.losses.fast.tree_positions import plan_trees
from limbeck.losses.objectives.base import Objective
from limbeck.losses.objectives.tree_kl import TreeKL
from limbeck.losses.signals import Head, TeacherHidden, TeacherOutput

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


def _can_read(signal: TeacherOutput) -> bool:
    return signal.is_topk or (isinstance(signal, TeacherHidden) and _is_plain(signal.head))


def _can_do(term: TeacherTerm) -> bool:
    """One teacher that the kernels can read, and an objective that they know."""
    signals, objective = term.teacher.signals, term.objective
    # a gate asks for the probability of every realised token, at temperature 1
    by_token = objective.lane_kinds == ("first", "first") or objective.vocab is None
    gate_known = by_token and objective.temperature == 1.0
    if (term.gated and not gate_known) or len(signals) != 1:
        return False
    return _can_read(signals[0]) and objective.has_kernels(topk=signals[0].is_topk)


def plan_orders(
    choice: FastPath,
    objectives: Sequence[Objective],
    tokens: TokenLayout,
    layouts: Sequence[ChunkLayout],
    block_rows: int | None,
    shards: int = 1,
) -> tuple[PositionOrder, ...] | None:
    """The kernels' order of a micro-batch, on the CPU, where they may come to be used: one for every teacher, of which
    the first has the tokens under cross-entropy. shards: ranks among which the student's vocabulary is divided; each is
    given as many blocks as any other."""
    has_device = torch.cuda.is_available() and triton_available()
    if choice == "off" or (choice == "auto" and not has_device):
        return None
    if not objectives:
        alone = order_positions(("first", "first"), tokens, layouts, None, block_rows, shards)
        return None if alone is None else (alone,)
    orders: list[PositionOrder] = []
    for objective, layout in zip(objectives, layouts, strict=True):
        order = _teacher_order(objective, TokenLayout.empty() if orders else tokens, layout, block_rows, shards)
        if order is None:
            return None
        orders.append(order)
    return tuple(orders)


def _teacher_order(
    objective: Objective, tokens: TokenLayout, layout: ChunkLayout, block_rows: int | None, shards: int
) -> PositionOrder | None:
    vocab = objective.vocab
    sizes = None if vocab is None else (vocab.student_size, vocab.teacher_size)
    order = order_positions(objective.lane_kinds, tokens, [layout], sizes, block_rows, shards)
    if order is None or not isinstance(objective, TreeKL):
        return order
    return _with_trees(order, objective) if objective.has_kernels(topk=False) else None


def _with_trees(order: PositionOrder, objective: TreeKL) -> PositionOrder:
    positions = []
    for block, ordered in zip(order.blocks, order.positions, strict=True):
        if ordered.teacher is not None:
            (chunks,) = block.chunks
            extra = ordered.student.extra_first, ordered.teacher.extra_first
            chunk_order = ordered.order_C - chunks.chunks[0]
            ordered = replace(ordered, trees=plan_trees(objective, chunks, chunk_order, ordered.single, extra))
        positions.append(ordered)
    return replace(order, positions=tuple(positions))


def usable_orders(
    choice: FastPath,
    orders: tuple[PositionOrder, ...] | None,
    hidden_RH: Tensor,
    head: Head,
    terms: Sequence[TeacherTerm],
) -> tuple[PositionOrder, ...] | None:
    """The orders if the kernels can do this micro-batch; None: the plain path does it."""
    forced = choice == "force"
    if choice == "off" or not (forced or (hidden_RH.device.type == "cuda" and triton_available())):
        return None
    if (
        orders is not None
        and hidden_RH.dtype in FAST_TYPES
        and _is_plain(head)
        and all(_can_do(term) for term in terms)
    ):
        return orders
    names = ", ".join(term.objective.mode for term in terms)
    if forced:
        raise LossError(
            f"fast_path is 'force' but the kernels do not cover mode {names!r} with these settings, teachers "
            "and heads; use 'auto'"
        )
    _warn_once(names)
    return None


@functools.cache
def _warn_once(modes: str) -> None:
    logger.warning(
        "the kernels do not cover mode %r with these settings, teachers and heads: plain torch computes the loss, "
        "slower and with more memory",
        modes,
    )


def run_blocks(run: BlockRun, hidden_RH: Tensor, orders: tuple[PositionOrder, ...] | None) -> Tensor:
    """Loss of a run, by the kernels where there are orders: teacher after teacher, each with logits of its own. Not yet
    verified, see `blocks.verify`."""
    if orders is None:
        return row_block_loss(run, hidden_RH, check=False)
    # here, since it imports Triton, which a machine without kernels need not have
    from limbeck.losses.fast.fused_loss import fast_row_block_loss

    if len(orders) == 1:
        return fast_row_block_loss(run, orders[0], hidden_RH)
    losses = []
    for term, order in zip(run.terms, orders, strict=True):
        # cross-entropy counts once, in the first teacher's part
        factor = 0.0 if run.parts else run.token_factor
        part = replace(
            run, blocks=order.blocks, token_factor=factor, terms=[replace(term, index=0)], metrics={}, parts=[]
        )
        run.parts.append(part)
        losses.append(fast_row_block_loss(part, order, hidden_RH))
        run.add("", part.metrics)
    return torch.stack(losses).sum()
