"""What a model says at a row: a head over hidden states, full logits, or a stored top-k list.

Every teacher signal carries the token ids that it scored, and `check_scored_ids` compares them with the ids that the
loss is about to use: a wrong id with a finite loss is the failure to design against.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limbeck.data.layout import ChunkLayout
from limbeck.losses.vocab.axis import WHOLE, VocabAxis
from limbeck.utils.errors import LossError


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
        own = axis.like(self.vocab_size)
        start, end = own.place(self.vocab_size)
        weight = None if self.weight is None else self.weight[start:end]
        return replace(self, weight=weight, axis=own)

    @classmethod
    def from_model(cls, model: nn.Module, vocab_size: int | None = None) -> Head:
        """Head of a transformers (or peft-wrapped) model. vocab_size: tokenizer ids; default: all rows of the head."""
        output: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if output is None:
            raise LossError(f"{type(model).__name__} has no output embeddings; pass a causal language model")
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        scale = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        rows = output.weight.shape[0]
        size = rows if vocab_size is None else min(vocab_size, rows)
        if type(output) is nn.Linear:
            return cls(size, weight=output.weight, bias=output.bias, softcap=softcap, scale=scale)
        return cls(size, module=output, softcap=softcap, scale=scale)

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


@dataclass
class HiddenSignal:
    """A live teacher: last hidden states `[R, h]` and its head; `input_ids` `[R]` are the tokens it read."""

    hidden: Tensor
    head: Head
    input_ids: Tensor

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def num_rows(self) -> int:
        return int(self.hidden.shape[0])

    def logits(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self.head.logits(self.hidden.detach().index_select(0, rows), columns)


@dataclass
class LogitsSignal:
    """Full logits `[R, V]`: for tests and small use. `vocab_size` below V leaves padded head rows out."""

    full_logits: Tensor
    input_ids: Tensor
    vocab_size: int = 0
    axis: VocabAxis = WHOLE

    def __post_init__(self) -> None:
        self.vocab_size = self.vocab_size or int(self.full_logits.shape[1])

    @property
    def num_rows(self) -> int:
        return int(self.full_logits.shape[0])

    def logits(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        start, end = (0, self.vocab_size) if columns is not None else self.axis.place(self.vocab_size)
        out = self.full_logits.detach().index_select(0, rows)[:, start:end]
        out = out if columns is None else out.index_select(1, columns)
        return out.to(compute_dtype(out.dtype))


@dataclass
class TopKSignal:
    """A stored or remote teacher: per row its k most likely next tokens and what it gave the token that came.

    topk_ids, topk_logprobs `[R, k]` (an id of -1 marks an empty place), next_logprob `[R]`, next_ids `[R]`: the
    realised next token at this row. Log-probabilities are natural, at temperature 1, over the teacher's vocabulary.
    """

    topk_ids: Tensor
    topk_logprobs: Tensor
    next_logprob: Tensor
    next_ids: Tensor
    vocab_size: int | None = None

    @property
    def num_rows(self) -> int:
        return int(self.topk_ids.shape[0])


Signal = HiddenSignal | LogitsSignal | TopKSignal


def axis_of(signal: Signal) -> VocabAxis:
    """Where the columns of a signal's logits lie."""
    if isinstance(signal, HiddenSignal):
        return signal.head.axis
    return signal.axis if isinstance(signal, LogitsSignal) else WHOLE


def on_shards(signal: Signal, axis: VocabAxis) -> Signal:
    """A signal whose columns are split like those of the student's `axis`; itself where nothing is split."""
    if isinstance(signal, HiddenSignal):
        if signal.head.axis.sharded and not axis.sharded:
            raise LossError("the teacher's head is split over ranks but the student's is not; use one layout for both")
        return replace(signal, head=signal.head.shard(axis)) if axis.sharded else signal
    if isinstance(signal, LogitsSignal) and axis.sharded:
        return replace(signal, axis=axis.like(signal.vocab_size))
    return signal


def scored_ids(signal: Signal, rows: Tensor) -> Tensor:
    """The token that the signal says followed each of `rows`."""
    if isinstance(signal, TopKSignal):
        return signal.next_ids.to(rows.device).index_select(0, rows)
    return signal.input_ids.reshape(-1).to(rows.device).index_select(0, rows + 1)


def check_scored_ids(
    signal: Signal, layout: ChunkLayout, name: str = "teacher", *, defer: bool = False
) -> Tensor | None:
    """Raise `LossError` unless the signal scored exactly the tokens that `layout` names, inside its vocabulary.

    layout: on the CPU or a device; the comparison costs one synchronisation. defer: everything that the host knows is
    checked, and whether any id differs is returned as a flag that the caller reads later, before it uses the loss.
    """
    ids = signal.next_ids if isinstance(signal, TopKSignal) else signal.input_ids
    # A row predicts the token after it, so full sequences must hold one more id than the last predicting row.
    limit = min(signal.num_rows, ids.numel() - (0 if isinstance(signal, TopKSignal) else 1))
    if layout.max_teacher_row >= limit:
        raise LossError(
            f"{name}: the layout needs row {layout.max_teacher_row} but the signal has {signal.num_rows} rows and "
            f"{ids.numel()} ids; build the layout from the batch that this teacher read"
        )
    if signal.vocab_size is not None and layout.max_teacher_id >= signal.vocab_size:
        raise LossError(
            f"{name}: token id {layout.max_teacher_id} is out of range for a vocabulary of {signal.vocab_size}; "
            "the batch was tokenized for another teacher"
        )
    scored = scored_ids(signal, layout.teacher_rows)
    wrong = scored != layout.teacher_ids.to(scored.device)
    if defer:
        return wrong.any()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise LossError(
            f"{name}: row {int(layout.teacher_rows[at])} scored token id {int(scored[at])} but the loss would use it "
            f"for id {int(layout.teacher_ids[at])}; signal and batch come from different token sequences"
        )
    return None
