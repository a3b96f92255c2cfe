"""What an objective is: a rule that turns the chunks of one teacher in a block of rows into a sum.

Shapes: `N` rows of a block, `C` chunks, `M`/`Q` chunk tokens of student and teacher, `V`/`U` their vocabularies, `K`
chosen ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from limbeck.distributed.comm import Comm
from limbeck.losses.divergences import Direction, DivergenceSpec
from limbeck.losses.signals import TeacherRows, TeacherScores
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.losses.vocab.projection import CommonPairs, ProjectionLike, ShardedMap, VocabMap
from limbeck.projection.events import Conditions

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metrics of one block: named (sum, count) pairs, detached."""

Condition = Literal["none", "counted", "cheap", "exact"]
Gate = Literal["none", "hard", "soft"]
ChunkTerms = Literal["open", "all"]
Lane = Literal["first", "mean"]
"""What stands for a chunk in the kernels' order: the row of its first token, or the mean of its rows."""


class BlockLogits:
    """Student logits `[N, V]` of one block of rows; log-probabilities are computed once per temperature.

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


@dataclass(frozen=True)
class ChunkBlock:
    """The chunks of one teacher that lie in a block; all indices are local to the block.

    chunks, teacher_tokens: half-open ranges of them in the micro-batch's layout. student_row_M: place among the
    block's rows; teacher_row_Q: flat row of the signal; `*_first_C`: index into the token arrays of a chunk's first
    token.
    """

    chunks: tuple[int, int]
    teacher_tokens: tuple[int, int]
    teacher_row_Q: Tensor
    student_row_M: Tensor
    student_chunk_M: Tensor
    student_ids_M: Tensor
    student_first_C: Tensor
    student_count_C: Tensor
    teacher_chunk_Q: Tensor
    teacher_ids_Q: Tensor
    teacher_first_C: Tensor
    teacher_count_C: Tensor
    student_last_C: Tensor  # the token before each chunk
    teacher_last_C: Tensor
    next_row_C: Tensor | None = None  # place of the row after each chunk, where an objective reads it
    weight_C: Tensor | None = None  # what each chunk counts; None: 1
    gate_C: Tensor | None = None  # what its loss counts, but not its metrics; None: 1

    @property
    def num_chunks(self) -> int:
        return self.chunks[1] - self.chunks[0]

    @property
    def multi_C(self) -> Tensor:
        """bool: more than one token on a side."""
        return (self.student_count_C > 1) | (self.teacher_count_C > 1)

    def weighted(self, values_C: Tensor) -> Tensor:
        """Values times what their chunks count."""
        return values_C if self.weight_C is None else values_C * self.weight_C.to(values_C.dtype)

    def counted(self, values_C: Tensor) -> Tensor:
        """Values times what their chunks count in the loss."""
        values_C = self.weighted(values_C)
        return values_C if self.gate_C is None else values_C * self.gate_C.to(values_C.dtype)

    def count(self, like: Tensor) -> Tensor:
        """Number of chunks as a scalar."""
        return like.new_full((), float(self.num_chunks))

    def student_boundary(self, values_NV: Tensor) -> Tensor:
        """Rows at which the student predicts each chunk's first token: `[C, V]`."""
        if self.num_chunks == values_NV.shape[0]:  # every row is the start of a chunk: they are in order already
            return values_NV
        return values_NV.index_select(0, self.student_row_M.index_select(0, self.student_first_C))

    def student_tokens(self, student: BlockLogits, temperature: float) -> Tensor:
        """Log-probabilities `[M]` of the realised student tokens."""
        return student.axis.pick(student.log_probs(temperature), self.student_row_M, self.student_ids_M)

    def student_mean(self, values_NV: Tensor) -> Tensor:
        """Mean over each chunk's student rows: `[C, V]`."""
        every = self.student_row_M.numel() == values_NV.shape[0]
        values_MV = values_NV if every else values_NV.index_select(0, self.student_row_M)
        return chunk_mean(values_MV, self.student_chunk_M, self.student_count_C)

    def teacher_mean(self, values_QU: Tensor) -> Tensor:
        """Mean over each chunk's teacher rows: `[C, U]`."""
        return chunk_mean(values_QU, self.teacher_chunk_Q, self.teacher_count_C)


def chunk_sum(values: Tensor, chunk: Tensor, num_chunks: int) -> Tensor:
    """Sums of `[n, ...]` by chunk: `[C, ...]`."""
    return values.new_zeros(num_chunks, *values.shape[1:]).index_add(0, chunk, values)


