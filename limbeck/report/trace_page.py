"""Traces as one page: the conversations, which calls failed, the hints, who reads what, and what is compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from limbeck.errors import LimbeckError
from limbeck.report.alignment import box
from limbeck.report.page import Page
from limbeck.report.reasons import explain
from limbeck.report.series import format_number
from limbeck.tokens import ByteTokenizer
from limbeck.traces import ComposerDataCollator
from limbeck.traces.collate.rows import HintRow, Skipped
from limbeck.traces.failed_calls import FailedCall, FailedCallFinder
from limbeck.traces.schema import Message, Trace

FOLD = 1500
"""Characters of a text that are shown before the rest is folded away."""
_CONTEXT = 4000
_PLACES = {
    "system": "a system turn of its own",
    "append": "the end of the turn before",
    "user": "a user's turn of its own",
}
_SCORES = {"failed": "the failed message", "hinted": "the same behind its hint", "better": "a better message"}


@dataclass
class TraceView:
    """Material of a page of traces.

    Attributes:
        collator: renders traces for student and teacher; None shows conversations and hints alone.
        failed_calls: trace id -> its failed calls; by default they are found here.
        scores: model -> rows of ``evaluate_traces``: log-probabilities, in the order of the table's columns.
    """

    traces: Sequence[Trace]
    collator: ComposerDataCollator | None = None
    failed_calls: Mapping[str, Sequence[FailedCall]] | None = None
    scores: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    names: tuple[str, str] = ("student", "teacher")
    notes: Sequence[str] = ()

    def page(self, title: str) -> Page:
        outcomes: Counter[str] = Counter()
        pages = [self._trace(number, trace, outcomes) for number, trace in enumerate(self.traces)]
        failures = [site for page in pages for message in page["messages"] for site in message["sites"]]
        matters = next((site for site in failures if not site["reason"]), failures[0] if failures else None)
        facts = [("traces", f"{len(pages):,}"), ("failed results", f"{outcomes.total():,}")]
        if self.collator is not None:
            both = [("student", self.names[0]), ("hinted teacher", self.names[1])]
            facts += both if self.collator.teacher is not self.collator.student else [("model", self.names[0])]
        data = {
            "facts": facts,
            "notes": list(self.notes),
            "traces": pages,
            "failed": outcomes.total(),
            "failures": failures,
            "opens": "" if matters is None else matters["anchor"],
            "reasons": [(r, {"meaning": _meaning(r)}, f"{n:,}") for r, n in outcomes.most_common()],
            "fold": FOLD,
            "footer": "limbeck",
        }
        return Page("traces", title, data)

    # -- one trace ------------------------------------------------------------------------------------------------

    def _trace(self, number: int, trace: Trace, outcomes: Counter[str]) -> dict[str, Any]:
        # not for the weight: with 0 the messages that put a failure right are not looked for
        finder = FailedCallFinder(recovery_weight=1.0)
        failures = finder.find(trace) if self.failed_calls is None else list(self.failed_calls.get(trace.id, ()))
        rows, problems = self._rows(trace, failures)
        callers = trace.callers()
        failed_calls: dict[int, list[dict[str, Any]]] = {}
        for failed_call in failures:
            outcome = rows.get((failed_call.target, failed_call.cause))
            box = self._failed_call(trace, number, failed_call, outcome)
            outcomes[box["reason"] or "trained on"] += 1
            failed_calls.setdefault(failed_call.target, []).append(box)
        left_out = finder.reasons if self.failed_calls is None else {}
        for cause, reason in left_out.items():
            outcomes[reason] += 1
            target = callers.get(cause, (cause, 0))[0]
            failed_calls.setdefault(target, []).append(_left_out(trace, number, target, cause, reason))
        failed = {i: callers.get(i) for i, message in trace.new_messages() if message.is_error}
        wrong = {caller for caller in failed.values() if caller is not None}
        messages = [_message(i, m, failed_calls.get(i, []), wrong) for i, m in enumerate(trace.messages)]
        return {
            "anchor": f"trace-{number}",
            "id": trace.id,
            "reward": None if trace.final_reward is None else format_number(trace.final_reward),
            "origin": "" if trace.origin is None else f"{trace.origin.file} ({trace.origin.format})",
            "failed": len(failed),
            "problems": problems,
            "messages": messages,
        }

    def _rows(
        self, trace: Trace, failed_calls: Sequence[FailedCall]
    ) -> tuple[dict[tuple[int, int | None], HintRow | Skipped], list[str]]:
        """Outcome of each failed call, by target and cause."""
        if self.collator is None or not failed_calls:
            return {}, []
        try:
            outcomes = self.collator.hint_outcomes(trace, failed_calls)
        except LimbeckError as error:
            return {}, [f"The chat template cannot show this trace: {error}"]
        return {(target.message, target.cause): row for target, row in outcomes if not target.recovery}, []

    def _failed_call(
        self, trace: Trace, number: int, failed_call: FailedCall, outcome: HintRow | Skipped | None
    ) -> dict[str, Any]:
        box = _left_out(
            trace, number, failed_call.target, failed_call.cause, outcome.reason if isinstance(outcome, Skipped) else ""
        )
        box |= {
            "tool": failed_call.tool or "",
            "recovery": failed_call.recovery,
            "hint": failed_call.hint,
            "source": failed_call.hint_source,
            "scores": self._score_table(trace.id, failed_call.target),
        }
        if isinstance(outcome, HintRow) and self.collator is not None:
            box |= _compared(self.collator, outcome)
        return box

    def _score_table(self, trace: str, message: int) -> dict[str, Any] | None:
        scored = [
            next((row for row in rows if (row.get("trace"), row.get("message")) == (trace, message)), {})
            for rows in self.scores.values()
        ]
        lines = [
            [title, *("" if row.get(key) is None else format_number(row[key]) for row in scored)]
            for key, title in _SCORES.items()
            if any(row.get(key) is not None for row in scored)
        ]
        return {"columns": list(self.scores), "rows": lines} if lines else None


def _message(
    index: int, message: Message, failed_calls: list[dict[str, Any]], wrong: set[tuple[int, int]]
) -> dict[str, Any]:
    calls = [
        {
            "name": call.name,
            "arguments": call.arguments
            if isinstance(call.arguments, str)
            else json.dumps(call.arguments, ensure_ascii=False, indent=2),
            "failed": (index, position) in wrong,
        }
        for position, call in enumerate(message.tool_calls)
    ]
    tags = [f"failed: {message.error_kind} ({message.detector})"] if message.is_error else []
    tags += ["target"] if any(not failed_call["reason"] for failed_call in failed_calls) else []
    return {
        "index": index,
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning or "",
        "calls": calls,
        "failed": message.is_error,
        "target": any(call["failed"] for call in calls) or bool(failed_calls),
        "tags": tags,
        "sites": failed_calls,
    }


def _left_out(trace: Trace, number: int, target: int, cause: int, reason: str) -> dict[str, Any]:
    """A failed result with the reason why it is not trained on, if there is one."""
    return {
        "anchor": f"site-{number}-{cause}",
        "trace": trace.id,
        "kind": trace.messages[cause].error_kind or "environment",
        "tool": "",
        "target": target,
        "cause": cause,
        "recovery": None,
        "hint": "",
        "source": "",
        "placement": "",
        "reason": reason,
        "meaning": explain(reason),
        "scores": None,
        "student": None,
        "teacher": None,
        "compared": "",
        "boxes": [],
    }


def _meaning(reason: str) -> str:
    return "a row of the hint channel" if reason == "trained on" else explain(reason)


# -- what the two sides read -------------------------------------------------------------------------------------------


def _compared(collator: ComposerDataCollator, row: HintRow) -> dict[str, Any]:
    student, teacher = collator.student.tokenizer, collator.teacher.tokenizer
    return {
        "placement": _PLACES[collator.placement()],
        "student": _reads(student, row.student_ids, int(row.student_positions[0]), ""),
        "teacher": _reads(teacher, row.teacher_ids, int(row.teacher_positions[0]), row.target.hint),
        "compared": f"{row.compared:,} of {row.said:,} bytes of what the message says",
        "boxes": _boxes(student, teacher, row),
    }


def _reads(tokenizer: ByteTokenizer, ids: Any, first: int, hint: str) -> dict[str, Any]:
    """The end of a sequence: what stands in front of the target, with the hint apart, and the target."""
    before = "".join(_spelled(tokenizer, ids[:first].tolist()))
    parts = [before]
    # a template may write a turn as JSON, in which quotes and line ends are escaped
    for written in (hint, json.dumps(hint, ensure_ascii=False)[1:-1]) if hint else ():
        # the last one: the hint stands directly before its target, and its words may occur earlier
        hint_start = before.rfind(written)
        if hint_start >= 0:
            parts = [before[:hint_start], written, before[hint_start + len(written) :]]
            break
    start = parts[0]
    return {
        "tokens": len(ids),
        "cut": len(start) > _CONTEXT,
        "before": [{"text": text[-_CONTEXT:] if i == 0 else text, "hint": i == 1} for i, text in enumerate(parts)],
        "target": "".join(_spelled(tokenizer, ids[first:].tolist())),
    }


def _spelled(tokenizer: ByteTokenizer, ids: Sequence[int]) -> list[str]:
    """Each token's text; bytes that are no whole character are shown by a sign."""
    contents = {number: content for content, number in tokenizer.special_ids.items()}
    vocab, out, waiting = tokenizer.vocab, [], b""
    for number in ids:
        if number in contents:
            out.append(waiting.decode("utf-8", "replace") + contents[number])
            waiting = b""
            continue
        waiting += vocab.token_bytes[number]
        try:
            out.append(waiting.decode())
            waiting = b""
        except UnicodeDecodeError:
            out.append("")
    return [*out, waiting.decode("utf-8", "replace")] if waiting else out


