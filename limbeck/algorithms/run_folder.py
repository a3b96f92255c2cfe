"""What a run leaves on disk besides metrics and checkpoints, and whether an old folder may be continued."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from limbeck import __version__
from limbeck.config import dump_yaml, parse_yaml
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.utils.errors import ConfigError
from limbeck.utils.paths import write_atomic

CONFIG_NAME = "config.yaml"
# What may change between a run and its continuation: when to stop, look and save, and how fast data is read.
_FREE = (
    "logger",
    "checkpointing",
    "cluster",
    "distillation.max_num_steps",
    "distillation.max_num_epochs",
    "distillation.val_period",
    "distillation.val_at_start",
    "distillation.val_at_end",
    "distillation.val_batch_size",
    "data.num_workers",
    "data.check_records",
    "data.cache_dir",
)


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping) and node:
        return {k: v for key, child in node.items() for k, v in _flat(child, f"{path}.{key}" if path else key).items()}
    return {path: node}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every setting that decides what a run computes."""
    a, b = _flat(old), _flat(new)
    free = tuple(f"{f}." for f in _FREE)
    changed = []
    for key in sorted({*a, *b}):
        if key not in _FREE and not key.startswith(free) and a.get(key) != b.get(key):
            changed.append(f"{key}: {a.get(key)!r} -> {b.get(key)!r}")
    return changed


def open_run_folder(
    config: BaseModel, run_dir: str | Path, *, has_checkpoint: bool, versions: Mapping[str, Any]
) -> None:
    """Store the resolved configuration and versions; refuse to continue a run of another configuration."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG_NAME
    current = config.model_dump(mode="json")
    if has_checkpoint and path.is_file():
        changed = differences(parse_yaml(path.read_text(encoding="utf-8"), str(path)), current)
        if changed:
            shown = "; ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            raise ConfigError(
                f"the run folder {str(folder)!r} holds a run of another configuration ({shown}); "
                "give another logger.log_dir, or delete the folder to start anew"
            )
    write_atomic(path, dump_yaml(config))
    write_atomic(folder / "versions.json", json.dumps(dict(versions), indent=1, sort_keys=True) + "\n")


def versions(**more: Any) -> dict[str, Any]:
    """Versions of everything that decides numbers, with whatever else identifies the run."""
    found = {"limbeck": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {**found, "started": started, **more}


def write_dropped(run_dir: str | Path, dropped: Counter[str]) -> None:
    """Everything that was left out so far, by reason."""
    write_atomic(Path(run_dir) / "dropped.json", json.dumps(dict(sorted(dropped.items())), indent=1) + "\n")


def save_failed_batch(run_dir: str | Path, step: int, batch: BatchedDataDict) -> Path:
    """Keep the batch on which a step failed: tensors as safetensors, the record numbers beside them."""
    import torch
    from safetensors.torch import save_file

    folder = Path(run_dir) / f"failed_batch_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.contiguous() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    # Unnumbered keys share storage with teacher 0's.
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "batch.safetensors")
    write_atomic(folder / "records.json", json.dumps({"idx": list(batch.get("idx", []))}) + "\n")
    return folder
