"""The dynamic ratio between cross-entropy and distillation: one detached number per step, never per micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from limbeck.utils.errors import LossError


class DynamicScale(nn.Module):
    """Running estimates of both losses, and their ratio; part of the checkpoint through `state_dict`.

    Before the first value arrives the ratio is 1. All ranks must feed it the same (reduced) values.
    """

    distillation: Tensor
    cross_entropy: Tensor
    steps: Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("distillation", torch.zeros((), dtype=torch.float64))
        self.register_buffer("cross_entropy", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._ratio: float | None = None

    def ratio(self) -> float:
        """CE / KD as it stands for this step; read from the device once per change."""
        if self._ratio is None:
            kd, ce = float(self.distillation), float(self.cross_entropy)
            self._ratio = ce / kd if int(self.steps) and kd > 1e-12 else 1.0
        return self._ratio

    def update(self, distillation: float, cross_entropy: float) -> None:
        """Take one finished step's global mean losses into the running estimate."""
        self._blend(distillation, cross_entropy, self.decay if int(self.steps) else 0.0)

    def set(self, distillation: float, cross_entropy: float) -> None:
        """Fix the ratio from a first pass over this step's batch."""
        self._blend(distillation, cross_entropy, 0.0)

    def _blend(self, distillation: float, cross_entropy: float, decay: float) -> None:
        for name, value in (("distillation", distillation), ("cross_entropy", cross_entropy)):
            if not torch.isfinite(torch.tensor(float(value))):
                raise LossError(f"the step's {name} loss is {value}; dynamic scaling needs finite losses")
            old = getattr(self, name)
            old.mul_(decay).add_((1 - decay) * float(value))
        self.steps.add_(1)
        self._ratio = None

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[arg-type]
        self._ratio = None
