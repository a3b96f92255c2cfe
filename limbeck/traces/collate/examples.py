"""Published trace examples -> canonical traces, with the messages that are marked for correction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from limbeck.errors import TraceError
from limbeck.traces.collate.config import TraceTurn
from limbeck.traces.errors import classify_error
from limbeck.traces.failed_calls import FailedCall, FailedCallFinder
from limbeck.traces.readers.base import as_number, openai_tool_calls
from limbeck.traces.replay import NoAnswer, parse_answer
from limbeck.traces.schema import Message, PreferencePair, ToolCall, Trace, describe_validation


@dataclass(frozen=True)
class HintTarget:
    """One message to correct: what the hint channel makes of a failed call.

    Attributes:
        message: index of the assistant message.
        hint: text that the teacher reads directly before it; empty changes nothing, and then neither does the loss.
        weight: share of this target in the hint loss.
        recovery: the target is not the failed message but the one that put it right.
    """

    message: int
    hint: str
    weight: float = 1.0
    error_kind: str = ""
    hint_source: str = ""
    cause: int | None = None
    recovery: bool = False


@dataclass(frozen=True)
class Example:
    """A trace to collate. ``marked`` is the trace in which every failure is a tool result, for finding failed
    calls: messages that were only marked as wrong have one there, after them."""

    trace: Trace
    reward: float | None
    marked: Trace

    def failed(self, ignored_kinds: Collection[str] = ()) -> set[int]:
        """The assistant messages one of whose calls failed, except for failures of these kinds."""
        marked = self.marked
        wrong = [i for i, m in enumerate(marked.messages) if m.is_error and m.error_kind not in ignored_kinds]
        return {caller[0] for i in wrong if (caller := marked.caller_of(i)) is not None}

    def targets(
        self, finder: FailedCallFinder, known: Sequence[FailedCall | HintTarget] | None = None
    ) -> list[HintTarget]:
        """The messages to correct: those of ``known`` where it is given, else those that ``finder`` finds."""
        targets: list[HintTarget] = []
        for failure in finder.find(self.marked) if known is None else known:
            if isinstance(failure, HintTarget):
                targets.append(failure)
                continue
            _check_failed_call(failure, self.marked)
            target = HintTarget(
                failure.target,
                failure.hint,
                failure.weight,
                failure.error_kind,
                failure.hint_source,
                failure.cause,
            )
            targets.append(target)
            if failure.recovery is not None and failure.recovery_weight > 0:
                targets.append(replace(target, message=failure.recovery, weight=failure.recovery_weight, recovery=True))
        return targets


def _check_failed_call(failure: FailedCall, trace: Trace) -> None:
    """That a failed call is one of this trace: its target makes the call which its cause answers."""
    size = len(trace.messages)
    calls = [call.id for call in trace.messages[failure.target].tool_calls] if failure.target < size else []
    answered = trace.messages[failure.cause].tool_call_id if failure.cause < size else None
    if failure.tool_call_id is not None and not (failure.tool_call_id in calls and failure.tool_call_id == answered):
        raise TraceError(
            f"trace {trace.id!r}: message {failure.target} makes no call {failure.tool_call_id!r} that message "
            f"{failure.cause} answers; the file of failed calls belongs to other traces"
        )


def to_example(record: Any, reward_key: str) -> Example:
    """A canonical ``Trace``, its JSON form, or a published ``TraceExample`` as an :class:`Example`."""
    try:
        if isinstance(record, Trace):
            return Example(record, _trace_reward(record, reward_key), record)
        if isinstance(record, Mapping) and "messages" in record:
            trace = Trace.model_validate(dict(record))
            return Example(trace, _trace_reward(trace, reward_key), trace)
        if isinstance(record, Mapping) and "turns" in record:
            return _from_turns(record, reward_key)
    except ValidationError as error:
        name = record.get("trace_id", record.get("id")) if isinstance(record, Mapping) else None
        raise TraceError(f"trace {name!r} is not usable: {describe_validation(error)}") from error
    kind = sorted(record) if isinstance(record, Mapping) else type(record).__name__
    raise TraceError(f"expected a Trace or a dict with `turns` or `messages`, got {kind!r:.200}")


def _trace_reward(trace: Trace, key: str) -> float | None:
    return trace.final_reward if key == "final_reward" else as_number(trace.meta.get(key))


def _from_turns(record: Mapping[str, Any], reward_key: str) -> Example:
    name = str(record.get("trace_id") or "-")
    messages, wrong = _messages(record["turns"], name)
    trace = Trace(
        id=name,
        group_id=record.get("group_id"),
        tools=list(record.get("tools") or []),
        messages=messages,
        final_reward=as_number(record.get(reward_key)),
        preference_pairs=[_pair(pair, i, name) for i, pair in enumerate(record.get("dpo_pairs") or [])],
    )
    return Example(trace, trace.final_reward, _with_failures(trace, wrong))


def _messages(turns: Sequence[TraceTurn], name: str) -> tuple[list[Message], dict[int, TraceTurn]]:
    """Messages, and the assistant turns that are marked as wrong themselves."""
    messages: list[Message] = []
    wrong: dict[int, TraceTurn] = {}
    open_calls: list[ToolCall] = []
    for index, turn in enumerate(turns):
        role = turn.get("role")
        if role == "assistant":
            message = _assistant(turn, index)
            open_calls = list(message.tool_calls)
            if _is_failed(turn):
                wrong[index] = turn
        elif role == "tool":
            call = _answered(turn, open_calls)
            if call is not None:
                open_calls.remove(call)
            message = _result(turn, call)
        elif role == "system" or role == "user":
            message = Message(role="system" if role == "system" else "user", content=str(turn.get("content") or ""))
        else:
            raise TraceError(
                f"trace {name!r}, turn {index}: the role is {role!r}; expected system, user, assistant or tool"
            )
        messages.append(message)
    return messages, wrong


def _assistant(turn: TraceTurn, index: int) -> Message:
    raw_calls = turn.get("tool_call") or []
    calls = openai_tool_calls(raw_calls if isinstance(raw_calls, list) else [raw_calls])
    # Calls without an id get one that no other turn has.
    named = [
        c.model_copy(update={"id": f"turn{index:03d}{k:02d}"}) if c.id == f"call_{k}" else c
        for k, c in enumerate(calls)
    ]
    return Message(
        role="assistant",
        content=str(turn.get("content") or ""),
        reasoning=turn.get("reasoning"),
        tool_calls=named,
    )


def _answered(turn: TraceTurn, open_calls: Sequence[ToolCall]) -> ToolCall | None:
    """The call that a tool turn answers: by its id, else the first one that has no answer yet."""
    raw_call = turn.get("tool_call")
    call_id = turn.get("tool_call_id") or (raw_call.get("id") if isinstance(raw_call, Mapping) else None)
    if call_id is None:
        return open_calls[0] if open_calls else None
    return next((call for call in open_calls if call.id == call_id), None)


def _result(turn: TraceTurn, call: ToolCall | None) -> Message:
    message = Message(
        role="tool",
        content=str(turn.get("content") or ""),
        tool_call_id=call.id if call is not None else turn.get("tool_call_id"),
        name=turn.get("name") or (call.name if call is not None else None),
    )
    return _failed(message, turn, call) if _is_failed(turn) else message


def _is_failed(turn: TraceTurn) -> bool:
    """Whether a turn is marked; an empty kind is a mark, too."""
    return turn.get("tool_error") not in (None, False)


def _failed(message: Message, turn: TraceTurn, call: ToolCall | None) -> Message:
    tool_error = turn.get("tool_error")
    meta = dict(turn.get("error_meta") or {})
    kind = tool_error if isinstance(tool_error, str) and tool_error else meta.get("kind") or meta.get("error_kind")
    if not isinstance(kind, str):
        kind, meta = classify_error(message.content, call=call, meta=meta)
    update = {"is_error": True, "error_kind": kind, "error_meta": meta, "detector": "tool_error"}
    return message.model_copy(update=update)


def _with_failures(trace: Trace, wrong: Mapping[int, TraceTurn]) -> Trace:
    """The trace in which every marked assistant message has a failed result.

    A result that is there already is taken. Others are put at the end, so that every index stays valid.
    """
    if not wrong:
        return trace
    messages = list(trace.messages)
    for index, turn in wrong.items():
        calls = messages[index].tool_calls
        current = trace.model_copy(update={"messages": messages})
        tools = [i for i in range(index + 1, len(messages)) if messages[i].role == "tool"]
        answers = [i for i in tools if (current.caller_of(i) or (-1, 0))[0] == index]
        if any(messages[i].is_error for i in answers):
            continue
        if answers:
            messages[answers[0]] = _failed(messages[answers[0]], turn, calls[0])
            continue
        if not calls:
            calls = [ToolCall(id=f"turn{index:03d}", name="action", in_content=True)]
            messages[index] = messages[index].model_copy(update={"tool_calls": calls})
        meta = turn.get("error_meta") or {}
        text = str(meta.get("message") or meta.get("error") or "")
        result = Message(role="tool", tool_call_id=calls[0].id, name=calls[0].name, content=text)
        messages.append(_failed(result, turn, calls[0]))
    return trace.model_copy(update={"messages": messages})


def _pair(pair: Mapping[str, Any], index: int, name: str) -> PreferencePair:
    try:
        state, _ = _messages([_as_turn(message) for message in pair["state_messages"]], name)
        return PreferencePair(
            chosen=_side(pair["chosen"]),
            rejected=_side(pair["rejected"]),
            trace_id=name,
            prompt=state,
            weight=float(pair.get("weight", 1.0)),
            provenance=dict(pair.get("provenance") or {}),
        )
    except KeyError as error:
        raise TraceError(
            f"trace {name!r}, preference pair {index} has no {error.args[0]!r}; it needs state_messages, chosen and "
            "rejected"
        ) from error
    except NoAnswer as error:
        raise TraceError(
            f"trace {name!r}, preference pair {index}: a side is no assistant message ({error})"
        ) from error


def _as_turn(message: Any) -> TraceTurn:
    """A message of a state in any of the published forms, or a canonical one, as a turn."""
    turn = message.model_dump() if isinstance(message, Message) else dict(message)
    turn["tool_call"] = turn.get("tool_call") or turn.get("tool_calls")
    turn["reasoning"] = turn.get("reasoning") or turn.get("reasoning_content")
    return turn  # type: ignore[return-value]


def _side(answer: Any) -> Message:
    if isinstance(answer, Mapping) and answer.get("tool_call"):
        return _assistant(dict(answer), 0)  # type: ignore[arg-type]
    return parse_answer(dict(answer) if isinstance(answer, Mapping) else answer)
