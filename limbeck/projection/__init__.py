"""Projection between vocabularies: build, store, load and audit the sparse map W from student to teacher tokens."""

from limbeck.projection.audit import Audit, ClassCoverage, PairAudit, audit_pair, audit_projection
from limbeck.projection.counted import PairCounter, count_pairs
from limbeck.projection.matrix import Columns, Pairs, Projection, TeacherView
from limbeck.projection.published import Conversion, convert_published
from limbeck.projection.rules import build_rules, build_trees, load_or_build, refuse_missing
from limbeck.projection.trees import SpellingTree, VocabTrees

__all__ = [
    "Audit",
    "ClassCoverage",
    "Columns",
    "Conversion",
    "PairAudit",
    "PairCounter",
    "Pairs",
    "Projection",
    "SpellingTree",
    "TeacherView",
    "VocabTrees",
    "audit_pair",
    "audit_projection",
    "build_rules",
    "build_trees",
    "convert_published",
    "count_pairs",
    "load_or_build",
    "refuse_missing",
]
