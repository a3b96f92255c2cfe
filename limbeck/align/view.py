"""An alignment as plain data, for people and programs: what ``limbeck align`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from limbeck.align.aligner import TokenAligner, count_added_spaces
from limbeck.align.boundaries import Chunks
from limbeck.tokens import ByteTokenizer, ByteVocab, TokenizedText, render_chat
from limbeck.tokens.tokenized_text import Segment
from limbeck.tokens.vocab import as_text

KINDS = ("1:1", "1:n", "n:1", "n:m")


def view_text(student_tokenizer: object, teacher_tokenizer: object, text: str) -> dict[str, Any]:
    """Align two tokenizations of a plain text."""
    sides = [ByteTokenizer.of(t) for t in (student_tokenizer, teacher_tokenizer)]
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


def build_view(aligner: TokenAligner, student: TokenizedText, teacher: TokenizedText) -> dict[str, Any]:
    """``{"student", "teacher", "chunks", "summary"}`` of two renderings.

    A side's ``left_out`` lists its supervised tokens that are in no chunk, stretch by stretch, with the reason.
    """
    counts: Counter[str] = Counter()
    chunks = aligner.align_renderings(student, teacher, counts)
    count_added_spaces(chunks, counts)
    vocabs = aligner.student_vocab, aligner.teacher_vocab
    return {
        "student": _side(student, teacher, chunks, vocabs[0]),
        "teacher": _side(teacher, student, chunks.mirrored(), vocabs[1]),
        "chunks": _chunk_rows(student, teacher, chunks, vocabs),
        "summary": _summary(student, teacher, chunks, counts),
    }


def _side(rendering: TokenizedText, other: TokenizedText, chunks: Chunks, vocab: ByteVocab) -> dict[str, Any]:
    """One side's part of a view; in ``chunks`` it is the student."""
    return {
        "fingerprint": vocab.fingerprint,
        "family": vocab.family,
        "vocabulary": vocab.size,
        "ids": rendering.ids.tolist(),
        "tokens": vocab.display(rendering.ids.tolist()),
        "bytes": len(rendering.source),
        "targets": int(rendering.loss_mask.sum()),
        "skipped": dict(rendering.skipped),
        "segments": [[s.kind, s.token_start, s.token_end] for s in rendering.segments],
        "left_out": _uncovered(rendering, other, chunks, vocab),
    }


def _uncovered(
    rendering: TokenizedText, other: TokenizedText, chunks: Chunks, vocab: ByteVocab
) -> list[dict[str, Any]]:
    depth = np.zeros(len(rendering) + 1, dtype=np.int64)
    np.add.at(depth, chunks.student_start, 1)
    np.add.at(depth, chunks.student_end, -1)
    bare = np.cumsum(depth)[:-1] == 0
    stretches = []
    for segment in rendering.segments:
        tokens = np.flatnonzero(bare[segment.token_start : segment.token_end]) + segment.token_start
        for run in np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1):
            if len(run):
                ids = rendering.ids[run].tolist()
                text = "".join(vocab.display(ids))
                where = {"message": segment.message, "kind": segment.kind, "tokens": len(ids)}
                stretches.append({**where, "text": text, "reason": _why(rendering, segment, other)})
    return stretches


def _why(rendering: TokenizedText, segment: Segment, other: TokenizedText) -> str:
    """Why tokens of a segment have no counterpart, under the names that training counts them by."""
    partners = [s for s in other.segments if (s.message, s.kind) == (segment.message, segment.kind)]
    if not partners:
        return "segment_missing"
    if segment.kind == "tool_call":
        return "call_fields_differ"
    # stripped, as the alignment pairs segments that differ in outer white space alone
    mine = rendering.source[segment.start : segment.end].strip()
    same = any(mine == other.source[s.start : s.end].strip() for s in partners)
    return "no_shared_boundary" if same else "segment_differs"


def _chunk_rows(
    student: TokenizedText, teacher: TokenizedText, chunks: Chunks, vocabs: tuple[ByteVocab, ByteVocab]
) -> list[dict[str, Any]]:
    rows = []
    for k, kind in enumerate(chunks.kinds()):
        s = student.ids[chunks.student_start[k] : chunks.student_end[k]]
        t = teacher.ids[chunks.teacher_start[k] : chunks.teacher_end[k]]
        data = student.source[chunks.byte_start[k] : chunks.byte_end[k]]
        rows.append(
            {
                "student_ids": s.tolist(),
                "teacher_ids": t.tolist(),
                "student_tokens": vocabs[0].display(s.tolist()),
                "teacher_tokens": vocabs[1].display(t.tolist()),
                "student_start": int(chunks.student_start[k]),
                "teacher_start": int(chunks.teacher_start[k]),
                "text": as_text(data),
                "bytes": data.hex(),
                "kind": kind,
                "exact": bool(chunks.exact[k]),
                "same_text": bool(chunks.same_text[k]),
                "role": bool(chunks.role[k]),
            }
        )
    return rows


def _summary(student: TokenizedText, teacher: TokenizedText, chunks: Chunks, counts: Counter[str]) -> dict[str, Any]:
    target_bytes = sum(s.end - s.start for s in student.segments)
    covered = int(np.sum((chunks.byte_end - chunks.byte_start)[chunks.same_text]))
    tokens = len(student), len(teacher)
    size = max(len(student.source), 1), max(len(teacher.source), 1)
    return {
        "chunks": len(chunks),
        "kinds": {k: chunks.kinds().count(k) for k in KINDS},
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


def merged_summary(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of several views together, with the keys that one has."""
    added = ("chunks", "exact_chunks", "target_bytes", "covered_bytes", "student_tokens", "teacher_tokens")
    total: dict[str, Any] = {key: sum(view["summary"][key] for view in views) for key in added}
    left: Counter[str] = Counter()
    for view in views:
        left.update(view["summary"]["left_out"])
    sizes = {side: max(sum(view[side]["bytes"] for view in views), 1) for side in ("student", "teacher")}
    return {
        **total,
        "kinds": {kind: sum(view["summary"]["kinds"][kind] for view in views) for kind in KINDS},
        "coverage": total["covered_bytes"] / total["target_bytes"] if total["target_bytes"] else 1.0,
        "student_tokens_per_byte": total["student_tokens"] / sizes["student"],
        "teacher_tokens_per_byte": total["teacher_tokens"] / sizes["teacher"],
        "left_out": dict(left),
    }


def summary_lines(view: dict[str, Any]) -> list[str]:
    """The summary of a view in a few sentences."""
    s = view["summary"]
    kinds = ", ".join(f"{n} {k}" for k, n in s["kinds"].items() if n) or "none"
    lines = [
        f"{s['chunks']} chunks ({kinds}); {s['exact_chunks']} exact.",
        f"{s['covered_bytes']} of {s['target_bytes']} target bytes covered ({s['coverage']:.1%}).",
        f"student {s['student_tokens']} tokens, {s['student_tokens_per_byte']:.3f} per byte; "
        f"teacher {s['teacher_tokens']} tokens, {s['teacher_tokens_per_byte']:.3f} per byte.",
    ]
    if s["left_out"]:
        lines.append("left out: " + ", ".join(f"{v} {k}" for k, v in sorted(s["left_out"].items())) + ".")
    return lines
