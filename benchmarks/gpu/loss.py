"""Head + loss, forward and backward from hidden states, at the sizes of Llama-3.2-1B from Qwen3-4B.

    PYTHONPATH=. python benchmarks/gpu/loss.py [--projection W.safetensors] [--profile] [--products]
    PYTHONPATH=. python benchmarks/gpu/loss.py --pairs .carry/english .carry/japanese [--quick] [--only tree_kl]
    PYTHONPATH=. python benchmarks/gpu/loss.py --fp8-head [--profile]      # an experiment: row boundary_kl_fp8_head

Prints a table and writes rows `p_kl`, `boundary_kl`, `gold`, `h_kl`, `gold_2048` and others into results.json. With
`--pairs`, folders of `prepare.py`: only `tree_kl` on their texts, rows `tree_kl_NAME`, `tree_kl_soft_NAME` (with a
gate).
"""

from __future__ import annotations

import argparse
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    GIB,
    H_S,
    H_T,
    V_S,
    V_T,
    aligned_batch,
    load_pair,
    load_projection,
    make_projection,
    measure,
    microbatch,
    random_heads,
    save_row,
)
from benchmarks.gpu.published import Published
from limbeck.data.layout import padded_row_start
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden
from limbeck.losses.vocab.axis import VocabAxis
from limbeck.models.fp8 import quantize_rows

PAIR_WIDTHS = {"english": (2048, 2560), "japanese": (2048, 2560)}
"""Hidden sizes of student and teacher by folder: Llama-3.2-1B from Qwen3-4B, SmolLM2-1.7B from Gemma-3-4B."""
PAIR_ROWS = {"english": (128_256, 151_936), "japanese": (49_152, 262_208)}
"""Rows of the heads of those models: a head has more than its tokenizer has tokens, a number that products like."""
PAIR_GOALS: dict[str, dict[str, float]] = {
    "english": {"ms": 65.0, "extra_gib": 5.0},
    "japanese": {"times_products": 1.35},
}

GOALS = {"p_kl": (72.0, 5.0), "boundary_kl": (65.0, 5.0), "gold": (110.0, 8.0), "h_kl": (110.0, 8.0)}


