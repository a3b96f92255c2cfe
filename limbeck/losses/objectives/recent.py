"""Objectives of 2026 that contradict each other, as far as their definitions can be read: which rows are compared, and
over which events. `docs/losses.md` says what of each is published and what differs here.

- **strict** (arXiv 2610.08448): only chunks of one token on both sides, over the tokens that both vocabularies have.
- **simct** (arXiv 2605.07711): every chunk's start, over those tokens and the chunk itself as one more unit.
- **partition** (NeMo RL's pull request 4177): events that both sides can say, and a rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, binary_divergence, divergence_entries, log1mexp, tail_log_prob
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ObjectiveOptions,
    ProjectedObjective,
    chunk_log_probs,
    chunk_sum,
)
from limbeck.losses.objectives.corrected import ABSENT
from limbeck.losses.objectives.tree_kl import (
    Positions,
    TreeTables,
    inside_student,
    inside_teacher,
    log_target,
    ranges,
)
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.losses.vocab.projection import ProjectionLike


class SharedVocabulary(ProjectedObjective):
    """An objective that reads both sides at the tokens that both vocabularies have."""

    needs_logits = True

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        if not self.equals.student.numel():
            raise LossError(f"mode {self.mode!r} found no common token in the projection; use boundary_kl or p_kl_norm")


class StrictKL(SharedVocabulary):
    """Divergence over the student's `strict_topk` most likely shared tokens, where a chunk is one token on both sides;
    elsewhere the squared log-ratio of the chunk's probability, times `span_weight`.

    Both sides are normalised over those tokens, or keep what is left in a rest bucket (`strict_rest`).
    """

    mode = "strict"
    default_direction = "reverse"

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        options = self.options
        multi_C = chunks.multi_C
        at = (~multi_C).nonzero().squeeze(1)
        log_s, log_t, axis = self.at_equals(student, chunks, teacher, at, self.temperature)
        with torch.no_grad():
            right = (axis.argmax(log_s) == axis.argmax(log_t)).sum().to(log_s)
            shared_s, shared_t = axis.sum(log_s.exp()).sum(), axis.sum(log_t.exp()).sum()
        k = options.strict_topk
        if k is not None and k < axis.width(log_s):
            chosen = axis.topk(log_s.detach(), k)[1]
            log_s, log_t, axis = axis.gather(log_s, chosen), axis.gather(log_t, chosen), WHOLE
        with torch.no_grad():
            kept_s, kept_t = axis.sum(log_s.exp()).sum(), axis.sum(log_t.exp()).sum()
        if not options.strict_rest:
            rows = axis.sum(divergence_entries(axis.log_softmax(log_s), axis.log_softmax(log_t), self.spec))
        else:
            rows = rest_divergence(log_s, log_t, axis, self.spec)
        strict_C = torch.zeros_like(multi_C, dtype=rows.dtype).index_put((at,), rows)
        span_s, span_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        span_C = (span_s - span_t).square() * multi_C
        few, rest = rows.new_tensor(float(at.numel())), multi_C.sum().to(rows)
        return self.out(
            strict_C + options.span_weight * span_C,
            chunks,
            {"strict": strict_C, "span": span_C},
            strict_kl=(chunks.weighted(strict_C).sum(), few),
            span_loss=(chunks.weighted(span_C).sum(), rest),
            shared_mass_student=(shared_s, few),
            shared_mass_teacher=(shared_t, few),
            kept_mass_student=(kept_s, few),
            kept_mass_teacher=(kept_t, few),
            proj_accuracy=(right, few),
        )


def _rest(log_probs: Tensor, axis: VocabAxis) -> Tensor:
    """log of the probability outside the columns `[n]`."""
    if axis.sharded:
        return log1mexp(axis.sum(log_probs.exp()).log())
    return tail_log_prob(log_probs).squeeze(-1)


class UnitKL(SharedVocabulary):
    """SimCT: at a chunk's start, the shared tokens by their log-probability and, where the chunk has several tokens on
    a side, the chunk as one more unit by the mean log-probability of its tokens; softmax of both sides over these."""

    mode = "simct"
    default_direction = "reverse"

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        refuse_shards(self.mode, student)
        multi_C = chunks.multi_C
        every = torch.arange(chunks.num_chunks, device=multi_C.device)
        log_s, log_t, _ = self.at_equals(student, chunks, teacher, every, self.temperature)
        span_s, span_t = chunk_log_probs(student, chunks, teacher, self.temperature)
        unit_s = (span_s / chunks.student_count_C).masked_fill(~multi_C, ABSENT)
        unit_t = (span_t / chunks.teacher_count_C).masked_fill(~multi_C, ABSENT)
        rows_C = unit_divergence(
            torch.cat((log_s, unit_s[:, None]), 1), torch.cat((log_t, unit_t[:, None]), 1), self.spec
        )
        count = chunks.count(rows_C)
        with torch.no_grad():
            right = (log_s.argmax(-1) == log_t.argmax(-1)).sum().to(rows_C)
            shared_s, shared_t = log_s.exp().sum(), log_t.exp().sum()
        return self.out(
            rows_C,
            chunks,
            shared_mass_student=(shared_s, count),
            shared_mass_teacher=(shared_t, count),
            proj_accuracy=(right, count),
        )


def unit_divergence(scores_s: Tensor, scores_t: Tensor, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` between the softmaxes of two sides' scores of units `[n, units]`."""
    return divergence_entries(scores_s.log_softmax(-1), scores_t.log_softmax(-1), spec).sum(-1)


