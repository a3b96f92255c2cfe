"""A projection when one is needed: from a file, from the cache, or built on the spot and cached."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from limbeck.errors import ProjectionError
from limbeck.projection.matrix import VERSION, Projection
from limbeck.projection.retokenise import Progress
from limbeck.projection.rules import DEFAULT_K, build_rules, rule_name
from limbeck.tokens import ByteVocab
from limbeck.utils import files

logger = logging.getLogger(__name__)


def cache_path(student: ByteVocab, teacher: ByteVocab, cache_dir: Path, *, k: int, reverse: bool) -> Path:
    """File of a pair of tokenizers in the cache; everything that decides the content is in its name."""
    parts = (student.fingerprint[:20], teacher.fingerprint[:20], rule_name(reverse), f"k{k}", f"v{VERSION}")
    return cache_dir / ("_".join(parts) + ".safetensors")


def load_or_build(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    k: int = DEFAULT_K,
    reverse: bool = False,
    progress: Progress | None = None,
) -> Projection:
    """The projection of two tokenizers.

    With `path`, that file: it must fit the tokenizers if it exists, and is written if it does not. Without, the cache
    is searched by fingerprints, and a matrix that is missing or unreadable there is built by `rules` and stored.
    Several processes may do this at once: files appear whole, and all builders write the same content.
    """
    student = ByteVocab.from_tokenizer(student_tokenizer)
    teacher = ByteVocab.from_tokenizer(teacher_tokenizer)
    if path is not None:
        target = Path(path)
        if target.exists():
            return Projection.load(target, student, teacher)
    else:
        folder = files.cache_dir("projections") if cache_dir is None else Path(cache_dir)
        target = cache_path(student, teacher, folder, k=k, reverse=reverse)
        if target.exists():
            try:
                return Projection.load(target, student, teacher)
            except ProjectionError as error:
                logger.warning("the cached projection is not usable and is built anew: %s", error)
    projection = build_rules(student_tokenizer, teacher_tokenizer, k=k, reverse=reverse, progress=progress)
    try:
        projection.save(target)
    except OSError as error:
        if path is not None:
            raise ProjectionError(f"the projection cannot be written to {target}: {error}.") from error
        logger.warning("the projection cannot be cached at %s (%s); it will be built again next time", target, error)
    return projection
