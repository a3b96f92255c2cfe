"""Layers are compiled behind the first step of runs that are long enough, and a resumed run computes the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import build
from limbeck.algorithms.observers import compilation
from tests.helpers import runs


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled, and when a step was taken; a CPU counts as a device that gains by it."""
    found: list[str] = []
    compile_layer, chosen = torch.nn.Module.compile, compilation.Compilation.on_step

    def compiled(self: torch.nn.Module, **more: Any) -> None:
        found.append("compiled")
        compile_layer(self, backend="eager")

    def on_step(self: Any, run: Any, step: Any) -> None:
        found.append(f"step {step.number}")
        chosen(self, run, step)

    def models(run: Any) -> list[Any]:
        return [run.student, *(teacher.policy for teacher in run.teachers)]

    monkeypatch.setattr(build, "fit_to_device", lambda cfg, device: (cfg, []))
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(compilation.Compilation, "on_step", on_step)
    monkeypatch.setattr(compilation, "_open", models)
    return found


def write(folder: Path, steps: int) -> Path:
    more = {
        "max_num_steps": steps,
        "val_period": 0,
        "val_at_start": False,
        "val_at_end": False,
        "samples": {"number": 0},
    }
    return runs.write_run(folder, distillation=more, checkpointing={"enabled": True, "save_period": 2})


def test_a_long_run_compiles_behind_its_first_step(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "COST", 0.0)
    code, _, err = runs.limbeck("train", write(tmp_path, 3), "-q")
    assert code == 0, err
    assert "compiling" in err
    assert events[0] == "step 1"
    assert "compiled" in events[1:]


def test_a_short_run_does_not(tmp_path: Path, events: list[str]) -> None:
    code, _, err = runs.limbeck("train", write(tmp_path, 3), "-q")
    assert code == 0, err
    assert events == ["step 1", "step 2", "step 3"]


def test_a_resumed_run_compiles_at_once(tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "COST", 0.0)
    run_file = write(tmp_path, 2)
    assert runs.limbeck("train", run_file, "-q")[0] == 0
    monkeypatch.setattr(compilation, "COST", 1e9)
    events.clear()
    code, _, err = runs.limbeck("train", run_file, "distillation.max_num_steps=4", "-q")
    assert code == 0, err
    assert events.index("compiled") < events.index("step 3")
