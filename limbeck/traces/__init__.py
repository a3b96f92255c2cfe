"""Agent traces: read, find what went wrong, and collate for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limbeck.traces.collator import ComposerDataCollator
    from limbeck.traces.collator_batch import ComposerBatch
    from limbeck.traces.collator_config import CollatorConfig, TokenizerLike, TraceExample, TraceTurn
    from limbeck.traces.collator_examples import HintTarget

_HOMES = {
    "CollatorConfig": "collator_config",
    "ComposerBatch": "collator_batch",
    "ComposerDataCollator": "collator",
    "HintTarget": "collator_examples",
    "TokenizerLike": "collator_config",
    "TraceExample": "collator_config",
    "TraceTurn": "collator_config",
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
