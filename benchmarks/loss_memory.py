"""Peak memory of the distillation loss as rows grow: heads and losses in row blocks against all logits at once.

    python -m benchmarks.loss_memory            # writes loss_memory.csv beside this file
    python -m benchmarks.loss_memory --quick    # two sizes, prints only

Each point runs in a process of its own, forward and backward from hidden states, heads included, on the CPU in
float32; memory is the growth of the process's peak resident set over what it held before the loss. "full" is the same
loss in one block: every logit of the micro-batch exists at once, as in a loss that is handed logits.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import device, versions
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden

HERE = Path(__file__).resolve().parent
V_STUDENT, V_TEACHER, H_STUDENT, H_TEACHER = 16384, 20480, 128, 160
BLOCK_ROWS = 128
ROWS = (256, 512, 1024, 2048, 4096)
MODES = ("boundary_kl", "p_kl")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_batch(rows: int) -> dict[str, Any]:
    """One sample of `rows` predicting rows; chunks of one token, every tenth one of two teacher tokens."""
    rng = np.random.default_rng(0)
    teacher_chunk = np.repeat(np.arange(rows), np.where(np.arange(rows) % 10 == 0, 2, 1))
    ones = torch.ones(1, rows, dtype=torch.bool)
    width = len(teacher_chunk) + 1
    return {
        "input_ids": torch.from_numpy(rng.integers(0, V_STUDENT, (1, rows + 1))),
        "input_lengths": torch.tensor([rows + 1]),
        "token_mask": torch.ones(1, rows + 1, dtype=torch.int64),
        "sample_mask": torch.ones(1),
        "teacher_0_input_ids": torch.from_numpy(rng.integers(0, V_TEACHER, (1, width))),
        "teacher_0_input_lengths": torch.tensor([width]),
        "alignment_0_pair_valid": ones,
        "alignment_0_pair_is_correct": ones,
        "alignment_0_student_chunk_id": torch.arange(-1, rows)[None],
        "alignment_0_teacher_chunk_id": torch.from_numpy(np.concatenate(([-1], teacher_chunk)))[None],
    }


def make_projection() -> SimpleNamespace:
    """Nine tenths of the student's tokens map exactly, the others to two pieces."""
    rng = np.random.default_rng(1)
    indices = np.full((V_STUDENT, 2), -1, np.int32)
    indices[:, 0] = rng.permutation(V_TEACHER)[:V_STUDENT]
    pieces = np.arange(V_STUDENT) % 10 == 0
    indices[pieces, 1] = (indices[pieces, 0] + 1) % V_TEACHER
    weights = np.where(pieces[:, None], (0.9091, 0.0909), (1.0, 0.0)).astype(np.float32)
    return SimpleNamespace(indices=indices, weights=weights, teacher_size=V_TEACHER)


def measure(mode: str, way: str, rows: int) -> dict[str, Any]:
    """One point: extra peak memory and time of a forward and backward pass."""
    torch.manual_seed(0)
    batch = make_batch(rows)
    block_rows = BLOCK_ROWS if way == "blocks" else 1 << 30
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": mode, "block_rows": block_rows}, projections=[make_projection()]
    )
    hidden = torch.randn(rows + 1, H_STUDENT, requires_grad=True)
    head = Head(V_STUDENT, weight=(torch.randn(V_STUDENT, H_STUDENT) * 0.1).requires_grad_())
    width = batch["teacher_0_input_ids"].shape[1]
    teacher_head = Head(V_TEACHER, weight=torch.randn(V_TEACHER, H_TEACHER) * 0.1)
    signal = TeacherHidden(torch.randn(width, H_TEACHER), teacher_head, batch["teacher_0_input_ids"].reshape(-1))
    start = torch.tensor([0])
    microbatch = SimpleNamespace(data_dict=batch, processed_inputs=SimpleNamespace(row_start=start))
    inputs, counts = loss_fn.build_layout(microbatch, [start]), loss_fn.denominators(batch)
    before, began = peak_mb(), time.perf_counter()
    loss, _ = loss_fn.compute_loss(hidden, head, [signal], inputs, counts)
    loss.backward()
    return {
        "mode": mode,
        "way": way,
        "rows": rows,
        "peak_extra_mb": round(peak_mb() - before, 1),
        "seconds": round(time.perf_counter() - began, 2),
        "loss": round(float(loss.detach()), 5),
    }


def point(mode: str, way: str, rows: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--point", mode, way, str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes of one mode, nothing written")
    parser.add_argument("--point", nargs=3, metavar=("MODE", "WAY", "ROWS"), help="measure one point and print it")
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(args.point[0], args.point[1], int(args.point[2]))))
        return
    modes, sizes = (MODES[:1], ROWS[:2]) if args.quick else (MODES, ROWS)
    table = [point(mode, way, rows) for mode in modes for way in ("full", "blocks") for rows in sizes]
    if args.quick:
        return
    installed = versions()
    about = f"{device()}, {torch.get_num_threads()} threads, Python {installed['python']}, torch {installed['torch']}"
    with (HERE / "loss_memory.csv").open("w", newline="") as out:
        out.write(f"# {about}; V {V_STUDENT}/{V_TEACHER}, h {H_STUDENT}/{H_TEACHER}, float32, blocks of {BLOCK_ROWS}\n")
        writer = csv.DictWriter(out, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
