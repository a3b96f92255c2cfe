"""Tool calls in a text that a model wrote, as those of a trace."""

from __future__ import annotations

from limbeck.tokens.chat.calls import written_calls
from limbeck.traces.schema import ToolCall


def parse_calls(text: str) -> list[ToolCall]:
    """The calls in an answer, in order; empty where none parses; see `written_calls`."""
    return [
        ToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments)
        for number, call in enumerate(written_calls(text))
    ]
