"""The audit of a pair as a page: one verdict, what it rests on, and the rows that were read."""

from __future__ import annotations

from typing import Any

from limbeck.report.alignment import viewer
from limbeck.report.page import Page

_MOST_ROWS = 24


def check_page(report: dict[str, Any], names: tuple[str, str]) -> Page:
    """Page of what `limbeck.check.check_pair` gave; ``names``: how student and teacher are called."""
    alignment, vocabulary, headroom = report["alignment"], report["vocabulary"], report["headroom"]
    cards = [
        {"title": "One to one", "value": f"{alignment['strict']:.1%}", "below": f"of {alignment['chunks']:,} chunks"},
        {"title": "Covered", "value": f"{alignment['coverage']:.1%}", "below": "of the supervised bytes"},
    ]
    if vocabulary["uncovered_mass"] is not None:
        below = "of the teacher's tokens in these rows"
        cards.append({"title": "Not covered", "value": f"{vocabulary['uncovered_mass']:.1%}", "below": below})
    if headroom is not None:
        cards.append(
            {
                "title": "Bits per byte",
                "first": f"{headroom['student']:.3f}",
                "value": f"{headroom['teacher']:.3f}",
                "below": "student, teacher",
                # the gap is student less teacher; bits that the teacher saves are shown with a minus
                "change": f"{-headroom['gap']:+.3f}",
                "kind": "good" if headroom["gap"] > 0 else "bad",
            }
        )
        cards.append({"title": "Divergence", "value": f"{headroom['divergence']:.2f}", "below": "nats per chunk"})
    scored = [view for view in report["views"] if any("divergence" in c for c in view.get("chunks", ()))]
    data = {
        "student": names[0],
        "teacher": names[1],
        "verdict": report["verdict"],
        "facts": [("rows", f"{report['rows']:,}"), ("data", ", ".join(report["data"]))],
        "cards": cards,
        "findings": report["findings"],
        "skipped": list(report["skipped"].items()),
        "pilot": _pilot(report["pilot"]),
        "classes": _classes(report),
        "scripts": [
            [
                name.replace("_", " "),
                f"{g['starts']:,}",
                _share(g["uncovered_by_projection"], g["starts"]),
                _share(g["uncovered_by_cells"], g["starts"]),
            ]
            for name, g in vocabulary["by_script"].items()
            if g["starts"]
        ],
        "roles": [[r["role"], r["student"] or "-", r["teacher"] or "-"] for r in report["roles"]["table"]],
        "templates": [
            (name, report["templates"][side]["text"])
            for name, side in zip(names, ("student", "teacher"), strict=True)
            if report["templates"][side]["usable"]
        ],
        "viewer": viewer((scored or report["views"])[:_MOST_ROWS], names),
    }
    return Page("check", f"{names[0]} from {names[1]}: worth it?", data)


def _pilot(pilot: dict[str, Any] | None) -> list[list[str]]:
    rows = []
    for arm in [] if pilot is None else pilot["arms"]:
        name = " ".join(f"{key}={value}" for key, value in arm["settings"].items()) or arm["name"]
        difference = "-" if "difference" not in arm else f"{arm['difference']:+.4f} ± {arm['standard_error']:.4f}"
        rows.append([name, f"{arm['bits']:.4f}", difference, f"{arm['seconds']:.0f} s"])
    return rows


def _classes(report: dict[str, Any]) -> list[list[str]]:
    """By class of text: chunks, one to one, and bits per byte of both models where they were scored."""
    scored = (report["headroom"] or {}).get("classes", {})
    rows = []
    for name, counts in report["alignment"]["classes"].items():
        bits = scored.get(name)
        figures = [f"{bits['student']:.3f}", f"{bits['teacher']:.3f}", f"{-bits['gap']:+.3f}"] if bits else ["-"] * 3
        share = _share(counts["one_to_one"], counts["chunks"])
        rows.append([name.replace("_", " "), f"{counts['chunks']:,}", share, *figures])
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
