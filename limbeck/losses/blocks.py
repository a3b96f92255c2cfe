"""Head and loss in row blocks: forward and backward in one pass, nothing of rows x vocabulary outlives its block.

The denominators are known before the first micro-batch, so a block's gradient is final as soon as its logits exist:
it is written while the block is there, and the backward pass only scales it. Only rows that carry loss reach a head.

`token_log_probs` is the way for losses that are not a sum over rows: it keeps one number per token and computes each
block's logits again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.objectives.base import BlockLogits, ChunkBlock, Objective, Sums
from limbeck.losses.signals import Head, TeacherRows, compute_dtype

# ---- cutting ----


@dataclass(frozen=True)
class Block:
    """Some rows of a micro-batch. tokens: half-open range of its cross-entropy tokens in the layout; rows_N: flat
    student rows, ascending; token_row_E: place among them of each token, with its id and weight; chunks: one teacher's
    each."""

    tokens: tuple[int, int]
    rows_N: Tensor
    token_row_E: Tensor
    token_ids_E: Tensor
    token_weight_E: Tensor
    chunks: tuple[ChunkBlock, ...]
    shares_row: bool = False  # its last row belongs to the next block, and is here for a chunk before it


def cut_blocks(
    tokens: TokenLayout, layouts: Sequence[ChunkLayout], block_rows: int, *, next_rows: bool = False
) -> tuple[Block, ...]:
    """Blocks of at most `block_rows` student rows and as many teacher rows per teacher, on the CPU. No border cuts a
    chunk; one that is larger gets a block of its own size. next_rows: with the row behind every chunk."""
    behind = [layout.student_rows_M[layout.student_first_C + layout.student_count_C - 1] + 1 for layout in layouts]
    used_R = used_rows(tokens, layouts, *(behind if next_rows else []))
    rows = used_R.nonzero().squeeze(1)
    place_R = used_R.cumsum(0) - 1  # of each used row among the others
    token_place = place_R.index_select(0, tokens.rows_E)
    places = [place_R.index_select(0, layout.student_rows_M) for layout in layouts]
    cuts = _cuts(rows.numel(), layouts, places, block_rows)
    token_cut = np.searchsorted(token_place.numpy(), cuts).tolist()
    after = [place_R.index_select(0, row_C) if next_rows else None for row_C in behind]
    chunks = [_cut_chunks(*sides, cuts) for sides in zip(layouts, places, after, strict=True)]
    blocks = []
    for i, (row0, row1) in enumerate(pairwise(cuts.tolist())):
        span = slice(token_cut[i], token_cut[i + 1])
        chunks_here = [parts[i] for parts in chunks]
        if span.start == span.stop and not any(part.num_chunks for part in chunks_here):
            continue  # a row that only a chunk of the block before reads
        shares = any(
            bool((part.next_row_C == row1 - row0).any()) for part in chunks_here if part.next_row_C is not None
        )
        blocks.append(
            Block(
                (span.start, span.stop),
                rows[row0 : row1 + shares],
                token_place[span] - row0,
                tokens.ids_E[span],
                tokens.weight_E[span],
                tuple(chunks_here),
                shares,
            )
        )
    return tuple(blocks)


def used_rows(tokens: TokenLayout, layouts: Sequence[ChunkLayout], *more: Tensor) -> Tensor:
    """bool `[R]`: student rows that any of them names."""
    every = torch.cat([tokens.rows_E, *(layout.student_rows_M for layout in layouts), *more])
    used_R = torch.zeros(int(every.max()) + 1 if every.numel() else 0, dtype=torch.bool)
    return used_R.index_fill_(0, every, True)


def _cut_chunks(layout: ChunkLayout, place_M: Tensor, after: Tensor | None, cuts: np.ndarray) -> list[ChunkBlock]:
    chunk_cut = np.searchsorted(place_M[layout.student_first_C].numpy(), cuts)
    student_cut = np.searchsorted(layout.student_chunk_M.numpy(), chunk_cut).tolist()
    teacher_cut = np.searchsorted(layout.teacher_chunk_Q.numpy(), chunk_cut).tolist()
    out = []
    for i, row0 in enumerate(cuts[:-1].tolist()):
        (c0, c1), (m0, m1), (q0, q1) = ((int(cut[i]), int(cut[i + 1])) for cut in (chunk_cut, student_cut, teacher_cut))
        out.append(
            ChunkBlock(
                chunks=(c0, c1),
                teacher_tokens=(q0, q1),
                teacher_row_Q=layout.teacher_rows_Q[q0:q1],
                student_row_M=place_M[m0:m1] - row0,
                student_chunk_M=layout.student_chunk_M[m0:m1] - c0,
                student_ids_M=layout.student_ids_M[m0:m1],
                student_first_C=layout.student_first_C[c0:c1] - m0,
                student_count_C=layout.student_count_C[c0:c1],
                teacher_chunk_Q=layout.teacher_chunk_Q[q0:q1] - c0,
                teacher_ids_Q=layout.teacher_ids_Q[q0:q1],
                teacher_first_C=layout.teacher_first_C[c0:c1] - q0,
                teacher_count_C=layout.teacher_count_C[c0:c1],
                student_last_C=layout.student_last_C[c0:c1],
                teacher_last_C=layout.teacher_last_C[c0:c1],
                next_row_C=None if after is None else after[c0:c1] - row0,
            )
        )
    return out


def _cuts(num_rows: int, layouts: Sequence[ChunkLayout], places: Sequence[Tensor], block_rows: int) -> np.ndarray:
    """Borders `0 = c_0 < c_1 < ... = num_rows`, none inside a chunk."""
    open_chunks = np.zeros(num_rows + 1, np.int64)
    teacher_rows = []
    for layout, place_M in zip(layouts, places, strict=True):
        first = place_M[layout.student_first_C].numpy()
        last = place_M[layout.student_first_C + layout.student_count_C - 1].numpy()
        # the chunks of one layout do not overlap, so no row is named twice
        open_chunks[first + 1] += 1
        open_chunks[last + 1] -= 1
        ends = np.zeros(num_rows + 1, np.int64)
        ends[last + 1] = layout.teacher_count_C.numpy()
        teacher_rows.append(np.cumsum(ends))
    allowed = np.flatnonzero(np.cumsum(open_chunks) == 0)  # always holds 0 and num_rows
    totals = [(total, total[allowed]) for total in teacher_rows]
    cuts = [0]
    while cuts[-1] < num_rows:
        here = cuts[-1]
        best = int(np.searchsorted(allowed, here + block_rows, side="right")) - 1
        for total, at_allowed in totals:
            best = min(best, int(np.searchsorted(at_allowed, total[here] + block_rows, side="right")) - 1)
        following = int(np.searchsorted(allowed, here, side="right"))
        cuts.append(int(allowed[max(best, following)]))
    return np.asarray(cuts, np.int64)


def shard_layouts(
    tokens: TokenLayout, layouts: Sequence[ChunkLayout], part: int, parts: int
) -> tuple[TokenLayout, list[ChunkLayout]]:
    """The `part`-th of `parts` shares of layouts on the CPU: whole chunks, about as many rows in each. Together they
    hold every token and chunk once."""
    rows = int(used_rows(tokens, layouts).sum())
    blocks = cut_blocks(tokens, layouts, max(1, -(-rows // (4 * parts))))
    mine, start = [], 0
    for block in blocks:
        if start * parts // rows == part:
            mine.append(block)
        start += block.rows_N.numel()
    if not mine:
        return tokens.range(0, 0), [layout.range(0, 0) for layout in layouts]
    first, last = mine[0], mine[-1]
    pairs = zip(layouts, first.chunks, last.chunks, strict=True)
    return (
        tokens.range(first.tokens[0], last.tokens[1]),
        [layout.range(a.chunks[0], b.chunks[1]) for layout, a, b in pairs],
    )


# ---- the pass over the blocks ----


@dataclass
class TeacherTerm:
    """One teacher's part of a run: an objective, where it applies, and the factor of its sum in the total.

    chunk_weight_C: factor of each chunk, or None. weighs_samples: the teacher's own weight differs from sample to
    sample and is in chunk_weight_C, not in factor. gated: a chunk counts by the teacher's advantage, `Objective.gate`.
    """

    name: str
    objective: Objective
    factor: float | Tensor
    index: int  # which layout's chunks of a block
    layout: ChunkLayout
    teacher: TeacherRows
    chunk_weight_C: Tensor | None = None
    weighs_samples: bool = False
    gated: bool = False

    def chunks(self, block: Block) -> ChunkBlock:
        """This teacher's chunks of a block, with their weights."""
        chunks = block.chunks[self.index]
        if self.chunk_weight_C is None:
            return chunks
        return replace(chunks, weight_C=self.chunk_weight_C[chunks.chunks[0] : chunks.chunks[1]])


