"""Trace files: logs, canonical traces, failed calls and preference pairs, and figures of what was found in them."""

from __future__ import annotations

import glob
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from limbeck.errors import TraceError, one_line
from limbeck.traces.errors import check_call
from limbeck.traces.failed_calls import FailedCall
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.readers.base import Detectors, as_dict, as_dicts, iter_records
from limbeck.traces.redact import Redactor, default_redactor
from limbeck.traces.schema import Message, PreferencePair, Trace, describe_validation
from limbeck.utils.files import package_file
from limbeck.utils.jsonl import COMPRESSED, STDIN, parse, read_records

LOG_ENDINGS = (".jsonl", ".json", ".ndjson", ".traj", ".eval")
"""Name endings of the files of a folder that are read as logs, packed ones included."""


def find_files(paths: str | Sequence[str | Path], key: str = "") -> list[Path]:
    """The files that paths, folders and globs stand for, in order and each once; ``-`` is standard input.

    What stands for none is an error, which names ``key``, the setting that it was given in.
    """
    log_files: list[Path] = []
    for pattern in [paths] if isinstance(paths, str) else paths:
        files = _files_of(Path(package_file(pattern)).expanduser())
        if not files:
            lacking = f"{key}: there is no file" if key else "there is no trace file"
            raise TraceError(f"{lacking} {str(pattern)!r}; give log files, folders or globs")
        log_files += [file for file in files if file not in log_files]
    return log_files


def _files_of(path: Path) -> list[Path]:
    if path.is_file() or str(path) == STDIN:
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and _is_log(file))
    return [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]


def _is_log(path: Path) -> bool:
    name = path.name.lower()
    if name.endswith(COMPRESSED):
        name = name.rpartition(".")[0]
    return name.endswith(LOG_ENDINGS) and not name.startswith(".")


# -- logs --------------------------------------------------------------------------------------------------------------


class LogReadingConfig(BaseModel):
    """How logs are read: settings that run files and commands share."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    format: str | None = None
    """Log format; default: by each file's content."""
    detectors: Detectors = "standard"
    """Which signs of a failed call count; ``extended`` also takes failures that carry no flag in the log."""
    redact: bool = True
    """Take keys, tokens and passwords out of logs."""
    strip_reasoning: bool = False
    """Leave out the assistant's reasoning parts."""


@dataclass(frozen=True)
class IngestOptions:
    """How logs are read, and what a user gives besides.

    Attributes:
        redactor: By which rules secrets are taken out; None takes the kept ones.
        tools: Schemas for traces whose log has none.
        system: System prompt for traces whose log has none.
    """

    reading: LogReadingConfig = field(default_factory=LogReadingConfig)
    redactor: Redactor | None = None
    tools: Sequence[dict[str, Any]] = ()
    system: str | None = None


@dataclass
class IngestStats:
    """Figures over all traces read; what branches share is counted once.

    Attributes:
        turns: Messages other than system prompts.
        tool_results: Answers of the environment; a harness's fixed acknowledgements are not among them.
        rewarded: Traces with a final reward.
        errors: (kind, detector) -> failed results.
        redacted: Kind of secret -> how many were taken out.
    """

    traces: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_results: int = 0
    rewarded: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    log: ReadLog = field(default_factory=ReadLog)

    def add(self, trace: Trace) -> None:
        """Count one trace."""
        self.traces += 1
        self.rewarded += trace.final_reward is not None
        for _, message in trace.new_messages():
            self.turns += message.role != "system"
            self.tool_calls += len(message.tool_calls)
            self.tool_results += message.role == "tool" and not message.is_ack
            if message.is_error:
                self.errors[message.error_kind or "environment", message.detector or "flag"] += 1

    def summary(self) -> dict[str, Any]:
        """The figures in the form that the command line prints as JSON."""
        by_kind: Counter[str] = Counter()
        for (kind, _), count in self.errors.items():
            by_kind[kind] += count
        return {
            "traces": self.traces,
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_results": self.tool_results,
            "errors": self.errors.total(),
            "errors_by_kind": dict(by_kind.most_common()),
            "redacted": self.redacted.total(),
            "skipped": dict(self.log.skipped.most_common()),
        }