def chunk_mean(values: Tensor, chunk: Tensor, count: Tensor) -> Tensor:
    if values.shape[0] == count.shape[0]:  # every chunk has one token: nothing to average, nothing to copy
        return values
    return chunk_sum(values, chunk, count.shape[0]) / count[:, None]


def chunk_log_probs(
    student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, temperature: float
) -> tuple[Tensor, Tensor]:
    """Chain-rule log-probability of each chunk's realised tokens under student and teacher: `[C]` each."""
    log_M = chunks.student_tokens(student, temperature)
    log_Q = teacher.log_prob_of(chunks.teacher_ids_Q, temperature).to(log_M.dtype)
    return (
        chunk_sum(log_M, chunks.student_chunk_M, chunks.num_chunks),
        chunk_sum(log_Q, chunks.teacher_chunk_Q, chunks.num_chunks),
    )


def advantage_gate(advantage_C: Tensor, kind: Gate) -> Tensor:
    """What a chunk counts by the teacher's advantage, log p_T - log p_S of the realised text: hard: 1 above 0, else 0;
    soft: a ramp from 0 at -1/2 to 1 at 1/2. Without gradient."""
    advantage_C = advantage_C.detach()
    if kind == "hard":
        return (advantage_C > 0).to(advantage_C.dtype)
    return (advantage_C + 0.5).clamp(0, 1)


@dataclass
class BlockOut:
    """Result of an objective on one block. `loss`: sum over chunks, by weight. `grad_NV`: its gradient with respect to
    the block's logits where the objective computes it itself; `loss` then needs no graph. rows_C: what each chunk adds
    to `loss`, detached. parts: sums over chunks whose weighted sum is `loss`, unweighted, with their graph."""

    loss: Tensor
    metrics: Sums
    grad_NV: Tensor | None = None
    rows_C: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectiveOptions:
    """Settings of objectives, see `limbeck.losses.distillation.CrossTokenizerDistillationLossConfig`."""

    temperature: float = 1.0
    spec: DivergenceSpec = field(default_factory=DivergenceSpec)
    chunk_weight: float = 1.0
    chunk_terms: ChunkTerms = "open"
    vocab_topk: int = 8192
    uncommon_topk: int = 8192
    learnable: bool = False
    root_weight: float = 1.0
    inner_student_weight: float = 1.0
    inner_teacher_weight: float = 1.0
    terminal_weight: float = 0.0
    first_weight: float = 0.0
    condition: Condition = "none"
    gate: Gate = "none"
    strict_topk: int | None = 16
    strict_rest: bool = False
    span_weight: float = 0.0
    mask_blanks: bool = True


