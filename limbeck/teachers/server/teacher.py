"""A teacher behind a server: its most likely tokens per position, asked for while the run goes on.

A batch is announced before it is trained on, so that all its rows are asked for at once and the rows that the server
could not score leave the denominators. A loop that has the next batch already lets its requests start before (
`ask_ahead`): answers wait by the ids of their rows until a batch needs them. See docs/teachers.md.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import ServerError
from limbeck.losses.contract import Prefetched, StudentLayout
from limbeck.losses.signals import TeacherOutput, TeacherTopK
from limbeck.models.language_model import next_tokens
from limbeck.models.loading import ModelConfig
from limbeck.teachers.cache import document_key
from limbeck.teachers.kinds import SourceConfig, TeacherKind, TeacherSetup
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
from limbeck.tokens import ByteTokenizer, ByteVocab
from limbeck.utils.metrics import Metrics
from limbeck.utils.timer import BusyClock

_LOG = logging.getLogger(__name__)
Ids = npt.NDArray[Any]

REPEATED = "The same text, scored twice, gives the same numbers: 12 + 30 = 42, and again 42."
_JSON_BYTES_PER_TOKEN = 75
"""A position of a server's answer is JSON text: per token an id, a number, a rank and a piece of text."""
_MOST_NOISE = 0.05
"""Nats per token: a tenth of what a teacher's correction usually is."""
_KNOWS = 0.5
"""Share of the probability from which on a model claims to know what comes."""


def _moved(first: tuple[Ids, Ids], second: tuple[Ids, Ids]) -> float:
    """Probability that two answers about one position give to different tokens. Each: ids and log-probabilities."""
    before, after = (dict(zip(ids.tolist(), np.exp(values).tolist(), strict=True)) for ids, values in (first, second))
    for one in (before, after):
        # the empty place, in which ids beyond the tokenizer have met
        one.pop(-1, None)
    # a token that only one of them lists has at most the probability of the other's last one
    least = min([*before.values(), *after.values()], default=0.0)
    return float(sum(abs(before.get(i, least) - after.get(i, least)) for i in {*before, *after})) / 2


@dataclass(frozen=True)
class _Asked:
    """A document whose request has begun: its place in the answer, and the step that was under way."""

    future: Future[list[ScoredDocument | ServerFailure]]
    place: int
    step: int

    def result(self) -> ScoredDocument | ServerFailure:
        return self.future.result()[self.place]


class ServerSource(ServerConfig, SourceConfig):
    """A server that scores for this teacher, instead of weights in this process; only its tokenizer is loaded here."""

    kind: Literal["server"] = "server"