@dataclass(frozen=True)
class TokenClasses:
    """Classes of student tokens by which a pass counts its parts, too. of_id `[ids]`: number of each token's class."""

    names: tuple[str, ...]
    of_id: Tensor

    def sums(self, prefix: str, ids: Tensor, values: Tensor, weight: Tensor) -> Sums:
        """`prefix/class` of all classes: values and weights `[n]` of tokens, summed by the tokens' classes."""
        return _sums_by(self.names, self.of_id[ids], prefix, values, weight)


CHUNK_KINDS = ("one_to_one", "one_to_many", "many_to_one", "many_to_many")
"""Chunks by their tokens, the student's first."""


def chunk_kind_sums(
    prefix: str, student_count_C: Tensor, teacher_count_C: Tensor, values_C: Tensor, weight_C: Tensor
) -> Sums:
    """`prefix/kind` of all kinds of chunks: values and weights of chunks, summed by how many tokens each side has."""
    kind_C = 2 * (student_count_C > 1).long() + (teacher_count_C > 1).long()
    return _sums_by(CHUNK_KINDS, kind_C, prefix, values_C, weight_C)


def _sums_by(names: tuple[str, ...], kind: Tensor, prefix: str, values: Tensor, weight: Tensor) -> Sums:
    totals, counts = (_wide(x.new_zeros(len(names))).index_add(0, kind, _wide(x)) for x in (values, weight))
    return {f"{prefix}/{name}": (totals[i], counts[i]) for i, name in enumerate(names)}


