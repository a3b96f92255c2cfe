"""`limbeck train` as a user runs it, on real text: files in, loader processes, packed documents, live teacher, logging.

    PYTHONPATH=. python benchmarks/gpu/run.py --text FILE --student-tokenizer S --teacher-tokenizer T [--steps 20]
    PYTHONPATH=. python benchmarks/gpu/run.py ... --tiny      # two small layers each, also without a GPU

Llama-3.2-1B's shape from Qwen3-4B's (random weights) over the real tokenizers of both. Tokens are real student tokens,
seconds are those between two steps' ends, with all that comes between them. Several runs, one after the other:

- small: a text of about 1 MB, which takes several epochs; then the bare step: the same student, teacher and loss on
  batches that lie ready, without loader, logging or loop.
- large: the same text over and over, 100 MB of it.
- quiet: the small text without TensorBoard and progress.
- whole: with validations and a checkpoint, under `limbeck train --profile`: the table of where the time goes. Its steps
  wait for the device at every section's end and are no part of the speeds. Copies are those of torch's trace.

Writes the row `run_packed` into results.json, after every run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import GIB, RESULTS, random_weights_on_the_device, save_row
from benchmarks.gpu.step import SHAPES, TINY, compiled_graphs
from limbeck.distributed.device import host_threads

RUNS = ("small", "large", "quiet", "whole")
WARMUP = 4
"""Steps that are not timed: they compile, allocate and fill the loader's queue."""
BARE = 8
PROFILED = 4
LARGE = 100_000_000
"""Bytes of the large text."""


def run_file(args: argparse.Namespace, kind: str, text: Path, folder: str) -> dict[str, Any]:
    """The run file of one of the runs."""
    whole, loud = kind == "whole", kind != "quiet"
    length = 128 if args.tiny else 2048
    packing = {"enabled": True, "train_mb_tokens": args.tokens, "teacher_mb_tokens": args.tokens,
               "sequence_length_round": 512}  # fmt: skip
    shared: dict[str, Any] = {
        "init": "random",
        "precision": "float32" if args.tiny else "bfloat16",
        "sequence_packing": packing,
        "max_total_sequence_length": length,
        "compile": {"enabled": not args.tiny, "dynamic": True},
    }
    tied = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    shapes = {side: shape | (TINY if args.tiny else {}) | tied for side, shape in SHAPES.items()}
    if args.tiny:
        # as many ids as the tokenizers have
        shapes = {side: {k: v for k, v in shape.items() if k != "vocab_size"} for side, shape in shapes.items()}
    return {
        "policy": {
            **shared,
            "tokenizer": {"name": args.student_tokenizer},
            "model_overrides": shapes["student"],
            "train_global_batch_size": args.documents,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "fused": not args.tiny}},
        },
        "teacher": {
            **shared,
            "tokenizer": {"name": args.teacher_tokenizer},
            "model_overrides": shapes["teacher"],
        },
        "loss_fn": {"mode": "boundary_kl", "projection_matrix_path": args.projection},
        "data": {"train": str(text), "validation": str(validation(args, folder)) if whole else None,
                 "max_document_bytes": 300 if args.tiny else 6000, "max_input_seq_length": length},
        "distillation": {"num_prompts_per_step": args.documents, "max_num_epochs": 100,
                         "max_num_steps": 3 + PROFILED if whole else WARMUP + args.steps,
                         "val_period": PROFILED - 1 if whole else 0, "val_at_start": False, "val_at_end": False,
                         "samples": {"number": 0}},
        "checkpointing": {"enabled": whole and args.checkpoint, "save_period": PROFILED},
        "logger": {"log_dir": folder, "tensorboard_enabled": loud, "progress": loud,
                   "profile_steps": PROFILED if whole else 0},
    }  # fmt: skip


def validation(args: argparse.Namespace, folder: str) -> Path:
    """The first pages of the text in a file of their own."""
    path = Path(folder).with_name("validation.txt")
    path.write_bytes(Path(args.text).read_bytes()[: 1000 if args.tiny else 50_000])
    return path


def bare_step(parts: tuple[Any, ...]) -> float:
    """Tokens per second of steps on batches that lie ready; ``parts``: what ``setup`` gave, after the run."""
    from limbeck.algorithms.xtoken_off_policy_distillation import as_teachers

    student, teacher, loader, _, loss_fn = parts[:5]
    loader.sampler.set_epoch(0)
    batches = list(itertools.islice(loader, 1 + BARE))
    teachers = as_teachers(teacher)
    for number, batch in enumerate(batches):
        student.train(batch, loss_fn, teachers=teachers)
        if number == 0:
            _wait()
            begun = time.perf_counter()
    _wait()
    return sum(int(batch["input_lengths"].sum()) for batch in batches[1:]) / (time.perf_counter() - begun)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(args: argparse.Namespace, kind: str, text: Path) -> dict[str, Any]:
    """One run, and what it measured."""
    from limbeck.algorithms import xtoken_off_policy_distillation as algorithm
    from limbeck.algorithms.build import load_datasets, load_tokenizers
    from limbeck.algorithms.start import whole_run

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/run"
        config = algorithm.MasterConfig.model_validate(run_file(args, kind, text, folder))
        with whole_run(config):
            student_tokenizer, others = load_tokenizers(config)
            parts = algorithm.setup(config, student_tokenizer, others, *load_datasets(config))
            ends: list[float] = []
            made: list[tuple[int, int]] = []
            kernels = compiled_kernels()
            _note_ends(parts[0], ends, made, kernels)
            algorithm.xtoken_off_policy_distillation_train(*parts)
            if kind == "whole":
                return sections(Path(folder))
            _wait()
            row = speed(Path(folder), ends)
            row["compiled"] = compiled_in(made, kernels)
            row["seconds_to_the_first_step"] = round(ends[0] - started, 1)
            if kind == "small":
                with host_threads(parts[0].device):
                    bare = bare_step(parts)
                row["bare_tokens_per_s"] = round(bare)
                row["behind_the_bare_step"] = round(1 - row["tokens_per_s"] / bare, 4)
    return row


