"""A teacher in memory: hidden states with the head, also where its ranks read other rows than the student's.

`SharedForward` is for a teacher split over ranks that read different rows: they run it together, on one place's rows
after the other. Both meshes number their ranks tensor innermost, then context, then data. So the ranks that hold one
copy of the teacher are a block of neighbours, and so are those that read one place's rows; a block of the teacher lies
inside a block of the student, or meets several. Any two sizes go together: where a place's rows meet two blocks, both
run them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import teacher_prefix
from limbeck.data.microbatch import MicrobatchConfig, ProcessedInputs, ProcessedMicrobatch, process_microbatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape, ParallelDims
from limbeck.errors import DataError
from limbeck.losses.contract import StudentLayout
from limbeck.losses.signals import TeacherHidden, TeacherOutput
from limbeck.models.language_model import LanguageModel
from limbeck.models.policy import Policy
from limbeck.teachers.kinds import SourceConfig, TeacherKind, TeacherSetup
from limbeck.tokens import ByteVocab


def key_prefix(data: Mapping[str, Any], teacher_index: int) -> str:
    """Prefix of the keys that hold a teacher's ids; empty where it reads the student's own."""
    prefix_and_number = teacher_prefix(data, teacher_index)
    return "" if prefix_and_number is None else prefix_and_number[0]


def asked_rows(data: Mapping[str, Any], number: int) -> Tensor:
    """`[B]` on the CPU: whether a row counts and this teacher is asked about it."""
    counted: Tensor = data["sample_mask"].cpu() > 0
    key = f"teacher_{number}_sample_mask"
    return counted & (data[key].cpu() > 0) if key in data else counted


def own_prefix(data: Mapping[str, Any], number: int, *, same_ids: bool) -> str:
    """The same, refused where the student's ids would not be this teacher's."""
    prefix = key_prefix(data, number)
    if not prefix and not same_ids:
        raise DataError(
            f"teacher {number} has another tokenizer than the student, but the batch holds no ids for it; "
            f"collate it with this teacher (keys teacher_{number}_input_ids, ...)"
        )
    return prefix


def places_met(student: MeshShape, teacher: MeshShape, block: int) -> list[int]:
    """Data-parallel places of the student whose rows are read in a block of the teacher's ranks."""
    first, last = block * teacher.same_rows, (block + 1) * teacher.same_rows - 1
    return list(range(first // student.same_rows, last // student.same_rows + 1))


@dataclass(frozen=True)
class SharedForward:
    """The passes of one block of a teacher's ranks, all of which take part in each.

    ``owners``: per pass the rank within the block that brings the rows; ``own``: the pass with this rank's rows.
    """

    comm: Comm
    owners: tuple[int, ...]
    own: int

    @classmethod
    def plan(cls, student: MeshShape, teacher: ParallelDims, *, alike: bool) -> SharedForward | None:
        """None where every block of the teacher reads one place's rows. Every rank must ask.

        Args:
            alike: all blocks take as many passes, because they exchange shards in each; the last is then repeated.
        """
        shape = teacher.shape
        met = [places_met(student, shape, block) for block in range(shape.data)]
        most = max(len(places) for places in met)
        if most == 1:
            return None
        rank, places = Comm.world().rank, met[teacher.data.rank]
        first = teacher.data.rank * shape.same_rows
        owners = [max(row * student.same_rows, first) - first for row in places]
        if alike:
            owners += owners[-1:] * (most - len(owners))
        return cls(teacher.rows, tuple(owners), places.index(rank // student.same_rows))

    @torch.no_grad()
    def passes(self, ids: Tensor, lengths: Tensor) -> Iterator[tuple[bool, Tensor, Tensor]]:
        """Per pass: whether it holds this rank's rows, ids ``[B, T]`` and lengths ``[B]`` on the CPU; sizes differ.

        ids, lengths: this rank's rows, possibly none.
        """
        # the ranks of one copy of a teacher, per micro-batch: first how many rows each has, then all ids and lengths,
        # 8 bytes a token; rows are small beside the teacher's forward pass, which all of them run
        shapes = [tuple(size.tolist()) for size in self.comm.gather(torch.tensor(ids.shape))]
        rows, width = (max(column) for column in zip(*shapes, strict=True))
        mine = torch.cat((lengths[:, None].to(ids), F.pad(ids, (0, width - ids.shape[1]))), 1)
        mine = F.pad(mine, (0, 0, 0, rows - ids.shape[0])).contiguous()
        gathered = self.comm.gather(mine) if rows else [mine] * self.comm.size
        for number, owner in enumerate(self.owners):
            rows, width = shapes[owner]
            table = gathered[owner][:rows].cpu()
            yield number == self.own, table[:, 1 : width + 1], table[:, 0]


class LiveSource(SourceConfig):
    """The section's model, in memory beside the student."""

    kind: Literal["live"] = "live"


class LiveTeacher(TeacherKind):
    """A model in memory. Hands out hidden states with the head; logits exist only inside the loss's row blocks.

    ``student_fingerprint``: tokenizer fingerprint of the student. A teacher that reads the student's own ids must have
    the same; ``None`` skips that check (models without a tokenizer).
    """

    Config: ClassVar[type[SourceConfig]] = LiveSource
    loads_model = True
    on_device = True

    @classmethod
    def make(cls, source: Any, setup: TeacherSetup) -> LiveTeacher:
        name = f"teacher_{setup.number}"
        policy = Policy(
            setup.section, setup.tokenizer, name=name, init_optimizer=False, seed=setup.seed, model=setup.model
        )
        return cls(policy, student_fingerprint=setup.vocab.fingerprint, number=setup.number)

    @classmethod
    def holds_weights(cls, source: Any) -> bool:
        return True

    def __init__(self, policy: LanguageModel, *, student_fingerprint: str | None = None, number: int = 0) -> None:
        self.policy, self.model, self.number = policy, policy, number
        self.vocab_size = policy.vocab_size
        known = policy.tokenizer is not None
        self.fingerprint = ByteVocab.from_tokenizer(policy.tokenizer).fingerprint if known else ""
        self._same_ids = student_fingerprint is None or not known or self.fingerprint == student_fingerprint
        self._student: MeshShape | None = None
        self._shared: SharedForward | None = None
        self._whole_head = False

    def _prefix(self, data: Mapping[str, Any]) -> str:
        return own_prefix(data, self.number, same_ids=self._same_ids)

    def identity(self) -> dict[str, Any]:
        return dict(self.policy.identity())

    def attach(self, student: StudentLayout) -> None:
        """Learn how the student is laid out. Collective. Any two layouts go together."""
        dims, shape = self.policy.dims, student.shape
        if shape == self._student:
            return
        self._student = shape
        self._shared = SharedForward.plan(shape, dims, alike=self.policy.sharding.fsdp)
        axis, same_size = self.policy.axis, self.vocab_size == student.vocab_size
        # two heads of one vocabulary may be padded to different numbers of rows, which are what is cut evenly
        differ = axis.sharded and bool(student.vocab_bounds) and axis.bounds != student.vocab_bounds
        # tensor groups are neighbours in both meshes, so equal sizes mean the same ranks
        self._whole_head = dims.shape.tensor not in (1, shape.tensor) or (same_size and differ)

    @property
    def unpacked(self) -> str:
        return self.policy.unpacked

    @property
    def shared(self) -> bool:
        return self._shared is not None or self.policy.sharding.is_sharded

    def room(self) -> int | None:
        return self.policy.budget.tokens(False)

    def make_room(self, mb: ProcessedMicrobatch, error: BaseException, group_size: int) -> None:
        prefix = self._prefix(mb.data_dict)
        self.policy.make_room(mb, error, grad=False, prefix=prefix, group_size=group_size)

    def release(self) -> None:
        """A step has ended: give back what was gathered for it."""
        self.policy.sharding.release()

    def _inputs(self, data: Any, prefix: str, *, packed: bool) -> ProcessedInputs:
        cfg = self.policy.cfg
        on: dict[str, Any] = {"enabled": True}
        if cfg.budgets is None:
            on["sequence_length_round"] = self.policy.length_round
        # packed like the student, otherwise cut to the longest row: padding costs the teacher most
        layout = MicrobatchConfig(
            sequence_packing=cfg.sequence_packing.model_copy(update=on if packed else {"enabled": False}),
            dynamic_batching=cfg.dynamic_batching.model_copy(update={"enabled": False} if packed else on),
            dtensor_cfg=cfg.dtensor_cfg,
        )
        size = cfg.dtensor_cfg.context_parallel_size
        return process_microbatch(
            data, self.policy.tokenizer, packed, layout, size, key_prefix=prefix, device=self.policy.device
        )

    def _forward(self, microbatch: ProcessedMicrobatch, prefix: str) -> tuple[Tensor, ProcessedInputs]:
        """Hidden states of this rank's rows, and the inputs that they belong to."""
        policy, data, theirs = self.policy, microbatch.data_dict, microbatch.processed_inputs
        if theirs.is_packed:
            policy.allow_packing()
        some = self._some_rows(data, prefix, packed=theirs.is_packed)
        if some is not None:
            return policy.forward_hidden(some), some
        if self._shared is None:
            # the student's own inputs serve where both split sequences alike, and any serve a whole model
            student = self._student if policy.sharding.is_sharded else None
            same = student is None or student.context == policy.dims.shape.context
            alike = not prefix and same and not policy.cfg.dtensor_cfg.sequence_parallel
            inputs = theirs.to(policy.device) if alike else self._inputs(data, prefix, packed=theirs.is_packed)
            return policy.forward_hidden(inputs), inputs
        results: list[tuple[Tensor, ProcessedInputs]] = []
        for is_own, rows in self._passes(data, prefix):
            inputs = self._inputs(rows, "", packed=theirs.is_packed)
            hidden = policy.forward_hidden(inputs)
            # the others' are computed for them: all ranks of the block take part in each pass
            if is_own:
                results.append((hidden, inputs))
        return results[0]

    def _some_rows(self, data: Any, prefix: str, *, packed: bool) -> ProcessedInputs | None:
        """Inputs of the rows that this teacher is asked about alone; their starts are those of all rows, of which the
        others have none. None: all are asked about, or ranks that split the model must run the same passes."""
        if f"teacher_{self.number}_sample_mask" not in data or self._shared is not None or self.shared:
            return None
        rows = asked_rows(data, self.number).nonzero().squeeze(1)
        ids, lengths = data[f"{prefix}input_ids"], data[f"{prefix}input_lengths"]
        if len(rows) == len(lengths):
            return None
        # a pass without any row is none that a model could make
        chosen = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
        row_ids = chosen.to(ids.device)
        some: BatchedDataDict = BatchedDataDict(
            input_ids=ids[row_ids], input_lengths=lengths[row_ids.to(lengths.device)]
        )
        inputs = self._inputs(some, "", packed=packed)
        assert inputs.row_start is not None
        starts = inputs.row_start.new_zeros(len(lengths))
        starts[chosen.to(starts.device)] = inputs.row_start
        return replace(inputs, row_start=starts)

    def _passes(self, data: Any, prefix: str) -> Iterator[tuple[bool, BatchedDataDict]]:
        """All rows that this rank helps to score, one place's after the other, and which of them are its own."""
        assert self._shared is not None
        device = self.policy.device
        ids, lengths = data[f"{prefix}input_ids"].to(device), data[f"{prefix}input_lengths"].to(device)
        for is_own, row_ids, row_lengths in self._shared.passes(ids, lengths):
            yield is_own, BatchedDataDict(input_ids=row_ids, input_lengths=row_lengths)

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> TeacherOutput:
        # the model may be the student in the middle of a step
        with self.policy.inference():
            hidden, inputs = self._forward(mb, self._prefix(mb.data_dict))
            head = self.policy.head(whole=self._whole_head)
        # the head may be the student's own, which is being trained
        weight, bias = (None if part is None else part.detach() for part in (head.weight, head.bias))
        ids = inputs.input_ids.reshape(-1).to(device)
        return TeacherHidden(hidden.to(device), replace(head, weight=weight, bias=bias), ids, inputs.row_start)

    def log_probs(self, batch: BatchedDataDict) -> Tensor:
        prefix = self._prefix(batch)
        if self._shared is None:
            scored = [(True, self.policy.get_logprobs(batch, prefix=prefix)["logprobs"])]
        else:
            passes = self._passes(batch, prefix)
            # a list and no generator: every pass is made, since peers wait in it
            scored = [(is_own, self.policy.get_logprobs(rows)["logprobs"]) for is_own, rows in passes]
        log_probs: Tensor = next(logprobs for is_own, logprobs in scored if is_own)
        return log_probs.cpu()