@dataclass
class BlockRun:
    """Everything that one micro-batch's pass over its blocks needs; `metrics` is filled by it."""

    head: Head
    blocks: Sequence[Block]
    token_factor: float | Tensor
    terms: list[TeacherTerm]
    comm: Comm = field(default_factory=Comm.alone)  # the ranks that have the micro-batch's other rows
    classes: TokenClasses | None = None  # counted by, too, and by kind of chunk; a chunk is of its first token's class
    metrics: Sums = field(default_factory=dict)
    parts: list[BlockRun] = field(default_factory=list)  # one per teacher, where kernels did several
    id_mismatch_flags: list[Tensor] = field(default_factory=list)  # on the device: a teacher scored other tokens
    raise_mismatch: Callable[[], object] | None = None  # raises the error that belongs to such a flag

    def add(self, prefix: str, metrics: Sums) -> None:
        for name, (value, count) in metrics.items():
            old = self.metrics.get(prefix + name, (0.0, 0.0))
            self.metrics[prefix + name] = (old[0] + _wide(value), old[1] + _wide(count))


def _wide(value: Tensor) -> Tensor:
    """Sums over blocks are kept in float64, so that they do not depend on where the blocks were cut."""
    return value.float() if value.device.type == "mps" else value.double()


def block_cross_entropy(student: BlockLogits, block: Block, classes: TokenClasses | None = None) -> tuple[Tensor, Sums]:
    """Weighted negative log-likelihood of the block's supervised tokens, with accuracy."""
    log_NV, row_E, ids_E = student.log_probs(), block.token_row_E, block.token_ids_E
    weight_E = block.token_weight_E.to(log_NV.dtype)
    loss_E = -(student.axis.pick(log_NV, row_E, ids_E) * weight_E)
    loss = loss_E.sum()
    with torch.no_grad():
        right_E = (student.axis.argmax(log_NV).index_select(0, row_E) == ids_E).to(weight_E.dtype)
        total = weight_E.sum()
    by_class = {} if classes is None else classes.sums("ce_loss", ids_E, loss_E.detach(), weight_E)
    return loss, {"ce": (loss.detach(), total), "accuracy": ((right_E * weight_E).sum(), total), **by_class}


