"""SWE-agent trajectories: steps of thought, action and observation, with the prompts in ``history``.

A step of a text-based agent becomes one assistant message that holds the whole response; its action is also kept as a
structured call (``bash`` with the command) so that actions can be compared. Where the agent used function calling, the
history has the real calls, and those are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import detect_swe_agent, mark_error
from limbeck.traces.readers.base import (
    ReadLog,
    Record,
    RecordReader,
    SkipRecord,
    as_dict,
    as_dicts,
    as_text,
    content_text,
    openai_tool_calls,
    openai_tools,
)
from limbeck.traces.schema import Message, Role, ToolCall, Trace


class SWEAgentReader(RecordReader):
    """Trajectories of steps."""

    name = "swe_agent"
    about = "SWE-agent trajectories of thought, action and observation"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Steps with an action and an observation, or a history whose messages name their agent."""
        steps = _steps(data)
        if steps:
            return "action" in steps[0] and "observation" in steps[0]
        history = as_dicts(data.get("history"))
        return bool(history) and "role" in history[0] and "agent" in history[0]

    def convert(self, record: Record, log: ReadLog) -> Trace:
        """One trace per trajectory."""
        data = record.data
        steps = _steps(data)
        if not steps:
            raise SkipRecord("no_steps", "a history without steps is a demonstration, not a run")
        history = [item for item in as_dicts(data.get("history")) if "role" in item]
        first_action = next((i for i, item in enumerate(history) if item["role"] == "assistant"), len(history))
        messages = [_prompt(item, log, record.line) for item in history[:first_action]]
        turns = history[first_action:]
        for number, step in enumerate(steps):
            turns = _append_step(messages, step, number, turns, log, record.line)
        source = as_text(data.get("source")) or as_text(data.get("instance_id"))
        name = source or as_text(as_dict(data.get("info")).get("instance_id")) or log.stem
        return Trace(
            id=name if source else f"{name}:{record.line}",
            group_id=as_text(data.get("instance_id")),
            origin=log.origin(record.line),
            tools=openai_tools(data.get("tools")),
            messages=messages,
            meta={"exit_status": status} if (status := as_text(as_dict(data.get("info")).get("exit_status"))) else {},
        )


def _steps(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return as_dicts(data.get("trajectory")) or as_dicts(data.get("steps"))


def _prompt(item: dict[str, Any], log: ReadLog, line: int) -> Message:
    role: Role = "system" if item["role"] == "system" else "user"
    return Message(role=role, content=content_text(item.get("content"), log, line))


def _append_step(
    messages: list[Message],
    step: dict[str, Any],
    number: int,
    turns: list[dict[str, Any]],
    log: ReadLog,
    line: int,
) -> list[dict[str, Any]]:
    """Add a step's assistant and tool messages; returns the history that is left after it.

    The history is the better evidence (real calls, the observation with the prompt line that the model saw), but it may
    lack steps, so it is used only where its action is this step's.
    """
    action = step.get("action") if isinstance(step.get("action"), str) else ""
    observation = content_text(step.get("observation"), log, line)
    seen = turns[0] if turns and turns[0].get("action") == step.get("action") else {}
    calls = openai_tool_calls(seen.get("tool_calls"))
    response = as_text(step.get("response")) or as_text(step.get("thought")) or ""
    if not calls and action and action.strip():
        in_content = action.strip() in response
        calls = [
            ToolCall(id=f"step_{number}", name="bash", arguments={"command": action.strip()}, in_content=in_content)
        ]
    messages.append(Message(role="assistant", content=response, tool_calls=calls))
    shown = observation
    if seen:
        turns = turns[1:]
        if turns and turns[0].get("role") != "assistant":
            text = content_text(turns[0].get("content"), log, line)
            shown = text if observation in text else observation
            turns = turns[1:]
    if calls:
        result = Message(role="tool", content=shown, tool_call_id=calls[0].id, name=calls[0].name)
        signal = detect_swe_agent(observation)
        messages.append(result if signal is None else mark_error(result, signal, call=calls[0], text=observation))
    elif shown:
        messages.append(Message(role="user", content=shown))
    return turns
