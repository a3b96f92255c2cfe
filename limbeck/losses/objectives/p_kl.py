"""p_kl: P-KL as it is published, kept for comparison; its flaws are its own.

Known: averaged teacher log-probabilities are no distribution (mass collapses on chunks of several teacher tokens and
the "KL" can be negative); the target depends on batch neighbours through its columns and ignores mass outside.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.objectives.base import BlockLogits, BlockOut, ChunkBlock, ProjectedObjective
from limbeck.losses.objectives.config import PublishedConfig
from limbeck.losses.signals import TeacherRows, TeacherScores

# part of the published formula
P_KL_EPS = 1e-10


class PKL(ProjectedObjective):
    """Projection KL on the micro-batch's teacher ids K: student (W^T p_S on K, mean over the chunk, normalised) against
    the mean of the teacher's log-softmax within K. The teacher's logits are asked for at K only."""

    measures = ("proj_accuracy",)
    needs_logits = True
    kernel = "limbeck.losses.fast.p_kl:p_kl"
    lane_kinds = ("first", "mean")
    chooses_ids = True

    class Config(PublishedConfig):
        mode: Literal["p_kl"] = "p_kl"
        vocab_topk: int = Field(default=8192, ge=1)
        """Teacher columns of a micro-batch."""

    cfg: Config

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
        return none.axis.topk(comm.max(best_U)[None], self.cfg.vocab_topk)[1][0].sort().values

    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        if teacher.vocab_ids_K is None:
            raise LossError("P-KL needs the micro-batch's columns; they are chosen before the first block")
        mean_CV = chunks.student_mean(student.log_probs(self.temperature).exp())
        vocab = self.map_between(student, teacher)
        q_CK = vocab.project_at(mean_CV, teacher.vocab_ids_K)
        log_q = (q_CK / q_CK.sum(-1, keepdim=True).clamp(min=P_KL_EPS) + P_KL_EPS).log()
        log_t = chunks.teacher_mean(teacher.log_probs(self.temperature))
        entries = log_q.exp() * (log_q - log_t) if self.spec.kind == "reverse" else log_t.exp() * (log_t - log_q)
        right = (q_CK.argmax(-1) == log_t.argmax(-1)).sum()
        return self.out(entries.sum(-1), chunks, proj_accuracy=(right.to(q_CK), chunks.count(q_CK)))
