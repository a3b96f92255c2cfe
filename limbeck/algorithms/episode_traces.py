"""Episodes as canonical traces, for all that reads traces of agents: the viewer, failed calls, hints, replay."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from limbeck.data.continuations import ReadAnswer
from limbeck.models.generate import Sample
from limbeck.traces.errors import ErrorSignal, mark_error
from limbeck.traces.schema import Message, ToolCall, Trace
from limbeck.utils.jsonl import replace_surrogates

FAILED = ErrorSignal("environment_flag")
"""The environment says of a result that its call failed, or has none because it raised an error or gave no reply."""
MALFORMED = ErrorSignal("malformed_call")
"""What the student's markup opens as a call could not be read as one."""
_NAME = re.compile(r'"name"\s*:\s*"([^"]{1,100})"')


def trace_of(
    messages: Sequence[Mapping[str, Any]],
    answers: Sequence[tuple[ReadAnswer, Sample]],
    *,
    tools: Sequence[Mapping[str, Any]],
    reward: float | None,
    step: int,
    record: int,
    copy: int,
    ending: str | None,
) -> Trace:
    """The trace of an episode, ``answers`` of which the student wrote, in this order; these have their sampled ids. An
    answer that came with the record weighs nothing."""
    written, schemas = iter(answers), [dict(replace_surrogates(tool)) for tool in tools]
    # by identity: a record may bring an answer of the same words
    by_student = {id(answer.message) for answer, _ in answers}
    out, calls, unreadable = list[Message](), dict[str, ToolCall](), list[ToolCall]()
    for value in messages:
        message = _message(replace_surrogates(value), calls, schemas, unreadable)
        if id(value) in by_student:
            answer, sample = next(written)
            unreadable = [_unreadable(replace_surrogates(call)) for call in answer.calls if call.get("error")]
            more = {"tool_calls": [*message.tool_calls, *unreadable], **_sampled(sample)}
            message = message.model_copy(update=more)
        elif message.role == "assistant":
            message = message.model_copy(update={"weight": 0.0})
        out.append(message)
        calls |= {call.id: call for call in message.tool_calls}
    group = f"step{step}-record{record}"
    return Trace(
        id=f"{group}-copy{copy}",
        group_id=group,
        tools=schemas,
        messages=out,
        final_reward=reward,
        meta={"step": step, "record": record, "copy": copy, "ending": ending},
    )


def _message(
    value: Mapping[str, Any],
    calls: Mapping[str, ToolCall],
    tools: Sequence[Mapping[str, Any]],
    unreadable: list[ToolCall],
) -> Message:
    """A message as traces have it. ``unreadable``: calls that users' messages answer next, which are taken out."""
    role, failed = {"developer": "system"}.get(value["role"], value["role"]), bool(value.get("is_error"))
    content = _text(value.get("content"))
    if role == "tool":
        call_id = value.get("tool_call_id")
        name = None if value.get("name") is None else str(value["name"])
        result = Message(role="tool", content=content, tool_call_id=str(call_id) if call_id else None, name=name)
        return mark_error(result, FAILED, call=calls.get(str(call_id)), tools=tools) if failed else result
    if role == "user" and unreadable:
        # templates have no place for the result of a call that was not read, so that a user tells of it
        result = Message(role="tool", content=content, tool_call_id=unreadable.pop(0).id)
        return mark_error(result, MALFORMED).model_copy(update={"error_kind": "invalid_json"})
    if role != "assistant":
        return Message(role=role, content=content)
    thought = value.get("reasoning_content")
    tool_calls = [
        _call(call, number) for number, call in enumerate(value.get("tool_calls") or []) if isinstance(call, dict)
    ]
    return Message(role="assistant", content=content, reasoning=_text(thought) or None, tool_calls=tool_calls)


def _call(value: Mapping[str, Any], number: int) -> ToolCall:
    function = value.get("function")
    written: Mapping[str, Any] = function if isinstance(function, dict) else value
    arguments = written.get("arguments", {})
    if not isinstance(arguments, dict):
        arguments = _text(arguments)
    return ToolCall(id=str(value.get("id") or f"call{number}"), name=str(written.get("name", "")), arguments=arguments)


def _unreadable(value: Mapping[str, Any]) -> ToolCall:
    """A call that could not be read, as what was written of it; it is no part of what a template renders."""
    written = _text(value.get("arguments"))
    name = _NAME.search(written)
    return ToolCall(id=str(value["id"]), name=name[1] if name else "tool", arguments=written, in_content=True)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _sampled(sample: Sample) -> dict[str, Any]:
    """What the sampler said of an answer; of some engines no log-probability is known."""
    log_probs = sample.log_probs_T.tolist()
    known = len(log_probs) == len(sample.ids_T) and all(map(math.isfinite, log_probs))
    return {"sampled_ids": sample.ids_T.tolist(), "logprobs": log_probs if known else None}