class PartitionKL(SharedVocabulary):
    """Events that both sides can say, and one bucket for all others.

    A chunk of one token on both sides: the tokens that both vocabularies have. Where one side spells the other's token:
    its tokens but the last as they are, then every last token that makes the spelling of some token of the other side.
    Other chunks: the realised tokens alone. The start of chunks of several tokens is compared like that of the others,
    times `root_weight`.
    """

    mode = "partition"
    needs_trees = True

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        trees = projection.trees
        if trees is None:
            raise LossError(
                "mode 'partition' needs the trees of the two vocabularies, which this projection does not hold; build "
                "it anew with `limbeck project -o` or leave projection_matrix_path out"
            )
        self.student_tree, self.teacher_tree = TreeTables(trees.student_tree), TreeTables(trees.teacher_tree)

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        refuse_shards(self.mode, student)
        tau, options, multi_C = self.temperature, self.options, chunks.multi_C
        every = torch.arange(chunks.num_chunks, device=multi_C.device)
        log_s, log_t, axis = self.at_equals(student, chunks, teacher, every, tau)
        first_C = rest_divergence(log_s, log_t, axis, self.spec)
        ours = _Side(
            student.log_probs(tau),
            chunks.student_row_M,
            chunks.student_ids_M,
            chunks.student_chunk_M,
            chunks.student_first_C,
        )
        theirs = _Side(
            teacher.log_probs(tau).to(log_s.dtype),
            torch.arange(chunks.teacher_ids_Q.numel(), device=multi_C.device),
            chunks.teacher_ids_Q,
            chunks.teacher_chunk_Q,
            chunks.teacher_first_C,
        )
        last_C = binary_divergence(ours.chain, theirs.chain, self.spec) * multi_C
        spelled = 0
        for tree, inside, fine, coarse in (
            (self.student_tree, inside_student, ours, theirs),
            (self.teacher_tree, inside_teacher, theirs, ours),
        ):
            at, done_C = inside(tree, chunks)
            at = at.at((done_C[at.chunk] & fine.is_last(at.row)).nonzero().squeeze(1))
            events = _last_tokens(tree, at, fine, coarse)
            target, own = (events.coarse, events.fine) if fine is ours else (events.fine, events.coarse)
            last_C = last_C.index_put((at.chunk,), event_divergence(target, own, events.owner, at.count, self.spec))
            spelled += at.count
        one_C = (~multi_C).to(first_C)
        rows_C = first_C * one_C + options.chunk_weight * (last_C + options.root_weight * first_C * (1 - one_C))
        count, several = chunks.count(rows_C), (1 - one_C).sum()
        with torch.no_grad():
            right = (log_s.argmax(-1) == log_t.argmax(-1)).sum().to(rows_C)
        return self.out(
            rows_C,
            chunks,
            {"first": first_C, "last": last_C},
            boundary_kl=(chunks.weighted(first_C).sum(), count),
            chunk_kl=(chunks.weighted(last_C).sum(), several),
            spelled_chunks=(rows_C.new_tensor(float(spelled)), several),
            proj_accuracy=(right, count),
        )


