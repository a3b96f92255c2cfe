"""On-policy: end a run whose student runs away with its own text, which would only get worse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from limbeck.algorithms.run import Observer, ObserverConfig, Run, Step
from limbeck.errors import LossError
from limbeck.utils.logger import to_means

OFTEN = 0.2
"""Share of samples that must have ended by themselves at the start, for a falling share to be a sign."""


class GuardConfig(ObserverConfig):
    """Signs that the student runs away with its own text, which end a run that would only get worse.

    What is compared with the start is compared with the mean of the first ``window`` steps.
    """

    window: int = Field(default=10, ge=1)
    """Steps at the start whose mean the later ones are compared with."""
    patience: int = Field(default=10, ge=1)
    """Steps in a row with the same sign before the run is stopped."""
    max_length_growth: float | None = Field(default=4.0, gt=1)
    """Mean length of samples against that of the start."""
    min_ended_ratio: float | None = Field(default=0.25, gt=0, lt=1)
    """Share of samples that the student ends itself, against that of the start."""
    max_repeated: float | None = Field(default=0.8, gt=0, lt=1)
    """Share of runs of tokens that were in the same sample before."""

    def observer(self) -> Observer:
        return RunawayGuard(self)


class RunawayGuard(Observer):
    """Looks at the figures of each step's samples, which are the same on every rank."""

    name = "runaway_guard"

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.start = {"length": 0.0, "ended": 0.0}
        self.steps = 0
        self.strikes = {"length_growth": 0, "ended_ratio": 0, "repeated": 0}

    def on_step(self, run: Run, step: Step) -> None:
        figures = {name: value for name, value in step.metrics.items() if name.startswith("sample/")}
        step.metrics.update(self.observe(to_means(figures)))

    def observe(self, means: Mapping[str, float]) -> dict[str, float]:
        """Ratios to the start, once it is known.

        Raises:
            LossError: a sign has been there for ``patience`` steps.
        """
        if "sample/length" not in means:
            return {}
        length, ended = means["sample/length"], means["sample/ended"]
        config, seen = self.config, {"repeated": means.get("sample/repeated", 0.0)}
        if self.steps < config.window:
            self.steps += 1
            self.start = {
                "length": self.start["length"] + (length - self.start["length"]) / self.steps,
                "ended": self.start["ended"] + (ended - self.start["ended"]) / self.steps,
            }
        else:
            seen["length_growth"] = length / max(self.start["length"], 1e-9)
            if self.start["ended"] >= OFTEN:
                seen["ended_ratio"] = ended / self.start["ended"]
        self._judge("length_growth", seen, config.max_length_growth, "samples are {value:.1f} times as long as first")
        self._judge(
            "ended_ratio",
            seen,
            config.min_ended_ratio,
            "{value:.0%} of the samples that ended by themselves at first still do",
            below=True,
        )
        self._judge("repeated", seen, config.max_repeated, "{value:.0%} of the samples' runs of tokens are repetitions")
        return {f"guard/{name}": value for name, value in seen.items() if name != "repeated"}

    def _judge(
        self, name: str, seen: Mapping[str, float], limit: float | None, sign: str, *, below: bool = False
    ) -> None:
        value = seen.get(name)
        bad = limit is not None and value is not None and (value < limit if below else value > limit)
        self.strikes[name] = self.strikes[name] + 1 if bad else 0
        if self.strikes[name] >= self.config.patience:
            raise LossError(
                f"{sign.format(value=value)}, in {self.strikes[name]} steps in a row (on_policy.guard allows {limit}); "
                "take a checkpoint from before, lower the learning rate, or set on_policy.anchor"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"start": dict(self.start), "steps": self.steps, "strikes": dict(self.strikes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = {name: float(value) for name, value in state["start"].items()}
        self.steps = int(state["steps"])
        self.strikes = {name: int(value) for name, value in state["strikes"].items()}
