"""A vocabulary split over tensor-parallel ranks: every rank holds some columns of the student and of each teacher.

No rank ever holds the logits of a whole vocabulary. Per block of n rows and with T ranks, the communication is
    log-sum-exp, realised tokens, sums       a few numbers per row, all-reduced
    projection onto all teacher columns      n x V_s / T x (1 - 1/T) numbers per rank and direction: each student column
                                             travels only to the rank that holds the teacher columns it maps to
                                             (an all-to-all; a reduce-scatter of partial sums would move n x V_t x
                                             (1 - 1/T), T times as much)
    projection onto k chosen columns         n x k, all-reduced
    top-k                                    n x k x T candidates, gathered
and once per micro-batch the gradient of the hidden states, R x h, all-reduced.

Every loss is computed on all ranks alike. So a sum over ranks passes its gradient through unchanged, and only where a
shared number enters local columns (the log-sum-exp) are gradients summed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.losses.vocab.projection import VocabMap


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, axis: ShardedAxis) -> Tensor:
        out = logits - axis.logsumexp(logits)[:, None]
        ctx.axis = axis
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        total = ctx.axis.total(grads[0].sum(-1))
        return grads[0] - out.exp() * total[:, None], None


class _Candidates(torch.autograd.Function):
    """Columns `[n, k]` of all ranks side by side `[n, T * k]`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: ShardedAxis) -> Tensor:
        ctx.place = (axis.comm.rank * own.shape[1], own.shape[1])
        # tensor-parallel ranks, per block: k numbers per row from each
        return torch.cat(axis.comm.gather(own), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(1, *ctx.place), None


class ShardedAxis(VocabAxis):
    """Columns `bounds[rank]` (half open) of a vocabulary; `bounds` of all ranks follow each other."""

    sharded = True

    def __init__(self, comm: Comm, bounds: Sequence[tuple[int, int]]) -> None:
        self.comm, self.bounds = comm, tuple(bounds)
        self.start, self.end = self.bounds[comm.rank]
        self.size = self.bounds[-1][1]
        self._maps: dict[Any, ShardedMap] = {}
        self._likes: dict[int, ShardedAxis] = {}

    @classmethod
    def of_rows(cls, comm: Comm, rows: int, size: int) -> ShardedAxis:
        """The axis of a head of `rows` rows, split evenly, of which the first `size` are tokens."""
        step = -(-rows // comm.size)
        starts = range(0, step * comm.size, step)
        return cls(comm, [(min(s, size), min(s + step, size)) for s in starts])

    @classmethod
    def of_counts(cls, comm: Comm, counts: Sequence[int]) -> ShardedAxis:
        """An axis of so many columns on each rank."""
        ends = np.cumsum(counts).tolist()
        return cls(comm, [(end - n, end) for end, n in zip(ends, counts, strict=True)])

    def place(self, size: int) -> tuple[int, int]:
        return self.start, self.end

    def like(self, size: int) -> ShardedAxis:
        if size == self.size:
            return self  # padded rows of a head shift the borders: two sides of one vocabulary must share them
        if size not in self._likes:
            self._likes[size] = ShardedAxis.of_rows(self.comm, size, size)
        return self._likes[size]

    def width(self, values: Tensor) -> int:
        return self.size

    def total(self, part: Tensor) -> Tensor:
        return self.comm.sum_same_loss(part)

    def log_softmax(self, logits: Tensor) -> Tensor:
        out: Tensor = _LogSoftmax.apply(logits, self)
        return out

    @torch.no_grad()
    def logsumexp(self, logits: Tensor) -> Tensor:
        # tensor-parallel ranks, per block: two numbers per row
        top = self.comm.max(F.pad(logits, (0, 1), value=-torch.inf).amax(-1))
        return self.total((logits - top[:, None]).exp().sum(-1)).log() + top

    def sum(self, values: Tensor) -> Tensor:
        return self.total(values.sum(-1))

    def columns(self, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        inside = (chosen >= self.start) & (chosen < self.end)
        return (chosen - self.start).masked_fill(~inside, 0), inside

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        place, inside = self.columns(ids)
        assert inside is not None
        if self.end == self.start:
            return self.total(values.new_zeros(ids.shape))
        return self.total(values.gather(1, place).masked_fill(~inside, 0))

    def pick(self, values: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        chosen = values if rows.numel() == values.shape[0] else values.index_select(0, rows)
        return self.gather(chosen, ids[:, None]).squeeze(1)

    def argmax(self, values: Tensor) -> Tensor:
        return self.topk(values.detach(), 1)[1].squeeze(1)

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        width = min(k, max(end - start for start, end in self.bounds))
        top = values.topk(min(width, values.shape[-1]), dim=-1)
        missing = width - top.values.shape[1]
        own: Tensor = _Candidates.apply(F.pad(top.values, (0, missing), value=-torch.inf), self)
        ids: Tensor = _Candidates.apply(F.pad(top.indices + self.start, (0, missing)), self)
        best = own.topk(min(k, self.size), dim=-1)
        return best.values, ids.gather(1, best.indices)

    def split(self, vocab: Any, teacher: VocabAxis, common: Any = None) -> ShardedMap:
        """The map between this (the student's) axis and a teacher's; made once."""
        assert isinstance(teacher, ShardedAxis)
        key = (id(vocab), self.bounds, teacher.bounds, vocab.mapped.device)
        if key not in self._maps:
            self._maps[key] = ShardedMap(vocab, self, teacher, common)
        return self._maps[key]


class _Exchange(torch.autograd.Function):
    """Student columns `[n, local]` to the ranks that need them: `[n, received]`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: ColumnExchange) -> Tensor:
        ctx.plan, ctx.width = plan, values.shape[1]
        sent = values.index_select(1, plan.send).t().contiguous()
        return plan.move(sent, plan.sent, plan.received).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        back = plan.move(grads[0].t().contiguous(), plan.received, plan.sent)
        out = grads[0].new_zeros(grads[0].shape[0], ctx.width)
        return out.index_add_(1, plan.send, back.t()), None


class ColumnExchange:
    """Which student columns go where. student, teacher `[m]`: ids of the entries of a map.

    `arrived`: ids of the student columns that this rank gets, in order; `own`: which entries end here.
    """

    def __init__(self, student: Tensor, teacher: Tensor, axis: ShardedAxis, target: ShardedAxis) -> None:
        self.comm = axis.comm
        home, goal = _owner(student, axis), _owner(teacher, target)
        send, arrived = [], []
        for other in range(axis.comm.size):
            send.append(student[(home == axis.comm.rank) & (goal == other)].unique())
            arrived.append(student[(home == other) & (goal == axis.comm.rank)].unique())
        self.sent, self.received = [s.numel() for s in send], [a.numel() for a in arrived]
        self.send, self.arrived = torch.cat(send) - axis.start, torch.cat(arrived)
        self.own = (goal == axis.comm.rank).nonzero().squeeze(1)

    def move(self, rows: Tensor, counts: list[int], wanted: list[int]) -> Tensor:
        # tensor-parallel ranks, per block and direction: each student column to the ranks whose columns it maps to
        return self.comm.all_to_all(rows, counts, wanted)

    def __call__(self, values: Tensor) -> Tensor:
        out: Tensor = _Exchange.apply(values, self)
        return out


def _owner(ids: Tensor, axis: ShardedAxis) -> Tensor:
    ends = torch.tensor([end for _, end in axis.bounds], device=ids.device)
    return torch.searchsorted(ends, ids, right=True)


class ShardedMap:
    """`VocabMap` on shards: the same calls, with columns as they lie on the ranks.

    Weights `[m]` of a learnable map are whole on every rank. Each call uses an entry on one rank only, so the gradients
    that the ranks find for them are parts of a sum; the block loss adds them up once per micro-batch.
    """

    def __init__(self, vocab: VocabMap, axis: ShardedAxis, target: ShardedAxis, common: Any) -> None:
        self.axis, self.target, self.whole = axis, target, vocab
        self.student_size, self.teacher_size = vocab.student_size, vocab.teacher_size
        student, teacher, entry = _entries(vocab)
        self.exchange = ColumnExchange(student, teacher, axis, target)
        own = self.exchange.own
        place = torch.searchsorted(self.exchange.arrived.sort().values, student[own])
        place = self.exchange.arrived.argsort()[place]
        width = target.end - target.start
        self.onto_own = _Part.of(place, teacher[own] - target.start, entry[own], self.exchange.arrived.numel(), width)
        here = ((student >= axis.start) & (student < axis.end)).nonzero().squeeze(1)
        self.onto_any = _Part.of(
            student[here] - axis.start, teacher[here], entry[here], axis.end - axis.start, vocab.teacher_size
        )
        self._reachable = vocab.reachable
        self.reachable = vocab.reachable[target.start : target.end]
        self.mapped = vocab.mapped[axis.start : axis.end]
        self.pairs = None if not common else _Pairs(common, axis, target)

    def reaches(self, ids: Tensor) -> Tensor:
        """bool, like ids: some student token maps to this teacher token, whichever rank holds it."""
        return self._reachable[ids]

    def project_all(self, probs: Tensor, rest_weight: Tensor | None = None) -> Tensor:
        """W^T p at this rank's teacher columns: probs `[n, V_s / T]` -> `[n, V_t / T]`."""
        arrived = self.exchange(probs)
        if self.onto_own is None:
            return arrived.new_zeros(probs.shape[0], self.target.end - self.target.start)
        return self.onto_own.map.project_all(arrived, self.onto_own.weight(self.whole, rest_weight))

    def project_at(self, probs: Tensor, columns: Tensor, rest_weight: Tensor | None = None) -> Tensor:
        """W^T p at columns `[K]` or `[n, K]`, the same on every rank."""
        if self.onto_any is None:
            return self.axis.total(probs.new_zeros(probs.shape[0], columns.shape[-1]))
        weight = self.onto_any.weight(self.whole, rest_weight)
        return self.axis.total(self.onto_any.map.project_at(probs, columns, weight))


class _Pairs:
    """Common pairs on the rank of their teacher column, and both sides' uncommon rest where it lies."""

    def __init__(self, common: dict[str, tuple[Tensor, Tensor]], axis: ShardedAxis, target: ShardedAxis) -> None:
        student, teacher = common["common"]
        self.exchange = ColumnExchange(student, teacher, axis, target)
        own = self.exchange.own
        order = torch.searchsorted(student[own].sort().values, self.exchange.arrived)
        self.teacher = teacher[own][student[own].argsort()[order]] - target.start
        goal = _owner(teacher, target)
        counts = torch.bincount(goal, minlength=axis.comm.size).tolist()
        self.axis = ShardedAxis.of_counts(axis.comm, counts)
        self.rest: list[tuple[Tensor, ShardedAxis]] = []
        for ids, side in zip(common["uncommon"], (axis, target), strict=True):
            home = _owner(ids, side)
            counts = torch.bincount(home, minlength=axis.comm.size).tolist()
            self.rest.append((ids[home == axis.comm.rank] - side.start, ShardedAxis.of_counts(axis.comm, counts)))


def _entries(vocab: VocabMap) -> tuple[Tensor, Tensor, Tensor]:
    """All entries of a map: student id, teacher id, and place among its weights `[m]` (-1: a plain gather)."""
    teacher = vocab.has_source.bool().nonzero().squeeze(1)
    student = vocab.source_or_zero[teacher]
    weighted = torch.arange(vocab.rest_student.numel(), device=student.device)
    return (
        torch.cat((student, vocab.rest_student)),
        torch.cat((teacher, vocab.rest_teacher)),
        torch.cat((torch.full_like(student, -1), weighted)),
    )


@dataclass
class _Part:
    """A map of some entries of another; `entries` `[m']`: which of the other's weights it takes."""

    map: VocabMap
    entries: Tensor

    @classmethod
    def of(cls, student: Tensor, teacher: Tensor, entry: Tensor, rows: int, columns: int) -> _Part | None:
        """None without any entry."""
        if not student.numel():
            return None
        order = student.argsort(stable=True)
        entry = entry[order]
        at_row = student[order].cpu()
        rank = torch.arange(order.numel()) - torch.searchsorted(at_row, at_row)
        indices = np.full((rows, int(rank.max()) + 1), -1)
        weights = np.zeros(indices.shape)
        at = (at_row.numpy(), rank.numpy())
        indices[at] = teacher[order].cpu().numpy()
        # real weights come with each call; these only say what is a gather
        weights[at] = np.where(entry.cpu().numpy() < 0, 1.0, 0.5 / indices.shape[1])
        part = VocabMap(SimpleNamespace(indices=indices, weights=weights), columns).to(student.device)
        return cls(part, entry[entry >= 0])

    def weight(self, whole: VocabMap, given: Tensor | None) -> Tensor:
        """The weights of this part's entries, out of all."""
        return (whole.rest_weight() if given is None else given).index_select(0, self.entries)
