"""Failed calls: which assistant message each failed tool result puts in question.

A failed result points back, by its call id, to the message that made the call. That message is the target; the hint
goes directly before it. The later message that puts things right can be a second target with a weight of its own.
Whatever does not become a failed call is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from limbeck.traces.expected_failures import expected_failure
from limbeck.traces.hints import HintRequest, LayeredHints, LeakCheck
from limbeck.traces.schema import Message, Trace

_EXCERPT = 200


class FailedCall(BaseModel):
    """One failed call, self-explanatory enough to be audited line by line.

    Attributes:
        target: Index of the assistant message to correct.
        cause: Index of the failed tool result.
        call: Position of the failed call among the target's calls.
        weight: Share of this failed call in the hint loss; the failures of one message share a weight of 1.
        recovery: Index of the message that put it right, where there is one.
        recovery_weight: Weight of that second target; 0 leaves it out.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    trace_id: str
    target: int = Field(ge=0)
    cause: int = Field(ge=0)
    call: int = Field(default=0, ge=0)
    tool_call_id: str | None = None
    tool: str | None = None
    error_kind: str
    error_meta: dict[str, Any] = Field(default_factory=dict)
    detector: str | None = None
    hint: str = Field(min_length=1)
    hint_source: str
    weight: float = Field(default=1.0, ge=0.0)
    recovery: int | None = None
    recovery_weight: float = Field(default=0.0, ge=0.0)
    target_excerpt: str = ""
    error_excerpt: str = ""


IGNORED_KINDS = frozenset({"cancelled"})
"""Failures that say nothing about the call."""


def why_unusable(
    trace: Trace,
    caller: tuple[int, int] | None,
    result: Message,
    ignored_kinds: frozenset[str] = IGNORED_KINDS,
    *,
    all_failures: bool = False,
) -> str | None:
    """Why a failed result puts no message in question; None where it does. Hints and preference pairs ask the same.

    Args:
        caller: Message and position of the call that the result answers, as ``Trace.callers`` has it.
        all_failures: Checks that did their work and interruptions by the user count as mistakes too.
    """
    if caller is None:
        return "no_call"
    if result.error_kind in ignored_kinds:
        return f"kind_{result.error_kind}"
    target, position = caller
    if target < trace.context_until:
        return "target_in_shared_context"
    if trace.messages[target].weight == 0:
        return "unsupervised_target"
    return None if all_failures else expected_failure(trace.messages[target].tool_calls[position], result)


@dataclass
class FailedCallFinder:
    """Finds the failed calls of traces, one trace at a time.

    Args:
        hints: Where the hints come from; asked once per failed call.
        recovery_weight: Weight of the recovery message as a second target.
        ignored_kinds: Failures that say nothing about the call: by default those cancelled because a sibling failed.
        all_failures: Whether checks that did their work and interruptions by the user count as mistakes too.

    Attributes:
        skipped: Reason -> failed results that did not become failed calls.
        by_kind: Error kind -> failed calls.
        by_hint_source: Generator -> failed calls.
        reasons: Of the trace that was searched last: failed result -> why it became no failed call.

    Example:
        >>> finder = FailedCallFinder()
        >>> finder.find(Trace(id="t"))
        []
    """

    hints: LayeredHints = field(default_factory=LayeredHints)
    recovery_weight: float = 0.0
    ignored_kinds: frozenset[str] = IGNORED_KINDS
    all_failures: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    by_hint_source: Counter[str] = field(default_factory=Counter)
    reasons: dict[int, str] = field(default_factory=dict)

    def find(self, trace: Trace) -> list[FailedCall]:
        """The failed calls of one trace, in order of their causes."""
        failed_calls: list[FailedCall] = []
        self.reasons = {}
        failed = [(i, m) for i, m in trace.new_messages() if m.role == "tool" and m.is_error]
        if not failed:
            return failed_calls
        callers, check = trace.callers(), LeakCheck(trace)
        recoveries = find_recoveries(trace) if self.recovery_weight > 0 else {}
        for index, message in failed:
            failure = self._failed_call(trace, index, message, callers.get(index), recoveries.get(index), check)
            if failure is not None:
                failed_calls.append(failure)
        shared = Counter(failure.target for failure in failed_calls)
        return [
            failure.model_copy(update={"weight": failure.weight / shared[failure.target]}) for failure in failed_calls
        ]

    def _failed_call(
        self,
        trace: Trace,
        cause: int,
        message: Message,
        caller: tuple[int, int] | None,
        recovery: int | None,
        check: LeakCheck,
    ) -> FailedCall | None:
        reason = why_unusable(trace, caller, message, self.ignored_kinds, all_failures=self.all_failures)
        if caller is None or reason is not None:
            self._drop(cause, reason or "no_call")
            return None
        target, position = caller
        call = trace.messages[target].tool_calls[position]
        # None does not say why there is no hint: the counts before and after do
        leaked = self._leaks()
        hint = self.hints(HintRequest(trace, target, cause, call, check))
        if hint is None:
            self._drop(cause, "hint_leaks" if self._leaks() > leaked else "no_hint")
            return None
        kind = message.error_kind or "environment"
        self.by_kind[kind] += 1
        self.by_hint_source[hint.source] += 1
        return FailedCall(
            trace_id=trace.id,
            target=target,
            cause=cause,
            call=position,
            tool_call_id=call.id,
            tool=call.name,
            error_kind=kind,
            error_meta=message.error_meta,
            detector=message.detector,
            hint=hint.text,
            hint_source=hint.source,
            weight=trace.messages[target].weight,
            recovery=recovery,
            recovery_weight=self.recovery_weight if recovery is not None else 0.0,
            target_excerpt=_excerpt(f"{trace.messages[target].content} -> {call.name}({call.arguments})"),
            error_excerpt=_excerpt(message.content),
        )

    def _drop(self, cause: int, reason: str) -> None:
        self.skipped[reason] += 1
        self.reasons[cause] = reason

    def _leaks(self) -> int:
        return sum(count for name, count in self.hints.problems.items() if name.endswith(": leak"))

    def summary(self) -> dict[str, Any]:
        """Counts in the form that the command line prints as JSON."""
        return {
            "failed_calls": self.by_kind.total(),
            "by_kind": dict(self.by_kind.most_common()),
            "by_hint_source": dict(self.by_hint_source.most_common()),
            "skipped": dict(self.skipped.most_common()),
        }


def find_recoveries(trace: Trace) -> dict[int, int]:
    """Message -> the first one after it, and before the user speaks, that makes calls of which none fails."""
    recoveries: dict[int, int] = {}
    ahead: int | None = None
    answers: list[Message] = []
    # once, from the end: a search behind every message would be quadratic in turns
    for index in range(len(trace.messages) - 1, -1, -1):
        # before this message may become `ahead`: none is its own recovery
        if ahead is not None:
            recoveries[index] = ahead
        message = trace.messages[index]
        if message.role == "tool":
            answers.append(message)
            continue
        if message.role == "user":
            ahead = None
        elif message.tool_calls and answers and not any(answer.is_error for answer in answers):
            ahead = index
        answers = []
    return recoveries


def _excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _EXCERPT else flat[: _EXCERPT - 1] + "…"
