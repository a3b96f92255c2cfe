"""Claude Code session logs: one event per line, linked by ``parentUuid``.

The links form a tree, but not every fork is a branch of the conversation: the blocks of one assistant message are
logged as separate events, parallel calls hang below each other, and each result hangs below its own call. So events are
first folded into *units* (one user message, or one assistant message with the results of its calls), results being
attached by ``tool_use_id``. What still forks after that is a real branch (an edited prompt, a retry) and becomes a
trace of its own whose shared beginning is marked as context. Side chains (sub-agents) and the part after a compaction
start from their own root, as the model's context did.

A session has to be held in memory while it is read: its tree is known only at the end of the file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from limbeck.traces.errors import ErrorSignal, mark_error
from limbeck.traces.readers.base import (
    Reader,
    ReadLog,
    Record,
    Totals,
    as_dict,
    as_dicts,
    as_text,
    characters,
    content_text,
    plain_text,
)
from limbeck.traces.schema import Message, ToolCall, Trace, describe_validation

_BOOKKEEPING = {"file-history-snapshot", "summary"}
_EVENT_TYPES = {"user", "assistant", "system", "progress", "attachment", "queue-operation", *_BOOKKEEPING}
_COMPACTED = "This session is being continued from a previous conversation"
_KNOWN_MAJOR = {"0", "1", "2"}


class ClaudeCodeReader(Reader):
    """Events of a session, folded into branches."""

    name = "claude_code"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """An event with its place in a session's tree, or one of the log's own bookkeeping rows."""
        if "parentUuid" in data and "uuid" in data:
            return True
        return str(data.get("type")) in _BOOKKEEPING and ("leafUuid" in data or "messageId" in data)

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per branch, side chain and compacted part of each session in the file."""
        events = _events(records, log)
        forest = _Forest(log)
        for event in _in_tree_order(events, log):
            forest.add(event)
        yield from _traces(forest, log)

    def totals(self, record: Record) -> Totals:
        return _totals(record.data)


def _totals(data: Mapping[str, Any]) -> Totals:
    content = as_dict(data.get("message")).get("content")
    if data.get("type") not in ("user", "assistant"):
        return Totals()
    if isinstance(content, str):
        return Totals(characters=characters(content))
    totals = Totals()
    for block in as_dicts(content):
        if block.get("type") == "tool_result" and data["type"] == "user":
            totals += _result_totals(block)
        elif data["type"] == "user":
            totals += Totals(characters=characters(as_text(block.get("text"))))
        elif block.get("type") == "tool_use":
            totals += Totals(calls=int(bool(as_text(block.get("id")) and as_text(block.get("name")))))
        elif block.get("type") in ("text", "thinking"):
            totals += Totals(characters=characters(as_text(block.get(block["type"]))))
    return totals


def _result_totals(block: Mapping[str, Any]) -> Totals:
    return Totals(results=1, characters=characters(plain_text(block.get("content"))))


@dataclass
class _Unit:
    """A user message, or an assistant message together with the results of its calls."""

    role: str
    line: int
    parent: _Unit | None
    sidechain: bool = False
    session: str = ""
    message_id: str | None = None
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: dict[str, Message] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    children: list[_Unit] = field(default_factory=list)

    @property
    def waits_for_results(self) -> bool:
        return any(call.id not in self.results for call in self.calls)


@dataclass
class _Event:
    """One row that has a place in the tree."""

    record: Record
    uuid: str
    chain: tuple[str, bool, str]
    parent: str | None = None
    bridged: bool = False

    @property
    def role(self) -> str:
        kind = self.record.data.get("type")
        return kind if kind in ("user", "assistant") else ""

    @property
    def message(self) -> dict[str, Any]:
        return as_dict(self.record.data.get("message"))


def _events(records: Iterator[Record], log: ReadLog) -> dict[str, _Event]:
    """The rows with a uuid, in file order, each with the parent that it really continues."""
    events: dict[str, _Event] = {}
    for record in records:
        data = record.data
        uuid = as_text(data.get("uuid"))
        _check_version(data, log)
        if uuid is None:
            kind = str(data.get("type"))
            reason = "event_without_message" if kind in _EVENT_TYPES else "unknown_event"
            log.skip(reason, record.line, kind, totals=_totals(data))
        elif uuid in events:
            log.skip("duplicate_event", record.line, uuid, totals=_totals(data))
        else:
            session = as_text(data.get("sessionId")) or log.stem
            chain = (session, data.get("isSidechain") is True, str(data.get("agentId")))
            events[uuid] = _Event(record, uuid, chain)
    last: dict[tuple[str, bool, str], str] = {}
    for event in events.values():
        _link(event, events, last)
        last[event.chain] = event.uuid
    return events


