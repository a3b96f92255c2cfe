"""Tokens per second that a student writes: prompt by prompt, in batches of `generate`, and by continuous batching.

    PYTHONPATH=. python benchmarks/gpu/sampling.py [--prompts 256] [--new 256] [--batch 64 256]

A model of Llama-3.2-1B's shape with random weights, bfloat16 on a GPU. Its next token is close to uniform, so that a
share of the vocabulary as ends makes answers as ragged as real ones: geometric, 64 tokens on average. All ways write
the same answers from the same seeds, but for what the last bits of sums change. One prompt at a time is measured on a
few prompts. `--tiny` runs everything small on the CPU. Writes rows `sampling_*` into results.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import RESULTS, save_row
from benchmarks.gpu.step import ROPE, SHAPES, TINY
from limbeck.models.continuous import ContinuousSampler
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.language_model import LanguageModel

MEAN = 64
"""Tokens of an answer on average, where the limit does not cut it off."""
ALONE = 4
"""Prompts that are continued one at a time."""


def student(*, tiny: bool) -> LanguageModel:
    """A random model; tiny: on the CPU's scale."""
    shape: dict[str, Any] = {**SHAPES["student"], **(TINY | {"vocab_size": 4096} if tiny else {})}
    rope = {} if tiny else {"rope_parameters": ROPE}
    settings = {
        "init": "random",
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        "model_overrides": {**shape, **rope, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    }
    return LanguageModel(settings, None, seed=0)


def tokens_per_s(sampler: LocalSampler, prompts: list[torch.Tensor]) -> tuple[float, int]:
    """Of the second call, for the first one warms up; and the tokens that were written."""
    sampler.sample(prompts[:ALONE], seed=0)
    start = time.perf_counter()
    found = sampler.sample(prompts, seed=1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    written = sum(len(s.ids_T) for s in found)
    return written / (time.perf_counter() - start), written


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--prompts", type=int, default=256)
    arguments.add_argument("--new", type=int, default=256)
    arguments.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--out", type=Path, default=RESULTS)
    args = arguments.parse_args()
    model = student(tiny=args.tiny)
    dice = torch.Generator().manual_seed(0)
    sizes = torch.randint(16, 128, (args.prompts,), generator=dice).tolist()
    prompts = [torch.randint(0, model.vocab_size, (size,), generator=dice) for size in sizes]
    ends = torch.randperm(model.vocab_size, generator=dice)[: model.vocab_size // MEAN].tolist()

    def row(kind: type[LocalSampler], batch: int, own: list[torch.Tensor]) -> dict[str, Any]:
        config = SamplingConfig(max_new_tokens=args.new, batch_size=batch)
        speed, written = tokens_per_s(kind(model, config, ends), own)
        return {"tokens_per_s": round(speed, 1), "tokens": written, "prompts": len(own), "batch_size": batch}

    alone = row(LocalSampler, 1, prompts[:ALONE])
    shape = "tiny" if args.tiny else "llama_1b"
    print("one at a time", alone, flush=True)
    save_row(f"sampling_{shape}_alone", alone, args.out)
    for batch in args.batch:
        plain = row(LocalSampler, batch, prompts)
        found = {"alone": alone, "generate": plain, "continuous": row(ContinuousSampler, batch, prompts)}
        speed = {name: own["tokens_per_s"] for name, own in found.items()}
        over = {f"continuous_over_{name}": speed["continuous"] / speed[name] for name in ("alone", "generate")}
        print(f"batch {batch}", speed, over, flush=True)
        save_row(f"sampling_{shape}_{batch}", {**found, **over}, args.out)


if __name__ == "__main__":
    main()
