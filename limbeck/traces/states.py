"""Recorded failed states as prompts: what an agent had seen before an action failed, with a hint for its teacher."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from limbeck.errors import TraceError
from limbeck.traces.dataset import TraceDataset, TracesConfig, load_traces
from limbeck.traces.hints import HintGenerator, LayeredHints, RawErrorHints, TemplateHints
from limbeck.traces.sites import SiteFinder


class FailedStatesConfig(BaseModel):
    """How failed states are found in agent logs, and what a teacher is told about them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    format: str | None = None
    """Log format; default: by each file's content."""
    redact: bool = True
    """Take keys, tokens and passwords out of logs."""
    hints: list[Literal["template", "raw"]] = Field(default=["template", "raw"], min_length=1)
    """Where hints come from, first to last."""
    self_teacher: Literal["frozen", "ema"] = "frozen"
    """Where there is no ``teacher`` the student itself reads the hints: its start as it was, or a moving average of its
    weights."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """With ``ema``: share of the average that stays at each step."""


class FailedStates:
    """Records of failed states, by number: ``messages`` up to the action that failed, ``tools``, ``hint``, ``idx``,
    ``loss_multiplier`` (the site's weight) and ``source`` (trace and message).

    Attributes:
        dropped: failures that are no state to learn from, by reason.
        fingerprint: of all records.
    """

    def __init__(self, traces: TraceDataset, hints: Sequence[HintGenerator]) -> None:
        finder = SiteFinder(hints=LayeredHints(tuple(hints)))
        self.records: list[dict[str, Any]] = []
        for trace in traces.traces:
            messages = trace.to_messages()
            for site in finder.find(trace):
                self.records.append(
                    {
                        "messages": messages[: site.target],
                        "tools": trace.tools or None,
                        "hint": site.hint,
                        "idx": len(self.records),
                        "loss_multiplier": site.weight,
                        "source": f"{trace.id}, message {site.target}",
                    }
                )
        self.dropped: Counter[str] = traces.dropped + finder.dropped
        self.fingerprint = hashlib.sha256(json.dumps(self.records, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[index]


def load_failed_states(files: str | list[str], config: FailedStatesConfig) -> FailedStates:
    """The failed states of agent logs; an error where there is none."""
    generators: dict[str, HintGenerator] = {"template": TemplateHints(), "raw": RawErrorHints()}
    traces = load_traces(TracesConfig(train=files, format=config.format, redact=config.redact))
    found = FailedStates(traces, [generators[name] for name in config.hints])
    if not found.records:
        raise TraceError(
            f"data.train holds no failed state to start from: {len(traces)} traces, left out {dict(found.dropped)}"
        )
    return found
