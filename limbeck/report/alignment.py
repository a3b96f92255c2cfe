"""An alignment as a page, and as parts of other pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limbeck.report.page import Page
from limbeck.tokens.vocab import readable

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


def alignment_page(view: dict[str, Any], names: tuple[str, str]) -> Page:
    """A view of two tokenizations; ``names``: how student and teacher are called."""
    s = view["summary"]
    cards = [
        ("Chunks", s["chunks"]),
        *((f"Of kind {kind}", count) for kind, count in s["kinds"].items()),
        ("Target bytes in exact chunks", f"{s['coverage']:.1%}"),
        ("Student tokens per byte", f"{s['student_tokens_per_byte']:.3f}"),
        ("Teacher tokens per byte", f"{s['teacher_tokens_per_byte']:.3f}"),
    ]
    data = {
        "student": names[0],
        "teacher": names[1],
        "left_out": "; ".join(f"{v} {k}" for k, v in sorted(s["left_out"].items())) or "nothing",
        "cards": [{"title": title, "value": value, "below": ""} for title, value in cards],
        "boxes": [box(chunk) for chunk in view["chunks"]],
    }
    return Page("alignment", f"Alignment of {names[0]} and {names[1]}", data)


def write_alignment_page(view: dict[str, Any], path: str | Path, names: tuple[str, str]) -> None:
    """Write the alignment as one HTML file that needs nothing else."""
    alignment_page(view, names).write(path)
