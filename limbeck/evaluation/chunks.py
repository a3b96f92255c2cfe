"""Two models' view of the chunks of an alignment: their probabilities, and how far they are apart there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.evaluation.bits import EvalModel, EvalOptions
from limbeck.evaluation.bos import bos_bits
from limbeck.evaluation.models import find_model
from limbeck.projection import load_or_build
from limbeck.projection.audit import reached_ids
from limbeck.tokens import ByteTokenizer

_BLOCK_ROWS = 64
_UNCOVERED = "uncovered_by_projection", "uncovered_by_cells"
_TOP = 3


class ChunkScorer:
    """Both models of a pair in memory, and the cells of their vocabularies.

    Attributes:
        notes: what a reader of the scores should know, such as a BOS token that had to be set.
    """

    def __init__(
        self,
        student: str,
        teacher: str,
        options: EvalOptions | None = None,
        tokenizers: Sequence[ByteTokenizer | None] = (None, None),
    ) -> None:
        options = options or EvalOptions()
        specs = (student, teacher)
        self._sides = [_Side(spec, options, own) for spec, own in zip(specs, tokenizers, strict=True)]
        student_side, teacher_side = self._sides
        projection = load_or_build(student_side.model.tokenizer, teacher_side.model.tokenizer, trees=True)
        trees = projection.trees
        assert trees is not None
        self._unmapped = torch.from_numpy(~reached_ids(projection))
        for side, cell in zip(self._sides, (trees.student_cell, trees.teacher_cell), strict=True):
            side.bind_cells(cell, trees.num_cells)
        self.notes = [side.note for side in self._sides if side.note]

    def score(self, view: dict[str, Any]) -> None:
        """Add scores to the chunks of a view, in nats; None where a chunk lies behind a model's context.

        Each chunk gets ``student_logprobs`` and ``teacher_logprobs`` (one per token), ``student_logprob`` and
        ``teacher_logprob`` (their sums), ``student_top`` and ``teacher_top`` (the likeliest first tokens with their
        probabilities) and ``divergence``: KL(teacher || student) of the next cell at the chunk's start, the finest
        statement that both vocabularies can make. ``uncovered_by_projection`` is the teacher's
        mass there on tokens that no student token maps to, ``uncovered_by_cells`` that on tokens in no cell.
        """
        names = ("student", "teacher")
        chunks = view["chunks"]
        starts = [np.array([c[f"{name}_start"] for c in chunks], dtype=np.int64) for name in names]
        scored = [side.score(view[name]["ids"]) for side, name in zip(self._sides, names, strict=True)]
        reach = [(start > s.first) & (start <= s.last) for s, start in zip(scored, starts, strict=True)]
        both = np.flatnonzero(reach[0] & reach[1])
        figures = {name: np.full(len(chunks), np.nan) for name in ("divergence", *_UNCOVERED)}
        tops: list[dict[int, list[list[Any]]]] = [{}, {}]
        for begin in range(0, len(both), _BLOCK_ROWS):
            block = both[begin : begin + _BLOCK_ROWS]
            masses = []
            for number, (side, s, start) in enumerate(zip(self._sides, scored, starts, strict=True)):
                share = side.next_tokens(s, start[block])
                masses.append(side.by_cell(share))
                tops[number].update(zip(block.tolist(), side.likeliest(share), strict=True))
                if number:
                    unmapped = self._unmapped[: share.shape[1]].to(share.device)
                    figures[_UNCOVERED[0]][block] = share[:, unmapped].sum(1).cpu().numpy()
            figures[_UNCOVERED[1]][block] = masses[1][:, -1].cpu().numpy()
            figures["divergence"][block] = _kl(masses[1], masses[0])
        for k, chunk in enumerate(chunks):
            for number, name in enumerate(names):
                first = chunk[f"{name}_start"]
                values = scored[number].logprobs[first : first + len(chunk[f"{name}_ids"])]
                known = len(values) == len(chunk[f"{name}_ids"]) and np.isfinite(values).all()
                chunk[f"{name}_logprobs"] = [round(float(v), 4) for v in values] if known else None
                chunk[f"{name}_logprob"] = round(float(values.sum()), 4) if known else None
                chunk[f"{name}_top"] = tops[number].get(k)
            for name, values in figures.items():
                chunk[name] = round(float(values[k]), 4) if np.isfinite(values[k]) else None


class _Scored:
    """Hidden states and log-probabilities of one row. ``logprobs`` [n]: NaN where a token has none. Tokens after
    ``first`` up to ``last`` have a predictor; ``shift``: how many places further the model's row stands."""

    def __init__(self, hidden: Tensor, logprobs: npt.NDArray[np.float64], first: int, last: int, shift: int) -> None:
        self.hidden, self.logprobs, self.first, self.last, self.shift = hidden, logprobs, first, last, shift


