"""The longest context of Llama-3.2-1B's shape from Qwen3-4B's on one GPU, and how time and memory grow.

    PYTHONPATH=. python benchmarks/gpu/context.py                     # writes context.json and the picture
    PYTHONPATH=. python benchmarks/gpu/context.py --only lengths --lengths 131072 262144 --ways recomputed --limit 200
    PYTHONPATH=. python benchmarks/gpu/context.py --only teachers longest --budget 110
    PYTHONPATH=. python benchmarks/gpu/context.py --only longest --ways recomputed \
        --recomputed-from 262144 393216 491520 --whole 131072
    PYTHONPATH=. python benchmarks/gpu/context.py --plot              # only draws the picture
    PYTHONPATH=. python benchmarks/gpu/context.py --tiny              # everything small, also without a GPU

Whole steps as in `step.py` (float32 parameters under bfloat16 autocast, AdamW, boundary_kl with cross-entropy, live
teacher, compiled layers):

- lengths: one document per step, twice as long each time, until memory or `--limit` (seconds of a step) ends it, then
  half-way between what fits and what does not; with activations kept, and computed again in the backward pass
  (`dtensor_cfg.activation_checkpointing`).
- longest: the longest document that fits, both ways, within `--budget` seconds. Two lengths give the line that memory
  follows; where it meets the device's memory is tried, then between what fits and what does not. With activations kept
  these are whole steps. With recomputation what fits takes minutes a step, all of them attention's, whose memory does
  not depend on what a token sees: there attention stays within pieces of 1,024 tokens (`seeing: 1024`), and the longest
  step with whole attention that the budget allows comes last, or those of `--whole`.
- rows: documents of 2,048 tokens per step, in micro-batches of eight.
- teachers: one to three of Qwen3-4B's shape, eight documents.
- vocabulary: head and loss alone, 8,192 rows; the bodies do not depend on it.

Memory is the peak of the whole step, weights and optimizer included. Each part is stored as soon as it is measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor

from benchmarks.common import origin
from benchmarks.gpu.common import GIB, aligned_batch, make_projection
from benchmarks.gpu.loss import Problem
from benchmarks.gpu.step import DOCUMENTS, Setup, compiled_graphs, laid_out
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.attention import varlen_attention
from limbeck.models.causal import unwrap
from limbeck.teachers.live import LiveTeacher

OUT = Path(__file__).with_name("context.json")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "context.png"
LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288)
WAYS = ("kept", "recomputed")
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)
ROWS = (2, 4, 8, 16, 32)
TEACHERS = (1, 2, 3)
WINDOW = 1_024
"""Tokens that see each other where only memory counts."""
WINDOWED = "limbeck_windowed"
QUICK = 4.0
"""Seconds: a step that takes less is taken again, so that nothing that happens once is in its time."""

Point = dict[str, Any]


def measured(run: Callable[[], Any]) -> Point:
    """Milliseconds and peak GiB of a call, and graphs that were compiled in it; only that it ran out of memory where
    it did."""
    try:
        seconds, graphs = 0.0, 0
        for again in range(3):
            if again and not graphs and (again > 1 or seconds > QUICK):
                break
            _settle()
            before, start = compiled_graphs(), time.perf_counter()
            run()
            _settle()
            seconds, graphs = time.perf_counter() - start, compiled_graphs() - before
        peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    return {"ms": round(seconds * 1e3, 1), "peak_gib": round(peak, 2)} | ({"compiled": graphs} if graphs else {})


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget(setup: Setup | None = None) -> None:
    """Give back what the last point left, also where it failed."""
    if setup is not None:
        setup.student.model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def step(setup: Setup, batch: BatchedDataDict, teachers: Sequence[LiveTeacher], loss_fn: Any) -> Point:
    """A training step on a batch."""
    forget(setup)
    return measured(lambda: setup.student.train(batch, loss_fn, teachers=list(teachers)))


def documents(setup: Setup, count: int, length: int) -> BatchedDataDict:
    return laid_out(aligned_batch(count, length - 1, *setup.sizes, seed=0))


def warm_up(setup: Setup) -> None:
    """Compile what later points run."""
    for count in (1, 2):
        step(setup, documents(setup, count, setup.length), [LiveTeacher(setup.teacher)], setup.loss_fn)


# -- length ------------------------------------------------------------------------------------------------------------


def recompute(setup: Setup, on: bool) -> None:
    model = unwrap(setup.student.model)
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def at_length(setup: Setup, length: int) -> Point:
    source = LiveTeacher(setup.teacher)
    point = {"length": length} | step(setup, documents(setup, 1, length), [source], setup.loss_fn)
    if "ms" in point:
        point["tokens_per_s"] = round(length / point["ms"] * 1e3)
    print(point, flush=True)
    return point


def climb(setup: Setup, lengths: Sequence[int], limit: float) -> list[Point]:
    """Points at growing lengths, up to the first that does not fit and one half-way back, or that would take longer
    than `limit` seconds."""
    points: list[Point] = []
    for length in lengths:
        if points and 4 * points[-1]["ms"] > limit * 1e3:
            break
        points.append(at_length(setup, length))
        if "out_of_memory" in points[-1]:
            fits = [p["length"] for p in points if "ms" in p]
            if fits:
                points.append(at_length(setup, (fits[-1] + length) // 2))
            break
    return sorted(points, key=lambda p: int(p["length"]))


def timed_points(points: list[Point]) -> list[Point]:
    """Points that ran, and in whose time nothing was compiled."""
    return [p for p in points if "ms" in p and "compiled" not in p]


def longest(points: list[Point]) -> dict[str, Any]:
    """What ran, what did not, and where the line through the last two peaks meets the device's memory."""
    ran = timed_points(points)
    out: dict[str, Any] = {
        "ran": max((int(p["length"]) for p in points if "ms" in p), default=None),
        "did_not_fit": min((p["length"] for p in points if "out_of_memory" in p), default=None),
    }
    if len(ran) > 1 and torch.cuda.is_available():
        a, b = ran[-2:]
        slope = (b["peak_gib"] - a["peak_gib"]) / (b["length"] - a["length"])
        out["by_memory"] = round(b["length"] + (memory_of_device() - b["peak_gib"]) / slope)
        out["kib_per_token"] = round(slope * GIB / 1024, 1)
    return out


