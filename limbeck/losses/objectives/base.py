"""Base of objectives. An objective is a rule that turns the chunks of one teacher in a block of rows into a sum.

Shapes: `N` rows of a block, `C` chunks, `M`/`Q` chunk tokens of student and teacher, `V`/`U` their vocabularies, `K`
chosen ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch
from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor, nn

from limbeck.config import resolve
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, LossError
from limbeck.key_names import near_name
from limbeck.losses.objectives.config import FORMS, ObjectiveConfig
from limbeck.losses.signals import TeacherRows, TeacherScores, is_one_of, log_prob_of_any
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.losses.vocab.projection import CommonPairs, ProjectionLike, ShardedMap, VocabMap
from limbeck.utils.plugins import load_object

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metrics of one block: named (sum, count) pairs, detached."""

Settings = ObjectiveConfig | Mapping[str, Any] | None
"""Settings that an objective is made with: of the type `Config`, or a mapping with its keys."""
LaneKind = Literal["first", "mean"]
"""The lane that stands for a chunk in the kernels' order: the row of its first token, or the mean of its rows."""


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
    student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores, temperature: float, ends: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Chain-rule log-probability of each chunk's realised tokens under student and teacher: `[C]` each. ends: tokens
    of which one stands for all, of a teacher with the student's vocabulary."""
    log_M = chunks.student_tokens(student, temperature)
    if ends:
        any_M = log_prob_of_any(student.log_probs(temperature), ends, student.axis).squeeze(1)[chunks.student_row_M]
        log_M = any_M.where(is_one_of(chunks.student_ids_M, ends), log_M)
    log_Q = teacher.log_prob_of(chunks.teacher_ids_Q, temperature, ends).to(log_M.dtype)
    return (
        chunk_sum(log_M, chunks.student_chunk_M, chunks.num_chunks),
        chunk_sum(log_Q, chunks.teacher_chunk_Q, chunks.num_chunks),
    )


def advantage_gate(advantage_C: Tensor) -> Tensor:
    """Weight of a chunk by the teacher's advantage, log p_T - log p_S of the realised text: a ramp from 0 at -1/2
    to 1 at 1/2. Without gradient."""
    return (advantage_C.detach() + 0.5).clamp(0, 1)


@dataclass
class BlockOut:
    """Result of an objective on one block. `loss`: sum over chunks, by weight. `grad_NV`: its gradient with respect to
    the block's logits where the objective computes it itself; `loss` then needs no graph. rows_C: what each chunk adds
    to `loss`, detached."""

    loss: Tensor
    metrics: Sums
    grad_NV: Tensor | None = None
    rows_C: Tensor | None = None


