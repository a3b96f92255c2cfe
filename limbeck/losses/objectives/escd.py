"""escd (arXiv 2609.34738): at chunk starts the student tokens that teacher tokens begin with; on the row behind, sets
of student tokens that go on like the teacher tokens that the student lacks."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, Settings, chunk_sum, refuse_shards
from limbeck.losses.objectives.byte_prefix import PrefixObjective, token_divergence
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.objectives.tree_tables import ranges
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.projection import ProjectionLike
from limbeck.projection.prefixes import BytePrefixes


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
        completions = prefixes.completions
        self.num_groups = completions.num_groups
        arrays = {
            "group": np.where(completions.group < 0, completions.num_groups, completions.group),
            "start": completions.start,
            "stop": completions.stop,
            "event": completions.event,
            "first": completions.first,
            "last": completions.last,
            "sorted_ids": prefixes.student.ids,
        }
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)), persistent=False)


class ESCD(PrefixObjective):
    """ESCD: at a chunk's start, each teacher token at the longest student token that it begins with; on the row behind
    the chunk's first student token, the mass of teacher events that go on from it, each against all student tokens that
    go on so."""

    measures = ("root_kl", "child_loss", "child_kl", "uncovered_mass", "proj_accuracy")

    class Config(DivergenceConfig):
        mode: Literal["escd"] = "escd"

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        self.sets = EventTables(self.prefixes)

    @property
    def reads_next_row(self) -> bool:
        return True

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
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
            uncovered_mass=(target[:, -1].sum(), count),
            proj_accuracy=(right, count),
        )

    def _children(self, log_NV: Tensor, chunks: ChunkBlock, probs_CU: Tensor) -> tuple[Tensor, Tensor]:
        """(loss of the sets `[C]`, the least that it can be, -1 where no event goes on)."""
        sets, size = self.sets, chunks.num_chunks
        assert chunks.next_row_C is not None
        # of a last chunk with one token this reads any row, which next_row_C replaces
        second = (chunks.student_first_C + 1).clamp(max=chunks.student_row_M.numel() - 1)
        row_C = chunks.student_row_M[second].where(chunks.student_count_C > 1, chunks.next_row_C)
        first_C = chunks.student_ids_M.index_select(0, chunks.student_first_C)
        entry, chunk = ranges(sets.start[first_C], sets.stop[first_C])
        member, owner = ranges(sets.first[entry], sets.last[entry])
        probs = log_NV[row_C[chunk[owner]], sets.sorted_ids[member]].exp()
        inside = chunk_sum(probs, owner, entry.numel())
        groups = probs_CU.new_zeros(size, sets.num_groups + 1)
        # a head may be narrower than its tokenizer
        groups = groups.index_add(1, sets.group[: probs_CU.shape[1]], probs_CU)
        mass = groups[chunk, sets.event[entry]]
        loss_C = chunk_sum(-mass * (inside + torch.finfo(inside.dtype).tiny).log(), chunk, size)
        total_C = chunk_sum(mass, chunk, size)
        share = mass / total_C[chunk].clamp(min=torch.finfo(mass.dtype).tiny)
        least_C = chunk_sum(-torch.special.xlogy(mass, share), chunk, size)
        return loss_C, least_C.where(total_C > 0, torch.full_like(least_C, -1.0))
