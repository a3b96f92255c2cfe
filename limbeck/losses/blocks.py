"""Head and loss in row blocks: forward and backward in one pass, nothing of rows x vocabulary outlives its block.

The denominators are known before the first micro-batch, so a block's gradient is final as soon as its logits exist:
it is written while the block is there, and the backward pass only scales it. Only rows that carry loss reach a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout
from limbeck.losses.objectives.base import BlockLogits, Leaf, Metrics, Mode, TeacherBlock
from limbeck.losses.peers import ALONE, Peers
from limbeck.losses.plan import BlockPlan, BlockSpan, ChunkSpan
from limbeck.losses.signals import Head, Signal, TeacherScores, compute_dtype
from limbeck.utils.errors import LossError

if TYPE_CHECKING:
    from limbeck.losses.fast.order import ColumnPlan


@dataclass
class Term:
    """One teacher's loss: a leaf, its settings, where it applies, and the factor of its sum in the total.

    signals/layouts: usually one each; several teachers of one vocabulary are averaged in their logits by `shares`.
    chunk_weight `[C]`: factor of each chunk, or None.
    """

    name: str
    leaf: Leaf
    mode: Mode
    factor: float | Tensor
    index: int  # which layout of the plan cuts this term's chunks
    layout: ChunkLayout
    signals: Sequence[Signal]
    layouts: Sequence[ChunkLayout]
    shares: Sequence[float] = (1.0,)
    chunk_weight: Tensor | None = None

    def scores(self, span: ChunkSpan) -> TeacherScores:
        """The teacher's opinion at the rows of a block, without gradient."""
        start, end = span.teacher
        parts = [
            signal.scores(layout.teacher_rows[start:end], self.mode.columns)
            for signal, layout in zip(self.signals, self.layouts, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        mixed: Tensor | None = None
        for part, share in zip(parts, self.shares, strict=True):
            if part.logits is None:
                raise LossError("top-k teachers have no logits to average; use live teachers or mode `sum`")
            mixed = part.logits * share if mixed is None else mixed.add_(part.logits * share)
        return replace(parts[0], logits=mixed)

    def block(self, span: ChunkSpan, place: Tensor, first_row: int, like: Tensor) -> TeacherBlock:
        """The chunks of `span` with block-local indices. place: of each student token among the planned rows."""
        layout, (c0, c1), (s0, s1), (t0, t1) = self.layout, span.chunks, span.student, span.teacher
        weight = like.new_ones(c1 - c0) if self.chunk_weight is None else self.chunk_weight[c0:c1].to(like.dtype)
        return TeacherBlock(
            num_chunks=c1 - c0,
            student_row=place[s0:s1] - first_row,
            student_chunk=layout.student_chunk[s0:s1] - c0,
            student_ids=layout.student_ids[s0:s1],
            student_first=layout.student_first[c0:c1] - s0,
            student_count=layout.student_count[c0:c1],
            teacher_chunk=layout.teacher_chunk[t0:t1] - c0,
            teacher_ids=layout.teacher_ids[t0:t1],
            teacher_first=layout.teacher_first[c0:c1] - t0,
            teacher_count=layout.teacher_count[c0:c1],
            weight=weight,
            scores=self.scores(span),
        )


@dataclass
class Job:
    """Everything that one micro-batch's pass over its blocks needs; `metrics` is filled by it."""

    head: Head
    plan: BlockPlan
    tokens: TokenLayout
    token_factor: float | Tensor
    terms: list[Term]
    metrics: Metrics = field(default_factory=dict)
    columns: ColumnPlan | None = None  # given: the kernels do the work, see fast/walk.py
    peers: Peers = ALONE
    suspects: list[Tensor] = field(default_factory=list)  # flags on the device: the inputs contradict each other
    explain: Callable[[], object] | None = None  # raises the error that belongs to such a flag

    @property
    def learnable(self) -> list[Term]:
        """Terms whose projection wants a gradient."""
        return [t for t in self.terms if t.mode.rest_weight is not None and t.mode.rest_weight.requires_grad]

    def add(self, prefix: str, metrics: Metrics) -> None:
        for name, (value, count) in metrics.items():
            old = self.metrics.get(prefix + name, (0.0, 0.0))
            self.metrics[prefix + name] = (old[0] + _wide(value), old[1] + _wide(count))


def _wide(value: Tensor) -> Tensor:
    """Sums over blocks are kept in float64, so that they do not depend on where the blocks were cut."""
    return value.float() if value.device.type == "mps" else value.double()


def cross_entropy_leaf(student: BlockLogits, place: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, Metrics]:
    """Weighted negative log-likelihood of the block's supervised tokens, with accuracy."""
    log_p = student.log_probs()
    weight = weight.to(log_p.dtype)
    loss = -(student.axis.pick(log_p, place, ids) * weight).sum()
    with torch.no_grad():
        right = (student.axis.argmax(log_p).index_select(0, place) == ids).to(weight.dtype)
        metrics = {"ce": (loss.detach(), weight.sum()), "accuracy": ((right * weight).sum(), weight.sum())}
    return loss, metrics


def _block_loss(job: Job, span: BlockSpan, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """(weighted loss with graph, explicit gradient of the leaves that computed one) of one block."""
    student, total = BlockLogits(logits, job.head.axis), logits.new_zeros(())
    explicit: Tensor | None = None
    (t0, t1), row0 = span.tokens, span.rows[0]
    if t1 > t0:
        place = job.plan.token_place[t0:t1] - row0
        loss, metrics = cross_entropy_leaf(student, place, job.tokens.ids[t0:t1], job.tokens.weight[t0:t1])
        total = total + loss * job.token_factor
        job.add("", metrics)
    for term in job.terms:
        chunks = span.chunks[term.index]
        if chunks.chunks[0] == chunks.chunks[1]:
            continue
        out = term.leaf(student, term.block(chunks, job.plan.chunk_place[term.index], row0, logits), term.mode)
        job.add(f"{term.name}/", out.metrics)
        total = total + out.loss * term.factor
        if out.grad is not None:
            explicit = out.grad * term.factor if explicit is None else explicit + out.grad * term.factor
    return total, explicit


class _Pass:
    """One walk over the blocks. Gradients: hidden rows written once, parameters summed in float32 (or float64)."""

    def __init__(self, job: Job, hidden: Tensor, params: Sequence[Tensor], needs: Sequence[bool]) -> None:
        self.job, self.hidden = job, hidden.detach()
        self.with_grad = any(needs)
        terms = job.learnable
        self.head_params = list(params[: len(params) - len(terms)])
        self.learnable: list[Tensor] = []
        for term, weight in zip(terms, params[len(self.head_params) :], strict=True):
            leaf = weight.detach().requires_grad_(self.with_grad)
            term.mode = replace(term.mode, rest_weight=leaf)
            self.learnable.append(leaf)
        # float16 would lose gradients that are already divided by the global counts.
        dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        self.hidden_grad = torch.zeros_like(hidden, dtype=dtype) if needs[0] else None
        self.param_grads = [
            torch.zeros_like(p, dtype=compute_dtype(p.dtype)) if need else None
            for p, need in zip(params, needs[1:], strict=True)
        ]

    def run(self) -> Tensor:
        total = _wide(self.hidden.new_zeros(()))
        for span in self.job.plan.blocks:
            total = total + _wide(self._block(span))
        if self.hidden_grad is not None:
            self.hidden_grad = self.job.head.axis.total(self.hidden_grad)
        for i in range(len(self.head_params), len(self.param_grads)):
            # each shard of the vocabulary has used some entries of a projection
            if (part := self.param_grads[i]) is not None:
                self.param_grads[i] = self.job.head.axis.total(part)
        return total

    def _block(self, span: BlockSpan) -> Tensor:
        rows = self.job.plan.rows[span.rows[0] : span.rows[1]]
        inputs, head = self.hidden.index_select(0, rows), self.job.head
        if not self.with_grad:
            return _block_loss(self.job, span, head.logits(inputs))[0]
        with torch.set_grad_enabled(head.module is not None):
            raw = head.raw(inputs.requires_grad_(head.module is not None))
        with torch.enable_grad():
            source = raw.detach().requires_grad_()
            finished = head.finish(source)
            logits = finished.detach().requires_grad_()
            loss, explicit = _block_loss(self.job, span, logits)
            grad = explicit
            if loss.requires_grad:
                grad, *rest = torch.autograd.grad(loss, [logits, *self.learnable], allow_unused=True)
                self._add(len(self.head_params), rest)
                grad = grad if explicit is None else grad.add_(explicit)
        assert grad is not None, "every planned row carries a loss"
        if finished is not source:
            (grad,) = torch.autograd.grad(finished, source, grad)
        self._through_head(rows, inputs, raw, grad)
        return loss.detach()

    def _through_head(self, rows: Tensor, inputs: Tensor, raw: Tensor, grad: Tensor) -> None:
        head = self.job.head
        if head.module is not None:
            wanted = [inputs, *self.head_params]
            into, *param_grads = torch.autograd.grad(raw, wanted, grad.to(raw.dtype), allow_unused=True)
            self._add(0, param_grads)
        elif head.weight is None:
            into = F.pad(grad, (0, inputs.shape[1] - grad.shape[1]))
        else:
            into = self._linear(inputs, grad.to(head.weight.dtype), head.weight, head.bias)
        if self.hidden_grad is not None:
            self.hidden_grad[rows] = into.to(self.hidden_grad.dtype)

    def _linear(self, inputs: Tensor, grad: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gradients of a plain linear head by hand: the weight's go straight into their sum."""
        size, sums = self.job.head.local_size, iter(self.param_grads)
        total = next(sums) if weight.requires_grad else None
        if total is not None:
            if total.dtype == grad.dtype:
                total[:size].addmm_(grad.t(), inputs.to(grad.dtype))
            else:
                total[:size].add_(grad.t() @ inputs.to(grad.dtype))
        total = next(sums) if bias is not None and bias.requires_grad else None
        if total is not None:
            total[:size].add_(grad.sum(0, dtype=total.dtype))
        return grad @ weight.detach()[:size]

    def _add(self, start: int, grads: Sequence[Tensor | None]) -> None:
        for total, grad in zip(self.param_grads[start:], grads, strict=False):
            if total is not None and grad is not None:
                total.add_(grad)


class RowBlockLoss(torch.autograd.Function):
    """Total loss of a `Job` as a function of hidden `[R, h]`, the head's parameters and learnable projections."""

    @staticmethod
    def forward(ctx: Any, job: Job, hidden: Tensor, *params: Tensor) -> Tensor:
        work = _Pass(job, hidden, params, ctx.needs_input_grad[1:])
        total = work.run()
        ctx.grads = [work.hidden_grad, *work.param_grads]
        ctx.dtypes = [hidden.dtype, *(p.dtype for p in params)]
        return total.to(compute_dtype(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if grad is None else (grad * outer[0]).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        return None, *scaled


def row_block_loss(job: Job, hidden: Tensor, *, check: bool = True) -> Tensor:
    """Run a job on hidden `[R, h]`: the loss, differentiable unless gradients are off. Fills `job.metrics`.

    check=False: the caller has more to queue first, and calls `verify` itself before the loss is used.
    """
    params = [*job.head.parameters(), *(t.mode.rest_weight for t in job.learnable)]
    function: Any = RowBlockLoss
    if job.columns is not None:
        from limbeck.losses.fast.walk import FastRowBlockLoss as function
    out: Tensor = function.apply(job, hidden, *params)
    if check:
        verify(job, out.detach(), hidden)
    return out


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


def verify(job: Job, total: Tensor, hidden: Tensor) -> None:
    """Refuse a loss that is not finite or was computed from contradicting inputs; the pass's only synchronisation."""
    suspect = torch.stack(job.suspects).any() if job.suspects else torch.zeros_like(total, dtype=torch.bool)
    flags = torch.stack((~torch.isfinite(total), suspect))
    waiting = _WAITING.get()
    if waiting is not None:
        waiting.append(flags)
        return
    infinite, contradicting = flags.tolist()
    if contradicting and job.explain is not None:
        job.explain()
    if infinite:
        raise_non_finite(job, hidden)


def raise_non_finite(job: Job, hidden: Tensor) -> None:
    """Find the first row whose scores are NaN or infinite and name its side; only reached when the loss is."""
    with torch.no_grad():
        for span in job.plan.blocks:
            rows = job.plan.rows[span.rows[0] : span.rows[1]]
            _check_rows("student", rows, job.head.logits(hidden.detach().index_select(0, rows)))
            for term in job.terms:
                chunks = span.chunks[term.index]
                rows = term.layout.teacher_rows[chunks.teacher[0] : chunks.teacher[1]]
                scores = term.scores(chunks)
                if scores.logits is not None:
                    _check_rows(term.name, rows, scores.logits)
                elif scores.topk_ids is not None and scores.next_logprob is not None:
                    _check_rows(term.name, rows, torch.cat((scores.topk()[1].exp(), scores.next_logprob[:, None]), 1))
    raise LossError("the loss is not finite although every score is; the learnable projection or a weight may be")


def _check_rows(side: str, rows: Tensor, scores: Tensor) -> None:
    bad = ~torch.isfinite(scores).all(-1)
    if bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        column = int((~torch.isfinite(scores[at])).nonzero()[0, 0])
        raise LossError(
            f"{side}: row {int(rows[at])} has a non-finite score ({float(scores[at, column])} at column {column}); "
            "lower the learning rate or check this model's weights and dtype"
        )
