"""tau2-bench results: simulations of an agent, a user and their tools.

A results file holds ``simulations`` beside the tasks; each becomes a trace. In some domains the simulated user has
tools of its own: its calls and their results are not the agent's, and are counted and left out. The domain's policy
stands in front as the system message; the tools' schemas are not in the log (``--tools FILE`` gives them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal, detect_prefix
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
    plain_text,
    present,
)
from limbeck.traces.schema import Trace


class Tau2Reader(RecordReader):
    """Simulations; each is one trace."""

    name = "tau2"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Simulations of tasks, or one of them."""
        simulations = as_dicts(data.get("simulations"))
        return (bool(simulations) and "messages" in simulations[0]) or _is_simulation(data)

    def read(self, records: Iterator[Record], log: ReadLog) -> Iterator[Trace]:
        """One trace per simulation."""
        yield from super().read(_simulations(records), log)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        """One simulation."""
        data = record.data
        messages = present(_messages(data), record)
        builder = Builder(log, record.line)
        builder.say("system", as_text(data.get("policy")) or "")
        for message in messages:
            _add(builder, message)
        task = data.get("task_id")
        return builder.trace(
            as_text(data.get("id")) or f"{log.stem}/{task}/{data.get('trial', 0)}",
            group_id=f"{log.stem}/{task}" if task is not None else None,
            final_reward=as_number(as_dict(data.get("reward_info")).get("reward")),
        )

    def totals(self, record: Record) -> Totals:
        """Totals of the messages of all simulations, each with the policy in front."""
        return sum(map(self.trace_totals, _simulations(iter([record]))), Totals())

    def trace_totals(self, record: Record) -> Totals:
        """Totals of one simulation."""
        policy = Totals(characters=characters(as_text(record.data.get("policy"))))
        return sum(map(_totals, _messages(record.data)), policy)


def _is_simulation(data: Mapping[str, Any]) -> bool:
    return "messages" in data and "reward_info" in data and "task_id" in data


def _simulations(records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        if _is_simulation(record.data):
            yield record
            continue
        policy = as_dict(as_dict(record.data.get("info")).get("environment_info")).get("policy")
        for simulation in as_dicts(record.data.get("simulations")):
            yield Record(record.line, {"policy": policy, **simulation})


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages; results of parallel calls may stand together in one."""
    messages: list[dict[str, Any]] = []
    for message in as_dicts(data.get("messages")):
        messages += as_dicts(message.get("tool_messages")) or [message]
    return messages


def _totals(message: Mapping[str, Any]) -> Totals:
    calls = openai_call_count(message.get("tool_calls"))
    return Totals(calls, int(message.get("role") == "tool"), characters(plain_text(message.get("content"))))


def _add(builder: Builder, message: Mapping[str, Any]) -> None:
    role, text = message.get("role"), builder.text(message.get("content"))
    calls = openai_call_count(message.get("tool_calls"))
    if role == "assistant":
        builder.assistant(text, calls=openai_tool_calls(message.get("tool_calls")), weight=1.0)
        return
    if role == "tool" and message.get("requestor") == "user":
        builder.skip("tool_of_the_user", totals=Totals(results=1, characters=characters(text)))
    elif role == "tool":
        failed = ErrorSignal("flag") if message.get("error") is True else detect_prefix(text)
        builder.result(as_text(message.get("id")) or "", text, signal=failed)
    elif role in ("user", "system"):
        builder.say("user" if role == "user" else "system", text)
    else:
        builder.skip("unknown_role", f"role {role!r}", Totals(characters=characters(text)))
    if calls:
        builder.skip("tool_of_the_user", str(role), Totals(calls=calls))
