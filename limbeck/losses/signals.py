"""Forms of a model's output at a row: a head over hidden states, full logits, or a stored top-k list.

Every teacher signal carries the token ids that it scored, and `check_scored_ids` compares them with the ids that the
loss is about to use: a wrong id with a finite loss is the failure to design against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limbeck.data.layout import ChunkLayout
from limbeck.errors import LossError
from limbeck.losses.vocab.axis import WHOLE, VocabAxis


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Losses are computed in float32, or in float64 where the caller works in it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Head:
    """The last map of a language model: `softcap * tanh(scale * (h W^T + b) / softcap)`, restricted to real tokens.

    Either `weight` `[rows, h]` (and `bias` `[rows]`) or `module` (any `nn.Module`, such as a LoRA-wrapped head) or
    neither: then hidden states *are* logits. `vocab_size` is the number of tokenizer ids; further rows of the head
    are padding and take no part in anything. `axis`: a sharded one says that `weight` holds only this rank's rows of
    the vocabulary; logits are then those of its columns.
    """

    vocab_size: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    module: nn.Module | None = None
    softcap: float | None = None
    scale: float = 1.0
    axis: VocabAxis = WHOLE

    def __post_init__(self) -> None:
        if self.weight is not None and self.weight.shape[0] < self.local_size:
            raise LossError(
                f"the head has {self.weight.shape[0]} rows but vocab_size is {self.vocab_size}; "
                "pass the number of ids that both the head and the tokenizer have"
            )

    @property
    def local_size(self) -> int:
        """Number of tokens whose rows are here."""
        start, end = self.axis.place(self.vocab_size)
        return end - start

    def shard(self, axis: VocabAxis) -> Head:
        """This head with only the rows that `axis` has here; a view."""
        if self.axis.sharded or not axis.sharded:
            return self
        if self.module is not None or self.bias is not None:
            raise LossError("a head with a bias or a wrapper cannot be split over the vocabulary; use one process")
        shard_axis = axis.like(self.vocab_size)
        start, end = shard_axis.place(self.vocab_size)
        weight = None if self.weight is None else self.weight[start:end]
        return replace(self, weight=weight, axis=shard_axis)

    @classmethod
    def identity(cls, vocab_size: int) -> Head:
        """Head for callers that already hold logits."""
        return cls(vocab_size)

    def parameters(self) -> Iterator[Tensor]:
        """Tensors of the head that want a gradient."""
        if self.module is not None:
            candidates: list[Tensor] = list(self.module.parameters())
        else:
            candidates = [p for p in (self.weight, self.bias) if p is not None]
        return (p for p in candidates if p.requires_grad)

    def raw(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """Product of hidden `[n, h]` with the head, before scale and softcap: `[n, V]`, or `[n, K]` at `columns`."""
        if self.weight is None:
            out = (hidden if self.module is None else self.module(hidden))[:, : self.vocab_size]
            return out if columns is None else out.index_select(1, columns)
        inside: Tensor | None = None
        if columns is not None:
            columns, inside = self.axis.columns(columns)
        weight = self.weight[: self.local_size] if columns is None else self.weight.index_select(0, columns)
        bias = self.bias
        if bias is not None:
            bias = bias[: self.vocab_size] if columns is None else bias.index_select(0, columns)
        out = F.linear(hidden.to(weight.dtype), weight, bias)
        # added here: softcap is not linear, so parts of it would not add up
        return out if inside is None else self.axis.total(out * inside)

    def finish(self, raw: Tensor) -> Tensor:
        """Logits in the compute dtype from the raw product."""
        out = raw.to(compute_dtype(raw.dtype))
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap:
            out = self.softcap * torch.tanh(out / self.softcap)
        return out

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """Logits `[n, V]` (or `[n, K]`) of hidden `[n, h]`, in float32 (float64 for float64 inputs)."""
        return self.finish(self.raw(hidden, columns))


def is_one_of(ids: Tensor, some: Sequence[int]) -> Tensor:
    """Which of the ids are among `some`: bool, of the same shape."""
    return torch.isin(ids, torch.tensor(list(some), dtype=ids.dtype, device=ids.device))


def log_prob_of_any(log_probs: Tensor, ids: Sequence[int], axis: VocabAxis = WHOLE) -> Tensor:
    """Log-probability `[n, 1]` that one of the ids follows: log-probabilities `[n, V]`, whose columns lie on `axis`."""
    columns = torch.tensor(list(ids), device=log_probs.device).expand(log_probs.shape[0], -1)
    return axis.gather(log_probs, columns).logsumexp(-1, keepdim=True)


def realised_log_probs(log_probs: Tensor, ids: Tensor, ends: Sequence[int], axis: VocabAxis = WHOLE) -> Tensor:
    """Log-probabilities `[n]` of realised tokens; one of `ends` is as probable as all of them together."""
    log_realised = axis.gather(log_probs, ids[:, None]).squeeze(1)
    if not ends:
        return log_realised
    return log_prob_of_any(log_probs, ends, axis).squeeze(1).where(is_one_of(ids, ends), log_realised)


@dataclass
class TeacherScores:
    """A teacher's opinion at the `q` rows of a block: logits `[q, U]` (or `[q, K]` at chosen ids), or a top-k list."""

    logits: Tensor | None = None
    topk_ids: Tensor | None = None  # [q, k], -1: empty place
    topk_logprobs: Tensor | None = None  # [q, k]
    next_logprob: Tensor | None = None  # [q]
    axis: VocabAxis = WHOLE  # where the columns of `logits` lie
    vocab_ids_K: Tensor | None = None  # the ids of the columns, where they are chosen ones
    _log_probs: dict[float, Tensor] = field(default_factory=dict)

    @property
    def is_topk(self) -> bool:
        return self.logits is None

    def log_probs(self, temperature: float = 1.0) -> Tensor:
        if self.logits is None:
            raise LossError("this loss needs the teacher's whole distribution; use a live teacher or another mode")
        if temperature not in self._log_probs:
            self._log_probs[temperature] = self.axis.log_softmax(self.logits / temperature)
        return self._log_probs[temperature]

    def log_prob_of(self, ids: Tensor, temperature: float = 1.0, ends: Sequence[int] = ()) -> Tensor:
        """Log-probability of the realised tokens `[q]`; one of `ends` is as probable as all of them together."""
        if self.next_logprob is None:
            return realised_log_probs(self.log_probs(temperature), ids, ends, self.axis)
        # a list is stored at temperature 1, and losses refuse it at any other
        if not ends or self.topk_ids is None or self.topk_logprobs is None:
            return self.next_logprob
        # what the list says of the other ends; the realised one may be in it, too
        ended, listed = is_one_of(ids, ends), is_one_of(self.topk_ids, ends) & (self.topk_ids != ids[:, None])
        others = self.topk_logprobs.masked_fill(~listed, -torch.inf)
        together = torch.cat((self.next_logprob[:, None], others), -1).logsumexp(-1)
        return together.where(ended, self.next_logprob)

    def topk(self) -> tuple[Tensor, Tensor]:
        """Top-k ids (empty places: 0) and log-probabilities (empty places: -inf)."""
        if self.topk_ids is None or self.topk_logprobs is None:
            raise LossError("this teacher carries no top-k list")
        empty = self.topk_ids < 0
        return self.topk_ids.masked_fill(empty, 0), self.topk_logprobs.masked_fill(empty, -torch.inf)


