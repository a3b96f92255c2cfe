"""What a leaf loss sees: the student's logits of one block, one teacher's share of that block, and the mode's settings.

A leaf is a pure function `(BlockLogits, TeacherBlock, Mode) -> LeafOut`. It may return an explicit gradient with
respect to the block's logits (a fused kernel would); otherwise its loss carries a graph and autograd is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from limbeck.losses.divergences import DivergenceSpec
from limbeck.losses.signals import TeacherScores
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.losses.vocab.projection import VocabMap
from limbeck.utils.errors import LossError

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Named (sum, count) pairs, detached."""


class BlockLogits:
    """Student logits `[n, V_s]` of one block of rows; log-probabilities are computed once per temperature.

    axis: where the columns lie; on a sharded one, logits and log-probabilities are those of this rank's columns.
    """

    def __init__(self, logits: Tensor, axis: VocabAxis = WHOLE) -> None:
        self.logits, self.axis = logits, axis
        self._log_probs: dict[float, Tensor] = {}

    def log_probs(self, temperature: float = 1.0) -> Tensor:
        if temperature not in self._log_probs:
            scaled = self.logits if temperature == 1.0 else self.logits / temperature
            self._log_probs[temperature] = self.axis.log_softmax(scaled)
        return self._log_probs[temperature]


@dataclass
class TeacherBlock:
    """The chunks of one teacher that lie in a block; all indices are local to the block.

    student_row `[ns]`: place among the block's rows; `*_first` `[C]`: index into the token arrays of a chunk's first
    token; `*_count` `[C]`; weight `[C]`: what each chunk counts (1 unless teachers are weighted by score).
    """

    num_chunks: int
    student_row: Tensor
    student_chunk: Tensor
    student_ids: Tensor
    student_first: Tensor
    student_count: Tensor
    teacher_chunk: Tensor
    teacher_ids: Tensor
    teacher_first: Tensor
    teacher_count: Tensor
    weight: Tensor
    scores: TeacherScores

    @property
    def multi(self) -> Tensor:
        """bool `[C]`: more than one token on a side."""
        return (self.student_count > 1) | (self.teacher_count > 1)

    def student_boundary(self, log_probs: Tensor) -> Tensor:
        """Rows of `[n, V]` at which the student predicts each chunk's first token: `[C, V]`."""
        if self.num_chunks == log_probs.shape[0]:  # every row is the start of a chunk: they are in order already
            return log_probs
        return log_probs.index_select(0, self.student_row.index_select(0, self.student_first))

    def student_tokens(self, student: BlockLogits, temperature: float) -> Tensor:
        """Log-probabilities `[ns]` of the realised student tokens."""
        return student.axis.pick(student.log_probs(temperature), self.student_row, self.student_ids)

    def student_mean(self, values: Tensor) -> Tensor:
        """Mean of `[n, V]` over each chunk's student rows: `[C, V]`."""
        rows = values if self.student_row.numel() == values.shape[0] else values.index_select(0, self.student_row)
        return chunk_mean(rows, self.student_chunk, self.student_count)

    def teacher_mean(self, values: Tensor) -> Tensor:
        """Mean of `[nt, V]` over each chunk's teacher rows: `[C, V]`."""
        return chunk_mean(values, self.teacher_chunk, self.teacher_count)


def chunk_sum(values: Tensor, chunk: Tensor, num_chunks: int) -> Tensor:
    """Sums of `[n, ...]` by chunk: `[C, ...]`."""
    return values.new_zeros(num_chunks, *values.shape[1:]).index_add(0, chunk, values)


def chunk_mean(values: Tensor, chunk: Tensor, count: Tensor) -> Tensor:
    if values.shape[0] == count.shape[0]:  # every chunk has one token: nothing to average, nothing to copy
        return values
    return chunk_sum(values, chunk, count.shape[0]) / count[:, None]


@dataclass
class Mode:
    """Settings of one teacher's loss in one micro-batch, and the tables that it needs."""

    temperature: float = 1.0
    spec: DivergenceSpec = field(default_factory=DivergenceSpec)
    chunk_weight: float = 1.0
    vocab: VocabMap | None = None
    rest_weight: Tensor | None = None  # [m] weights of vocab's multi-piece entries; a leaf of the block's graph
    columns: Tensor | None = None  # [K] P-KL: the micro-batch's teacher columns
    common: tuple[Tensor, Tensor] | None = None  # gold, H-KL: paired student and teacher ids
    uncommon: tuple[Tensor, Tensor] | None = None  # their complements
    vocab_topk: int = 8192
    uncommon_topk: int = 8192

    @property
    def map(self) -> VocabMap:
        if self.vocab is None:
            raise LossError("this loss needs a projection between the vocabularies; give one for this teacher")
        return self.vocab

    def common_columns(self, log_s: Tensor, log_t: Tensor) -> tuple[Tensor, Tensor, VocabAxis]:
        """Both sides at the common pairs `[C, P]`, and the axis on which those lie."""
        pairs = getattr(self.vocab, "pairs", None)
        if pairs is not None:
            return pairs.exchange(log_s), log_t.index_select(1, pairs.teacher), pairs.axis
        if self.common is None:
            raise LossError("gold and H-KL need the common token pairs of a projection")
        return log_s.index_select(1, self.common[0]), log_t.index_select(1, self.common[1]), WHOLE

    def uncommon_columns(self, log_s: Tensor, log_t: Tensor) -> list[tuple[Tensor, VocabAxis]]:
        """Each side's columns that are in no pair, and the axis on which they lie."""
        pairs = getattr(self.vocab, "pairs", None)
        if pairs is not None:
            rest = zip((log_s, log_t), pairs.rest, strict=True)
            return [(values.index_select(1, ids), axis) for values, (ids, axis) in rest]
        if self.uncommon is None:
            raise LossError("gold and H-KL need the common token pairs of a projection")
        return [(v.index_select(1, ids), WHOLE) for v, ids in zip((log_s, log_t), self.uncommon, strict=True)]


@dataclass
class LeafOut:
    """Result of a leaf on one block. `loss`: sum over chunks or tokens, by weight. `grad`: its gradient with respect
    to the block's logits where the leaf computes it itself; `loss` then needs no graph."""

    loss: Tensor
    metrics: Metrics
    grad: Tensor | None = None


Leaf = Callable[[BlockLogits, TeacherBlock, Mode], LeafOut]


def leaf_out(rows: Tensor, block: TeacherBlock, mode: Mode, **metrics: tuple[Tensor, Tensor]) -> LeafOut:
    """Weighted sum of per-chunk losses `[C]` times temperature squared, with the metric `kl` beside the others."""
    loss = (rows * block.weight).sum() * mode.temperature**2
    count = loss.new_full((), float(block.num_chunks))
    detached = {name: (value.detach(), n) for name, (value, n) in metrics.items()}
    return LeafOut(loss, {"kl": (loss.detach(), count), **detached})
