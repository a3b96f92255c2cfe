"""Errors, timing, logging, checkpoints and state files; imports nothing else of Limbeck.

The names below are loaded on first use, so that ``limbeck.utils.errors`` (which every package needs) costs neither
torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limbeck.utils.checkpoint import CheckpointingConfig, CheckpointManager
    from limbeck.utils.logger import Logger, LoggerConfig
    from limbeck.utils.paths import safe_join
    from limbeck.utils.rng import capture_rng, restore_rng, seed_everything
    from limbeck.utils.state_io import load_state, save_state
    from limbeck.utils.timer import Timer

_HOME = {
    "CheckpointManager": "checkpoint",
    "CheckpointingConfig": "checkpoint",
    "Logger": "logger",
    "LoggerConfig": "logger",
    "Timer": "timer",
    "capture_rng": "rng",
    "load_state": "state_io",
    "restore_rng": "rng",
    "safe_join": "paths",
    "save_state": "state_io",
    "seed_everything": "rng",
}

__all__ = [
    "CheckpointManager",
    "CheckpointingConfig",
    "Logger",
    "LoggerConfig",
    "Timer",
    "capture_rng",
    "load_state",
    "restore_rng",
    "safe_join",
    "save_state",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
