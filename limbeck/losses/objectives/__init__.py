"""Objectives: how one teacher's chunks become a loss. `OBJECTIVES` has those that a run file can name."""

from limbeck.losses.objectives.base import Objective, ObjectiveOptions, ProjectedObjective
from limbeck.losses.objectives.byte_prefix import BytePrefixKL, EventSets
from limbeck.losses.objectives.corrected import (
    BoundaryKL,
    ChunkLikelihood,
    NormalisedPKL,
    SameVocabulary,
    SortedProbabilities,
)
from limbeck.losses.objectives.published import PKL, Gold, HybridKL
from limbeck.losses.objectives.recent import PartitionKL, StrictKL, UnitKL
from limbeck.losses.objectives.tree_kl import TreeKL

OBJECTIVES: dict[str, type[ProjectedObjective]] = {
    cls.mode: cls
    for cls in (
        *(BoundaryKL, TreeKL, NormalisedPKL, ChunkLikelihood, SortedProbabilities),
        *(PKL, Gold, HybridKL),
        *(StrictKL, UnitKL, EventSets, BytePrefixKL, PartitionKL),
    )
}
"""Objective of each mode, for teachers with a vocabulary of their own."""

__all__ = ["OBJECTIVES", "Objective", "ObjectiveOptions", "ProjectedObjective", "SameVocabulary"]
