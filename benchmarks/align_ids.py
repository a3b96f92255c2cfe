"""Alignment by ids alone: how much of a text it aligns exactly, beside the collator, and what it costs on short texts.

Ratios within one run: absolute times depend on the machine. A pair is two tokenizer folders with a comma between them.

    python -m benchmarks.align_ids --pair FOLDER,FOLDER [--pair ...] --text FILE [FILE ...]

Writes ``benchmarks/align_ids.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import parser, record
from limbeck.align import Chunks, TokenAligner
from limbeck.tokens import Rendering, TextEncoder, load_tokenizer

LONG, SHORT, ROWS = 20_000, 200, 32


def exact_share(side: Rendering, chunks: Chunks) -> float:
    """Share of a text's bytes that lie in exact chunks."""
    lengths = np.diff(side.ends, prepend=0)
    spans = zip(chunks.student_start[chunks.exact], chunks.student_end[chunks.exact], strict=True)
    return sum(int(lengths[a:b].sum()) for a, b in spans) / len(side.source)


def padded(rows: list[Rendering]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of a batch."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.from_numpy(row.ids), 1
    return ids, mask


def least(action: Callable[[], None], repeats: int = 40) -> float:
    """Seconds of processor time of the fastest of several calls: what else runs on the machine matters least to it."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def measure(tokenizers: tuple[Any, Any], text: str) -> dict[str, float]:
    """Shares of one long text, and the cost of a batch of short ones against tokenizing them with both tokenizers."""
    pair, sides = TokenAligner(*tokenizers), [TextEncoder.for_tokenizer(t) for t in tokenizers]
    student, teacher = (side.encode(text[:LONG], bos=True) for side in sides)
    short = [text[i : i + SHORT] for i in range(0, ROWS * SHORT, SHORT)]
    (ids_s, mask_s), (ids_t, mask_t) = (padded(side.encode_batch(short, bos=True)) for side in sides)

    def tokenize() -> None:
        for tokenizer in tokenizers:
            tokenizer.backend_tokenizer.encode_batch_fast(short, add_special_tokens=False)

    def align() -> None:
        pair.align(ids_s, ids_t, student_attention_mask=mask_s, teacher_attention_mask=mask_t)

    cost = {"tokenize_s": least(tokenize), "align_s": least(align)}
    return {
        "exact_by_ids": exact_share(student, pair.align_id_rows(student.ids, teacher.ids)),
        "exact_by_text": exact_share(student, pair.align_renderings(student, teacher)),
        **cost,
        "ratio": cost["align_s"] / cost["tokenize_s"],
    }


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--pair", action="append", required=True, metavar="STUDENT,TEACHER")
    arguments.add_argument("--text", nargs="+", type=Path, required=True)
    args = arguments.parse_args()
    result: dict[str, Any] = {}
    for pair in args.pair:
        folders = [Path(folder) for folder in pair.split(",")]
        tokenizers = load_tokenizer(str(folders[0])), load_tokenizer(str(folders[1]))
        name = " ".join(folder.name.removeprefix("tokenizer-") for folder in folders)
        for path in args.text:
            row = measure(tokenizers, path.read_text(encoding="utf-8"))
            result.setdefault(name, {})[path.stem] = row
            shares = f"exact by ids {row['exact_by_ids']:.3%}, by text {row['exact_by_text']:.3%}"
            print(f"{name:24} {path.stem:24} {shares}, align / tokenize {row['ratio']:.2f}", flush=True)
    record(args.out, {"pairs": result})


if __name__ == "__main__":
    main()
