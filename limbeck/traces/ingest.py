"""From log files to clean canonical traces, with the figures of what was found and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limbeck.traces.readers import ReadReport, read_traces
from limbeck.traces.readers.base import Detectors
from limbeck.traces.redact import redact_trace
from limbeck.traces.schema import Trace


@dataclass(frozen=True)
class IngestOptions:
    """How logs are read.

    Attributes:
        format: Name of a reader; None detects it from each file's content.
        redact: Take secrets out.
        strip_reasoning: Take hidden reasoning out of all messages.
        detectors: ``extended`` also marks failures that carry no flag in the log.
    """

    format: str | None = None
    redact: bool = True
    strip_reasoning: bool = False
    detectors: Detectors = "standard"


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
    report: ReadReport = field(default_factory=ReadReport)

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
            "skipped": dict(self.report.skipped.most_common()),
        }


def ingest(paths: Sequence[Path], options: IngestOptions, stats: IngestStats) -> Iterator[Trace]:
    """Stream the traces of log files, clean and counted in ``stats``."""
    traces = read_traces(paths, format=options.format, detectors=options.detectors, report=stats.report)
    for trace in traces:
        if options.strip_reasoning:
            trace = trace.without_reasoning()
        if options.redact:
            trace, found = redact_trace(trace)
            stats.redacted += found
        stats.add(trace)
        yield trace
