"""A teacher that is only a folder of stored signals."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.device import to_device
from limbeck.losses.contract import Teacher
from limbeck.losses.signals import Head, HiddenSignal, Signal, TopKSignal
from limbeck.models.language_model import next_tokens
from limbeck.teachers.cache import CacheReader
from limbeck.teachers.cache.format import load_head
from limbeck.teachers.live import key_prefix

READERS = 4
"""Documents of a micro-batch that are looked up side by side: checking and copying one lets the others go on, and
hidden states of one after the other would take about as long as a student's forward pass on a GPU."""


class CachedTeacher(Teacher):
    """A teacher that is only a folder of stored signals; needs no teacher weights.

    ``teacher_fingerprint``: fingerprint of the tokenizer that the batches are made with; a cache of another one is a
    ``CacheError``, and so is a sample that was not cached.
    """

    def __init__(
        self,
        cache: CacheReader | str | Path,
        *,
        teacher_fingerprint: str | Sequence[str] | None = None,
        number: int = 0,
    ) -> None:
        self.reader = (
            cache if isinstance(cache, CacheReader) else CacheReader(cache, teacher_fingerprint=teacher_fingerprint)
        )
        self.number, self.vocab_size = number, self.reader.spec.vocab_size
        self.fingerprint = self.reader.spec.teacher_fingerprint
        self._head: Head | None = None
        self._begun: _LookUp | None = None

    def begin(self, mb: ProcessedMicrobatch) -> None:
        self._begun = self._look_up(mb)

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> Signal:
        """Rows lie one sample after the other, without padding."""
        begun, self._begun = self._begun, None
        found = begun if begun is not None and begun.mb is mb else self._look_up(mb)
        for document in found.documents:
            document.result()
        return found.rows.signal(self, found.ids, found.next_ids, found.starts, device)

    def _look_up(self, mb: ProcessedMicrobatch) -> _LookUp:
        """Let threads collect the stored rows of a micro-batch."""
        data = mb.data_dict
        prefix = key_prefix(data, self.number)
        ids = data[f"{prefix}input_ids"].cpu()
        lengths = data[f"{prefix}input_lengths"].cpu().to(torch.long)
        counted = data["sample_mask"].cpu() > 0
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
        found, following = ids[real], next_tokens(ids, lengths)[real]
        pool = _readers(os.getpid())
        documents = [pool.submit(rows.put, *document) for document in wanted]
        return _LookUp(mb, rows, documents, found, following, starts)

    def head(self, device: torch.device) -> Head:
        """The head stored beside hidden states."""
        if self._head is None:
            self._head = load_head(self.reader.folder, device)
        return self._head

    def log_probs(self, batch: BatchedDataDict) -> Tensor:
        """Masked samples, which need not be cached, are 0."""
        data, prefix = batch, key_prefix(batch, self.number)
        ids = data[f"{prefix}input_ids"].cpu()
        out = torch.zeros(ids.shape, dtype=torch.float32)
        for sample, n in enumerate(data[f"{prefix}input_lengths"].tolist()):
            if n >= 2 and float(data["sample_mask"][sample]) > 0:
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
    """What threads are collecting for a micro-batch: one future for each of its documents; ids, next_ids: the tokens of
    all rows and those that follow them; starts: the first row of each sample."""

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
        found = self.reader.get(ids)
        rows = slice(start, start + len(ids) - 1)
        for target, stored in (
            (self.ids, found.topk_ids),
            (self.logprobs, found.topk_logprobs),
            (self.next_logprob, found.next_logprob),
        ):
            assert stored is not None
            # as numpy arrays: mapped pages are read-only, which torch does not know
            target.numpy()[rows] = stored
        self.filled[rows] = True

    def signal(
        self, owner: CachedTeacher, ids: Tensor, next_ids: Tensor, starts: Tensor, device: torch.device
    ) -> Signal:
        for rows, value in ((self.ids, -1), (self.logprobs, 0.0), (self.next_logprob, 0.0)):
            _fill(rows, self.filled, value)
        ids_Rk = to_device(self.ids, device)
        # an empty place that took two bytes
        ids_Rk.masked_fill_(ids_Rk >= self.reader.spec.vocab_size, -1)
        return TopKSignal(
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
        found = self.reader.get(ids)
        assert found.hidden is not None
        rows = slice(start, start + len(ids) - 1)
        # as integers: numpy has no bfloat16
        self.hidden.view(torch.int16).numpy()[rows] = found.hidden.view(np.int16)
        self.filled[rows] = True

    def signal(
        self, owner: CachedTeacher, ids: Tensor, next_ids: Tensor, starts: Tensor, device: torch.device
    ) -> Signal:
        _fill(self.hidden.view(torch.int16), self.filled, 0)
        return HiddenSignal(to_device(self.hidden, device), owner.head(device), to_device(ids, device), starts)


def _fill(rows: Tensor, filled: np.ndarray, value: float) -> None:
    """Write into the rows that nothing was stored for. By number: a mask would pass over all of them."""
    rows.numpy()[np.flatnonzero(~filled)] = value


def _staged(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows to be filled and sent to the device: pinned where there is one, so that sending them holds nobody up."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