class Objective(nn.Module, ABC):
    """How one teacher's chunks in a block become a sum. Owns its vocabulary tables.

    A new one is one file beside this one, with a subclass of `ProjectedObjective` whose nested `Config` has its
    settings and its name as ``mode: Literal["name"] = "name"``, which registers it. One of another package is named by
    its place: ``mode: "my_package.my_module:MyObjective"``; `examples/objective.py` is one.

    What a teacher says that is no number (NaN, infinity) must reach the sum of every chunk that reads it: a run then
    stops and names the row. Masks are written so that they keep it: ``~(x <= 0)``, not ``x > 0``.

    Attributes:
        Config: its settings; `cfg` is of this type.
        needs_logits: reads the teacher's whole distribution, so a top-k list will not do.
        default_ce_scale: the factor of cross-entropy beside it, where the run file names none.
        gates_pretrained: a student that is not trained from scratch has a soft gate, where the run file names none.
        kernel: ``module:function`` of its form on vocabulary-major blocks, which is imported where kernels are used.
        lane_kinds: what stands for a chunk in its kernels, student and teacher; None: there are none.
        needs_bytes: works on the bytes of the tokens of both vocabularies, so the projection must hold them.
        needs_trees: works on the cells and trees of the two vocabularies, so the projection must hold them.
        reads_text_alone: compares probabilities of chunks, never of tokens at a place, so it may have a chunk that
            begins with a space which one tokenizer writes by itself.
        chooses_ids: `choose_ids` picks some of the teacher's ids for each micro-batch.
        vocab: the map between the vocabularies; None where both sides share one.
        measures: names of its metrics beside `kl` and `gate`; None: not said.
        ends: tokens that are compared as one event, the end of an answer, where both sides share a vocabulary but end
            with different tokens of it.
    """

    Config: ClassVar[type[ObjectiveConfig]] = ObjectiveConfig
    needs_logits: ClassVar[bool] = False
    default_ce_scale: ClassVar[float] = 1.0
    gates_pretrained: ClassVar[bool] = False
    kernel: ClassVar[str | None] = None
    lane_kinds: ClassVar[tuple[LaneKind, LaneKind] | None] = None
    needs_bytes: ClassVar[bool] = False
    needs_trees: ClassVar[bool] = False
    reads_text_alone: ClassVar[bool] = False
    chooses_ids: ClassVar[bool] = False
    measures: ClassVar[tuple[str, ...] | None] = None
    cfg: ObjectiveConfig
    vocab: VocabMap | None
    ends: tuple[int, ...] = ()

    def __init__(self, cfg: Settings = None, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.vocab = None
        self.cfg, self.temperature = resolve(self.Config, cfg or {}), temperature
        self.spec = self.cfg.spec

    @property
    def mode(self) -> str:
        """Its name in run files."""
        return self.cfg.mode

    @property
    def reads_next_row(self) -> bool:
        """Whether a chunk's loss reads the student's row behind the chunk, too."""
        return False

    def fit(self, student_size: int, teacher_size: int) -> None:
        """Cut the tables to the heads' sizes, or refuse them."""

    def choose_ids(self, teacher: TeacherRows, block_rows: int, comm: Comm) -> Tensor | None:
        """Teacher ids `[K]` at which a micro-batch's logits are wanted; None: all. Once per micro-batch, on every rank
        of `comm`, which have its rows."""
        return None

    def has_kernels(self, *, topk: bool) -> bool:
        """Whether the kernels know this objective with its settings, for logits or (topk) for a top-k list."""
        return self.kernel is not None and not topk and self.spec.kind == "forward" and self.spec.entry_clip is None

    def gate(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> Tensor:
        """`advantage_gate` `[C]` of a block's chunks, at temperature 1. teacher: its whole distribution, or a list."""
        with torch.no_grad():
            log_s, log_t = chunk_log_probs(student, chunks, teacher, 1.0, self.ends)
        return advantage_gate(log_t - log_s)

    @abstractmethod
    def forward(self, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores) -> BlockOut:
        """The loss of a block's chunks and its metrics."""

    def out(self, rows_C: Tensor, chunks: ChunkBlock, **metrics: tuple[Tensor, Tensor]) -> BlockOut:
        """Weighted and gated sum of per-chunk losses times temperature squared, with the metrics `kl` and, where there
        is a gate, `gate` beside the others."""
        rows_C = chunks.counted(rows_C)
        if chunks.gate_C is not None:
            metrics["gate"] = (chunks.gate_C.sum(), chunks.count(rows_C))
        loss = rows_C.sum() * self.temperature**2
        detached = {name: (value.detach(), n) for name, (value, n) in metrics.items()}
        rows_C = rows_C.detach() * self.temperature**2
        return BlockOut(loss, {"kl": (loss.detach(), chunks.count(loss)), **detached}, rows_C=rows_C)


OBJECTIVES: dict[str, type[ProjectedObjective]] = {}
"""Objectives by the names that run files have for them, for teachers with a vocabulary of their own."""


class ProjectedObjective(Objective):
    """An objective between two vocabularies, with a projection from the student's to the teacher's.

    equals: pairs of tokens with equal bytes, or equal role.
    """

    vocab: VocabMap

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # its own Config alone: an inherited one would put the subclass in place of its base
        named = cls.__dict__["Config"].model_fields["mode"].annotation if "Config" in cls.__dict__ else str
        if get_origin(named) is Literal:
            (name,) = get_args(named)
            OBJECTIVES[name], FORMS[name] = cls, cls.Config

    def __init__(
        self,
        cfg: Settings,
        projection: ProjectionLike,
        teacher_size: int | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(cfg, temperature=temperature)
        self.vocab = VocabMap(projection, teacher_size or projection.teacher_size)
        student, teacher = projection.exact_pairs()
        self.equals = CommonPairs(torch.as_tensor(student), torch.as_tensor(teacher))

    def fit(self, student_size: int, teacher_size: int) -> None:
        self.vocab.fit(student_size, teacher_size)

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


def find_objective(mode: str) -> type[ProjectedObjective]:
    """The class of a mode."""
    if mode in OBJECTIVES:
        return OBJECTIVES[mode]
    if ":" not in mode:
        near = near_name(mode, OBJECTIVES)
        hint = f"did you mean {near!r}?" if near else f"expected {', '.join(OBJECTIVES)}, or module:Class of your own"
        raise ConfigError(f"mode is {mode!r}: {hint}")
    kind = load_object(mode, "mode")
    if not (isinstance(kind, type) and issubclass(kind, ProjectedObjective)):
        raise ConfigError(f"mode {mode!r} is no subclass of limbeck.losses.objectives.ProjectedObjective")
    return kind


def read_settings(settings: Mapping[str, Any]) -> ObjectiveConfig:
    """Settings of the objective that `mode` names, from its keys; ValueError where it has not got them."""
    mode = settings.get("mode")
    settings_class = form_of(mode)
    for key in settings.keys() - settings_class.model_fields.keys():
        if holders := sorted(name for name, form in FORMS.items() if key in form.model_fields):
            have = "have" if len(holders) > 1 else "has"
            raise ValueError(f"mode {mode!r} has no {key!r}; {', '.join(holders)} {have} it")
    return settings_class.model_validate(dict(settings))


def form_of(mode: Any) -> type[ObjectiveConfig]:
    """The class of a mode's settings; a ValidationError of the key `mode` where there is no such mode."""
    if not isinstance(mode, str):
        raise _wrong_mode(mode, "expected a name")
    try:
        return find_objective(mode).Config
    except ConfigError as error:
        raise _wrong_mode(mode, str(error).removeprefix(f"mode is {mode!r}: ")) from error


def _wrong_mode(mode: Any, reason: str) -> ValidationError:
    kind = PydanticCustomError("value_error", "{reason}", {"reason": reason})
    return ValidationError.from_exception_data("mode", [InitErrorDetails(type=kind, loc=("mode",), input=mode)])


def refuse_shards(mode: str, student: BlockLogits) -> None:
    """Raise `LossError` where the columns of a vocabulary lie on several ranks."""
    if student.axis.sharded:
        raise LossError(f"mode {mode!r} needs whole vocabularies; set tensor_parallel_size to 1 or use another mode")
