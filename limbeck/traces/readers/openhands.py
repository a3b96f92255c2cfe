"""OpenHands runs: a history of action and observation events.

Accepted are evaluation outputs (one object per run with ``history``), exported trajectories (a JSON array of events)
and event streams (one event per line). Where the agent used function calling, ``tool_call_metadata`` holds the model's
own response, and that is taken; otherwise the action's arguments become the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from limbeck.traces.errors import detect_openhands, mark_error
from limbeck.traces.readers.base import (
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
    content_text,
    content_totals,
    find_call,
    gather_events,
    openai_call_count,
    openai_tool_calls,
    openai_tools,
)
from limbeck.traces.schema import Message, ToolCall, Trace

_IGNORED_ACTIONS = {"recall", "change_agent_state", "null", "condensation", "condensation_request"}
_IGNORED_OBSERVATIONS = {"recall", "agent_state_changed", "null", "condense"}
_BOOKKEEPING = {"thought", "blocking", "is_static", "hidden", "confirmation_state", "is_input", "cwd", "impl_source"}


class OpenHandsReader(RecordReader):
    """Histories of actions and observations."""

    name = "openhands"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """An event, or an object with a history of events (older files hold pairs of events)."""
        if _is_event(data):
            return True
        events = _events(data)
        return bool(events) and _is_event(events[0])

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per run; bare events of a file form one run together."""
        yield from super().read(gather_events(records, _is_event), log)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        events = _events(data)
        if not events or not any(_is_event(event) for event in events):
            raise SkipRecord("no_events", f"keys {sorted(data)[:6]}")
        run = _Run(log, record.line)
        for event in events:
            run.add(event)
        name = as_text(data.get("instance_id"))
        report = as_dict(as_dict(data.get("test_result")).get("report")) or as_dict(data.get("report"))
        return Trace(
            id=name or log.unnamed(record.line),
            group_id=name,
            origin=log.origin(record.line),
            tools=run.tools,
            messages=run.messages,
            final_reward=as_number(report.get("resolved")),
        )

    def totals(self, record: Record) -> Totals:
        events = [record.data] if _is_event(record.data) else _events(record.data)
        return sum(map(_totals, events), Totals())


def _totals(event: Mapping[str, Any]) -> Totals:
    """Totals of one event, whatever comes of it."""
    if "observation" in event:
        ignored = str(event["observation"]) in _IGNORED_OBSERVATIONS
        return Totals() if ignored else Totals(results=1) + content_totals(event.get("content"))
    action, args = str(event.get("action")), as_dict(event.get("args"))
    said = content_totals(args.get("content"))
    if "action" not in event or (action != "system" and action in _IGNORED_ACTIONS):
        return Totals()
    if action == "system" or event.get("source") == "user":
        return said
    if event.get("source") != "agent":
        return Totals()
    if message := _response(event)[1]:
        calls = openai_call_count(message.get("tool_calls"))
        thought = as_text(message.get("reasoning_content"))
        return content_totals(message.get("content")) + Totals(calls=calls, characters=characters(thought))
    return said if action == "message" else Totals(calls=1, characters=characters(as_text(args.get("thought"))))


def _response(event: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Id and message of the model's own response to which an event belongs."""
    response = as_dict(as_dict(event.get("tool_call_metadata")).get("model_response"))
    choice = next(iter(as_dicts(response.get("choices"))), {})
    return as_text(response.get("id")), as_dict(choice.get("message"))


def _is_event(data: Mapping[str, Any]) -> bool:
    return "source" in data and any(isinstance(data.get(key), str) for key in ("action", "observation"))


def _events(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    history = data.get("history")
    if not isinstance(history, list):
        return []
    flat: list[Any] = []
    for item in history:
        flat.extend(item if isinstance(item, list) else [item])
    return as_dicts(flat)


class _Run:
    """Messages of one run, built event by event."""

    def __init__(self, log: ReadLog, line: int) -> None:
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []
        self._log = log
        self._line = line
        self._responses: set[str] = set()

    def add(self, event: dict[str, Any]) -> None:
        if "observation" in event:
            self._observe(event)
        elif "action" in event:
            self._act(event)
        else:
            self._log.skip("unknown_event", self._line, f"keys {sorted(event)[:6]}")

    def _act(self, event: dict[str, Any]) -> None:
        action, args = str(event.get("action")), as_dict(event.get("args"))
        text = content_text(args.get("content"), self._log, self._line)
        if action == "system":
            self.tools = openai_tools(args.get("tools"))
            self.messages.append(Message(role="system", content=text))
        elif action in _IGNORED_ACTIONS:
            self._log.skip(f"event_{action}", self._line)
        elif event.get("source") == "user":
            self.messages.append(Message(role="user", content=text))
        elif event.get("source") == "agent":
            self._assistant(event, action, args, text)
        else:
            self._log.skip("unknown_event", self._line, f"action {action!r} by {event.get('source')!r}")

    def _assistant(self, event: dict[str, Any], action: str, args: dict[str, Any], text: str) -> None:
        response_id, message = _response(event)
        if message:
            # Parallel calls give one event each, all with the same response.
            if response_id is not None and response_id in self._responses:
                self._log.skipped_totals += _totals(event)
                return
            self._responses.add(response_id or "")
            content = content_text(message.get("content"), self._log, self._line)
            calls = openai_tool_calls(message.get("tool_calls"))
            reasoning = as_text(message.get("reasoning_content"))
            self.messages.append(Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning))
        elif action == "message":
            self.messages.append(Message(role="assistant", content=text))
        else:
            arguments = {key: value for key, value in args.items() if key not in _BOOKKEEPING and value is not None}
            call = ToolCall(id=f"event_{event.get('id')}", name=action, arguments=arguments)
            thought = as_text(args.get("thought")) or ""
            self.messages.append(Message(role="assistant", content=thought, tool_calls=[call]))

    def _observe(self, event: dict[str, Any]) -> None:
        observation = str(event.get("observation"))
        if observation in _IGNORED_OBSERVATIONS:
            self._log.skip(f"event_{observation}", self._line)
            return
        metadata = as_dict(event.get("tool_call_metadata"))
        call_id = as_text(metadata.get("tool_call_id"))
        if call_id is None and event.get("cause") is not None:
            call_id = f"event_{event['cause']}"
        caller = find_call(self.messages, call_id)
        if caller is None and observation != "error":
            detail = f"observation {observation!r}, call {call_id!r}"
            self._log.skip("result_without_call", self._line, detail, totals=_totals(event))
            return
        content = content_text(event.get("content"), self._log, self._line)
        call = caller[1] if caller else None
        message = Message(
            role="tool",
            content=content,
            tool_call_id=call.id if call else None,
            name=call.name if call else None,
            is_ack=observation == "think",
        )
        signal = detect_openhands(event)
        self.messages.append(message if signal is None else mark_error(message, signal, call=call, tools=self.tools))
