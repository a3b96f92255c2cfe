"""Objectives on the bytes of tokens: what the teacher says, in terms of the student tokens that its tokens begin with.

- **escd** (arXiv 2609.34738): at chunk starts the student tokens that teacher tokens begin with; on the row behind,
  sets of student tokens that go on like the teacher tokens that the student lacks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.errors import LossError
from limbeck.losses.divergences import DivergenceSpec, divergence_entries
from limbeck.losses.objectives.base import (
    BlockLogits,
    BlockOut,
    ChunkBlock,
    ObjectiveOptions,
    ProjectedObjective,
    chunk_sum,
)
from limbeck.losses.objectives.corrected import TINY
from limbeck.losses.objectives.recent import refuse_shards
from limbeck.losses.objectives.tree_kl import log_target, ranges
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection.prefixes import BytePrefixes


class PrefixObjective(ProjectedObjective):
    """An objective on the bytes of both vocabularies: a teacher token counts for the longest student token that it
    begins with."""

    needs_logits = True

    head: Tensor  # [V_t] that student token; V_s: none
    reached: Tensor  # [V_s] bool: some teacher token counts for it

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        if projection.token_bytes is None:
            raise LossError(
                f"mode {self.mode!r} needs the bytes of both vocabularies, which a stored projection does not hold; "
                "pass projections=[load_or_build(student_tokenizer, teacher_tokenizer)]"
            )
        self.prefixes = BytePrefixes(*projection.token_bytes, special_partners(projection))
        head = torch.from_numpy(self.prefixes.head)
        size = len(self.prefixes.student_bytes)
        reached = torch.zeros(size + 1, dtype=torch.bool).index_fill(0, head, True)
        self.register_buffer("head", head.where(head >= 0, size), persistent=False)
        self.register_buffer("reached", reached[:size], persistent=False)

    def fit(self, student_size: int, teacher_size: int) -> None:
        super().fit(student_size, teacher_size)
        sides = (
            ("student", student_size, self.prefixes.student, self.reached.numel()),
            ("teacher", teacher_size, self.prefixes.teacher, self.head.numel()),
        )
        for side, size, tokens, own in sides:
            if size > own or tokens.ids.max(initial=-1) >= size:
                raise LossError(
                    f"the bytes are those of {own} {side} tokens but the {side} scores {size}; mode {self.mode!r} "
                    "needs heads that have a row for every token of a text"
                )
        if student_size < self.reached.numel():
            # what follows are ids without bytes, whose column would be the rest's
            self.head = self.head.clamp(max=student_size)
            self.reached = self.reached[:student_size]
        self.head = self.head[:teacher_size]

    def at_heads(self, probs_nU: Tensor) -> Tensor:
        """Teacher probabilities summed by student token, and in the last column those that begin with none:
        `[n, V_s + 1]`."""
        out = probs_nU.new_zeros(probs_nU.shape[0], self.reached.numel() + 1)
        return out.index_add(1, self.head, probs_nU)


def special_partners(projection: ProjectionLike) -> dict[int, int]:
    """Teacher id -> student id of tokens that stand for each other, those of equal role first."""
    student, teacher = projection.exact_pairs()
    found = dict(zip(np.asarray(teacher).tolist(), np.asarray(student).tolist(), strict=True))
    whole = np.flatnonzero((np.asarray(projection.weights)[:, 0] == 1) & (np.asarray(projection.indices)[:, 0] >= 0))
    for own, other in zip(whole.tolist(), np.asarray(projection.indices)[whole, 0].tolist(), strict=True):
        found.setdefault(other, own)
    return found


def token_divergence(target: Tensor, member: Tensor, log_s: Tensor, spec: DivergenceSpec) -> Tensor:
    """Divergence `[n]` over the student's tokens of `member` and one rest bucket. target: `[n, V_s + 1]`, the rest
    last; log_s: the student's log-probabilities `[n, V_s]`."""
    entries = divergence_entries(log_s, log_target(target[:, :-1], spec), spec)
    rest_s = (log_s.exp() * ~member).sum(-1)
    rest = divergence_entries((rest_s + TINY).log(), log_target(target[:, -1], spec), spec)
    return entries.masked_fill(~member, 0).sum(-1) + rest


