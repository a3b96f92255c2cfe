"""Published `.pt` projection matrices into Limbeck's format, without running what such a file may carry.

The published form is a torch file of a dict with `indices` (integers [V_s, k]) and `likelihoods` (floats [V_s, k]), and
up to three notes about its making. It is read with `weights_only=True`, and anything beyond that form is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Only the name of the error that torch raises for a file with code in it.
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError
from limbeck.projection.matrix import MAX_VOCAB, MAX_WIDTH, ROW_SUM_TOLERANCE, Projection, from_triples
from limbeck.projection.rules import exact_partners, refuse_empty_overlap
from limbeck.tokens import ByteTokenizer

_NOTES: dict[str, type] = {"student_model_id": str, "teacher_model_id": str, "enable_scale_trick": bool}


@dataclass(frozen=True)
class Conversion:
    """A converted matrix and what had to be changed to make it one.

    Attributes:
        projection: the matrix; its `exact` pairs come from the tokenizers' bytes, not from the file.
        rows_cut: rows past the student tokenizer's ids that held weights (rows of a padded head).
        rows_missing: student ids that the file has no row for; they stay unmapped.
        entries_cut: entries that point past the teacher tokenizer's ids.
        rows_rescaled: rows whose weights did not sum to 1.
    """

    projection: Projection
    rows_cut: int
    rows_missing: int
    entries_cut: int
    rows_rescaled: int


def convert_published(path: str | os.PathLike[str], student_tokenizer: object, teacher_tokenizer: object) -> Conversion:
    """Read a published matrix for the given tokenizers. The file does not say for which tokenizers it was made beyond
    its sizes, so the result is bound to the ones given here."""
    target = Path(path)
    indices, likelihoods, notes = _read(target)
    of_student, of_teacher = ByteTokenizer.of(student_tokenizer), ByteTokenizer.of(teacher_tokenizer)
    student, teacher = of_student.vocab, of_teacher.vocab
    student_ids, teacher_ids = of_student.canonical_ids(), of_teacher.canonical_ids()
    refuse_empty_overlap(student_ids, teacher_ids)

    filled = (likelihoods > 0) & (indices >= 0)
    rows_cut = int(filled[student.size :].any(axis=1).sum())
    indices, likelihoods, filled = indices[: student.size], likelihoods[: student.size], filled[: student.size]
    outside = filled & (indices >= teacher.size)
    rows, slots = np.nonzero(filled & ~outside)
    if not rows.size:
        raise ProjectionError(f"{target}: no entry lies within {student.size} student and {teacher.size} teacher ids.")
    sums = np.where(filled & ~outside, likelihoods, 0).sum(axis=1)
    out_indices, out_weights = from_triples(
        rows, indices[rows, slots], likelihoods[rows, slots], shape=(student.size, teacher.size), k=indices.shape[1]
    )
    projection = Projection(
        indices=out_indices,
        weights=out_weights,
        exact=exact_partners(student, teacher, student_ids, teacher_ids),
        teacher_size=teacher.size,
        student_fingerprint=student.fingerprint,
        teacher_fingerprint=teacher.fingerprint,
        rule="converted",
        details={"source": target.name, **{name: str(value) for name, value in notes.items()}},
    )
    return Conversion(
        projection=projection,
        rows_cut=rows_cut,
        rows_missing=max(0, student.size - indices.shape[0]),
        entries_cut=int(outside.sum()),
        rows_rescaled=int(((np.abs(sums - 1) > ROW_SUM_TOLERANCE) & (sums > 0)).sum()),
    )


def _read(target: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], dict[str, str | bool]]:
    import torch

    if not target.is_file():
        raise ProjectionError(f"there is no matrix at {target}; give a published `.pt` file.")
    try:
        content = torch.load(target, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ProjectionError(
            f"{target} is no file of plain tensors ({reason[:120]}); expected a dict of `indices` and `likelihoods`."
        ) from None
    if not isinstance(content, dict) or not {"indices", "likelihoods"} <= content.keys():
        content_keys = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ProjectionError(f"{target} holds {content_keys}, expected a dict of `indices` and `likelihoods`.")
    notes = {name: value for name, value in content.items() if name not in ("indices", "likelihoods")}
    for name, value in notes.items():
        if name not in _NOTES or not isinstance(value, _NOTES[name]):
            raise ProjectionError(f"{target} holds the unknown entry {name!r} ({type(value).__name__}); refused.")
    _check_tensors(target, content["indices"], content["likelihoods"])
    indices = content["indices"].to(torch.int64).numpy()
    # numpy has no bfloat16, in which such files may be stored
    likelihoods = content["likelihoods"].to(torch.float64).numpy()
    if not np.isfinite(likelihoods).all() or (likelihoods < 0).any():
        row = int(np.flatnonzero((~np.isfinite(likelihoods) | (likelihoods < 0)).any(axis=1))[0])
        raise ProjectionError(f"{target}: row {row} of `likelihoods` holds a value that is negative, NaN or infinite.")
    if (indices < -1).any():
        raise ProjectionError(f"{target}: `indices` holds {int(indices.min())}, expected teacher ids or -1.")
    return indices, likelihoods, notes


def _check_tensors(target: Path, indices: Any, likelihoods: Any) -> None:
    """Types and shapes, before any copy: a small file can claim a huge shape."""
    import torch

    kinds = {
        "indices": (torch.int32, torch.int64),
        "likelihoods": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
    for name, value in (("indices", indices), ("likelihoods", likelihoods)):
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dtype not in kinds[name]:
            kind = f"{value.dtype} {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ProjectionError(f"{target}: `{name}` is {kind}, expected a dense tensor of {kinds[name]}.")
        # strides of 0 let a few stored bytes claim any shape, and a copy would fill the memory
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ProjectionError(
                f"{target}: `{name}` claims the shape {tuple(value.shape)}, which the file does not hold."
            )
    shape = tuple(indices.shape)
    if (
        len(shape) != 2
        or shape != tuple(likelihoods.shape)
        or not (1 <= shape[0] <= MAX_VOCAB and 1 <= shape[1] <= MAX_WIDTH)
    ):
        raise ProjectionError(
            f"{target}: shapes {shape} and {tuple(likelihoods.shape)}, expected two equal [V_s, k], k <= {MAX_WIDTH}."
        )
