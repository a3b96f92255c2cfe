"""Which tool results failed, and how.

A result counts as failed only by an explicit signal: the log's own flag, an exit code, or a prefix that the environment
itself writes in front of a failure. Searching for the word "error" would count every source listing that contains it.
The *kind* is then read off the text of a result that is already known to have failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limbeck.traces.schema import Message, ToolCall

ERROR_KINDS: tuple[str, ...] = (
    "unknown_tool",
    "invalid_json",
    "missing_argument",
    "extra_argument",
    "bad_argument",
    "file_not_found",
    "command_not_found",
    "permission",
    "timeout",
    "no_match",
    "syntax_error",
    "too_large",
    "declined",
    "cancelled",
    "exception",
    "nonzero_exit",
    "environment",
)
"""Every kind a reader may assign; ``environment`` is a failure that the environment states in its own words."""


@dataclass(frozen=True)
class ErrorSignal:
    """An explicit sign of failure: the detector that saw it and facts for the hint."""

    detector: str
    meta: dict[str, Any] = field(default_factory=dict)


# Text of failures, most specific first. Only ever applied to a result that a detector has already marked.
_KIND_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE | re.MULTILINE))
    for kind, pattern in (
        ("cancelled", r"sibling tool call errored|tool (?:use|call) was cancelled"),
        ("declined", r"user doesn't want to (?:proceed|take this action)|tool use was rejected|denied by the user"),
        ("timeout", r"^EXECUTION TIMED OUT|\btimed out\b|\btimeout (?:of|after|expired|exceeded)"),
        (
            "unknown_tool",
            r"no such tool|unknown (?:tool|function)|(?:tool|function) \S+ (?:is not|does not exist|not found)",
        ),
        ("invalid_json", r"invalid json|JSONDecodeError|could not parse (?:the )?(?:arguments|json)|not valid json"),
        (
            "missing_argument",
            r"missing (?:\d+ )?required|(?:parameter|argument) [`'\"]?\w+[`'\"]? is (?:required|missing)",
        ),
        (
            "extra_argument",
            r"unexpected (?:keyword )?(?:argument|parameter)|unrecognized arguments?|additional properties",
        ),
        (
            "bad_argument",
            r"is expected to be one of|invalid [`'\"]?\w+[`'\"]? parameter|InputValidationError|invalid type|"
            r"must be (?:an? )?(?:int|integer|number|string|boolean|list|array|object)\b",
        ),
        (
            "no_match",
            r"string to replace not found|did not appear verbatim|multiple occurrences of|no replacement was performed",
        ),
        ("syntax_error", r"introduced new syntax error|^\s*(?:SyntaxError|IndentationError)\b"),
        ("too_large", r"exceeds maximum allowed|output (?:is )?too (?:large|long)"),
        ("command_not_found", r"command not found|not recognized as an internal"),
        ("permission", r"permission denied|operation not permitted|requires? (?:approval|permission)|EACCES"),
        ("file_not_found", r"no such file|file does not exist|file not found|FileNotFoundError|ENOENT"),
        ("exception", r"^Traceback \(most recent call last\)"),
    )
)

_HEAD, _TAIL = 600, 400
_EXIT_CODE = re.compile(r"\A(?:Error: )?Exit code (\d+)")


def classify_error(
    text: str,
    *,
    call: ToolCall | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    meta: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The kind of a failure that is already established, and facts about it.

    The call is checked against the tool schemas first: a wrong name or argument is the cause whatever the text says.
    Long outputs are judged by their head and tail, where environments put the message.
    """
    facts = dict(meta or {})
    if call is not None:
        problem = check_call(call, tools)
        if problem is not None:
            return problem[0], {**facts, **problem[1]}
    exit_code = _EXIT_CODE.match(text)
    if exit_code is not None:
        facts.setdefault("exit_code", int(exit_code.group(1)))
    excerpt = text if len(text) <= _HEAD + _TAIL else text[:_HEAD] + "\n" + text[-_TAIL:]
    for kind, pattern in _KIND_PATTERNS:
        # The output of a command that ran is its own: only what a shell or the harness reports may name the kind.
        if "exit_code" in facts and kind not in _SHELL_KINDS:
            continue
        if pattern.search(excerpt):
            return kind, facts
    return ("nonzero_exit" if "exit_code" in facts else "environment"), facts


