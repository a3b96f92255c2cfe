"""A projection when one is needed: from a file, from the cache, or built on the spot and cached."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from limbeck.errors import ProjectionError
from limbeck.projection.matrix import VERSION, Projection
from limbeck.projection.pairs import PairRule
from limbeck.projection.rules import DEFAULT_K, build_rules, role_partners, rule_name
from limbeck.projection.trees import Spelling, VocabTrees
from limbeck.tokens import ByteVocab, Tokenizer
from limbeck.tokens.tokenizer import Advance
from limbeck.utils import files

logger = logging.getLogger(__name__)


def cache_path(student: ByteVocab, teacher: ByteVocab, cache_dir: Path, *, k: int, reverse: bool) -> Path:
    """File of a pair of tokenizers in the cache; everything that decides the content is in its name.

    A file that an earlier release stored under the fingerprints of version 1 goes on being used.
    """
    current, earlier = (
        cache_dir / f"{of_student[:20]}_{of_teacher[:20]}_{rule_name(reverse)}_k{k}_v{VERSION}.safetensors"
        for of_student, of_teacher in (
            (student.fingerprint, teacher.fingerprint),
            (student.first_fingerprint, teacher.first_fingerprint),
        )
    )
    return earlier if earlier.exists() and not current.exists() else current


def build_trees(student_tokenizer: object, teacher_tokenizer: object, *, progress: Advance | None = None) -> VocabTrees:
    """Cells, trees and pair rules of two tokenizers."""
    of_student, of_teacher = Tokenizer.of(student_tokenizer), Tokenizer.of(teacher_tokenizer)
    student, teacher = of_student.vocab, of_teacher.vocab
    total = student.size + teacher.size

    def spelled(speller: Tokenizer, own: ByteVocab, other: ByteVocab, done: int) -> list[Spelling]:
        ids = [i for i, data in enumerate(own.token_bytes) if data]
        report = None if progress is None else lambda count, _: progress(done + count, total)
        out: list[Spelling] = [()] * own.size
        for i, spelling in zip(ids, speller.spell([own.token_bytes[i] for i in ids], report), strict=True):
            out[i] = spelling
        for i, partner in role_partners(own, other).items():
            out[i] = (partner,)
        return out

    sigma = spelled(of_student, teacher, student, 0)
    tau = spelled(of_teacher, student, teacher, teacher.size)
    rules = (
        PairRule.from_tokenizer(tokenizer, vocab.token_bytes)
        for tokenizer, vocab in ((student_tokenizer, student), (teacher_tokenizer, teacher))
    )
    return VocabTrees.from_spellings(sigma, tau, *rules)


def load_or_build(
    student_tokenizer: object,
    teacher_tokenizer: object,
    path: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    k: int = DEFAULT_K,
    reverse: bool = False,
    trees: bool = False,
    progress: Advance | None = None,
) -> Projection:
    """The projection of two tokenizers.

    With `path`, that file: it must fit the tokenizers if it exists, and is written if it does not. Without, the cache
    is searched by fingerprints, and a matrix that is missing or unreadable there is built by `rules` and stored.
    Several processes may do this at once: files appear whole, and all builders write the same content.

    trees: with cells and trees. A cached matrix without them gets them; a file at `path` is left as it is, and its
    trees are built for this process only.
    """
    student, teacher = Tokenizer.of(student_tokenizer).vocab, Tokenizer.of(teacher_tokenizer).vocab
    projection: Projection | None = None
    if path is not None:
        target = Path(path)
        if target.exists():
            projection = Projection.load(target, student, teacher)
    else:
        folder = files.cache_dir("projections") if cache_dir is None else Path(cache_dir)
        target = cache_path(student, teacher, folder, k=k, reverse=reverse)
        if target.exists():
            try:
                projection = Projection.load(target, student, teacher)
            except ProjectionError as error:
                logger.warning("the cached projection is not usable and is built anew: %s", error)
    is_given = path is not None and projection is not None
    if projection is not None and (projection.trees is not None or not trees):
        return projection
    if projection is None:
        projection = build_rules(student_tokenizer, teacher_tokenizer, k=k, reverse=reverse, progress=progress)
    if trees:
        if is_given:
            logger.info("%s holds no trees: they are built now; `limbeck project -o` stores them", target)
        projection = replace(projection, trees=build_trees(student_tokenizer, teacher_tokenizer, progress=progress))
    if is_given:
        return projection
    try:
        projection.save(target)
    except OSError as error:
        if path is not None:
            raise ProjectionError(f"the projection cannot be written to {target}: {error}.") from error
        logger.warning("the projection cannot be cached at %s (%s); it will be built again next time", target, error)
    return projection
