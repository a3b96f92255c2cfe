"""Head and loss in row blocks with Triton kernels: the same function as `blocks.py`, on logits laid out `[V, n]`.

A block's logits are written once by a matrix product, read by two or three kernels, overwritten by their gradient and
read by two more products. Besides them only vectors of the length of the rows exist. The weight's gradient is summed
over blocks in float32 inside the product. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from limbeck.losses.blocks import BlockRun, TeacherTerm, asked_for, chunk_kind_sums
from limbeck.losses.fast.kernels import padded
from limbeck.losses.fast.kernels.gradient import Factors, Projected, scaled, write_entries, write_gradient
from limbeck.losses.fast.kernels.stats import column_stats
from limbeck.losses.fast.objectives import FAST_OBJECTIVES, FastOut, LaneLogits, chunk_means
from limbeck.losses.fast.order import BlockLanes, Lanes, SideLanes
from limbeck.losses.signals import HiddenSignal, compute_dtype


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """`total (+)= left @ right`, total in float32, factors in their own type; the sum happens inside the product."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if first else total.addmm_(left, right)
    elif total.is_cuda:
        if first:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


class _Pass:
    """One walk over the blocks."""

    def __init__(self, run: BlockRun, lanes: Lanes, hidden: Tensor, needs: Sequence[bool]) -> None:
        assert run.head.weight is not None
        self.work, self.hidden, self.blocks = run, hidden.detach(), lanes.lanes
        self.weight = run.head.weight.detach()
        self.size = run.head.vocab_size
        self.with_grad = any(needs)
        grad_type = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        self.hidden_grad = torch.zeros_like(self.hidden, dtype=grad_type) if needs[0] else None
        self.weight_grad: Tensor | None = None
        if len(needs) > 1 and needs[1]:
            # one block needs no sum: its product can be rounded to the weight's type at once
            narrow = len(self.blocks) == 1 and self.weight.dtype != torch.float16
            dtype = self.weight.dtype if narrow else torch.float32
            self.weight_grad = torch.empty_like(self.weight, dtype=dtype)
            self.weight_grad[self.size if self.blocks else 0 :] = 0
        self.buffers: dict[str, Tensor] = {}
        self.sums: dict[str, list[tuple[Tensor, Tensor | float]]] = {}
        self.teacher_weight = self._teacher_weight()

    # ---- set-up ----

    def _teacher_weight(self) -> Tensor | None:
        """The teacher's head, or its rows at P-KL's columns, which are chosen here."""
        if not self.work.terms:
            return None
        (term,) = self.work.terms
        (signal,) = term.teacher.signals
        if not isinstance(signal, HiddenSignal):
            return None
        assert signal.head.weight is not None
        weight = signal.head.weight.detach()[: signal.vocab_size]
        if not term.objective.chooses_ids:
            return weight
        if term.teacher.vocab_ids_K is None:
            term.teacher.vocab_ids_K = self._top_ids(signal, weight, term)
        return weight.index_select(0, term.teacher.vocab_ids_K)

    def _top_ids(self, signal: HiddenSignal, weight: Tensor, term: TeacherTerm) -> Tensor:
        """`PKL.choose_ids` on vocabulary-major blocks."""
        rows = term.layout.teacher_rows_Q
        best = torch.full((weight.shape[0],), -torch.inf, device=weight.device)
        step = max((padded(b.teacher.width) for b in self.blocks if b.teacher is not None), default=1)
        for start in range(0, rows.numel(), step):
            some = rows[start : start + step]
            # a repeated row changes no maximum, and keeps the width a multiple of what products like
            some = torch.cat((some, some[-1:].expand(padded(some.numel()) - some.numel())))
            inputs = signal.hidden.detach().index_select(0, some).to(weight.dtype)
            best = torch.maximum(best, self._product("teacher", weight, inputs).amax(1).float())
        # context-parallel ranks, per micro-batch: one number per teacher token; all must choose the same ones
        best = self.work.comm.max(best)
        return best.topk(min(term.objective.options.vocab_topk, best.numel())).indices.sort().values

    # ---- one side of a block ----

    def _product(self, name: str, weight: Tensor, inputs: Tensor) -> Tensor:
        """Logits `[V, L]` of inputs `[num_lanes, h]`, in memory that all blocks share; one more row follows them."""
        numel, rows = weight.shape[0] * inputs.shape[0], weight.shape[0] + 1
        if name not in self.buffers or self.buffers[name].numel() < rows * inputs.shape[0]:
            widest = max(max(b.student.padded, b.teacher.padded if b.teacher else 0) for b in self.blocks)
            self.buffers.pop(name, None)
            self.buffers[name] = weight.new_empty(rows * max(inputs.shape[0], widest))
        out = self.buffers[name][:numel].view(weight.shape[0], inputs.shape[0])
        return torch.mm(weight, inputs.t(), out=out)

    def _inputs(self, hidden: Tensor, side: SideLanes, block: BlockLanes, dtype: torch.dtype) -> Tensor:
        """Hidden states of the columns `[num_lanes, h]`; zeros in padding."""
        out = hidden.new_empty(side.padded, hidden.shape[1], dtype=dtype)
        out[: side.width] = hidden.index_select(0, side.rows)
        out[side.width :] = 0
        if side.mean and block.multi:
            extra = out[block.chunks : block.chunks + side.extras]
            out[block.single : block.chunks] = chunk_means(extra.to(compute_dtype(dtype)), side)
        return out

    def _side(
        self, name: str, weight: Tensor, inputs: Tensor, side: SideLanes, tau: float, *, whole: bool = True
    ) -> LaneLogits:
        """Logits and statistics of one side; whole: every token has its row, so realised tokens can be looked up."""
        logits = self._product(name, weight, inputs)
        stats = column_stats(logits, tau)
        tokens = stats.lse.new_zeros(0)
        if whole:
            at = torch.arange(side.width, device=logits.device)
            picked = logits.reshape(-1)[side.ids.clamp(min=0) * logits.shape[1] + at].float() / tau
            tokens = (picked - stats.lse_tau[: side.width]).masked_fill(side.ids < 0, 0.0)
        return LaneLogits(side, logits, stats, tokens)

    # ---- blocks ----

    def run(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        for number, block in enumerate(self.blocks):
            total = total + self._block(block, first=number == 0)
        self._metrics()
        return total

    def _block(self, block: BlockLanes, *, first: bool) -> Tensor:
        term = self.work.terms[0] if self.work.terms and block.chunks else None
        tau = 1.0 if term is None else term.objective.temperature
        inputs = self._inputs(self.hidden, block.student, block, self.weight.dtype)
        student = self._side("student", self.weight[: self.size], inputs, block.student, tau)
        total, ce = self._cross_entropy(block, student, tau)
        num_lanes = inputs.shape[0]
        prob_coef, label_coef = pad(torch.stack((ce, -ce)), (0, num_lanes - ce.shape[0]))
        one = prob_coef if tau != 1.0 else None
        out = None if term is None else self._distil(term, block, student)
        if out is not None and term is not None:
            total = total + out.loss.double() * term.factor
        if not self.with_grad:
            return total
        label = pad(block.label, (0, num_lanes - block.label.shape[0]), value=-1).int()
        if out is None:
            factors = Factors(
                prob_coef, prob_coef if one is None else torch.zeros_like(prob_coef), one, label_coef, label
            )
            write_gradient(student.logits, student.stats.lse_tau, student.stats.lse, factors, tau)
        else:
            own = out.prob_coef if one is not None else out.prob_coef + prob_coef
            factors = Factors(out.slope_coef, own, one, out.label_coef + label_coef, label)
            whole = factors if out.kept_coef is None else replace(factors, prob_coef=own + out.kept_coef)
            lse = student.stats.lse_tau if out.lse is None else out.lse
            write_gradient(
                student.logits, lse, student.stats.lse, whole, tau, out.slope, aligned=out.aligned, owned=out.owned
            )
            for entries in out.entries:
                assert isinstance(out.slope, Projected)
                assert out.kept_coef is not None
                write_entries(student.logits, lse, student.stats.lse, factors, tau, out.slope, entries, out.kept_coef)
        self._through_head(block, inputs, student.logits, first=first)
        return total

    def _cross_entropy(self, block: BlockLanes, student: LaneLogits, tau: float) -> tuple[Tensor, Tensor]:
        """(loss, gradient factor of each column's p) of cross-entropy; the loss is in float64."""
        width = block.student.width
        log_p = student.token_log_probs
        if tau != 1.0:
            raw = (log_p + student.stats.lse_tau[:width]) * tau
            log_p = (raw - student.stats.lse[:width]).masked_fill(block.label < 0, 0.0)
        loss = -(log_p * block.ce_weight).sum()
        if block.tokens:
            right = (student.stats.argmax[:width] == block.label) * block.ce_weight
            weight = block.ce_weight.sum()
            self._add("", {"ce": (loss, weight), "accuracy": (right.sum(), weight)})
            if (classes := self.work.classes) is not None:
                ids = block.label.clamp(min=0)
                self._add("", classes.sums("ce_loss", ids, -log_p * block.ce_weight, block.ce_weight))
        return loss.double() * self.work.token_factor, block.ce_weight * self.work.token_factor

    def _distil(self, term: TeacherTerm, block: BlockLanes, student: LaneLogits) -> FastOut:
        assert block.teacher is not None
        teacher, (signal,) = None, term.teacher.signals
        if isinstance(signal, HiddenSignal):
            assert self.teacher_weight is not None
            inputs = self._inputs(signal.hidden.detach(), block.teacher, block, self.teacher_weight.dtype)
            whole, tau = not term.objective.chooses_ids, term.objective.temperature
            teacher = self._side("teacher", self.teacher_weight, inputs, block.teacher, tau, whole=whole)
        weight = student.stats.lse.new_ones(block.chunks)
        if term.chunk_weight_C is not None:
            weight = term.chunk_weight_C.index_select(0, block.order_C).float()
        out = FAST_OBJECTIVES[type(term.objective)](term, block, student, teacher, weight)
        self._add(f"{term.name}/", {"kl": (out.loss, block.chunks), **out.metrics})
        if (classes := self.work.classes) is not None:
            ids, rows = block.student.ids[: block.chunks], out.rows * weight * term.objective.temperature**2
            self._add(f"{term.name}/", classes.sums("kl_loss", ids, rows, weight))
            counts = block.student.count_C, block.teacher.count_C
            self._add(f"{term.name}/", chunk_kind_sums("kl_loss", *counts, rows, weight))
        return out

    def _through_head(self, block: BlockLanes, inputs: Tensor, grad: Tensor, *, first: bool) -> None:
        if self.weight_grad is not None:
            add_product(self.weight_grad[: self.size], grad, inputs, first=first)
        if self.hidden_grad is None:
            return
        side = block.student
        into = grad.t() @ self.weight[: self.size]
        rows, into = side.rows, into[: side.width]
        if side.mean and block.multi:
            shared = into[: block.chunks].float() / side.count_C[:, None]
            extra = into[block.chunks : block.chunks + side.extras]
            extra.copy_(extra.float() + shared.index_select(0, side.owner))
            for start, end in ((0, block.single), (block.chunks, side.width)):
                self.hidden_grad[rows[start:end]] = into[start:end].to(self.hidden_grad.dtype)
            return
        self.hidden_grad[rows] = into.to(self.hidden_grad.dtype)

    # ---- metrics ----

    def _add(self, prefix: str, metrics: Mapping[str, tuple[Tensor, Tensor | float]]) -> None:
        for name, (value, count) in metrics.items():
            self.sums.setdefault(prefix + name, []).append((value.detach().float(), count))

    def _metrics(self) -> None:
        """Sums over blocks, in float64; converted together, since each small operation costs a launch."""
        pairs = [pair for entries in self.sums.values() for pair in entries]
        flat = [value for value, _ in pairs] + [count for _, count in pairs if isinstance(count, Tensor)]
        wide = torch.stack(flat).double().unbind() if flat else ()
        values, counts = iter(wide[: len(pairs)]), iter(wide[len(pairs) :])
        for name, entries in self.sums.items():
            total = _sum([next(values) for _ in entries])
            known = sum(count for _, count in entries if not isinstance(count, Tensor))
            unknown = [next(counts) for _, count in entries if isinstance(count, Tensor)]
            self.work.metrics[name] = (total, _sum(unknown) if unknown else torch.full_like(total, known))


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


class FastRowBlockLoss(torch.autograd.Function):
    """`blocks.RowBlockLoss` by kernels; params: the head's weight where it wants a gradient."""

    @staticmethod
    def forward(ctx: Any, run: BlockRun, lanes: Lanes, hidden: Tensor, *params: Tensor) -> Tensor:
        work = _Pass(run, lanes, hidden, ctx.needs_input_grad[2:])
        with torch.no_grad():
            total = work.run()
        ctx.grads = [work.hidden_grad, *([work.weight_grad] if params else [])]
        ctx.dtypes = [hidden.dtype, *(p.dtype for p in params)]
        return total.to(compute_dtype(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.grads, ctx.dtypes, strict=True)
        return None, None, *(None if grad is None else scaled(grad, outer[0], dtype) for grad, dtype in pairs)


def fast_row_block_loss(run: BlockRun, lanes: Lanes, hidden_RH: Tensor) -> Tensor:
    """`blocks.row_block_loss` without its check; the caller verifies."""
    out: Tensor = FastRowBlockLoss.apply(run, lanes, *asked_for(hidden_RH, *run.head.parameters()))
    return out
