"""Contracts: what a trainer asks of a loss and of a teacher.

The calls of a step, in order, for each channel:

    teacher.attach(layout)                       once per layout of the student
    teacher.ask_ahead(batch)                     of a later step, where the loop has it already
    teacher.prefetch(batch)                      the whole batch of this rank
    batch = loss.prepare_batch(batch)
    counts = data.sum_named(loss.denominators(batch))
    for each micro-batch:
        signal = teacher.signal(microbatch, device)
        inputs = loss.build_layout(microbatch, [signal.row_start_B, ...])
        inputs = loss.shard(inputs, context)     where sequences are split over ranks
        value, metrics = loss.compute_loss(hidden_RH, head, signals, inputs, counts)
    teacher.release()
    loss.step_end(metrics), teacher.step_end()   after the optimizer's step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape
from limbeck.errors import ConfigError
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.utils.metrics import Metrics, Pair

Batch = BatchedDataDict[Mapping[str, Any]]
Counts = dict[str, Tensor]
"""Denominators by name, float64 scalars."""
State = dict[str, Any]
"""State that a checkpoint keeps: tensors, numbers, strings, and lists and dicts of them."""

InputsT = TypeVar("InputsT")


class Loss(nn.Module, ABC, Generic[InputsT]):
    """A sum over the rows of a micro-batch divided by counts of the *global* batch: losses add up over micro-batches,
    ranks and channels.

    A module: running estimates and guards are buffers of its `state_dict()`.

    Attributes:
        num_teachers: how many signals `compute_loss` takes.
        tensor_parallel: works where the head holds some columns of the vocabulary (it asks `head.axis`).
        context_parallel: works where the rows of a sequence are split over ranks (`shard` is implemented).
    """

    num_teachers: int = 0
    tensor_parallel: ClassVar[bool] = False
    context_parallel: ClassVar[bool] = False

    def prepare_batch(self, batch: Batch) -> Batch:
        """The global batch with per-sample entries that need all of it: advantages, chunk layouts."""
        return batch

    @abstractmethod
    def denominators(self, batch: Batch) -> Counts:
        """This rank's part of the denominators; the caller sums them over data-parallel ranks."""

    @abstractmethod
    def build_layout(self, mb: ProcessedMicrobatch, row_starts: Sequence[Tensor | None]) -> InputsT:
        """Which rows of a micro-batch carry which loss, worked out on the CPU.

        Args:
            row_starts: per teacher the flat row `[B]` at which each sample starts in its signal; None: as in the
                student's forward pass.
        """

    def shard(self, inputs: InputsT, comm: Comm) -> InputsT:
        """This rank's part of rows that all ranks of `comm` have prepared."""
        raise ConfigError(f"{type(self).__name__} does not know context parallelism; set context_parallel_size to 1")

    @abstractmethod
    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: InputsT, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """(loss, metrics) of one micro-batch; the loss is divided by the global `counts` and has a graph to
        `hidden_RH` and the head's parameters. Nothing waits for the device inside `blocks.deferred_checks`."""

    def step_end(self, metrics: Mapping[str, Pair]) -> None:
        """Reduced metrics of a finished step; the same on every rank."""

    def summarize(self, metrics: Metrics, counts: Mapping[str, float]) -> Metrics:
        """Metrics of several batches as they would be if all rows were one batch; counts: their sums."""
        return metrics


@dataclass(frozen=True)
class StudentLayout:
    """How the student is laid out, for a teacher that must serve its rows.

    Attributes:
        shape: ranks along each way of splitting the work.
        rows: the ranks that read the same rows as this one.
        vocab_size: tokens of the student's head.
        vocab_bounds: columns of every tensor-parallel rank, half open; empty where the head is whole.
    """

    shape: MeshShape
    rows: Comm
    vocab_size: int
    vocab_bounds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Prefetched:
    """Answer of a teacher that has seen a batch. mask_B: 1 for rows of which it has a signal; None: all."""

    mask_B: Tensor | None = None
    metrics: Metrics = field(default_factory=Metrics)


class Teacher(ABC):
    """Where one teacher's signals come from.

    Attributes:
        vocab_size: tokens that it scores.
        fingerprint: of its tokenizer; empty where it is not known.
        number: its place among the loss's teachers, which names the batch keys of its rows (`teacher_1_input_ids`); a
            teacher without such keys reads the student's own ids.
        on_device: runs a model; it is then asked before the student's forward pass, to keep the device busy. One that
            looks its signals up may begin before it, and is asked after it, while the device works.
        model: the language model that it runs, where that is one of its own: it is compared with the student before the
            first step and writes samples. None for a teacher without weights here, or with the student's.
        asks_ahead: `ask_ahead` has an effect: its answers are worked out elsewhere and take time.
        seconds_waited: for answers that are worked out elsewhere, so far.
    """

    vocab_size: int
    fingerprint: str
    number: int = 0
    on_device: ClassVar[bool] = False
    model: Any = None
    asks_ahead: ClassVar[bool] = False
    seconds_waited: float = 0.0

    def identity(self) -> dict[str, Any]:
        """Facts that tell this teacher from another one, as JSON: a run goes on with the same alone. Every rank must
        ask."""
        return {}

    def verify(self) -> None:
        """Refuse what must not be learnt from. Collective; called once, before the first step."""

    def attach(self, student: StudentLayout) -> None:
        """Learn which ranks read whose rows. Collective; called before each step, with a new layout or the same."""

    def prefetch(self, batch: Batch) -> Prefetched:
        """Ask for all rows of a batch at once. Rows without a signal leave this teacher's denominator."""
        return Prefetched()

    def ask_ahead(self, batch: Batch) -> None:
        """Begin to ask for rows that `prefetch` will be shown in a later step, and return at once. Local, from any
        thread. An error is one of the step that shows them; rows that no step shows are forgotten."""

    def asked(self, batch: Batch) -> bytes:
        """Answers to these rows as far as they were asked ahead, for the rank that they move to; waits for them."""
        return b""

    def take_asked(self, raw: bytes) -> None:
        """Take over what `asked` gave on another rank."""

    @property
    def seconds_asked(self) -> float:
        """Seconds in which answers were worked out elsewhere, so far."""
        return 0.0

    def close(self) -> None:
        """Give up what was asked ahead, and connections; the teacher can still be asked."""

    @property
    def unpacked(self) -> str:
        """Why it does not read packed rows, where it reads rows as they are given; empty where it does."""
        return ""

    @property
    def shared(self) -> bool:
        """Whether several ranks work its signals out together, so that none of them can ask again alone."""
        return False

    def room(self) -> int | None:
        """Most tokens of one pass; None for a teacher that makes none."""
        return None

    def make_room(self, mb: ProcessedMicrobatch, error: BaseException, group_size: int) -> None:
        """After ``error``, by which memory ran out in `signal`: take fewer tokens of a pass from here on."""
        raise error

    def begin(self, mb: ProcessedMicrobatch) -> None:
        """The signal of this micro-batch is the next that will be asked for; returns at once."""

    @abstractmethod
    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> TeacherOutput:
        """The signal of one micro-batch; its `row_start_B` says where each sample lies in it."""

    @abstractmethod
    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probability of every token `[B, T]`, float32 on the CPU: 0 at t = 0 and in padding, NaN where a row could
        not be scored."""

    def release(self) -> None:
        """The forward passes of a step are over: give back what was gathered for them."""

    def step_end(self) -> None:
        """The student has moved."""

    def state_dict(self) -> State:
        """State that a checkpoint keeps of this teacher."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` gave."""
