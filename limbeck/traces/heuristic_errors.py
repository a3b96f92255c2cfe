"""Which results look failed although nothing flags them.

Many environments flag nothing. ``suspect`` looks at the shape of a result: JSON and MCP errors, tracebacks, messages of
shells and tools, exit codes that are only printed, or that a pipe has hidden. That is a guess, kept apart from the
signals of ``limbeck.traces.errors``, shown, and used only where asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from limbeck.traces.errors import ErrorSignal, mark_error
from limbeck.traces.schema import ToolCall, Trace


def _any(*patterns: str) -> str:
    return "(?:" + "|".join(patterns) + ")"


# Tools and commands that show what is written somewhere: whatever they show is content.
_READING_TOOL = re.compile(
    r"(?i)(?:\w+__)?(?:read|view|open|cat|fetch|show|grep|glob|search|find|list|ls)(?:[_-]?\w*)?"
)
_READING_COMMAND = re.compile(
    r"\s*(?:cd [^;&|]+&&\s*)?(?:sudo )?"
    + _any(
        r"cat|head|tail|less|more|sed|awk|grep|rg|ag|find|ls|tree|wc|diff|nl|bat|echo|printf|history|man|jq|strings|xxd",
        r"git (?:log|show|diff|grep|blame)",
    )
    + r"\b"
)
_NUMBERED_LINE = re.compile(r"\s*\d+\s*[\t→|:]")
_PROMPT_LINE = re.compile(r"\((?:Open file|Current directory): .*\)|\S*\$")

_PRINTED_CODE = re.compile(
    r"(?im)^\W{0,4}"
    + _any(
        r"(?:command |process |script )?(?:exited|failed|finished|completed|terminated|returned)(?: with)?(?: an?)?"
        r"(?: non-?zero)?(?: exit)?(?: status| code| return ?code)[:= ]+",
        r"(?:exit|return)[ _-]?(?:code|status)[:= ]+",
        r"<(?:returncode|exit_code|return_code|exitcode)>\s*",
    )
    + r"(?P<code>-?\d{1,3})\b(?!\.\d)|non-?zero exit (?:status|code) (?P<other>\d{1,3})"
)

# A program's name, a colon, and one of the system's own phrases.
_PROGRAM_MESSAGE = re.compile(
    r"(?:\S*/)?[\w.+-]{1,40}(?:\[\d+\])?: .{0,300}"
    + _any(
        r"No such file or directory|command not found|not found|Permission denied|Operation not permitted",
        r"Is a directory|Not a directory|File exists|Directory not empty|No space left on device|Broken pipe",
        r"syntax error\b.{0,60}|invalid option.{0,60}|unrecognized (?:option|argument).{0,60}|Bad substitution",
        r"missing (?:operand|argument).{0,60}|unexpected EOF.{0,60}|Killed|Segmentation fault.{0,30}",
        r"Connection refused|Connection timed out|Could not resolve host.{0,60}",
    )
    + r"[.')]*"
)

# Lines with which compilers, package managers and other programs say that they failed.
_TOOL_MESSAGE = re.compile(
    _any(
        r"(?:fatal|error|Error|ERROR|E|panic|Fatal error|PHP Fatal error): .+",
        r"\[ERROR\] .+|error(?:\[E\d{4}\]| TS\d+| Command failed).*|\S+\(\d+,\d+\): error TS\d+: .+",
        r"\S+:\d+:\d+: (?:fatal )?error: .+|collect2: error: .+|ninja: (?:error|build stopped).+",
        r"npm (?:ERR!|error) .+|ERR_PNPM_\w+ .+|make(?:\[\d+\])?: \*\*\* .+|curl: \(\d+\) .+",
        r"FAILED: .+|BUILD FAILED.*|FAILURE: Build failed.*|\S+ is not recognized as .+",
        r"Segmentation fault.*|Killed|Aborted.*|Unhandled exception.+|Cannot find module .+",
        r"(?:Could not|Unable to|Failed to) .+",
    )
)

# How a short result begins that is nothing but a complaint.
_COMPLAINT = re.compile(
    _any(
        r"<error>|<tool_use_error>|\[?error\]?\s?[:–-]|❌|✗|exception:|(?:\w+\.)*[A-Z]\w*(?:Error|Exception):",
        r"(?:tool|function|command) (?:execution |call )?(?:failed|error)|(?:request|call) failed",
        r"error (?:executing|calling|running|while|in|occurred|reading|writing|fetching|parsing|during)\b",
        r"an (?:unexpected )?(?:error|exception) (?:has )?occurred|invalid (?:argument|input|parameter|json|tool|path)",
        r"(?:failed|unable) to \w+|could not \w+|cannot \w+|can't \w+|access denied|permission denied|unauthorized",
        r"http(?:/\d\.\d)? (?:error )?[45]\d\d|status(?: code)?:? [45]\d\d|[45]\d\d (?:[a-z]+ ?){1,3}\Z",
    ),
    re.IGNORECASE,
)
_MCP = re.compile(r"(?:MCP|McpError|JSON-?RPC)\b\W{0,3}(?:server )?error\b|McpError:")
_RAISED = re.compile(r"\s*(?:E\s+)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning)\b(?::|\Z)")
_OTHER_TRACE = re.compile(
    r"(?m)^"
    + _any(
        r"Exception in thread |thread '[^']{0,80}' panicked at |panic: |goroutine \d+ \[|Uncaught \w*Error",
        r"\w{0,60}(?:Error|Exception): [^\n]*\n\s+at ",
    )
)
_HIDES_CODE = re.compile(r"[^|]\|[^|]|(?:\|\||;) ?(?:true|:)(?:\s|$)")
_LAST_LINES = 4
_SHORT = 600


def heuristic_error(text: str, call: ToolCall | None = None) -> ErrorSignal | None:
    """A sign that an unflagged result is a failure; None where it looks like any other output.

    Of what a reading tool or command shows only a result of one or two lines counts, as the message of the program
    itself.
    """
    lines = text.strip().splitlines()
    while lines and _PROMPT_LINE.fullmatch(lines[-1].strip()):
        lines.pop()
    output = "\n".join(lines).strip()
    if not output:
        return None
    if text.startswith("ERROR:\n"):
        return ErrorSignal("editor_prefix")
    if (signal := _of_json(output)) is not None:
        return signal
    if _is_reading(call):
        complains = _PROGRAM_MESSAGE.fullmatch(lines[-1]) or _COMPLAINT.match(output) or _MCP.match(output)
        return ErrorSignal("tool_message") if complains and len(lines) <= 2 and len(output) <= _SHORT else None
    if len(lines) > 1 and _NUMBERED_LINE.match(lines[0]):
        return None
    return _of_output(output, lines, call)


def _of_output(output: str, lines: Sequence[str], call: ToolCall | None) -> ErrorSignal | None:
    """Sign of failure in the output of a command or a tool, at its beginning or at its end."""
    last = [line.strip() for line in lines[-_LAST_LINES:]]
    if _MCP.match(output):
        return ErrorSignal("mcp_error")
    code = _printed_code("\n".join([*lines[:2], *last]))
    # a printed 0 is the program's own word: whatever stands around it is no failure
    if code is not None:
        return ErrorSignal("printed_exit_code", {"exit_code": code}) if code != 0 else None
    if _OTHER_TRACE.search(output) or ("Traceback (most recent call last):" in output and _RAISED.match(lines[-1])):
        return ErrorSignal("traceback", _hidden_code(call))
    if any(map(_PROGRAM_MESSAGE.fullmatch, (lines[0].strip(), *last))):
        return ErrorSignal("shell_message", _hidden_code(call))
    if _TOOL_MESSAGE.fullmatch(last[-1]) or (len(lines) <= 12 and _TOOL_MESSAGE.fullmatch(lines[0].strip())):
        return ErrorSignal("tool_message", _hidden_code(call))
    return ErrorSignal("complaint") if len(output) <= _SHORT and _COMPLAINT.match(output) else None


def _command(call: ToolCall | None) -> str | None:
    arguments = call.arguments if call is not None and isinstance(call.arguments, Mapping) else {}
    command = arguments.get("command", arguments.get("cmd"))
    return command if isinstance(command, str) else None


def _is_reading(call: ToolCall | None) -> bool:
    command = _command(call)
    if command is not None:
        return _READING_COMMAND.match(command) is not None
    return call is not None and _READING_TOOL.fullmatch(call.name) is not None


def _hidden_code(call: ToolCall | None) -> dict[str, Any]:
    """Whether the command's own exit code could not be seen, behind a pipe or ``|| true``."""
    return {"piped": True} if _HIDES_CODE.search(_command(call) or "") else {}


