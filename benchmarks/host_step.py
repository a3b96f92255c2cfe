"""What the host does for a GPU step from a cached teacher, while the device computes the student's forward pass.

    python -m benchmarks.host_step

At the sizes of `benchmarks/gpu/step.py` (8 documents of 2,048 tokens, Llama-3.2-1B from Qwen3-4B, boundary_kl), without
a GPU: ``layout``, the rows in the kernels' order; ``tensors`` and ``megabytes`` of it that are sent; ``look_up``, the
stored signals found by their ids and copied, of top-128 lists and of hidden states, documents checked before
(``first``: with their check). Milliseconds of CPU time, medians; copies go to fresh memory here, to pinned memory that
is kept on a GPU machine. Writes ``host_step.json``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common import parser, record
from benchmarks.gpu.common import V_S, V_T, aligned_batch, make_projection
from benchmarks.gpu.step import DOCUMENTS, LENGTH, laid_out
from limbeck.data.microbatch import ProcessedMicrobatch, make_processed_microbatch_iterator
from limbeck.distributed.device import _tensors
from limbeck.losses import CrossTokenizerDistillationLossFn, Head
from limbeck.teachers.cache import CacheSpec, CacheWriter
from limbeck.teachers.cache.format import save_head
from limbeck.teachers.cached import CachedTeacher

K, HIDDEN = 128, 2560


def milliseconds(call: Callable[[], Any], repeat: int) -> float:
    """Median CPU time of a call, all its threads together."""
    found = []
    for _ in range(repeat):
        begun = time.process_time()
        call()
        found.append((time.process_time() - begun) * 1e3)
    return round(statistics.median(found), 2)


def write(folder: str, kind: str, ids_BT: np.ndarray, vocab_size: int) -> None:
    """A cache of random signals of these documents."""
    rng, rows = np.random.default_rng(0), ids_BT.shape[1] - 1
    sizes: dict[str, Any] = {"k": K} if kind == "topk" else {"hidden_size": HIDDEN, "hidden_dtype": "bfloat16"}
    writer = CacheWriter(folder, CacheSpec(kind, vocab_size=vocab_size, teacher_fingerprint="random", **sizes))
    numbers = {"next_logprob": np.full(rows, -1, np.float32), "logsumexp": np.zeros(rows, np.float32)}
    for ids in ids_BT:
        if kind == "topk":
            first = rng.integers(0, vocab_size - K, (rows, 1))
            signals = {
                "topk_ids": (first + rng.permuted(np.tile(np.arange(K), (rows, 1)), axis=1)).astype(np.int32),
                "topk_logprobs": np.full((rows, K), -6, np.float16),
            }
        else:
            signals = {"hidden": rng.integers(0, 16_000, (rows, HIDDEN)).astype(np.uint16)}
        writer.add(ids, **signals, **numbers)
    writer.close(complete=True)
    if kind == "hidden":
        save_head(folder, Head(16, weight=torch.zeros(16, HIDDEN, dtype=torch.bfloat16)))


def look_up(mb: ProcessedMicrobatch, kind: str, ids_BT: np.ndarray, repeat: int) -> dict[str, float]:
    """Milliseconds until the signal of a micro-batch lies in memory: the first time, and afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, kind, ids_BT, V_T)
        teacher, cpu = CachedTeacher(folder), torch.device("cpu")
        if kind == "hidden":
            teacher.head(cpu)
        first = milliseconds(lambda: teacher.signal(mb, cpu), 1)
        return {"first": first, "later": milliseconds(lambda: teacher.signal(mb, cpu), repeat)}


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--repeat", type=int, default=9)
    arguments.add_argument("--length", type=int, default=LENGTH)
    args = arguments.parse_args()
    torch.manual_seed(0)
    batch = laid_out(aligned_batch(DOCUMENTS, args.length - 1, V_S, V_T, seed=0))
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "teacher_vocab_size": V_T, "fast_path": "force"},
        projections=[make_projection(V_S, V_T)],
    )
    (mb,) = make_processed_microbatch_iterator([loss_fn.annotate(batch)], None, {}, 1, device="cpu")
    lengths = batch["teacher_input_lengths"].long()
    starts = lengths.cumsum(0) - lengths
    sent = list(_tensors(loss_fn.prepare(mb, [starts])))
    result = {
        "tokens": DOCUMENTS * args.length,
        "layout_ms": milliseconds(lambda: loss_fn.prepare(mb, [starts]), args.repeat),
        "tensors": len({id(t) for t in sent}),
        "megabytes": round(sum(t.numel() * t.element_size() for t in sent) / 1e6, 1),
        "look_up_ms": {
            kind: look_up(mb, kind, batch["teacher_input_ids"].numpy(), args.repeat) for kind in ("topk", "hidden")
        },
    }
    record(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
