"""Filling a teacher cache from batches of token ids, with a model in memory or one behind a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape
from limbeck.errors import CacheError
from limbeck.models.language_model import score_rows
from limbeck.models.policy import Policy
from limbeck.teachers.cache import CacheSpec, CacheWriter, document_key
from limbeck.teachers.cache.format import HEAD_NAME, save_head
from limbeck.teachers.live import SharedForward, key_prefix
from limbeck.teachers.server.protocol import ScoredDocument
from limbeck.teachers.server.teacher import ServerTeacher
from limbeck.tokens import ByteVocab

_HIDDEN = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def spec_for(
    policy: Policy, *, k: int | None = None, hidden: bool = False, hidden_dtype: str = "bfloat16"
) -> CacheSpec:
    """Specification of this teacher's cache: top-``k`` lists, or its hidden states."""
    if (k is None) == (not hidden):
        raise CacheError(f"a cache holds either top-k lists or hidden states, got k={k} and hidden={hidden}")
    return CacheSpec(
        kind="hidden" if hidden else "topk",
        vocab_size=policy.vocab_size,
        teacher_fingerprint=_fingerprint(policy),
        model_identity=policy.identity(),
        k=0 if k is None else min(k, policy.vocab_size),
        hidden_size=int(policy.body.config.get_text_config().hidden_size) if hidden else 0,
        hidden_dtype=hidden_dtype,
    )


def server_spec(server: ServerTeacher) -> CacheSpec:
    """Specification of a cache that is filled from a server. A server shows no weights, so its model's name stands for
    them."""
    return CacheSpec(
        kind="topk",
        vocab_size=server.vocab_size,
        teacher_fingerprint=_fingerprint(server),
        model_identity={"server_model": server.facts.model},
        k=server.k,
    )


def _fingerprint(teacher: Policy | ServerTeacher) -> str:
    """Fingerprint of the teacher's tokenizer; empty where it is not known."""
    if isinstance(teacher, ServerTeacher):
        return teacher.vocab.fingerprint
    return "" if teacher.tokenizer is None else ByteVocab.from_tokenizer(teacher.tokenizer).fingerprint


def write_cache(
    teacher: Policy | ServerTeacher,
    batches: Iterable[BatchedDataDict],
    folder: str | Path,
    spec: CacheSpec,
    *,
    teacher_index: int = 0,
    rank: int = 0,
    world_size: int = 1,
    on_batch: Callable[[CacheWriter], None] | None = None,
    **writer_options: Any,
) -> CacheWriter:
    """Score every sample of ``batches`` that is not stored yet and mark this rank's part complete.

    ``batches``: collated batches; the teacher's ids are read under its own keys, or the student's where it has none.
    Samples with a mask of 0 are left out. ``on_batch`` is called after every batch (progress). Run it again after a
    kill: documents that are stored are not computed twice. A part that lacks documents which a server could not score
    (``on_failure: skip``) is not complete: they are asked for again the next time. A model that is split over ranks
    scores all ranks' documents together; each stores its own.
    """
    writer = CacheWriter(folder, spec, rank=rank, world_size=world_size, **writer_options)
    whole = True
    try:
        model = None if isinstance(teacher, ServerTeacher) else _Scorer(teacher, folder, spec, rank)
        wanted = (_missing(writer, batch, key_prefix(batch, teacher_index)) for batch in batches)
        for documents in wanted if model is None else model.in_step(wanted):
            if isinstance(teacher, ServerTeacher):
                # in this order: the other way round nothing would be asked for behind the first failure
                whole = _add_from_server(teacher, writer, documents) and whole
            elif model is not None:
                model.add(writer, documents)
            if on_batch is not None:
                on_batch(writer)
    except BaseException:
        # stores what was added since the last commit, too: a next start does not score it again
        writer.close()
        raise
    writer.close(complete=whole)
    return writer


