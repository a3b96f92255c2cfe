"""Does a model expect its BOS token? Score a short text behind it and without it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.comm import Comm
from limbeck.evaluation.bits import Scorer
from limbeck.models.language_model import LanguageModel
from limbeck.tokens import ByteTokenizer
from limbeck.utils.files import JsonCache, cache_dir, content_hash

CLEAR = 0.05
"""Bits per byte by which one setting must be better to be called the model's own."""

PROBE = (
    "The river rises in the hills north of the town and runs south for about ninety kilometres before it reaches the "
    "sea. In spring, when the snow melts, the water is high enough for small boats; by late summer most of the bed is "
    "dry. Two bridges cross it. The older one was built of stone in 1784 and still carries the road to the market, "
    "while the other, made of steel, was opened to trains some hundred years later."
)


@dataclass(frozen=True)
class BosBits:
    """Bits per byte of the probe, its first token left out, behind the BOS token and without it."""

    behind: float
    without: float

    @property
    def expected(self) -> bool | None:
        """Whether the model wants the BOS token; None where it makes no clear difference."""
        gain = self.without - self.behind
        return gain > 0 if abs(gain) > CLEAR else None

    def __str__(self) -> str:
        return f"{self.behind:.2f} bits per byte behind the BOS token, {self.without:.2f} without"


def bos_bits(model: Scorer, tokenizer: ByteTokenizer) -> BosBits | None:
    """Both figures of a model; None for a tokenizer without a BOS token.

    A language model's are kept in the cache folder under what identifies its weights and its tokenizer.
    """
    if tokenizer.bos_id is None:
        return None
    # several ranks score together, so none of them may find an answer that another does not
    if not isinstance(model, LanguageModel) or Comm.world().size > 1:
        return _measured(model, tokenizer, tokenizer.bos_id)
    kept = JsonCache(cache_dir("bos"))
    key = content_hash([model.identity(), tokenizer.vocab.fingerprint, tokenizer.bos_id, PROBE])
    stored = kept.get(key) or {}
    if {type(stored.get(name)) for name in ("behind", "without")} == {float}:
        return BosBits(stored["behind"], stored["without"])
    bits = _measured(model, tokenizer, tokenizer.bos_id)
    with suppress(OSError):  # a cache that cannot be written to costs time and nothing else
        kept.put(key, asdict(bits))
    return bits


def _measured(model: Scorer, tokenizer: ByteTokenizer, bos_id: int) -> BosBits:
    rendering = tokenizer.encode(PROBE)
    ids = torch.from_numpy(rendering.ids)
    n = len(ids)
    rows = torch.zeros(2, n + 1, dtype=torch.int64)
    rows[0, 0] = bos_id
    rows[0, 1:], rows[1, :n] = ids, ids
    batch: BatchedDataDict = BatchedDataDict({"input_ids": rows, "input_lengths": torch.tensor([n + 1, n])})
    logprobs = model.get_logprobs(batch)["logprobs"].double().cpu()
    size = int(rendering.byte_ends[-1] - rendering.byte_ends[0]) * math.log(2)
    # from the text's second token on in both rows: without BOS nothing predicts the first
    return BosBits(-float(logprobs[0, 2 : n + 1].sum()) / size, -float(logprobs[1, 1:n].sum()) / size)
