"""A vocabulary projection on the device: `q = W^T p`, gathers where a token maps one to one, adds for the rest.

W is never dense and never a sparse matrix product. Most student tokens have one teacher token with weight 1 and are
that token's only such source: those entries are a gather. The remaining non-zeros (tokens of several pieces, and
collisions) are added onto the few columns that they touch.

Between vocabularies that are split over T tensor-parallel ranks, a projection of n rows onto all teacher columns moves
n x V / T x (1 - 1/T) numbers per rank and direction: each student column travels only to the rank that holds the
teacher columns it maps to (an all-to-all; a reduce-scatter of partial sums would move n x U x (1 - 1/T), T times as
much).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.errors import ProjectionError
from limbeck.losses.vocab.axis import WHOLE, ShardedAxis, VocabAxis
from limbeck.projection.trees import VocabTrees


class Entries(Protocol):
    """A sparse map: indices int `[V, k]` (-1: empty) and weights float `[V, k]`."""

    @property
    def indices(self) -> np.ndarray: ...
    @property
    def weights(self) -> np.ndarray: ...


class ProjectionLike(Entries, Protocol):
    """Part that a loss reads of a `limbeck.projection.Projection`."""

    @property
    def teacher_size(self) -> int: ...
    @property
    def teacher_fingerprint(self) -> str: ...
    @property
    def trees(self) -> VocabTrees | None: ...
    @property
    def token_bytes(self) -> tuple[Sequence[bytes], Sequence[bytes]] | None: ...
    def exact_pairs(self) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class _Entries:
    indices: np.ndarray
    weights: np.ndarray


def _nonzeros(projection: Entries) -> tuple[Tensor, Tensor, Tensor]:
    indices = torch.from_numpy(np.asarray(projection.indices).astype(np.int64))
    weights = torch.from_numpy(np.asarray(projection.weights).astype(np.float64))
    if indices.shape != weights.shape or indices.ndim != 2:
        raise ProjectionError(
            f"indices {tuple(indices.shape)} and weights {tuple(weights.shape)} must both be [V_s, k]; rebuild it"
        )
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ProjectionError("the projection has negative or non-finite weights; rebuild it")
    keep = (indices >= 0) & (weights > 0)
    row_sum = (weights * keep).sum(1)
    if row_sum.numel() and float(row_sum.max()) > 1 + 1e-3:
        row = int(row_sum.argmax())
        raise ProjectionError(f"row {row} of the projection sums to {float(row_sum[row]):.4f}; rows must sum to 1")
    student, slot = keep.nonzero(as_tuple=True)
    return student, indices[student, slot], weights[student, slot]


def common_pairs(projection: Entries, threshold: float) -> tuple[Tensor, Tensor]:
    """One-to-one pairs (student ids, teacher ids) whose row's largest weight reaches `threshold`.

    A teacher token claimed by several student tokens goes to the larger weight, then to the lower student id.
    """
    student, teacher, weight = _nonzeros(projection)
    rows = int(np.asarray(projection.indices).shape[0])
    best = torch.zeros(rows, dtype=weight.dtype).scatter_reduce(0, student, weight, "amax")
    keep = (weight >= threshold) & (weight == best[student])
    student, teacher, weight = student[keep], teacher[keep], weight[keep]
    first_of_row = torch.ones_like(student, dtype=torch.bool)
    first_of_row[1:] = student[1:] != student[:-1]
    student, teacher, weight = student[first_of_row], teacher[first_of_row], weight[first_of_row]
    # Stable sorts by falling weight, then by teacher: the first of each teacher token is its winner.
    order = weight.argsort(descending=True, stable=True)
    order = order[teacher[order].argsort(stable=True)]
    winner = torch.ones_like(order, dtype=torch.bool)
    winner[1:] = teacher[order][1:] != teacher[order][:-1]
    chosen = order[winner].sort().values
    return student[chosen], teacher[chosen]


class _ProjectAll(torch.autograd.Function):
    """q `[n, V_t]` from p `[n, V_s]`; the backward of the exact part is a gather too, so it is cheap and exact."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, vocab: VocabMap) -> Tensor:
        ctx.vocab = vocab
        out = probs.index_select(1, vocab.source_or_zero)
        # columns without a source have read token 0, whose probability is not theirs
        out.mul_(vocab.has_source)
        out.index_add_(1, vocab.extra_columns, vocab.extra_sums(probs))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        vocab, grad = ctx.vocab, grads[0]
        extra_grad = grad.index_select(1, vocab.extra_teacher)
        out = grad.index_select(1, vocab.target_or_zero)
        out.mul_(vocab.has_target)
        out.index_add_(1, vocab.extra_student, extra_grad.mul_(vocab.extra_weight.to(grad.dtype)))
        return out, None


