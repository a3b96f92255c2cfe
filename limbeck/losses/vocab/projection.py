"""A vocabulary projection on the device: `q = W^T p`, gathers where a token maps one to one, adds for the rest.

W is never dense and never a sparse matrix product. Most student tokens have one teacher token with weight 1 and are
that token's only such source: those entries are a gather. The remaining non-zeros (tokens of several pieces, and
collisions) are added onto the few columns that they touch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.utils.errors import ProjectionError


class ProjectionLike(Protocol):
    """What a projection must offer: indices int `[V_s, k]` (-1: empty) and weights float `[V_s, k]`."""

    @property
    def indices(self) -> np.ndarray: ...
    @property
    def weights(self) -> np.ndarray: ...


def _nonzeros(projection: ProjectionLike) -> tuple[Tensor, Tensor, Tensor]:
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
    student, place = keep.nonzero(as_tuple=True)
    return student, indices[student, place], weights[student, place]


def common_pairs(projection: ProjectionLike, threshold: float) -> tuple[Tensor, Tensor]:
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
    def forward(ctx: Any, probs: Tensor, rest_weight: Tensor, vocab: VocabMap) -> Tensor:
        ctx.vocab = vocab
        ctx.save_for_backward(probs if ctx.needs_input_grad[1] else None, rest_weight)
        out = probs.index_select(1, vocab.source_or_zero)
        out.mul_(vocab.has_source)
        out.index_add_(1, vocab.rest_columns, vocab.rest_sums(probs, rest_weight))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        vocab, (probs, rest_weight), grad = ctx.vocab, ctx.saved_tensors, grads[0]
        rest_grad = grad.index_select(1, vocab.rest_teacher)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (probs.index_select(1, vocab.rest_student) * rest_grad).sum(0).to(rest_weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        out = grad.index_select(1, vocab.target_or_zero)
        out.mul_(vocab.has_target)
        out.index_add_(1, vocab.rest_student, rest_grad.mul_(rest_weight.to(grad.dtype)))
        return out, grad_weight, None


class _ProjectAt(torch.autograd.Function):
    """q `[n, K]` at columns `[K]` or `[n, K]`; one buffer of `[n, V_s]` in the backward pass, filled once."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, rest_weight: Tensor, vocab: VocabMap, columns: Tensor) -> Tensor:
        ctx.vocab, ctx.columns = vocab, columns
        ctx.save_for_backward(probs if ctx.needs_input_grad[1] else None, rest_weight)
        ctx.width = probs.shape[1]
        rest = torch.cat((vocab.rest_sums(probs, rest_weight), probs.new_zeros(probs.shape[0], 1)), 1)
        source, has, place = vocab.source_or_zero[columns], vocab.has_source[columns], vocab.column_place[columns]
        if columns.ndim == 1:
            return probs.index_select(1, source).mul_(has).add_(rest.index_select(1, place))
        return probs.gather(1, source).mul_(has).add_(rest.gather(1, place))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        vocab, columns, (probs, rest_weight), grad = ctx.vocab, ctx.columns, ctx.saved_tensors, grads[0]
        source, has, place = vocab.source_or_zero[columns], vocab.has_source[columns], vocab.column_place[columns]
        out = grad.new_zeros(grad.shape[0], ctx.width)
        touched = grad.new_zeros(grad.shape[0], vocab.rest_columns.numel() + 1)
        if columns.ndim == 1:
            out.index_add_(1, source, grad * has)
            touched.index_add_(1, place, grad)
        else:
            out.scatter_add_(1, source, grad * has)
            touched.scatter_add_(1, place, grad)
        rest_grad = touched.index_select(1, vocab.rest_place)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (probs.index_select(1, vocab.rest_student) * rest_grad).sum(0).to(rest_weight.dtype)
        out.index_add_(1, vocab.rest_student, rest_grad.mul_(rest_weight.to(grad.dtype)))
        return out, grad_weight, None, None


