"""A teacher that is only a folder of stored signals."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.device import to_device
from limbeck.errors import ConfigError
from limbeck.losses.signals import Head, TeacherHidden, TeacherOutput, TeacherTopK
from limbeck.models.language_model import next_tokens
from limbeck.models.loading import ModelConfig, weight_files
from limbeck.teachers.cache import CacheReader, estimate_bytes
from limbeck.teachers.cache.format import CacheSpec, load_head
from limbeck.teachers.cache.origin import check_origin
from limbeck.teachers.kinds import SourceConfig, TeacherKind, TeacherSetup
from limbeck.teachers.live import LiveSource, asked_rows, key_prefix
from limbeck.teachers.server.teacher import ServerSource
from limbeck.tokens import ByteVocab

READERS = 4
"""Documents of a micro-batch that are looked up side by side: checking and copying one lets the others go on, and
hidden states of one after the other would take about as long as a student's forward pass on a GPU."""


class CacheSource(SourceConfig):
    """Stored signals."""

    kind: Literal["cache"] = "cache"
    folder: str
    """Folder written by ``limbeck cache``: train from stored signals, without the teacher's weights."""
    k: int = Field(default=128, ge=1)
    """Most likely tokens that ``limbeck cache`` stores per position; from a server it stores the server's ``k``."""
    holds: Literal["topk", "hidden"] = "topk"
    """Content of what ``limbeck cache`` stores: top-k lists, or hidden states with the head."""
    filled_by: Annotated[LiveSource | ServerSource, Field(discriminator="kind")] = LiveSource()
    """Where ``limbeck cache`` has the signals from: the section's model, or a server; training reads the cache
    alone."""

    def check(self, spec: CacheSpec, number: int) -> None:
        """Refuse a cache that holds another kind of signals than the run file says."""
        if spec.kind != self.holds:
            content = {"topk": f"the {spec.k} most likely tokens", "hidden": "hidden states"}[spec.kind]
            raise ConfigError(
                f"teacher {number}: the cache {self.folder!r} holds {content} of each position, but cache_kind is "
                f"{self.holds!r}; set cache_kind: {spec.kind}, or fill another cache"
            )


