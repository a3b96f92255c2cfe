"""An alignment as plain data, for people and programs: what ``limbeck align`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from limbeck.align.aligner import TokenAligner
from limbeck.align.boundaries import Chunks
from limbeck.tokens import ByteVocab, Rendering, Tokenizer, render_chat
from limbeck.tokens.vocab import as_text


def view_text(student_tokenizer: object, teacher_tokenizer: object, text: str) -> dict[str, Any]:
    """Align two tokenizations of a plain text."""
    sides = [Tokenizer.of(t) for t in (student_tokenizer, teacher_tokenizer)]
    student, teacher = (s.encode(text, bos=s.adds_bos) for s in sides)
    return build_view(TokenAligner(student_tokenizer, teacher_tokenizer), student, teacher)


def view_messages(
    student_tokenizer: object,
    teacher_tokenizer: object,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Align two renderings of a conversation, each by its tokenizer's own chat template."""
    student = render_chat(student_tokenizer, messages, tools=tools, name="student")
    teacher = render_chat(teacher_tokenizer, messages, tools=tools, name="teacher")
    return build_view(TokenAligner(student_tokenizer, teacher_tokenizer), student, teacher)


def build_view(aligner: TokenAligner, student: Rendering, teacher: Rendering) -> dict[str, Any]:
    """``{"student", "teacher", "chunks", "summary"}`` of two renderings."""
    counts: Counter[str] = Counter()
    chunks = aligner.align_renderings(student, teacher, counts)
    vocabs = aligner.student_vocab, aligner.teacher_vocab
    return {
        "student": _side(student, vocabs[0]),
        "teacher": _side(teacher, vocabs[1]),
        "chunks": _chunk_rows(student, teacher, chunks, vocabs),
        "summary": _summary(student, teacher, chunks, counts),
    }


def _side(rendering: Rendering, vocab: ByteVocab) -> dict[str, Any]:
    return {
        "fingerprint": vocab.fingerprint,
        "family": vocab.family,
        "vocabulary": vocab.size,
        "ids": rendering.ids.tolist(),
        "tokens": vocab.display(rendering.ids.tolist()),
        "bytes": len(rendering.source),
        "targets": int(rendering.target.sum()),
        "dropped": dict(rendering.dropped),
    }


def _chunk_rows(
    student: Rendering, teacher: Rendering, chunks: Chunks, vocabs: tuple[ByteVocab, ByteVocab]
) -> list[dict[str, Any]]:
    rows = []
    for k, kind in enumerate(chunks.kinds()):
        s = student.ids[chunks.student_start[k] : chunks.student_end[k]]
        t = teacher.ids[chunks.teacher_start[k] : chunks.teacher_end[k]]
        text = as_text(student.source[chunks.byte_start[k] : chunks.byte_end[k]])
        rows.append(
            {
                "student_ids": s.tolist(),
                "teacher_ids": t.tolist(),
                "student_tokens": vocabs[0].display(s.tolist()),
                "teacher_tokens": vocabs[1].display(t.tolist()),
                "text": text,
                "kind": kind,
                "exact": bool(chunks.exact[k]),
                "role": bool(chunks.role[k]),
            }
        )
    return rows


def _summary(student: Rendering, teacher: Rendering, chunks: Chunks, counts: Counter[str]) -> dict[str, Any]:
    target_bytes = sum(s.end - s.start for s in student.segments)
    covered = int(np.sum((chunks.byte_end - chunks.byte_start)[chunks.exact]))
    tokens = len(student), len(teacher)
    size = max(len(student.source), 1), max(len(teacher.source), 1)
    return {
        "chunks": len(chunks),
        "kinds": {k: chunks.kinds().count(k) for k in ("1:1", "1:n", "n:1", "n:m")},
        "exact_chunks": int(chunks.exact.sum()),
        "target_bytes": target_bytes,
        "covered_bytes": covered,
        "coverage": covered / target_bytes if target_bytes else 1.0,
        "student_tokens": tokens[0],
        "teacher_tokens": tokens[1],
        "student_tokens_per_byte": tokens[0] / size[0],
        "teacher_tokens_per_byte": tokens[1] / size[1],
        "left_out": {k: v for k, v in counts.items() if v},
    }


def summary_lines(view: dict[str, Any]) -> list[str]:
    """The summary of a view in a few sentences."""
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
