"""mini-swe-agent: a list of messages in which commands and their output are plain text.

Trajectories are ``{"info", "messages", "trajectory_format"}`` or, in the first versions, the bare list. An assistant
writes one fenced command; the next user message holds ``<returncode>`` and the output. The command stays in the text
and is kept beside it as a call. Newer trajectories with ``tool_calls`` have their results in ``tool`` messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    as_text,
    characters,
    openai_call_count,
    openai_tool_calls,
    plain_text,
    present,
)
from limbeck.traces.schema import ToolCall, Trace

_COMMAND = re.compile(r"```(?:bash|sh|mswea_bash_command)\s*\n(.*?)\n?```", re.DOTALL)
_RETURN_CODE = re.compile(r"\s*<returncode>\s*(-?\d+)\s*</returncode>")
_TIMED_OUT = re.compile(r"\s*The last command <command>.*?</command> timed out", re.DOTALL)


class MiniSWEAgentReader(RecordReader):
    """Messages whose commands are text; one object is one trace."""

    name = "mini_swe_agent"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """The format's own name, or an answer that is a return code."""
        if str(data.get("trajectory_format")).startswith("mini-swe-agent"):
            return True
        messages = as_dicts(data.get("messages"))
        return any(
            m.get("role") in ("user", "tool") and _RETURN_CODE.match(plain_text(m.get("content"))) for m in messages
        )

    def convert(self, record: Record, log: ReadLog) -> Trace:
        """One trace per trajectory."""
        data = record.data
        messages = present(as_dicts(data.get("messages")), record)
        builder = Builder(log, record.line)
        command: str | None = None
        for number, message in enumerate(messages):
            command = _add(builder, message, number, command)
        info = as_dict(data.get("info"))
        name = as_text(data.get("instance_id"))
        return builder.trace(
            name, group_id=name, meta={"exit_status": status} if (status := as_text(info.get("exit_status"))) else {}
        )

    def totals(self, record: Record) -> Totals:
        """Totals of all messages; a command is a call, and what answers it a result."""
        totals = Totals()
        waits = False
        for message in as_dicts(record.data.get("messages")):
            role, text = message.get("role"), plain_text(message.get("content"))
            calls = openai_call_count(message.get("tool_calls")) if role == "assistant" else 0
            written = role == "assistant" and not calls and bool(_command(text))
            answers = role == "tool" or (role == "user" and waits and bool(text.strip()))
            totals += Totals(calls + written, int(answers), characters(text, _thought(message)))
            waits = written or (waits and role not in ("assistant", "user"))
        return totals


def _thought(message: Mapping[str, Any]) -> str | None:
    return as_text(message.get("reasoning_content")) if message.get("role") == "assistant" else None


def _command(text: str) -> str | None:
    commands = _COMMAND.findall(text)
    return commands[0] if len(commands) == 1 and commands[0].strip() else None


def _add(builder: Builder, message: Mapping[str, Any], number: int, waiting: str | None) -> str | None:
    """Add a message; returns the id of the written call that the next user message answers."""
    role, text = message.get("role"), builder.text(message.get("content"))
    if role == "assistant":
        calls = openai_tool_calls(message.get("tool_calls"))
        command = _command(text)
        if not calls and command is not None:
            calls = [ToolCall(id=f"step_{number}", name="bash", arguments={"command": command}, in_content=True)]
        builder.assistant(text, reasoning=_thought(message), calls=calls, weight=1.0)
        return f"step_{number}" if calls and calls[0].in_content else None
    if role == "tool":
        builder.result(as_text(message.get("tool_call_id")) or "", text, signal=_failure(message, text))
    elif role == "user" and waiting is not None and text.strip():
        builder.result(waiting, text, signal=_failure(message, text))
        return None
    elif role in ("user", "system"):
        builder.say("user" if role == "user" else "system", text)
        return waiting if role == "system" else None
    else:
        reason = "event_exit" if role == "exit" else "unknown_role"
        builder.skip(reason, f"role {role!r}", Totals(characters=characters(text)))
    return waiting


def _failure(message: Mapping[str, Any], text: str) -> ErrorSignal | None:
    written = _RETURN_CODE.match(text)
    code = int(written[1]) if written is not None else as_dict(message.get("extra")).get("returncode")
    if isinstance(code, int) and code != 0:
        return ErrorSignal("exit_code", {"exit_code": code})
    return ErrorSignal("timed_out") if _TIMED_OUT.match(text) else None
