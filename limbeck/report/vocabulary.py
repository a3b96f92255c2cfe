"""Two vocabularies as a page: search a token, its spelling on the other side, its cell, the tree below it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.projection import Projection
from limbeck.projection.audit import CLASSES, Audit, Group, Masses, PairAudit
from limbeck.projection.counted import PairCounter
from limbeck.report.page import Page
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import SCRIPTS, script_of, token_class

_CLASSES = (*CLASSES, "other")


def vocabulary_page(
    projection: Projection,
    vocabularies: tuple[ByteVocab, ByteVocab],
    names: tuple[str, str],
    report: Audit,
    pair: PairAudit,
    masses: Masses,
    counter: PairCounter | None = None,
) -> Page:
    """The explorer of a projection that holds trees; ``counter``: the corpus that the audit was made with."""
    corpus = counter is not None
    cards = [
        ("Shared byte strings", f"{report.exact_tokens:,}", f"{report.exact_share:.1%} of the student's tokens"),
        ("Teacher within reach", f"{pair.teacher_reached_share:.1%}", "of its tokens"),
        ("Cells", f"{pair.cells:,}", f"{pair.one_to_one_cells:.1%} one to one, the largest of {pair.largest_cell:,}"),
    ]
    if corpus and pair.teacher_reached_mass is not None and pair.cell_agreement is not None:
        cards.append(("Unreached", f"{1 - pair.teacher_reached_mass:.2%}", "of the corpus's teacher tokens"))
        cards.append(("First tokens in one cell", f"{pair.cell_agreement:.1%}", "of the corpus's chunks"))
    data = {
        "student": names[0],
        "teacher": names[1],
        "notes": [line for line in (pair.warning,) if line],
        "cards": [{"title": title, "value": value, "below": below} for title, value, below in cards],
        "columns": [*_COLUMNS, *(_CORPUS_COLUMNS if corpus else ())],
        "classes": _rows(masses.classes),
        "scripts": _rows(masses.scripts),
        "lost": [
            {"id": t.teacher_id, "token": t.token, "starts": f"{t.starts:,}", "share": f"{t.share:.3%}", "lost": t.lost}
            for t in masses.lost_tokens
        ],
        "corpus": f"{counter.bytes:,} bytes, {counter.boundaries:,} chunks" if counter is not None else "",
        "explorer": explorer(projection, vocabularies, names, counter),
    }
    return Page("vocabulary", f"Vocabularies of {names[0]} and {names[1]}", data)


_COLUMNS = ("student tokens", "exact", "teacher tokens", "reached")
_CORPUS_COLUMNS = ("share of chunks", "unreached", "in no cell", "cells differ", "excluded")


def _rows(groups: Mapping[str, Group]) -> list[list[str]]:
    total = sum(group.starts or 0 for group in groups.values())
    return [[name.replace("_", " "), *_row(group, total)] for name, group in groups.items()]


def _row(group: Group, total: int) -> list[str]:
    cells = [
        f"{group.student_tokens:,}",
        _share(group.student_exact, group.student_tokens),
        f"{group.teacher_tokens:,}",
        _share(group.teacher_reached, group.teacher_tokens),
    ]
    if group.starts is None:
        return cells
    seen = [_share(part or 0, group.starts) for part in (group.unreached, group.lost, group.apart)]
    return [*cells, _share(group.starts, total), *seen, "-" if group.excluded is None else f"{group.excluded:.1%}"]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def explorer(
    projection: Projection,
    vocabularies: tuple[ByteVocab, ByteVocab],
    names: tuple[str, str],
    counter: PairCounter | None = None,
) -> dict[str, Any]:
    """Both vocabularies in columns, packed: what vocabulary.js unpacks in the browser.

    ``parts`` lists the columns in the order in which they lie in ``data`` (base64 of zlib), as (name, type, length);
    wide types come first, so that every column is aligned.
    """
    trees = projection.trees
    assert trees is not None
    columns: dict[str, npt.NDArray[Any]] = {}
    tables = (trees.student_cell, trees.teacher_tree), (trees.teacher_cell, trees.student_tree)
    counts = _starts(counter)
    for side, vocab, (cell, tree), seen in zip(("s", "t"), vocabularies, tables, counts, strict=True):
        spellings = tree.spellings()
        columns[f"{side}.cell"] = cell
        columns[f"{side}.spelling"] = np.fromiter((i for spelling in spellings for i in spelling), dtype=np.int32)
        if seen is not None:
            columns[f"{side}.count"] = seen.astype(np.int32)
        columns[f"{side}.length"] = vocab.byte_len.astype(np.uint16)
        columns[f"{side}.pieces"] = np.fromiter(map(len, spellings), dtype=np.uint16, count=len(spellings))
        columns[f"{side}.class"] = _numbers(vocab, _CLASSES, token_class)
        columns[f"{side}.script"] = _numbers(vocab, SCRIPTS, script_of)
        columns[f"{side}.bytes"] = np.frombuffer(b"".join(vocab.token_bytes), dtype=np.uint8)
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    raw = b"".join(np.ascontiguousarray(array).tobytes() for _, array in ordered)
    return {
        "names": list(names),
        "classes": [name.replace("_", " ") for name in _CLASSES],
        "scripts": [name.replace("_", " ") for name in SCRIPTS],
        "roles": [{str(i): role for i, role in vocab.roles.items()} for vocab in vocabularies],
        "parts": [[name, array.dtype.name, array.size] for name, array in ordered],
        "data": base64.b64encode(zlib.compress(raw, 9)).decode("ascii"),
    }


def _numbers(vocab: ByteVocab, names: Sequence[str], of: Any) -> npt.NDArray[np.uint8]:
    number = {name: i for i, name in enumerate(names)}
    return np.fromiter((number[of(data)] for data in vocab.token_bytes), dtype=np.uint8, count=vocab.size)


def _starts(counter: PairCounter | None) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """How many chunks of the corpus begin with each student and each teacher token."""
    if counter is None:
        return None, None
    rows, columns, counts = counter.pairs()
    mine, theirs = (np.bincount(ids, counts, size) for ids, size in zip((rows, columns), counter.shape, strict=True))
    return mine.astype(np.int64), theirs.astype(np.int64)
