"""Errors, timing, logging, checkpoints and state files; imports nothing else of Limbeck.

The names below are loaded on first use, so that ``limbeck.errors`` (which every package needs) costs neither
torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limbeck.utils.checkpoint import CheckpointingConfig, CheckpointManager
    from limbeck.utils.files import safe_join
    from limbeck.utils.logger import Logger, LoggerConfig
    from limbeck.utils.state import capture_rng, load_state, restore_rng, save_state, seed_everything
    from limbeck.utils.timer import Timer

_HOME = {
    "CheckpointManager": "checkpoint",
    "CheckpointingConfig": "checkpoint",
    "Logger": "logger",
    "LoggerConfig": "logger",
    "Timer": "timer",
    "capture_rng": "state",
    "load_state": "state",
    "restore_rng": "state",
    "safe_join": "files",
    "save_state": "state",
    "seed_everything": "state",
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
