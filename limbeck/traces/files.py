"""Trace files: logs, canonical traces, error sites and preference pairs, and figures of what was found in them."""

from __future__ import annotations

import glob
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from limbeck.errors import TraceError
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.readers.base import Detectors, iter_records
from limbeck.traces.redact import Redactor, default_redactor
from limbeck.traces.schema import PreferencePair, Trace, describe_validation
from limbeck.traces.sites import Site
from limbeck.utils.files import Output
from limbeck.utils.jsonl import read_records


def find_files(given: str | list[str], key: str) -> list[Path]:
    """The files that paths and globs stand for, in order; one that stands for none is an error."""
    found: list[Path] = []
    for pattern in [given] if isinstance(given, str) else given:
        names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            raise TraceError(f"{key}: there is no file {pattern!r}; give trace files or globs")
        found += [file for file in files if file not in found]
    return found


# -- logs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IngestOptions:
    """How logs are read.

    Attributes:
        format: Name of a reader; None detects it from each file's content.
        redact: Take secrets out.
        redactor: By which rules; None takes the kept ones.
        strip_reasoning: Take hidden reasoning out of all messages.
        detectors: ``extended`` also marks failures that carry no flag in the log.
    """

    format: str | None = None
    redact: bool = True
    strip_reasoning: bool = False
    detectors: Detectors = "standard"
    redactor: Redactor | None = None


@dataclass
class IngestStats:
    """Figures over all traces read; what branches share is counted once.

    Attributes:
        turns: Messages other than system prompts.
        tool_results: Answers of the environment; a harness's fixed acknowledgements are not among them.
        errors: (kind, detector) -> failed results.
        redacted: Kind of secret -> how many were taken out.
    """

    traces: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_results: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    log: ReadLog = field(default_factory=ReadLog)

    def add(self, trace: Trace) -> None:
        """Count one trace."""
        self.traces += 1
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
    traces = read_traces(paths, format=options.format, detectors=options.detectors, log=stats.log)
    redactor = options.redactor or default_redactor()
    for trace in traces:
        if options.strip_reasoning:
            trace = trace.without_reasoning()
        if options.redact:
            trace, found = redactor.trace(trace)
            stats.redacted += found
        stats.add(trace)
        yield trace


def write_traces(traces: Iterable[Trace], path: Path) -> int:
    """Write canonical traces, one per line; returns how many."""
    count = 0
    with Output(path) as out:
        for trace in traces:
            out.line(trace.to_json())
            count += 1
    return count


# -- sites and pairs ---------------------------------------------------------------------------------------------------


def read_sites(path: Path) -> Iterator[Site]:
    """The sites of a file written by ``limbeck traces sites``; a line that is no site is an error with its place."""
    if not path.is_file():
        raise TraceError(f"there is no site file {str(path)!r}: write one with `limbeck traces sites`")

    def refuse(line: int, why: str) -> None:
        raise TraceError(f"{path.name}:{line}: not an error site ({why})")

    for line, value in read_records(path, bad=refuse):
        try:
            yield Site.model_validate(value)
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
    traces: Iterable[Trace], pairs: Iterable[PreferencePair], dropped: Counter[str] | None = None
) -> Iterator[Trace]:
    """The traces with their pairs added, by trace id.

    A pair whose trace is not there is counted in ``dropped`` as ``pair_without_trace``, and an error without it.
    """
    by_trace: dict[str, list[PreferencePair]] = defaultdict(list)
    for pair in pairs:
        by_trace[pair.trace_id or ""].append(pair)
    for trace in traces:
        found = by_trace.pop(trace.id, [])
        yield trace.model_copy(update={"preference_pairs": [*trace.preference_pairs, *found]}) if found else trace
    if not by_trace:
        return
    if dropped is None:
        raise TraceError(f"preference pairs refer to traces that are not in the file, such as {next(iter(by_trace))!r}")
    dropped["pair_without_trace"] += sum(map(len, by_trace.values()))