def seeing(window: int | None, setup: Setup) -> None:
    """Have both models' tokens see those of their own `window` tokens alone, or all before them."""
    from transformers import AttentionInterface

    if window is not None:
        AttentionInterface.register(WINDOWED, functools.partial(_windowed, window))
    for policy in (setup.student, setup.teacher):
        model = unwrap(policy.model)
        own = _OWN.setdefault(id(model), model.config._attn_implementation)
        model.set_attn_implementation(own if window is None else WINDOWED)


_OWN: dict[int, str] = {}


def _windowed(window: int, module: Any, *states: Tensor | None, scaling: float | None = None, **_: Any) -> Any:
    """Attention within pieces of `window` tokens: the same kernel and arrays as for one document, seen as many."""
    rows = [x.unflatten(2, (-1, window)).transpose(1, 2).flatten(0, 1) for x in states[:3] if x is not None]
    out, _none = varlen_attention(module, rows[0], rows[1], rows[2], None, scaling=scaling)
    assert states[0] is not None
    return out.reshape(states[0].shape[0], -1, *out.shape[2:]), None


def memory_of_device() -> float:
    """GiB that a step may take: a few per cent cannot be had, the context of the device, and gaps."""
    whole = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 1.0
    return 0.97 * whole


def next_length(points: Sequence[Point], room: float, step: int = 1_024) -> int | None:
    """The next length to try: where the line through the longest two that fit meets the memory `room`, and half-way
    to the shortest that did not fit if that is less. None: what fits is known within 2%."""
    ran = sorted((p for p in points if "peak_gib" in p), key=lambda p: int(p["length"]))
    failed = min((int(p["length"]) for p in points if "out_of_memory" in p), default=None)
    if len(ran) < 2:
        return None
    a, b = ran[-2:]
    slope = (b["peak_gib"] - a["peak_gib"]) / (b["length"] - a["length"])
    best = int(b["length"])
    wanted = best + (room - b["peak_gib"]) / slope if slope > 0 else 2 * best
    if failed is not None:
        wanted = min(wanted, (best + failed) / 2)
    length = int(wanted) // step * step
    return length if length > 1.02 * best else None


def seconds_at(points: Sequence[Point], length: int) -> float:
    """What a step would take: a part that grows with the length and one with its square, by the last two that ran."""
    ran = sorted((p for p in points if "ms" in p), key=lambda p: int(p["length"]))
    if len(ran) < 2:
        return 0.0
    (m, u), (n, v) = ((int(p["length"]), p["ms"] / 1e3) for p in ran[-2:])
    square = max((v / n - u / m) / (n - m), 0.0)
    return max(v / n - square * n, 0.0) * length + square * length**2


def search(setup: Setup, first: Sequence[int], until: float, room: float, step: int, tries: int = 4) -> list[Point]:
    """Points up to the longest that fits, as far as the clock allows (`by_time` on what was left out)."""
    points: list[Point] = []
    for length in first:
        points.append(at_length(setup, length))
        if "out_of_memory" in points[-1]:
            break
    for _ in range(tries):
        wanted = next_length(points, room, step)
        if wanted is None:
            break
        takes = seconds_at(points, wanted)
        if time.perf_counter() + takes > until:
            points.append({"length": wanted, "by_time": round(takes, 1)})
            print(points[-1], flush=True)
            break
        points.append(at_length(setup, wanted))
    return sorted(points, key=lambda p: int(p["length"]))