def _block_loss(run: BlockRun, block: Block, logits_NV: Tensor) -> tuple[Tensor, Tensor | None]:
    """(weighted loss with graph, explicit gradient of the objectives that computed one) of one block."""
    student, total = BlockLogits(logits_NV, run.head.axis), logits_NV.new_zeros(())
    explicit_NV: Tensor | None = None
    if block.token_ids_E.numel():
        loss, metrics = block_cross_entropy(student, block, run.classes)
        total = total + loss * run.token_factor
        run.add("", metrics)
    for term in run.terms:
        chunks = term.chunks(block)
        if not chunks.num_chunks:
            continue
        scores = term.teacher.scores(*chunks.teacher_tokens)
        if term.gated:
            # at chosen ids alone the realised tokens' probabilities are not known
            whole = (
                scores if term.teacher.vocab_ids_K is None else term.teacher.all_ids().scores(*chunks.teacher_tokens)
            )
            chunks = replace(chunks, gate_C=term.objective.gate(student, chunks, whole))
        out = term.objective(student, chunks, scores)
        run.add(f"{term.name}/", out.metrics)
        if run.classes is not None and out.rows_C is not None:
            ids_C = chunks.student_ids_M.index_select(0, chunks.student_first_C)
            weight_C = torch.ones_like(out.rows_C) if chunks.weight_C is None else chunks.weight_C
            run.add(f"{term.name}/", run.classes.sums("kl_loss", ids_C, out.rows_C, weight_C))
            counts = chunks.student_count_C, chunks.teacher_count_C
            run.add(f"{term.name}/", chunk_kind_sums("kl_loss", *counts, out.rows_C, weight_C))
        total = total + out.loss * term.factor
        if out.grad_NV is not None:
            grad_NV = out.grad_NV * term.factor
            explicit_NV = grad_NV if explicit_NV is None else explicit_NV + grad_NV
    return total, explicit_NV