def _check_version(data: Mapping[str, Any], log: ReadLog) -> None:
    version = as_text(data.get("version"))
    if version is not None and version.split(".")[0] not in _KNOWN_MAJOR:
        log.versions[f"claude {version}"] += 1


def _link(event: _Event, events: Mapping[str, _Event], last: Mapping[tuple[str, bool, str], str]) -> None:
    parent = as_text(event.record.data.get("parentUuid"))
    if parent is None or _starts_context(event):
        return
    if parent not in events:
        # Rows between two messages are often filtered out of a log; the event continues what stands before it.
        event.parent, event.bridged = last.get(event.chain), True
    elif events[parent].chain[:2] == event.chain[:2]:
        event.parent = parent


def _starts_context(event: _Event) -> bool:
    content = event.message.get("content")
    compacted = isinstance(content, str) and content.startswith(_COMPACTED)
    return event.role == "user" and (event.record.data.get("isCompactSummary") is True or compacted)


def _in_tree_order(events: dict[str, _Event], log: ReadLog) -> Iterator[_Event]:
    """Parents before children, otherwise in file order; events on a cycle of parents are counted and left out."""
    position = {uuid: index for index, uuid in enumerate(events)}
    children: dict[str, list[str]] = {}
    ready: list[int] = []
    for uuid, event in events.items():
        if event.parent is None:
            heapq.heappush(ready, position[uuid])
        else:
            children.setdefault(event.parent, []).append(uuid)
    order = list(events.values())
    reached: set[str] = set()
    while ready:
        event = order[heapq.heappop(ready)]
        reached.add(event.uuid)
        yield event
        for child in children.get(event.uuid, ()):
            heapq.heappush(ready, position[child])
    for event in order:
        if event.uuid not in reached:
            log.skip("cyclic_parent", event.record.line, event.uuid, totals=_totals(event.record.data))


class _Forest:
    """Folds events into units."""

    def __init__(self, log: ReadLog) -> None:
        self.roots: list[_Unit] = []
        self._log = log
        self._unit_of: dict[str, _Unit | None] = {}
        self._after_assistant: dict[str, bool] = {}
        self._owner: dict[str, _Unit] = {}
        self._by_message_id: dict[tuple[str, str], _Unit] = {}

    def add(self, event: _Event) -> None:
        parent = self._unit_of.get(event.parent) if event.parent else None
        unit, speaks = parent, self._after_assistant.get(event.parent or "", False)
        try:
            if event.role == "assistant" and not self._is_synthetic(event):
                unit, speaks = self._add_assistant(event, parent, speaks), True
            elif event.role == "user":
                unit, speaks = self._add_user(event, parent), False
        except ValidationError as error:
            totals = _totals(event.record.data)
            self._log.skip("invalid_event", event.record.line, describe_validation(error), totals=totals)
        self._unit_of[event.uuid] = unit
        if unit is not None:
            unit.events.append(event.uuid)
        self._after_assistant[event.uuid] = speaks

    def _is_synthetic(self, event: _Event) -> bool:
        synthetic = event.message.get("model") == "<synthetic>" or event.record.data.get("isApiErrorMessage") is True
        if synthetic:
            self._log.skip("synthetic_message", event.record.line, totals=_totals(event.record.data))
        return synthetic

    def _new_unit(self, event: _Event, parent: _Unit | None) -> _Unit:
        session, sidechain, _ = event.chain
        unit = _Unit(event.role, event.record.line, parent, sidechain, session)
        (self.roots if parent is None else parent.children).append(unit)
        return unit

    def _add_assistant(self, event: _Event, parent: _Unit | None, follows_assistant: bool) -> _Unit:
        """The unit this event belongs to: the blocks of one message arrive as several events."""
        message_id = as_text(event.message.get("id"))
        unit = self._by_message_id.get((event.chain[0], message_id)) if message_id else None
        if unit is None and parent is not None and parent.role == "assistant":
            same_message = message_id is None or parent.message_id is None
            # A filtered row may hide that this block hangs below a call whose siblings are already answered; the model
            # cannot have spoken again while a call of its last message was still running.
            continues = follows_assistant or (event.bridged and parent.waits_for_results)
            unit = parent if same_message and continues else None
        if unit is None:
            unit = self._new_unit(event, parent)
            unit.message_id = message_id
        if message_id:
            self._by_message_id[event.chain[0], message_id] = unit
        self._add_blocks(event, unit)
        return unit

    def _add_blocks(self, event: _Event, unit: _Unit) -> None:
        content = event.message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else as_dicts(content)
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                unit.texts.append(as_text(block.get("text")) or "")
            elif kind == "thinking":
                unit.reasoning.append(as_text(block.get("thinking")) or "")
            elif kind == "tool_use" and as_text(block.get("id")) and as_text(block.get("name")):
                call = ToolCall(id=block["id"], name=block["name"], arguments=as_dict(block.get("input")))
                if call.id in {known.id for known in unit.calls}:
                    self._log.skip("duplicate_call", event.record.line, call.id, totals=Totals(calls=1))
                else:
                    unit.calls.append(call)
                self._owner[call.id] = unit
            else:
                self._log.skip("non_text_part", event.record.line, str(kind))

    def _add_user(self, event: _Event, parent: _Unit | None) -> _Unit | None:
        content = event.message.get("content")
        blocks = as_dicts(content)
        unit = parent
        for block in blocks:
            if block.get("type") == "tool_result":
                unit = self._add_result(event, block) or unit
        texts = content if isinstance(content, str) else [b for b in blocks if b.get("type") != "tool_result"]
        text = content_text(texts, self._log, event.record.line)
        if text.strip():
            unit = self._new_unit(event, unit)
            unit.texts.append(text)
        return unit

    def _add_result(self, event: _Event, block: dict[str, Any]) -> _Unit | None:
        call_id, line = as_text(block.get("tool_use_id")), event.record.line
        unit = self._owner.get(call_id or "")
        if unit is None or call_id is None:
            self._log.skip("result_without_call", line, f"tool_use_id {call_id!r}", totals=_result_totals(block))
            return None
        if call_id in unit.results:
            self._log.skip("duplicate_result", line, call_id, totals=_result_totals(block))
            return unit
        call = next(call for call in unit.calls if call.id == call_id)
        text = content_text(block.get("content"), self._log, line)
        message = Message(role="tool", content=text, tool_call_id=call_id, name=call.name)
        if block.get("is_error") is True:
            message = mark_error(message, ErrorSignal("flag"), call=call)
        unit.results[call_id] = message
        return unit