class _ProjectAt(torch.autograd.Function):
    """q `[n, K]` at columns `[K]` or `[n, K]`; one buffer of `[n, V_s]` in the backward pass, filled once."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, vocab: VocabMap, columns: Tensor) -> Tensor:
        ctx.vocab, ctx.columns, ctx.width = vocab, columns, probs.shape[1]
        # a column of zeros behind them, which columns without such an entry read
        rest = torch.cat((vocab.extra_sums(probs), probs.new_zeros(probs.shape[0], 1)), 1)
        source, has, extra_column = (
            vocab.source_or_zero[columns],
            vocab.has_source[columns],
            vocab.column_place[columns],
        )
        if columns.ndim == 1:
            return probs.index_select(1, source).mul_(has).add_(rest.index_select(1, extra_column))
        return probs.gather(1, source).mul_(has).add_(rest.gather(1, extra_column))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        vocab, columns, grad = ctx.vocab, ctx.columns, grads[0]
        source, has, extra_column = (
            vocab.source_or_zero[columns],
            vocab.has_source[columns],
            vocab.column_place[columns],
        )
        out = grad.new_zeros(grad.shape[0], ctx.width)
        touched = grad.new_zeros(grad.shape[0], vocab.extra_columns.numel() + 1)
        if columns.ndim == 1:
            out.index_add_(1, source, grad * has)
            touched.index_add_(1, extra_column, grad)
        else:
            out.scatter_add_(1, source, grad * has)
            touched.scatter_add_(1, extra_column, grad)
        extra_grad = touched.index_select(1, vocab.extra_place)
        out.index_add_(1, vocab.extra_student, extra_grad.mul_(vocab.extra_weight.to(grad.dtype)))
        return out, None, None


class VocabMap(nn.Module):
    """Torch form of one projection, from student probabilities to teacher columns.

    >>> q = VocabMap(projection, teacher_size).project_all(student_logits.softmax(-1))   # [n, V_t]
    """

    source_or_zero: Tensor  # [V_t] student token that maps one to one onto this column, or 0
    has_source: Tensor  # [V_t] 1. where there is one
    target_or_zero: Tensor  # [V_s] the inverse
    has_target: Tensor
    extra_student: Tensor  # [m] remaining non-zeros, rows ascending
    extra_teacher: Tensor  # [m]
    extra_place: Tensor  # [m] place of the column among extra_columns
    extra_columns: Tensor  # [c] columns touched by them
    column_place: Tensor  # [V_t] the inverse of extra_columns, or c where untouched
    reachable: Tensor  # [V_t] bool: some student token maps here
    mapped: Tensor  # [V_s] bool
    extra_weight: Tensor  # [m]

    def __init__(self, projection: Entries, teacher_size: int) -> None:
        super().__init__()
        self._sharded: dict[Any, ShardedMap] = {}
        self.kernel_tables: tuple[Any, Any] | None = None  # what the kernels made of this map, and for which sizes
        student, teacher, weight = _nonzeros(projection)
        self.student_size = int(np.asarray(projection.indices).shape[0])
        self.teacher_size = teacher_size
        if not student.numel():
            raise ProjectionError("the projection has no entry at all; rebuild it for these tokenizers")
        if int(teacher.max()) >= teacher_size:
            raise ProjectionError(
                f"the projection maps to teacher id {int(teacher.max())} but the teacher's head has {teacher_size} "
                "tokens; build it for this teacher"
            )
        entries = torch.bincount(student, minlength=self.student_size)
        plain = ((weight - 1).abs() < 1e-6) & (entries[student] == 1)
        source = torch.full((teacher_size,), self.student_size)
        # where several tokens map onto one column, one of them is gathered and the others are added
        source.scatter_reduce_(0, teacher[plain], student[plain], "amin")
        gathered = plain & (source[teacher] == student)
        target = torch.full((self.student_size,), -1)
        target[student[gathered]] = teacher[gathered]
        rest = ~gathered
        columns, inverse = teacher[rest].unique(return_inverse=True)
        column_place = torch.full((teacher_size,), columns.numel())
        column_place[columns] = torch.arange(columns.numel())
        reachable = torch.zeros(teacher_size, dtype=torch.bool)
        reachable[teacher] = True
        has_source = source < self.student_size
        buffers = {
            "source_or_zero": source.where(has_source, 0),
            "has_source": has_source.float(),
            "target_or_zero": target.clamp(min=0),
            "has_target": (target >= 0).float(),
            "extra_student": student[rest],
            "extra_teacher": teacher[rest],
            "extra_place": inverse,
            "extra_columns": columns,
            "column_place": column_place,
            "reachable": reachable,
            "mapped": entries > 0,
            "extra_weight": weight[rest].float(),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def fit(self, student_size: int, teacher_size: int) -> None:
        """Cut the tables to heads that are narrower than their tokenizers; refuse any other difference of sizes."""
        for side, size, built_for, used in (
            ("student", student_size, self.student_size, self.mapped),
            ("teacher", teacher_size, self.teacher_size, self.reachable),
        ):
            if size > built_for or (size < built_for and bool(used[size:].any())):
                raise ProjectionError(
                    f"the projection was built for {built_for} {side} tokens but the {side} signal has {size}; build "
                    "it for these tokenizers, or pass the tokenizer's size as the head's vocab_size"
                )
        self.target_or_zero, self.has_target = self.target_or_zero[:student_size], self.has_target[:student_size]
        self.mapped, self.student_size = self.mapped[:student_size], student_size
        self.source_or_zero, self.has_source = self.source_or_zero[:teacher_size], self.has_source[:teacher_size]
        self.column_place, self.reachable = self.column_place[:teacher_size], self.reachable[:teacher_size]
        self.teacher_size = teacher_size

    def reaches(self, ids: Tensor) -> Tensor:
        """bool, like ids: some student token maps to this teacher token."""
        return self.reachable[ids]

    def extra_sums(self, probs: Tensor) -> Tensor:
        """Sum of the entries beyond the gather, on the columns that they touch: `[n, c]`."""
        parts = probs.index_select(1, self.extra_student) * self.extra_weight.to(probs.dtype)
        out = probs.new_zeros(probs.shape[0], self.extra_columns.numel())
        return out.index_add(1, self.extra_place, parts)

    def project_all(self, probs: Tensor) -> Tensor:
        """W^T p over the whole teacher vocabulary: probs `[n, V_s]` -> `[n, V_t]`."""
        out: Tensor = _ProjectAll.apply(probs, self)
        return out

    def project_at(self, probs: Tensor, columns: Tensor) -> Tensor:
        """W^T p at some columns: `[K]` (the same for all rows) or `[n, K]` (each row its own) -> `[n, K]`."""
        out: Tensor = _ProjectAt.apply(probs, self, columns)
        return out

    def between(self, student: VocabAxis, teacher: VocabAxis) -> VocabMap | ShardedMap:
        """This map between columns as they lie on both sides' axes; itself where nothing is split."""
        if not isinstance(student, ShardedAxis):
            return self
        assert isinstance(teacher, ShardedAxis)
        # with the device: a cached part stays where it was when the module moves
        key = (student.bounds, teacher.bounds, self.mapped.device)
        if key not in self._sharded:
            self._sharded[key] = ShardedMap(self, student, teacher)
        return self._sharded[key]


