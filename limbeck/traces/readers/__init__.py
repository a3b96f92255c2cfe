"""Readers of agent logs: one module per format, all producing ``limbeck.traces.schema.Trace``."""

from limbeck.traces.readers.base import ReadReport
from limbeck.traces.readers.detect import READERS, read_traces

__all__ = ["READERS", "ReadReport", "read_traces"]
