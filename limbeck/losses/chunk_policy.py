"""Reverse KL as a policy gradient: what the student sampled is made more likely where its teacher finds it likelier.

The advantage of a chunk is log p_T(chunk) - log p_S(chunk), each the chain-rule product along the side's own tokens; it
is credited to the student's tokens of the chunk, with the importance ratio to the log-probabilities that the sampler
returned. Only the probabilities of realised tokens are asked of a teacher, so any server will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from limbeck.data.layout import ChunkLayout, TokenLayout, teacher_prefix
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import LossError
from limbeck.losses.blocks import token_log_probs
from limbeck.losses.chunk_loss import ChunkInputs, ChunkLoss
from limbeck.losses.contract import Batch, Counts
from limbeck.losses.objectives.base import chunk_sum
from limbeck.losses.policy_gradient import policy_token_losses
from limbeck.losses.signals import Head, TeacherOutput, TeacherRows, is_one_of, realised_log_probs
from limbeck.utils.metrics import Metrics, Pair

BEHAVIOR = "behavior_logprobs"
"""Batch key: log-probability of every student token `[B, T]` under the model that sampled it."""
KINDS = ("1_1", "1_n", "n_1", "n_m")
"""Student tokens and teacher tokens of a chunk."""


class ChunkPolicyConfig(BaseModel):
    """The policy-gradient form of the loss on sampled text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    credit: Literal["chunk", "answer"] = "chunk"
    """Credit of a token: the advantage of its own chunk, or of the whole answer. The first follows the
    divergence at each place, with the places as they came; the second, at a higher variance, that of whole answers."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """See ``clip_high``."""
    clip_high: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    advantage_clip: float | None = Field(default=10.0, gt=0)
    """Most that a chunk's advantage may be, up or down, in nats: a token of which the student was all but sure and the
    teacher is not would outweigh all others."""
    block_rows: int = Field(default=512, ge=1)
    """Rows that pass through the head at a time."""


@dataclass(kw_only=True)
class ChunkPolicyInputs(ChunkInputs):
    """Chunks of a micro-batch, one layout per teacher; tokens: the student's that lie in any of them; token_M: per
    teacher the place among them of each chunk token; behavior_E: as sampled; share: of the micro-batch that they are
    one of."""

    token_M: list[Tensor]
    behavior_E: Tensor
    share: float = 1.0


class ChunkPolicyLossFn(ChunkLoss[ChunkPolicyInputs]):
    """Policy gradient of the reverse KL to one or several teachers, by chunks.

    num_teachers: each counts alike. classes_V: a class number per student token, with class_names: the metrics then
    tell how the advantages are shared among them. end_ids: the student's tokens that end an answer, for the metrics.
    ends: as of `CrossTokenizerDistillationLossFn`; the advantage of an end is that of the event.
    """

    def __init__(
        self,
        config: ChunkPolicyConfig,
        num_teachers: int = 1,
        *,
        classes_V: Tensor | None = None,
        class_names: Sequence[str] = (),
        end_ids: Sequence[int] = (),
        ends: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.ends = [tuple(of_teacher) for of_teacher in ends or [()] * num_teachers]
        self.config, self.num_teachers, self.class_names = config, num_teachers, tuple(class_names)
        self.classes_V, self.end_ids = classes_V, tuple(end_ids)

    def same_vocabulary(self, batch: Batch) -> list[bool]:
        return [teacher_prefix(batch, i) is None for i in range(self.num_teachers)]

    def reads_text_alone(self, number: int) -> bool:
        return True

    def denominators(self, batch: Batch) -> Counts:
        """Local denominators `chunks_i`, one per teacher; `tokens`: the student's tokens in any of their chunks."""
        layouts = self.select_chunks(batch)
        # rows are counted within each sample here, so the sample is part of a token's number
        rows = torch.cat([layout.sample_C[layout.student_chunk_M] << 32 | layout.student_rows_M for layout in layouts])
        return {
            "tokens": torch.tensor(float(rows.unique().numel()), dtype=torch.float64),
            **super().denominators(batch),
        }

    def make_inputs(self, batch: Batch, row_start_B: Tensor, layouts: list[ChunkLayout]) -> ChunkPolicyInputs:
        """With the chunks' distinct student tokens, and what the sampler said of these."""
        if BEHAVIOR not in batch:
            raise LossError(f"the batch has no {BEHAVIOR}; the policy-gradient form is for text that a sampler wrote")
        tokens, sample_E, token_M = _distinct_tokens(layouts)
        # a row predicts the token after it
        behavior = batch[BEHAVIOR].cpu()[sample_E, tokens.rows_E - row_start_B[sample_E] + 1]
        return ChunkPolicyInputs(tokens=tokens, layouts=layouts, token_M=token_M, behavior_E=behavior)

    def share_of(self, whole: ChunkPolicyInputs, comm: Comm) -> tuple[TokenLayout, list[ChunkLayout]]:
        """One rank's whole chunks, or whole answers where these are credited together."""
        layouts = []
        for layout in whole.layouts:
            part_C = layout.sample_C
            if self.config.credit == "chunk":
                part_C = torch.arange(layout.num_chunks) * comm.size // max(layout.num_chunks, 1)
            layouts.append(layout.take((part_C % comm.size == comm.rank).nonzero().squeeze(1)))
        return _distinct_tokens(layouts)[0], layouts

    def make_share(
        self, whole: ChunkPolicyInputs, tokens: TokenLayout, layouts: list[ChunkLayout], comm: Comm
    ) -> ChunkPolicyInputs:
        return ChunkPolicyInputs(
            tokens=tokens,
            layouts=layouts,
            token_M=_distinct_tokens(layouts)[2],
            # a share's rows are among the whole's, which ascend
            behavior_E=whole.behavior_E[torch.searchsorted(whole.tokens.rows_E, tokens.rows_E)],
            share=whole.share / comm.size,
        )

    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: ChunkPolicyInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch, divided by the global counts, and metrics as (sum, count)."""
        device = hidden_RH.device
        self.check(hidden_RH, head, signals, inputs, defer=False)
        log_E = token_log_probs(hidden_RH, head, inputs.tokens, block_rows=self.config.block_rows)
        inputs = inputs.to(device)
        behavior_E = inputs.behavior_E.to(log_E)
        total, metrics = log_E.new_zeros(()), Metrics()
        for i, (signal, layout) in enumerate(zip(signals, inputs.layouts, strict=True)):
            token_M, chunk_M = inputs.token_M[i], layout.student_chunk_M
            # an advantage is a constant: the gradient is that of the ratio it multiplies
            log_s_E = self._with_one_end(log_E.detach(), hidden_RH, head, inputs.tokens, self.ends[i])
            log_s_C = chunk_sum(log_s_E[token_M], chunk_M, layout.num_chunks)
            teacher_signal = signal.on_shards(head.axis)
            log_t_C = teacher_log_probs(teacher_signal, layout, log_s_C, self.config.block_rows, self.ends[i])
            advantage_C = log_t_C - log_s_C
            limit = self.config.advantage_clip
            clipped_C = advantage_C if limit is None else advantage_C.clamp(-limit, limit)
            credit_C = clipped_C
            if self.config.credit == "answer":
                # not only of what follows: how the teacher cuts what came before depends on it, too
                credit_C = chunk_sum(clipped_C, layout.sample_C, layout.num_samples)[layout.sample_C]
            clip_low, clip_high = self.config.clip_low, self.config.clip_high
            losses_M, token_metrics = policy_token_losses(
                log_E[token_M], credit_C[chunk_M], behavior_E[token_M], clip_low=clip_low, clip_high=clip_high
            )
            if layout.weight_C is not None:
                losses_M = losses_M * layout.weight_C.to(losses_M)[chunk_M]
            count = counts[f"chunks_{i}"].to(total).clamp(min=1e-9)
            total = total + losses_M.sum() / count / self.num_teachers
            metrics.add(token_metrics, f"teacher_{i}/")
            metrics.add(chunk_figures(layout, advantage_C, log_t_C, self.end_ids), f"teacher_{i}/")
            metrics.add(self._credit_shares(layout, clipped_C), f"teacher_{i}/")
            changed = (clipped_C != advantage_C).sum()
            metrics.add({f"teacher_{i}/advantage_clipped": (changed, float(layout.num_chunks))})
        metrics.add({"loss": (total.detach(), inputs.share)})
        return total, metrics

    @torch.no_grad()
    def _with_one_end(
        self, log_E: Tensor, hidden_RH: Tensor, head: Head, tokens: TokenLayout, ends: Sequence[int]
    ) -> Tensor:
        """Log-probabilities of tokens, of an end that of all `ends` together."""
        if not ends:
            return log_E
        end_positions = is_one_of(tokens.ids_E, ends).nonzero().squeeze(1).cpu()
        rows, ones = tokens.rows_E.cpu()[end_positions], torch.ones(end_positions.numel())
        each = [TokenLayout(rows, torch.full_like(rows, end), ones) for end in ends]
        log_each = [token_log_probs(hidden_RH, head, layout, block_rows=self.config.block_rows) for layout in each]
        return log_E.index_copy(0, end_positions.to(log_E.device), torch.stack(log_each).logsumexp(0))

    def _credit_shares(self, layout: ChunkLayout, clipped_C: Tensor) -> dict[str, Pair]:
        """Share of each class of tokens, by a chunk's first, in the sum of absolute advantages."""
        if self.classes_V is None:
            return {}
        class_C = self.classes_V.to(clipped_C.device)[layout.student_ids_M[layout.student_first_C]]
        size_C = clipped_C.abs()
        return {
            f"credit_share_{name}": (size_C[class_C == number].sum(), size_C.sum())
            for number, name in enumerate(self.class_names)
        }


