"""Filling a teacher cache from batches of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.models.cache import CacheSpec, CacheWriter, document_key
from limbeck.models.cache_head import HEAD_NAME, save_head
from limbeck.models.policy import Policy
from limbeck.models.scoring import score_rows
from limbeck.models.teachers import key_prefix
from limbeck.utils.errors import CacheError

_HIDDEN = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def spec_for(
    policy: Policy, *, k: int | None = None, hidden: bool = False, hidden_dtype: str = "bfloat16"
) -> CacheSpec:
    """What a cache of this teacher looks like: top-``k`` lists, or its hidden states."""
    if (k is None) == (not hidden):
        raise CacheError(f"a cache holds either top-k lists or hidden states, got k={k} and hidden={hidden}")
    fingerprint = ""
    if policy.tokenizer is not None:
        from limbeck.tokens import ByteVocab

        fingerprint = ByteVocab.from_tokenizer(policy.tokenizer).fingerprint
    return CacheSpec(
        kind="hidden" if hidden else "topk",
        vocab_size=policy.vocab_size,
        teacher_fingerprint=fingerprint,
        model_identity=policy.identity(),
        k=0 if k is None else min(k, policy.vocab_size),
        hidden_size=int(policy.body.config.get_text_config().hidden_size) if hidden else 0,
        hidden_dtype=hidden_dtype,
    )


def write_cache(
    policy: Policy,
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
    kill: documents that are stored are not computed twice.
    """
    writer = CacheWriter(folder, spec, rank=rank, world_size=world_size, **writer_options)
    try:
        if spec.kind == "hidden" and rank == 0 and not (Path(folder) / HEAD_NAME).exists():
            save_head(folder, policy.head())
        for batch in batches:
            _add_batch(policy, writer, batch, key_prefix(batch, teacher_index))
            if on_batch is not None:
                on_batch(writer)
    except BaseException:
        writer.close()
        raise
    writer.close(complete=True)
    return writer


def _add_batch(policy: Policy, writer: CacheWriter, batch: BatchedDataDict, prefix: str) -> None:
    ids, lengths = batch[f"{prefix}input_ids"], batch[f"{prefix}input_lengths"].tolist()
    wanted: dict[str, int] = {}
    for row, n in enumerate(lengths):
        tokens = ids[row, :n].cpu().numpy()
        if n >= 2 and float(batch["sample_mask"][row]) > 0 and not writer.has(tokens):
            wanted.setdefault(document_key(tokens), row)
    if not wanted:
        return
    rows = sorted(wanted.values())
    width = max(lengths[row] for row in rows)
    short: BatchedDataDict = BatchedDataDict(
        input_ids=ids[rows, :width], input_lengths=batch[f"{prefix}input_lengths"][rows]
    )
    hidden = policy.get_hidden(short)
    head = policy.head()
    for place, row in enumerate(rows):
        tokens = ids[row, : lengths[row]]
        states = hidden[place, : lengths[row] - 1]
        scores = score_rows(states, head, tokens[1:].to(states.device), k=writer.spec.k)
        arrays = {"next_logprob": scores.next_logprob, "logsumexp": scores.logsumexp}
        if writer.spec.kind == "topk":
            arrays |= {"topk_ids": scores.topk_ids, "topk_logprobs": scores.topk_logprobs}
        else:
            arrays["hidden"] = states.to(_HIDDEN[writer.spec.hidden_dtype]).view(torch.uint16)
        writer.add(tokens.cpu().numpy(), **{k: v.cpu().numpy() for k, v in arrays.items()})
