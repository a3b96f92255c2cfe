"""OpenAI-style message lists: tau-bench results, fine-tuning files and preference fine-tuning files.

Recognised objects: ``{"messages": [...]}``, a logged ``request`` with its ``response``, tau-bench's ``{"traj": [...],
"reward": r, "task_id": t, "trial": n}`` and ``{"input": {"messages": [...]}, "preferred_output": [...],
"non_preferred_output": [...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal, detect_prefix, mark_error
from limbeck.traces.readers.base import (
    ReadLog,
    Record,
    RecordReader,
    Totals,
    as_dict,
    as_dicts,
    as_number,
    as_text,
    characters,
    content_text,
    content_totals,
    find_call,
    openai_call_count,
    openai_tool_calls,
    openai_tools,
    parse_arguments,
    present,
    sampled_tokens,
)
from limbeck.traces.schema import Message, PreferencePair, Role, ToolCall, Trace

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

_OTHERS = {"schema_version", "steps", "history"}
"""Keys of other formats whose records may hold messages as well."""


class OpenAIChatReader(RecordReader):
    """Message lists; one object is one trace."""

    name = "openai_chat"
    general = True

    def detect(self, data: Mapping[str, Any]) -> bool:
        """A list of messages with roles, directly or under ``input``, in nothing that says what else it is."""
        return bool(_raw_messages(data)) and not data.keys() & _OTHERS

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        raw = present(_raw_messages(data), record)
        lists = (source.get(key) for key in ("tools", "functions") for source in _sources(data))
        tools = openai_tools(next((listed for listed in lists if listed), None))
        messages: list[Message] = []
        for item in raw:
            _append(messages, item, tools, log, record.line)
        before = log.skipped_totals
        pairs = _preference_pairs(data, messages, tools, log, record.line)
        log.skipped_totals = before + sum(map(_totals, _answers(data)), Totals())
        if pairs and not any(message.role == "assistant" for message in messages):
            # A preference record holds its answers beside the messages; the preferred one completes the conversation.
            messages = [*messages, pairs[0].chosen]
            log.skipped_totals -= Totals.of_messages([pairs[0].chosen])
        task, trial = data.get("task_id"), data.get("trial")
        group = as_text(data.get("group_id")) or (f"{log.stem}/task-{task}" if task is not None else None)
        trace_id = as_text(data.get("id")) or as_text(data.get("trace_id"))
        if trace_id is None:
            trace_id = log.unnamed(record.line) if group is None else f"{group}/{trial if trial is not None else 0}"
        reward = as_number(data.get("reward"))
        return Trace(
            id=trace_id,
            group_id=group,
            origin=log.origin(record.line),
            tools=tools,
            messages=messages,
            final_reward=reward if reward is not None else as_number(as_dict(data.get("info")).get("reward")),
            preference_pairs=pairs,
        )

    def totals(self, record: Record) -> Totals:
        return sum(map(_totals, [*_raw_messages(record.data), *_answers(record.data)]), Totals())


def _answers(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [item for key in ("preferred_output", "non_preferred_output") for item in as_dicts(data.get(key))]


def _totals(item: Mapping[str, Any]) -> Totals:
    totals = content_totals(item.get("content"))
    calls = openai_call_count(item.get("tool_calls")) or openai_call_count([as_dict(item.get("function_call"))])
    role = _ROLES.get(str(item.get("role")))
    reasoning = _reasoning(item) if role == "assistant" else None
    return totals + Totals(calls, int(role == "tool"), characters(reasoning))


def _reasoning(item: Mapping[str, Any]) -> str | None:
    return as_text(item.get("reasoning_content")) or as_text(item.get("reasoning"))


def _sources(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where messages and tools may stand: in the object, or in a logged request."""
    return [data, *(as_dict(data.get(key)) for key in ("input", "request", "body"))]


def _raw_messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, and the answer where a response was logged with its request."""
    choices = as_dicts(as_dict(data.get("response")).get("choices"))
    answer = [as_dict(choice.get("message")) for choice in choices[:1] if as_dict(choice.get("message")).get("role")]
    for source in _sources(data):
        for key in ("messages", "traj"):
            messages = as_dicts(source.get(key))
            if messages and "role" in messages[0]:
                return [*messages, *answer]
    return []


def _append(
    messages: list[Message], item: dict[str, Any], tools: list[dict[str, Any]], log: ReadLog, line: int
) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        log.skip("unknown_role", line, f"role {item.get('role')!r}", totals=_totals(item))
        return
    content = content_text(item.get("content"), log, line)
    if role != "assistant" and (calls := _totals(item).calls - content_totals(item.get("content")).calls):
        log.skip("call_by_another_role", line, f"role {role!r}", calls, Totals(calls=calls))
    if role == "tool":
        _append_result(messages, item, content, tools, log, line)
    elif role == "assistant":
        messages.append(_assistant(item, content, len(messages)))
    else:
        messages.append(Message(role=role, content=content, name=as_text(item.get("name"))))


def _assistant(item: dict[str, Any], content: str, index: int) -> Message:
    calls = openai_tool_calls(item.get("tool_calls"))
    legacy = as_dict(item.get("function_call"))
    if not calls and (name := as_text(legacy.get("name"))):
        calls = [ToolCall(id=f"call_{index}", name=name, arguments=parse_arguments(legacy.get("arguments")))]
    weight = as_number(item.get("weight"))
    sampled, logprobs = sampled_tokens(item, "sampled_ids" if "sampled_ids" in item else "token_ids")
    return Message(
        role="assistant",
        content=content,
        reasoning=_reasoning(item),
        tool_calls=calls,
        weight=1.0 if weight is None else weight,
        sampled_ids=sampled,
        logprobs=logprobs,
    )


def _append_result(
    messages: list[Message],
    item: dict[str, Any],
    content: str,
    tools: list[dict[str, Any]],
    log: ReadLog,
    line: int,
) -> None:
    call_id = as_text(item.get("tool_call_id")) or _open_call(messages, as_text(item.get("name")))
    call = find_call(messages, call_id)
    if call is None:
        lost = Totals(results=1, characters=characters(content))
        log.skip("result_without_call", line, f"tool_call_id {call_id!r}", totals=lost)
        return
    message = Message(role="tool", content=content, tool_call_id=call_id, name=as_text(item.get("name")))
    flagged = item.get("is_error") is True or item.get("status") == "error"
    signal = ErrorSignal("flag") if flagged else detect_prefix(content)
    messages.append(message if signal is None else mark_error(message, signal, call=call[1], tools=tools))


def _open_call(messages: list[Message], name: str | None) -> str | None:
    """The last message's first unanswered call, of this name where one is given; for results that carry no id."""
    answered = set()
    for message in reversed(messages):
        if message.role == "tool":
            answered.add(message.tool_call_id)
        elif message.role == "assistant":
            open_calls = [c.id for c in message.tool_calls if c.id not in answered and (name is None or c.name == name)]
            return open_calls[0] if open_calls else None
        else:
            return None
    return None


def _preference_pairs(
    data: Mapping[str, Any], prompt: list[Message], tools: list[dict[str, Any]], log: ReadLog, line: int
) -> list[PreferencePair]:
    sides: list[Message] = []
    for key in ("preferred_output", "non_preferred_output"):
        answer: list[Message] = []
        for item in as_dicts(data.get(key)):
            _append(answer, item, tools, log, line)
        if len(answer) != 1 or answer[0].role != "assistant":
            return []
        sides.append(answer[0])
    return [PreferencePair(chosen=sides[0], rejected=sides[1], prompt=prompt, provenance={"source": "log"})]
