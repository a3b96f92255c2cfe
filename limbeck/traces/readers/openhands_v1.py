"""OpenHands from version 1 on: events with a ``kind``, as the agent SDK stores them.

Accepted are folders with a file per event, event streams (one event per line), exported trajectories (a JSON array)
and evaluation outputs (one object per run with ``history``). Every call is an event of its own; those of one answer
share ``llm_response_id`` and become one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal
from limbeck.traces.readers.base import (
    Builder,
    ReadLog,
    Record,
    RecordReader,
    SkipRecord,
    Totals,
    as_dict,
    as_dicts,
    as_number,
    as_text,
    characters,
    gather_events,
    openai_tools,
    parse_arguments,
    plain_text,
)
from limbeck.traces.schema import ToolCall, Trace

_SPEAKING = ("SystemPromptEvent", "MessageEvent", "ActionEvent")
_ANSWERING = ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation")
_SILENT = (
    "SystemPromptUpdateEvent",
    "ConversationStateUpdateEvent",
    "CondensationRequest",
    "Condensation",
    "CondensationSummaryEvent",
    "PauseEvent",
    "TokenEvent",
    "LLMCompletionLogEvent",
    "ConversationErrorEvent",
)
_KINDS = (*_SPEAKING, *_ANSWERING, *_SILENT)


class OpenHandsV1Reader(RecordReader):
    """Events of runs."""

    name = "openhands_v1"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """An event, or an object with a history of events."""
        return _is_event(data) or any(map(_is_event, as_dicts(data.get("history"))[:1]))

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per run; bare events of a file form one run together."""
        yield from super().read(gather_events(records, _is_event), log)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        events = as_dicts(data.get("history"))
        if not any(map(_is_event, events)):
            raise SkipRecord("no_events", f"keys {sorted(data)[:6]}")
        run = _Run(log, record.line)
        for event in events:
            run.add(event)
        name = as_text(data.get("instance_id"))
        report = as_dict(as_dict(data.get("test_result")).get("report")) or as_dict(data.get("report"))
        return run.builder.trace(name, group_id=name, final_reward=as_number(report.get("resolved")))

    def totals(self, record: Record) -> Totals:
        events = [record.data] if _is_event(record.data) else as_dicts(record.data.get("history"))
        return sum(map(_totals, events), Totals())


def _is_event(data: Mapping[str, Any]) -> bool:
    """One of the known kinds, or a newer one that calls itself an event."""
    kind = data.get("kind")
    return kind in _KINDS or ("source" in data and isinstance(kind, str) and kind.endswith("Event"))


def _tools(value: Any) -> list[dict[str, Any]]:
    """Tools as the endpoint got them, or as the program stores its own: by title, without parameters."""
    unwrapped = [tool for tool in as_dicts(value) if "function" not in tool]
    named = [(as_text(tool.get("name")) or as_text(tool.get("title")), tool) for tool in unwrapped]
    plain = [{"name": name, "description": as_text(tool.get("description")) or ""} for name, tool in named if name]
    return openai_tools([*(tool for tool in as_dicts(value) if "function" in tool), *plain])


def _said(event: Mapping[str, Any]) -> Any:
    """The text of an event, in the form that its kind has it."""
    kind = event.get("kind")
    if kind == "SystemPromptEvent":
        prompt = event.get("system_prompt")
        return [prompt] if isinstance(prompt, dict) else prompt
    if kind == "MessageEvent":
        return as_dict(event.get("llm_message")).get("content")
    if kind == "ActionEvent":
        return event.get("thought")
    if kind == "ObservationEvent":
        seen = as_dict(event.get("observation"))
        return seen.get("content", seen.get("output"))
    return event.get("error" if kind == "AgentErrorEvent" else "rejection_reason")


def _thought(event: Mapping[str, Any]) -> str | None:
    source = event if event.get("kind") == "ActionEvent" else as_dict(event.get("llm_message"))
    spoken = as_text(source.get("reasoning_content"))
    blocks = [as_text(block.get("thinking")) for block in as_dicts(source.get("thinking_blocks"))]
    return spoken or "\n\n".join(block for block in blocks if block) or None


def _totals(event: Mapping[str, Any]) -> Totals:
    kind = event.get("kind")
    if kind not in (*_SPEAKING, *_ANSWERING):
        return Totals()
    thought = characters(_thought(event)) if kind in ("ActionEvent", "MessageEvent") else 0
    said = characters(plain_text(_said(event))) + thought
    return Totals(int(kind == "ActionEvent"), int(kind in _ANSWERING), said)


class _Run:
    """Messages of one run, built event by event."""

    def __init__(self, log: ReadLog, line: int) -> None:
        self.builder = Builder(log, line)
        self._response: str | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "SystemPromptEvent":
            self.builder.tools = _tools(event.get("tools")) or self.builder.tools
            self.builder.say("system", self.builder.text(_said(event)))
        elif kind == "MessageEvent":
            self._message(event)
        elif kind == "ActionEvent":
            self._action(event)
        elif kind in _ANSWERING:
            self._result(event)
        else:
            self.builder.skip(f"event_{kind}" if kind in _SILENT else "unknown_event", str(kind))

    def _message(self, event: Mapping[str, Any]) -> None:
        role, text = as_dict(event.get("llm_message")).get("role"), self.builder.text(_said(event))
        if role == "assistant":
            self.builder.assistant(text, reasoning=_thought(event), weight=1.0)
        elif role in ("user", "system"):
            self.builder.say("user" if role == "user" else "system", text)
            if thought := _thought(event):
                self.builder.skip("thinking_by_another_role", str(role), Totals(characters=characters(thought)))
        else:
            self.builder.skip("unknown_role", f"role {role!r}", _totals(event))

    def _action(self, event: Mapping[str, Any]) -> None:
        builder, call = self.builder, as_dict(event.get("tool_call"))
        function = as_dict(call.get("function")) or call
        call_id = as_text(event.get("tool_call_id")) or as_text(call.get("id"))
        name = as_text(event.get("tool_name")) or as_text(function.get("name"))
        if call_id is None or name is None:
            builder.skip("unusable_call", f"id {call_id!r}, name {name!r}", _totals(event))
            return
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {key: value for key, value in as_dict(event.get("action")).items() if key != "kind"}
        response = as_text(event.get("llm_response_id"))
        # calls of another answer start a message even where the results of the last one are missing
        fields = {} if response is not None and response == self._response else {"weight": 1.0}
        self._response = response
        called = ToolCall(id=call_id, name=name, arguments=parse_arguments(arguments))
        builder.assistant(builder.text(_said(event)), reasoning=_thought(event), calls=[called], **fields)

    def _result(self, event: Mapping[str, Any]) -> None:
        seen = as_dict(event.get("observation"))
        output = self.builder.text(_said(event))
        self.builder.result(as_text(event.get("tool_call_id")) or "", output, signal=_failure(event, seen))


def _failure(event: Mapping[str, Any], seen: Mapping[str, Any]) -> ErrorSignal | None:
    if event.get("kind") == "AgentErrorEvent":
        return ErrorSignal("error_observation")
    if event.get("kind") == "UserRejectObservation":
        return ErrorSignal("rejected")
    code = seen.get("exit_code", as_dict(seen.get("metadata")).get("exit_code"))
    # -1: the command is still running
    if isinstance(code, int) and not isinstance(code, bool) and code not in (0, -1):
        return ErrorSignal("exit_code", {"exit_code": code})
    return ErrorSignal("flag") if seen.get("is_error") is True or seen.get("error") else None