class VocabMap(nn.Module):
    """Torch form of one projection, from student probabilities to teacher columns.

    `learnable=True` adds the parameter `log_weight`: the non-zeros of rows that are no plain one-to-one map, as a row
    softmax in log space, started at the given weights. A row with one entry keeps weight 1.

    >>> q = VocabMap(projection, teacher_size).project_all(student_logits.softmax(-1))   # [n, V_t]
    """

    source_or_zero: Tensor  # [V_t] student token that maps one to one onto this column, or 0
    has_source: Tensor  # [V_t] 1. where there is one
    target_or_zero: Tensor  # [V_s] the inverse
    has_target: Tensor
    rest_student: Tensor  # [m] remaining non-zeros, rows ascending
    rest_teacher: Tensor  # [m]
    rest_place: Tensor  # [m] place of the column among rest_columns
    rest_columns: Tensor  # [c] columns touched by them
    column_place: Tensor  # [V_t] the inverse of rest_columns, or c where untouched
    reachable: Tensor  # [V_t] bool: some student token maps here
    mapped: Tensor  # [V_s] bool
    fixed_weight: Tensor  # [m]

    def __init__(self, projection: ProjectionLike, teacher_size: int, *, learnable: bool = False) -> None:
        super().__init__()
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
        source.scatter_reduce_(0, teacher[plain], student[plain], "amin")
        gathered = plain & (source[teacher] == student)
        target = torch.full((self.student_size,), -1)
        target[student[gathered]] = teacher[gathered]
        rest = ~gathered
        columns, place = teacher[rest].unique(return_inverse=True)
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
            "rest_student": student[rest],
            "rest_teacher": teacher[rest],
            "rest_place": place,
            "rest_columns": columns,
            "column_place": column_place,
            "reachable": reachable,
            "mapped": entries > 0,
            "fixed_weight": weight[rest].float(),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)
        self.log_weight = nn.Parameter(weight[rest].log().float()) if learnable else None

    def fit(self, student_size: int, teacher_size: int) -> None:
        """Cut the tables to heads that are narrower than their tokenizers; refuse any other difference of sizes."""
        for side, size, own, used in (
            ("student", student_size, self.student_size, self.mapped),
            ("teacher", teacher_size, self.teacher_size, self.reachable),
        ):
            if size > own or (size < own and bool(used[size:].any())):
                raise ProjectionError(
                    f"the projection was built for {own} {side} tokens but the {side} signal has {size}; build it for "
                    "these tokenizers, or pass the tokenizer's size as the head's vocab_size"
                )
        self.target_or_zero, self.has_target = self.target_or_zero[:student_size], self.has_target[:student_size]
        self.mapped, self.student_size = self.mapped[:student_size], student_size
        self.source_or_zero, self.has_source = self.source_or_zero[:teacher_size], self.has_source[:teacher_size]
        self.column_place, self.reachable = self.column_place[:teacher_size], self.reachable[:teacher_size]
        self.teacher_size = teacher_size

    def reaches(self, ids: Tensor) -> Tensor:
        """bool, like ids: some student token maps to this teacher token."""
        return self.reachable[ids]

    def rest_weight(self) -> Tensor:
        """Weights `[m]` of the entries that are no plain gather; differentiable where the map is learnable."""
        if self.log_weight is None:
            return self.fixed_weight
        log_weight, rows = self.log_weight, self.rest_student
        top = torch.full((self.student_size,), -torch.inf, device=rows.device, dtype=log_weight.dtype)
        top = top.scatter_reduce(0, rows, log_weight.detach(), "amax")
        exp = (log_weight - top[rows]).exp()
        total = torch.zeros_like(top).index_add(0, rows, exp)
        return exp / total[rows]

    def rest_sums(self, probs: Tensor, rest_weight: Tensor) -> Tensor:
        """What the entries beyond the gather add, on the columns that they touch: `[n, c]`."""
        parts = probs.index_select(1, self.rest_student) * rest_weight.to(probs.dtype)
        out = probs.new_zeros(probs.shape[0], self.rest_columns.numel())
        return out.index_add(1, self.rest_place, parts)

    def project_all(self, probs: Tensor, rest_weight: Tensor | None = None) -> Tensor:
        """W^T p over the whole teacher vocabulary: probs `[n, V_s]` -> `[n, V_t]`."""
        rest_weight = self.rest_weight() if rest_weight is None else rest_weight
        out: Tensor = _ProjectAll.apply(probs, rest_weight, self)
        return out

    def project_at(self, probs: Tensor, columns: Tensor, rest_weight: Tensor | None = None) -> Tensor:
        """W^T p at some columns: `[K]` (the same for all rows) or `[n, K]` (each row its own) -> `[n, K]`."""
        rest_weight = self.rest_weight() if rest_weight is None else rest_weight
        out: Tensor = _ProjectAt.apply(probs, rest_weight, self, columns)
        return out
