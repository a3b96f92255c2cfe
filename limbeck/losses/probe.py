"""What a loss can tell about itself and its pair, now and then: how much of a batch is one to one, how much probability
lies on tokens that both vocabularies have, and whether the parts of the loss pull the same way.

Gradients are those of a vector that is added to the student's last hidden states, one for all rows: parts that act on
different rows have one too, as they have for any parameter below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from limbeck.data.layout import ChunkLayout
from limbeck.losses.objectives.base import BlockLogits, ChunkBlock, ProjectedObjective, Sums
from limbeck.losses.signals import TeacherScores


@dataclass
class Probe:
    """Parts of a loss and their gradients `[H]`, summed over the blocks of a micro-batch. Parts of one name before the
    first `/` belong together; `ce` is cross-entropy, `<teacher>/` the whole of a teacher's part."""

    parts: dict[str, Tensor] = field(default_factory=dict)  # of the block at hand, with their graph
    grads: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, grad_H: Tensor) -> None:
        """Count a block's gradient of a part."""
        self.grads[name] = self.grads[name] + grad_H if name in self.grads else grad_H

    def cosines(self) -> Sums:
        """Cosines of each teacher's first part with its others, and of the whole with cross-entropy; how long the
        other one is, against the first. A part without gradient counts nothing."""
        out: Sums = {}
        teachers = {name.split("/")[0] for name in self.grads if "/" in name}
        for teacher in sorted(teachers):
            own = [name for name in self.grads if name.startswith(f"{teacher}/") and name != f"{teacher}/"]
            for other in own[1:]:
                pair = f"{own[0].split('/')[1]}_{other.split('/')[1]}"
                out |= self._pair(own[0], other, f"{teacher}/{{}}_{pair}")
            if "ce" in self.grads and f"{teacher}/" in self.grads:
                out |= self._pair("ce", f"{teacher}/", f"{teacher}/{{}}_ce")
        return out

    def _pair(self, one: str, two: str, name: str) -> Sums:
        a, b = self.grads[one], self.grads[two]
        size_a, size_b = a.norm(), b.norm()
        there = ((size_a > 0) & (size_b > 0)).to(a)
        tiny = torch.finfo(a.dtype).tiny
        cosine = (a @ b) / (size_a * size_b).clamp(min=tiny)
        return {
            name.format("cosine"): (cosine * there, there),
            name.format("norm_ratio"): (size_b / size_a.clamp(min=tiny) * there, there),
        }


def shared_mass(
    objective: ProjectedObjective, student: BlockLogits, chunks: ChunkBlock, teacher: TeacherScores
) -> Sums:
    """Probability of the tokens that both vocabularies have, at the starts of one-to-one chunks."""
    if teacher.is_topk or teacher.vocab_ids_K is not None:
        return {}
    at = (~chunks.multi_C).nonzero().squeeze(1)
    log_s, log_t, axis = objective.at_equals(student, chunks, teacher, at, 1.0)
    count = log_s.new_tensor(float(at.numel()))
    return {
        "shared_mass_student": (axis.sum(log_s.exp()).sum(), count),
        "shared_mass_teacher": (axis.sum(log_t.exp()).sum(), count),
    }


def strict_coverage(layout: ChunkLayout) -> Sums:
    """Shares of chunks, and of both sides' tokens in chunks, that are one token on both sides."""
    strict = ((layout.student_count_C == 1) & (layout.teacher_count_C == 1)).sum().double()
    sizes = {
        "strict_chunks": layout.num_chunks,
        "strict_student_tokens": layout.student_rows_M.numel(),
        "strict_teacher_tokens": layout.teacher_rows_Q.numel(),
    }
    return {name: (strict, strict.new_tensor(float(size))) for name, size in sizes.items()}
