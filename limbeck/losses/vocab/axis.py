"""Sums, picks and sorts along a vocabulary, so that a loss need not know whether all its columns are here.

What is written with these works on one process and, with a `ShardedAxis`, on shards of the vocabulary: values
`[n, V_local]` are local, results `[n]` or `[n, k]` are the same on every shard.

No rank ever holds the logits of a whole vocabulary. Per block of n rows and with T ranks, the communication is
    log-sum-exp, realised tokens, sums       a few numbers per row, all-reduced
    projection onto all teacher columns      see `limbeck.losses.vocab.projection`
    projection onto k chosen columns         n x k, all-reduced
    top-k                                    n x k x T candidates, gathered
and once per micro-batch the gradient of the hidden states, R x H, all-reduced.

Every loss is computed on all ranks alike. So a sum over ranks passes its gradient through unchanged, and only where a
shared number enters local columns (the log-sum-exp) are gradients summed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.distributed.comm import Comm


class VocabAxis:
    """The axis of a process that holds all columns."""

    sharded = False
    comm: Comm = Comm.alone()
    bounds: tuple[tuple[int, int], ...] = ()
    """Columns of every rank of a sharded axis, half open."""

    def counts(self, size: int) -> list[int]:
        """Columns of every rank of a vocabulary of `size`."""
        return [end - start for start, end in self.bounds] or [size]

    def joined(self, part: Tensor) -> Tensor:
        """Values `[V_local, ...]` of all shards, one behind the other, without gradient."""
        return part

    def place(self, size: int) -> tuple[int, int]:
        """Columns `[start, end)` of a vocabulary of `size` that are here."""
        return 0, size

    def like(self, size: int) -> VocabAxis:
        """The axis of another vocabulary, split over the same ranks."""
        return self

    def width(self, values: Tensor) -> int:
        """Number of columns over all shards."""
        return int(values.shape[-1])

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return logits.logsumexp(-1)

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(-1)

    def pick(self, values: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """values[rows, ids] `[n]`; rows ascend without repeats, so as many rows as there are means all of them."""
        if rows.numel() == values.shape[0]:
            return values.gather(1, ids[:, None]).squeeze(1)
        return values[rows, ids]

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """values at each row's own ids `[n, k]`."""
        return values.gather(1, ids)

    def argmax(self, values: Tensor) -> Tensor:
        return values.argmax(-1)

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest values of each row (all, where there are fewer), falling, and their ids."""
        top = values.topk(min(k, values.shape[-1]), dim=-1)
        return top.values, top.indices

    def columns(self, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        """Local places of columns, and which of them are here (None: all)."""
        return chosen, None

    def total(self, part: Tensor) -> Tensor:
        """Sum over shards of what each has a part of; without gradient."""
        return part


WHOLE = VocabAxis()


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
    def forward(ctx: Any, local_values: Tensor, axis: ShardedAxis) -> Tensor:
        ctx.place = (axis.comm.rank * local_values.shape[1], local_values.shape[1])
        # tensor-parallel ranks, per block: k numbers per row from each
        return torch.cat(axis.comm.gather(local_values), 1)

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
        # tensor-parallel ranks, per block: one number per row (or per row and chosen column)
        return self.comm.sum_same_loss(part)

    def joined(self, part: Tensor) -> Tensor:
        counts = self.counts(self.size)
        room = max(counts) - part.shape[0]
        # tensor-parallel ranks, per micro-batch: one number per column
        parts = self.comm.gather(F.pad(part, (0, 0) * (part.ndim - 1) + (0, room)))
        return torch.cat([values[:count] for values, count in zip(parts, counts, strict=True)])

    def log_softmax(self, logits: Tensor) -> Tensor:
        out: Tensor = _LogSoftmax.apply(logits, self)
        return out

    @torch.no_grad()
    def logsumexp(self, logits: Tensor) -> Tensor:
        # tensor-parallel ranks, per block: two numbers per row
        # one more column: a small vocabulary may leave a rank none, and nothing has no maximum
        top = self.comm.max(F.pad(logits, (0, 1), value=-torch.inf).amax(-1))
        return self.total((logits - top[:, None]).exp().sum(-1)).log() + top

    def sum(self, values: Tensor) -> Tensor:
        return self.total(values.sum(-1))

    def columns(self, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        inside = (chosen >= self.start) & (chosen < self.end)
        return (chosen - self.start).masked_fill(~inside, 0), inside

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        local_column, inside = self.columns(ids)
        assert inside is not None
        # a rank without columns must reach the sum all the same
        if self.end == self.start:
            return self.total(values.new_zeros(ids.shape))
        # no product with `inside`: log-probabilities may be -inf, and -inf x 0 is NaN
        return self.total(values.gather(1, local_column).masked_fill(~inside, 0))

    def pick(self, values: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        chosen = values if rows.numel() == values.shape[0] else values.index_select(0, rows)
        return self.gather(chosen, ids[:, None]).squeeze(1)

    def argmax(self, values: Tensor) -> Tensor:
        return self.topk(values.detach(), 1)[1].squeeze(1)

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        # the k best of all are among the k best of every rank; all must bring equally many to be gathered
        width = min(k, max(end - start for start, end in self.bounds))
        top = values.topk(min(width, values.shape[-1]), dim=-1)
        missing = width - top.values.shape[1]
        candidates: Tensor = _Candidates.apply(F.pad(top.values, (0, missing), value=-torch.inf), self)
        ids: Tensor = _Candidates.apply(F.pad(top.indices + self.start, (0, missing)), self)
        best = candidates.topk(min(k, self.size), dim=-1)
        return best.values, ids.gather(1, best.indices)
