"""A teacher behind a server: its most likely tokens per position, asked for while the run goes on.

A batch is announced before it is trained on, so that all its rows are asked for at once and the rows that the server
could not score leave the denominators. See docs/server_teacher.md.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import ServerError
from limbeck.losses.contract import Prefetched, StudentLayout, Teacher
from limbeck.losses.signals import Signal, TopKSignal
from limbeck.models.language_model import next_tokens
from limbeck.teachers.cache import document_key
from limbeck.teachers.live import key_prefix, own_prefix
from limbeck.teachers.server.client import ServerClient, ServerConfig, ServerFailure
from limbeck.teachers.server.protocol import (
    ScoredDocument,
    ServerFacts,
    answer_bytes,
    choices_of,
    pack_scores,
    probe_server,
    read_choice,
    request_body,
    unpack_scores,
)
from limbeck.tokens import ByteVocab, Tokenizer
from limbeck.utils.metrics import Metrics

_LOG = logging.getLogger(__name__)
Ids = npt.NDArray[Any]

_REPEATED = "The same text, scored twice, gives the same numbers: 12 + 30 = 42, and again 42."
_MOST_NOISE = 0.05
"""Nats per token: a tenth of what a teacher's correction usually is."""


class ServerTeacher(Teacher):
    """A teacher that asks an OpenAI-compatible server for prompt log-probabilities.

    Args:
        config: the ``server`` section of a teacher.
        tokenizer: of the teacher; the server's must be the same, which is checked at once.
        student_fingerprint: of the student's tokenizer; a teacher that reads the student's own ids must have the same.
        longest: tokens of the longest row that will be asked for; checked against the server's limit.
        group: processes that read the same rows: the first of them asks and tells the others. Default: the student's,
            once ``attach`` has named it.
        client: for tests.

    Attributes:
        vocab: of the served model's tokenizer.
        failures: rows that could not be scored, by reason.
    """

    def __init__(
        self,
        config: ServerConfig,
        tokenizer: object,
        *,
        student_fingerprint: str | None = None,
        longest: int | None = None,
        group: Any = None,
        client: ServerClient | None = None,
        number: int = 0,
    ) -> None:
        self.number = number
        self.config = config
        self.client = client or ServerClient(config)
        self._tokenizer = Tokenizer.of(tokenizer)
        self.vocab = vocab = ByteVocab.from_tokenizer(tokenizer)
        self.vocab_size, self.fingerprint = vocab.size, vocab.fingerprint
        self.k = min(config.k, vocab.size)
        self.failures: Counter[str] = Counter()
        self._same_ids = student_fingerprint in (None, vocab.fingerprint)
        self._found: dict[str, ScoredDocument | ServerFailure] = {}
        self._announced: set[str] = set()  # in this step
        self._in_a_row = 0
        self._readers = Comm.of(group)
        self._retries = 0
        self.facts = self._probe(tokenizer)
        if longest is not None and self.facts.max_length is not None and longest > self.facts.max_length:
            raise ServerError(
                f"the server {self.client.url} takes up to {self.facts.max_length} tokens at a time and the run's rows "
                f"have up to {longest}; lower data.max_teacher_seq_length or serve with a longer context"
            )

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def step_end(self) -> None:
        self._announced.clear()

    def check_repeats(self) -> None:
        """Refuse a server that scores the same text otherwise the second time: its noise would be learnt from."""
        ids = self._tokenizer.encode(_REPEATED).ids
        first, second = (self._shared([ids])[0] for _ in range(2))
        for one in (first, second):
            self.settle(one, len(ids))
        if isinstance(first, ScoredDocument) and isinstance(second, ScoredDocument):
            gap = float(abs(first.next_logprob - second.next_logprob).max())
            if not gap <= _MOST_NOISE:
                raise ServerError(
                    f"teacher {self.number}: the server {self.client.url} scored the same text twice with "
                    f"log-probabilities up to {gap:.3g} apart, more than {_MOST_NOISE}; it must not vary"
                )

    def attach(self, student: StudentLayout) -> None:
        """Learn which processes read the same rows. Collective."""
        self._readers = student.rows

    def _probe(self, tokenizer: object) -> ServerFacts:
        def ask() -> bytes:
            return json.dumps(asdict(probe_server(self.client, self.config, tokenizer))).encode()

        # ranks that read the same rows, once per run: some hundred bytes; the server is asked once for all of them
        return ServerFacts(**json.loads(self._readers.first_only(ask)))

    # -- asking -----------------------------------------------------------------------------------------------------

    def score(self, documents: Sequence[Ids]) -> list[ScoredDocument | ServerFailure]:
        """Scores of every document (token ids [n], n >= 2), or why there are none; all requests at once."""
        groups = list(_groups(documents, self.config.prompts_per_request, self.config.tokens_per_request))
        out: list[Any] = [None] * len(documents)
        with ThreadPoolExecutor(max_workers=min(self.config.concurrency, max(len(groups), 1))) as pool:
            for group, found in zip(
                groups, pool.map(lambda g: self._together([documents[i] for i in g]), groups), strict=True
            ):
                for place, one in zip(group, found, strict=True):
                    out[place] = one
        return out

    def _shared(self, documents: Sequence[Ids]) -> list[ScoredDocument | ServerFailure]:
        """``score`` by one of the processes that read these rows, told to all of them."""

        def ask() -> bytes:
            before = self.client.counts["retries"]
            found = self.score(documents)
            return pack_scores(found, retries=self.client.counts["retries"] - before)

        # ranks that read the same rows, per batch: the packed scores, so that a row is asked for (and paid) once
        found, facts = unpack_scores(self._readers.first_only(ask))
        self._retries += facts["retries"]
        return found

    def _together(self, documents: list[Ids]) -> list[ScoredDocument | ServerFailure]:
        """One request; where it fails as a whole, its rows are asked for one by one, so that one cannot spoil all."""
        try:
            return self._request(documents)
        except ServerFailure as failure:
            if len(documents) == 1:
                return [failure]
            return [self._together([document])[0] for document in documents]

    def _request(self, documents: list[Ids]) -> list[ScoredDocument | ServerFailure]:
        prompts = [[int(i) for i in d] for d in documents]
        body = request_body(self.facts.model, prompts, self.k, self.facts.style)
        tokens = sum(map(len, prompts))
        most = answer_bytes(tokens, self.k)
        status, answer = self.client.request("POST", "/completions", body, tokens=tokens, max_bytes=most)
        if status == 404:
            raise ServerError(
                f"the server {self.client.url} no longer serves the model {self.facts.model!r} (HTTP 404)"
            )
        if status != 200:
            raise ServerFailure(f"http_{status}", self.client.error_text(answer))
        out: list[ScoredDocument | ServerFailure] = []
        for choice, ids in zip(choices_of(answer, len(prompts)), prompts, strict=True):
            try:
                out.append(read_choice(choice, ids, self.k, self.vocab_size, self.facts.style))
            except ServerFailure as failure:
                out.append(failure)
        return out

    # -- a batch ----------------------------------------------------------------------------------------------------

    def _rows(self, data: Mapping[str, Any]) -> dict[int, Ids]:
        """Token ids of the rows that count, by their number in the batch."""
        prefix = own_prefix(data, self.number, same_ids=self._same_ids)
        counted = data["sample_mask"].cpu() > 0
        if f"teacher_{self.number}_sample_mask" in data:
            counted = counted & (data[f"teacher_{self.number}_sample_mask"].cpu() > 0)
        ids, lengths = data[f"{prefix}input_ids"].cpu().numpy(), data[f"{prefix}input_lengths"].tolist()
        return {row: ids[row, :n] for row, n in enumerate(lengths) if n >= 2 and bool(counted[row])}

    def _fetch(self, rows: dict[int, Ids], *, keep: bool) -> dict[int, ScoredDocument | ServerFailure]:
        """Scores by row, from the announced batch where they are there, otherwise from the server."""
        keys = {row: document_key(ids) for row, ids in rows.items()}
        missing = {key: rows[row] for row, key in keys.items() if key not in self._found}
        found = dict(zip(missing, self._shared(list(missing.values())), strict=True)) if missing else {}
        if keep:
            kept = {*keys.values(), *self._announced}
            self._found = {key: one for key, one in self._found.items() if key in kept} | found
            self._announced |= set(keys.values())
        return {row: found[key] if key in found else self._found[key] for row, key in keys.items()}

    def prefetch(self, batch: BatchedDataDict) -> Prefetched:
        """Ask for a whole batch. A row that cannot be scored stops the run or is left out, as ``on_failure`` says."""
        data = batch
        before = self._retries
        # what is kept from other batches is only of use where a row comes again, or in a later channel of this step
        self._found = {key: one for key, one in self._found.items() if isinstance(one, ScoredDocument)}
        rows = self._rows(data)
        found = self._fetch(rows, keep=True)
        mask = torch.ones(data["sample_mask"].shape, dtype=torch.float32, device=data["sample_mask"].device)
        failed = 0
        for row, one in found.items():
            if not self.settle(one, len(rows[row])):
                mask[row] = 0.0
                failed += 1
        count = float(len(found))
        retries = float(self._retries - before)
        metrics = Metrics({"rows_failed": (float(failed), count), "retries_per_row": (retries, count)})
        return Prefetched(mask, metrics)

    def settle(self, one: ScoredDocument | ServerFailure, tokens: int) -> bool:
        """Whether a row of so many tokens was scored; a failure is counted or stops the run, as ``on_failure`` says."""
        if isinstance(one, ServerFailure):
            self._fail(one, tokens)
            return False
        self._in_a_row = 0
        return True

    def _fail(self, failure: ServerFailure, tokens: int) -> None:
        self.failures[failure.reason] += 1
        self._in_a_row += 1
        line = f"teacher {self.number}: the server {self.client.url} gave no scores for a row of {tokens} tokens"
        if self.config.on_failure == "stop":
            raise ServerError(
                f"{line} ({failure}); mend it and start the run again, or set teacher.server.on_failure=skip"
            )
        if self._in_a_row >= self.config.give_up_after:
            raise ServerError(
                f"{line} ({failure}), as for the {self._in_a_row - 1} before it; mend it and start the run again"
            )
        if self.failures[failure.reason] == 1:
            _LOG.warning("%s (%s); it is left out, further ones are only counted", line, failure)

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> Signal:
        """Rows lie one sample after the other, without padding; a failure here is an error."""
        data = mb.data_dict
        prefix = key_prefix(data, self.number)
        ids, lengths = data[f"{prefix}input_ids"].cpu(), data[f"{prefix}input_lengths"].cpu().to(torch.long)
        starts = lengths.cumsum(0) - lengths
        total = int(lengths.sum())
        topk_ids = torch.full((total, self.k), -1, dtype=torch.int32)
        topk = torch.zeros((total, self.k), dtype=torch.float32)
        next_logprob = torch.zeros(total, dtype=torch.float32)
        for row, one in self._fetch(self._rows(data), keep=False).items():
            if isinstance(one, ServerFailure):
                raise ServerError(f"teacher {self.number}: the server {self.client.url} gave no scores ({one})")
            place = slice(int(starts[row]), int(starts[row]) + one.next_logprob.shape[0])
            topk_ids[place], topk[place] = torch.from_numpy(one.topk_ids), torch.from_numpy(one.topk_logprobs)
            next_logprob[place] = torch.from_numpy(one.next_logprob)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        signal = TopKSignal(topk_ids, topk, next_logprob, next_tokens(ids, lengths)[real])
        # the server's head may be narrower than the tokenizer, and a shared vocabulary's size is the student's
        size = self.vocab_size if prefix else None
        return replace(to_device(signal, device), vocab_size=size, row_start_B=starts)

    def log_probs(self, batch: BatchedDataDict) -> Tensor:
        """NaN in rows that could not be scored, 0 in masked ones."""
        data, prefix = batch, key_prefix(batch, self.number)
        out = torch.zeros(data[f"{prefix}input_ids"].shape, dtype=torch.float32)
        rows = self._rows(data)
        for row, one in self._fetch(rows, keep=False).items():
            if not self.settle(one, len(rows[row])):
                out[row] = torch.nan
            elif isinstance(one, ScoredDocument):
                out[row, 1 : one.next_logprob.shape[0] + 1] = torch.from_numpy(one.next_logprob)
        return out


def _groups(documents: Sequence[Ids], most: int, tokens: int) -> Iterable[list[int]]:
    """Numbers of the documents that travel together, neighbours first."""
    group: list[int] = []
    size = 0
    for number, ids in enumerate(documents):
        if group and (len(group) == most or size + len(ids) > tokens):
            yield group
            group, size = [], 0
        group.append(number)
        size += len(ids)
    if group:
        yield group