@dataclass
class _Side:
    """One model in a block: log-probabilities `[rows, V]`, and of each token of the chunks its row, id and chunk."""

    log_probs: Tensor
    row: Tensor
    ids: Tensor
    chunk: Tensor
    first_C: Tensor

    @cached_property
    def tokens(self) -> Tensor:
        """Log-probability of each realised token."""
        return self.log_probs[self.row, self.ids]

    @cached_property
    def chain(self) -> Tensor:
        """Log-probability `[C]` of each chunk's realised tokens."""
        return chunk_sum(self.tokens, self.chunk, self.first_C.numel())

    def is_last(self, token: Tensor) -> Tensor:
        """bool: the tokens end their chunks."""
        ends = F.pad(self.first_C[1:], (0, 1), value=self.ids.numel())
        return token + 1 == ends[self.chunk[token]]


@dataclass(frozen=True)
class _Events:
    """Events at some chunks, one after another: the place of each one's chunk among them, and its probability."""

    owner: Tensor
    coarse: Tensor
    fine: Tensor


def _last_tokens(tree: TreeTables, at: Positions, fine: _Side, coarse: _Side) -> _Events:
    """At the last tokens of spellings: all tokens there that spell a token of the coarse side to its end."""
    child, owner = ranges(tree.child_start[at.node], tree.child_start[at.node + 1])
    whole = (tree.ends[child] > 0).nonzero().squeeze(1)
    child, owner = child[whole], owner[whole]
    member, event = ranges(tree.start[child], tree.start[child] + tree.ends[child])
    start = coarse.row[coarse.first_C[at.chunk]]
    mass = coarse.log_probs[start[owner[event]], tree.order[member]].exp()
    before = fine.chain[at.chunk] - fine.tokens[at.row]
    last = fine.log_probs[fine.row[at.row][owner], tree.token[child]]
    return _Events(owner, chunk_sum(mass, event, child.numel()), (before[owner] + last).exp())


def event_divergence(target: Tensor, student: Tensor, owner: Tensor, count: int, spec: DivergenceSpec) -> Tensor:
    """Divergence `[count]` over events of `owner`'s and one bucket of all others."""
    tiny = torch.finfo(student.dtype).tiny
    entries = divergence_entries((student + tiny).log(), log_target(target, spec), spec)
    rests = [log1mexp((chunk_sum(mass, owner, count) + tiny).log()) for mass in (student, target)]
    return chunk_sum(entries, owner, count) + divergence_entries(rests[0], rests[1], spec)


def rest_divergence(log_s: Tensor, log_t: Tensor, axis: VocabAxis, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` over columns `[n, K]` of probabilities and one bucket of all others."""
    outside = divergence_entries(_rest(log_s, axis), _rest(log_t, axis), spec)
    return axis.sum(divergence_entries(log_s, log_t, spec)) + outside


def refuse_shards(mode: str, student: BlockLogits) -> None:
    """Raise `LossError` where the columns of a vocabulary lie on several ranks."""
    if student.axis.sharded:
        raise LossError(f"mode {mode!r} needs whole vocabularies; set tensor_parallel_size to 1 or use another mode")