class BlockedLoss:
    """One walk over the blocks. Gradients: hidden rows written once, parameters summed in float32 (or float64)."""

    def __init__(self, run: BlockRun, hidden_RH: Tensor, params: Sequence[Tensor], needs: Sequence[bool]) -> None:
        self.work, self.hidden_RH = run, hidden_RH.detach()
        self.with_grad = any(needs)
        self.shares_rows = any(block.shares_row for block in run.blocks)
        self.head_params = list(params)
        # float16 would lose gradients that are already divided by the global counts.
        dtype = torch.float32 if hidden_RH.dtype == torch.float16 else hidden_RH.dtype
        self.hidden_grad = torch.zeros_like(hidden_RH, dtype=dtype) if needs[0] else None
        self.param_grads = [
            torch.zeros_like(p, dtype=compute_dtype(p.dtype)) if need else None
            for p, need in zip(params, needs[1:], strict=True)
        ]

    def run(self) -> Tensor:
        total = _wide(self.hidden_RH.new_zeros(()))
        for block in self.work.blocks:
            total = total + _wide(self._block(block))
        if self.hidden_grad is not None:
            # each rank has multiplied with its own columns of the vocabulary: the whole gradient is the sum, taken once
            self.hidden_grad = self.work.head.axis.total(self.hidden_grad)
        return total

    def _block(self, block: Block) -> Tensor:
        head, hidden_NH = self.work.head, self.hidden_RH.index_select(0, block.rows_N)
        if not self.with_grad:
            return _block_loss(self.work, block, head.logits(hidden_NH))[0]
        # a plain head's gradient is taken by hand; a wrapped one needs a graph
        with torch.set_grad_enabled(head.module is not None):
            raw_NV = head.raw(hidden_NH.requires_grad_(head.module is not None))
        with torch.enable_grad():
            source_NV = raw_NV.detach().requires_grad_()
            finished_NV = head.finish(source_NV)
            # The graph is cut here: an objective may add a gradient of its own at the logits, and each part of the
            # graph is freed before the next one is walked back.
            logits_NV = finished_NV.detach().requires_grad_()
            loss, explicit_NV = _block_loss(self.work, block, logits_NV)
            grad_NV = explicit_NV
            if loss.requires_grad:
                (grad_NV,) = torch.autograd.grad(loss, logits_NV, allow_unused=True)
                grad_NV = grad_NV if explicit_NV is None else grad_NV.add_(explicit_NV)
        assert grad_NV is not None, "every row of a block carries a loss"
        if finished_NV is not source_NV:
            (grad_NV,) = torch.autograd.grad(finished_NV, source_NV, grad_NV)
        self._through_head(block.rows_N, hidden_NH, raw_NV, grad_NV)
        return loss.detach()

    def _through_head(self, rows_N: Tensor, hidden_NH: Tensor, raw_NV: Tensor, grad_NV: Tensor) -> None:
        head = self.work.head
        if head.module is not None:
            wanted = [hidden_NH, *self.head_params]
            grad_NH, *param_grads = torch.autograd.grad(raw_NV, wanted, grad_NV.to(raw_NV.dtype), allow_unused=True)
            self._add(param_grads)
        elif head.weight is None:
            # hidden states are the logits here, rows of padding included
            grad_NH = F.pad(grad_NV, (0, hidden_NH.shape[1] - grad_NV.shape[1]))
        else:
            grad_NH = self._linear(hidden_NH, grad_NV.to(head.weight.dtype), head.weight, head.bias)
        if self.hidden_grad is not None:
            grad_NH = grad_NH.to(self.hidden_grad.dtype)
            if self.shares_rows:
                # slower, and on a GPU in no fixed order: only where a row lies in two blocks
                self.hidden_grad.index_add_(0, rows_N, grad_NH)
            else:
                self.hidden_grad[rows_N] = grad_NH

    def _linear(self, hidden_NH: Tensor, grad_NV: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gradients of a plain linear head by hand: the weight's go straight into their sum."""
        size, sums = self.work.head.local_size, iter(self.param_grads)
        total = next(sums) if weight.requires_grad else None
        if total is not None:
            if total.dtype == grad_NV.dtype:
                # the sum happens inside the product, without a temporary of the head's size
                total[:size].addmm_(grad_NV.t(), hidden_NH.to(grad_NV.dtype))
            else:
                total[:size].add_(grad_NV.t() @ hidden_NH.to(grad_NV.dtype))
        total = next(sums) if bias is not None and bias.requires_grad else None
        if total is not None:
            total[:size].add_(grad_NV.sum(0, dtype=total.dtype))
        return grad_NV @ weight.detach()[:size]

    def _add(self, grads: Sequence[Tensor | None]) -> None:
        for total, grad in zip(self.param_grads, grads, strict=True):
            if total is not None and grad is not None:
                total.add_(grad)


def asked_for(*inputs: Tensor) -> list[Tensor]:
    """Inputs of an autograd function that computes gradients in its forward pass. Where gradients are off it would
    still see that parameters want theirs, so they are cut off."""
    return list(inputs) if torch.is_grad_enabled() else [value.detach() for value in inputs]


class RowBlockLoss(torch.autograd.Function):
    """Total loss of a `BlockRun` as a function of hidden `[R, h]` and the head's parameters."""

    @staticmethod
    def forward(ctx: Any, run: BlockRun, hidden_RH: Tensor, *params: Tensor) -> Tensor:
        work = BlockedLoss(run, hidden_RH, params, ctx.needs_input_grad[1:])
        total = work.run()
        ctx.grads = [work.hidden_grad, *work.param_grads]
        ctx.dtypes = [hidden_RH.dtype, *(p.dtype for p in params)]
        return total.to(compute_dtype(hidden_RH.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            # multiplied before it is rounded to the input's type, which may not hold the unscaled gradient
            None if grad is None else (grad * outer[0]).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        return None, *scaled


def row_block_loss(run: BlockRun, hidden_RH: Tensor, *, check: bool = True) -> Tensor:
    """Loss of a run on the flat rows of a forward pass, differentiable unless gradients are off. Fills `run.metrics`.

    check=False: the caller has more to queue first, and calls `verify` itself before the loss is used.
    """
    out: Tensor = RowBlockLoss.apply(run, *asked_for(hidden_RH, *run.head.parameters()))
    if check:
        verify(run, out.detach(), hidden_RH)
    return out


# ---- checks ----

_WAITING: ContextVar[list[Tensor] | None] = ContextVar("flags that nobody has read yet", default=None)


@contextmanager
def deferred_checks() -> Iterator[list[Tensor]]:
    """Losses inside do not wait for their own check. Each adds a flag `[2]` (not finite, contradicting inputs) to the
    list, which the caller must read before it uses the gradients; the same call outside then tells what is wrong."""
    flags: list[Tensor] = []
    token = _WAITING.set(flags)
    try:
        yield flags
    finally:
        _WAITING.reset(token)


def verify(run: BlockRun, total: Tensor, hidden_RH: Tensor) -> None:
    """Refuse a loss that is not finite or was computed from contradicting inputs; the pass's only synchronisation."""
    differing = run.id_mismatch_flags
    suspect = torch.stack(differing).any() if differing else torch.zeros_like(total, dtype=torch.bool)
    flags = torch.stack((~torch.isfinite(total), suspect))
    waiting = _WAITING.get()
    if waiting is not None:
        waiting.append(flags)
        return
    infinite, contradicting = flags.tolist()
    if contradicting and run.raise_mismatch is not None:
        run.raise_mismatch()
    if infinite:
        raise_non_finite(run, hidden_RH)


def raise_non_finite(run: BlockRun, hidden_RH: Tensor) -> None:
    """Find the first row whose scores are NaN or infinite and name its side; only reached when the loss is."""
    blocks = ((part, block) for part in run.parts or [run] for block in part.blocks)
    with torch.no_grad():
        for part, block in blocks:
            _check_rows("student", block.rows_N, run.head.logits(hidden_RH.detach().index_select(0, block.rows_N)))
            for term in part.terms:
                chunks = block.chunks[term.index]
                scores = term.teacher.scores(*chunks.teacher_tokens)
                if scores.logits is not None:
                    _check_rows(term.name, chunks.teacher_row_Q, scores.logits)
                elif scores.next_logprob is not None:
                    # as probabilities: the -inf of an empty place is no error
                    listed = torch.cat((scores.topk()[1].exp(), scores.next_logprob[:, None]), 1)
                    _check_rows(term.name, chunks.teacher_row_Q, listed)
    raise LossError("the loss is not finite although every score is; a weight of the loss or of a chunk may be")


def _check_rows(side: str, rows: Tensor, scores: Tensor) -> None:
    bad = ~torch.isfinite(scores).all(-1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        column = int((~torch.isfinite(scores[row])).nonzero()[0, 0])
        raise LossError(
            f"{side}: row {int(rows[row])} has a non-finite score ({float(scores[row, column])} at column {column}); "
            "lower the learning rate or check this model's weights and dtype"
        )


# ---- log-probabilities of tokens ----


def _token_block(head: Head, inputs: Tensor, ids: Tensor) -> Tensor:
    return head.axis.gather(head.axis.log_softmax(head.logits(inputs)), ids[:, None]).squeeze(1)


class _TokenLogProbs(torch.autograd.Function):
    """``[N]`` log-probabilities as a function of hidden ``[R, h]`` and the head's parameters."""

    @staticmethod
    def forward(ctx: Any, head: Head, rows: Tensor, ids: Tensor, size: int, hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.head, ctx.size = head, size
        ctx.save_for_backward(rows, ids, hidden, *params)
        parts = [
            _token_block(head, hidden.detach().index_select(0, r), i)
            for r, i in zip(rows.split(size), ids.split(size), strict=True)
        ]
        return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=compute_dtype(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        rows, ids, hidden, *params = ctx.saved_tensors
        needs: Sequence[bool] = ctx.needs_input_grad[4:]
        dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        into = torch.zeros_like(hidden, dtype=dtype)
        sums = [torch.zeros_like(p, dtype=compute_dtype(p.dtype)) for p in params]
        blocks = zip(rows.split(ctx.size), ids.split(ctx.size), outer[0].split(ctx.size), strict=True)
        # nothing splits into one empty part, not into none
        for row, token, grad in blocks if len(rows) else ():
            with torch.enable_grad():
                inputs = hidden.detach().index_select(0, row).requires_grad_()
                values = _token_block(ctx.head, inputs, token)
            grads_of_block = torch.autograd.grad(values, [inputs, *params], grad.to(values.dtype), allow_unused=True)
            into.index_add_(0, row, grads_of_block[0].to(dtype))
            for total, part in zip(sums, grads_of_block[1:], strict=True):
                if part is not None:
                    total.add_(part)
        # each rank has gone back through its own columns of the head alone
        into = ctx.head.axis.total(into)
        grads = [into.to(hidden.dtype), *(s.to(p.dtype) for s, p in zip(sums, params, strict=True))]
        return None, None, None, None, *(g if need else None for g, need in zip(grads, needs, strict=True))


def token_log_probs(hidden: Tensor, head: Head, tokens: TokenLayout, *, block_rows: int = 512) -> Tensor:
    """Log-probability ``[N]`` of each token of a layout, in float32 (float64 for float64 inputs).

    Args:
        hidden: ``[R, h]`` flat rows of a forward pass.
        tokens: predicting rows and ids; its weights are not used.
    """
    if tokens.max_row >= hidden.shape[0]:
        raise LossError(f"the layout needs row {tokens.max_row} but there are {hidden.shape[0]} hidden rows")
    if tokens.max_id >= head.vocab_size:
        raise LossError(
            f"token id {tokens.max_id} is out of range for a head of {head.vocab_size} tokens; the batch was "
            "tokenized with another tokenizer"
        )
    rows, ids = tokens.rows_E.to(hidden.device), tokens.ids_E.to(hidden.device)
    out: Tensor = _TokenLogProbs.apply(head, rows, ids, block_rows, hidden, *head.parameters())
    return out
