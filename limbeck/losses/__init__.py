"""Losses: sums, never means. `CrossTokenizerDistillationLossFn` composes them; the leaves are pure functions."""

from limbeck.data.layout import (
    ChunkLayout,
    TokenLayout,
    build_chunk_layout,
    build_identity_layout,
    build_token_layout,
)
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.losses.divergences import DivergenceSpec, JsdGuard, cross_entropy, divergence
from limbeck.losses.inputs import LossInputs
from limbeck.losses.settings import LossSettings
from limbeck.losses.signals import Head, HiddenSignal, LogitsSignal, Signal, TopKSignal

__all__ = [
    "ChunkLayout",
    "CrossTokenizerDistillationLossFn",
    "DivergenceSpec",
    "Head",
    "HiddenSignal",
    "JsdGuard",
    "LogitsSignal",
    "LossInputs",
    "LossSettings",
    "Signal",
    "TokenLayout",
    "TopKSignal",
    "build_chunk_layout",
    "build_identity_layout",
    "build_token_layout",
    "cross_entropy",
    "divergence",
]
