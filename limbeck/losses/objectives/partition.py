"""partition (NeMo RL's pull request 4177): events that both sides can say, and a rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from limbeck.losses.divergences import DivergenceSpec, binary_divergence, divergence_entries, log1mexp
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, Settings, chunk_sum, refuse_shards
from limbeck.losses.objectives.config import DivergenceConfig
from limbeck.losses.objectives.shared_vocabulary import SharedVocabulary, rest_divergence
from limbeck.losses.objectives.tree_kl import log_target
from limbeck.losses.objectives.tree_tables import (
    Positions,
    TreeTables,
    inside_student,
    inside_teacher,
    ranges,
    trees_of,
)
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.projection import ProjectionLike


class Partition(SharedVocabulary):
    """Events that both sides can say, and one bucket for all others.

    A chunk of one token on both sides: the tokens that both vocabularies have. Where one side spells the other's token:
    its tokens but the last as they are, then every last token that makes the spelling of some token of the other side.
    Other chunks: the realised tokens alone. The start of chunks of several tokens is compared like that of the others,
    times `root_weight`.
    """

    measures = ("boundary_kl", "chunk_kl", "spelled_chunks", "proj_accuracy")
    needs_trees = True

    class Config(DivergenceConfig):
        mode: Literal["partition"] = "partition"
        chunk_weight: float = Field(default=1.0, ge=0)
        """Factor of chunks of several tokens."""
        root_weight: float = Field(default=1.0, ge=0)
        """Factor of the start of chunks of several tokens."""

    cfg: Config

    def __init__(
        self, cfg: Settings, projection: ProjectionLike, teacher_size: int | None = None, *, temperature: float = 1.0
    ) -> None:
        super().__init__(cfg, projection, teacher_size, temperature=temperature)
        trees = trees_of(self.mode, projection)
        self.student_tree, self.teacher_tree = TreeTables(trees.student_tree), TreeTables(trees.teacher_tree)

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        refuse_shards(self.mode, student)
        tau, cfg, multi_C = self.temperature, self.cfg, chunks.multi_C
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
            positions, done_C = inside(tree, chunks)
            positions = positions.at((done_C[positions.chunk] & fine.is_last(positions.row)).nonzero().squeeze(1))
            events = _last_tokens(tree, positions, fine, coarse)
            target, source = (events.coarse, events.fine) if fine is ours else (events.fine, events.coarse)
            # put and not added: in place of the binary divergence of these chunks
            last_C = last_C.index_put(
                (positions.chunk,), event_divergence(target, source, events.owner, positions.count, self.spec)
            )
            spelled += positions.count
        one_C = (~multi_C).to(first_C)
        rows_C = first_C * one_C + cfg.chunk_weight * (last_C + cfg.root_weight * first_C * (1 - one_C))
        count, several = chunks.count(rows_C), (1 - one_C).sum()
        with torch.no_grad():
            right = (log_s.argmax(-1) == log_t.argmax(-1)).sum().to(rows_C)
        return self.out(
            rows_C,
            chunks,
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


def _last_tokens(tree: TreeTables, positions: Positions, fine: _Side, coarse: _Side) -> _Events:
    """At the last tokens of spellings: all tokens there that spell a token of the coarse side to its end."""
    child, owner = ranges(tree.child_start[positions.node], tree.child_start[positions.node + 1])
    whole = (tree.ends[child] > 0).nonzero().squeeze(1)
    child, owner = child[whole], owner[whole]
    member, event = ranges(tree.start[child], tree.start[child] + tree.ends[child])
    start = coarse.row[coarse.first_C[positions.chunk]]
    mass = coarse.log_probs[start[owner[event]], tree.order[member]].exp()
    before = fine.chain[positions.chunk] - fine.tokens[positions.row]
    last = fine.log_probs[fine.row[positions.row][owner], tree.token[child]]
    return _Events(owner, chunk_sum(mass, event, child.numel()), (before[owner] + last).exp())


def event_divergence(target: Tensor, student: Tensor, owner: Tensor, count: int, spec: DivergenceSpec) -> Tensor:
    """Divergence `[count]` over events of `owner`'s and one bucket of all others."""
    tiny = torch.finfo(student.dtype).tiny
    entries = divergence_entries((student + tiny).log(), log_target(target, spec), spec)
    rests = [log1mexp((chunk_sum(mass, owner, count) + tiny).log()) for mass in (student, target)]
    return chunk_sum(entries, owner, count) + divergence_entries(rests[0], rests[1], spec)
