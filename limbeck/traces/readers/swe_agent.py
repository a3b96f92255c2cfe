"""SWE-agent trajectories: steps of thought, action and observation, with the prompts in ``history``.

A step of a text-based agent becomes one assistant message that holds the whole response; its action is also kept as a
structured call (``bash`` with the command) so that actions can be compared. Where the agent used function calling, the
history has the real calls, and those are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from limbeck.traces.errors import detect_swe_agent, mark_error
from limbeck.traces.readers.base import (
    ReadLog,
    Record,
    RecordReader,
    SkipRecord,
    Totals,
    as_dict,
    as_dicts,
    as_text,
    characters,
    content_text,
    openai_call_count,
    openai_tool_calls,
    openai_tools,
    plain_text,
)
from limbeck.traces.schema import Message, Role, ToolCall, Trace


class SWEAgentReader(RecordReader):
    """Trajectories of steps."""

    name = "swe_agent"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Steps with an action and an observation, or a history whose messages name their agent."""
        steps = _steps(data)
        if steps:
            return all(isinstance(steps[0].get(key), str) for key in ("action", "observation"))
        history = as_dicts(data.get("history"))
        return bool(history) and "role" in history[0] and "agent" in history[0]

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        steps = _steps(data)
        if not steps:
            raise SkipRecord("no_steps", "a history without steps is a demonstration, not a run")
        prompts, turns = _history(data)
        messages = [_prompt(item, log, record.line) for item in prompts]
        for number, (step, seen, reply) in enumerate(_paired(steps, turns)):
            _append_step(messages, step, number, seen, reply, log, record.line)
        source = as_text(data.get("source")) or as_text(data.get("instance_id"))
        name = source or as_text(as_dict(data.get("info")).get("instance_id"))
        return Trace(
            id=name or log.unnamed(record.line),
            group_id=as_text(data.get("instance_id")),
            origin=log.origin(record.line),
            tools=openai_tools(data.get("tools")),
            messages=messages,
            meta={"exit_status": status} if (status := as_text(as_dict(data.get("info")).get("exit_status"))) else {},
        )

    def totals(self, record: Record) -> Totals:
        prompts, turns = _history(record.data)
        totals = Totals(characters=sum(characters(plain_text(item.get("content"))) for item in prompts))
        for step, seen, reply in _paired(_steps(record.data), turns):
            calls = openai_call_count(seen.get("tool_calls")) or int(bool(_command(step)))
            output = _shown(plain_text(step.get("observation")), plain_text(reply.get("content")))
            totals += Totals(calls, int(calls > 0), characters(_said(step), output))
        return totals


def _steps(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return as_dicts(data.get("trajectory")) or as_dicts(data.get("steps"))


def _history(data: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prompts in front of the first action, and the turns from it on."""
    history = [item for item in as_dicts(data.get("history")) if "role" in item]
    first_action = next((i for i, item in enumerate(history) if item["role"] == "assistant"), len(history))
    return history[:first_action], history[first_action:]


def _prompt(item: dict[str, Any], log: ReadLog, line: int) -> Message:
    role: Role = "system" if item["role"] == "system" else "user"
    return Message(role=role, content=content_text(item.get("content"), log, line))


def _paired(
    steps: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Every step with its turn of the history and the environment's reply there, empty where it has none.

    The history is the better evidence (real calls, the observation with the prompt line that the model saw), but it may
    lack steps, so it is used only where its action is this step's.
    """
    step_index = 0
    for step in steps:
        seen: dict[str, Any] = {}
        reply: dict[str, Any] = {}
        if step_index < len(turns) and turns[step_index].get("action") == step.get("action"):
            seen, step_index = turns[step_index], step_index + 1
            if step_index < len(turns) and turns[step_index].get("role") != "assistant":
                reply, step_index = turns[step_index], step_index + 1
        yield step, seen, reply


def _said(step: dict[str, Any]) -> str:
    return as_text(step.get("response")) or as_text(step.get("thought")) or ""


def _command(step: dict[str, Any]) -> str:
    action = step.get("action")
    return action.strip() if isinstance(action, str) else ""


def _shown(observation: str, reply: str) -> str:
    return reply if observation in reply else observation


def _append_step(
    messages: list[Message],
    step: dict[str, Any],
    number: int,
    seen: dict[str, Any],
    reply: dict[str, Any],
    log: ReadLog,
    line: int,
) -> None:
    """Add a step's assistant and tool messages."""
    observation = content_text(step.get("observation"), log, line)
    calls = openai_tool_calls(seen.get("tool_calls"))
    response, command = _said(step), _command(step)
    if not calls and command:
        calls = [
            ToolCall(id=f"step_{number}", name="bash", arguments={"command": command}, in_content=command in response)
        ]
    messages.append(Message(role="assistant", content=response, tool_calls=calls))
    output = _shown(observation, content_text(reply.get("content"), log, line)) if reply else observation
    if calls:
        result = Message(role="tool", content=output, tool_call_id=calls[0].id, name=calls[0].name)
        signal = detect_swe_agent(observation)
        messages.append(result if signal is None else mark_error(result, signal, call=calls[0], text=observation))
    elif output:
        messages.append(Message(role="user", content=output))
