"""Student probabilities on chosen teacher columns: `q[i] = sum_s W[s, column_i] p(s)`, a short gather per column.

Reference: `project_columns_reference`, and `VocabMap.project_at`, whose layout is row-major.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from limbeck.losses.kernels import COLUMNS
from limbeck.losses.kernels.stats import LOG2E
from limbeck.losses.kernels.tables import ProjectionTables


@triton.jit
def _project_kernel(
    x_ptr, lse_ptr, out_ptr, column_ptr, offset_ptr, student_ptr, weight_ptr, ld, inv_tau,
    BE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.load(column_ptr + row)
    first = tl.load(offset_ptr + column)
    last = tl.load(offset_ptr + column + 1)
    base = tl.load(lse_ptr + col)[None, :] * LOG2E
    total = tl.zeros([BE, BN], tl.float32)
    for e in range(first, last, BE):
        entry = e + tl.arange(0, BE)
        inside = entry < last
        student = tl.load(student_ptr + entry, mask=inside, other=0)
        weight = tl.load(weight_ptr + entry, mask=inside, other=0.0)
        x = tl.load(x_ptr + student.to(tl.int64)[:, None] * ld + col[None, :], mask=inside[:, None], other=0.0)
        total += weight[:, None] * tl.exp2(x.to(tl.float32) * (inv_tau * LOG2E) - base)
    tl.store(out_ptr + row.to(tl.int64) * ld + col, tl.sum(total, 0))


def project_columns(
    logits: Tensor, lse: Tensor, columns: Tensor, tables: ProjectionTables, temperature: float = 1.0
) -> Tensor:
    """Mass of teacher columns `[K]` under student logits `[V_s, ld]` with log-sum-exp `[ld]`: float32 `[K, ld]`."""
    ld = logits.shape[1]
    out = torch.empty(columns.numel(), ld, dtype=torch.float32, device=logits.device)
    if columns.numel():
        _project_kernel[(columns.numel(), ld // COLUMNS)](
            logits, lse, out, columns, tables.offsets, tables.students, tables.weights, ld, 1 / temperature,
            BE=8, BN=COLUMNS, num_warps=4,
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
