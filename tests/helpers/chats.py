"""Messages, calls and results of agent traces, in few words."""

from __future__ import annotations

from typing import Any

from limbeck.traces.errors import ErrorSignal, mark_error
from limbeck.traces.schema import Message, ToolCall, Trace


def say(role: str, content: str = "", *calls: ToolCall, **fields: Any) -> Message:
    """A message of any role."""
    return Message(role=role, content=content, tool_calls=list(calls), **fields)  # type: ignore[arg-type]


def asked(content: str) -> Message:
    return say("user", content)


def said(content: str = "", *calls: ToolCall, **fields: Any) -> Message:
    return say("assistant", content, *calls, **fields)


def call(call_id: str = "c1", name: str = "look", **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def answer(made: ToolCall, content: str, failed: bool = False, tools: tuple[dict[str, Any], ...] = ()) -> Message:
    """The result of a call; where it failed, with the kind that its text and the tools' schemas tell."""
    message = Message(role="tool", content=content, tool_call_id=made.id, name=made.name)
    return mark_error(message, ErrorSignal("flag"), call=made, tools=tools) if failed else message


def numbered(number: int, name: str = "read", **arguments: Any) -> ToolCall:
    """A call whose id, and by default whose argument, is a number."""
    return ToolCall(id=f"call{number:05d}", name=name, arguments=arguments or {"path": f"{number}.txt"})


def result(number: int, content: str = "done", *, failed: bool = False) -> Message:
    """The result of a numbered call."""
    error = {"is_error": True, "error_kind": "file_not_found"} if failed else {}
    return Message(role="tool", content=content, tool_call_id=f"call{number:05d}", name="read", **error)


def long_trace(rounds: int, failed: tuple[int, ...] = (), words: int = 12) -> Trace:
    """User question, then ``rounds`` calls with results; the calls numbered in ``failed`` fail."""
    messages = [Message(role="system", content="Be careful."), asked("Read all the files.")]
    for i in range(rounds):
        messages.append(said(f"Now number {i}.", numbered(i)))
        messages.append(result(i, f"text {i} " * words, failed=i in failed))
    messages.append(said("All read."))
    return Trace(id=f"long{rounds}", messages=messages, final_reward=1.0)