class CachedTeacher(TeacherKind):
    """A teacher that is only a folder of stored signals; needs no teacher weights.

    ``teacher_fingerprint``: fingerprint of the tokenizer that the batches are made with; a cache of another one is a
    ``CacheError``, and so is a sample that was not cached. ``unknown_weights``: the run file names a model, and its
    weights could not be compared with those that filled the cache.
    """

    Config = CacheSource
    knows_new_text = False

    @classmethod
    def make(cls, source: CacheSource, setup: TeacherSetup) -> CachedTeacher:
        fingerprint = ByteVocab.from_tokenizer(setup.tokenizer).fingerprint
        cached = cls(source.folder, teacher_fingerprint=fingerprint, number=setup.number)
        source.check(cached.reader.spec, setup.number)
        model = setup.section.model_name
        if model and source.filled_by.kind == "live" and setup.section.init != "random":
            cached.unknown_weights = not check_origin(source.folder, weight_files(setup.section), model)
        return cached

    @classmethod
    def gives_topk(cls, source: CacheSource) -> bool:
        return source.holds == "topk"

    @classmethod
    def needs_model(cls, source: CacheSource) -> bool:
        return source.filled_by.kind == "live"

    @classmethod
    def shown(cls, source: CacheSource, section: ModelConfig) -> str:
        return f"{section.shown_name}, from the cache {source.folder}"

    @classmethod
    def token_bytes(cls, source: CacheSource, width: Callable[[], int]) -> float:
        one = estimate_bytes(1, hidden_size=width()) if source.holds == "hidden" else estimate_bytes(1, k=source.k)
        return float(one)

    def describe(self) -> str:
        unknown = "; which weights filled it is not known here" if self.unknown_weights else ""
        return f"{len(self.reader):,} texts in the cache {self.reader.folder}{unknown}"

    def __init__(
        self,
        cache: CacheReader | str | Path,
        *,
        teacher_fingerprint: str | None = None,
        number: int = 0,
    ) -> None:
        self.reader = (
            cache if isinstance(cache, CacheReader) else CacheReader(cache, teacher_fingerprint=teacher_fingerprint)
        )
        self.number, self.vocab_size = number, self.reader.spec.vocab_size
        self.fingerprint = self.reader.spec.teacher_fingerprint
        self.unknown_weights = False
        self._head: Head | None = None
        self._begun: _LookUp | None = None

    def identity(self) -> dict[str, Any]:
        return self.reader.spec.to_dict()

    def begin(self, mb: ProcessedMicrobatch) -> None:
        self._begun = self._look_up(mb)

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> TeacherOutput:
        """Rows lie one sample after the other, without padding."""
        begun, self._begun = self._begun, None
        look_up = begun if begun is not None and begun.mb is mb else self._look_up(mb)
        for document in look_up.documents:
            # raises what a thread has met, such as a text that is not cached
            document.result()
        return look_up.rows.signal(self, look_up.ids, look_up.next_ids, look_up.starts, device)

    def _look_up(self, mb: ProcessedMicrobatch) -> _LookUp:
        """Let threads collect the stored rows of a micro-batch."""
        data = mb.data_dict
        prefix = key_prefix(data, self.number)
        ids = data[f"{prefix}input_ids"].cpu()
        lengths = data[f"{prefix}input_lengths"].cpu().to(torch.long)
        counted = asked_rows(data, self.number)
        starts = lengths.cumsum(0) - lengths
        build = _TopKRows if self.reader.spec.kind == "topk" else _HiddenRows
        rows = build(self.reader, int(lengths.sum()))
        # rows that count for nothing (fillers, masked samples) need not be in the cache
        wanted = [
            (start, ids[sample, :n].numpy())
            for sample, (start, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
            if n >= 2 and bool(counted[sample])
        ]
        # first what reads no document: threads that are at work hold this one up
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        real_ids, following = ids[real], next_tokens(ids, lengths)[real]
        pool = _readers(os.getpid())
        documents = [pool.submit(rows.put, *document) for document in wanted]
        return _LookUp(mb, rows, documents, real_ids, following, starts)

    def head(self, device: torch.device) -> Head:
        """The head stored beside hidden states."""
        if self._head is None:
            self._head = load_head(self.reader.folder, device)
        return self._head

    def log_probs(self, batch: BatchedDataDict) -> Tensor:
        """Masked samples, which need not be cached, are 0."""
        data, prefix = batch, key_prefix(batch, self.number)
        ids, counted = data[f"{prefix}input_ids"].cpu(), asked_rows(batch, self.number)
        out = torch.zeros(ids.shape, dtype=torch.float32)
        for sample, n in enumerate(data[f"{prefix}input_lengths"].tolist()):
            if n >= 2 and bool(counted[sample]):
                # a copy: mapped pages are read-only, which torch does not know
                out[sample, 1:n] = torch.from_numpy(self.reader.get(ids[sample, :n].numpy()).next_logprob.copy())
        return out


@functools.cache
def _readers(process: int) -> ThreadPoolExecutor:
    """The threads of a process that look documents up, kept from one micro-batch to the next: a thread that starts is
    waited for, beside others that are at work already, and the device has nothing to do meanwhile. A child of this
    process, which does not inherit its threads, has its own."""
    return ThreadPoolExecutor(READERS, thread_name_prefix=f"limbeck-cache-{process}")


@dataclass(frozen=True)
class _LookUp:
    """Documents that threads are collecting for a micro-batch: one future for each of its documents; ids, next_ids: the
    tokens of all rows and those that follow them; starts: the first row of each sample."""

    mb: ProcessedMicrobatch
    rows: _TopKRows | _HiddenRows
    documents: list[Future[None]]
    ids: Tensor
    next_ids: Tensor
    starts: Tensor


class _TopKRows:
    """Collects stored rows of one micro-batch; a row without a stored entry keeps the id -1 (empty)."""

    def __init__(self, reader: CacheReader, rows: int) -> None:
        self.reader = reader
        k = reader.spec.k
        self.ids = _staged((rows, k), torch.int32)
        self.logprobs = _staged((rows, k), torch.float16)
        self.next_logprob = _staged((rows,), torch.float32)
        self.filled = np.zeros(rows, bool)

    def put(self, start: int, ids: Any) -> None:
        signals = self.reader.get(ids)
        rows = slice(start, start + len(ids) - 1)
        for target, stored in (
            (self.ids, signals.topk_ids),
            (self.logprobs, signals.topk_logprobs),
            (self.next_logprob, signals.next_logprob),
        ):
            assert stored is not None
            # as numpy arrays: mapped pages are read-only, which torch does not know
            target.numpy()[rows] = stored
        self.filled[rows] = True

    def signal(
        self, owner: CachedTeacher, ids: Tensor, next_ids: Tensor, starts: Tensor, device: torch.device
    ) -> TeacherOutput:
        for rows, value in ((self.ids, -1), (self.logprobs, 0.0), (self.next_logprob, 0.0)):
            _fill(rows, self.filled, value)
        ids_Rk = to_device(self.ids, device)
        # an empty place that took two bytes
        ids_Rk.masked_fill_(ids_Rk >= self.reader.spec.vocab_size, -1)
        return TeacherTopK(
            ids_Rk,
            to_device(self.logprobs, device).float(),
            to_device(self.next_logprob, device),
            to_device(next_ids, device),
            vocab_size=self.reader.spec.vocab_size,
            row_start_B=starts,
        )


class _HiddenRows:
    """The same for stored hidden states; a row without an entry is zero."""

    def __init__(self, reader: CacheReader, rows: int) -> None:
        self.reader = reader
        dtype = torch.bfloat16 if reader.spec.hidden_dtype == "bfloat16" else torch.float16
        self.hidden = _staged((rows, reader.spec.hidden_size), dtype)
        self.filled = np.zeros(rows, bool)

    def put(self, start: int, ids: Any) -> None:
        signals = self.reader.get(ids)
        assert signals.hidden is not None
        rows = slice(start, start + len(ids) - 1)
        # as integers: numpy has no bfloat16
        self.hidden.view(torch.int16).numpy()[rows] = signals.hidden.view(np.int16)
        self.filled[rows] = True

    def signal(
        self, owner: CachedTeacher, ids: Tensor, next_ids: Tensor, starts: Tensor, device: torch.device
    ) -> TeacherOutput:
        _fill(self.hidden.view(torch.int16), self.filled, 0)
        return TeacherHidden(to_device(self.hidden, device), owner.head(device), to_device(ids, device), starts)


def _fill(rows: Tensor, filled: np.ndarray, value: float) -> None:
    """Write into the rows that nothing was stored for. By number: a mask would pass over all of them."""
    rows.numpy()[np.flatnonzero(~filled)] = value


def _staged(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows to be filled and sent to the device: pinned where there is one, so that sending them holds nobody up."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
