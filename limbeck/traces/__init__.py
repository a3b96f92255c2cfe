"""Agent traces: read, find what went wrong, and collate for training."""

from limbeck.traces.collate import ComposerDataCollator
from limbeck.traces.collate.config import CollatorConfig, TokenizerLike, TraceExample, TraceTurn
from limbeck.traces.collate.examples import HintTarget

__all__ = [
    "CollatorConfig",
    "ComposerDataCollator",
    "HintTarget",
    "TokenizerLike",
    "TraceExample",
    "TraceTurn",
]
