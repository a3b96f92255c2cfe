"""Compiles the layers of a run's models after its first step, where the run is long enough to gain by it.

A first step that nothing is compiled for comes ten times as soon. What is chosen depends on sizes alone and is kept in
checkpoints, so that a resumed run computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from limbeck.algorithms.run import Observer, Run, Step, steps_of
from limbeck.models.causal import layers_of, setting, unwrap
from limbeck.models.language_model import LanguageModel
from limbeck.teachers.live import LiveTeacher

COST = 30.0
"""Seconds that the compiler takes for two models, on an H200's host with empty caches; 8 with full ones."""
GAIN = 4.5e-11
"""Seconds saved per token, layer and width of a forward pass; a backward pass saves twice as much. By the benchmark
`benchmarks/gpu/first_run.py`, on an H200."""
WORTH = 1.0
"""Times its cost that compiling must save."""


class Compilation(Observer):
    """Nothing on a CPU, for models that are split over ranks, and where ``compile`` says yes or no."""

    name = "compilation"

    def __init__(self) -> None:
        self.pays: bool | None = None

    def on_start(self, run: Run) -> None:
        if self.pays:
            _compile(run)

    def on_step(self, run: Run, step: Step) -> None:
        if self.pays is not None:
            return
        models = _open(run)
        tokens = step.tokens / run.student.dims.data.size * (steps_of(run.config, run.loader) - step.number)
        saved = GAIN * tokens * sum(_width(model) * (3 if model is run.student else 1) for model in models)
        self.pays = saved > WORTH * COST
        if self.pays and models:
            run.logger.print(
                f"compiling the models' layers, which takes half a minute and saves this run about {saved / 60:.0f} min"
            )
            _compile(run)

    def state_dict(self) -> dict[str, Any]:
        return {"pays": self.pays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pays = state["pays"]


def _open(run: Run) -> list[LanguageModel]:
    """The run's models for which nobody has said whether they are compiled, and that can be."""
    models = [run.student, *(teacher.policy for teacher in run.teachers if isinstance(teacher, LiveTeacher))]
    return [
        model
        for model in models
        if model.cfg.compile.enabled is None and model.device.type == "cuda" and not model.sharding.is_sharded
    ]


def _width(model: LanguageModel) -> int:
    """Layers times hidden size."""
    return len(list(layers_of(model.body))) * int(setting(unwrap(model.model).config, "hidden_size", "n_embd") or 0)


def _compile(run: Run) -> None:
    # nobody has asked for it: layers that the compiler cannot take stay as they are, and torch says so
    torch._dynamo.config.suppress_errors = True
    for model in _open(run):
        # one graph for passes of any length: micro-batches that nobody has named differ in theirs
        model.compile_layers(dynamic=True)
