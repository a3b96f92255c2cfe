"""Readers of agent logs: one module per format, all producing ``limbeck.traces.schema.Trace``."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from limbeck.errors import TraceError
from limbeck.traces.heuristic_errors import mark_heuristic_errors
from limbeck.traces.readers.anthropic import AnthropicReader
from limbeck.traces.readers.atif import ATIFReader
from limbeck.traces.readers.base import Detectors, Reader, ReadLog, Record, Totals, iter_records, unnamed
from limbeck.traces.readers.claude_code import ClaudeCodeReader
from limbeck.traces.readers.codex import CodexReader
from limbeck.traces.readers.gemini import GeminiReader
from limbeck.traces.readers.inspect_log import InspectReader
from limbeck.traces.readers.limbeck import LimbeckReader
from limbeck.traces.readers.llamafactory import LLaMAFactoryReader
from limbeck.traces.readers.mini_swe_agent import MiniSWEAgentReader
from limbeck.traces.readers.openai_chat import OpenAIChatReader
from limbeck.traces.readers.openai_responses import OpenAIResponsesReader
from limbeck.traces.readers.openhands import OpenHandsReader
from limbeck.traces.readers.openhands_v1 import OpenHandsV1Reader
from limbeck.traces.readers.otel import OpenTelemetryReader
from limbeck.traces.readers.sharegpt import ShareGPTReader
from limbeck.traces.readers.swe_agent import SWEAgentReader
from limbeck.traces.readers.tau2 import Tau2Reader
from limbeck.traces.readers.verifiers import VerifiersReader
from limbeck.traces.schema import Trace

__all__ = ["READERS", "ReadLog", "Reader", "detect_reader", "read_traces"]

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        LimbeckReader(),
        AnthropicReader(),
        ATIFReader(),
        ClaudeCodeReader(),
        CodexReader(),
        GeminiReader(),
        InspectReader(),
        LLaMAFactoryReader(),
        MiniSWEAgentReader(),
        OpenAIChatReader(),
        OpenAIResponsesReader(),
        OpenHandsReader(),
        OpenHandsV1Reader(),
        OpenTelemetryReader(),
        ShareGPTReader(),
        SWEAgentReader(),
        Tau2Reader(),
        VerifiersReader(),
    )
}
"""Format name -> reader."""

_PEEK = 64
_EVENT_FILE = re.compile(r"event-\d+-.*\.json")
_SHOWN_KEYS, _SHOWN_SHAPES = 8, 3


def detect_reader(records: Iterable[Record], file: str = "the log") -> Reader | None:
    """The reader of the first record that one recognises; a record that two recognise is an error that names both."""
    for record in records:
        matching = [reader for reader in READERS.values() if reader.detect(record.data)]
        matching = [reader for reader in matching if not reader.general] or matching
        if len(matching) > 1:
            names = " and ".join(reader.name for reader in matching)
            raise TraceError(
                f"{file}:{record.line} looks like {names} (a record with {_keys(record)}): say which with --format"
            )
        if matching:
            return matching[0]
    return None


def _keys(record: Record) -> str:
    keys = sorted(record.data)[:_SHOWN_KEYS]
    more = len(record.data) - len(keys)
    return f"keys {', '.join(keys) or 'none'}" + (f" and {more} more" if more else "")


def _seen(head: Sequence[Record]) -> str:
    """Shapes of a file's records, the most frequent shapes first."""
    shapes = Counter(map(_keys, head)).most_common()
    common = "; ".join(f"{count} with {keys}" for keys, count in shapes[:_SHOWN_SHAPES])
    return f"records: {common}" + (
        f"; {len(shapes) - _SHOWN_SHAPES} other shapes" if len(shapes) > _SHOWN_SHAPES else ""
    )


