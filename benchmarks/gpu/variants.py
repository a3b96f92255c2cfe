"""Forms of the kernels of boundary_kl and tree_kl beside each other: their numbers, tile sizes, and times.

    PYTHONPATH=. python benchmarks/gpu/variants.py [--projection W.safetensors] [--pair .carry/english] [--profile]

1. errors against float64 of every form, in float32 and bfloat16, 512 rows;
2. each kernel by itself on a block, by tile and warps; the best are taken for what follows;
3. a product and a kernel on two streams, against one after the other;
4. head and loss, median of 20, the four products in the same run.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.common import GIB, V_T, RandomProjection, aligned_batch, load_pair, load_projection, measure
from benchmarks.gpu.loss import Problem, profile
from benchmarks.gpu.numerics import Inputs, error
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.fast import objectives, order, walk
from limbeck.losses.fast.kernels import boundary, cells, direct, gradient, stats
from limbeck.losses.fast.kernels.tables import cell_tables, projection_tables
from limbeck.losses.objectives.corrected import TINY

Setting = tuple[Any, str, Any]
"""Of a form: module, name, value."""

FAST: list[Setting] = [(stats, "FAST", True)]
DIRECT: list[Setting] = [*FAST, (objectives, "DIRECT", True)]
HALVES: list[Setting] = [(order, "LOGIT_BYTES", order.LOGIT_BYTES // 2), (order, "MIN_ROWS", order.MIN_ROWS // 2)]
FORMS: dict[str, list[Setting]] = {
    "before": [],
    "fast logarithm": FAST,
    "direct": DIRECT,
    "direct, overlapped": [*DIRECT, *HALVES, (walk, "OVERLAP", 0)],
    "direct, overlapped first": [*DIRECT, *HALVES, (walk, "OVERLAP", -1)],
}


@contextmanager
def set_to(settings: Sequence[Setting]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in settings:
            stack.enter_context(patch.object(module, name, value))
        yield


def numbers(inputs: Inputs, cases: Sequence[str]) -> None:
    """Relative errors of loss and gradients."""
    print(f"{'case':20s} {'form':26s} {'type':9s} {'loss':>9s} {'d hidden':>9s} {'d weight':>9s}", flush=True)
    for case in cases:
        wanted = inputs.run(case, torch.float64, "off")
        for dtype in (torch.float32, torch.bfloat16):
            for form, settings in FORMS.items():
                try:
                    with set_to(settings):
                        found = inputs.run(case, dtype, "force")
                    errors = " ".join(f"{error(f, w):9.2e}" for f, w in zip(found, wanted, strict=True))
                    print(f"{case:20s} {form:26s} {str(dtype)[6:]:9s} {errors}", flush=True)
                except Exception:  # one failing form must not lose the others
                    traceback.print_exc()
        del wanted
        gc.collect()
        torch.cuda.empty_cache()


def sweep(title: str, run: Callable[[], Any], choices: Sequence[tuple[str, list[Setting]]]) -> list[Setting]:
    """Times of one kernel; returns the settings of the fastest."""
    best: tuple[float, list[Setting]] = (float("inf"), [])
    for label, settings in choices:
        try:
            with set_to(settings):
                found = measure(run, repeat=10, warmup=3)
            print(f"  {title:22s} {label:28s} {found.ms:7.3f} ms", flush=True)
            best = min(best, (found.ms, settings), key=lambda pair: pair[0])
        except Exception as failure:
            print(f"  {title:22s} {label:28s} failed: {failure}", flush=True)
    return best[1]


def kernels_alone(problem: Problem, objective: Any, lanes: int = 4096) -> list[Setting]:
    """The kernels of one block by their tiles."""
    hidden, t_hidden = problem.hidden.detach()[:lanes], problem.t_hidden[:lanes]
    student = problem.weight.detach() @ hidden.t()
    memory = problem.t_weight.new_empty(problem.t_weight.shape[0] + 1, lanes)
    teacher = torch.mm(problem.t_weight, t_hidden.t(), out=memory[:-1])
    tree = hasattr(objective, "student_cell")
    tables: Any = cell_tables(objective) if tree else projection_tables(objective.vocab)
    student, teacher = student[: problem.sizes[0]], teacher[: problem.sizes[1]]
    floor = cells.SMALLEST.value if tree else TINY
    found = stats.column_stats(student)
    lse = found.lse

    def settings(module: Any, **values: Any) -> list[Setting]:
        return [(module, name, value) for name, value in values.items()]

    chosen = sweep(
        "pair_sums", lambda: direct.pair_sums(student, teacher, lse, tables, floor),
        [(f"lanes {n}, warps {w}, splits {s}", settings(direct, LANES=n, WARPS=w, SPLITS=s))
         for n, w, s in ((512, 2, 58), (512, 2, 115), (512, 2, 128), (512, 2, 256), (512, 4, 99), (512, 4, 128),
                         (512, 4, 256), (256, 1, 128), (256, 2, 99), (256, 2, 128), (1024, 4, 128), (1024, 4, 231),
                         (1024, 8, 198))],
    )  # fmt: skip
    chosen += sweep(
        "column_stats, student", lambda: stats.column_stats(student),
        [(f"most splits {s}", settings(stats, MAX_SPLITS=s)) for s in (64, 128, 256, 512)],
    )  # fmt: skip
    sums = direct.pair_sums(student, teacher, lse, tables, floor)
    if tree:
        masses = (
            cells.cell_masses(student, lse, tables.student),
            cells.cell_masses(teacher, sums.stats.lse, tables.teacher),
        )
        print(f"  cells: {tables.row.numel()}, of them pairs {tables.pair_teacher.numel()}", flush=True)
        sweep("masses, student", lambda: cells.cell_masses(student, lse, tables.student), [("", [])])
        sweep("masses, teacher", lambda: cells.cell_masses(teacher, sums.stats.lse, tables.teacher), [("", [])])
        both, bases = (student, teacher), (lse, sums.stats.lse)
        sweep(
            "root, other cells",
            lambda: cells.root_sums(cells.FORWARD, both, bases, masses, tables, lanes, memory, pairs=sums),
            [(f"most splits {s}", settings(stats, MAX_SPLITS=s)) for s in (64, 128, 256)],
        )
    else:
        print(f"  columns: {tables.reached.numel()}, of them pairs {tables.pair_teacher.numel()}", flush=True)
        sweep("project", lambda: stats.project_columns(student, lse, tables.multi_source, tables), [("", [])])
        chosen += sweep(
            "boundary, other columns",
            lambda: boundary.boundary_divergence(student, teacher, lse, sums.stats.lse, None, tables, lanes, 1.0, sums),
            [(f"lanes {n}, warps {w}, splits {s}", settings(boundary, OTHER_LANES=n, OTHER_WARPS=w, OTHERS=s))
             for n, w, s in ((512, 2, 128), (512, 2, 256), (512, 2, 512), (512, 4, 256), (256, 1, 256))],
        )  # fmt: skip
    ones = torch.ones_like(lse) / lanes
    label = torch.zeros(lanes, dtype=torch.int32, device=lse.device)
    factors = gradient.Factors(ones, ones, None, ones, label)
    owner = torch.arange(lanes, dtype=torch.int32, device=lse.device)
    residual = memory if tree else teacher
    slope = gradient.Projected(
        residual, tables.index, tables, owner, direct=gradient.Direct(tables.direct, teacher, sums.stats.lse, floor)
    )
    chosen += sweep(
        "gradient, direct",
        lambda: gradient.write_gradient(student, lse, lse, factors, 1.0, slope, aligned=lanes),
        [(f"lanes {n}, warps {w}, steps {s}", settings(gradient, WIDE=n, WIDE_WARPS=w, STEPS=s))
         for n, w, s in ((512, 2, 64), (512, 2, 128), (512, 2, 32), (512, 4, 64), (256, 1, 64), (1024, 4, 64),
                         (1024, 4, 16))],
    )  # fmt: skip
    return chosen


def two_streams(problem: Problem, objective: Any, lanes: int = 2048) -> None:
    """A product beside the pass over pairs of another block."""
    hidden, t_hidden = problem.hidden.detach()[:lanes], problem.t_hidden[:lanes]
    weight = problem.weight.detach()
    student = (weight @ hidden.t())[: problem.sizes[0]]
    teacher = (problem.t_weight @ t_hidden.t())[: problem.sizes[1]]
    tree = hasattr(objective, "student_cell")
    tables: Any = cell_tables(objective) if tree else projection_tables(objective.vocab)
    lse = stats.column_stats(student).lse
    out = torch.empty(weight.shape[0], lanes, dtype=weight.dtype, device=weight.device)

    def product() -> None:
        torch.mm(weight, hidden.t(), out=out)

    def kernel() -> None:
        direct.pair_sums(student, teacher, lse, tables, TINY)

    alone = measure(product, repeat=20).ms, measure(kernel, repeat=20).ms
    print(f"  product {alone[0]:.3f} ms, kernel {alone[1]:.3f} ms, {lanes} rows", flush=True)
    for priority in (0, -1):
        for kernel_first in (False, True):
            beside = torch.cuda.Stream(priority=priority)

            def both(beside: Any = beside, kernel_first: bool = kernel_first) -> None:
                beside.wait_stream(torch.cuda.current_stream())
                if not kernel_first:
                    product()
                with torch.cuda.stream(beside):
                    kernel()
                if kernel_first:
                    product()
                torch.cuda.current_stream().wait_stream(beside)

            found = measure(both, repeat=20).ms
            order_ = "kernel first" if kernel_first else "product first"
            print(f"  beside each other, priority {priority}, {order_}: {found:.3f} ms", flush=True)


def whole(problem: Problem, mode: str, chosen: list[Setting], *, profiled: bool) -> None:
    """Head and loss by form."""
    floor = measure(problem.products, repeat=20)
    torch.cuda.empty_cache()
    print(f"{mode}: four products {floor}", flush=True)
    for form, settings in FORMS.items():
        try:
            with set_to([*settings, *([] if form in ("before", "fast logarithm") else chosen)]):
                run = problem.step(mode, fast_path="force")
                found = measure(run, repeat=20)
                loss = float(run())
                print(f"{mode:12s} {form:26s} {found}, {found.ms / floor.ms:.3f} x, loss {loss:.6f}", flush=True)
                if profiled and form == "direct":
                    profile(run, f"{mode}, {form}", rows=40)
        except Exception:
            traceback.print_exc()
        problem.hidden.grad = problem.weight.grad = None
        gc.collect()
        torch.cuda.empty_cache()
    # the machine's clock may have changed meanwhile
    print(f"{mode}: four products {measure(problem.products, repeat=20)}", flush=True)
    torch.cuda.empty_cache()


def objective_of(problem: Problem, mode: str) -> Any:
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": mode, "teacher_vocab_size": problem.sizes[1]}, projections=[problem.projection]
    ).cuda()
    return loss_fn.teachers[0]


def study(problem: Problem, mode: str, *, profiled: bool) -> None:
    """Tiles, streams and whole times of one mode."""
    start, chosen = time.perf_counter(), []
    try:
        objective = objective_of(problem, mode)
        print(f"-- {mode}: {problem.rows} and {problem.teacher_rows} rows", flush=True)
        with set_to(DIRECT):
            chosen = kernels_alone(problem, objective)
        print("  chosen:", {f"{m.__name__.rsplit('.', 1)[-1]}.{n}": v for m, n, v in chosen}, flush=True)
        two_streams(problem, objective)
        del objective
    except Exception:
        traceback.print_exc()
    gc.collect()
    torch.cuda.empty_cache()
    whole(problem, mode, chosen, profiled=profiled)
    print(f"-- {mode}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--projection", help="stored projection of Llama-3.2 -> Qwen3; default: that of the pair, or random"
    )
    parser.add_argument("--pair", type=Path, help="a folder of prepare.py: tree_kl on its text")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    projection = load_projection(args.projection)
    if args.pair and not args.projection:
        found = load_pair(args.pair).projection
        indices, weights = (np.asarray(values) for values in (found.indices, found.weights))
        projection = RandomProjection(indices, weights, V_T, args.pair.name)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, projection {projection.teacher_fingerprint}")
    numbers(Inputs(aligned_batch(1, 512), projection), ["boundary_kl", "boundary_kl, tau 2"])
    problem = Problem(16_384, projection)
    print(f"inputs take {torch.cuda.memory_allocated() / GIB:.2f} GiB", flush=True)
    study(problem, "boundary_kl", profiled=args.profile)
    del problem
    gc.collect()
    torch.cuda.empty_cache()
    if args.pair:
        numbers(Inputs.of_pair(args.pair), ["tree_kl", "tree_kl, cheap"])
        gc.collect()
        torch.cuda.empty_cache()
        study(Problem.of_pair(args.pair), "tree_kl", profiled=args.profile)


if __name__ == "__main__":
    main()
