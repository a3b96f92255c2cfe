"""Canonical traces, as ``limbeck traces ingest`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.readers.base import (
    ReadLog,
    Record,
    RecordReader,
    SkipRecord,
    Totals,
    as_dicts,
    as_number,
    as_text,
    characters,
)
from limbeck.traces.schema import SCHEMA_VERSION, Trace


class LimbeckReader(RecordReader):
    """Canonical traces."""

    name = "limbeck"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """Any version of the schema, so that a newer one is named rather than guessed at."""
        return str(data.get("schema_version", "")).startswith("limbeck.trace/")

    def convert(self, record: Record, log: ReadLog) -> Trace:
        """One trace per line, unchanged."""
        version = record.data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise SkipRecord("unknown_version", f"{version!r}, this reader knows {SCHEMA_VERSION!r}")
        return Trace.model_validate(record.data)

    def totals(self, record: Record) -> Totals:
        """Totals of the messages that no other trace has."""
        shared = as_number(record.data.get("context_until"))
        messages = as_dicts(record.data.get("messages"))[max(0, int(shared or 0)) :]
        return Totals(
            calls=sum(len(as_dicts(message.get("tool_calls"))) for message in messages),
            results=sum(message.get("role") == "tool" for message in messages),
            characters=sum(
                characters(as_text(message.get("content")), as_text(message.get("reasoning"))) for message in messages
            ),
        )