def _distinct_tokens(layouts: Sequence[ChunkLayout]) -> tuple[TokenLayout, Tensor, list[Tensor]]:
    """The student's tokens in the chunks of any teacher, by row; the sample of each; and per teacher the place among
    them of each chunk token."""
    rows = torch.cat([layout.student_rows_M for layout in layouts])
    ids = torch.cat([layout.student_ids_M for layout in layouts])
    sample = torch.cat([layout.sample_C[layout.student_chunk_M] for layout in layouts])
    used, inverse = rows.unique(return_inverse=True)
    first = torch.zeros_like(used).scatter_(0, inverse, torch.arange(rows.numel()))
    tokens = TokenLayout(used, ids[first], torch.ones(used.numel()))
    split = inverse.split([layout.student_rows_M.numel() for layout in layouts])
    return tokens, sample[first], list(split)


def teacher_log_probs(
    signal: TeacherOutput, layout: ChunkLayout, like: Tensor, block_rows: int = 512, ends: Sequence[int] = ()
) -> Tensor:
    """Log-probability `[C]` of each chunk along the teacher's tokens; one of `ends` is as probable as all together."""
    rows = TeacherRows([signal], [layout.teacher_rows_Q])
    parts = [s.log_prob_of(layout.teacher_ids_Q[span], ends=ends).to(like) for span, s in rows.blocks(block_rows)]
    log_Q = torch.cat(parts) if parts else like.new_zeros(0)
    return chunk_sum(log_Q, layout.teacher_chunk_Q, layout.num_chunks)