class Problem:
    """Random hidden states and heads over an aligned batch of `rows` predicting rows on each side."""

    def __init__(
        self,
        rows: int,
        projection: Any,
        *,
        dtype: torch.dtype = torch.bfloat16,
        batch: dict[str, Any] | None = None,
        sizes: tuple[int, int] = (V_S, V_T),
        head_rows: tuple[int, int] = (V_S, V_T),
        widths: tuple[int, int] = (H_S, H_T),
        device: str = "cuda",
    ) -> None:
        samples = max(rows // 2048, 1)
        self.batch = aligned_batch(samples, rows // samples) if batch is None else batch
        self.projection, self.rows, self.sizes, self.device = projection, rows, sizes, device
        self.teacher_rows = rows if batch is None else int((batch["teacher_input_lengths"] - 1).sum())
        self.hidden, self.weight, self.t_hidden, self.t_weight = random_heads(
            self.batch, device, dtype, sizes=head_rows, widths=widths
        )

    @classmethod
    def of_pair(cls, folder: Path) -> Problem:
        """Random heads over the text of a folder of `prepare.py`."""
        projection, batch = load_pair(folder)
        rows = int((batch["input_lengths"] - 1).sum())
        sizes = projection.student_size, projection.teacher_size
        head_rows, widths = PAIR_ROWS[folder.name], PAIR_WIDTHS[folder.name]
        return cls(rows, projection, batch=batch, sizes=sizes, head_rows=head_rows, widths=widths)

    def step(self, mode: str, **options: Any) -> Callable[[], Tensor]:
        """A function that computes loss and gradients once."""
        loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": mode, "teacher_vocab_size": self.sizes[1], **options}, projections=[self.projection]
        ).to(self.device)
        counts = loss_fn.denominators(self.batch)
        inputs = loss_fn.build_layout(microbatch(self.batch), [padded_row_start(self.batch["teacher_input_ids"])])
        ids = self.batch["teacher_input_ids"].reshape(-1).to(self.device)
        signal = TeacherHidden(self.t_hidden, Head(self.sizes[1], weight=self.t_weight), ids)

        def run() -> Tensor:
            self.hidden.grad = self.weight.grad = None
            loss, _ = loss_fn.compute_loss(
                self.hidden, Head(self.sizes[0], weight=self.weight), [signal], inputs, counts
            )
            loss.backward()
            return loss.detach()

        return run

    def published(self, mode: str) -> Callable[[], Tensor]:
        """The same with the published arithmetic on whole logits."""
        plain = Published(self.batch, self.projection, "cuda")
        args = (self.hidden, self.weight, self.t_hidden, self.t_weight)
        if mode == "p_kl":
            return self._backward(lambda: plain.p_kl(*args))
        loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": mode, "teacher_vocab_size": V_T}, projections=[self.projection]
        )
        pairs = loss_fn.cuda().teachers[0].pairs()  # type: ignore[operator,union-attr]
        return self._backward(lambda: plain.gold(*args, pairs["common"], pairs["uncommon"]))

    def _backward(self, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self.hidden.grad = self.weight.grad = None
            value = loss()
            value.backward()
            return value.detach()

        return run

    @torch.no_grad()
    def products(self) -> None:
        """The four matrix products, and nothing else: both logits, and the student's two gradients."""
        hidden, teacher = self.hidden[: self.rows], self.t_hidden[: self.teacher_rows]
        del_logits = hidden @ self.weight.t()
        del_logits @ self.weight
        del_logits.t() @ hidden
        del del_logits
        teacher @ self.t_weight.t()


def product_times(problem: Problem, columns: int = 4096) -> None:
    """Each product of a block in several forms, for the choice of layout."""
    h, w, n = problem.hidden.detach()[:columns], problem.weight.detach(), columns
    buffer = torch.empty(V_S, n, device="cuda", dtype=w.dtype)
    rowwise = torch.randn(n, V_S, device="cuda", dtype=torch.float32).to(w.dtype)
    torch.mm(w, h.t(), out=buffer)
    total = torch.zeros(V_S, h.shape[1], device="cuda", dtype=torch.float32)
    t_h, t_w = problem.t_hidden[:columns], problem.t_weight
    cases: dict[str, Callable[[], Any]] = {
        "logits [V, n]": lambda: torch.mm(w, h.t(), out=buffer),
        "logits [n, V]": lambda: h @ w.t(),
        "teacher logits [V, n]": lambda: t_w @ t_h.t(),
        "teacher logits [n, V]": lambda: t_h @ t_w.t(),
        "to hidden, from [V, n]": lambda: buffer.t() @ w,
        "to hidden, from [n, V]": lambda: rowwise @ w,
        "to weight, from [V, n], bf16": lambda: buffer @ h,
        "to weight, from [n, V], bf16": lambda: rowwise.t() @ h,
        "to weight, from [V, n], fp32": lambda: torch.mm(buffer, h, out_dtype=torch.float32, out=total),
        "to weight, from [V, n], fp32 added": lambda: torch.addmm(total, buffer, h, out_dtype=torch.float32, out=total),
    }
    flops = 2 * n * w.numel()
    for name, run in cases.items():
        try:
            found = measure(run, repeat=5, warmup=2)
            size = 2 * n * t_w.numel() if name.startswith("teacher") else flops
            print(f"  {name:36s} {found}  {size / found.ms / 1e9:6.0f} TFLOP/s", flush=True)
        except RuntimeError as error:
            print(f"  {name:36s} failed: {error}", flush=True)
    total.zero_()
    for _ in range(2):
        torch.addmm(total, buffer, h, out_dtype=torch.float32, out=total)
    wanted = 2 * (buffer[:512].double() @ h.double())
    print("  added twice, relative error:", float((total[:512] - wanted).norm() / wanted.norm()), flush=True)


def profile(run: Callable[[], Any], title: str, rows: int = 22) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    events.sort(key=lambda e: -e.self_device_time_total)
    print(f"-- {title}: {sum(e.self_device_time_total for e in events) / 1e3:.2f} ms on the device", flush=True)
    for e in events[:rows]:
        print(f"   {e.self_device_time_total / 1e3:8.3f} ms {e.count:5d} x  {e.key[:90]}", flush=True)


def synchronisations(run: Callable[[], Any]) -> int:
    """How often one call makes the host wait for the device, as torch reports it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in found)


def row_of(
    problem: Problem, mode: str, floor: float, *, published: bool, plain: bool, profiled: bool, **options: Any
) -> dict[str, Any]:
    """Measure one mode; the published arithmetic and our plain path only where asked for."""
    run = problem.step(mode, fast_path="auto", **options)
    found = measure(run, repeat=20)
    row: dict[str, Any] = {
        "ms": round(found.ms, 2), "low_ms": round(found.low, 2), "high_ms": round(found.high, 2),
        "extra_gib": round(found.extra, 2), "floor": round(floor, 2), "loss": float(run()),
        "synchronisations": synchronisations(run),
    }  # fmt: skip
    print(f"{mode:12s} {problem.rows:6d} rows {found}, floor {floor:.2f}, {row['synchronisations']} waits", flush=True)
    if profiled:
        profile(run, mode)
    others: dict[str, Callable[[], Tensor]] = {}
    if plain:
        others["plain_path"] = problem.step(mode, fast_path="off", **options)
    if published:
        others["reference"] = problem.published(mode)
    for name, other in others.items():
        try:
            found = measure(other, repeat=3, warmup=1)
            row[name] = {"ms": round(found.ms, 1), "extra_gib": round(found.extra, 2), "loss": float(other())}
            print(f"  {name:12s} {found}, loss {row[name]['loss']:.6f} / {row['loss']:.6f}", flush=True)
        except torch.OutOfMemoryError:
            print(f"  {name:12s} does not fit", flush=True)
        problem.hidden.grad = problem.weight.grad = None
        torch.cuda.empty_cache()
    return row


def measure_pair(folder: Path, *, only: Sequence[str] | None, plain: bool, profiled: bool) -> None:
    """Rows of tree_kl, as it is and gated, on the text of a folder of `prepare.py`."""
    problem = Problem.of_pair(folder)
    floor = measure(problem.products, repeat=10).ms
    torch.cuda.empty_cache()
    print(f"{folder.name}: {problem.rows} and {problem.teacher_rows} rows, four products {floor:.2f} ms", flush=True)
    cases = {"tree_kl": {}, "tree_kl_soft": {"gate": "soft"}}
    for name, options in cases.items():
        if only is not None and name not in only:
            continue
        try:
            row = row_of(problem, "tree_kl", floor, published=False, plain=plain, profiled=profiled, **options)
            row |= {"goal": PAIR_GOALS[folder.name], "times_products": round(row["ms"] / floor, 3)}
            row |= {"rows": problem.rows, "teacher_rows": problem.teacher_rows, "sizes": problem.sizes}
            save_row(f"{name}_{folder.name}", row)
        except Exception:  # one failing row must not lose the others
            traceback.print_exc()


@contextmanager
def fp8_teacher_head(problem: Problem) -> Iterator[None]:
    """With the teacher's logits from a product in fp8, one scale for each row of its head and each of its tokens."""
    from limbeck.losses.fast.fused_loss import FusedLoss

    stored, scale = quantize_rows(problem.t_weight)
    plain = FusedLoss._product

    def product(self: Any, name: str, weight: Tensor, inputs: Sequence[Tensor], axis: VocabAxis) -> Tensor:
        if name != "teacher":
            return plain(self, name, weight, inputs, axis)
        values, own = quantize_rows(inputs[0])
        rows = weight.shape[0]
        out = self._memory(name, weight, rows, len(inputs[0]))
        left, right = (stored[:rows], scale[:rows]), (values.t(), own.t())
        torch._scaled_mm(
            left[0], right[0], scale_a=left[1], scale_b=right[1], out_dtype=out.dtype, use_fast_accum=True, out=out
        )
        return out

    FusedLoss._product = product  # type: ignore[method-assign]
    try:
        yield
    finally:
        FusedLoss._product = plain  # type: ignore[method-assign]


def measure_fp8_head(problem: Problem, *, profiled: bool) -> None:
    """Time of boundary_kl with the teacher's head in fp8, and how far loss and gradients move."""
    run = problem.step("boundary_kl")

    def results() -> tuple[float, Tensor, Tensor]:
        loss = float(run())
        assert problem.hidden.grad is not None
        assert problem.weight.grad is not None
        return loss, problem.hidden.grad.clone(), problem.weight.grad.clone()

    row: dict[str, Any] = {"bfloat16_ms": round(measure(run, repeat=20).ms, 2)}
    wanted = results()
    with fp8_teacher_head(problem):
        found = measure(run, repeat=20)
        moved = results()
        if profiled:
            profile(run, "boundary_kl, teacher's head in fp8")
    row |= {"ms": round(found.ms, 2), "extra_gib": round(found.extra, 2), "loss": moved[0], "bfloat16_loss": wanted[0]}
    for name, a, b in zip(("hidden_grad", "weight_grad"), moved[1:], wanted[1:], strict=True):
        row[f"{name}_moved"] = float((a.float() - b.float()).norm() / b.float().norm())
    print(f"boundary_kl_fp8_head: {row}", flush=True)
    save_row("boundary_kl_fp8_head", row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--projection", help="stored projection of Llama-3.2 -> Qwen3; default: a random one")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--quick", action="store_true", help="no comparisons")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--fp8-head", action="store_true", help="the teacher's head in fp8; nothing else then")
    parser.add_argument("--pairs", nargs="+", type=Path, default=(), help="folders of prepare.py; nothing else then")
    args = parser.parse_args()
    for folder in args.pairs:
        measure_pair(folder, only=args.only, plain=not args.quick, profiled=args.profile)
        torch.cuda.empty_cache()
    if args.pairs:
        return
    projection = load_projection(args.projection)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, projection {projection.teacher_fingerprint}")
    problem = Problem(16_384, projection)
    print(f"inputs take {torch.cuda.memory_allocated() / GIB:.2f} GiB")
    if args.fp8_head:
        measure_fp8_head(problem, profiled=args.profile)
        return
    products = measure(problem.products, repeat=20)
    floor = products.ms
    print(f"four matrix products, 16384 rows: {products}", flush=True)
    if args.products:
        for columns in (2048, 4096):
            print(f"products of a block of {columns}:")
            product_times(problem, columns)
    torch.cuda.empty_cache()
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("p_kl", "p_kl", {}), ("boundary_kl", "boundary_kl", {}), ("gold", "gold", {}), ("h_kl", "h_kl", {}),
    ]  # fmt: skip
    for name, mode, options in cases:
        if args.only is not None and name not in args.only:
            continue
        try:
            compare = not args.quick
            row = row_of(
                problem, mode, floor, published=compare and mode in ("p_kl", "gold"), plain=compare,
                profiled=args.profile, **options,
            )  # fmt: skip
            row["goal"] = {"ms": GOALS[name][0], "extra_gib": GOALS[name][1]}
            if "plain_path" in row:  # modes that nobody has published are held against our own plain torch
                row.setdefault("reference", row["plain_path"])
            row["projection"] = projection.teacher_fingerprint
            save_row(name, row)
        except Exception:  # one failing row must not lose the others
            traceback.print_exc()
    if args.only is None or "random" in args.only:
        problem.projection = make_projection()
        try:
            row = row_of(problem, "boundary_kl", floor, published=False, plain=False, profiled=False)
            save_row("boundary_kl_random_projection", row)
        except Exception:
            traceback.print_exc()
        problem.projection = projection
    if args.only is None or "gold_2048" in args.only:
        del problem
        torch.cuda.empty_cache()
        small = Problem(2048, projection)
        floor = measure(small.products, repeat=20).ms
        try:
            row = row_of(small, "gold", floor, published=not args.quick, plain=False, profiled=args.profile)
            row["goal"] = {"ms": 12.0}
            save_row("gold_2048", row)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
