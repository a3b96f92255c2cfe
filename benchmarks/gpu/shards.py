"""Head + loss where the vocabulary is divided among ranks, which take turns on one GPU (`benchmarks/in_turn.py`).

    PYTHONPATH=. python benchmarks/gpu/shards.py [--shards 2 4] [--pair .carry/english]
    PYTHONPATH=. TRITON_INTERPRET=1 python benchmarks/gpu/shards.py --tiny      # on the CPU, in Triton's interpreter

For each loss: the kernels on one rank with the whole vocabulary, the time of one rank's share by kernels and by plain
torch (all ranks' time divided by their number: what travels is copied, but not sent), the bytes that a rank would send
per micro-batch, and how far loss and gradients are from those of one rank, in float32 on fewer rows, too. `--pair`: a
folder of `prepare.py`, for tree_kl. Rows `shards_LOSS` of results.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    H_S,
    H_T,
    V_S,
    V_T,
    Measured,
    aligned_batch,
    load_pair,
    load_projection,
    make_projection,
    measure,
    microbatch,
    random_heads,
    save_row,
)
from benchmarks.in_turn import InTurn
from limbeck.data.layout import padded_row_start
from limbeck.distributed.comm import Comm
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden
from limbeck.losses.vocab.axis import WHOLE, ShardedAxis

WIRE = 450e9
"""Bytes per second that a rank sends to others over NVLink 4."""


class Result(NamedTuple):
    """Loss, gradient of the hidden states, and of the head's rows that are here."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor


class Shares:
    """One loss on random heads over an aligned batch, for any number of ranks."""

    def __init__(
        self,
        rows: int,
        projection: Any,
        dtype: torch.dtype,
        device: str,
        *,
        batch: dict[str, Any] | None = None,
        sizes: tuple[int, int] = (V_S, V_T),
        widths: tuple[int, int] = (H_S, H_T),
    ) -> None:
        samples = max(rows // 2048, 1)
        self.batch = aligned_batch(samples, rows // samples, *sizes) if batch is None else batch
        self.projection, self.sizes, self.device = projection, sizes, device
        self.losses: dict[tuple[str, str, int], CrossTokenizerDistillationLossFn] = {}
        self.heads = random_heads(self.batch, device, dtype, sizes=sizes, widths=widths)

    def _loss(self, mode: str, fast_path: str, rank: int, options: dict[str, Any]) -> CrossTokenizerDistillationLossFn:
        if (mode, fast_path, rank) not in self.losses:
            self.losses[mode, fast_path, rank] = CrossTokenizerDistillationLossFn(
                {"mode": mode, "teacher_vocab_size": self.sizes[1], "fast_path": fast_path, **options},
                projections=[self.projection],
            ).to(self.device)
        return self.losses[mode, fast_path, rank]

    def step(self, ranks: int, mode: str, fast_path: str, **options: Any) -> Callable[[Comm], Result]:
        """What each of some ranks computes once."""
        hidden, weight, teacher_hidden, teacher_weight = (t.detach() for t in self.heads)
        teacher_ids = self.batch["teacher_input_ids"]
        ids = teacher_ids.reshape(-1).to(self.device)
        signal = TeacherHidden(teacher_hidden, Head(self.sizes[1], weight=teacher_weight), ids)
        # plain losses keep what they have of a rank's columns; the kernels have all of them
        losses = [self._loss(mode, fast_path, 0 if fast_path != "off" else rank, options) for rank in range(ranks)]
        losses[0].vocab_shards = ranks
        inputs = losses[0].build_layout(microbatch(self.batch), [padded_row_start(teacher_ids)])
        counts = losses[0].denominators(self.batch)
        parts = weight.chunk(ranks)

        def work(comm: Comm) -> Result:
            loss_fn = losses[comm.rank]
            own = parts[comm.rank].detach().requires_grad_()
            axis = ShardedAxis.of_rows(comm, len(weight), self.sizes[0]) if comm.size > 1 else WHOLE
            head = Head(self.sizes[0], weight=own, axis=axis)
            rows = hidden.detach().requires_grad_()
            loss, _ = loss_fn.compute_loss(rows, head, [signal], inputs, counts)
            loss.backward()
            assert rows.grad is not None
            assert own.grad is not None
            return Result(loss.detach(), rows.grad, own.grad)

        return work


def timed(run: Callable[[], Any], repeat: int) -> Measured:
    """`measure`, or a clock where there is no GPU."""
    if torch.cuda.is_available():
        return measure(run, repeat=repeat, warmup=1)
    begun = time.perf_counter()
    run()
    spent = (time.perf_counter() - begun) * 1e3
    return Measured(spent, spent, spent, 0.0)


def difference(ranks: list[Result], whole: Result) -> dict[str, float]:
    """Relative, gradients by norm; the largest of all ranks."""

    def far(found: Tensor, wanted: Tensor) -> float:
        return float((found.double() - wanted.double()).norm() / wanted.double().norm())

    return {
        "loss": max(far(rank.loss, whole.loss) for rank in ranks),
        "hidden": max(far(rank.hidden, whole.hidden) for rank in ranks),
        "weight": far(torch.cat([rank.weight for rank in ranks]), whole.weight),
    }


def row_of(
    shares: Shares, exact: Shares, mode: str, counts: list[int], *, fast: str, plain: bool, **options: Any
) -> dict[str, Any]:
    """Measure one loss; exact: the same on fewer rows in float32."""
    alone = shares.step(1, mode, fast, **options)
    found = timed(lambda: alone(Comm.alone()), 10)
    print(f"{mode}: one rank {found}", flush=True)
    row: dict[str, Any] = {"one_rank_ms": round(found.ms, 2), "one_rank_gib": round(found.extra, 2)}
    exact.losses = shares.losses
    whole, wide = alone(Comm.alone()), exact.step(1, mode, fast, **options)(Comm.alone())
    for count in counts:
        ranks, work = InTurn(count), shares.step(count, mode, fast, **options)
        apart = difference(ranks.run(work), whole)
        sent = sum(ranks.sent.values()) / count
        found = timed(lambda ranks=ranks, work=work: ranks.run(work), 5)  # type: ignore[misc]
        own: dict[str, Any] = {
            "ms": round(found.ms / count, 2),
            "sent_mb": round(sent / 1e6, 2),
            "sent_ms_at_450_gb_s": round(sent / WIRE * 1e3, 2),
            "difference": apart,
            "difference_float32": difference(InTurn(count).run(exact.step(count, mode, fast, **options)), wide),
        }
        if plain:
            slow = shares.step(count, mode, "off", **options)
            own["plain_ms"] = round(timed(lambda ranks=ranks, slow=slow: ranks.run(slow), 2).ms / count, 2)  # type: ignore[misc]
        print(f"  {count} ranks: {own}", flush=True)
        row[str(count)] = own
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--projection", help="stored projection of Llama-3.2 -> Qwen3; default: a random one")
    parser.add_argument("--pair", type=Path, help="a folder of prepare.py, for tree_kl")
    parser.add_argument("--tiny", action="store_true", help="a small problem in Triton's interpreter; stores nothing")
    args = parser.parse_args()
    if args.tiny:
        sizes, widths = (203, 151), (16, 24)
        projection = make_projection(*sizes)
        small = Shares(200, projection, torch.float32, "cpu", sizes=sizes, widths=widths)
        for mode in ("boundary_kl", "p_kl"):
            row_of(small, small, mode, args.shards, fast="force", plain=True, vocab_topk=32)
        return
    projection = load_projection(args.projection)
    shares = Shares(16_384, projection, torch.bfloat16, "cuda")
    exact = Shares(1024, projection, torch.float32, "cuda")
    for mode in ("boundary_kl", "p_kl"):
        save_row(f"shards_{mode}", row_of(shares, exact, mode, args.shards, fast="auto", plain=True))
        torch.cuda.empty_cache()
    if args.pair:
        stored, batch = load_pair(args.pair)
        both = {"sizes": (stored.student_size, stored.teacher_size)}
        few = {name: value[:1] for name, value in batch.items()}
        shares = Shares(0, stored, torch.bfloat16, "cuda", batch=batch, **both)
        exact = Shares(0, stored, torch.float32, "cuda", batch=few, **both)
        save_row("shards_tree_kl", row_of(shares, exact, "tree_kl", args.shards, fast="auto", plain=False))


if __name__ == "__main__":
    main()