class ServerTeacher(TeacherKind):
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

    Config = ServerSource
    any_temperature = False
    asks_ahead = True

    @classmethod
    def gives_topk(cls, source: ServerSource) -> bool:
        return True

    @classmethod
    def make(cls, source: ServerSource, setup: TeacherSetup) -> ServerTeacher:
        return cls(
            source,
            setup.tokenizer,
            student_fingerprint=setup.vocab.fingerprint,
            longest=setup.longest,
            group=setup.readers,
            number=setup.number,
        )

    @classmethod
    def shown(cls, source: Any, section: ModelConfig) -> str:
        return f"{section.shown_name}, behind a server"

    @classmethod
    def needs_model(cls, source: Any) -> bool:
        # its name, which stands for the tokenizer
        return True

    @classmethod
    def token_bytes(cls, source: ServerSource, width: Callable[[], int]) -> float:
        return float(source.k * _JSON_BYTES_PER_TOKEN)

    def describe(self) -> str:
        return f"{self.facts.model} behind {self.client.url}"

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
        self._tokenizer = ByteTokenizer.of(tokenizer)
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
        self._clock = BusyClock()
        self._lock = threading.Lock()  # of the next three: rows are asked ahead from other threads, too
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[str, _Asked] = {}
        self._steps = 0
        self.facts = self._probe(tokenizer)
        self._known_retries = self.client.counts["retries"]
        if longest is not None and self.facts.max_length is not None and longest > self.facts.max_length:
            raise ServerError(
                f"the server {self.client.url} takes up to {self.facts.max_length} tokens at a time and the run's rows "
                f"have up to {longest}; lower data.max_teacher_seq_length or serve with a longer context"
            )

    def close(self) -> None:
        """Give up requests under way and close the connections; the next request opens new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._ahead.clear()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()
        if pool is not None:
            pool.shutdown()

    def step_end(self) -> None:
        self._announced.clear()
        with self._lock:
            self._steps += 1
            # asked ahead for a step that has not come, such as one of a run that went on elsewhere
            late = [key for key, one in self._ahead.items() if one.step < self._steps - 1]
            for key in late:
                del self._ahead[key]

    def identity(self) -> dict[str, Any]:
        return {"server_model": self.facts.model}

    def verify(self) -> None:
        """Refuse a server whose numbers are not those of the ids that it names, or that scores the same text otherwise
        the second time: both would be learnt from."""
        with Comm.world().fail_together():
            ids = self._tokenizer.encode(REPEATED).ids
            first, second = (self._scored_probe(ids) for _ in range(2))
            self._check_names(first, ids)
            self._check_repeats(first, second)

    def _scored_probe(self, ids: Ids) -> ScoredDocument:
        scored = self._shared([ids])[0]
        if isinstance(scored, ServerFailure):
            raise ServerError(
                f"teacher {self.number}: the server {self.client.url} gave no scores for a text of {len(ids)} tokens "
                f"({scored}); look at its log"
            )
        return scored

    def _check_names(self, scored: ScoredDocument, ids: Ids) -> None:
        """Whatever a model thinks of a plain text, its likely tokens are those of the text now and then."""
        mass = float(np.exp(np.where(scored.topk_ids >= 0, scored.topk_logprobs, -np.inf)).sum(-1).mean())
        if mass > _KNOWS and not (scored.topk_ids == np.asarray(ids[1:])[:, None]).any():
            raise ServerError(
                f"teacher {self.number}: the server {self.client.url} gives {mass:.0%} of the probability to its "
                f"{self.k} likeliest tokens, and none of them is ever the next one of a plain text of {len(ids)} "
                "tokens; the ids that it names are not those of teacher.tokenizer.name"
            )

    def _check_repeats(self, first: ScoredDocument, second: ScoredDocument) -> None:
        gap = float(abs(first.next_logprob - second.next_logprob).max())
        # not `gap > ...`: NaN must be refused, too
        if not gap <= _MOST_NOISE:
            raise ServerError(
                f"teacher {self.number}: the server {self.client.url} scored the same text twice with "
                f"log-probabilities up to {gap:.3g} apart, more than {_MOST_NOISE}; it must not vary"
            )
        moved = max(map(_moved, *(zip(one.topk_ids, one.topk_logprobs, strict=True) for one in (first, second))))
        # so that NaN is refused
        if not moved <= _MOST_NOISE:
            raise ServerError(
                f"teacher {self.number}: the server {self.client.url} scored the same text twice and gave {moved:.0%} "
                f"of the probability of a position to other tokens the second time, more than {_MOST_NOISE:.0%}; it "
                "must not vary"
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
        """Scores of every document (token ids [n], n >= 2), or why there are none; all requests at once. What was asked
        ahead is not asked for again."""
        with self._lock:
            ahead = [self._ahead.pop(document_key(ids), None) for ids in documents]
        missing = [ids for ids, one in zip(documents, ahead, strict=True) if one is None]
        asked = iter(self._ask(missing))
        return [(next(asked) if one is None else one).result() for one in ahead]

    def _ask(self, documents: Sequence[Ids]) -> list[_Asked]:
        """Let requests for documents begin."""
        out: list[_Asked] = []
        with self._lock:
            if self._pool is None:
                # kept, so that no more requests than this are under way, whoever asks
                self._pool = ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="limbeck-teacher")
            for group in _groups(documents, self.config.prompts_per_request, self.config.tokens_per_request):
                future = self._pool.submit(self._timed, [documents[i] for i in group])
                out += [_Asked(future, place, self._steps) for place in range(len(group))]
        return out

    def _timed(self, documents: list[Ids]) -> list[ScoredDocument | ServerFailure]:
        with self._clock:
            return self._together(documents)

    @property
    def seconds_asked(self) -> float:
        return self._clock.seconds

    def ask_ahead(self, batch: BatchedDataDict) -> None:
        # the first of the processes that read these rows asks for all of them, as in `_shared`
        if self._readers.rank != 0:
            return
        rows, answered = {document_key(ids): ids for ids in self._rows(batch).values()}, self._found
        with self._lock:
            new = {key: ids for key, ids in rows.items() if key not in self._ahead}
        # the step under way forgets what it does not need itself
        kept = {key: one for key in new if isinstance(one := answered.get(key), ScoredDocument)}
        missing = {key: ids for key, ids in new.items() if key not in kept}
        asked = dict(zip(missing, self._ask(list(missing.values())), strict=True))
        with self._lock:
            self._ahead |= asked | self._known(kept)

    def asked(self, batch: BatchedDataDict) -> bytes:
        with self._lock:
            keys = [document_key(ids) for ids in self._rows(batch).values()]
            ahead = {key: self._ahead.pop(key) for key in keys if key in self._ahead}
        # an error stays behind: whoever has the rows now asks again, and meets its own
        scores = {key: one.result() for key, one in ahead.items() if one.future.exception() is None}
        return json.dumps(list(scores)).encode() + b"\n" + pack_scores(list(scores.values())) if scores else b""

    def take_asked(self, raw: bytes) -> None:
        keys, _, packed = raw.partition(b"\n")
        if not keys:
            return
        scores = dict(zip(json.loads(keys), unpack_scores(packed)[0], strict=True))
        with self._lock:
            self._ahead |= self._known(scores)

    def _known(self, scores: Mapping[str, ScoredDocument | ServerFailure]) -> dict[str, _Asked]:
        """As if they had been asked ahead."""
        answer: Future[list[ScoredDocument | ServerFailure]] = Future()
        answer.set_result(list(scores.values()))
        return {key: _Asked(answer, place, self._steps) for place, key in enumerate(scores)}

    def _shared(self, documents: Sequence[Ids]) -> list[ScoredDocument | ServerFailure]:
        """``score`` by one of the processes that read these rows, which sends the result to the others."""

        def ask() -> bytes:
            scores = self.score(documents)
            # those of rows that were asked ahead came before
            before, self._known_retries = self._known_retries, self.client.counts["retries"]
            return pack_scores(scores, retries=self._known_retries - before)

        begun = time.perf_counter()
        # ranks that read the same rows, per batch: the packed scores, so that a row is asked for (and paid) once
        scores, facts = unpack_scores(self._readers.first_only(ask))
        self.seconds_waited += time.perf_counter() - begun
        self._retries += facts["retries"]
        return scores

    def _together(self, documents: list[Ids]) -> list[ScoredDocument | ServerFailure]:
        """One request; where it is refused as a whole, its rows are asked for one by one, so that one cannot fail all.
        A server that does not answer in time would only cost as much time again for each."""
        try:
            return self._request(documents)
        except ServerFailure as failure:
            if len(documents) == 1 or failure.reason in ("timeout", "connection"):
                return [failure] * len(documents)
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
        fetched = dict(zip(missing, self._shared(list(missing.values())), strict=True)) if missing else {}
        if keep:
            # what other channels of this step have announced is still to be learnt from
            kept = {*keys.values(), *self._announced}
            self._found = {key: one for key, one in self._found.items() if key in kept} | fetched
            self._announced |= set(keys.values())
        return {row: fetched[key] if key in fetched else self._found[key] for row, key in keys.items()}

    def prefetch(self, batch: BatchedDataDict) -> Prefetched:
        """Ask for a whole batch. A row that cannot be scored stops the run or is left out, as ``on_failure`` says."""
        data = batch
        before = self._retries
        # what is kept from other batches is only of use where a row comes again, or in a later channel of this step
        self._found = {key: one for key, one in self._found.items() if isinstance(one, ScoredDocument)}
        rows = self._rows(data)
        scores = self._fetch(rows, keep=True)
        mask = torch.ones(data["sample_mask"].shape, dtype=torch.float32, device=data["sample_mask"].device)
        failed = 0
        for row, one in scores.items():
            if not self.settle(one, len(rows[row])):
                mask[row] = 0.0
                failed += 1
        count = float(len(scores))
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
                f"{line} ({failure}); correct it and start the run again, or set teacher.server.on_failure=skip"
            )
        if self._in_a_row >= self.config.give_up_after:
            raise ServerError(
                f"{line} ({failure}), as for the {self._in_a_row - 1} before it; correct it and start the run again"
            )
        if self.failures[failure.reason] == 1:
            _LOG.warning("%s (%s); it is left out, further ones are only counted", line, failure)

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> TeacherOutput:
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
            span = slice(int(starts[row]), int(starts[row]) + one.next_logprob.shape[0])
            topk_ids[span], topk[span] = torch.from_numpy(one.topk_ids), torch.from_numpy(one.topk_logprobs)
            next_logprob[span] = torch.from_numpy(one.next_logprob)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        signal = TeacherTopK(topk_ids, topk, next_logprob, next_tokens(ids, lengths)[real])
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
