"""Losses: sums, never means. `CrossTokenizerDistillationLossFn` composes objectives; traces have their own losses."""

from limbeck.data.layout import ChunkLayout, TokenLayout, build_token_layout
from limbeck.losses.contract import Counts, Loss, Prefetched, StudentLayout, Teacher
from limbeck.losses.distillation import (
    CrossTokenizerDistillationLossConfig,
    CrossTokenizerDistillationLossFn,
    LossInputs,
)
from limbeck.losses.divergences import DivergenceSpec, JsdGuard, cross_entropy, divergence
from limbeck.losses.signals import Head, TeacherHidden, TeacherLogits, TeacherOutput, TeacherTopK

__all__ = [
    "ChunkLayout",
    "Counts",
    "CrossTokenizerDistillationLossConfig",
    "CrossTokenizerDistillationLossFn",
    "DivergenceSpec",
    "Head",
    "JsdGuard",
    "Loss",
    "LossInputs",
    "Prefetched",
    "StudentLayout",
    "Teacher",
    "TeacherHidden",
    "TeacherLogits",
    "TeacherOutput",
    "TeacherTopK",
    "TokenLayout",
    "build_token_layout",
    "cross_entropy",
    "divergence",
]
