"""Attention of packed documents by one kernel, and of long sequences over several ranks.

There each rank holds two pieces of every sequence and attends to gathered keys and values.

Rank r of n holds pieces r and 2n - 1 - r of 2n, so that early and late positions, which attend to little and to much,
are shared evenly. Keys and values are gathered per layer (their gradients are summed back by a reduce-scatter); queries
stay. The last hidden states are gathered too, R x h, after which rows are where a single process would have them: the
next-token shift and chunks that straddle ranks need no care, and each rank takes its share of the loss's blocks.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device
from limbeck.errors import ConfigError

ATTENTION_NAME = "limbeck_context"
_BAND_ROWS = 512
"""Queries that share one mask of a sliding window, at least; the mask is as wide as they and the window together."""


# ---- torch's variable-length kernel ----


@dataclass(frozen=True)
class VarlenKernel:
    """Causal attention within documents; queries stand at the end of their document's keys.

    function: `torch.nn.attention.varlen.varlen_attn`; known: the names of its parameters.
    """

    function: Callable[..., Any]
    known: frozenset[str]

    @property
    def takes_windows(self) -> bool:
        """Whether a sliding window can be asked for."""
        return "window_size" in self.known

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """query `[N_q, H, D]`, key and value `[N_k, H_kv, D]` -> `[N_q, H, D]`.

        cu_seqlens: cumulative lengths of queries and of keys, int32 `[documents + 1]` each; longest: of a document, on
        either side; window: keys that a query sees, itself included.
        """
        options: dict[str, Any] = {"is_causal": True, "scale": scale}
        options = {name: value for name, value in options.items() if name in self.known}
        if self.takes_windows:
            # torch counts the keys in front of a query, without its own
            options["window_size"] = (-1 if window is None else window - 1, 0)
        groups = query.shape[1] // key.shape[1]
        if "enable_gqa" in self.known:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            # versions without the option want as many heads on both sides
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out: Tensor = self.function(query, key, value, *cu_seqlens, *longest, **options)
        return out


def _find() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return VarlenKernel(varlen_attn, frozenset(inspect.signature(varlen_attn).parameters))


# found once, here: a compiled layer can look it up but not look for it
_KERNEL = _find()


def varlen_kernel() -> VarlenKernel | None:
    """The kernel of this torch; None where it has none."""
    return _KERNEL


# ---- sequences split over ranks ----


class _GatherSequence(torch.autograd.Function):
    """Pieces `[.., T / n, ..]` of all ranks in the order of the sequence; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, split: GatheredAttention, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        # context-parallel ranks, twice per layer and once at the end: T / n positions of keys, values, hidden states
        halves = [half for part in split.comm.gather(mine) for half in part.chunk(2, dim)]
        # rank r brought pieces r and 2n - 1 - r
        return torch.cat(halves[0::2] + halves[1::2][::-1], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        comm = ctx.split.comm
        pieces = grads[0].chunk(2 * comm.size, ctx.dim)
        parts = [torch.cat((pieces[r], pieces[2 * comm.size - 1 - r]), ctx.dim) for r in range(comm.size)]
        # the way back: every rank has gradients of all positions and wants the sum at its own
        return comm.reduce_scatter(parts), None, None


@dataclass(frozen=True)
class Span:
    """Queries `[first, end)` of one document; they see keys `[low, end)`, those after themselves excepted."""

    first: int
    end: int
    low: int


def query_spans(
    piece: tuple[int, int], cu_seqlens_host: Sequence[int], window: int | None, step: int | None
) -> list[Span]:
    """Spans of the queries in a piece `[start, end)` of a sequence, in order.

    Args:
        cu_seqlens_host: where documents start and end, from 0 to the sequence's length.
        window: keys that a query sees, itself included; None: all of its document.
        step: longest span; None: a whole document's share of the piece.
    """
    out = []
    for low, high in itertools.pairwise(cu_seqlens_host):
        first, end = max(piece[0], low), min(piece[1], high)
        for start in range(first, end, step or max(end - first, 1)):
            stop = end if step is None else min(start + step, end)
            out.append(Span(start, stop, low if window is None else max(low, start - window + 1)))
    return out


@dataclass
class SplitSequences:
    """The sequences of one forward pass: whose they are, how long, and where packed documents start and end."""

    split: GatheredAttention
    length: int
    cu_seqlens_host: Sequence[int]
    _tables: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """Whether a sequence holds several documents."""
        return len(self.cu_seqlens_host) > 2

    def piece(self, number: int) -> tuple[int, int]:
        """First and last (excluded) position of a piece."""
        size = self.length // (2 * self.split.comm.size)
        return number * size, (number + 1) * size

    def tables(self, spans: Sequence[Span], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of queries and keys over the spans of `rows` sequences; made once for all layers."""
        key = (tuple(spans), rows)
        if key not in self._tables:
            lengths = [[s.end - s.first for s in spans] * rows, [s.end - s.low for s in spans] * rows]
            sums = [list(itertools.accumulate(side, initial=0)) for side in lengths]
            table = to_device(torch.tensor(sums, dtype=torch.int32), device)
            self._tables[key] = (table[0], table[1])
        return self._tables[key]


class GatheredAttention:
    """All-gather attention over a context-parallel group."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def pieces(self) -> tuple[int, int]:
        """The two of 2n pieces that this rank holds."""
        return self.comm.rank, 2 * self.comm.size - 1 - self.comm.rank

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of `[B, T]`."""
        parts = values.chunk(2 * self.comm.size, 1)
        return torch.cat([parts[i] for i in self.pieces()], 1)

    def install(self, body: Any) -> None:
        """Make a transformers model attend this way."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, attend)
        body.config._attn_implementation = ATTENTION_NAME

    def run(self, body: Any, kwargs: dict[str, Any], cu_seqlens_host: Sequence[int] | None = None) -> Tensor:
        """Hidden states `[B, T, h]` of the whole sequences, from inputs `[B, T]` that every rank has; T must be a
        multiple of twice the number of ranks.

        Packed inputs `[1, T]` bring `cu_seq_lens_q`, where their documents start and end in the whole sequence;
        cu_seqlens_host: the same on the host, which otherwise waits for them.
        """
        ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
        if ids.shape[1] % (2 * self.comm.size):
            raise ConfigError(
                f"sequences of {ids.shape[1]} tokens cannot be cut into {2 * self.comm.size} equal pieces"
            )
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if cu_seqlens_host is None:
            table = kwargs.get("cu_seq_lens_q")
            cu_seqlens_host = (0, ids.shape[1]) if table is None else table.tolist()
        inputs = {key: value for key, value in kwargs.items() if not key.startswith(("cu_seq_lens", "max_length"))}
        inputs |= {"input_ids": self.own(ids), "position_ids": self.own(positions), "attention_mask": None}
        # an argument, not a variable of the context: recomputed activations must see it too, in whatever thread
        hidden = body(**inputs, sequences=SplitSequences(self, ids.shape[1], cu_seqlens_host)).last_hidden_state
        out: Tensor = _GatherSequence.apply(hidden, self, 1)
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: SplitSequences,
        *,
        window: int | None,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        """This rank's queries `[B, H, T / n, D]` to the keys and values `[B, H_kv, T / n, D]` of all ranks:
        `[B, H, T / n, D]`. Each piece sees no more than what precedes it, so no mask of T x T is made."""
        key, value = (_GatherSequence.apply(x, self, 2) for x in (key, value))
        kernel = varlen_kernel() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None
        flash = kernel is not None and not dropout and (window is None or kernel.takes_windows)
        flash = flash and (sequences.packed or window is not None)
        if not flash and key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        outputs = []
        for number, part in zip(self.pieces(), query.chunk(2, 2), strict=True):
            piece = sequences.piece(number)
            if flash:
                spans = query_spans(piece, sequences.cu_seqlens_host, window, None)
                outputs.append(_by_kernel(part, key, value, spans, sequences, window=window, scaling=scaling))
            else:
                step = None if window is None else max(window, _BAND_ROWS)
                spans = query_spans(piece, sequences.cu_seqlens_host, window, step)
                outputs.append(_by_span(part, key, value, spans, window=window, scaling=scaling, dropout=dropout))
        return torch.cat(outputs, 2)


def _by_kernel(
    part: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    sequences: SplitSequences,
    *,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """One call of the variable-length kernel. The keys of a piece's documents follow each other, so they are a slice;
    queries stand at the end of their keys, which is how the kernel understands "causal"."""
    rows, low, end = part.shape[0], spans[0].low, spans[-1].end
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (part, key[:, :, low:end], value[:, :, low:end])]
    longest = (max(s.end - s.first for s in spans), max(s.end - s.low for s in spans))
    kernel = varlen_kernel()
    assert kernel is not None
    cu_seqlens = sequences.tables(spans, rows, part.device)
    out = kernel(flat[0], flat[1], flat[2], cu_seqlens, longest, scale=scaling, window=window)
    return torch.unflatten(out, 0, (rows, part.shape[2])).transpose(1, 2)


def _keys_of(values: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    """Part that each span sees of keys or values `[B, H, T, D]`."""
    if all(a.end == b.low for a, b in itertools.pairwise(spans)):
        # one split, whose gradient is one concatenation, where slices would each fill a whole sequence with zeros
        return torch.split(values[:, :, spans[0].low : spans[-1].end], [s.end - s.low for s in spans], 2)
    return [values[:, :, s.low : s.end] for s in spans]


def _by_span(
    part: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """One call of torch's attention per span."""
    outputs = []
    queries = part.split([s.end - s.first for s in spans], 2)
    for span, some, keys, values in zip(spans, queries, _keys_of(key, spans), _keys_of(value, spans), strict=True):
        rows, columns = span.end - span.first, span.end - span.low
        # queries stand at the end of their keys; `is_causal` would align the two at their beginnings
        mask: Any = causal_lower_right(rows, columns)
        if window is not None and columns > window:
            behind = torch.arange(span.first, span.end, device=part.device)[:, None]
            behind = behind - torch.arange(span.low, span.end, device=part.device)
            mask = (behind >= 0) & (behind < window)
        outputs.append(
            F.scaled_dot_product_attention(some, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


# its exchanges are no graph to compile, and its loops depend on the documents
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sequences: SplitSequences | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries `[B, heads, T / n, d]` to the keys and values of the whole sequence, as
    a transformers attention function: `[B, T / n, heads, d]`."""
    if sequences is None:
        raise ConfigError("this model attends over context-parallel ranks; run it through its policy")
    window = None if sliding_window is None or sliding_window >= sequences.length else sliding_window
    # rotary embeddings leave queries and keys wide under autocast; only narrow ones need travel
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = sequences.split.attend(query, key, value, sequences, window=window, scaling=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None
