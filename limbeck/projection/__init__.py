"""Projection between vocabularies: build, store, load and audit the sparse map W from student to teacher tokens."""

from limbeck.projection.audit import Audit, ClassCoverage, audit_projection
from limbeck.projection.build import load_or_build
from limbeck.projection.convert import Conversion, convert_published
from limbeck.projection.counted import PairCounter, build_counted, count_pairs
from limbeck.projection.matrix import Columns, Pairs, Projection, TeacherView
from limbeck.projection.rules import build_rules

__all__ = [
    "Audit",
    "ClassCoverage",
    "Columns",
    "Conversion",
    "PairCounter",
    "Pairs",
    "Projection",
    "TeacherView",
    "audit_projection",
    "build_counted",
    "build_rules",
    "convert_published",
    "count_pairs",
    "load_or_build",
]
