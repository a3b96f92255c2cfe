"""OpenAI Responses: a list of items, in which messages, reasoning, calls and their outputs stand side by side.

Recognised objects: a stored response (``{"object": "response", "output": [...]}``), a request with its ``input``
items, and both together, in one object, under ``request`` and ``response``, or as NeMo Gym stores rollouts, under
``responses_create_params`` and ``response``. The items are also what Codex CLI logs, one per line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
    parse_arguments,
    plain_text,
    present,
)
from limbeck.traces.schema import Role, ToolCall, Trace

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user"}
_CALLS = ("function_call", "custom_tool_call", "local_shell_call", "mcp_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
ITEM_TYPES = ("message", "reasoning", *_CALLS, *_OUTPUTS)
"""Items that say something; others (searches of the provider, references) are counted and left out."""


class OpenAIResponsesReader(RecordReader):
    """Items of requests and responses; one object is one trace."""

    name = "openai_responses"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """A response, or items that carry calls or outputs."""
        if as_dict(data.get("response") or data).get("object") == "response":
            return True
        items = _items(data)
        return bool(items) and all("type" in item for item in items[-1:]) and any(map(_is_own, items))

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        items = present(_items(data), record, "items")
        builder = Builder(log, record.line, _tools(data))
        for others in _transitions(data)[1:]:
            builder.skip("other_transition", f"{len(others)} items", sum(map(item_totals, others), Totals()))
        builder.say("system", builder.text(_field(data, "instructions")))
        for item in items:
            add_item(builder, item)
        name = as_text(as_dict(data.get("response")).get("id")) or as_text(data.get("id"))
        return builder.trace(name, final_reward=as_number(data.get("reward")))

    def totals(self, record: Record) -> Totals:
        instructions = Totals(characters=characters(plain_text(_field(record.data, "instructions"))))
        others = [item for items in _transitions(record.data)[1:] for item in items]
        return sum(map(item_totals, [*_items(record.data), *others]), instructions)


def _is_own(item: Mapping[str, Any]) -> bool:
    if item.get("type") == "message":
        return any(part.get("type") in ("input_text", "output_text") for part in as_dicts(item.get("content")))
    return item.get("type") in ITEM_TYPES


def _field(data: Mapping[str, Any], key: str) -> Any:
    """A field of the request, else of the response, else of the object itself."""
    requests = (as_dict(data.get(name)) for name in ("request", "responses_create_params"))
    sources = (*requests, as_dict(data.get("response")), data)
    return next((source[key] for source in sources if source.get(key)), None)


def _items(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = _field(data, "input")
    asked = [{"type": "message", "role": "user", "content": items}] if isinstance(items, str) else as_dicts(items)
    transitions = _transitions(data)
    return [*asked, *(transitions[0] if transitions else as_dicts(_field(data, "output")))]


def _transitions(data: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Outputs that are lists of items, one for every step of an environment: the longest, then those that it does not
    begin with. Each step repeats what was said before it."""
    output = _field(data, "output")
    steps = [as_dicts(step) for step in output if isinstance(step, list)] if isinstance(output, list) else []
    if not steps:
        return []
    longest = max(steps, key=len)
    return [longest, *(step for step in steps if step != longest[: len(step)])]


