"""The published losses as plain torch on whole logits, for comparison in the same run: P-KL and gold, with
cross-entropy, from hidden states. One product, one softmax, one autograd graph; no blocks, no kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Published:
    """Layouts of one aligned batch (padded rows `[B, T]`) and a projection, on the device."""

    def __init__(self, batch: dict[str, Any], projection: Any, device: str) -> None:
        self.projection = projection
        self.student = self._side(batch, "", "alignment_student_chunk_id", device)
        self.teacher = self._side(batch, "teacher_", "alignment_teacher_chunk_id", device)
        self.chunks = int(batch["alignment_pair_valid"].sum())
        self.labels = batch["input_ids"][:, 1:].reshape(-1).to(device)
        indices = torch.from_numpy(projection.indices).long().to(device)
        weights = torch.from_numpy(projection.weights).to(device)
        keep = indices >= 0
        self.row, place = keep.nonzero(as_tuple=True)
        self.column, self.value = indices[self.row, place], weights[self.row, place]

    @staticmethod
    def _side(batch: dict[str, Any], prefix: str, key: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
        ids, chunk = batch[f"{prefix}input_ids"], batch[key][:, 1:]
        width = batch["alignment_pair_valid"].shape[1]
        rows = (torch.arange(ids.shape[0])[:, None] * ids.shape[1] + torch.arange(ids.shape[1] - 1)).reshape(-1)
        owner = (chunk + torch.arange(ids.shape[0])[:, None] * width).reshape(-1)
        count = torch.bincount(owner, minlength=ids.shape[0] * width).clamp(min=1)
        return rows.to(device), owner.to(device), count.to(device)

    def _mean(self, values: Tensor, side: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out = values.new_zeros(self.chunks, values.shape[1]).index_add(0, side[1], values)
        return out / side[2][:, None]

    def _logits(self, hidden: Tensor, weight: Tensor, side: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.linear(hidden.index_select(0, side[0]), weight).float()

    def p_kl(self, hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, k: int = 8192) -> Tensor:
        """P-KL with the batch's k teacher columns, plus cross-entropy; both as means."""
        logits = self._logits(hidden, weight, self.student)
        with torch.no_grad():
            teacher = self._logits(t_hidden, t_weight, self.teacher)
            columns = teacher.amax(0).topk(k).indices.sort().values
            log_t = self._mean(torch.log_softmax(teacher[:, columns], -1), self.teacher)
            del teacher
            number = torch.full((t_weight.shape[0],), -1, device=hidden.device)
            number[columns] = torch.arange(k, device=hidden.device)
            keep = number[self.column] >= 0
            place = torch.stack((number[self.column[keep]], self.row[keep]))
            mapped = torch.sparse_coo_tensor(place, self.value[keep], (k, weight.shape[0])).coalesce()
        probs = torch.softmax(logits, -1)
        q = self._mean(torch.sparse.mm(mapped, probs.t()).t(), self.student)
        log_q = (q / q.sum(-1, keepdim=True).clamp(min=1e-10) + 1e-10).log()
        return (log_t.exp() * (log_t - log_q)).sum(-1).mean() + F.cross_entropy(logits, self.labels)

    def gold(
        self, hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, common: tuple[Tensor, Tensor],
        uncommon: tuple[Tensor, Tensor], k: int = 8192,
    ) -> Tensor:  # fmt: skip
        """Common-set KL plus L1 of the sorted uncommon rest, plus cross-entropy; all as means."""
        logits = self._logits(hidden, weight, self.student)
        log_s = self._mean(torch.log_softmax(logits, -1), self.student)
        with torch.no_grad():
            log_t = self._mean(torch.log_softmax(self._logits(t_hidden, t_weight, self.teacher), -1), self.teacher)
            common_t = log_t[:, common[1]]
            top_t = log_t[:, uncommon[1]].exp().topk(min(k, uncommon[1].numel()), -1).values
            del log_t
        kl = (common_t.exp() * (common_t - log_s[:, common[0]])).sum(-1)
        top_s = log_s[:, uncommon[0]].exp().topk(min(k, uncommon[0].numel()), -1).values
        width = max(top_s.shape[1], top_t.shape[1])
        top_s, top_t = F.pad(top_s, (0, width - top_s.shape[1])), F.pad(top_t, (0, width - top_t.shape[1]))
        return (kl + (top_s - top_t).abs().sum(-1)).mean() + F.cross_entropy(logits, self.labels)
