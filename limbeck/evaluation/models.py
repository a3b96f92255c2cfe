"""Which weights a name on the command line stands for: model folder, GGUF file, hub id, run folder, checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limbeck.config import read_yaml
from limbeck.errors import CheckpointError, ConfigError
from limbeck.models.checkpoint import Checkpoint
from limbeck.utils.checkpoint import CheckpointManager

_DEFAULT_METRIC = "val/bpb"


@dataclass(frozen=True)
class ModelSpec:
    """Weights to load: ``spec`` as the user wrote it, where the weights and the tokenizer are, ``step`` of a run."""

    spec: str
    weights: str
    tokenizer: str
    step: int | None = None


def is_run_folder(path: Path) -> bool:
    """Whether a folder was written by ``limbeck train``: checkpoints, or a resolved configuration with metrics."""
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    return (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()


def find_model(spec: str, checkpoint: str = "best") -> ModelSpec:
    """The weights that ``spec`` names.

    A run folder stands for one of its checkpoints: ``checkpoint`` is ``best`` (by the run's own metric, else by
    ``val/bpb``; the latest where none was stored), ``latest``, or a step number.
    """
    path = Path(spec).expanduser()
    if is_run_folder(path):
        folder = _pick(path, checkpoint)
        return _from_checkpoint(spec, folder)
    if Checkpoint(path).weights.is_dir():
        return _from_checkpoint(spec, path)
    if path.is_dir() and not (path / "config.json").is_file() and (gguf := sorted(path.glob("*.gguf"))):
        return ModelSpec(spec, str(gguf[0]), str(gguf[0]))
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{spec!r} is neither a model folder (no config.json) nor a run folder (no checkpoints).")
    where = str(path) if path.exists() else spec
    return ModelSpec(spec, where, where)


def _from_checkpoint(spec: str, folder: Path) -> ModelSpec:
    checkpoint = Checkpoint(folder)
    if not checkpoint.weights.is_dir():
        where = checkpoint.weights.relative_to(folder)
        raise CheckpointError(f"{str(folder)!r} holds no {where}; give another checkpoint of the run.")
    step = re.search(r"step_(\d+)$", folder.name)
    return ModelSpec(spec, str(checkpoint.weights), str(checkpoint.tokenizer), int(step[1]) if step else None)


def _pick(run: Path, checkpoint: str) -> Path:
    # Another process may be training in this folder: a disabled manager only reads.
    options = _checkpointing(run)
    options["metric_name"] = options["metric_name"] or _DEFAULT_METRIC
    manager = CheckpointManager({**options, "enabled": False}, run_dir=run)
    checkpoints = manager.checkpoints()
    if not checkpoints:
        raise CheckpointError(f"run {str(run)!r} has no whole checkpoint in {str(manager.checkpoint_dir)!r} yet.")
    if checkpoint in ("best", "latest"):
        chosen = manager.best() if checkpoint == "best" else manager.latest()
        assert chosen is not None
        return chosen
    named = [path for path in checkpoints if path.name == f"step_{checkpoint.removeprefix('step_')}"]
    if not named:
        steps = ", ".join(path.name.removeprefix("step_") for path in checkpoints)
        raise CheckpointError(
            f"run {str(run)!r} has no checkpoint {checkpoint!r}; give best, latest or one of its steps: {steps}."
        )
    return named[0]


def _checkpointing(run: Path) -> dict[str, Any]:
    """Where the run keeps checkpoints and how it ranks them, from its resolved configuration if there is one."""
    section: Any = {}
    if (run / "config.yaml").is_file():
        config = read_yaml(run / "config.yaml", str(run / "config.yaml"))
        section = config.get("checkpointing") if isinstance(config, dict) else None
        section = section if isinstance(section, dict) else {}
    folder = section.get("checkpoint_dir")
    # A run folder that was moved or copied carries its checkpoints inside.
    if folder is None or not Path(folder).is_dir() or (run / "checkpoints").is_dir():
        folder = str(run / "checkpoints")
    return {
        "checkpoint_dir": folder,
        "metric_name": section.get("metric_name"),
        "higher_is_better": bool(section.get("higher_is_better", False)),
    }
