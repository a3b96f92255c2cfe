"""Renderings of any length through a model's context: windows that score every token exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.tokens import Rendering
from limbeck.utils.errors import ConfigError, DataError, LossError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Windows are sorted by length within this many batches, so that rows of a batch need little padding.
_BATCHES_TO_SORT = 16


class Scorer(Protocol):
    """What scoring needs of a model; :class:`limbeck.models.policy.Policy` has it."""

    vocab_size: int
    name: str

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """``logprobs`` [B, T] of the token at t given those before it."""
        ...


@dataclass(frozen=True, eq=False)
class Window:
    """One row for the model.

    Attributes:
        ids: ``[n]`` token ids, the begin token included.
        scored: ``[n]`` bool; tokens whose probability counts. Never the first: it has no predictor.
        size: bytes of the source that the scored tokens stand for.
        share: part of its document that this window completes, for progress; a document's shares add up to 1.
        key: whatever the caller wants back with the score.
    """

    ids: IntArray
    scored: BoolArray
    size: int
    share: float = 1.0
    key: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return int(self.scored.sum())


def counted_tokens(rendering: Rendering) -> BoolArray:
    """``[n]`` tokens that take part in bits per byte: supervised text with a predictor.

    Special tokens stand for no bytes, so they are context only; an unknown token stands for text that it lost.
    """
    lengths = np.diff(rendering.ends, prepend=0)
    counted = rendering.target & (~rendering.special | (lengths > 0))
    counted[:1] = False
    return counted


def make_windows(
    rendering: Rendering,
    context: int,
    stride: int,
    *,
    bos_id: int | None = None,
    counted: BoolArray | None = None,
    key: Any = None,
) -> list[Window]:
    """Windows of at most ``context`` tokens over a rendering; every counted token is scored in exactly one.

    The first window scores all it holds. Each later one moves on by ``stride`` tokens and reads the tokens before them
    again as context, behind a begin token of its own where ``bos_id`` is given (some models need one). Windows without
    a counted token are left out.
    """
    counted = counted_tokens(rendering) if counted is None else counted
    check_window(context, stride)
    n = len(rendering)
    lengths = np.diff(rendering.ends, prepend=0)
    front = np.zeros(0, np.int64) if bos_id is None else np.array([bos_id], np.int64)
    windows = []
    done = 0
    while done < n:
        end = min(context if done == 0 else done + stride, n)
        start = 0 if done == 0 else max(end - (context - len(front)), 0)
        fresh = counted[start:end].copy()
        fresh[: done - start] = False
        ids = rendering.ids[start:end]
        if start > 0:
            ids, fresh = np.concatenate([front, ids]), np.concatenate([np.zeros(len(front), bool), fresh])
        share = (end - done) / n
        if fresh.any():
            size = int(lengths[done:end][counted[done:end]].sum())
            windows.append(Window(ids, fresh, size, share, key))
        done = end
    return windows


def check_window(context: int, stride: int) -> None:
    """Refuse a context and stride that would leave a token without anything before it."""
    if context < 4:
        raise ConfigError(f"a context of {context} tokens is too short to score text; give at least 4.")
    if not 1 <= stride <= context - 2:
        raise ConfigError(
            f"a stride of {stride} tokens does not fit a context of {context}; give 1 to {context - 2}, so that every "
            "window reads something before what it scores."
        )


def score_windows(model: Scorer, windows: Iterable[Window], batch_tokens: int) -> Iterator[tuple[Window, float]]:
    """Each window with the log-likelihood (natural logarithm) of its scored tokens; the order may differ.

    ``batch_tokens``: most tokens of one forward pass, padding included (a single longer window goes alone).
    """
    waiting: list[Window] = []
    room = 0
    for window in windows:
        waiting.append(window)
        room += len(window)
        if room >= _BATCHES_TO_SORT * batch_tokens:
            yield from _score_sorted(model, waiting, batch_tokens)
            waiting, room = [], 0
    yield from _score_sorted(model, waiting, batch_tokens)


def _score_sorted(model: Scorer, windows: list[Window], batch_tokens: int) -> Iterator[tuple[Window, float]]:
    # longest first: a batch that does not fit in memory shows at once
    ordered = sorted(windows, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        rows = max(batch_tokens // len(ordered[start]), 1)
        batch = ordered[start : start + rows]
        yield from zip(batch, _score_batch(model, batch), strict=True)
        start += rows


def _score_batch(model: Scorer, batch: list[Window]) -> list[float]:
    width = len(batch[0])
    ids = np.zeros((len(batch), width), dtype=np.int64)
    scored = np.zeros((len(batch), width), dtype=bool)
    for row, window in enumerate(batch):
        ids[row, : len(window)] = window.ids
        scored[row, : len(window)] = window.scored
    outside = ids[ids >= model.vocab_size]
    if outside.size:
        raise DataError(
            f"token id {int(outside[0])} lies outside the head of {model.name} ({model.vocab_size} rows), so it has no "
            "probability; give the tokenizer that belongs to the model."
        )
    lengths = torch.tensor([len(window) for window in batch], dtype=torch.int64)
    data: BatchedDataDict = BatchedDataDict({"input_ids": torch.from_numpy(ids), "input_lengths": lengths})
    logprobs = model.get_logprobs(data)["logprobs"].cpu().double().numpy()
    values = np.where(scored, logprobs, 0.0)
    if not np.isfinite(values).all():
        raise LossError(f"{model.name} gives a probability that is not finite; its weights are damaged.")
    return [float(total) for total in values.sum(axis=1)]
