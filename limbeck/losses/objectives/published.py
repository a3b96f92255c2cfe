"""The published losses as they are published: P-KL, gold and H-KL. Kept for comparison; their flaws are theirs.

Known: averaged teacher log-probabilities are no distribution (mass collapses on chunks of several teacher tokens and
the "KL" can be negative); P-KL's target depends on batch neighbours through its columns and ignores mass outside;
the common-set KL pushes every uncommon token down by p_S[j] times the teacher's mass on the common set.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, ObjectiveOptions, ProjectedObjective
from limbeck.losses.signals import TeacherRows, TeacherScores
from limbeck.losses.vocab.projection import CommonPairs, ProjectionLike, common_pairs

P_KL_EPS = 1e-10


class PKL(ProjectedObjective):
    """Projection KL on the micro-batch's teacher ids K: student (W^T p_S on K, mean over the chunk, normalised) against
    the mean of the teacher's log-softmax within K. The teacher's logits are asked for at K only."""

    mode = "p_kl"
    as_published = True
    needs_logits = True
    lanes = ("first", "mean")
    chooses_ids = True

    @torch.no_grad()
    def choose_ids(self, teacher: TeacherRows, block_rows: int, comm: Comm) -> Tensor:
        """The `vocab_topk` teacher tokens with the greatest raw logit at any aligned row, ascending ids `[K]`.

        Keeps only the column maximum between blocks, and takes it over the ranks that share the micro-batch.
        """
        # the logits of no row tell how many columns are here, also to a rank that has none
        none = teacher.scores(0, 0)
        assert none.logits is not None
        best_U = none.logits.new_full((none.logits.shape[1],), -torch.inf)
        for _, scores in teacher.blocks(block_rows):
            assert scores.logits is not None
            best_U = torch.maximum(best_U, scores.logits.amax(0))
        # context-parallel ranks, per micro-batch: one number per teacher token; all must choose the same ones
        return none.axis.topk(comm.max(best_U)[None], self.options.vocab_topk)[1][0].sort().values

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        if teacher.vocab_ids_K is None:
            raise LossError("P-KL needs the micro-batch's columns; they are chosen before the first block")
        mean_CV = chunks.student_mean(student.log_probs(self.temperature).exp())
        vocab = self.map_between(student, teacher)
        q_CK = vocab.project_at(mean_CV, teacher.vocab_ids_K, learned[0] if learned else None)
        log_q = (q_CK / q_CK.sum(-1, keepdim=True).clamp(min=P_KL_EPS) + P_KL_EPS).log()
        log_t = chunks.teacher_mean(teacher.log_probs(self.temperature))
        entries = log_q.exp() * (log_q - log_t) if self.spec.kind == "reverse" else log_t.exp() * (log_t - log_q)
        right = (q_CK.argmax(-1) == log_t.argmax(-1)).sum()
        return self.out(entries.sum(-1), chunks, proj_accuracy=(right.to(q_CK), chunks.count(q_CK)))


class CommonKL(ProjectedObjective):
    """KL over the common pairs, not renormalised, plus the L1 distance of the sorted uncommon rest.

    Distributions of a chunk are means of log-probabilities. Which pairs are common is all that tells gold and H-KL
    apart.
    """

    as_published = True
    needs_logits = True
    lanes = ("mean", "mean")

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options, projection, teacher_size)
        self.pairs = CommonPairs(*self.common(projection))
        if not self.pairs.student.numel():
            raise LossError(f"mode {self.mode!r} found no common token in the projection; use boundary_kl or p_kl_norm")

    @staticmethod
    @abstractmethod
    def common(projection: ProjectionLike) -> tuple[Tensor, Tensor]:
        """Paired student and teacher ids."""

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        most = self.options.uncommon_topk
        log_s = chunks.student_mean(student.log_probs(self.temperature))
        log_t = chunks.teacher_mean(teacher.log_probs(self.temperature))
        (common_s, common_t, axis), rest = self.pairs.columns(log_s, log_t, (student.axis, teacher.axis))
        if self.spec.kind == "reverse":
            kl_C = axis.sum(common_s.exp() * (common_s - common_t))
        else:
            kl_C = axis.sum(common_t.exp() * (common_t - common_s))
        tops = [own.topk(values.exp(), most)[0] for values, own in rest]
        l1_C = sorted_l1(tops[0], tops[1], most)
        right = (axis.argmax(common_s) == axis.argmax(common_t)).sum()
        count = chunks.count(log_s)
        return self.out(
            kl_C + l1_C,
            chunks,
            common_kl=(chunks.weighted(kl_C).sum(), count),
            uncommon_l1=(chunks.weighted(l1_C).sum(), count),
            proj_accuracy=(right.to(kl_C), count),
        )


class Gold(CommonKL):
    """`CommonKL` on pairs with an exact mapping."""

    mode = "gold"

    @staticmethod
    def common(projection: ProjectionLike) -> tuple[Tensor, Tensor]:
        student, teacher = projection.exact_pairs()
        return torch.as_tensor(student), torch.as_tensor(teacher)


class HybridKL(CommonKL):
    """`CommonKL` on pairs whose largest weight is at least .6."""

    mode = "h_kl"

    @staticmethod
    def common(projection: ProjectionLike) -> tuple[Tensor, Tensor]:
        return common_pairs(projection, 0.6)


def sorted_l1(p_s: Tensor, p_t: Tensor, k: int) -> Tensor:
    """L1 distance of the k largest values of each side in falling order, the shorter list padded with zeros: `[n]`."""
    top_s = p_s.topk(min(k, p_s.shape[1]), dim=-1).values
    top_t = p_t.topk(min(k, p_t.shape[1]), dim=-1).values
    width = max(top_s.shape[1], top_t.shape[1])
    top_s = F.pad(top_s, (0, width - top_s.shape[1]))
    top_t = F.pad(top_t, (0, width - top_t.shape[1]))
    return (top_s - top_t).abs().sum(-1)