def _messages(unit: _Unit) -> list[Message]:
    texts = "\n\n".join(text for text in unit.texts if text.strip())
    if unit.role == "user":
        return [Message(role="user", content=texts)]
    reasoning = "\n\n".join(text for text in unit.reasoning if text.strip())
    said = Message(role="assistant", content=texts, reasoning=reasoning or None, tool_calls=unit.calls)
    return [said, *(unit.results[call.id] for call in unit.calls if call.id in unit.results)]


def _traces(forest: _Forest, log: ReadLog) -> Iterator[Trace]:
    counts: dict[str, int] = {}
    emitted = _read_before(forest.roots, log)
    for leaf in _leaves(forest.roots):
        path = _path(leaf)
        shared = sum(id(unit) in emitted for unit in path)
        if not any(unit.role == "assistant" for unit in path[shared:]):
            if shared < len(path):
                log.skip("branch_without_assistant", leaf.line)
            continue
        emitted.update(id(unit) for unit in path)
        parts = [_messages(unit) for unit in path]
        session = path[0].session
        number = counts[session] = counts.get(session, 0) + 1
        unanswered = sum(len(unit.calls) - len(unit.results) for unit in path[shared:])
        if unanswered:
            log.skip("call_without_result", leaf.line, count=unanswered)
        yield Trace(
            id=session if number == 1 else f"{session}#{number}",
            origin=log.origin(path[0].line),
            messages=[message for part in parts for message in part],
            context_until=sum(len(part) for part in parts[:shared]),
            meta={"session": session, **({"sidechain": True} if path[0].sidechain else {})},
        )
    for unit in _units(forest.roots):
        if id(unit) not in emitted:
            log.skipped_totals += Totals.of_messages(_messages(unit))


def _read_before(roots: list[_Unit], log: ReadLog) -> set[int]:
    """The units of a session's beginning that an earlier file has too, as the copies of resumed sessions do."""
    read_lines: set[int] = set()
    stack = list(roots)
    while stack:
        unit = stack.pop()
        if unit.events and all(event in log.events for event in unit.events):
            read_lines.add(id(unit))
            log.skip("read_before", unit.line, unit.role, totals=Totals.of_messages(_messages(unit)))
            stack.extend(unit.children)
    log.events.update(event for unit in _units(roots) for event in unit.events)
    return read_lines


def _units(roots: list[_Unit]) -> Iterator[_Unit]:
    stack = list(roots)
    while stack:
        unit = stack.pop()
        stack.extend(unit.children)
        yield unit


def _leaves(roots: list[_Unit]) -> list[_Unit]:
    return sorted((unit for unit in _units(roots) if not unit.children), key=lambda unit: unit.line)


def _path(leaf: _Unit) -> list[_Unit]:
    path: list[_Unit] = []
    unit: _Unit | None = leaf
    while unit is not None:
        path.append(unit)
        unit = unit.parent
    return path[::-1]