class Objective(nn.Module, ABC):
    """How one teacher's chunks in a block become a sum. Owns its vocabulary tables and learnable weights.

    A new one is a file beside this one and an entry of `limbeck.losses.objectives.OBJECTIVES`.

    Attributes:
        mode: its name in run files.
        as_published: kept for comparison; such an objective has no JSD form and takes chunks whose bytes differ unless
            `exact_token_match_only` is set.
        needs_logits: reads the teacher's whole distribution, so a top-k list will not do.
        default_direction: which divergence it is, where the run file names none.
        default_ce_scale: the factor of cross-entropy beside it, where the run file names none.
        gates_pretrained: a student that is not trained from scratch has a soft gate, where the run file names none.
        lanes: what its kernels work on, student and teacher; None: there are none.
        needs_trees: works on the cells and trees of the two vocabularies, so the projection must hold them.
        chooses_ids: `choose_ids` picks some of the teacher's ids for each micro-batch.
        vocab: the map between the vocabularies; None where both sides share one.
        conditions: what the sides' last tokens rule out; None where the objective does not ask.
    """

    mode: ClassVar[str]
    as_published: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    default_direction: ClassVar[Direction] = "forward"
    default_ce_scale: ClassVar[float] = 1.0
    gates_pretrained: ClassVar[bool] = False
    lanes: ClassVar[tuple[Lane, Lane] | None] = None
    needs_trees: ClassVar[bool] = False
    chooses_ids: ClassVar[bool] = False
    vocab: VocabMap | None

    def __init__(self, options: ObjectiveOptions) -> None:
        super().__init__()
        self.vocab = None
        self.conditions: Conditions | None = None
        self.options, self.temperature, self.spec = options, options.temperature, options.spec

    @property
    def reads_next_row(self) -> bool:
        """Whether a chunk's loss reads the student's row behind the chunk, too."""
        return False

    def behind(self, chunks: ChunkBlock) -> Tensor | None:
        """Numbers of the chunks behind which the teacher's row is read, too (`TeacherScores.behind`); None: no such."""
        return None

    def fit(self, student_size: int, teacher_size: int) -> None:
        """Cut the tables to the heads' sizes, or refuse them."""

    def learned(self) -> tuple[Tensor, ...]:
        """Tensors made of this objective's parameters, once per micro-batch; `forward` gets them as leaves of the
        block's graph."""
        return ()

    def choose_ids(self, teacher: TeacherRows, block_rows: int, comm: Comm) -> Tensor | None:
        """Teacher ids `[K]` at which a micro-batch's logits are wanted; None: all. Once per micro-batch, on every rank
        of `comm`, which have its rows."""
        return None

    def has_kernels(self, *, topk: bool) -> bool:
        """Whether the kernels know this objective with its settings, for logits or (topk) for a top-k list."""
        return self.lanes is not None and not topk and self.spec.kind == "forward" and self.spec.entry_clip is None

    def gate(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> Tensor:
        """`advantage_gate` `[C]` of a block's chunks, at temperature 1. teacher: its whole distribution, or a list."""
        with torch.no_grad():
            log_s, log_t = chunk_log_probs(student, chunks, teacher, 1.0)
        return advantage_gate(log_t - log_s, self.options.gate)

    @abstractmethod
    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, *learned: Tensor) -> BlockOut:
        """The loss of a block's chunks and its metrics; learned: what `learned` gave."""

    def out(
        self,
        rows_C: Tensor,
        chunks: ChunkBlock,
        parts: Mapping[str, Tensor] | None = None,
        **metrics: tuple[Tensor, Tensor],
    ) -> BlockOut:
        """Weighted and gated sum of per-chunk losses times temperature squared, with the metrics `kl` and, where there
        is a gate, `gate` beside the others. parts: what the losses are made of, per chunk, without their factors."""
        rows_C = chunks.counted(rows_C)
        if chunks.gate_C is not None:
            metrics["gate"] = (chunks.gate_C.sum(), chunks.count(rows_C))
        loss = rows_C.sum() * self.temperature**2
        detached = {name: (value.detach(), n) for name, (value, n) in metrics.items()}
        rows_C = rows_C.detach() * self.temperature**2
        sums = {name: chunks.counted(part_C).sum() for name, part_C in (parts or {}).items()}
        return BlockOut(loss, {"kl": (loss.detach(), chunks.count(loss)), **detached}, rows_C=rows_C, parts=sums)


class ProjectedObjective(Objective):
    """An objective between two vocabularies, with a projection from the student's to the teacher's.

    equals: pairs of tokens with equal bytes, or equal role.
    """

    vocab: VocabMap

    def __init__(self, options: ObjectiveOptions, projection: ProjectionLike, teacher_size: int | None = None) -> None:
        super().__init__(options)
        self.vocab = VocabMap(projection, teacher_size or projection.teacher_size, learnable=options.learnable)
        student, teacher = projection.exact_pairs()
        self.equals = CommonPairs(torch.as_tensor(student), torch.as_tensor(teacher))

    def fit(self, student_size: int, teacher_size: int) -> None:
        self.vocab.fit(student_size, teacher_size)

    def learned(self) -> tuple[Tensor, ...]:
        return () if self.vocab.log_weight is None else (self.vocab.extra_weight(),)

    def at_equals(
        self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, at: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, VocabAxis]:
        """Log-probabilities `[n, P]` of `equals` at the starts of the chunks `at`, and the axis on which they lie."""
        log_s = chunks.student_boundary(student.log_probs(temperature)).index_select(0, at)
        log_t = teacher.log_probs(temperature).index_select(0, chunks.teacher_first_C[at]).to(log_s.dtype)
        return self.equals.common(log_s, log_t, (student.axis, teacher.axis))

    def map_between(self, student: BlockLogits, teacher: TeacherScores) -> VocabMap | ShardedMap:
        """The map between columns as they lie on both sides."""
        # a list, or logits at chosen ids, lie on no shard, so any split of the teacher's vocabulary will do
        split = teacher.axis.sharded or not student.axis.sharded
        return self.vocab.between(student.axis, teacher.axis if split else student.axis.like(self.vocab.teacher_size))