class _Side:
    def __init__(self, spec: str, options: EvalOptions, tokenizer: ByteTokenizer | None) -> None:
        self.model = EvalModel(find_model(spec, options.checkpoint), options)
        tokenizer = tokenizer or ByteTokenizer.of(self.model.tokenizer)
        self.vocab = tokenizer.vocab
        self.note = ""
        self._bos_id: int | None = tokenizer.bos_id
        bits = bos_bits(self.model.policy, tokenizer)
        # the row's own choice stands where the model does not care
        self._wants = None if bits is None else bits.expected
        if bits is not None and self._wants is not None and self._wants != tokenizer.adds_bos:
            how = "behind its BOS token" if self._wants else "without a BOS token"
            self.note = (
                f"{Path(spec).name} is scored {how}, as its weights expect ({bits}); its tokenizer does otherwise."
            )

    def bind_cells(self, cell: npt.NDArray[np.int32], count: int) -> None:
        """Cell of every row of the head; tokens in none share the last place."""
        width = self.model.policy.vocab_size
        cell_of_row = torch.from_numpy(np.where(cell < 0, count, cell).astype(np.int64))[:width]
        self._cell, self._places = cell_of_row.to(self.model.policy.device), count + 1

    @torch.no_grad()
    def score(self, ids: list[int]) -> _Scored:
        n, shift = len(ids), 0
        row = list(ids)
        if self._bos_id is not None and self._wants is True and row[:1] != [self._bos_id]:
            row, shift = [self._bos_id, *row], 1
        elif self._bos_id is not None and self._wants is False and row[:1] == [self._bos_id]:
            row, shift = row[1:], -1
        # cut only now: a BOS token more or less moves the row's end
        row = row[: self.model.context]
        batch: BatchedDataDict = BatchedDataDict(
            {"input_ids": torch.tensor([row]), "input_lengths": torch.tensor([len(row)])}
        )
        policy = self.model.policy
        row_logprobs = policy.get_logprobs(batch)["logprobs"][0].cpu().double().numpy()
        logprobs = np.full(n, np.nan)
        for token in range(max(1 - shift, 0), min(len(row) - shift, n)):
            logprobs[token] = row_logprobs[token + shift]
        return _Scored(policy.get_hidden(batch)[0], logprobs, -shift, len(row) - 1 - shift, shift)

    @torch.no_grad()
    def next_tokens(self, scored: _Scored, start: npt.NDArray[np.int64]) -> Tensor:
        """Probabilities [rows, ids] of the token at each ``start``."""
        rows = torch.from_numpy(start - 1 + scored.shift).to(scored.hidden.device)
        return self.model.policy.head().logits(scored.hidden.index_select(0, rows)).softmax(1)

    def by_cell(self, share: Tensor) -> Tensor:
        """Probabilities [rows, cells + 1]; the last place is for tokens in no cell."""
        width = self._cell.numel()
        return share.new_zeros((share.shape[0], self._places)).index_add_(1, self._cell, share[:, :width])

    def likeliest(self, share: Tensor) -> list[list[list[Any]]]:
        """The most probable tokens of each row, with their probabilities."""
        values, ids = share.topk(min(_TOP, share.shape[1]), dim=1)
        return [
            [[token, round(float(p), 4)] for token, p in zip(self.vocab.display(row_ids), row_values, strict=True)]
            for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
        ]


def _kl(teacher: Tensor, student: Tensor) -> npt.NDArray[np.float64]:
    """KL(teacher || student) of each row, in nats."""
    t = teacher.to("cpu", torch.float64)
    # the mass of a cell may be 0 in float32; a term is then large and no infinity
    s = student.to("cpu", torch.float64).clamp_min(1e-300)
    # xlogy: 0 log 0 is 0; rounding may bring a sum below 0
    values: npt.NDArray[np.float64] = (torch.special.xlogy(t, t / s)).sum(1).clamp_min(0).numpy()
    return values