class EventTables(nn.Module):
    """`Completions` as tensors that travel with the objective; a group of `num_groups` is no event."""

    group: Tensor
    start: Tensor
    stop: Tensor
    event: Tensor
    first: Tensor
    last: Tensor
    sorted_ids: Tensor

    def __init__(self, prefixes: BytePrefixes) -> None:
        super().__init__()
        found = prefixes.completions
        self.num_groups = found.num_groups
        arrays = {
            "group": np.where(found.group < 0, found.num_groups, found.group),
            "start": found.start,
            "stop": found.stop,
            "event": found.event,
            "first": found.first,
            "last": found.last,
            "sorted_ids": prefixes.student.ids,
        }
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)), persistent=False)


class EventSets(PrefixObjective):
    """ESCD: at a chunk's start, each teacher token at the longest student token that it begins with; on the row behind
    the chunk's first student token, the mass of teacher events that go on from it, each against all student tokens that
    go on so."""

    mode = "escd"

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        self.sets = EventTables(self.prefixes)

    @property
    def reads_next_row(self) -> bool:
        return True

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        refuse_shards(self.mode, student)
        log_NV = student.log_probs(self.temperature)
        log_CV = chunks.student_boundary(log_NV)
        probs_CU = teacher.log_probs(self.temperature).index_select(0, chunks.teacher_first_C).to(log_CV.dtype).exp()
        target = self.at_heads(probs_CU)
        root_C = token_divergence(target, self.reached.expand_as(log_CV), log_CV, self.spec)
        child_C, least_C = self._children(log_NV, chunks, probs_CU)
        count = chunks.count(root_C)
        with torch.no_grad():
            right = (log_CV.argmax(-1) == target.argmax(-1)).sum().to(root_C)
        entered = (least_C >= 0).to(root_C).sum()
        least_C = least_C.clamp(min=0)
        return self.out(
            root_C + child_C,
            chunks,
            root_kl=(chunks.weighted(root_C).sum(), count),
            child_loss=(chunks.weighted(child_C).sum(), entered),
            child_kl=(chunks.weighted(child_C - least_C).sum(), entered),
            lost_mass=(target[:, -1].sum(), count),
            proj_accuracy=(right, count),
        )

    def _children(self, log_NV: Tensor, chunks: ChunkBlock, probs_CU: Tensor) -> tuple[Tensor, Tensor]:
        """(loss of the sets `[C]`, the least that it can be, -1 where no event goes on)."""
        sets, size = self.sets, chunks.num_chunks
        assert chunks.next_row_C is not None
        second = (chunks.student_first_C + 1).clamp(max=chunks.student_row_M.numel() - 1)
        row_C = chunks.student_row_M[second].where(chunks.student_count_C > 1, chunks.next_row_C)
        first_C = chunks.student_ids_M.index_select(0, chunks.student_first_C)
        entry, chunk = ranges(sets.start[first_C], sets.stop[first_C])
        member, owner = ranges(sets.first[entry], sets.last[entry])
        probs = log_NV[row_C[chunk[owner]], sets.sorted_ids[member]].exp()
        inside = chunk_sum(probs, owner, entry.numel())
        groups = probs_CU.new_zeros(size, sets.num_groups + 1)
        groups = groups.index_add(1, sets.group[: probs_CU.shape[1]], probs_CU)
        mass = groups[chunk, sets.event[entry]]
        loss_C = chunk_sum(-mass * (inside + torch.finfo(inside.dtype).tiny).log(), chunk, size)
        total_C = chunk_sum(mass, chunk, size)
        share = mass / total_C[chunk].clamp(min=torch.finfo(mass.dtype).tiny)
        least_C = chunk_sum(-torch.special.xlogy(mass, share), chunk, size)
        return loss_C, least_C.where(total_C > 0, torch.full_like(least_C, -1.0))