def chunk_figures(
    layout: ChunkLayout, advantage_C: Tensor, log_t_C: Tensor, end_ids: Sequence[int] = ()
) -> dict[str, Pair]:
    """The teacher's log-probability per token, and the reverse KL as sampled: log p_S - log p_T, by kind of chunk and
    of the student's tokens ``end_ids``, which end an answer."""
    kind_C = 2 * (layout.student_count_C > 1).long() + (layout.teacher_count_C > 1).long()
    out: dict[str, Pair] = {
        "log_prob": (log_t_C.sum(), float(layout.teacher_rows_Q.numel())),
        "reverse_kl": (-advantage_C.sum(), float(layout.num_chunks)),
    }
    for number, name in enumerate(KINDS):
        of_kind = kind_C == number
        out[f"reverse_kl_{name}"] = (-advantage_C[of_kind].sum(), of_kind.sum())
    if end_ids:
        first_C = layout.student_ids_M[layout.student_first_C]
        of_kind = torch.isin(first_C, torch.tensor(end_ids, device=first_C.device))
        out["reverse_kl_end"] = (-advantage_C[of_kind].sum(), of_kind.sum())
    return out


@torch.no_grad()
def sampled_figures(
    hidden_RH: Tensor,
    head: Head,
    signals: Sequence[TeacherOutput],
    layouts: Sequence[ChunkLayout],
    *,
    most: int,
    end_ids: Sequence[int] = (),
    ends: Sequence[Sequence[int]] | None = None,
) -> dict[str, Pair]:
    """`chunk_figures` of every teacher, and the student's entropy where it chose, beside a loss that does not need
    them. most: chunks that are looked at, evenly spaced. ends: as of `ChunkPolicyLossFn`."""
    out: dict[str, Pair] = {}
    for i, (signal, whole) in enumerate(zip(signals, layouts, strict=True)):
        size = min(whole.num_chunks, most)
        chosen = torch.arange(size, device=whole.sample_C.device) * whole.num_chunks // max(size, 1)
        layout = to_device(whole.take(chosen), hidden_RH.device)
        log_p = head.axis.log_softmax(head.logits(hidden_RH.detach().index_select(0, layout.student_rows_M)))
        same_event = () if ends is None else ends[i]
        log_M = realised_log_probs(log_p, layout.student_ids_M, same_event, head.axis)
        log_s_C = chunk_sum(log_M, layout.student_chunk_M, layout.num_chunks)
        log_t_C = teacher_log_probs(signal.on_shards(head.axis), layout, log_s_C, ends=same_event)
        figures = chunk_figures(layout, log_t_C - log_s_C, log_t_C, end_ids)
        out |= {f"teacher_{i}/{name}": pair for name, pair in figures.items()}
        if i == 0:
            out["entropy"] = (-head.axis.sum(log_p.exp() * log_p).sum(), float(log_M.numel()))
    return out
