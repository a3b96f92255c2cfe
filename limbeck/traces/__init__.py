"""Agent traces: read, find what went wrong, and collate for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limbeck.traces.collate import ComposerDataCollator
    from limbeck.traces.collate.batch import ComposerBatch
    from limbeck.traces.collate.config import CollatorConfig, TokenizerLike, TraceExample, TraceTurn
    from limbeck.traces.collate.examples import HintTarget

_HOMES = {
    "CollatorConfig": "collate.config",
    "ComposerBatch": "collate.batch",
    "ComposerDataCollator": "collate",
    "HintTarget": "collate.examples",
    "TokenizerLike": "collate.config",
    "TraceExample": "collate.config",
    "TraceTurn": "collate.config",
}

__all__ = [
    "CollatorConfig",
    "ComposerBatch",
    "ComposerDataCollator",
    "HintTarget",
    "TokenizerLike",
    "TraceExample",
    "TraceTurn",
]


def __getattr__(name: str) -> Any:
    # Reading and listing traces must not wait for torch, which only the collator needs.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"limbeck.traces.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