def _printed_code(text: str) -> int | None:
    codes = [int(match["code"] or match["other"]) for match in _PRINTED_CODE.finditer(text)]
    return codes[-1] if codes else None


def _of_json(output: str) -> ErrorSignal | None:
    """Sign of failure in an object: an error that is not empty, a success that is none, a status of failure."""
    if output[0] not in "{[" or len(output) > 100_000:
        return None
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return None
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, Mapping):
        return None
    if any(value.get(key) is True for key in ("isError", "is_error")) or ("jsonrpc" in value and value.get("error")):
        return ErrorSignal("mcp_error")

    def has(keys: Sequence[str], test: Any) -> bool:
        return any(key in value and test(value[key]) for key in keys)

    # type() is int, for isinstance would take a true for the code 1
    failed = (
        has(("error", "errors", "exception", "errorMessage", "error_message"), bool)
        or has(("success", "ok", "succeeded"), lambda field: field is False)
        or has(("status", "state"), lambda field: str(field).lower() in ("error", "failed", "failure", "timeout"))
        or has(("status_code", "statusCode", "status", "code"), lambda field: type(field) is int and 400 <= field < 600)
        or has(("exit_code", "exitCode", "returncode"), lambda field: type(field) is int and field != 0)
    )
    return ErrorSignal("json_error") if failed else None


def mark_heuristic_errors(trace: Trace, *, as_errors: bool) -> tuple[Trace, list[str]]:
    """The trace with its suspicious results marked, and the detectors that saw those which are new in it.

    ``as_errors`` takes a suspicion for a failure.
    """
    messages = list(trace.messages)
    seen: list[str] = []
    for index, message in enumerate(messages):
        if message.role != "tool" or message.is_error or message.is_ack or not message.content:
            continue
        caller = trace.caller_of(index)
        call = None if caller is None else trace.messages[caller[0]].tool_calls[caller[1]]
        signal = heuristic_error(message.content, call)
        if signal is None:
            continue
        marked = mark_error(message, signal, call=call, tools=trace.tools) if as_errors else message
        messages[index] = marked.model_copy(update={"suspected": signal.detector})
        # what traces share is reported of the first alone, and marked in all
        if index >= trace.context_until:
            seen.append(signal.detector)
    return (trace if messages == trace.messages else trace.model_copy(update={"messages": messages})), seen
