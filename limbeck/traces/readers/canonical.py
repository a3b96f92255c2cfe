"""Canonical traces, as ``limbeck traces ingest`` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from limbeck.traces.readers.base import ReadContext, Reader, Record, SkipRecord, convert_records
from limbeck.traces.schema import SCHEMA_VERSION, Trace


def matches(data: Mapping[str, Any]) -> bool:
    """Any version of the schema, so that a newer one is named rather than guessed at."""
    return str(data.get("schema_version", "")).startswith("limbeck.trace/")


def read(records: Iterator[Record], context: ReadContext) -> Iterator[Trace]:
    """One trace per line, unchanged."""
    yield from convert_records(records, context, _convert)


def _convert(record: Record, context: ReadContext) -> Trace:
    version = record.data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SkipRecord("unknown_version", f"{version!r}, this reader knows {SCHEMA_VERSION!r}")
    return Trace.model_validate(record.data)


READER = Reader("limbeck", matches, read)
