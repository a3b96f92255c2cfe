"""What the student at a run's end says of its pair and loss: how much of the text is one to one, how much probability
lies on tokens that both vocabularies have, and whether the gradients of a loss's parts pull the same way.

    python -m benchmarks.quality.probes RUN [--batches 8]      # a run folder, as suite.py and real.py leave it

Gradients are those of a vector that is added to all of the student's last hidden states, so that parts which act on
different rows can be compared. A part is what the gradient gains when its factor goes from 0 to 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import setup
from limbeck.config import load_config, resolve
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, Loss, TeacherOutput
from limbeck.losses.contract import Batch, Counts
from limbeck.losses.distillation import LossInputs
from limbeck.losses.objectives import ProjectedObjective
from limbeck.utils.metrics import Metrics

FACTORS = {
    "tree_kl": ("root", "inner_student", "inner_teacher", "chunk"),
    "boundary_kl": ("chunk",),
    "strict": ("span",),
    "partition": ("chunk", "root"),
}
"""Parts of a mode by the names of their factors; without any of them is left what has none."""


class Probed(Loss[LossInputs]):
    """A loss whose passes are measured beside what they do. gradients: of each part, by micro-batch; masses: sum and
    count of shared mass and of one-to-one coverage."""

    def __init__(self, loss: CrossTokenizerDistillationLossFn) -> None:
        super().__init__()
        self.loss, self.num_teachers = loss, loss.num_teachers
        self.gradients: list[dict[str, Tensor]] = []
        self.masses: dict[str, list[float]] = {}

    def prepare_batch(self, batch: Batch) -> Batch:
        return self.loss.prepare_batch(batch)

    def denominators(self, batch: Batch) -> Counts:
        return self.loss.denominators(batch)

    def build_layout(self, mb: Any, row_starts: Sequence[Tensor | None]) -> LossInputs:
        return self.loss.build_layout(mb, row_starts)

    def compute_loss(
        self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: LossInputs, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        rest = head, signals, inputs, counts
        self.gradients.append(gradients_of(self.loss, hidden_RH, rest))
        self._coverage(inputs)
        self._shared_mass(hidden_RH, *rest[:3])
        return self.loss.compute_loss(hidden_RH, *rest)

    def _add(self, name: str, value: float, count: float) -> None:
        old = self.masses.setdefault(name, [0.0, 0.0])
        self.masses[name] = [old[0] + value, old[1] + count]

    def _coverage(self, inputs: LossInputs) -> None:
        """Shares of chunks, and of both sides' tokens in chunks, that are one token on both sides."""
        for i, layout in enumerate(inputs.layouts):
            strict = int(((layout.student_count_C == 1) & (layout.teacher_count_C == 1)).sum())
            self._add(f"teacher_{i}/strict_chunks", strict, layout.num_chunks)
            self._add(f"teacher_{i}/strict_student_tokens", strict, layout.student_rows_M.numel())
            self._add(f"teacher_{i}/strict_teacher_tokens", strict, layout.teacher_rows_Q.numel())

    @torch.no_grad()
    def _shared_mass(self, hidden_RH: Tensor, head: Head, signals: Sequence[TeacherOutput], inputs: LossInputs) -> None:
        """Probability of the tokens that both vocabularies have, at the starts of one-to-one chunks."""
        sides = zip(signals, self.loss.objectives, inputs.to(hidden_RH.device).layouts, strict=True)
        for i, (signal, objective, layout) in enumerate(sides):
            if not isinstance(objective, ProjectedObjective) or signal.is_topk:
                continue
            at = ((layout.student_count_C == 1) & (layout.teacher_count_C == 1)).nonzero().squeeze(1)
            for chosen in at.split(512):
                rows_s = layout.student_rows_M[layout.student_first_C[chosen]]
                rows_t = layout.teacher_rows_Q[layout.teacher_first_C[chosen]]
                sides_of = (
                    ("student", head.logits(hidden_RH.index_select(0, rows_s)), objective.equals.student),
                    ("teacher", signal.scores(rows_t).log_probs(), objective.equals.teacher),
                )
                for name, logits, ids in sides_of:
                    mass = logits.softmax(-1).index_select(1, ids.to(logits.device)).sum()
                    self._add(f"teacher_{i}/shared_mass_{name}", float(mass), chosen.numel())

    def figures(self) -> dict[str, float]:
        """Means of what was measured; cosines and ratios of norms are those of micro-batches."""
        out = {name: value / count for name, (value, count) in self.masses.items() if count}
        pairs: dict[str, list[tuple[float, float]]] = {}
        for found in self.gradients:
            first = next(iter(name for name in found if name != "ce"))
            for one, two in (("ce", "all"), *((first, name) for name in found if name not in ("ce", "all", first))):
                a, b = found[one], found.get(two)
                if b is not None and a.norm() > 0 and b.norm() > 0:
                    name = "ce" if one == "ce" else f"{one}_{two}"
                    cosine, ratio = torch.cosine_similarity(a, b, dim=0), b.norm() / a.norm()
                    pairs.setdefault(name, []).append((float(cosine), float(ratio)))
        for name, values in pairs.items():
            cosines, ratios = zip(*values, strict=True)
            out[f"teacher_0/cosine_{name}"] = sum(cosines) / len(values)
            out[f"teacher_0/norm_ratio_{name}"] = sum(ratios) / len(values)
        return out


def gradients_of(loss: CrossTokenizerDistillationLossFn, hidden_RH: Tensor, rest: Any) -> dict[str, Tensor]:
    """Gradient `[H]` of each part of a loss, of the whole of distillation (`all`) and of cross-entropy (`ce`)."""
    cfg, factors = loss.cfg, FACTORS.get(loss.cfg.mode, ())

    def gradient(**settings: float) -> Tensor:
        hidden = hidden_RH.detach().requires_grad_()
        loss.cfg = cfg.model_copy(update=settings)
        before = [objective.cfg for objective in loss.objectives]
        try:
            for objective in loss.objectives:
                objective.cfg = objective.cfg.model_copy(update=settings)
            with torch.enable_grad():
                value, _ = loss.compute_loss(hidden, *rest)
            (grad,) = torch.autograd.grad(value, hidden)
        finally:
            loss.cfg = cfg
            for objective, own in zip(loss.objectives, before, strict=True):
                objective.cfg = own
        return grad.sum(0)

    off = dict.fromkeys((f"{name}_weight" for name in factors), 0.0)
    alone = {"ce_loss_scale": 0.0}
    rest_of = gradient(**off, **alone)
    found = {} if not float(rest_of.norm()) else {"main": rest_of}
    for name in factors:
        found[name] = gradient(**{**off, f"{name}_weight": 1.0}, **alone) - rest_of
    return {**found, "all": gradient(**alone), "ce": gradient(kl_loss_weight=0.0)}


def probe(folder: Path, batches: int = 8) -> dict[str, float]:
    """Figures of a run's last student on the first batches of its text."""
    config = resolve(MasterConfig, load_config(folder / "config.yaml"))
    student, teachers, loader, _, loss_fn, *_ = setup(config)
    probed = Probed(loss_fn)
    for batch in islice(loader, batches):
        student.train(batch, probed, teachers=teachers, eval_mode=True)
    return {name: round(value, 4) for name, value in sorted(probed.figures().items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, default=8)
    args = parser.parse_args()
    print(json.dumps(probe(args.run, args.batches), indent=1))


if __name__ == "__main__":
    main()
