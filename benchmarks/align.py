"""What alignment costs, beside the tokenization it goes with and beside another aligner.

Ratios within one run: absolute times depend on the machine.

    python -m benchmarks.align --student FOLDER --teacher FOLDER --text FILE [FILE ...]   [--trl]

Writes ``benchmarks/align.json``. ``--trl`` also times the aligner of the installed ``trl`` on the same tokens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, record
from limbeck.align import AlignmentBatch, TokenAligner
from limbeck.align.boundaries import chunk_stretch
from limbeck.tokens import ByteTokenizer, load_tokenizer


def seconds(action: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of one call."""
    times = []
    gc.disable()
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    gc.enable()
    return statistics.median(times)


def batch_cost(pair: TokenAligner, sides: tuple[ByteTokenizer, ByteTokenizer], texts: list[str]) -> dict[str, float]:
    """Tokenizing a batch twice against aligning it, tensors included."""
    rendered = [s.encode_batch(texts) for s in sides]
    widths = [max(len(r) for r in rows) for rows in rendered]

    def tokenize() -> None:
        for side in sides:
            side.encode_batch(texts)

    def align() -> None:
        chunks = [pair.align_renderings(a, b) for a, b in zip(*rendered, strict=True)]
        AlignmentBatch.from_chunks(chunks, *widths)

    cost = {"tokenize_s": seconds(tokenize), "align_s": seconds(align)}
    tokens = sum(len(r) for rows in rendered for r in rows)
    return {**cost, "tokens": tokens, "ratio": cost["align_s"] / cost["tokenize_s"]}


def length_cost(pair: TokenAligner, sides: tuple[ByteTokenizer, ByteTokenizer], text: str) -> list[dict[str, float]]:
    """Time to align one document of growing length."""
    whole = [s.encode(text) for s in sides]
    chunks = pair.align_renderings(*whole)
    rows = []
    for goal in (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000):
        if goal > len(whole[0]):
            break
        last = int(np.searchsorted(chunks.student_end, goal, side="right")) - 1
        cut = text.encode()[: int(chunks.byte_end[last])].decode("utf-8", "ignore")
        short = [s.encode(cut) for s in sides]
        took = seconds(lambda r=short: pair.align_renderings(*r), repeats=9)  # type: ignore[misc]
        rows.append({"student_tokens": len(short[0]), "seconds": took, "ns_per_token": took / len(short[0]) * 1e9})
    return rows


def trl_cost(pair: TokenAligner, sides: tuple[ByteTokenizer, ByteTokenizer], texts: list[str]) -> dict[str, float]:
    """The walker of trl's GOLD trainer against ours, both from the same tensors of byte offsets."""
    import torch
    from trl.experimental.gold.gold_trainer import ULDLoss

    offsets = []
    for a, b in zip(*(s.encode_batch(texts) for s in sides), strict=True):
        offsets.append(
            tuple(torch.from_numpy(np.stack([np.append(0, r.byte_ends[:-1]), r.byte_ends], 1)) for r in (a, b))
        )

    def ours(s: torch.Tensor, t: torch.Tensor) -> Any:
        ends = s[:, 1].numpy(), t[:, 1].numpy()
        return chunk_stretch(*ends, *(np.ones(len(e), dtype=bool) for e in ends))

    for s, t in offsets:
        groups = ULDLoss._align_by_byte_offsets(s.tolist(), t.tolist())
        assert [len(g) for g in groups[0]] == (lambda c: c.student_end - c.student_start)(ours(s, t)).tolist()
    theirs_s = seconds(lambda: [ULDLoss._align_by_byte_offsets(s.tolist(), t.tolist()) for s, t in offsets])
    ours_s = seconds(lambda: [ours(s, t) for s, t in offsets])
    return {"trl_s": theirs_s, "limbeck_s": ours_s, "times_faster": theirs_s / ours_s}


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--student", required=True)
    arguments.add_argument("--teacher", required=True)
    arguments.add_argument("--text", nargs="+", type=Path, required=True)
    arguments.add_argument("--trl", action="store_true")
    args = arguments.parse_args()
    tokenizers = load_tokenizer(args.student), load_tokenizer(args.teacher)
    pair = TokenAligner(*tokenizers)
    sides = ByteTokenizer.of(tokenizers[0]), ByteTokenizer.of(tokenizers[1])
    result: dict[str, Any] = {"batches": {}}
    joined = ""
    for path in args.text:
        text = path.read_text(encoding="utf-8")
        joined += text
        texts = [text[i : i + 8_000] for i in range(0, 32 * 8_000, 8_000)]
        result["batches"][path.stem] = row = batch_cost(pair, sides, texts)
        print(f"{path.stem:28} tokenize {row['tokenize_s']:.3f} s  align {row['align_s']:.4f} s  {row['ratio']:.1%}")
        if args.trl:
            result.setdefault("trl", {})[path.stem] = cost = trl_cost(pair, sides, texts)
            print(f"{'':28} trl {cost['trl_s']:.3f} s  limbeck {cost['limbeck_s']:.4f} s  {cost['times_faster']:.0f}x")
    result["lengths"] = length_cost(pair, sides, joined)
    for row in result["lengths"]:
        print(
            f"{row['student_tokens']:8d} tokens  {row['seconds'] * 1e3:8.3f} ms  {row['ns_per_token']:.1f} ns per token"
        )
    record(args.out, result)


if __name__ == "__main__":
    main()
