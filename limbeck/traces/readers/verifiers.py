"""Rollouts of verifiers: a prompt, a completion of many messages, and a reward.

``limbeck`` reads the rows that an evaluation or a trainer stores: ``{"prompt": [...], "completion": [...], "reward":
r}``. Calls may be stored as JSON text. Where the row keeps the tokens of every turn (``trajectory``), they become the
sampled ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import detect_prefix
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
    openai_call_count,
    openai_tool_calls,
    openai_tools,
    parse_arguments,
    plain_text,
    present,
)
from limbeck.traces.schema import Trace

_MARKS = ("reward", "example_id", "answer", "metrics", "trajectory")


class VerifiersReader(RecordReader):
    """Rollouts; one row is one trace."""

    name = "verifiers"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """A completion of messages behind a prompt, with something that only a rollout has."""
        return bool(_messages(data.get("completion"))) and "prompt" in data and any(key in data for key in _MARKS)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        present(_messages(data.get("completion")), record)
        info = _object(data.get("info"))
        builder = Builder(log, record.line, openai_tools(info.get("oai_tools") or data.get("tools")))
        tokens = _tokens(data)
        for message in _raw(data):
            _add(builder, message, tokens)
        example = data.get("example_id")
        task = as_text(data.get("task")) or log.stem
        group = f"{task}/{example}" if example is not None else None
        return builder.trace(
            as_text(data.get("id")) or as_text(data.get("trajectory_id")),
            group_id=group,
            final_reward=as_number(data.get("reward")),
        )

    def totals(self, record: Record) -> Totals:
        return sum(map(_totals, _raw(record.data)), Totals())


def _messages(value: Any) -> list[dict[str, Any]]:
    return [message for message in as_dicts(value) if "role" in message]


def _raw(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompt = data.get("prompt")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    answered = _messages(data.get("completion"))
    # some environments begin the completion with the prompt once more
    repeated = [(m["role"], m.get("content")) for m in answered[: len(asked)]]
    if repeated == [(m["role"], m.get("content")) for m in asked]:
        answered = answered[len(asked) :]
    return [*asked, *answered]


def _object(value: Any) -> dict[str, Any]:
    return as_dict(parse_arguments(value)) if isinstance(value, str) else as_dict(value)


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """The calls of a message, those that are JSON text unpacked."""
    raw_calls = message.get("tool_calls")
    return [_object(item) for item in raw_calls] if isinstance(raw_calls, list) else []


def _totals(message: Mapping[str, Any]) -> Totals:
    role = message.get("role")
    calls = openai_call_count(_calls(message))
    thought = as_text(message.get("reasoning_content")) if role == "assistant" else None
    return Totals(calls, int(role == "tool"), characters(plain_text(message.get("content")), thought))


def _tokens(data: Mapping[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs of every answer, last one first; empty where some answer has none."""
    sampled: list[tuple[list[int], list[float]]] = []
    for step in as_dicts(data.get("trajectory")):
        tokens = as_dict(step.get("tokens"))
        ids, logprobs = tokens.get("completion_ids"), tokens.get("completion_logprobs")
        if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs) or not ids:
            return []
        numbers = [value for value in map(as_number, logprobs) if value is not None]
        if len(numbers) != len(ids) or not all(type(i) is int for i in ids):
            return []
        sampled.append((ids, numbers))
    answers = sum(message.get("role") == "assistant" for message in _messages(data.get("completion")))
    return sampled[::-1] if len(sampled) == answers else []


def _add(builder: Builder, message: Mapping[str, Any], tokens: list[tuple[list[int], list[float]]]) -> None:
    role, text = message.get("role"), builder.text(message.get("content"))
    if role == "assistant":
        ids, logprobs = tokens.pop() if tokens else (None, None)
        thought = as_text(message.get("reasoning_content"))
        calls = openai_tool_calls(_calls(message))
        builder.assistant(text, reasoning=thought, calls=calls, weight=1.0, sampled_ids=ids, logprobs=logprobs)
        return
    if role == "tool":
        builder.result(as_text(message.get("tool_call_id")), text, signal=detect_prefix(text))
    elif role in ("system", "developer", "user"):
        builder.say("user" if role == "user" else "system", text)
    else:
        builder.skip("unknown_role", f"role {role!r}", Totals(characters=characters(text)))
    if count := openai_call_count(_calls(message)):
        builder.skip("call_by_another_role", str(role), Totals(calls=count))
