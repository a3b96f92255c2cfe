"""Student probabilities on chosen teacher columns: `q[i] = sum_s W[s, column_i] p(s)`, a short gather per column.

Reference: `project_columns_reference`, and `VocabMap.project_at`, whose layout is row-major.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.fast.kernels.stats import LOG2E, WIDE, WIDE_WARPS
from limbeck.losses.fast.kernels.tables import ProjectionTables


@triton.jit
def _entry(x_ptr, student_ptr, weight_ptr, entry, last, ld, col, scale, base):
    some = entry < last
    safe = tl.minimum(entry, last - 1)
    student = tl.load(student_ptr + safe)
    weight = tl.where(some, tl.load(weight_ptr + safe), 0.0)
    x = tl.load(x_ptr + student.to(tl.int64) * ld + col, mask=col < tl.where(some, ld, 0), other=float("-inf"))
    return weight, x.to(tl.float32) * scale - base


@triton.jit
def _project_kernel(
    x_ptr, lse_ptr, out_ptr, column_ptr, offset_ptr, student_ptr, weight_ptr, ld, inv_tau, BN: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = col < ld
    column = tl.load(column_ptr + row)
    first = tl.load(offset_ptr + column)
    last = tl.load(offset_ptr + column + 1)
    scale = inv_tau * LOG2E
    base = tl.load(lse_ptr + col, mask=inside, other=0.0) * LOG2E
    total = tl.zeros([BN], tl.float32)
    for e in range(first, last, 4):
        w0, x0 = _entry(x_ptr, student_ptr, weight_ptr, e, last, ld, col, scale, base)
        w1, x1 = _entry(x_ptr, student_ptr, weight_ptr, e + 1, last, ld, col, scale, base)
        w2, x2 = _entry(x_ptr, student_ptr, weight_ptr, e + 2, last, ld, col, scale, base)
        w3, x3 = _entry(x_ptr, student_ptr, weight_ptr, e + 3, last, ld, col, scale, base)
        total += w0 * tl.exp2(x0) + w1 * tl.exp2(x1) + w2 * tl.exp2(x2) + w3 * tl.exp2(x3)
    tl.store(out_ptr + row.to(tl.int64) * ld + col, total, mask=inside)


def project_columns(
    logits: Tensor, lse: Tensor, columns: Tensor, tables: ProjectionTables, temperature: float = 1.0
) -> Tensor:
    """Mass of teacher columns `[K]` under student logits `[V_s, ld]` with log-sum-exp `[ld]`: float32 `[K, ld]`."""
    ld = logits.shape[1]
    out = torch.empty(columns.numel(), ld, dtype=torch.float32, device=logits.device)
    if columns.numel():
        _project_kernel[(columns.numel(), -(-ld // WIDE))](
            logits, lse, out, columns, tables.offsets, tables.students, tables.weights, ld, 1 / temperature,
            BN=WIDE, num_warps=WIDE_WARPS,
        )  # fmt: skip
    return out


def project_columns_reference(
    logits: Tensor, lse: Tensor, columns: Tensor, tables: ProjectionTables, temperature: float = 1.0
) -> Tensor:
    """The same in plain torch."""
    probs = (logits.float() / temperature - lse).exp()
    offsets = tables.offsets.tolist()
    rows = [
        (probs[tables.students[a:b].long()] * tables.weights[a:b, None]).sum(0)
        for a, b in ((offsets[c], offsets[c + 1]) for c in columns.tolist())
    ]
    return torch.stack(rows) if rows else probs.new_empty(0, logits.shape[1])