def longest_both_ways(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    begun, room = time.perf_counter(), memory_of_device()
    small, window = args.tiny, 8 if args.tiny else WINDOW
    found: dict[str, Any] = {"lengths": {}, "memory": {}}

    def save() -> None:
        if not args.tiny:
            store(found, args.out)

    if "kept" in args.ways:
        recompute(setup, False)
        warm_up(setup)
        found["lengths"]["kept"] = search(
            setup,
            (16, 32) if small else args.kept_from,
            begun + 0.4 * args.budget,
            room,
            window,
            1 if small else 4,
        )
        save()
    if "recomputed" in args.ways:
        recompute(setup, True)
        seeing(window, setup)
        warm_up(setup)
        first = (16, 32) if small else args.recomputed_from
        points = search(setup, first, begun + 0.85 * args.budget, room, window, 1 if small else 3)
        found["memory"]["recomputed"] = [p | {"seeing": window} for p in points]
        save()
        seeing(None, setup)
        warm_up(setup)
        found["lengths"]["recomputed"] = whole_steps(setup, args, begun + args.budget)
        recompute(setup, False)
    return found


def whole_steps(setup: Setup, args: argparse.Namespace, until: float) -> list[Point]:
    """Those of `--whole`; else two, and by them the longest that the clock still allows."""
    if args.whole:
        return [at_length(setup, n) for n in args.whole]
    points = [at_length(setup, n) for n in ((16, 32) if args.tiny else (32_768, 65_536))]
    left = until - time.perf_counter()
    allowed = [n for n in (98_304, 131_072, 196_608, 262_144) if seconds_at(points, n) < left]
    if allowed and not args.tiny:
        points.append(at_length(setup, allowed[-1]))
    return points


def lengths(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"lengths": {}, "longest": {}}
    given = args.lengths or ((16, 32, 64) if args.tiny else LENGTHS)
    for way in args.ways:
        print(f"activations {way}:", flush=True)
        recompute(setup, way == "recomputed")
        warm_up(setup)
        points = climb(setup, given, args.limit)
        found["lengths"][way], found["longest"][way] = points, longest(points)
    recompute(setup, False)
    return found


# -- rows, teachers, vocabulary ----------------------------------------------------------------------------------------


def rows(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    found = []
    for count in ROWS:
        batch = documents(setup, count, setup.length)
        found.append({"rows": count} | step(setup, batch, [LiveTeacher(setup.teacher)], setup.loss_fn))
        print(found[-1], flush=True)
    return {"rows": found}


def teachers(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    found, models = [], [setup.teacher]
    for count in TEACHERS:
        while len(models) < count:
            models.append(setup.policy("teacher", trained=False))
        batch = aligned_batch(DOCUMENTS, setup.length - 1, *setup.sizes, seed=0)
        first = {k: v for k, v in batch.items() if k.startswith(("teacher_", "alignment_"))}
        for i in range(1, count):
            batch |= {k.replace("_", f"_{i}_", 1): v for k, v in first.items()}
        projection = make_projection(*setup.sizes)
        loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": "boundary_kl", "teacher_vocab_size": setup.sizes[1]}, projections=[projection] * count
        ).to(setup.device)
        sources = [LiveTeacher(model, number=i) for i, model in enumerate(models)]
        found.append({"teachers": count} | step(setup, laid_out(batch, count), sources, loss_fn))
        print(found[-1], flush=True)
    return {"teachers": found}


def vocabulary(args: argparse.Namespace) -> dict[str, Any]:
    """Head and loss of both vocabularies at one size each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count, sizes = (64, (300, 600)) if args.tiny else (8_192, VOCABULARIES)
    widths = (32, 48) if args.tiny else (2048, 2560)
    found = []
    for size in sizes:
        forget()
        samples = max(count // 2048, 1)
        problem = Problem(
            count,
            make_projection(size, size),
            dtype=torch.float32 if args.tiny else torch.bfloat16,
            batch=aligned_batch(samples, count // samples, size, size),
            sizes=(size, size),
            head_rows=(size, size),
            widths=widths,
            device=device,
        )
        before = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        run = problem.step("boundary_kl")
        run()
        point = measured(run)
        if "peak_gib" in point:
            point["extra_gib"] = round(point.pop("peak_gib") - before, 2)
        found.append({"vocabulary": size} | point)
        print(found[-1], flush=True)
        del problem, run
    return {"vocabulary": found}


# -- results -----------------------------------------------------------------------------------------------------------


def store(found: dict[str, Any], path: Path) -> None:
    """Add parts to the results file; points of a length that were measured before are replaced."""
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part, value in found.items():
        if part in ("lengths", "longest", "memory"):
            own = kept.setdefault(part, {})
            for way, points in value.items():
                if part != "longest":
                    new = {p["length"] for p in points}
                    points = [*(p for p in own.get(way, []) if p["length"] not in new), *points]
                    points.sort(key=lambda p: int(p["length"]))
                own[way] = points
        else:
            kept[part] = value
    if "lengths" in found:
        kept["longest"] = {way: longest(points) for way, points in kept["lengths"].items()}
        for way, points in kept.get("memory", {}).items():
            kept["longest"].setdefault(way, {})["fits_by_memory"] = longest(points)
    path.write_text(json.dumps({**kept, **origin()}, indent=1) + "\n", encoding="utf-8")


def draw(path: Path = OUT, picture: Path = PICTURE) -> None:
    """The picture of the stored points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = json.loads(path.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplot_mosaic(
        [["memory"] * 3 + ["time"] * 3, ["rows"] * 2 + ["vocabulary"] * 2 + ["teachers"] * 2], figsize=(10, 6.4)
    )
    for way, points in found["lengths"].items():
        ran = timed_points(points)
        if not ran:
            continue
        tokens = [p["length"] / 1024 for p in ran]
        axes["memory"].plot(tokens, [p["peak_gib"] for p in ran], marker="o", label=way)
        axes["time"].plot(tokens, [p["ms"] * 1e3 / p["length"] for p in ran], marker="o", label=way)
    for way, points in found.get("memory", {}).items():
        ran = [p for p in points if "peak_gib" in p]
        tokens = [p["length"] / 1024 for p in ran]
        axes["memory"].plot(tokens, [p["peak_gib"] for p in ran], marker="x", linestyle=":", label=f"{way}, no time")
    axes["memory"].set(xlabel="document, thousands of tokens", ylabel="peak memory, GiB", ylim=(0, None))
    axes["time"].set(xlabel="document, thousands of tokens", ylabel="microseconds per token", ylim=(0, None))
    for name in ("memory", "time"):
        axes[name].legend(title="activations")
    labels = {
        "rows": "documents of 2,048 tokens per step",
        "vocabulary": "tokens of both vocabularies, thousands\n(head and loss alone, 8,192 rows)",
        "teachers": "teachers of Qwen3-4B's shape",
    }
    for key, label in labels.items():
        ran = [p for p in found.get(key, []) if "ms" in p]
        places = [p[key] / (1000 if key == "vocabulary" else 1) for p in ran]
        memory = "extra_gib" if key == "vocabulary" else "peak_gib"
        axis, other = axes[key], axes[key].twinx()
        axis.plot(places, [p["ms"] for p in ran], marker="o", color="tab:green", label="time")
        other.plot(places, [p[memory] for p in ran], marker="s", linestyle="--", color="tab:red", label="memory")
        axis.set(xlabel=label, ylabel="ms", ylim=(0, None))
        other.set(ylabel="GiB", ylim=(0, None))
        lines = [*axis.get_lines(), *other.get_lines()]
        axis.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--projection", help="stored projection of Llama-3.2 -> Qwen3; default: a random one")
    parser.add_argument("--only", nargs="*", default=["vocabulary", "rows", "lengths", "teachers"])
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of a step that are not exceeded knowingly")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds for the part `longest`")
    parser.add_argument("--kept-from", type=int, nargs="+", default=[8_192, 16_384, 32_768], metavar="N",
                        help="its first lengths with activations kept")  # fmt: skip
    parser.add_argument("--recomputed-from", type=int, nargs="+", default=[65_536, 131_072], metavar="N",
                        help="its first lengths with activations computed again")  # fmt: skip
    parser.add_argument("--whole", type=int, nargs="+", metavar="N",
                        help="lengths of its steps with whole attention; default: what the budget allows")  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.plot:
        draw()
        return
    torch.manual_seed(0)
    setup = None
    for part in args.only:
        try:
            if part == "vocabulary":
                found = vocabulary(args)
            else:
                if setup is None:
                    setup = Setup(args.projection, tiny=args.tiny, dynamic=True)
                if part in ("rows", "teachers"):  # the others compile what they run
                    warm_up(setup)
                parts = {"rows": rows, "lengths": lengths, "teachers": teachers, "longest": longest_both_ways}
                found = parts[part](setup, args)
            if not args.tiny:
                store(found, args.out)
            if "longest" in found:
                print(json.dumps(found["longest"]), flush=True)
        except Exception:  # one failing part must not lose the others
            traceback.print_exc()


if __name__ == "__main__":
    main()
