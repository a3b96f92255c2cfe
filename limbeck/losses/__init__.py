"""Losses: sums, never means. `CrossTokenizerDistillationLossFn` composes objectives; traces have their own losses."""

from limbeck.data.layout import ChunkLayout, TokenLayout, build_token_layout
from limbeck.losses.contract import Counts, Loss, Prefetched, StudentLayout, Teacher
from limbeck.losses.distillation import (
    CrossTokenizerDistillationLossConfig,
    CrossTokenizerDistillationLossFn,
    LossInputs,
)
from limbeck.losses.divergences import DivergenceSpec, JsdGuard, cross_entropy, divergence
from limbeck.losses.signals import Head, HiddenSignal, LogitsSignal, Signal, TopKSignal

__all__ = [
    "ChunkLayout",
    "Counts",
    "CrossTokenizerDistillationLossConfig",
    "CrossTokenizerDistillationLossFn",
    "DivergenceSpec",
    "Head",
    "HiddenSignal",
    "JsdGuard",
    "LogitsSignal",
    "Loss",
    "LossInputs",
    "Prefetched",
    "Signal",
    "StudentLayout",
    "Teacher",
    "TokenLayout",
    "TopKSignal",
    "build_token_layout",
    "cross_entropy",
    "divergence",
]
