"""Teacher signals for a micro-batch, from a live model or from a cache, behind one interface.

A source is asked once per micro-batch and teacher. It answers with a signal over flat teacher rows and the row at which
each sample starts; the loss indexes both and checks the token ids that the signal carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedInputs, ProcessedMicrobatch, process_microbatch
from limbeck.distributed.device import to_device
from limbeck.distributed.joint_rows import JointRows
from limbeck.distributed.mesh import MeshShape
from limbeck.losses.inputs import teacher_prefix
from limbeck.losses.signals import Head, HiddenSignal, Signal, TopKSignal
from limbeck.models.cache import CacheReader
from limbeck.models.cache_head import load_head
from limbeck.models.policy import Policy
from limbeck.models.scoring import next_tokens
from limbeck.utils.errors import DataError


class TeacherSource(Protocol):
    """Where a teacher's signals come from.

    A source may also have ``attach(student)`` (it is then told the student's policy before it is asked), ``announce``
    (see ``limbeck.models.step.announce``) and ``release()`` (a step has ended).

    A source with a true ``runs_model`` keeps the device busy, and is asked before the student's forward pass; one that
    looks its signals up is asked after it, while the device works.
    """

    vocab_size: int

    def signal(
        self, microbatch: ProcessedMicrobatch, teacher_index: int, device: torch.device | str
    ) -> tuple[Signal, Tensor]:
        """The signal of one micro-batch on ``device`` and the flat row [B] at which each sample starts in it."""
        ...

    def logprobs(self, data: BatchedDataDict, teacher_index: int) -> Tensor:
        """Log-probability of every teacher token [B, T_t], 0 at the first token and in padding (float32, CPU)."""
        ...


def key_prefix(data: Any, teacher_index: int) -> str:
    """Prefix of the keys that hold a teacher's ids; empty where it reads the student's own."""
    found = teacher_prefix(data, teacher_index)
    return "" if found is None else found[0]


class LiveTeacher:
    """A model in memory. Hands out hidden states with the head; logits exist only inside the loss's row blocks.

    ``student_fingerprint``: tokenizer fingerprint of the student. A teacher that reads the student's own ids must have
    the same; ``None`` skips that check (models without a tokenizer).
    """

    runs_model = True

    def __init__(self, policy: Policy, *, student_fingerprint: str | None = None) -> None:
        self.policy = policy
        self.vocab_size = policy.vocab_size
        self._same_ids = student_fingerprint is None or policy.tokenizer is None
        if not self._same_ids:
            from limbeck.tokens import ByteVocab

            self._same_ids = ByteVocab.from_tokenizer(policy.tokenizer).fingerprint == student_fingerprint
        self._student: MeshShape | None = None
        self._joint: JointRows | None = None
        self._whole_head = False

    def _prefix(self, data: Any, teacher_index: int) -> str:
        prefix = key_prefix(data, teacher_index)
        if not prefix and not self._same_ids:
            raise DataError(
                f"teacher {teacher_index} has another tokenizer than the student, but the batch holds no ids for it; "
                f"collate it with this teacher (keys teacher_{teacher_index}_input_ids, ...)"
            )
        return prefix

    def attach(self, student: Policy) -> None:
        """Learn how the student is laid out; every rank must call it. Any two layouts go together."""
        dims, shape = self.policy.dims, student.dims.shape
        if shape == self._student:
            return
        self._student = shape
        self._joint = JointRows.plan(shape, dims, alike=self.policy.sharding.fsdp)
        # tensor groups are neighbours in both meshes, so equal sizes mean the same ranks
        self._whole_head = dims.shape.tensor not in (1, shape.tensor) or self._borders_differ(student)

    def _borders_differ(self, student: Policy) -> bool:
        """Two heads of one vocabulary may be padded to different numbers of rows, which are what is cut evenly."""
        own, theirs = self.policy.axis, student.axis
        same_size = self.vocab_size == student.vocab_size
        return same_size and own.sharded and theirs.sharded and own.bounds != theirs.bounds

    def release(self) -> None:
        """A step has ended: give back what was gathered for it."""
        self.policy.sharding.release()

    def _inputs(self, data: Any, prefix: str, *, packed: bool) -> ProcessedInputs:
        own = self.policy.cfg
        # packed like the student, otherwise cut to the longest row: padding costs the teacher most
        layout = {
            "sequence_packing": {**own["sequence_packing"], "enabled": packed},
            "dynamic_batching": {**own["dynamic_batching"], "enabled": not packed},
            "dtensor_cfg": own["dtensor_cfg"],
        }
        size = int(own["dtensor_cfg"]["context_parallel_size"])
        return process_microbatch(
            data, self.policy.tokenizer, packed, layout, size, key_prefix=prefix, device=self.policy.device
        )

    def _forward(self, microbatch: ProcessedMicrobatch, prefix: str) -> tuple[Tensor, ProcessedInputs]:
        """Hidden states of this rank's rows, and the inputs that they belong to."""
        policy, data, theirs = self.policy, microbatch.data_dict, microbatch.processed_inputs
        if theirs.is_packed:
            policy.allow_packing()
        if self._joint is None:
            # the student's own inputs serve where both split sequences alike, and any serve a whole model
            student = self._student if policy.sharding.is_sharded else None
            same = student is None or student.context == policy.dims.shape.context
            alike = not prefix and same and not policy.cfg["dtensor_cfg"]["sequence_parallel"]
            inputs = theirs.to(policy.device) if alike else self._inputs(data, prefix, packed=theirs.is_packed)
            return policy.forward_hidden(inputs), inputs
        found: list[tuple[Tensor, ProcessedInputs]] = []
        for own, rows in self._passes(data, prefix):
            inputs = self._inputs(rows, "", packed=theirs.is_packed)
            hidden = policy.forward_hidden(inputs)
            if own:
                found.append((hidden, inputs))
        return found[0]

    def _passes(self, data: Any, prefix: str) -> Iterator[tuple[bool, BatchedDataDict]]:
        """All rows that this rank helps to score, one place's after the other, and which of them are its own."""
        assert self._joint is not None
        device = self.policy.device
        ids, lengths = data[f"{prefix}input_ids"].to(device), data[f"{prefix}input_lengths"].to(device)
        for own, row_ids, row_lengths in self._joint.passes(ids, lengths):
            yield own, BatchedDataDict(input_ids=row_ids, input_lengths=row_lengths)

    @torch.no_grad()
    def signal(
        self, microbatch: ProcessedMicrobatch, teacher_index: int, device: torch.device | str
    ) -> tuple[Signal, Tensor]:
        """See ``TeacherSource``."""
        self.policy.model.eval()
        hidden, inputs = self._forward(microbatch, self._prefix(microbatch.data_dict, teacher_index))
        assert inputs.row_start is not None
        head = self.policy.head(whole=self._whole_head)
        return HiddenSignal(hidden.to(device), head, inputs.input_ids.reshape(-1).to(device)), inputs.row_start

    def logprobs(self, data: BatchedDataDict, teacher_index: int) -> Tensor:
        """See ``TeacherSource``."""
        prefix = self._prefix(data, teacher_index)
        if self._joint is None:
            return self.policy.get_logprobs(data, prefix=prefix)["logprobs"].cpu()
        scored = [(own, self.policy.get_logprobs(rows)["logprobs"]) for own, rows in self._passes(data, prefix)]
        return next(logprobs for own, logprobs in scored if own).cpu()


class CachedTeacher:
    """A teacher that is only a folder of stored signals; needs no teacher weights.

    ``teacher_fingerprint``: fingerprint of the tokenizer that the batches are made with; a cache of another one is a
    ``CacheError``, and so is a sample that was not cached.
    """

    def __init__(self, cache: CacheReader | str | Path, *, teacher_fingerprint: str | None = None) -> None:
        self.reader = (
            cache if isinstance(cache, CacheReader) else CacheReader(cache, teacher_fingerprint=teacher_fingerprint)
        )
        self.vocab_size = self.reader.spec.vocab_size
        self._head: Head | None = None

    def signal(
        self, microbatch: ProcessedMicrobatch, teacher_index: int, device: torch.device | str
    ) -> tuple[Signal, Tensor]:
        """See ``TeacherSource``. Rows lie one sample after the other, without padding."""
        data = microbatch.data_dict
        prefix = key_prefix(data, teacher_index)
        ids = data[f"{prefix}input_ids"].cpu()
        lengths = data[f"{prefix}input_lengths"].cpu().to(torch.long)
        counted = data["sample_mask"].cpu() > 0
        starts = lengths.cumsum(0) - lengths
        build = _TopKRows if self.reader.spec.kind == "topk" else _HiddenRows
        rows = build(self.reader, int(lengths.sum()))
        for sample, (start, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            # rows that count for nothing (fillers, masked samples) need not be in the cache
            if n >= 2 and bool(counted[sample]):
                rows.put(start, ids[sample, :n].numpy())
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        return rows.signal(self, ids[real], next_tokens(ids, lengths)[real], torch.device(device)), starts

    def head(self, device: torch.device) -> Head:
        """The head stored beside hidden states."""
        if self._head is None:
            self._head = load_head(self.reader.folder, device)
        return self._head

    def logprobs(self, data: BatchedDataDict, teacher_index: int) -> Tensor:
        """See ``TeacherSource``; masked samples, which need not be cached, are 0."""
        prefix = key_prefix(data, teacher_index)
        ids = data[f"{prefix}input_ids"].cpu()
        out = torch.zeros(ids.shape, dtype=torch.float32)
        for sample, n in enumerate(data[f"{prefix}input_lengths"].tolist()):
            if n >= 2 and float(data["sample_mask"][sample]) > 0:
                out[sample, 1:n] = torch.from_numpy(self.reader.get(ids[sample, :n].numpy()).next_logprob.copy())
        return out


class _TopKRows:
    """Collects stored rows of one micro-batch; a row without a stored entry keeps the id -1 (empty)."""

    def __init__(self, reader: CacheReader, rows: int) -> None:
        self.reader = reader
        k = reader.spec.k
        self.ids = _staged((rows, k), torch.int32)
        self.logprobs = _staged((rows, k), torch.float16)
        self.came = _staged((rows,), torch.float32)
        self.filled = np.zeros(rows, bool)

    def put(self, start: int, ids: Any) -> None:
        found = self.reader.get(ids)
        rows = slice(start, start + len(ids) - 1)
        for target, stored in (
            (self.ids, found.topk_ids),
            (self.logprobs, found.topk_logprobs),
            (self.came, found.next_logprob),
        ):
            assert stored is not None
            # as numpy arrays: mapped pages are read-only, which torch does not know
            target.numpy()[rows] = stored
        self.filled[rows] = True

    def signal(self, owner: CachedTeacher, ids: Tensor, following: Tensor, device: torch.device) -> Signal:
        empty = torch.from_numpy(~self.filled)
        self.ids[empty], self.logprobs[empty], self.came[empty] = -1, 0.0, 0.0
        # an empty place that took two bytes
        self.ids.masked_fill_(self.ids >= self.reader.spec.vocab_size, -1)
        return TopKSignal(
            to_device(self.ids, device),
            to_device(self.logprobs, device).float(),
            to_device(self.came, device),
            to_device(following, device),
            vocab_size=self.reader.spec.vocab_size,
        )


class _HiddenRows:
    """The same for stored hidden states; a row without an entry is zero."""

    def __init__(self, reader: CacheReader, rows: int) -> None:
        self.reader = reader
        dtype = torch.bfloat16 if reader.spec.hidden_dtype == "bfloat16" else torch.float16
        self.hidden = _staged((rows, reader.spec.hidden_size), dtype)
        self.filled = np.zeros(rows, bool)

    def put(self, start: int, ids: Any) -> None:
        found = self.reader.get(ids)
        assert found.hidden is not None
        rows = slice(start, start + len(ids) - 1)
        # as integers: numpy has no bfloat16
        self.hidden.view(torch.int16).numpy()[rows] = found.hidden.view(np.int16)
        self.filled[rows] = True

    def signal(self, owner: CachedTeacher, ids: Tensor, following: Tensor, device: torch.device) -> Signal:
        self.hidden[torch.from_numpy(~self.filled)] = 0
        return HiddenSignal(to_device(self.hidden, device), owner.head(device), to_device(ids, device))


def _staged(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows to be filled and sent to the device: pinned where there is one, so that sending them holds nobody up."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