class CommonPairs(nn.Module):
    """Tokens that both vocabularies have: paired student and teacher ids `[P]`, and each side's other ids."""

    student: Tensor
    teacher: Tensor

    def __init__(self, student: Tensor, teacher: Tensor) -> None:
        super().__init__()
        self.register_buffer("student", student, persistent=False)
        self.register_buffer("teacher", teacher, persistent=False)
        self._rest: tuple[Any, tuple[Tensor, Tensor]] | None = None
        self._sharded: dict[Any, _ShardedPairs] = {}
        self.kernel_tables: tuple[Any, Any] | None = None  # what the kernels made of these pairs, and for which sizes

    def rest(self, student_size: int, teacher_size: int) -> tuple[Tensor, Tensor]:
        """Each side's ids that are in no pair, ascending; computed once per device and size."""
        key = (self.student.device, student_size, teacher_size)
        if self._rest is None or self._rest[0] != key:
            unpaired = []
            for used, size in ((self.student, student_size), (self.teacher, teacher_size)):
                free = torch.ones(size, dtype=torch.bool, device=used.device)
                free[used] = False
                unpaired.append(free.nonzero().squeeze(1))
            self._rest = key, (unpaired[0], unpaired[1])
        return self._rest[1]

    def common(
        self, log_s: Tensor, log_t: Tensor, axes: tuple[VocabAxis, VocabAxis]
    ) -> tuple[Tensor, Tensor, VocabAxis]:
        """Both sides at the pairs `[C, P]`, and the axis on which those lie; see `columns`."""
        if axes[0].sharded:
            return self.columns(log_s, log_t, axes)[0]
        return log_s.index_select(1, self.student), log_t.index_select(1, self.teacher), WHOLE

    def columns(
        self, log_s: Tensor, log_t: Tensor, axes: tuple[VocabAxis, VocabAxis]
    ) -> tuple[tuple[Tensor, Tensor, VocabAxis], list[tuple[Tensor, VocabAxis]]]:
        """(both sides at the pairs `[C, P]` and the axis on which those lie; each side at its other ids, with its axis)
        of values `[C, V]`, `[C, U]` on the student's and the teacher's axes."""
        student, teacher = axes
        sizes = student.width(log_s), teacher.width(log_t)
        if isinstance(student, ShardedAxis) and isinstance(teacher, ShardedAxis):
            key = (student.bounds, teacher.bounds, log_s.device)
            if key not in self._sharded:
                self._sharded[key] = _ShardedPairs(self, self.rest(*sizes), student, teacher)
            return self._sharded[key].columns(log_s, log_t)
        rest = zip((log_s, log_t), self.rest(*sizes), strict=True)
        return self.common(log_s, log_t, axes), [(values.index_select(1, ids), WHOLE) for values, ids in rest]