def ingest(paths: Sequence[Path], options: IngestOptions, stats: IngestStats) -> Iterator[Trace]:
    """Stream the traces of log files, clean and counted in ``stats``."""
    reading = options.reading
    traces = read_traces(paths, format=reading.format, detectors=reading.detectors, log=stats.log)
    redactor = options.redactor or default_redactor()
    for trace in traces:
        if options.tools and not trace.tools:
            trace = with_tools(trace, options.tools)
        if options.system and not any(message.role == "system" for message in trace.messages):
            trace = with_system(trace, options.system)
        if reading.strip_reasoning:
            trace = trace.without_reasoning()
        # last, so that tools and a system prompt that a user gives are cleaned too
        if reading.redact:
            trace, redacted = redactor.trace(trace)
            stats.redacted += redacted
        stats.add(trace)
        yield trace


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Tool schemas of a JSON file, a list in the form of OpenAI or Anthropic, in the chat template's form."""
    try:
        content = parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"the tools {str(path)!r} cannot be read: {one_line(error)}") from error
    tools = as_dicts(content.get("tools") if isinstance(content, dict) else content)
    schemas = [tool if "function" in tool else {"type": "function", "function": _function(tool)} for tool in tools]
    if not schemas or not all(isinstance(as_dict(tool["function"]).get("name"), str) for tool in schemas):
        raise TraceError(f"{str(path)!r} holds no tools: expected a JSON list of schemas with names")
    return schemas


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key not in ("input_schema", "type")}
    return {**function, "parameters": tool["input_schema"]} if "input_schema" in tool else function


def with_tools(trace: Trace, tools: Sequence[dict[str, Any]]) -> Trace:
    """The trace with schemas that its log lacks; failed calls that do not fit them get the kind that those tell."""
    messages = list(trace.messages)
    for index, message in enumerate(messages):
        caller = trace.caller_of(index) if message.is_error else None
        problem = None if caller is None else check_call(trace.messages[caller[0]].tool_calls[caller[1]], tools)
        if problem is not None:
            update = {"error_kind": problem[0], "error_meta": {**message.error_meta, **problem[1]}}
            messages[index] = message.model_copy(update=update)
    return trace.model_copy(update={"tools": list(tools), "messages": messages})


def with_system(trace: Trace, text: str) -> Trace:
    """The trace with a system prompt in front; what refers to messages by their number moves with them."""
    pairs = [
        pair.model_copy(update={"message_index": None if pair.message_index is None else pair.message_index + 1})
        for pair in trace.preference_pairs
    ]
    return trace.model_copy(
        update={
            "messages": [Message(role="system", content=text), *trace.messages],
            # 0 stays 0: a trace that shares no message does not share the new prompt
            "context_until": trace.context_until + 1 if trace.context_until else 0,
            "preference_pairs": pairs,
        }
    )


# -- failed calls and pairs ------------------------------------------------------------------------------------------


def read_failed_calls(path: Path) -> Iterator[FailedCall]:
    """The failed calls of a file written by ``limbeck traces errors``; any other line is an error with its place."""
    if not path.is_file():
        raise TraceError(f"there is no file of failed calls {str(path)!r}: write one with `limbeck traces errors`")

    def refuse(line: int, why: str) -> None:
        raise TraceError(f"{path.name}:{line}: not a failed call ({why})")

    for line, value in read_records(path, bad=refuse):
        try:
            yield FailedCall.model_validate(value)
        except ValidationError as error:
            refuse(line, describe_validation(error))


def read_pairs(files: Iterable[Path], log: ReadLog) -> list[PreferencePair]:
    """Preference pairs of files written by ``limbeck traces pairs``; a line that is none is counted."""
    pairs: list[PreferencePair] = []
    for path in files:
        for record in iter_records(path, log):
            try:
                pairs.append(PreferencePair.model_validate(record.data))
            except ValidationError as error:
                log.of_file(path).skip("no_pair", record.line, describe_validation(error))
    return pairs


def attach_pairs(
    traces: Iterable[Trace], pairs: Iterable[PreferencePair], skipped: Counter[str] | None = None
) -> Iterator[Trace]:
    """The traces with their pairs added, by trace id.

    A pair whose trace is not there is counted in ``skipped`` as ``pair_without_trace``, and an error without it.
    """
    by_trace: dict[str, list[PreferencePair]] = defaultdict(list)
    for pair in pairs:
        by_trace[pair.trace_id or ""].append(pair)
    for trace in traces:
        pairs_of_trace = by_trace.pop(trace.id, [])
        yield (
            trace.model_copy(update={"preference_pairs": [*trace.preference_pairs, *pairs_of_trace]})
            if pairs_of_trace
            else trace
        )
    if not by_trace:
        return
    if skipped is None:
        raise TraceError(f"preference pairs refer to traces that are not in the file, such as {next(iter(by_trace))!r}")
    skipped["pair_without_trace"] += sum(map(len, by_trace.values()))