def _tools(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    functions = [tool for tool in as_dicts(_field(data, "tools")) if as_text(tool.get("name"))]
    kept = ("name", "description", "parameters", "strict")
    return [{"type": "function", "function": {key: tool[key] for key in kept if key in tool}} for tool in functions]


# -- items -------------------------------------------------------------------------------------------------------------


def item_totals(item: Mapping[str, Any]) -> Totals:
    """Totals of one item."""
    kind = item.get("type", "message")
    if kind == "message":
        return Totals(characters=characters(plain_text(item.get("content")), _refusals(item)))
    if kind == "reasoning":
        return Totals(characters=characters(_reasoning(item)))
    if kind == "mcp_call":
        output = output_text(item.get("output") or item.get("error"))
        return Totals(1, int(bool(output)), characters(output))
    if kind in _CALLS:
        return Totals(calls=1)
    return Totals(results=1, characters=characters(output_text(item.get("output")))) if kind in _OUTPUTS else Totals()


def add_item(builder: Builder, item: Mapping[str, Any], exit_code: int | None = None) -> None:
    """Add one item; ``exit_code`` is that of the command whose output it is, where the log has it elsewhere."""
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(builder, item)
    elif kind == "reasoning":
        if thought := _reasoning(item):
            builder.assistant(reasoning=thought)
        else:
            builder.skip("hidden_reasoning")
    elif kind in _CALLS:
        _add_call(builder, item)
    elif kind in _OUTPUTS:
        output = item.get("output")
        builder.result(as_text(item.get("call_id")) or "", output_text(output), signal=_failure(item, exit_code))
    else:
        builder.skip("unknown_item", str(kind))


def _add_message(builder: Builder, item: Mapping[str, Any]) -> None:
    role = str(item.get("role"))
    if role == "assistant":
        refused = _refusals(item)
        content = item.get("content")
        if isinstance(content, list):
            content = [part for part in content if as_dict(part).get("type") != "refusal"]
        builder.assistant(builder.text(content))
        if refused:
            builder.assistant(refused)
    elif role in _ROLES:
        builder.say(_ROLES[role], builder.text(item.get("content")))
    else:
        builder.skip("unknown_role", f"role {role!r}", item_totals(item))


def _refusals(item: Mapping[str, Any]) -> str:
    return "\n".join(
        as_text(part.get("refusal")) or ""
        for part in as_dicts(item.get("content"))
        if part.get("type") == "refusal" and item.get("role") == "assistant"
    )


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = as_dicts(item.get("content")) or as_dicts(item.get("summary"))
    return "\n\n".join(text for part in parts if (text := as_text(part.get("text"))))


def _add_call(builder: Builder, item: Mapping[str, Any]) -> None:
    kind, name = item["type"], as_text(item.get("name"))
    call_id = as_text(item.get("call_id")) or as_text(item.get("id"))
    arguments: dict[str, Any] | str
    if kind == "local_shell_call":
        name, arguments = "local_shell", as_dict(item.get("action"))
    elif kind == "custom_tool_call":
        arguments = {"input": item.get("input")}
    else:
        arguments = parse_arguments(item.get("arguments"))
    if name is None or call_id is None:
        builder.skip("unusable_call", f"id {call_id!r}, name {name!r}", item_totals(item))
        return
    builder.assistant(calls=[ToolCall(id=call_id, name=name, arguments=arguments)])
    if kind == "mcp_call" and (output := output_text(item.get("output") or item.get("error"))):
        builder.result(call_id, output, signal=ErrorSignal("flag") if item.get("error") else None)


_EXIT_LINE = re.compile(r"^(?:Exit code: |Process exited with code )(-?\d+)$", re.MULTILINE)
_OUTPUT_LINE = "\nOutput:"
_REFUSED = re.compile(r"failed in sandbox [^\n]{0,200}?exit code: (-?\d+)")
"""Text that older versions of Codex wrote in place of the output of a command that failed in their sandbox."""


def output_text(output: Any) -> str:
    """Output of a call: plain text, parts, or the text inside an object that also says how it ended."""
    fields = _output_object(output)
    if fields:
        inner = fields.get("output", fields.get("content"))
        return plain_text(inner) if inner is not None else json.dumps(fields, ensure_ascii=False)
    return plain_text(output)


def _output_object(output: Any) -> dict[str, Any]:
    if isinstance(output, str) and output.startswith('{"output"'):
        output = parse_arguments(output)
    known = isinstance(output, dict) and ("output" in output or "content" in output)
    return output if known else {}


def _failure(item: Mapping[str, Any], exit_code: int | None) -> ErrorSignal | None:
    fields = _output_object(item.get("output"))
    code = as_dict(fields.get("metadata")).get("exit_code", exit_code)
    # above the output Codex writes how the command ended
    head, mark, _ = output_text(item.get("output"))[:600].partition(_OUTPUT_LINE)
    if code is None and (refused := _REFUSED.match(head)):
        code = int(refused[1])
    if code is None and mark and (line := _EXIT_LINE.search(head)):
        code = int(line[1])
    if isinstance(code, int) and code != 0:
        return ErrorSignal("exit_code", {"exit_code": code})
    if fields.get("success") is False or item.get("status") in ("failed", "incomplete"):
        return ErrorSignal("flag")
    return detect_prefix(output_text(item.get("output"))) if code is None else None
