"""``distillation.early_stopping``: end a run whose validation no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from limbeck.algorithms.run import Observer, ObserverConfig, Run, Step
from limbeck.distributed.comm import Comm


class EarlyStoppingConfig(ObserverConfig):
    """End a run whose validation no longer improves; every validation that does improve is saved."""

    patience: int = Field(default=3, ge=1)
    """Validations in a row without improvement after which the run ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """An improvement is larger than this."""
    metric: str | None = None
    """Metric of validations, as logged (``val/bpb``). It also ranks checkpoints, and ``checkpointing.higher_is_better``
    holds for both. Default: ``checkpointing.metric_name``, or else ``val/bpb`` where a run trains on texts."""

    def observer(self) -> Observer:
        return EarlyStopping(self)


class EarlyStopping(Observer):
    """Counts validations without improvement.

    Attributes:
        best, best_step: the best value so far and where it was measured; None before the first.
        waited: validations since then.
    """

    name = "early_stopping"

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.best_step = self.waited = 0
        self._improved = False

    def on_step(self, run: Run, step: Step) -> None:
        self._improved = False

    def on_validation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        name = str(self.config.metric).removeprefix("val/")
        # all ranks, once per validation: the decision must not differ, even if last bits did
        value = Comm.world().broadcast_json(means.get(name))
        self._improved = value is not None and self._improves(value, run.config.checkpointing.higher_is_better)
        if self._improved:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def _improves(self, value: float, higher: bool) -> bool:
        # NaN: as the first value it would be the best one for good, since nothing compares as better
        if value != value:
            return False
        return self.best is None or (value - self.best) * (1 if higher else -1) > self.config.min_delta

    def stop_reason(self) -> str | None:
        if self.waited < self.config.patience:
            return None
        more = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        since = f"step {self.best_step}, where it was {self.best:.6g}" if self.best is not None else "the start"
        waited = "1 validation" if self.waited == 1 else f"{self.waited} validations"
        return f"{self.config.metric} has not improved{more} in {waited} since {since}"

    def wants_checkpoint(self) -> bool:
        return self._improved

    def state_dict(self) -> dict[str, Any]:
        named = {"metric": self.config.metric, "best": self.best, "best_step": self.best_step}
        return {**named, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["metric"] == self.config.metric:
            self.best = None if state["best"] is None else float(state["best"])
            self.best_step, self.waited = int(state["best_step"]), int(state["waited"])