def _missing(writer: CacheWriter, batch: BatchedDataDict, prefix: str) -> list[Tensor]:
    """Token ids of the samples that count and are not stored, each once."""
    ids, lengths = batch[f"{prefix}input_ids"].cpu(), batch[f"{prefix}input_lengths"].tolist()
    wanted: dict[str, Tensor] = {}
    for row, n in enumerate(lengths):
        tokens = ids[row, :n]
        if n >= 2 and float(batch["sample_mask"][row]) > 0 and not writer.has(tokens.numpy()):
            wanted.setdefault(document_key(tokens.numpy()), tokens)
    return list(wanted.values())


class _Scorer:
    """Scores documents with a model in memory."""

    def __init__(self, policy: Policy, folder: str | Path, spec: CacheSpec, rank: int) -> None:
        self.policy = policy
        # every rank has documents of its own, like one of a data-parallel student
        readers = MeshShape(data=policy.dims.shape.world)
        self.shared = SharedForward.plan(readers, policy.dims, alike=policy.sharding.fsdp)
        self.head = policy.head(whole=True)
        if spec.kind == "hidden" and rank == 0 and not (Path(folder) / HEAD_NAME).exists():
            save_head(folder, self.head)

    def in_step(self, wanted: Iterator[list[Tensor]]) -> Iterator[list[Tensor]]:
        """As many lists on every rank of a split model: empty ones at the end, while others still have documents."""
        ranks = Comm.world() if self.policy.sharding.is_sharded else Comm.alone()
        while True:
            documents = next(wanted, None)
            # ranks of a split teacher, per batch: one flag, since none may stop before its peers
            if not ranks.any(documents is not None):
                return
            yield documents or []

    def _hidden(self, documents: list[Tensor]) -> Tensor:
        rows: BatchedDataDict = BatchedDataDict(
            input_ids=pad_sequence(documents, batch_first=True), input_lengths=torch.tensor([len(d) for d in documents])
        )
        if self.shared is None:
            return self.policy.get_hidden(rows)
        ids_BT, lengths_B = rows["input_ids"].to(self.policy.device), rows["input_lengths"].to(self.policy.device)
        # every pass is made, though one is this rank's: the layers of a sharded model need all of its ranks
        passes = [
            (is_own, self.policy.get_hidden(BatchedDataDict(input_ids=ids, input_lengths=lengths)))
            for is_own, ids, lengths in self.shared.passes(ids_BT, lengths_B)
        ]
        return next(hidden for is_own, hidden in passes if is_own)

    def add(self, writer: CacheWriter, documents: list[Tensor]) -> None:
        """Score and store; a rank without documents helps the others with theirs."""
        if not documents and not self.policy.sharding.is_sharded:
            return
        # two tokens, since a document of one has no row
        hidden = self._hidden(documents or [torch.zeros(2, dtype=torch.int64)])
        for row, tokens in enumerate(documents):
            states = hidden[row, : len(tokens) - 1]
            scores = score_rows(states, self.head, tokens[1:].to(states.device), k=writer.spec.k)
            arrays = {"next_logprob": scores.next_logprob, "logsumexp": scores.logsumexp}
            if writer.spec.kind == "topk":
                arrays |= {"topk_ids": scores.topk_ids, "topk_logprobs": scores.topk_logprobs}
            else:
                # as bits: numpy has no bfloat16
                arrays["hidden"] = states.to(_HIDDEN[writer.spec.hidden_dtype]).view(torch.uint16)
            writer.add(tokens.numpy(), **{k: v.cpu().numpy() for k, v in arrays.items()})


def _add_from_server(server: ServerTeacher, writer: CacheWriter, documents: list[Tensor]) -> bool:
    """Whether all documents were scored. What came is stored before a failure may end the run."""
    scores = server.score([tokens.numpy() for tokens in documents])
    for tokens, one in zip(documents, scores, strict=True):
        if isinstance(one, ScoredDocument):
            writer.add(
                tokens.numpy(),
                topk_ids=one.topk_ids,
                topk_logprobs=one.topk_logprobs,
                next_logprob=one.next_logprob,
                # log-probabilities are normalised already
                logsumexp=np.zeros_like(one.next_logprob),
            )
    # a list first: every failure must be counted, and all() would stop at one
    settled = [server.settle(one, len(d)) for d, one in zip(documents, scores, strict=True)]
    return all(settled)
