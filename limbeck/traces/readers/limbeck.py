"""Canonical traces, as ``limbeck traces ingest`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.readers.base import ReadLog, Record, RecordReader, SkipRecord
from limbeck.traces.schema import SCHEMA_VERSION, Trace


class LimbeckReader(RecordReader):
    """Canonical traces."""

    name = "limbeck"
    about = "canonical traces, as `limbeck traces ingest` writes them"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Any version of the schema, so that a newer one is named rather than guessed at."""
        return str(data.get("schema_version", "")).startswith("limbeck.trace/")

    def convert(self, record: Record, log: ReadLog) -> Trace:
        """One trace per line, unchanged."""
        version = record.data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise SkipRecord("unknown_version", f"{version!r}, this reader knows {SCHEMA_VERSION!r}")
        return Trace.model_validate(record.data)
