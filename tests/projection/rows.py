"""Projections as plain rows and matrices."""

from __future__ import annotations

import unicodedata

import numpy as np

from limbeck.projection import Projection


def row(projection: Projection, student_id: int) -> dict[int, float]:
    """One row of W as {teacher id: weight}."""
    filled = projection.indices[student_id] >= 0
    ids, weights = projection.indices[student_id][filled], projection.weights[student_id][filled]
    return {int(t): float(w) for t, w in zip(ids, weights, strict=True)}


def dense(projection: Projection) -> np.ndarray:
    """W as a full matrix, for small vocabularies only."""
    full = np.zeros((projection.student_size, projection.teacher_size))
    rows, slots = np.nonzero(projection.indices >= 0)
    full[rows, projection.indices[rows, slots]] = projection.weights[rows, slots]
    return full


def decomposed(text: str) -> str:
    """Text with its accents as separate characters."""
    return unicodedata.normalize("NFD", text)
