"""Inspect evaluation logs: samples with their messages, tool calls and scores.

Read are the JSON form (``{"eval", "samples": [...]}``), single samples, and the ``.eval`` archive, which holds one
file per sample. A correct answer (``C``) is a reward of 1, a partly correct one .5; numbers are taken as they are.
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
    Totals,
    as_dict,
    as_dicts,
    as_number,
    as_text,
    characters,
    plain_text,
    present,
)
from limbeck.traces.schema import Trace

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_ATTACHED = "attachment://"


class InspectReader(RecordReader):
    """Samples of an evaluation; one sample is one trace."""

    name = "inspect"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """A log with its evaluation, or a sample of one."""
        if isinstance(data.get("eval"), dict) and ("samples" in data or "status" in data):
            return True
        return _is_sample(data)

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per sample."""
        yield from super().read(_samples(records), log)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        sample = record.data
        messages = present(_messages(sample), record)
        builder = Builder(log, record.line, _tools(sample))
        for message in messages:
            _add(builder, message)
        name, task = str(sample.get("id")), as_text(sample.get("task")) or log.stem
        return builder.trace(
            as_text(sample.get("uuid")) or f"{task}/{name}/{sample.get('epoch', 1)}",
            group_id=f"{task}/{name}",
            final_reward=_reward(sample.get("scores")),
        )

    def totals(self, record: Record) -> Totals:
        return sum(map(self.trace_totals, _samples(iter([record]))), Totals())

    def trace_totals(self, record: Record) -> Totals:
        return sum(map(_totals, _messages(record.data)), Totals())


def _is_sample(data: Mapping[str, Any]) -> bool:
    return "messages" in data and "epoch" in data and ("target" in data or "scores" in data)


def _samples(records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        if _is_sample(record.data):
            yield record
            continue
        task = as_text(as_dict(record.data.get("eval")).get("task"))
        for sample in as_dicts(record.data.get("samples")):
            yield Record(record.line, {"task": task, **sample})


def _messages(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, with long texts that the log keeps elsewhere put back."""
    attached = as_dict(sample.get("attachments"))
    messages = as_dicts(sample.get("messages"))
    return [_resolved(message, attached) for message in messages] if attached else messages


def _resolved(value: Any, attached: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_ATTACHED):
        return attached.get(value.removeprefix(_ATTACHED), value)
    if isinstance(value, list):
        return [_resolved(item, attached) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item, attached) for key, item in value.items()}
    return value


def _tools(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of the first request to a model that had any."""
    for event in as_dicts(sample.get("events")):
        tools = [tool for tool in as_dicts(event.get("tools")) if as_text(tool.get("name"))]
        if tools:
            kept = ("name", "description", "parameters")
            return [{"type": "function", "function": {k: tool[k] for k in kept if k in tool}} for tool in tools]
    return []


def _reward(scores: Any) -> float | None:
    for score in as_dict(scores).values():
        value = as_dict(score).get("value")
        if isinstance(value, str) and value in _GRADES:
            return _GRADES[value]
        if (number := as_number(value)) is not None:
            return number
    return None


def _text(message: Mapping[str, Any]) -> str:
    """Text of a message; a failed call may say it only in its error."""
    said = plain_text(message.get("content"))
    failed = as_text(as_dict(message.get("error")).get("message"))
    return said if said.strip() or message.get("role") != "tool" else failed or ""


def _reasoning(message: Mapping[str, Any]) -> str:
    parts = (as_text(part.get("reasoning")) for part in as_dicts(message.get("content")))
    return "\n\n".join(part for part in parts if part) if message.get("role") == "assistant" else ""


def _totals(message: Mapping[str, Any]) -> Totals:
    calls = len(as_dicts(message.get("tool_calls")))
    return Totals(calls, int(message.get("role") == "tool"), characters(_text(message), _reasoning(message)))


def _add(builder: Builder, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role == "assistant":
        other = [part for part in as_dicts(message.get("content")) if part.get("type") not in ("text", "reasoning")]
        builder.text(other)
        builder.assistant(
            _text(message),
            reasoning=_reasoning(message),
            calls=builder.calls(message.get("tool_calls"), name_key="function"),
            weight=1.0,
        )
        return
    if role == "tool":
        error = as_dict(message.get("error"))
        signal = ErrorSignal("flag", {"error_type": str(error.get("type"))}) if error else None
        builder.result(as_text(message.get("tool_call_id")) or "", _text(message), signal=signal)
    elif role in ("system", "user"):
        builder.text(message.get("content"))
        builder.say("system" if role == "system" else "user", _text(message))
    else:
        builder.skip("unknown_role", f"role {role!r}", Totals(characters=characters(_text(message))))
    if count := len(as_dicts(message.get("tool_calls"))):
        builder.skip("call_by_another_role", str(role), Totals(calls=count))