def _boxes(student: ByteTokenizer, teacher: ByteTokenizer, row: HintRow) -> list[dict[str, Any]]:
    """The student's target in order: chunks with the teacher's tokens, and tokens that nothing is compared with."""
    chunks, kinds = row.chunks, row.chunks.kinds()
    of = np.full(len(row.student_ids), -1, dtype=np.int64)
    for number, (start, end) in enumerate(zip(chunks.student_start, chunks.student_end, strict=True)):
        of[start:end] = number
    boxes: list[dict[str, Any]] = []
    last = -1
    for position in row.student_positions.tolist():
        number = int(of[position])
        if number < 0:
            token = student.vocab.display([int(row.student_ids[position])])
            alone = {"kind": "alone", "title": "not compared", "student": token, "teacher": [], "ends_line": False}
            boxes.append(alone)
        elif number != last:
            boxes.append(_chunk(student, teacher, row, number, kinds[number]))
        last = number
    return boxes


def _chunk(student: ByteTokenizer, teacher: ByteTokenizer, row: HintRow, number: int, kind: str) -> dict[str, Any]:
    chunks = row.chunks
    mine = row.student_ids[chunks.student_start[number] : chunks.student_end[number]].tolist()
    theirs = row.teacher_ids[chunks.teacher_start[number] : chunks.teacher_end[number]].tolist()
    return box(
        {
            "kind": kind,
            "exact": bool(chunks.exact[number]),
            "role": bool(chunks.role[number]),
            "student_ids": mine,
            "teacher_ids": theirs,
            "student_tokens": _spelled(student, mine),
            "teacher_tokens": _spelled(teacher, theirs),
            "text": student.vocab.join(mine).decode("utf-8", "replace"),
        }
    )
