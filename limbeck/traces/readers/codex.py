"""Codex CLI sessions: one line per item of the conversation or event of the program.

A line is ``{"timestamp", "type", "payload"}``; its items are those of OpenAI Responses. Older sessions hold the items
bare, behind a first line with the session's id and instructions. Events repeat what the items say; of them only the
exit codes of commands are used. What follows a compaction is a trace of its own, as the model's context was.

What ``codex exec --json`` prints is read as well: ``item.completed`` lines with items of their own form, which lack the
user's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from limbeck.traces.readers.base import (
    Builder,
    Reader,
    ReadLog,
    Record,
    Totals,
    as_dict,
    as_text,
    characters,
    plain_text,
)
from limbeck.traces.readers.openai_responses import ITEM_TYPES, add_item, item_totals
from limbeck.traces.schema import Trace, describe_validation

_LINES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_PRINTED = ("thread.started", "turn.started", "turn.completed", "turn.failed", "item.started", "item.updated", "error")
"""Lines of ``codex exec --json`` beside ``item.completed``."""


class CodexReader(Reader):
    """Items of a session, in order."""

    name = "codex"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """A line of a session, or the head or an item of an older one."""
        if isinstance(data.get("payload"), dict):
            return data.get("type") in _LINES
        if data.get("type") in ("thread.started", "item.completed"):
            return "thread_id" in data or isinstance(data.get("item"), dict)
        bare = data.get("type") in ITEM_TYPES and ("call_id" in data or isinstance(data.get("content"), list))
        return {"id", "timestamp", "instructions"} <= set(data) or "record_type" in data or bare

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per session, or per part of it between compactions."""
        session = _Session(log)
        for record in records:
            yield from session.add(record)
        yield from session.finish()

    def totals(self, record: Record) -> Totals:
        kind, payload = _line(record.data)
        if kind == "response_item":
            return item_totals(payload)
        if kind == "item.completed":
            return sum(map(item_totals, _printed_items(payload)), Totals())
        text = _instructions(payload) if kind == "session_meta" else payload.get("message")
        return Totals(characters=characters(plain_text(text))) if kind in ("session_meta", "compacted") else Totals()


def _line(data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind and content of a line; older lines are brought into today's form."""
    if isinstance(data.get("payload"), dict):
        return str(data.get("type")), data["payload"]
    if data.get("type") == "thread.started":
        return "session_meta", {"id": data.get("thread_id")}
    if data.get("type") == "item.completed" and isinstance(data.get("item"), dict):
        return "item.completed", data["item"]
    if data.get("type") in _PRINTED:
        return str(data["type"]), {}
    if data.get("type") in ITEM_TYPES:
        return "response_item", dict(data)
    return ("session_meta" if "instructions" in data and "id" in data else "state"), dict(data)


def _printed_items(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An item as ``codex exec --json`` prints it, as items of a session: a command is its call and its output."""
    kind, call_id = item.get("type"), as_text(item.get("id")) or ""
    if kind == "agent_message":
        return [{"type": "message", "role": "assistant", "content": item.get("text")}]
    if kind == "reasoning":
        return [{"type": "reasoning", "summary": [{"text": item.get("text")}]}]
    if kind == "command_execution":
        call = {"type": "function_call", "call_id": call_id, "name": "shell"}
        done = {"metadata": {"exit_code": item.get("exit_code")}, "output": item.get("aggregated_output") or ""}
        arguments = {"command": item.get("command")}
        return [
            {**call, "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": done, "status": item.get("status")},
        ]
    return [dict(item)]


def _instructions(payload: Mapping[str, Any]) -> Any:
    return as_dict(payload.get("base_instructions")).get("text") or payload.get("instructions")


class _Session:
    """The trace that is being read."""

    def __init__(self, log: ReadLog) -> None:
        self._log = log
        self._name = ""
        self._part = 0
        self._line = 1
        self._made = Builder(log, 1)
        self._exit_codes: dict[str, int] = {}

    def add(self, record: Record) -> Iterator[Trace]:
        kind, payload = _line(record.data)
        if kind == "session_meta":
            yield from self.finish()
            self._name, self._part = as_text(payload.get("id")) or "", 0
            self._begin(record.line)
            self._made.say("system", self._made.text(_instructions(payload)))
        elif kind == "compacted":
            yield from self.finish()
            self._part += 1
            self._begin(record.line)
            self._made.say("user", self._made.text(payload.get("message")))
        elif kind == "response_item":
            self._item(payload, record.line)
        elif kind == "item.completed":
            for item in _printed_items(payload):
                self._item(item, record.line)
        else:
            self._event(kind, payload, record.line)

    def _begin(self, line: int) -> None:
        self._line, self._made = line, Builder(self._log, line)

    def _item(self, payload: dict[str, Any], line: int) -> None:
        before = self._log.skipped_totals
        try:
            add_item(self._made, payload, self._exit_codes.get(str(payload.get("call_id"))))
        except ValidationError as error:
            self._log.skipped_totals = before
            self._log.skip("invalid_item", line, describe_validation(error), totals=item_totals(payload))

    def _event(self, kind: str, payload: dict[str, Any], line: int) -> None:
        code = payload.get("exit_code")
        if isinstance(code, int) and as_text(payload.get("call_id")):
            self._exit_codes[payload["call_id"]] = code
        self._log.skip(f"event_{kind}", line, str(payload.get("type")))

    def finish(self) -> Iterator[Trace]:
        messages, self._made = self._made.messages, Builder(self._log, self._line)
        if not any(message.role == "assistant" for message in messages):
            if messages:
                self._log.skip("no_assistant_message", self._line, totals=Totals.of_messages(messages))
            return
        name = self._name or self._log.stem
        yield Trace(
            id=name if not self._part else f"{name}#{self._part + 1}",
            origin=self._log.origin(self._line),
            messages=messages,
            meta={"session": name},
        )
