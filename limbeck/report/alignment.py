"""An alignment as a page, and as parts of other pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from limbeck.report.page import Page
from limbeck.report.reasons import explain
from limbeck.tokens.vocab import readable

MOST_CHUNKS = 30_000
"""Chunks on a page; with scores that is about 15 MB."""
_KINDS = {"1:1": "", "1:n": "k-1n", "n:1": "k-n1", "n:m": "k-nm"}


def box(chunk: dict[str, Any]) -> dict[str, Any]:
    """One chunk of a view as the pages show it: student above teacher."""
    classes = [_KINDS[chunk["kind"]], "" if chunk["exact"] else "inexact", "role" if chunk["role"] else ""]
    return {
        "kind": " ".join(filter(None, classes)),
        "title": f"{chunk['kind']}  student {chunk['student_ids']}  teacher {chunk['teacher_ids']}",
        "student": [readable(token) for token in chunk["student_tokens"]],
        "teacher": [readable(token) for token in chunk["teacher_tokens"]],
        "ends_line": "\n" in chunk["text"],
    }


def viewer(views: Sequence[dict[str, Any]], names: tuple[str, str]) -> dict[str, Any]:
    """Views as the pages' viewer of alignments shows them (`viewer` in macros.html, alignment.js)."""
    return {"names": list(names), "rows": [_viewer_row(view) for view in views]}


def _viewer_row(view: dict[str, Any]) -> dict[str, Any]:
    if "problem" in view:
        return {"source": view["source"], "problem": view["problem"]}
    sides = {name: view[name] for name in ("student", "teacher")}
    left = [
        {"side": name, **piece, "text": readable(piece["text"]), "why": explain(piece["reason"]) or piece["reason"]}
        for name, side in sides.items()
        for piece in side.get("left_out", [])
    ]
    # samples of earlier runs call them "dropped"
    counts = {name: side["skipped"] if "skipped" in side else side["dropped"] for name, side in sides.items()}
    skipped = [
        {"side": name, "count": count, "why": explain(reason) or reason}
        for name, reasons in counts.items()
        for reason, count in reasons.items()
    ]
    counted = [{"side": "", "count": n, "why": explain(why) or why} for why, n in view["summary"]["left_out"].items()]
    # what a template writes around the supervised text is worth showing; a plain text has nothing around it
    reads = {
        name: {"tokens": [readable(token) for token in side["tokens"]], "segments": side.get("segments", [])}
        for name, side in sides.items()
        if any(kind != "text" for kind, _, _ in side.get("segments", []))
    }
    return {
        "source": view.get("source", ""),
        "left_out": left,
        "skipped": [*counted, *skipped],
        "reads": reads,
        "chunks": [_viewer_chunk(chunk) for chunk in view["chunks"]],
    }


def _viewer_chunk(chunk: dict[str, Any]) -> dict[str, Any]:
    box = {key: chunk[key] for key in ("kind", "exact", "role", "student_ids", "teacher_ids")}
    box["bytes"] = chunk.get("bytes", "")
    box["student"] = [readable(token) for token in chunk["student_tokens"]]
    box["teacher"] = [readable(token) for token in chunk["teacher_tokens"]]
    box["ends_line"] = "\n" in chunk["text"] or chunk["role"]  # special tokens that meet end a turn or a document
    scores = ("student_logprobs", "teacher_logprobs", "student_logprob", "teacher_logprob", "divergence")
    box.update({key: chunk[key] for key in scores if chunk.get(key) is not None})
    for key in ("student_top", "teacher_top"):
        if chunk.get(key):
            box[key] = [[readable(token), share] for token, share in chunk[key]]
    return box


def alignment_page(view: dict[str, Any], names: tuple[str, str], *, notes: Sequence[str] = ()) -> Page:
    """A view of two tokenizations, or ``{"rows": [views], "summary"}``; ``names`` of student and teacher."""
    s = view["summary"]
    rows = view.get("rows", [view])
    cards = [
        ("Chunks", f"{s['chunks']:,}", f"in {len(rows):,} rows" if len(rows) > 1 else ""),
        ("One to one", _share(s["kinds"]["1:1"], s["chunks"]), "of the chunks"),
        ("Covered", f"{s['coverage']:.1%}", "of the supervised bytes"),
        ("Student", f"{s['student_tokens_per_byte']:.3f}", "tokens per byte"),
        ("Teacher", f"{s['teacher_tokens_per_byte']:.3f}", "tokens per byte"),
        *_score_cards(rows),
    ]
    fitting = _fitting(rows)
    cut = f"The page shows the first {len(fitting):,} rows; the figures are of all."
    data = {
        "student": names[0],
        "teacher": names[1],
        "notes": [*notes, *([cut] if len(fitting) < len(rows) else [])],
        "left_out": "; ".join(f"{v:,} {explain(k) or k}" for k, v in sorted(s["left_out"].items())) or "nothing",
        "cards": [{"title": title, "value": value, "below": below} for title, value, below in cards],
        "viewer": viewer(fitting, names),
    }
    return Page("alignment", f"Alignment of {names[0]} and {names[1]}", data)


def _fitting(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The first rows, at least one, whose chunks are not too many for a page."""
    ends = accumulate(len(row.get("chunks", ())) for row in rows)
    # ends rise, so that the rows that fit are the first ones
    return rows[: max(sum(end <= MOST_CHUNKS for end in ends), 1)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _score_cards(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    chunks = [c for row in rows for c in row.get("chunks", ()) if c.get("divergence") is not None]
    if not chunks:
        return []
    mean = sum(chunk["divergence"] for chunk in chunks) / len(chunks)
    known = [c for c in chunks if c["student_logprob"] is not None and c["teacher_logprob"] is not None]
    ahead = sum(c["teacher_logprob"] > c["student_logprob"] for c in known)
    return [
        ("Divergence", f"{mean:.3f}", f"nats, mean of {len(chunks):,} chunks"),
        ("Teacher ahead", _share(ahead, len(known)), "of the chunks, by probability"),
    ]


def write_alignment_page(
    view: dict[str, Any], path: str | Path, names: tuple[str, str], *, notes: Sequence[str] = ()
) -> None:
    """Write the alignment as one HTML file that needs nothing else."""
    alignment_page(view, names, notes=notes).write(path)