class TeacherOutput(ABC):
    """Output of a teacher at flat rows, and the tokens that it scored.

    Attributes:
        is_topk: only the most likely tokens are known, at temperature 1.
        vocab_size: tokens that it scores; None where a list does not tell.
        row_start_B: int64 `[B]` in main memory: the flat row of each sample's first token; None: as in the student's
            forward pass.
        axis: where the columns of its logits lie.
    """

    is_topk: ClassVar[bool] = False
    vocab_size: int | None
    row_start_B: Tensor | None

    @property
    @abstractmethod
    def axis(self) -> VocabAxis: ...

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Flat rows."""

    @property
    @abstractmethod
    def num_ids(self) -> int:
        """Tokens that it says it has read."""

    @property
    @abstractmethod
    def last_scored_row(self) -> int:
        """The last row of which it knows the next token."""

    @abstractmethod
    def scored_ids(self, rows: Tensor) -> Tensor:
        """The token that it says followed each of `rows`."""

    @abstractmethod
    def scores(self, rows: Tensor, vocab_ids_K: Tensor | None = None) -> TeacherScores:
        """Its opinion at `rows`, without gradient; vocab_ids_K: only at these ids."""

    def on_shards(self, axis: VocabAxis) -> TeacherOutput:
        """This signal with columns split like those of the student's `axis`; itself where nothing is split."""
        return self