def read_traces(
    paths: Iterable[Path],
    *,
    format: str | None = None,
    detectors: Detectors = "standard",
    log: ReadLog | None = None,
) -> Iterator[Trace]:
    """Stream canonical traces from log files.

    Args:
        paths: Files; each may have its own format.
        format: A key of ``READERS``; detected from each file's content where it is None.
        detectors: ``extended`` also marks failures that the environment states without any flag.
        log: Collects what was left out, by reason.

    A trace that the log does not name is named by its content, and one that is there a second time is counted and left
    out, so that failed calls and pairs refer to the same trace whatever files are read with it, and in whatever order.
    Rollouts of one group may be equal; they are known by how often one file has them. Where a trace goes on from a
    whole one before it in its file, as logged requests do, that beginning is context (``read_before``). At the end of a
    file, what its records hold must be in its traces or counted as left out; otherwise ``TraceError`` shows both.
    """
    if format is not None and format not in READERS:
        raise TraceError(f"unknown trace format {format!r}: expected one of {', '.join(READERS)}")
    log = log if log is not None else ReadLog()
    names = _Names()
    for path, files in _logs(paths):
        names.in_file.clear()
        ends: set[bytes] = set()
        for trace in _read_log(path, files, format, detectors, log):
            line = trace.origin.line if trace.origin else None
            name = names.of(trace, is_named=trace.id != unnamed(path, line))
            if name is None:
                log.of_file(path).skip("duplicate_trace", line, trace.id)
                continue
            shared = _known_beginning(trace, ends) if trace.group_id is None else 0
            if shared > trace.context_until:
                log.of_file(path).skip("read_before", line, trace.id, shared - trace.context_until)
            changes = {"id": name, "context_until": max(shared, trace.context_until)}
            yield trace.model_copy(
                update={key: value for key, value in changes.items() if getattr(trace, key) != value}
            )


def _known_beginning(trace: Trace, ends: set[bytes]) -> int:
    """How many of its messages are a whole trace whose hash is in ``ends``, which learns this one's."""
    state, shared = hashlib.sha256(), 0
    for count, message in enumerate(trace.messages, 1):
        state.update(message.model_dump_json(exclude={"weight"}, exclude_defaults=True).encode())
        if state.digest() in ends and count < len(trace.messages):
            shared = count
    ends.add(state.digest())
    return shared


class _Names:
    """Ids of the traces of a run, and which of them were there before.

    Attributes:
        in_file: Content -> how often the file that is being read had it so far.
    """

    def __init__(self) -> None:
        self.in_file: Counter[str] = Counter()
        self._known: dict[str, Counter[str]] = {}
        self._used: set[str] = set()

    def of(self, trace: Trace, is_named: bool) -> str | None:
        """The trace's id; None where it was there before."""
        content = _content(trace)
        name = trace.id if is_named else content[:16]
        self.in_file[content] += 1
        grouped = trace.group_id is not None
        known = self._known.setdefault(name if grouped else "", Counter())
        if known[content] >= (self.in_file[content] if grouped else 1):
            return None
        known[content] += 1
        if name in self._used:
            name = f"{name}~{content[:8]}"
        if name in self._used:
            name = f"{name}.{known[content]}"
        self._used.add(name)
        return name


def _content(trace: Trace) -> str:
    """A hash of what a trace says, wherever and under whatever name it was logged."""
    fields = {"tools", "messages", "final_reward", "context_until", "preference_pairs"}
    return hashlib.sha256(trace.model_dump_json(include=fields, exclude_defaults=True).encode()).hexdigest()


def _logs(paths: Iterable[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Files with what they are called: those of a folder that holds a file per event are one log, with its name."""
    for folder, files in itertools.groupby(paths, lambda p: p.parent if _EVENT_FILE.fullmatch(p.name) else None):
        if folder is None:
            yield from ((file, [file]) for file in files)
        else:
            yield (folder.parent if folder.name == "events" else folder), list(files)


def _records(files: Sequence[Path], log: ReadLog) -> Iterator[Record]:
    if len(files) == 1:
        return iter_records(files[0], log)
    return (Record(number, record.data) for number, file in enumerate(files, 1) for record in iter_records(file, log))


def _read_log(
    path: Path, files: Sequence[Path], format: str | None, detectors: Detectors, log: ReadLog
) -> Iterator[Trace]:
    records = _records(files, log)
    head = list(itertools.islice(records, _PEEK))
    reader = READERS[format] if format is not None else detect_reader(head, path.name)
    if reader is None:
        if head:
            log.of_file(path).skip("unknown_format", head[0].line, _seen(head))
        return
    log = log.of_file(path, reader.name, detectors)
    raw_totals = trace_totals = Totals()

    def counted() -> Iterator[Record]:
        nonlocal raw_totals
        for record in itertools.chain(head, records):
            raw_totals += reader.totals(record)
            yield record

    for trace in reader.read(counted(), log):
        trace_totals += Totals.of_messages(message for _, message in trace.new_messages())
        trace, suspected = mark_heuristic_errors(trace, as_errors=detectors == "extended")
        log.suspected.update(suspected if detectors == "standard" else ())
        yield trace
    if raw_totals != trace_totals + log.skipped_totals:
        raise TraceError(
            f"{path.name} holds {raw_totals}; read as {reader.name}, its traces hold {trace_totals}, and "
            f"{log.skipped_totals} were skipped for a known reason. The rest would be missing: give the right --format"
        )
