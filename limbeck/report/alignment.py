"""An alignment as a self-contained page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u200b": "∅", "\u200d": "⁀"}

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;
color:#1c2530;background:#fbfbfa}
h1{font-size:1.4rem;margin:0 0 .2rem}p.sub{color:#5a6672;margin:.1rem 0 1.2rem}
.cards{display:flex;flex-wrap:wrap;gap:.6rem;margin:0 0 1.2rem}
.card{background:#fff;border:1px solid #dfe4e8;border-radius:8px;padding:.5rem .8rem;min-width:8rem}
.card b{display:block;font-size:1.15rem}.card span{color:#5a6672;font-size:.8rem}
.legend{font-size:.85rem;color:#5a6672;margin:.6rem 0}
.flow{display:flex;flex-wrap:wrap;gap:4px;align-items:stretch}
.chunk{border:1px solid #d5dce2;border-radius:6px;background:#fff;font:13px/1.35 ui-monospace,monospace;overflow:hidden}
.chunk div{padding:2px 5px;white-space:pre;min-height:1.35em}.chunk .t{border-top:1px dashed #d5dce2;background:#f4f7fa}
.chunk i{font-style:normal;border-right:1px solid #b8c4ce;padding-right:2px;margin-right:2px}
.chunk i:last-child{border:0;margin:0;padding:0}
.k-1n{border-color:#c98a1b;background:#fff8ea}.k-n1{border-color:#2b7fb8;background:#eef7fd}
.k-nm{border-color:#8b4bb3;background:#f8f0fd}.inexact{border-color:#c0392b;background:#fdeeee}
.role{opacity:.65}.br{flex-basis:100%;height:0}
@media (prefers-color-scheme:dark){body{background:#14181d;color:#dde3e9}
.card,.chunk{background:#1c2229;border-color:#333c46}
.chunk .t{background:#222a33;border-color:#333c46}.k-1n{background:#33290f;border-color:#c98a1b}
.k-n1{background:#0f2836;border-color:#2b7fb8}.k-nm{background:#2b1a38;border-color:#8b4bb3}.inexact{background:#3a1717}}
"""


def visible(text: str) -> str:
    """A token as it can be read: spaces as middle dots, control characters as signs."""
    return "".join("·" if c == " " else _MARKS.get(c, c) for c in text)


def summary_lines(view: dict[str, Any]) -> list[str]:
    """The summary in a few sentences."""
    s = view["summary"]
    kinds = ", ".join(f"{n} {k}" for k, n in s["kinds"].items() if n) or "none"
    lines = [
        f"{s['chunks']} chunks ({kinds}); {s['exact_chunks']} exact.",
        f"{s['covered_bytes']} of {s['target_bytes']} target bytes covered by exact chunks ({s['coverage']:.1%}).",
        f"student {s['student_tokens']} tokens, {s['student_tokens_per_byte']:.3f} per byte; "
        f"teacher {s['teacher_tokens']} tokens, {s['teacher_tokens_per_byte']:.3f} per byte.",
    ]
    if s["left_out"]:
        lines.append("left out: " + ", ".join(f"{v} {k}" for k, v in sorted(s["left_out"].items())) + ".")
    return lines


def write_alignment_page(view: dict[str, Any], path: str | Path, names: tuple[str, str]) -> None:
    """Write the alignment as one HTML file that needs nothing else."""
    Path(path).write_text(alignment_page(view, names), encoding="utf-8")


def alignment_page(view: dict[str, Any], names: tuple[str, str]) -> str:
    """The page as a string."""
    s = view["summary"]
    cards = [
        (s["chunks"], "chunks"),
        *((s["kinds"][k], f"of kind {k}") for k in s["kinds"]),
        (f"{s['coverage']:.1%}", "of target bytes in exact chunks"),
        (f"{s['student_tokens_per_byte']:.3f}", "student tokens per byte"),
        (f"{s['teacher_tokens_per_byte']:.3f}", "teacher tokens per byte"),
    ]
    shown = "".join(f'<div class="card"><b>{v}</b><span>{html.escape(label)}</span></div>' for v, label in cards)
    flow = "".join(chunk_html(c) for c in view["chunks"])
    student, teacher = map(html.escape, names)
    left_out = "; ".join(f"{v} {k}" for k, v in sorted(s["left_out"].items())) or "nothing"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Alignment of {student} and {teacher}</title>"
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{student} and {teacher}, token by token</h1>"
        f'<p class="sub">Each box is a chunk: the bytes between two token edges that both tokenizers share. '
        f"Student above, teacher below. Left out: {html.escape(left_out)}.</p>"
        f'<div class="cards">{shown}</div>'
        '<p class="legend"><span class="chunk k-1n">1:n</span> one student token, several teacher tokens '
        '<span class="chunk k-n1">n:1</span> the reverse <span class="chunk k-nm">n:m</span> several on both sides '
        '<span class="chunk inexact">not exact</span> a normaliser changed the text</p>'
        f'<div class="flow">{flow}</div></body></html>\n'
    )


def chunk_html(chunk: dict[str, Any]) -> str:
    """One chunk of a view as a box, student above teacher; pages bring the style of ``.chunk``."""
    kind = {"1:1": "", "1:n": " k-1n", "n:1": " k-n1", "n:m": " k-nm"}[chunk["kind"]]
    classes = f"chunk{kind}{'' if chunk['exact'] else ' inexact'}{' role' if chunk['role'] else ''}"
    title = f"{chunk['kind']}  student {chunk['student_ids']}  teacher {chunk['teacher_ids']}"
    rows = "".join(_side_html(side, chunk[f"{side}_tokens"]) for side in ("student", "teacher"))
    line_break = '<div class="br"></div>' if "\n" in chunk["text"] else ""
    return f'<div class="{classes}" title="{html.escape(title)}">{rows}</div>{line_break}'


def _side_html(side: str, tokens: list[str]) -> str:
    cells = "".join(f"<i>{html.escape(visible(token))}</i>" for token in tokens)
    return f'<div class="{side[0]}">{cells}</div>'
