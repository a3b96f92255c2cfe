"""Objectives: how one teacher's chunks become a loss, a file each. Importing this package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

from limbeck.losses.objectives.base import (
    OBJECTIVES,
    Objective,
    ProjectedObjective,
    find_objective,
    form_of,
    read_settings,
)
from limbeck.losses.objectives.config import FORMS, ChunkConfig, DivergenceConfig, ObjectiveConfig
from limbeck.losses.objectives.same_vocabulary import SameVocabulary

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = [
    "FORMS",
    "OBJECTIVES",
    "ChunkConfig",
    "DivergenceConfig",
    "Objective",
    "ObjectiveConfig",
    "ProjectedObjective",
    "SameVocabulary",
    "find_objective",
    "form_of",
    "read_settings",
]
