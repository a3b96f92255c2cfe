"""Preference pairs by replay: what would other models have done in the state where the agent acted?

Several teachers answer from the state in front of a recorded message. Their answers are compared by structure (tool
names and sorted arguments, or normalised text). Where enough of them agree and the recorded action differs, the agreed
action is chosen and the recorded one rejected; where they disagree among themselves, nothing is learnt. Each pair
carries who voted how.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError

from limbeck.errors import TraceError
from limbeck.traces.failed_calls import why_unusable
from limbeck.traces.readers.base import as_text, openai_tool_calls
from limbeck.traces.redact import Redactor, default_redactor
from limbeck.traces.schema import Message, PreferencePair, ToolCall, Trace, describe_validation

ActionKey = tuple[Any, ...]

_FENCE = re.compile(r"```[\w-]*\n(.*?)```|<command>\n?(.*?)</command>", re.DOTALL)


class NoAnswer(TraceError):
    """A teacher gave no usable answer for one state; ``reason`` is a short countable name."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Proposer(Protocol):
    """Answers from a state with one assistant message, or raises ``NoAnswer``."""

    name: str

    async def propose(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message: ...


class CallableProposer:
    """A function ``(messages, tools) -> answer`` as a teacher; it may be async.

    The answer is text, an OpenAI-style assistant message, or a ``Message``. An exception counts as a failure.
    """

    def __init__(
        self, function: Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any | Awaitable[Any]], name: str
    ) -> None:
        self.function = function
        self.name = name

    async def propose(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message:
        try:
            answer = self.function(messages, tools)
            if inspect.isawaitable(answer):
                answer = await answer
        except NoAnswer:
            raise
        except Exception as error:  # a user's function may raise anything; one state must not end the run
            raise NoAnswer(f"raised {type(error).__name__}", str(error)) from error
        return parse_answer(answer)


def parse_answer(answer: Any) -> Message:
    """A teacher's answer as a canonical assistant message; ``NoAnswer`` where it is none."""
    if isinstance(answer, str):
        answer = {"content": answer}
    try:
        if isinstance(answer, dict):
            content = answer.get("content")
            answer = Message(
                role="assistant",
                # no `or`: 0 or an empty list is no text, and must fail the validation
                content=content if content is not None else "",
                reasoning=as_text(answer.get("reasoning_content")) or as_text(answer.get("reasoning")),
                tool_calls=openai_tool_calls(answer.get("tool_calls")),
            )
    except ValidationError as error:
        raise NoAnswer("bad_answer", describe_validation(error)) from error
    if not isinstance(answer, Message) or answer.role != "assistant":
        raise NoAnswer("bad_answer", f"an answer of type {type(answer).__name__}")
    if not answer.content.strip() and not answer.tool_calls:
        raise NoAnswer("empty_answer")
    return answer


# -- comparing actions -------------------------------------------------------------------------------------------------


def action_key(message: Message) -> ActionKey:
    """Action of a message: its calls as a sorted multiset, or its normalised text where it calls nothing."""
    if message.tool_calls:
        return ("calls", *sorted(call.key() for call in message.tool_calls))
    text = unicodedata.normalize("NFKC", message.without_reasoning().content)
    return ("text", " ".join(text.casefold().split()).rstrip(" .!?"))


def with_text_action(message: Message) -> Message:
    """For agents that act through text: the last fenced block of an answer read as its command."""
    blocks = _FENCE.findall(message.content) if not message.tool_calls else []
    if not blocks:
        return message
    command = (blocks[-1][0] or blocks[-1][1]).strip()
    call = ToolCall(id="text", name="bash", arguments={"command": command}, in_content=True)
    return message.model_copy(update={"tool_calls": [call]})


@dataclass(frozen=True)
class Proposal:
    """One teacher's answer, or why there is none."""

    teacher: str
    message: Message | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is ``pair``, ``recorded_agrees``, ``no_quorum`` or ``too_few_answers``."""

    outcome: str
    chosen: Message | None = None
    votes: int = 0
    answers: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)


def vote(recorded: Message, proposals: Sequence[Proposal], quorum: int) -> Verdict:
    """Let the answers decide: at least ``quorum`` equal ones, more than any other action got."""
    acts_in_text = any(call.in_content for call in recorded.tool_calls)
    answers = [
        (proposal.teacher, with_text_action(proposal.message) if acts_in_text else proposal.message)
        for proposal in proposals
        if proposal.message is not None
    ]
    provenance: dict[str, Any] = {
        "source": "replay",
        "quorum": quorum,
        "failures": {p.teacher: p.failure for p in proposals if p.failure is not None},
    }
    if len(answers) < quorum:
        return Verdict("too_few_answers", answers=len(answers), provenance=provenance)
    keys = [action_key(message) for _, message in answers]
    ranking = Counter(keys).most_common(2)
    winner, votes = ranking[0]
    provenance["votes"] = {teacher: key == winner for (teacher, _), key in zip(answers, keys, strict=True)}
    if votes < quorum or (len(ranking) > 1 and ranking[1][1] == votes):
        return Verdict("no_quorum", votes=votes, answers=len(answers), provenance=provenance)
    if winner == action_key(recorded):
        return Verdict("recorded_agrees", votes=votes, answers=len(answers), provenance=provenance)
    chosen = answers[keys.index(winner)][1]
    return Verdict("pair", _with_ids_of(recorded, chosen), votes, len(answers), provenance)


def _with_ids_of(recorded: Message, chosen: Message) -> Message:
    """Call ids in the recorded style: a template that prints ids must not give away which side is which."""
    known = [call.id for call in recorded.tool_calls]
    calls = [
        call.model_copy(update={"id": known[i] if i < len(known) else f"call_{i}"})
        for i, call in enumerate(chosen.tool_calls)
    ]
    return chosen.model_copy(update={"tool_calls": calls})


# -- states ------------------------------------------------------------------------------------------------------------


def error_targets(trace: Trace, *, all_failures: bool = False) -> list[int]:
    """Indices of the messages whose calls failed by mistake: those that ``FailedCallFinder`` takes as targets.

    ``all_failures``: also checks that did their work and calls that the user declined or interrupted.
    """
    callers = trace.callers()
    failed = [(callers.get(index), message) for index, message in trace.new_messages() if message.is_error]
    targets = {
        caller[0]
        for caller, message in failed
        if caller is not None and why_unusable(trace, caller, message, all_failures=all_failures) is None
    }
    return sorted(index for index in targets if _can_replay(trace, index))


def assistant_targets(trace: Trace) -> list[int]:
    """Indices of all assistant messages with something in front of them."""
    return [i for i, m in trace.new_messages() if m.role == "assistant" and _can_replay(trace, i)]


def _can_replay(trace: Trace, index: int) -> bool:
    return index >= max(1, trace.context_until) and trace.messages[index].weight > 0


@dataclass
class Replayer:
    """Asks the teachers and builds the pairs.

    Args:
        teachers: At least one; names must differ.
        quorum: Equal answers that it takes; by default more than half of the teachers.
        strip_reasoning: Leave hidden reasoning out of both sides, so that its mere presence is not what is preferred.
        batch: States in flight at a time.
        redactor: Takes secrets out of what teachers are shown and out of their answers; None leaves both as they are.

    Attributes:
        outcomes: Verdict -> states.
        failures: ``teacher: reason`` -> count.
        answers: Proposer -> usable answers.
        redacted: Kind of secret -> how many were taken out of answers.
    """

    teachers: Sequence[Proposer]
    quorum: int | None = None
    strip_reasoning: bool = True
    batch: int = 32
    redactor: Redactor | None = field(default_factory=default_redactor)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        names = [teacher.name for teacher in self.teachers]
        if not names or len(set(names)) != len(names):
            raise TraceError(f"teachers need distinct names and there must be at least one, got {names}")
        if self.quorum is None:
            self.quorum = len(names) // 2 + 1
        if not 1 <= self.quorum <= len(names):
            raise TraceError(
                f"a quorum of {self.quorum} is impossible with {len(names)} teachers: use at most that many"
            )

    async def pairs(
        self, traces: Iterable[Trace], targets: Callable[[Trace], list[int]] = error_targets
    ) -> AsyncIterator[PreferencePair]:
        """The pairs of all traces, in order."""
        waiting: list[tuple[Trace, int]] = []
        for trace in traces:
            if self.redactor is not None:
                trace, _ = self.redactor.trace(trace)
            waiting += [(trace, index) for index in targets(trace)]
            while len(waiting) >= self.batch:
                ready, waiting = waiting[: self.batch], waiting[self.batch :]
                for pair in await self._decide(ready):
                    yield pair
        for pair in await self._decide(waiting):
            yield pair

    async def _decide(self, states: list[tuple[Trace, int]]) -> list[PreferencePair]:
        verdicts = await asyncio.gather(*(self._ask(trace, index) for trace, index in states))
        pairs: list[PreferencePair] = []
        for (trace, index), verdict in zip(states, verdicts, strict=True):
            self.outcomes[verdict.outcome] += 1
            if verdict.chosen is not None:
                pairs.append(self._pair(trace, index, verdict, verdict.chosen))
        return pairs

    async def _ask(self, trace: Trace, index: int) -> Verdict:
        state = trace.to_messages()[:index]
        proposals = await asyncio.gather(*(self._propose(teacher, state, trace.tools) for teacher in self.teachers))
        assert self.quorum is not None
        return vote(trace.messages[index], proposals, self.quorum)

    async def _propose(self, teacher: Proposer, state: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Proposal:
        try:
            # Each teacher gets its own copy: a function that edits its input must not change what the others see.
            message = await teacher.propose([dict(m) for m in state], list(tools))
        except NoAnswer as failure:
            self.failures[f"{teacher.name}: {failure.reason}"] += 1
            return Proposal(teacher.name, failure=failure.reason)
        self.answers[teacher.name] += 1
        if self.redactor is not None:
            message = self.redactor.message(message, self.redacted)
        return Proposal(teacher.name, message)

    def _pair(self, trace: Trace, index: int, verdict: Verdict, chosen: Message) -> PreferencePair:
        rejected = trace.messages[index]
        if self.strip_reasoning:
            chosen, rejected = chosen.without_reasoning(), rejected.without_reasoning()
        return PreferencePair(
            trace_id=trace.id,
            message_index=index,
            prompt=trace.messages[:index],
            tools=trace.tools,
            chosen=chosen,
            rejected=rejected,
            weight=verdict.votes / verdict.answers,
            provenance=verdict.provenance,
        )

    def summary(self) -> dict[str, Any]:
        """Counts in the form that the command line prints as JSON."""
        skipped = Counter({name: n for name, n in self.outcomes.items() if name != "pair"})
        return {
            "pairs": self.outcomes["pair"],
            "states": self.outcomes.total(),
            "skipped": dict(skipped.most_common()),
            "answers": dict(self.answers.most_common()),
            "failures": dict(self.failures.most_common()),
        }