class _ShardedPairs:
    """Common pairs on the rank of their teacher column, and both sides' other ids where they lie."""

    def __init__(self, pairs: CommonPairs, rest: tuple[Tensor, Tensor], axis: ShardedAxis, target: ShardedAxis) -> None:
        student, teacher = pairs.student, pairs.teacher
        self.exchange = ColumnExchange(student, teacher, axis, target)
        local_pairs = self.exchange.own
        # what arrives lies rank by rank, ascending within each
        order = torch.searchsorted(student[local_pairs].sort().values, self.exchange.arrived)
        self.teacher = teacher[local_pairs][student[local_pairs].argsort()[order]] - target.start
        goal = _owner(teacher, target)
        counts = torch.bincount(goal, minlength=axis.comm.size).tolist()
        self.axis = ShardedAxis.of_counts(axis.comm, counts)
        self.rest: list[tuple[Tensor, ShardedAxis]] = []
        for ids, side in zip(rest, (axis, target), strict=True):
            home = _owner(ids, side)
            counts = torch.bincount(home, minlength=axis.comm.size).tolist()
            self.rest.append((ids[home == axis.comm.rank] - side.start, ShardedAxis.of_counts(axis.comm, counts)))

    def columns(
        self, log_s: Tensor, log_t: Tensor
    ) -> tuple[tuple[Tensor, Tensor, VocabAxis], list[tuple[Tensor, VocabAxis]]]:
        common = self.exchange(log_s), log_t.index_select(1, self.teacher), self.axis
        rest = zip((log_s, log_t), self.rest, strict=True)
        return common, [(values.index_select(1, ids), axis) for values, (ids, axis) in rest]


