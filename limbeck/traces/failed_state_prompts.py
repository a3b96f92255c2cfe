"""Recorded failed states as prompts: what an agent had seen before an action failed, with a hint for its teacher."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from limbeck.data.sources import CONTEXT
from limbeck.errors import TraceError
from limbeck.traces.dataset import TraceDataset, TracesConfig, load_traces
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.hints import HintSource, LayeredHints, layered_hints


class HintAfterFailureConfig(BaseModel):
    """What a teacher is told about an answer whose tool call has just failed."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    hints: list[HintSource] = Field(default=["template", "raw"], min_length=1)
    """Where hints come from, first to last."""
    only_failed: bool = False
    """Compare answers whose hint a teacher reads, and no other ones; for a student that is its own teacher, which has
    nothing to say about the others."""


class FailedStatesConfig(BaseModel):
    """How failed states are found in agent logs, and which hints a teacher reads about them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    format: str | None = None
    """Log format; default: by each file's content."""
    redact: bool = True
    """Take keys, tokens and passwords out of logs."""
    hints: list[HintSource] = Field(default=["template", "raw"], min_length=1)
    """Where hints come from, first to last."""
    self_teacher: Literal["frozen", "ema"] = "frozen"
    """Where there is no ``teacher`` the student itself reads the hints: its start as it was, or a moving average of its
    weights."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """With ``ema``: share of the average that stays at each step."""


class FailedStatePrompts:
    """Records of failed states, by number: ``messages`` up to the action that failed, ``tools``, ``teacher_context``
    (the hint), ``idx``, ``loss_multiplier`` (the failed call's weight) and ``source`` (trace and message).

    Attributes:
        skipped: failures that are no state to learn from, by reason.
        fingerprint: of all records.
    """

    def __init__(self, traces: TraceDataset, hints: LayeredHints) -> None:
        finder = FailedCallFinder(hints)
        self.records: list[dict[str, Any]] = []
        for trace in traces.traces:
            messages = trace.to_messages()
            for failed_call in finder.find(trace):
                self.records.append(
                    {
                        "messages": messages[: failed_call.target],
                        "tools": trace.tools or None,
                        CONTEXT: failed_call.hint,
                        "idx": len(self.records),
                        "loss_multiplier": failed_call.weight,
                        "source": f"{trace.id}, message {failed_call.target}",
                    }
                )
        self.skipped: Counter[str] = traces.skipped + finder.skipped
        self.fingerprint = hashlib.sha256(json.dumps(self.records, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[index]


def load_failed_states(files: str | list[str], config: FailedStatesConfig) -> FailedStatePrompts:
    """The failed states of agent logs; an error where there is none."""
    traces = load_traces(TracesConfig(train=files, format=config.format, redact=config.redact))
    prompts = FailedStatePrompts(traces, layered_hints(config.hints))
    if not prompts.records:
        raise TraceError(
            f"data.train holds no failed state to start from: {len(traces)} traces, left out {dict(prompts.skipped)}"
        )
    return prompts
