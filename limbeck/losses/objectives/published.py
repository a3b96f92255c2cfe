"""The published losses as they are published: P-KL, gold and H-KL. Kept for comparison; their flaws are theirs.

Known: averaged teacher log-probabilities are no distribution (mass collapses on chunks of several teacher tokens and
the "KL" can be negative); P-KL's target depends on batch neighbours through its columns and ignores mass outside;
the common-set KL pushes every uncommon token down by p_S[j] times the teacher's mass on the common set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.losses.objectives.base import BlockLogits, LeafOut, Mode, TeacherBlock, leaf_out
from limbeck.utils.errors import LossError

P_KL_EPS = 1e-10


def p_kl(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """Projection KL on the micro-batch's columns K: student (W^T p_S on K, mean over the chunk, normalised) against
    the mean of the teacher's log-softmax within K. The block's teacher logits hold only the columns K."""
    if mode.columns is None:
        raise LossError("P-KL needs the micro-batch's columns; they are chosen before the first block")
    mean = block.student_mean(student.log_probs(mode.temperature).exp())
    q = mode.map.project_at(mean, mode.columns, mode.rest_weight)
    log_q = (q / q.sum(-1, keepdim=True).clamp(min=P_KL_EPS) + P_KL_EPS).log()
    log_t = block.teacher_mean(block.scores.log_probs(mode.temperature))
    entries = log_q.exp() * (log_q - log_t) if mode.spec.kind == "reverse" else log_t.exp() * (log_t - log_q)
    right = (q.argmax(-1) == log_t.argmax(-1)).sum()
    return leaf_out(entries.sum(-1), block, mode, proj_accuracy=(right.to(q), _count(q, block)))


def common_kl(student: BlockLogits, block: TeacherBlock, mode: Mode) -> LeafOut:
    """gold and H-KL: KL over the common pairs, not renormalised, plus the L1 distance of the sorted uncommon rest.

    Distributions of a chunk are means of log-probabilities. Which pairs are common is all that tells the two apart.
    """
    log_s = block.student_mean(student.log_probs(mode.temperature))
    log_t = block.teacher_mean(block.scores.log_probs(mode.temperature))
    common_s, common_t, axis = mode.common_columns(log_s, log_t)
    if mode.spec.kind == "reverse":
        kl = axis.sum(common_s.exp() * (common_s - common_t))
    else:
        kl = axis.sum(common_t.exp() * (common_t - common_s))
    tops = [own.topk(rest.exp(), mode.uncommon_topk)[0] for rest, own in mode.uncommon_columns(log_s, log_t)]
    l1 = sorted_l1(tops[0], tops[1], mode.uncommon_topk)
    right = (axis.argmax(common_s) == axis.argmax(common_t)).sum()
    count = _count(log_s, block)
    return leaf_out(
        kl + l1,
        block,
        mode,
        common_kl=((kl * block.weight).sum(), count),
        uncommon_l1=((l1 * block.weight).sum(), count),
        proj_accuracy=(right.to(kl), count),
    )


def sorted_l1(p_s: Tensor, p_t: Tensor, k: int) -> Tensor:
    """L1 distance of the k largest values of each side in falling order, the shorter list padded with zeros: `[n]`."""
    top_s = p_s.topk(min(k, p_s.shape[1]), dim=-1).values
    top_t = p_t.topk(min(k, p_t.shape[1]), dim=-1).values
    width = max(top_s.shape[1], top_t.shape[1])
    top_s = F.pad(top_s, (0, width - top_s.shape[1]))
    top_t = F.pad(top_t, (0, width - top_t.shape[1]))
    return (top_s - top_t).abs().sum(-1)


def _count(like: Tensor, block: TeacherBlock) -> Tensor:
    return torch.full((), float(block.num_chunks), dtype=like.dtype, device=like.device)