class _Exchange(torch.autograd.Function):
    """Student columns `[n, local]` to the ranks that need them: `[n, received]`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: ColumnExchange) -> Tensor:
        ctx.plan, ctx.width = plan, values.shape[1]
        # transposed: the exchange cuts along the first dimension
        sent = values.index_select(1, plan.send).t().contiguous()
        # tensor-parallel ranks, per block and direction: each student column to the ranks whose columns it maps to
        return plan.comm.all_to_all(sent, plan.sent, plan.received).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        # the way back: gradients of the columns to the ranks that they came from, as many numbers
        back = plan.comm.all_to_all(grads[0].t().contiguous(), plan.received, plan.sent)
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
            # unique also sorts: sender and receiver agree on the order without a message
            send.append(student[(home == axis.comm.rank) & (goal == other)].unique())
            arrived.append(student[(home == other) & (goal == axis.comm.rank)].unique())
        self.sent, self.received = [s.numel() for s in send], [a.numel() for a in arrived]
        self.send, self.arrived = torch.cat(send) - axis.start, torch.cat(arrived)
        self.own = (goal == axis.comm.rank).nonzero().squeeze(1)

    def __call__(self, values: Tensor) -> Tensor:
        out: Tensor = _Exchange.apply(values, self)
        return out


def _owner(ids: Tensor, axis: ShardedAxis) -> Tensor:
    ends = torch.tensor([end for _, end in axis.bounds], device=ids.device)
    return torch.searchsorted(ends, ids, right=True)


class ShardedMap:
    """`VocabMap` on shards: the same calls, with columns as they lie on the ranks. Each call uses an entry on one rank
    only."""

    def __init__(self, vocab: VocabMap, axis: ShardedAxis, target: ShardedAxis) -> None:
        self.axis, self.target = axis, target
        self.student_size, self.teacher_size = vocab.student_size, vocab.teacher_size
        student, teacher, entry = _entries(vocab)
        self.exchange = ColumnExchange(student, teacher, axis, target)
        local_entries = self.exchange.own
        # a bisection needs the whole in order; arrivals ascend within each rank's part only
        arrival = torch.searchsorted(self.exchange.arrived.sort().values, student[local_entries])
        arrival = self.exchange.arrived.argsort()[arrival]
        width = target.end - target.start
        weight, arrived = vocab.extra_weight, self.exchange.arrived.numel()
        self.onto_own = _part(
            arrival, teacher[local_entries] - target.start, entry[local_entries], weight, arrived, width
        )
        here = ((student >= axis.start) & (student < axis.end)).nonzero().squeeze(1)
        size = axis.end - axis.start
        self.onto_any = _part(student[here] - axis.start, teacher[here], entry[here], weight, size, vocab.teacher_size)
        self._reachable = vocab.reachable
        self.reachable = vocab.reachable[target.start : target.end]
        self.mapped = vocab.mapped[axis.start : axis.end]

    def reaches(self, ids: Tensor) -> Tensor:
        """bool, like ids: some student token maps to this teacher token, whichever rank holds it."""
        return self._reachable[ids]

    def project_all(self, probs: Tensor) -> Tensor:
        """W^T p at this rank's teacher columns: probs `[n, V_s / T]` -> `[n, V_t / T]`."""
        arrived = self.exchange(probs)
        if self.onto_own is None:
            return arrived.new_zeros(probs.shape[0], self.target.end - self.target.start)
        return self.onto_own.project_all(arrived)

    def project_at(self, probs: Tensor, columns: Tensor) -> Tensor:
        """W^T p at columns `[K]` or `[n, K]`, the same on every rank."""
        if self.onto_any is None:
            return self.axis.total(probs.new_zeros(probs.shape[0], columns.shape[-1]))
        return self.axis.total(self.onto_any.project_at(probs, columns))


def _entries(vocab: VocabMap) -> tuple[Tensor, Tensor, Tensor]:
    """All entries of a map: student id, teacher id, and place among its weights `[m]` (-1: a plain gather)."""
    teacher = vocab.has_source.bool().nonzero().squeeze(1)
    student = vocab.source_or_zero[teacher]
    weighted = torch.arange(vocab.extra_student.numel(), device=student.device)
    return (
        torch.cat((student, vocab.extra_student)),
        torch.cat((teacher, vocab.extra_teacher)),
        torch.cat((torch.full_like(student, -1), weighted)),
    )


def _part(student: Tensor, teacher: Tensor, entry: Tensor, weight: Tensor, rows: int, columns: int) -> VocabMap | None:
    """A map of some entries of another, given by the place of each among the other's `weight` (-1: a plain gather);
    None without any entry."""
    if not student.numel():
        return None
    order = student.argsort(stable=True)
    entry = entry[order]
    at_row = student[order].cpu()
    rank = torch.arange(order.numel()) - torch.searchsorted(at_row, at_row)
    indices = np.full((rows, int(rank.max()) + 1), -1)
    weights = np.zeros(indices.shape)
    entry_index = (at_row.numpy(), rank.numpy())
    indices[entry_index] = teacher[order].cpu().numpy()
    # a weight of 1 that is no gather in the other map is none here; the weights themselves follow
    weights[entry_index] = np.where(entry.cpu().numpy() < 0, 1.0, 0.5 / indices.shape[1])
    part = VocabMap(_Entries(indices, weights), columns).to(student.device)
    part.extra_weight = weight.index_select(0, entry[entry >= 0])
    return part
