"""Bytes per token of a teacher cache, measured on files: k = 50, 64, 128, 512 and hidden states of size 2,560.

    python -m benchmarks.cache_size            # writes benchmarks/cache_size.json

The values stored are random: the format does not compress, so its size depends on the number of tokens alone.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, record
from limbeck.teachers.cache import CacheReader, CacheSpec, CacheWriter, estimate_bytes

DOCUMENTS, LENGTH = 24, 1024
CASES: list[dict[str, Any]] = [
    {"teacher": "Qwen3-4B", "kind": "topk", "vocab_size": 151_669, "k": 50},
    {"teacher": "Qwen3-4B", "kind": "topk", "vocab_size": 151_669, "k": 64},
    {"teacher": "Qwen3-4B", "kind": "topk", "vocab_size": 151_669, "k": 128},
    {"teacher": "Qwen3-4B", "kind": "topk", "vocab_size": 151_669, "k": 512},
    {"teacher": "SmolLM2", "kind": "topk", "vocab_size": 49_152, "k": 64},
    {"teacher": "SmolLM2", "kind": "topk", "vocab_size": 49_152, "k": 128},
    {"teacher": "SmolLM2", "kind": "topk", "vocab_size": 49_152, "k": 512},
    {"teacher": "Qwen3-4B", "kind": "hidden", "vocab_size": 151_669, "hidden_size": 2560},
]


def arrays(spec: CacheSpec, rng: np.random.Generator) -> dict[str, Any]:
    rows = LENGTH - 1
    out = {
        "ids": rng.integers(0, spec.vocab_size, LENGTH),
        "next_logprob": -rng.random(rows, dtype=np.float32),
        "logsumexp": rng.random(rows, dtype=np.float32),
    }
    if spec.kind == "topk":
        # k different ids a row
        first, step = rng.integers(0, spec.vocab_size, (rows, 1)), spec.vocab_size // spec.k
        out["topk_ids"] = (first + step * np.arange(spec.k)) % spec.vocab_size
        out["topk_logprobs"] = -rng.random((rows, spec.k), dtype=np.float32)
    else:
        # the bits of finite bfloat16 numbers
        out["hidden"] = rng.integers(0, 0x7F80, (rows, spec.hidden_size)).astype(np.uint16)
    return out


def measure(case: dict[str, Any]) -> dict[str, Any]:
    spec = CacheSpec(teacher_fingerprint="f" * 64, **{k: v for k, v in case.items() if k != "teacher"})
    rng = np.random.default_rng(0)
    documents = [arrays(spec, rng) for _ in range(DOCUMENTS)]
    tokens = DOCUMENTS * LENGTH
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with CacheWriter(folder, spec) as writer:
            for document in documents:
                writer.add(**document)
        write_seconds = time.perf_counter() - start
        size = sum(p.stat().st_size for p in Path(folder).iterdir())
        start = time.perf_counter()
        reader = CacheReader(folder)
        for document in documents:
            reader.get(document["ids"])
        read_seconds = time.perf_counter() - start
    kwargs = {"k": spec.k} if spec.kind == "topk" else {"hidden_size": spec.hidden_size}
    estimate = estimate_bytes(tokens, vocab_size=spec.vocab_size, documents=DOCUMENTS, **kwargs)
    return {
        **case,
        "bytes_per_token": round(size / tokens, 2),
        "estimated_bytes_per_token": round(estimate / tokens, 2),
        "gb_per_billion_tokens": round(size / tokens, 1),
        "write_tokens_per_s": round(tokens / write_seconds),
        "read_and_check_tokens_per_s": round(tokens / read_seconds),
    }


def main() -> None:
    args = parser(__file__, __doc__).parse_args()
    result: dict[str, Any] = {
        "documents": DOCUMENTS,
        "tokens_per_document": LENGTH,
        "rows": [measure(case) for case in CASES],
    }
    record(args.out, result)
    for row in result["rows"]:
        what = f"k={row['k']}" if row["kind"] == "topk" else f"hidden {row['hidden_size']}"
        print(f"{row['teacher']:>9} {what:>12}  {row['bytes_per_token']:8.1f} bytes/token")


if __name__ == "__main__":
    main()
