"""A teacher of your own in one file: a bigram model of a text, which has no weights and needs no GPU.

A run file names it by module and class; a module of the working folder is found, too:

    teacher:
      tokenizer: {name: Qwen/Qwen3-4B}
      source: {kind: "teacher:BigramTeacher", texts: corpus.txt}

    cd examples && limbeck train run.yaml
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch
from limbeck.losses.signals import TeacherOutput, TeacherTopK
from limbeck.models.language_model import next_tokens
from limbeck.teachers.kinds import SourceConfig, TeacherKind, TeacherSetup
from limbeck.teachers.live import key_prefix
from limbeck.tokens import ByteTokenizer, ByteVocab


class BigramTeacher(TeacherKind):
    """p(next | last) = (count(last, next) + smoothing p(next)) / (count(last) + smoothing), its k likeliest tokens."""

    any_temperature = False  # a list of log-probabilities at temperature 1

    class Config(SourceConfig):
        texts: str
        """A text file, whose pairs of tokens are counted."""
        k: int = 16
        """Most likely tokens per position."""
        smoothing: float = 1.0
        """Weight of the single tokens' frequencies."""

    @classmethod
    def make(cls, source: Config, setup: TeacherSetup) -> BigramTeacher:
        return cls(Path(source.texts).read_text(encoding="utf-8"), setup.tokenizer, source, setup.number)

    def __init__(self, text: str, tokenizer: Any, source: Config, number: int = 0) -> None:
        vocab = ByteVocab.from_tokenizer(tokenizer)
        self.vocab_size, self.fingerprint, self.number, self.source = vocab.size, vocab.fingerprint, number, source
        self.counted = hashlib.sha256(text.encode()).hexdigest()
        ids = ByteTokenizer.of(tokenizer).encode(text).ids.tolist()
        # every token once more than it was seen, so that none is impossible
        self.singles = Counter(dict.fromkeys(range(vocab.size), 1)) + Counter(ids)
        self.total = self.singles.total()
        self.pairs: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for last, following in pairwise(ids):
            self.pairs[last][following] += 1
        self.likely: dict[int, list[int]] = {}

    def probability(self, last: int, following: int) -> float:
        seen, alpha = self.pairs.get(last, Counter()), self.source.smoothing
        return (seen[following] + alpha * self.singles[following] / self.total) / (seen.total() + alpha)

    def likeliest(self, last: int) -> list[int]:
        if last not in self.likely:
            known = {*self.pairs.get(last, ()), *(token for token, _ in self.singles.most_common(self.source.k))}
            self.likely[last] = sorted(known, key=lambda i: -self.probability(last, i))[: self.source.k]
        return self.likely[last]

    def identity(self) -> dict[str, Any]:
        return {"texts": self.counted}

    def signal(self, mb: ProcessedMicrobatch, device: torch.device) -> TeacherOutput:
        data = mb.data_dict
        prefix = key_prefix(data, self.number)
        ids, lengths = data[f"{prefix}input_ids"].cpu(), data[f"{prefix}input_lengths"].cpu().long()
        # rows lie one sample after the other, without padding
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        last, following = ids[real].tolist(), next_tokens(ids, lengths)[real]
        lists = [self.likeliest(token) for token in last]
        listed = [[self.probability(token, i) for i in row] for token, row in zip(last, lists, strict=True)]
        came = [self.probability(*pair) for pair in zip(last, following.tolist(), strict=True)]
        return TeacherTopK(
            torch.tensor(lists, dtype=torch.int32, device=device),
            torch.tensor(listed, device=device).log(),
            torch.tensor(came, device=device).log(),
            # the loss compares them with the tokens that it is about to use
            following.to(device),
            vocab_size=self.vocab_size,
            row_start_B=lengths.cumsum(0) - lengths,
        )

    def log_probs(self, batch: BatchedDataDict) -> Tensor:
        prefix = key_prefix(batch, self.number)
        ids, lengths = batch[f"{prefix}input_ids"].tolist(), batch[f"{prefix}input_lengths"].tolist()
        out = torch.zeros(batch[f"{prefix}input_ids"].shape)
        for row, (tokens, n) in enumerate(zip(ids, lengths, strict=True)):
            pairs = pairwise(tokens[:n])
            out[row, 1:n] = torch.tensor([self.probability(*pair) for pair in pairs]).log()
        return out
