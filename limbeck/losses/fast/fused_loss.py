"""Head and loss in row blocks with Triton kernels: the same function as `blocks.py`, on logits laid out `[V, n]`.

A block's logits are written once by a matrix product, read by two or three kernels, overwritten by their gradient and
read by two more products. Besides them only vectors of the length of the rows exist. The weight's gradient is summed
over blocks in float32 inside the product. Nothing here waits for the device.

Where the vocabulary is divided among T ranks, T blocks are under way together, and each rank is responsible for one of
them: every rank multiplies its rows of the head with the inputs of all T blocks, the parts travel to the blocks' ranks
(vocabulary-major, so they only have to lie one behind the other), and each rank goes on alone with whole columns of
logits. Their gradient travels back the same way. So no kernel knows of ranks, and none of their work is done twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from limbeck.losses.blocks import BlockRun, TeacherTerm, asked_for, chunk_kind_sums
from limbeck.losses.fast.base import ChunkWeights, FastObjective, FastOut, SideLogits, chunk_gate, chunk_means
from limbeck.losses.fast.kernels import padded
from limbeck.losses.fast.kernels.gradient import Factors, Projected, scaled, write_entries, write_gradient
from limbeck.losses.fast.position_order import BlockPositions, PositionOrder, SidePositions
from limbeck.losses.objectives.p_kl import PKL
from limbeck.losses.signals import TeacherHidden, compute_dtype
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.utils.plugins import load_object


@functools.cache
def _kernel(name: str) -> FastObjective:
    """The form of an objective on vocabulary-major blocks, see `Objective.kernel`."""
    form: FastObjective = load_object(name, "kernel")
    return form


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


class FusedLoss:
    """One walk over the blocks."""

    def __init__(self, run: BlockRun, order: PositionOrder, hidden: Tensor, needs: Sequence[bool]) -> None:
        assert run.head.weight is not None
        self.work, self.hidden, self.blocks = run, hidden.detach(), order.positions
        self.size, self.axis = run.head.local_size, run.head.axis
        self.comm = self.axis.comm
        self.weight = run.head.weight.detach()
        self.with_grad = any(needs)
        grad_type = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        self.hidden_grad = torch.zeros_like(self.hidden, dtype=grad_type) if needs[0] else None
        self.weight_grad: Tensor | None = None
        if len(needs) > 1 and needs[1]:
            # one block needs no sum: its product can be rounded to the weight's type at once
            narrow = len(self.blocks) == 1 and self.weight.dtype != torch.float16
            dtype = self.weight.dtype if narrow else torch.float32
            self.weight_grad = torch.empty_like(self.weight, dtype=dtype)
            # the first block's product writes the rows of tokens; padding, or all without a block, is cleared here
            self.weight_grad[self.size if self.blocks else 0 :] = 0
        self.buffers: dict[str, Tensor] = {}
        self.sums: dict[str, list[tuple[Tensor, Tensor | float]]] = {}
        self.teacher_weight, self.teacher_axis = self._teacher_weight()

    # ---- set-up ----

    def _teacher_weight(self) -> tuple[Tensor | None, VocabAxis]:
        """The teacher's head and where its rows lie; or its rows at P-KL's columns, which are chosen here: all ranks
        have those."""
        if not self.work.terms:
            return None, WHOLE
        (term,) = self.work.terms
        (signal,) = term.teacher.signals
        if not isinstance(signal, TeacherHidden):
            return None, WHOLE
        assert signal.head.weight is not None
        axis = signal.head.axis
        weight = signal.head.weight.detach()[: signal.head.local_size]
        if not term.objective.chooses_ids:
            return weight, axis
        if term.teacher.vocab_ids_K is None:
            term.teacher.vocab_ids_K = self._top_ids(signal, weight, term)
        column, inside = axis.columns(term.teacher.vocab_ids_K)
        if inside is None:
            return weight.index_select(0, column), WHOLE
        rows = weight.index_select(0, column) if weight.shape[0] else weight.new_zeros(column.numel(), weight.shape[1])
        # tensor-parallel ranks, per micro-batch: the head's rows at the chosen columns
        return self.comm.sum(rows * inside[:, None]), WHOLE

    def _top_ids(self, signal: TeacherHidden, weight: Tensor, term: TeacherTerm) -> Tensor:
        """`PKL.choose_ids` on vocabulary-major blocks."""
        rows = term.layout.teacher_rows_Q
        best = torch.full((weight.shape[0],), -torch.inf, device=weight.device)
        step = max((padded(b.teacher.width) for b in self.blocks if b.teacher is not None), default=1)
        for start in range(0, rows.numel(), step):
            some = rows[start : start + step]
            # a repeated row changes no maximum, and keeps the width a multiple of what products like
            some = torch.cat((some, some[-1:].expand(padded(some.numel()) - some.numel())))
            inputs = signal.hidden.detach().index_select(0, some).to(weight.dtype)
            logits = torch.mm(weight, inputs.t(), out=self._memory("teacher", weight, weight.shape[0], len(inputs)))
            best = torch.maximum(best, logits.amax(1).float())
        # context-parallel ranks, per micro-batch: one number per teacher token; all must choose the same ones
        best = signal.head.axis.joined(self.work.comm.max(best))
        assert isinstance(term.objective, PKL)
        return best.topk(min(term.objective.cfg.vocab_topk, best.numel())).indices.sort().values

    # ---- one side of a group of blocks, one for each rank ----

    def _memory(self, name: str, like: Tensor, rows: int, lanes: int) -> Tensor:
        """`[rows, lanes]` in memory that all blocks share; one more row follows."""
        if name not in self.buffers or self.buffers[name].numel() < (rows + 1) * lanes:
            # as wide as any block needs: memory that grew from block to block would be held several times by the
            # allocator
            widest = max(max(b.student.padded, b.teacher.padded if b.teacher else 0) for b in self.blocks)
            self.buffers.pop(name, None)
            self.buffers[name] = like.new_empty((rows + 1) * max(lanes, widest))
        return self.buffers[name][: rows * lanes].view(rows, lanes)

    def _product(self, name: str, weight: Tensor, inputs: Sequence[Tensor], axis: VocabAxis) -> Tensor:
        """Logits `[V, L]` of this rank's block. weight `[V_local, h]`; inputs `[L, h]` of every rank's block, or of
        this one's alone where it has all rows of the head."""
        if not axis.sharded:
            return torch.mm(weight, inputs[0].t(), out=self._memory(name, weight, weight.shape[0], len(inputs[0])))
        widths = self._widths(inputs)
        parts = self._memory(f"parts in {weight.dtype}", weight, weight.shape[0], sum(widths)).view(-1)
        sizes = [weight.shape[0] * lanes for lanes in widths]
        # not strict: the last group may have fewer blocks than there are ranks
        for part, block_inputs in zip(parts.split(sizes), inputs, strict=False):
            torch.mm(weight, block_inputs.t(), out=part.view(weight.shape[0], len(block_inputs)))
        counts, lanes = axis.counts(0), widths[self.comm.rank]
        logits = self._memory(name, weight, sum(counts), lanes)
        # tensor-parallel ranks, per group of blocks: each block's logits to its rank, (T - 1) / T of them over the wire
        self.comm.all_to_all(parts, sizes, [count * lanes for count in counts], logits.view(-1))
        return logits

    def _widths(self, inputs: Sequence[Tensor]) -> list[int]:
        """Lanes of every rank's block; 0 where it has none."""
        return [len(block_inputs) for block_inputs in inputs] + [0] * (self.comm.size - len(inputs))

    def _returned(self, grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients `[V_local, L]` of all blocks of a group, from that of this rank's block `[V, L]`."""
        if not self.axis.sharded:
            return [grad]
        widths = self._widths(inputs)
        into = self._memory(f"parts in {grad.dtype}", grad, self.size, sum(widths)).view(-1)
        sizes = [self.size * lanes for lanes in widths]
        counts = [count * grad.shape[1] for count in self.axis.counts(0)]
        # tensor-parallel ranks, per group of blocks: as many numbers as their logits
        parts = self.comm.all_to_all(grad.view(-1), counts, sizes, into).split(sizes)
        return [part.view(self.size, lanes) for part, lanes in zip(parts[: len(inputs)], widths, strict=False)]

    def _inputs(self, hidden: Tensor, side: SidePositions, block: BlockPositions, dtype: torch.dtype) -> Tensor:
        """Hidden states of the columns `[num_lanes, h]`; zeros in padding."""
        out = hidden.new_empty(side.padded, hidden.shape[1], dtype=dtype)
        out[: side.width] = hidden.index_select(0, side.rows)
        # memory that is not cleared may hold NaN, which no factor of 0 takes out of a product
        out[side.width :] = 0
        if side.mean and block.multi:
            extra = out[block.chunks : block.chunks + side.extras]
            out[block.single : block.chunks] = chunk_means(extra.to(compute_dtype(dtype)), side)
        return out

    # ---- blocks ----

    def run(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        for start in range(0, len(self.blocks), self.comm.size):
            total = total + self._group(self.blocks[start : start + self.comm.size], first=start == 0)
        if self.hidden_grad is not None:
            # each rank multiplied with its own rows of the head; the weight's gradient needs no sum, its rows are this
            # rank's
            self.hidden_grad = self.axis.total(self.hidden_grad)
        self._metrics()
        # tensor-parallel ranks, per micro-batch: the loss of the blocks of each
        return self.comm.sum(total)

    def _group(self, group: Sequence[BlockPositions], *, first: bool) -> Tensor:
        """Loss of this rank's block of a group, and all blocks' gradients."""
        inputs = [self._inputs(self.hidden, block.student, block, self.weight.dtype) for block in group]
        logits = self._product("student", self.weight[: self.size], inputs, self.axis)
        teacher = self._teacher_logits(group)
        total = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        if self.comm.rank < len(group):
            total = self._block(group[self.comm.rank], logits, teacher)
        if self.with_grad:
            grads = self._returned(logits, inputs)
            for number, (block, block_inputs, grad) in enumerate(zip(group, inputs, grads, strict=True)):
                self._through_head(block, block_inputs, grad, first=first and number == 0)
        return total

    def _teacher_logits(self, group: Sequence[BlockPositions]) -> Tensor | None:
        """Teacher logits of this rank's block; None: the teacher has no head here, or no chunk in any block."""
        if self.teacher_weight is None or not any(block.chunks for block in group):
            return None
        (signal,) = self.work.terms[0].teacher.signals
        assert isinstance(signal, TeacherHidden)
        hidden, inputs = signal.hidden.detach(), []
        for number, block in enumerate(group):
            if block.teacher is None or (number != self.comm.rank and not self.teacher_axis.sharded):
                inputs.append(hidden.new_empty(0, hidden.shape[1], dtype=self.teacher_weight.dtype))
            else:
                inputs.append(self._inputs(hidden, block.teacher, block, self.teacher_weight.dtype))
        if not self.teacher_axis.sharded:
            # a rank without a block takes the first, which has no lanes here
            inputs = inputs[self.comm.rank : self.comm.rank + 1] or inputs[:1]
        return self._product("teacher", self.teacher_weight, inputs, self.teacher_axis)

    def _block(self, block: BlockPositions, logits: Tensor, teacher: Tensor | None) -> Tensor:
        """Loss of one block; its gradient replaces the logits `[V, L]`. teacher: its logits `[U, L_t]`."""
        term = self.work.terms[0] if self.work.terms and block.chunks else None
        tau = 1.0 if term is None else term.objective.temperature
        student = SideLogits(block.student, logits, tau).compute_stats()
        total, ce = self._cross_entropy(block, student, tau)
        num_lanes = logits.shape[1]
        prob_coef, label_coef = pad(torch.stack((ce, -ce)), (0, num_lanes - ce.shape[0]))
        one = prob_coef if tau != 1.0 else None
        out = None if term is None else self._distil(term, block, student, teacher)
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
            # at temperature 1 cross-entropy and divergence multiply the same p, so that one factor serves both
            term_prob_coef = out.prob_coef if one is not None else out.prob_coef + prob_coef
            factors = Factors(out.slope_coef, term_prob_coef, one, out.label_coef + label_coef, label)
            whole = factors if out.kept_coef is None else replace(factors, prob_coef=term_prob_coef + out.kept_coef)
            lse = student.stats.lse_tau if out.lse is None else out.lse
            write_gradient(
                student.logits, lse, student.stats.lse, whole, tau, out.slope, aligned=out.aligned, owned=out.owned
            )
            for entries in out.entries:
                assert isinstance(out.slope, Projected)
                assert out.kept_coef is not None
                write_entries(student.logits, lse, student.stats.lse, factors, tau, out.slope, entries, out.kept_coef)
        return total

    def _cross_entropy(self, block: BlockPositions, student: SideLogits, tau: float) -> tuple[Tensor, Tensor]:
        """(loss, gradient factor of each column's p) of cross-entropy; the loss is in float64."""
        width = block.student.width
        log_p = student.token_log_probs
        if tau != 1.0:
            # cross-entropy is at temperature 1: back to the logit, then against the other log-sum-exp
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

    def _distil(
        self, term: TeacherTerm, block: BlockPositions, student: SideLogits, teacher_logits: Tensor | None
    ) -> FastOut:
        assert block.teacher is not None
        teacher = None
        if teacher_logits is not None:
            whole, tau = not term.objective.chooses_ids, term.objective.temperature
            teacher = SideLogits(block.teacher, teacher_logits, tau, whole=whole)
        weight = student.stats.lse.new_ones(block.chunks)
        if term.chunk_weight_C is not None:
            weight = term.chunk_weight_C.index_select(0, block.order_C).float()
        weights = ChunkWeights(weight, weight)
        if term.gated:
            gate = chunk_gate(term, block, student, None if teacher is None else teacher.compute_stats())
            weights = ChunkWeights(weight, weight * gate)
            self._add(f"{term.name}/", {"gate": (gate.sum(), block.chunks)})
        assert term.objective.kernel is not None
        out = _kernel(term.objective.kernel)(term, block, student, teacher, weights)
        self._add(f"{term.name}/", {"kl": (out.loss, block.chunks), **out.metrics})
        if (classes := self.work.classes) is not None:
            ids, rows = block.student.ids[: block.chunks], out.rows * weights.gated * term.objective.temperature**2
            self._add(f"{term.name}/", classes.sums("kl_loss", ids, rows, weight))
            counts = block.student.count_C, block.teacher.count_C
            self._add(f"{term.name}/", chunk_kind_sums("kl_loss", *counts, rows, weight))
        return out

    def _through_head(self, block: BlockPositions, inputs: Tensor, grad: Tensor, *, first: bool) -> None:
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
            # without the means' lanes, whose row is that of a token behind them
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
        totals = {}
        for name, entries in self.sums.items():
            total = _sum([next(values) for _ in entries])
            known = sum(count for _, count in entries if not isinstance(count, Tensor))
            unknown = [next(counts) for _, count in entries if isinstance(count, Tensor)]
            totals[name] = (total, _sum(unknown) if unknown else torch.full_like(total, known))
        self.work.metrics.update(self._over_ranks(totals))

    def _over_ranks(self, totals: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums over the blocks of all ranks."""
        ranks = range(self.comm.size)
        if self.comm.size == 1:
            return totals
        blocks_of_rank = [self.blocks[rank :: self.comm.size] for rank in ranks]
        # which metrics a rank has follows from what its blocks hold; every rank knows all blocks, so this costs no
        # exchange
        kinds = {(any(b.tokens for b in blocks), any(b.chunks for b in blocks)) for blocks in blocks_of_rank}
        names = sorted(totals)
        if len(kinds) > 1:
            # rare: a micro-batch so small that some rank has no block with chunks or tokens, and cannot know the names
            names = self.comm.all_names(names)
        zero = torch.zeros(2, dtype=torch.float64, device=self.hidden.device)
        pairs = [torch.stack(totals[name]) if name in totals else zero for name in names]
        # tensor-parallel ranks, per micro-batch: two numbers per metric
        total = self.comm.sum(torch.stack(pairs)) if pairs else zero[:0]
        return {name: (pair[0], pair[1]) for name, pair in zip(names, total, strict=True)}


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


class FastRowBlockLoss(torch.autograd.Function):
    """`blocks.RowBlockLoss` by kernels; params: the head's weight where it wants a gradient."""

    @staticmethod
    def forward(ctx: Any, run: BlockRun, order: PositionOrder, hidden: Tensor, *params: Tensor) -> Tensor:
        work = FusedLoss(run, order, hidden, ctx.needs_input_grad[2:])
        with torch.no_grad():
            total = work.run()
        ctx.grads = [work.hidden_grad, *([work.weight_grad] if params else [])]
        ctx.dtypes = [hidden.dtype, *(p.dtype for p in params)]
        return total.to(compute_dtype(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.grads, ctx.dtypes, strict=True)
        return None, None, *(None if grad is None else scaled(grad, outer[0], dtype) for grad, dtype in pairs)


def fast_row_block_loss(run: BlockRun, order: PositionOrder, hidden_RH: Tensor) -> Tensor:
    """`blocks.row_block_loss` without its check; the caller verifies."""
    out: Tensor = FastRowBlockLoss.apply(run, order, *asked_for(hidden_RH, *run.head.parameters()))
    return out
