"""What tree_kl costs on the CPU beside boundary_kl: head, cross-entropy and distillation, forward and backward.

    python benchmarks/tree_cpu.py --student smollm2 --teacher llama3_2 --text corpus.txt

Hidden states and heads are random, ids and chunks are those of the text. Tokenizers are folders or files, or names of
the tests' zoo. Prints one line a setting: seconds of CPU time, and how many times those of boundary_kl; the ratio is
the median over rounds, in which all settings have their turn. Writes tree_cpu.json.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import load_tokenizer, record
from benchmarks.common import parser as arguments
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.layout import padded_row_start
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, HiddenSignal
from limbeck.projection import load_or_build

SETTINGS: dict[str, dict[str, Any]] = {
    "boundary_kl": {"mode": "boundary_kl"},
    "tree_kl": {"mode": "tree_kl"},
    "tree_kl cheap": {"mode": "tree_kl", "condition": "cheap"},
    "tree_kl exact": {"mode": "tree_kl", "condition": "exact"},
}


def main() -> None:
    parser = arguments(__file__, __doc__)
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=512, help="student tokens")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    student, teacher = load_tokenizer(args.student), load_tokenizer(args.teacher)
    projection = load_or_build(student, teacher, trees=True)
    collator = CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=teacher, ctx_length_student=args.rows, ctx_length_teacher=args.rows
    )
    text = args.text.read_text(encoding="utf-8", errors="ignore")[: 8 * args.rows]
    batch = collator([{"text": text, "idx": 0, "loss_multiplier": 1.0}])
    torch.manual_seed(0)
    sizes = projection.student_size, projection.teacher_size
    ids = batch["input_ids"], batch["teacher_input_ids"]
    hidden = [torch.randn(i.numel(), args.hidden) for i in ids]
    weight = [torch.randn(size, args.hidden) * 3 / args.hidden**0.5 for size in sizes]
    signal = HiddenSignal(hidden[1], Head(sizes[1], weight=weight[1]), ids[1].flatten())
    runs: dict[str, Any] = {}
    for name, cfg in SETTINGS.items():
        runs[name] = CrossTokenizerDistillationLossFn({**cfg, "ce_loss_scale": 1.0}, projections=[projection])

    def step(fn: CrossTokenizerDistillationLossFn) -> float:
        x, w = hidden[0].clone().requires_grad_(), weight[0].clone().requires_grad_()
        data = fn.annotate(batch)
        counts = fn.counts(data)
        inputs = fn._inputs(data, padded_row_start(ids[0]), [padded_row_start(ids[1])])
        started = time.process_time()
        loss, _ = fn.compute(x, Head(sizes[0], weight=w), [signal], inputs, counts)
        loss.backward()
        return time.process_time() - started

    for fn in runs.values():  # once for caches
        step(fn)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):  # in turns, so that a slow moment of the machine meets all of them
        for name, fn in runs.items():
            times[name].append(step(fn))
    found = {name: round(statistics.median(values), 4) for name, values in times.items()}
    ratio = {
        name: round(statistics.median(a / b for a, b in zip(values, times["boundary_kl"], strict=True)), 3)
        for name, values in times.items()
    }
    for name, seconds in found.items():
        print(f"{name:16} {seconds:.3f} s  {ratio[name]:.2f} x boundary_kl")
    problem = {"student": args.student, "teacher": args.teacher, "text": args.text.name, "hidden": args.hidden}
    counts = {"rows": int(ids[0].numel()), "sizes": sizes, "threads": args.threads, "rounds": args.repeats}
    record(args.out, {**problem, **counts, "seconds": found, "times_boundary_kl": ratio, "goal": 1.2})


if __name__ == "__main__":
    main()
