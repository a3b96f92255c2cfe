"""Every fast path against a float64 reference on the GPU, at full vocabulary sizes.

    PYTHONPATH=. python benchmarks/gpu/numerics.py [--projection W.safetensors]
    PYTHONPATH=. python benchmarks/gpu/numerics.py --pair .carry/english    # tree_kl on a folder of `prepare.py`

Hidden states and heads are drawn in bfloat16, so that all runs see the same numbers. The reference is the plain path in
float64. Beside each fast path stands the plain path in the same type: its error is what that type costs by itself.
Relative errors: of the loss, and of the gradients by norm. Writes the row `numerics` (`numerics_NAME` of a pair)
of results.json.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    V_S,
    V_T,
    aligned_batch,
    load_pair,
    load_projection,
    microbatch,
    random_heads,
    save_row,
)
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden, TeacherTopK

DEVICE = "cuda"
CASES: dict[str, dict[str, Any]] = {
    "boundary_kl": {},
    "boundary_kl, tau 2": {"mode": "boundary_kl", "temperature": 2.0},
    "boundary_kl, top-128": {"mode": "boundary_kl", "topk_signal": 128},
    "p_kl": {},
    "gold": {},
    "h_kl": {},
    "alm": {},
}


TREE_CASES: dict[str, dict[str, Any]] = {
    "tree_kl": {},
    "tree_kl, reverse": {"mode": "tree_kl", "direction": "reverse"},
    "tree_kl, jsd": {"mode": "tree_kl", "direction": "jsd"},
    "tree_kl, tau 2": {"mode": "tree_kl", "temperature": 2.0},
    "tree_kl, top-128": {"mode": "tree_kl", "topk_signal": 128},
}


class Inputs:
    """One aligned batch with random heads. (P-KL chooses its columns by the largest logits, so a narrow type may choose
    others than float64 does, on either path.)"""

    def __init__(
        self,
        batch: dict[str, Any],
        projection: Any,
        sizes: tuple[int, int] = (V_S, V_T),
    ) -> None:
        self.batch, self.projection, self.sizes = batch, projection, sizes
        self.tensors = [t.detach() for t in random_heads(batch, DEVICE, torch.bfloat16, sizes=sizes)]
        self.ids = batch["teacher_input_ids"].reshape(-1).to(DEVICE)
        hidden, weight = (t.double() for t in self.tensors[2:])
        following = torch.cat((self.ids[1:], self.ids[:1]))
        tops, next_log_p = [], []
        for rows, after in zip(hidden.split(256), following.split(256), strict=True):
            log_p = torch.log_softmax(rows @ weight.t(), -1)
            tops.append(log_p.topk(128, -1))
            next_log_p.append(log_p.gather(1, after[:, None]).squeeze(1))
        self.top_ids, self.top_log_p = torch.cat([t.indices for t in tops]), torch.cat([t.values for t in tops])
        self.following, self.next_log_p = following, torch.cat(next_log_p)

    @classmethod
    def of_pair(cls, folder: Path) -> Inputs:
        """Random heads over the first sample of a folder of `prepare.py`."""
        projection, batch = load_pair(folder)
        first = {name: value[:1] for name, value in batch.items()}
        return cls(first, projection, (projection.student_size, projection.teacher_size))

    def signal(self, dtype: torch.dtype, top_k: int | None) -> Any:
        size = self.sizes[1]
        if top_k is None:
            return TeacherHidden(self.tensors[2].to(dtype), Head(size, weight=self.tensors[3].to(dtype)), self.ids)
        wide = dtype if dtype == torch.float64 else torch.float32
        values = self.top_log_p[:, :top_k].to(wide)
        return TeacherTopK(self.top_ids[:, :top_k], values, self.next_log_p.to(wide), self.following, size)

    def run(self, case: str, dtype: torch.dtype, fast_path: str) -> tuple[Tensor, Tensor, Tensor]:
        options = {"mode": case, "ce_loss_scale": 1.0, **(CASES | TREE_CASES)[case]}
        top_k = options.pop("topk_signal", None)
        loss_fn = CrossTokenizerDistillationLossFn(
            {
                "teacher_vocab_size": self.sizes[1],
                "fast_path": fast_path,
                "block_rows": 128 if fast_path == "off" else None,
                **options,
            },
            projections=[self.projection],
        ).to(DEVICE)
        hidden, weight = (t.to(dtype, copy=True).requires_grad_() for t in self.tensors[:2])
        inputs = loss_fn.build_layout(microbatch(self.batch), [torch.zeros(1, dtype=torch.int64)])
        loss, _ = loss_fn.compute_loss(
            hidden,
            Head(self.sizes[0], weight=weight),
            [self.signal(dtype, top_k)],
            inputs,
            loss_fn.denominators(self.batch),
        )
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return loss.detach().double(), hidden.grad, weight.grad


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--projection", help="stored projection of Llama-3.2 -> Qwen3; default: a random one")
    parser.add_argument("--pair", type=Path, help="a folder of prepare.py: the cases of tree_kl, on its first sample")
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.pair:
        inputs, cases, row = Inputs.of_pair(args.pair), TREE_CASES, f"numerics_{args.pair.name}"
    else:
        inputs, cases, row = Inputs(aligned_batch(1, args.rows), load_projection(args.projection)), CASES, "numerics"
    table: dict[str, Any] = {}
    print(f"{'case':24s} {'path':14s} {'loss':>10s} {'d hidden':>10s} {'d weight':>10s}")
    for case in cases:
        try:
            wanted = inputs.run(case, torch.float64, "off")
            for label, dtype, fast_path in (
                ("fast float32", torch.float32, "auto"), ("plain float32", torch.float32, "off"),
                ("fast bfloat16", torch.bfloat16, "auto"), ("plain bfloat16", torch.bfloat16, "off"),
            ):  # fmt: skip
                found = inputs.run(case, dtype, fast_path)
                errors = [error(f, w) for f, w in zip(found, wanted, strict=True)]
                table.setdefault(case, {})[label] = dict(zip(("loss", "hidden", "weight"), errors, strict=True))
                print(f"{case:24s} {label:14s} " + " ".join(f"{e:10.2e}" for e in errors), flush=True)
            save_row(row, {"rows": inputs.batch["input_ids"].numel() - 1, "relative_error": table})
        except Exception:  # one failing case must not lose the others
            traceback.print_exc()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