def _note_ends(student: Any, ends: list[float], made: list[tuple[int, int]], kernels: list[str]) -> None:
    """Write down when each training step of a student has ended, and how much had been compiled by then."""
    train = student.train

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        if not kwargs.get("eval_mode"):  # the comparison with the teacher at the start
            ends.append(time.perf_counter())
            made.append((compiled_graphs(), len(kernels)))
        return result

    student.train = noting


def compiled_in(made: list[tuple[int, int]], kernels: list[str]) -> dict[int, Any]:
    """By step behind the warm-up: graphs that were compiled in it, and the names of kernels."""
    found = {}
    for step, (before, after) in enumerate(itertools.pairwise(made), start=2):
        if step > WARMUP and after != before:
            found[step] = {"graphs": after[0] - before[0], "kernels": kernels[before[1] : after[1]]}
    return found


def compiled_kernels() -> list[str]:
    """Names of Triton's kernels, to which each one is added that is compiled from now on."""
    found: list[str] = []
    with suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = lambda *, src, **_: found.append(str(getattr(src, "name", src)))
    return found


def speed(folder: Path, ends: list[float]) -> dict[str, Any]:
    """Milliseconds and tokens per second behind the warm-up."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/seconds" in row][WARMUP:]
    seconds = [b - a for a, b in itertools.pairwise(ends)][WARMUP - 1 :]
    tokens = [row["train/tokens_per_s"] * row["train/seconds"] for row in steps]
    return {
        "tokens_per_s": round(sum(tokens) / sum(seconds)),
        "ms": round(statistics.mean(seconds) * 1e3, 1),
        "median_ms": round(statistics.median(seconds) * 1e3, 1),
        "slowest_ms": round(max(seconds) * 1e3, 1),
        "tokens": round(sum(tokens) / len(tokens)),
        "waited_for_data_ms": round(statistics.mean(row["train/time/data"] for row in steps) * 1e3, 2),
        "steps": len(steps),
        "step_ms": [round(own * 1e3) for own in seconds],
        "loss": steps[-1]["train/loss"],
    }


def sections(folder: Path) -> dict[str, Any]:
    """Where the time of profiled steps went: the loop's sections, and copies between host and device from the trace."""
    from limbeck.utils.profiling import PROFILE_NAME, TRACE_NAME, TRACED, means

    found = json.loads((folder / PROFILE_NAME).read_bytes())
    events = json.loads((folder / TRACE_NAME).read_bytes())["traceEvents"]
    row: dict[str, Any] = {name: round(value * 1e3, 2) for name, value in means(found["steps"]).items()}
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    row["copies_on_the_device"] = round(sum(e["dur"] for e in copies) / 1e3 / TRACED, 3)
    row["copied_mb"] = round(sum(e["args"].get("bytes", 0) for e in copies) / 1e6 / TRACED, 2)
    return {"profiled_ms": row}


def repeated(text: Path, size: int, to: Path) -> Path:
    """The same text over and over, up to `size` bytes."""
    block = text.read_bytes()
    with to.open("wb") as file:
        for number in range(size // len(block) + 1):
            # each copy begins elsewhere, so that its documents are cut elsewhere
            cut = number * 977 % len(block)
            file.write((block[cut:] + block[:cut])[: size - number * len(block)])
    return to


def summary(found: Mapping[str, Any]) -> str:
    """The results as lines."""
    lines = [
        f"{kind:<6} {row['tokens_per_s']:>7,} tokens/s {row['ms']:>8,.1f} ms"
        for kind, row in found.items()
        if "ms" in row
    ]
    small = found.get("small")
    if small:
        lines.append(
            f"bare   {small['bare_tokens_per_s']:>7,} tokens/s; the run is {small['behind_the_bare_step']:.1%} behind"
        )
    for name, ms in found.get("whole", {}).get("profiled_ms", {}).items():
        lines.append(f"  {name:<22}{ms:>10,.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file of about a megabyte")
    parser.add_argument("--student-tokenizer", required=True)
    parser.add_argument("--teacher-tokenizer", required=True)
    parser.add_argument("--projection", default=None)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=18_432)
    parser.add_argument("--steps", type=int, default=20, help="of each run that is timed")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--checkpoint", action="store_true", help="write one in the run `whole`, 15 GB")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    args = parser.parse_args()
    random_weights_on_the_device()
    found: dict[str, Any] = {}
    if not args.tiny and RESULTS.exists():
        # runs that are not asked for keep what they had
        found = {k: v for k, v in json.loads(RESULTS.read_text()).get("run_packed", {}).items() if k not in args.runs}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.runs:
            text = Path(args.text)
            if kind == "large":
                text = repeated(text, LARGE // 50 if args.tiny else LARGE, Path(folder) / "large.txt")
            try:
                found[kind] = run(args, kind, text)
            except Exception:  # one failing run must not lose the others
                traceback.print_exc()
                continue
            print(f"{kind}: {json.dumps(found[kind])}", flush=True)
            gc.collect()
            if torch.cuda.is_available() and not args.tiny:
                found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
                save_row("run_packed", found)
                torch.cuda.empty_cache()
    print(summary({kind: row for kind, row in found.items() if kind in args.runs}))


if __name__ == "__main__":
    main()
