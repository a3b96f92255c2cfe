"""Which reader a file needs, from its content."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from limbeck.errors import TraceError
from limbeck.traces.readers import canonical, claude, openai, openhands, swe_agent
from limbeck.traces.readers.base import Detectors, ReadContext, Reader, ReadReport, Record, iter_records
from limbeck.traces.schema import Trace

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (canonical.READER, claude.READER, openhands.READER, swe_agent.READER, openai.READER)
}
"""Format name -> reader, in the order in which detection asks them."""

_PEEK = 64


def detect_reader(records: Iterable[Record]) -> Reader | None:
    """The first reader that recognises one of the records."""
    for record in records:
        for reader in READERS.values():
            if reader.matches(record.data):
                return reader
    return None


def read_traces(
    paths: Iterable[Path],
    *,
    format: str | None = None,
    detectors: Detectors = "standard",
    report: ReadReport | None = None,
) -> Iterator[Trace]:
    """Stream canonical traces from log files.

    Args:
        paths: Files; each may have its own format.
        format: A key of ``READERS``; detected from each file's content where it is None.
        detectors: ``extended`` also marks failures that the environment states without any flag.
        report: Collects what was left out, by reason.

    Ids are made unique over all files, so that sites and pairs can refer to them.
    """
    if format is not None and format not in READERS:
        raise TraceError(f"unknown trace format {format!r}: expected one of {', '.join(READERS)}")
    report = report if report is not None else ReadReport()
    used: dict[str, int] = {}
    for path in paths:
        for trace in _read_file(path, format, detectors, report):
            used[trace.id] = used.get(trace.id, 0) + 1
            if used[trace.id] > 1:
                trace = trace.model_copy(update={"id": f"{trace.id}~{used[trace.id]}"})
            yield trace


def _read_file(path: Path, format: str | None, detectors: Detectors, report: ReadReport) -> Iterator[Trace]:
    records = iter_records(path, report)
    head = list(itertools.islice(records, _PEEK))
    reader = READERS[format] if format is not None else detect_reader(head)
    if reader is None:
        if head:
            report.skip("unknown_format", file=path.name, line=head[0].line, detail=f"keys {sorted(head[0].data)[:6]}")
        return
    yield from reader.read(itertools.chain(head, records), ReadContext(path, reader.name, report, detectors))