class _SequenceSignal(TeacherOutput):
    """A signal whose rows are the tokens it read: a row predicts the token after it."""

    input_ids: Tensor

    @abstractmethod
    def logits(self, rows: Tensor, vocab_ids_K: Tensor | None = None) -> Tensor:
        """Logits at `rows`, in the compute dtype."""

    @property
    def num_ids(self) -> int:
        return self.input_ids.numel()

    @property
    def last_scored_row(self) -> int:
        return min(self.num_rows, self.num_ids - 1) - 1

    def scored_ids(self, rows: Tensor) -> Tensor:
        return self.input_ids.reshape(-1).to(rows.device).index_select(0, rows + 1)

    def scores(self, rows: Tensor, vocab_ids_K: Tensor | None = None) -> TeacherScores:
        # chosen columns are on every rank
        axis = self.axis if vocab_ids_K is None else WHOLE
        return TeacherScores(logits=self.logits(rows, vocab_ids_K), axis=axis, vocab_ids_K=vocab_ids_K)


@dataclass
class TeacherHidden(_SequenceSignal):
    """A live teacher: last hidden states `[R, H]` and its head; `input_ids` `[R]` are the tokens it read."""

    hidden: Tensor
    head: Head
    input_ids: Tensor
    row_start_B: Tensor | None = None

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.head.vocab_size

    @property
    def axis(self) -> VocabAxis:
        return self.head.axis

    @property
    def num_rows(self) -> int:
        return int(self.hidden.shape[0])

    def logits(self, rows: Tensor, vocab_ids_K: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self.head.logits(self.hidden.detach().index_select(0, rows), vocab_ids_K)

    def on_shards(self, axis: VocabAxis) -> TeacherHidden:
        if self.head.axis.sharded and not axis.sharded:
            raise LossError("the teacher's head is split over ranks but the student's is not; use one layout for both")
        return replace(self, head=self.head.shard(axis)) if axis.sharded else self


@dataclass
class TeacherLogits(_SequenceSignal):
    """Full logits `[R, U]`: for tests and small use. `vocab_size` below U leaves padded head rows out."""

    full_logits: Tensor
    input_ids: Tensor
    vocab_size: int = 0
    columns: VocabAxis = WHOLE
    row_start_B: Tensor | None = None

    def __post_init__(self) -> None:
        self.vocab_size = self.vocab_size or int(self.full_logits.shape[1])

    @property
    def axis(self) -> VocabAxis:
        return self.columns

    @property
    def num_rows(self) -> int:
        return int(self.full_logits.shape[0])

    def logits(self, rows: Tensor, vocab_ids_K: Tensor | None = None) -> Tensor:
        # chosen ids are those of the whole vocabulary, all of which is here
        start, end = (0, self.vocab_size) if vocab_ids_K is not None else self.axis.place(self.vocab_size)
        out = self.full_logits.detach().index_select(0, rows)[:, start:end]
        out = out if vocab_ids_K is None else out.index_select(1, vocab_ids_K)
        return out.to(compute_dtype(out.dtype))

    def on_shards(self, axis: VocabAxis) -> TeacherLogits:
        return replace(self, columns=axis.like(self.vocab_size)) if axis.sharded else self


@dataclass
class TeacherTopK(TeacherOutput):
    """A stored or remote teacher: per row its k most likely next tokens and what it gave the token that came.

    topk_ids, topk_logprobs `[R, k]` (an id of -1 marks an empty place), next_logprob `[R]`, next_ids `[R]`: the
    realised next token at this row. Log-probabilities are natural, at temperature 1, over the teacher's vocabulary.
    """

    is_topk: ClassVar[bool] = True

    topk_ids: Tensor
    topk_logprobs: Tensor
    next_logprob: Tensor
    next_ids: Tensor
    vocab_size: int | None = None
    row_start_B: Tensor | None = None

    @property
    def axis(self) -> VocabAxis:
        return WHOLE

    @property
    def num_rows(self) -> int:
        return int(self.topk_ids.shape[0])

    @property
    def num_ids(self) -> int:
        return self.next_ids.numel()

    @property
    def last_scored_row(self) -> int:
        return min(self.num_rows, self.num_ids) - 1

    def scored_ids(self, rows: Tensor) -> Tensor:
        return self.next_ids.to(rows.device).index_select(0, rows)

    def scores(self, rows: Tensor, vocab_ids_K: Tensor | None = None) -> TeacherScores:
        if vocab_ids_K is not None:
            raise LossError("a top-k list has no logits at chosen ids; use a live teacher or another mode")
        return TeacherScores(
            topk_ids=self.topk_ids.index_select(0, rows).long(),
            topk_logprobs=self.topk_logprobs.index_select(0, rows),
            next_logprob=self.next_logprob.index_select(0, rows),
        )


@dataclass
class TeacherRows:
    """One teacher's opinion at the rows of its chunks. Several signals of one vocabulary are averaged in their logits.

    rows: the flat rows `[Q]` in each signal; vocab_ids_K: the only ids at which logits are wanted, or None.
    """

    signals: Sequence[TeacherOutput]
    rows: Sequence[Tensor]
    mix_weights: Sequence[float] = (1.0,)
    vocab_ids_K: Tensor | None = None

    def scores(self, start: int, end: int) -> TeacherScores:
        """At the rows `start:end`, without gradient."""
        rows = [rows[start:end] for rows in self.rows]
        scores = self.signals[0].scores(rows[0], self.vocab_ids_K)
        if len(self.signals) == 1:
            return scores
        if any(signal.is_topk for signal in self.signals) or scores.logits is None:
            raise LossError("top-k teachers have no logits to average; use live teachers or mode `sum`")
        mixed = scores.logits * self.mix_weights[0]
        for signal, signal_rows, weight in zip(self.signals[1:], rows[1:], self.mix_weights[1:], strict=True):
            logits = signal.scores(signal_rows, self.vocab_ids_K).logits
            assert logits is not None
            mixed.add_(logits * weight)
        return replace(scores, logits=mixed)

    def all_ids(self) -> TeacherRows:
        """The same at every id."""
        return replace(self, vocab_ids_K=None)

    def blocks(self, block_rows: int) -> Iterator[tuple[slice, TeacherScores]]:
        """All rows, some at a time."""
        total = self.rows[0].numel()
        for start in range(0, total, block_rows):
            end = min(start + block_rows, total)
            yield slice(start, end), self.scores(start, end)


def check_scored_ids(
    signal: TeacherOutput, layout: ChunkLayout, name: str = "teacher", *, defer: bool = False
) -> Tensor | None:
    """Raise `LossError` unless the signal scored exactly the tokens that `layout` names, inside its vocabulary.

    layout: on the CPU or a device; the comparison costs one synchronisation. defer: everything that the host knows is
    checked, and whether any id differs is returned as a flag that the caller reads later, before it uses the loss.
    """
    if layout.max_teacher_row > signal.last_scored_row:
        raise LossError(
            f"{name}: the layout needs row {layout.max_teacher_row} but the signal has {signal.num_rows} rows and "
            f"{signal.num_ids} ids; build the layout from the batch that this teacher read"
        )
    if signal.vocab_size is not None and layout.max_teacher_id >= signal.vocab_size:
        raise LossError(
            f"{name}: token id {layout.max_teacher_id} is out of range for a vocabulary of {signal.vocab_size}; "
            "the batch was tokenized for another teacher"
        )
    scored = signal.scored_ids(layout.teacher_rows_Q)
    wrong = scored != layout.teacher_ids_Q.to(scored.device)
    if defer:
        return wrong.any()
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0, 0])
        raise LossError(
            f"{name}: row {int(layout.teacher_rows_Q[index])} scored token id {int(scored[index])} but the loss would "
            f"use it for id {int(layout.teacher_ids_Q[index])}; signal and batch come from different token sequences"
        )
    return None