_SHELL_KINDS = {"timeout", "command_not_found", "permission", "file_not_found", "cancelled", "declined"}

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def check_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Mistake in a call according to the tool schemas; None where nothing is, or no schema is known."""
    # arguments are kept as text only where they do not parse, or where the call is written in the content
    if isinstance(call.arguments, str) and not call.in_content:
        return "invalid_json", {"tool": call.name}
    schemas = {name: spec for name, spec in map(_tool_schema, tools) if name}
    if not schemas or call.in_content:
        return None
    if call.name not in schemas:
        return "unknown_tool", {"tool": call.name, "known_tools": sorted(schemas)}
    return _check_arguments(call, schemas[call.name])


def _tool_schema(tool: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return None, {}
    parameters = function.get("parameters") or function.get("input_schema") or {}
    name = function.get("name")
    return (name if isinstance(name, str) else None), (parameters if isinstance(parameters, Mapping) else {})


def _check_arguments(call: ToolCall, schema: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not isinstance(call.arguments, dict):
        return None
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    missing = [name for name in names if name not in call.arguments]
    if missing:
        return "missing_argument", {"tool": call.name, "missing": missing}
    # JSON Schema allows further properties unless it says otherwise.
    extra = [name for name in call.arguments if name not in properties]
    if extra and schema.get("additionalProperties") is False:
        return "extra_argument", {"tool": call.name, "extra": extra, "known_arguments": sorted(properties)}
    for name, value in call.arguments.items():
        spec = properties.get(name)
        if isinstance(spec, Mapping) and (expected := _mistyped(value, spec)) is not None:
            return "bad_argument", {"tool": call.name, "argument": name, "expected": expected}
    return None


def _mistyped(value: Any, spec: Mapping[str, Any]) -> str | None:
    expected = spec.get("type")
    if isinstance(spec.get("enum"), list) and value not in spec["enum"]:
        return "one of " + ", ".join(map(str, spec["enum"]))
    if not isinstance(expected, str) or expected not in _JSON_TYPES:
        return None
    # a bool is an int in Python, and no number in JSON Schema
    fits = isinstance(value, _JSON_TYPES[expected]) and (expected == "boolean" or not isinstance(value, bool))
    return None if fits else f"of type {expected}"


# -- detectors ---------------------------------------------------------------------------------------------------------

_OPENAI_PREFIXES = ("Error:", "ERROR:", "Traceback (most recent call last)", "<tool_use_error>", "<error>")
_SHELL_FAILURE = re.compile(r"\S[^\n]*(?:No such file(?: or directory)?|command not found|Permission denied)[.')]*\Z")
_TIMED_OUT_LINE = re.compile(r"^EXECUTION TIMED OUT", re.MULTILINE)


def detect_prefix(text: str) -> ErrorSignal | None:
    """Tool messages of OpenAI-style logs carry no flag; environments write ``Error:`` in front of a failure."""
    return ErrorSignal("error_prefix") if text.startswith(_OPENAI_PREFIXES) else None


def detect_swe_agent(text: str) -> ErrorSignal | None:
    """Sign of a failed step in what SWE-agent's environment says."""
    stripped = text.strip()
    if stripped.startswith("Your proposed edit has introduced new syntax error(s)"):
        return ErrorSignal("edit_rejected")
    if stripped.startswith("Traceback (most recent call last)"):
        return ErrorSignal("traceback")
    if _TIMED_OUT_LINE.search("\n".join(stripped.splitlines()[-3:])):
        return ErrorSignal("timed_out")
    if _SHELL_FAILURE.fullmatch(stripped):
        return ErrorSignal("shell_message")
    return None


def detect_openhands(event: Mapping[str, Any]) -> ErrorSignal | None:
    """An ``error`` observation, or a command with an exit code other than 0."""
    if event.get("observation") == "error":
        return ErrorSignal("error_observation")
    extras = event.get("extras")
    metadata = extras.get("metadata") if isinstance(extras, Mapping) else None
    code = metadata.get("exit_code") if isinstance(metadata, Mapping) else None
    if code is None and isinstance(extras, Mapping):
        code = extras.get("exit_code")
    if isinstance(code, int) and not isinstance(code, bool) and code != 0:
        return ErrorSignal("exit_code", {"exit_code": code})
    return None


def mark_error(
    message: Message,
    signal: ErrorSignal,
    *,
    call: ToolCall | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    text: str | None = None,
) -> Message:
    """A copy of a tool message that carries the failure; ``text`` is the raw observation where it differs."""
    kind, meta = classify_error(text if text is not None else message.content, call=call, tools=tools, meta=signal.meta)
    return message.model_copy(
        update={"is_error": True, "error_kind": kind, "error_meta": meta, "detector": signal.detector}
    )
